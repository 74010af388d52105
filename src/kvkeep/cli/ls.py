"""``kvkeep ls``: what is stored."""

from __future__ import annotations

from pathlib import Path

import click

from kvkeep.cli.chains import as_tree
from kvkeep.cli.common import (
    SHORT_KEY,
    Align,
    Format,
    count,
    emit_json,
    emit_table,
    entries_word,
    entry_files,
    entry_to_json,
    format_option,
    human_size,
    human_time,
    open_store,
    say,
    store_option,
)
from kvkeep.matching import orphans


@click.command("ls")
@format_option
@store_option
def command(store: Path | None, format: Format) -> None:
    """List the entries, the oldest first, each below the one that it continues.

    An entry that continues another holds the tokens from FROM on; TOKENS are those of the whole prefix, SIZE is what
    its own file takes.

    Example: kvkeep ls --format json
    """
    opened = open_store(store)
    entries = opened.entries()
    if format == "json":
        emit_json([entry_to_json(entry) for entry in entries])
        return
    if entries:
        chains = any(entry.parent is not None for entry in entries)
        rows = [
            [
                "  " * depth + entry.key[:SHORT_KEY],
                *([f"{entry.start:,}"] if chains else []),
                f"{entry.tokens:,}",
                human_size(entry.nbytes),
                human_time(entry.created),
                entry.identity.model[:8],
                ", ".join(entry.names),
            ]
            for depth, entry in as_tree(entries)
        ]
        starts: list[tuple[str, Align]] = [("FROM", "right")] if chains else []
        emit_table(
            [
                ("KEY", "left"),
                *starts,
                ("TOKENS", "right"),
                ("SIZE", "right"),
                ("CREATED", "left"),
                ("MODEL", "left"),
                ("NAMES", "left"),
            ],
            rows,
        )
    say(f"{entries_word(len(entries))}, {human_size(sum(entry.nbytes for entry in entries))} in {opened.path}")
    if lost := orphans({entry.key: entry.parent for entry in entries}, entry_files(opened).is_there):
        say(f"{count(len(lost), 'entry continues', 'entries continue')} what is gone: `kvkeep gc` removes what is lost")
