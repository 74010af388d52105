"""``kvkeep bench``: how close to the machine's own speed kvkeep is, here and now, and how far ahead of other ways."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.common import Format, emit_json, emit_table, format_option, human_size, say
from kvkeep.cli.progress import progress_bars

if TYPE_CHECKING:
    from kvkeep.bench.results import Result
    from kvkeep.bench.rows import Row

NOT_MEASURED = "not measured"


def _peers(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """The interpreters, by the name of what they have."""
    found = {}
    for value in values:
        name, equals, python = value.partition("=")
        if not equals or not python:
            raise click.BadParameter(f"give NAME=PYTHON, not {value!r}", ctx, parameter)
        found[name] = python
    return found


@click.command("bench")
@click.option("--quick", is_flag=True, help="Smaller sizes, in about three minutes on two idle cores.")
@click.option(
    "--dir",
    "parent",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Measure the disk of this directory; otherwise that of your cache directory.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    callback=_peers,
    metavar="NAME=PYTHON",
    help="Measure llama-cpp, kvboost or mlx-lm too, with the interpreter that has it. May be repeated.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw a chart as well."
)
@format_option
def command(parent: Path | None, quick: bool, peers: dict[str, str], plot: Path | None, format: Format) -> None:
    """Measure kvkeep beside the physical reference and beside other ways to start, and say which bars it reaches.

    Each ratio is one of medians of repetitions that took turns in this run: other work on the machine shifts them
    less than it does times. The ways to start from a prefix are compared on the models of `make demo`, if they are on
    this machine, and on models of real shapes with random weights; nothing is downloaded. It works in a directory of
    its own that takes up to 0.5 GB with --quick and 3 GB without, is removed afterwards, and is in no store. Without
    --quick it takes an hour or so.

    This is a report: the exit code is 0 whatever the figures. Bars that are missed are listed on stderr.

    Example: kvkeep bench --quick --format json
    """
    from kvkeep.bench.bars import bars_of
    from kvkeep.bench.compare import compare, subjects_for
    from kvkeep.bench.machine import facts
    from kvkeep.bench.peers import peers_named
    from kvkeep.bench.plot import check_plot, save
    from kvkeep.bench.run import run_bench
    from kvkeep.bench.sizes import FULL, FULL_SWEEP, QUICK, QUICK_SWEEP

    others = peers_named(peers)
    if plot is not None:
        check_plot(plot)
    machine = facts()
    where = ", ".join(f"{name} {value}" for name, value in machine.items())
    say(where)
    sweep = QUICK_SWEEP if quick else FULL_SWEEP
    with progress_bars("repetitions") as progress:
        rows = run_bench(QUICK if quick else FULL, parent=parent, progress=progress)
        results = compare(subjects_for(sweep), sweep, parent=parent, peers=others, progress=progress)
    rows += bars_of(results)
    if plot is not None:
        save(results, where, plot)
    if format == "json":
        emit_json(
            {
                "machine": machine,
                "command": _command(parent, quick, peers, plot),
                "quick": quick,
                "bars": [row.to_json() for row in rows],
                "ways": [one.to_json() for one in results],
            }
        )
    else:
        _emit_rows(rows)
        _emit_results(results)
    for row in rows:
        if row.reached is False:
            say(f"missed: {row.name}: {_number(row.figure, row.unit)}, {_bar(row)}")


def _command(parent: Path | None, quick: bool, peers: dict[str, str], plot: Path | None) -> str:
    """How to run it again."""
    words = ["kvkeep", "bench", *(["--quick"] if quick else []), *(["--dir", str(parent)] if parent else [])]
    for name, python in peers.items():
        words += ["--peer", f"{name}={python}"]
    return shlex.join([*words, *(["--plot", str(plot)] if plot else []), "--format", "json"])


def _emit_rows(rows: Sequence[Row]) -> None:
    reached = {True: "reached", False: "missed", None: NOT_MEASURED}
    emit_table(
        [("NAME", "left"), ("FIGURE", "right"), ("BAR", "right"), ("REACHED", "left"), ("COMPARED", "left")],
        [[row.name, _number(row.figure, row.unit), _bar(row), reached[row.reached], row.compared] for row in rows],
    )


def _emit_results(results: Sequence[Result]) -> None:
    for (model, weights), group in itertools.groupby(results, lambda one: (one.model, one.weights)):
        click.echo(f"\n{model}, {weights}, float32, on the CPU:")
        emit_table(
            [
                ("PREFIX", "right"),
                ("WAY", "left"),
                ("FIRST TOKEN", "right"),
                ("RATIO", "right"),
                ("TOKENS/S", "right"),
                ("ON DISK", "right"),
                ("MEMORY", "right"),
                ("SAME TOKENS", "left"),
                ("NOTE", "left"),
            ],
            [_cells(one) for one in group],
        )
    if results:
        click.echo("\nFIRST TOKEN is the median time from the call to the first new token, RATIO what it is to")
        click.echo(
            "that from a cache shared in memory, TOKENS/S of the 32 tokens after it, MEMORY by how much a process grew."
        )


def _cells(one: Result) -> list[str]:
    same = {True: "yes", False: "no", None: "-"}
    return [
        f"{one.prefix_tokens:,}" if one.prefix_tokens else "-",
        one.way,
        NOT_MEASURED if one.first_token is None else f"{one.first_token * 1e3:.1f} ms",
        "-" if one.ratio is None else f"{one.ratio:.2f}x",
        "-" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}",
        "-" if one.disk_bytes is None else human_size(one.disk_bytes),
        "-" if one.peak_bytes is None else human_size(one.peak_bytes),
        same[one.same_tokens],
        one.note,
    ]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:.2f}x" if unit == "ratio" else f"{value:.3g} {unit}"


def _bar(row: Row) -> str:
    return f"{'>=' if row.at == 'least' else '<='} {_number(row.bar, row.unit)}"
