"""``kvkeep bench``: how close to the machine's own speed kvkeep is, here and now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.common import Format, emit_json, emit_table, format_option, say
from kvkeep.cli.progress import progress_bars

if TYPE_CHECKING:
    from kvkeep.bench.rows import Row


@click.command("bench")
@click.option("--quick", is_flag=True, help="Smaller sizes, in less than a minute.")
@click.option(
    "--dir",
    "parent",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Measure the disk of this directory; otherwise that of your cache directory.",
)
@format_option
def command(parent: Path | None, quick: bool, format: Format) -> None:
    """Measure kvkeep beside the physical reference, and say which bars it reaches.

    Each ratio is one of medians of repetitions that took turns in this run: other work on the machine shifts them
    less than it does times. Models have random weights; nothing is downloaded. It works in a directory of its own
    that takes up to 0.5 GB, is removed afterwards, and is in no store.

    This is a report: the exit code is 0 whatever the figures. Bars that are missed are listed on stderr.

    Example: kvkeep bench --quick --format json
    """
    from kvkeep.bench.machine import facts
    from kvkeep.bench.run import run_bench
    from kvkeep.bench.sizes import FULL, QUICK

    machine = facts()
    say(", ".join(f"{name} {value}" for name, value in machine.items()))
    with progress_bars("repetitions") as progress:
        rows = run_bench(QUICK if quick else FULL, parent=parent, progress=progress)
    if format == "json":
        emit_json([{**row.to_json(), "quick": quick, "machine": machine} for row in rows])
    else:
        _emit_rows(rows)
    for row in rows:
        if not row.reached:
            say(f"missed: {row.name}: {_number(row.figure, row.unit)}, {_bar(row)}")


def _emit_rows(rows: Sequence[Row]) -> None:
    emit_table(
        [("NAME", "left"), ("FIGURE", "right"), ("BAR", "right"), ("REACHED", "left"), ("COMPARED", "left")],
        [
            [
                row.name,
                _number(row.figure, row.unit),
                _bar(row),
                "reached" if row.reached else "missed",
                row.compared,
            ]
            for row in rows
        ],
    )


def _number(value: float, unit: str) -> str:
    return f"{value:.2f}x" if unit == "ratio" else f"{value:.3g} {unit}"


def _bar(row: Row) -> str:
    return f"{'>=' if row.at == 'least' else '<='} {_number(row.bar, row.unit)}"
