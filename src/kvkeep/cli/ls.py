"""``kvkeep ls``: what is stored."""

from __future__ import annotations

from pathlib import Path

import click

from kvkeep.cli.common import (
    SHORT_KEY,
    Format,
    emit_json,
    emit_table,
    entries_word,
    entry_to_json,
    format_option,
    human_size,
    human_time,
    open_store,
    say,
    store_option,
)


@click.command("ls")
@format_option
@store_option
def command(store: Path | None, format: Format) -> None:
    """List the entries, the oldest first.

    Example: kvkeep ls --format json
    """
    opened = open_store(store)
    entries = opened.entries()
    if format == "json":
        emit_json([entry_to_json(entry) for entry in entries])
        return
    if entries:
        rows = [
            [
                entry.key[:SHORT_KEY],
                f"{entry.tokens:,}",
                human_size(entry.nbytes),
                human_time(entry.created),
                entry.identity.model[:8],
                ", ".join(entry.names),
            ]
            for entry in entries
        ]
        emit_table(
            [
                ("KEY", "left"),
                ("TOKENS", "right"),
                ("SIZE", "right"),
                ("CREATED", "left"),
                ("MODEL", "left"),
                ("NAMES", "left"),
            ],
            rows,
        )
    say(f"{entries_word(len(entries))}, {human_size(sum(entry.nbytes for entry in entries))} in {opened.path}")
