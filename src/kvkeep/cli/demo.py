"""``kvkeep demo``: see on a real model what a store is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.common import Format, emit_json, emit_table, format_option, human_size, say, store_option
from kvkeep.cli.progress import progress_bars

if TYPE_CHECKING:
    from kvkeep.demo.measure import Row

MISSED = 1
"""The exit code when a text differs or the first token does not come soon enough."""


@click.command("demo")
@click.option("--model", help="Hub id or folder of another model.")
@click.option("--gemma", is_flag=True, help="Add Gemma 3 270M, which has sliding windows.")
@format_option
@store_option
def command(store: Path | None, model: str | None, gemma: bool, format: Format) -> None:
    """Show on a real model how much sooner the first token comes from a store, with the same text.

    One process warms the store's warm.toml. A fresh one then answers a question after each prefix, and a third one
    answers the same without a store. Times are medians of alternating pairs; loading the model is not in them.

    The store is --store, otherwise ./cache_store if it is one, otherwise the default one.

    Example: kvkeep demo --gemma
    """
    from kvkeep.demo.run import choose_models, choose_store, run_demo

    candidates = choose_models(model, gemma=gemma)
    where = choose_store(store)
    rows = [row for one in candidates for row in run_demo(one, where, say=say, bars=progress_bars)]
    if format == "json":
        emit_json([row.to_json() for row in rows])
    else:
        _emit_rows(rows)
        _emit_next(where, rows)
    missed = [f"{row.name} ({row.model}): {row.missed}" for row in rows if row.missed]
    for line in missed:
        say(f"missed: {line}")
    if missed:
        raise click.exceptions.Exit(MISSED)


def _emit_rows(rows: Sequence[Row]) -> None:
    emit_table(
        [
            ("NAME", "left"),
            ("MODEL", "left"),
            ("PROMPT", "right"),
            ("REUSED", "right"),
            ("COLD", "right"),
            ("WARM", "right"),
            ("RATIO", "right"),
            ("SAME TEXT", "left"),
            ("ON DISK", "right"),
        ],
        [
            [
                row.name,
                row.model,
                f"{row.prompt_tokens:,}",
                f"{row.reused_tokens:,}",
                f"{row.cold_ttft_s:.3f} s",
                f"{row.warm_ttft_s:.3f} s",
                f"{row.ratio:.1f}x",
                "yes" if row.identical else "no",
                human_size(row.bytes),
            ]
            for row in rows
        ],
    )


def _emit_next(where: Path, rows: Sequence[Row]) -> None:
    click.echo("PROMPT and REUSED count tokens. COLD and WARM are the times to the first token, without and with the")
    click.echo("store, lookup, reading and verifying included.")
    for row in rows:
        click.echo(f"{row.name} ({row.model}): same text: {'yes' if row.identical else 'no'}")
    click.echo("\nTry next:")
    for words in (f"inspect {rows[-1].name}", "ls", "stats", "verify"):
        click.echo(f"  kvkeep --store {where} {words}")
