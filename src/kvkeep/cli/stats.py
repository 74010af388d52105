"""``kvkeep stats``: what the store has saved."""

from __future__ import annotations

from pathlib import Path

import click

from kvkeep.cli.common import Format, emit_json, format_option, human_size, open_store, store_option


@click.command("stats")
@format_option
@store_option
def command(store: Path | None, format: Format) -> None:
    """Show hits, misses by reason, tokens reused and prefilled, and bytes, over all processes.

    The last seconds of a process that was killed are not counted.

    Example: kvkeep stats --format json
    """
    opened = open_store(store)
    totals = opened.journal.totals()
    entries = opened.entries()
    stored = sum(entry.nbytes for entry in entries)
    if format == "json":
        emit_json(
            {
                "entries": len(entries),
                "bytes": stored,
                "hits": totals.hits,
                "misses": dict(sorted(totals.misses.items())),
                "reused_tokens": totals.reused_tokens,
                "prefills": totals.prefills,
                "prefilled_tokens": totals.prefilled_tokens,
                "stored": totals.stored,
                "stored_bytes": totals.stored_bytes,
                "damaged": totals.damaged,
                "load_seconds": totals.load_seconds,
                "prefill_seconds": totals.prefill_seconds,
                "store_seconds": totals.store_seconds,
            }
        )
        return
    misses = sum(totals.misses.values())
    by_reason = sorted(totals.misses.items(), key=lambda item: (-item[1], item[0]))
    lines = [
        ("entries", f"{len(entries):,}"),
        ("on disk", human_size(stored)),
        ("hits", f"{totals.hits:,}"),
        ("misses", f"{misses:,}"),
        *((f"  {code}", f"{number:,}") for code, number in by_reason),
        ("tokens reused", f"{totals.reused_tokens:,} in {totals.load_seconds:.1f} s"),
        ("prefills", f"{totals.prefills:,}"),
        ("tokens prefilled", f"{totals.prefilled_tokens:,} in {totals.prefill_seconds:.1f} s"),
        ("entries written", f"{totals.stored:,}, {human_size(totals.stored_bytes)} in {totals.store_seconds:.1f} s"),
        ("entries damaged", f"{totals.damaged:,}"),
    ]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        click.echo(f"{label.ljust(width)}  {value}")
