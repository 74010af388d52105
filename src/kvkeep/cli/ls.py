"""``kvkeep ls``: what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.chains import as_tree, branches, shared_tokens
from kvkeep.cli.choosing import Choice, Known, choosing_options
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
    examples,
    format_option,
    human_size,
    human_time,
    open_store,
    say,
    store_option,
)
from kvkeep.matching import orphans

if TYPE_CHECKING:
    from kvkeep.store import CacheStore


@click.command(
    "ls",
    epilog=examples(
        "kvkeep ls --tree",
        "kvkeep ls --filter 'size>1GB' --filter 'accessed>7d' --sort size",
        "kvkeep ls --name 'support-*' --format json",
    ),
)
@click.option("--tree", is_flag=True, help="Draw which entries share a beginning, and say what that saves.")
@choosing_options
@format_option
@store_option
def command(store: Path | None, tree: bool, choice: Choice, format: Format) -> None:
    """List the entries, the oldest first, each below the one that it continues.

    An entry that continues another holds the tokens from FROM on; TOKENS are those of the whole prefix, SIZE is what
    its own file takes. With --sort, entries are listed in that order alone, unless --tree is given, too.
    """
    opened = open_store(store)
    entries = opened.entries()
    chosen = choice.of(entries, opened)
    if format == "json":
        emit_json([{**entry_to_json(one.entry), "hits": one.hits, "accessed": one.accessed} for one in chosen])
        return
    if chosen:
        _emit(chosen, flat=choice.order is not None and not tree, drawn=tree, used=choice.asks_for_use)
    found = [one.entry for one in chosen]
    of_all = f" of {len(entries):,}" if choice else ""
    size = human_size(sum(entry.nbytes for entry in found))
    say(f"{entries_word(len(found))}{of_all}, {size} in {opened.path}")
    if tree and (saved := shared_tokens(found)):
        say(f"{count(saved, 'token')} of them {'is' if saved == 1 else 'are'} stored once and shared")
    if not choice:
        _say_what_is_lost(opened)


def _emit(chosen: Sequence[Known], *, flat: bool, drawn: bool, used: bool) -> None:
    """The table: a column FROM where entries continue others, and ACCESSED and HITS where they were asked for."""
    chains = any(one.entry.parent is not None for one in chosen)
    known = {one.entry.key: one for one in chosen}
    ordered = [one.entry for one in chosen]
    if drawn:
        lines = branches(ordered)
    else:
        lines = [("", entry) for entry in ordered] if flat else [("  " * depth, e) for depth, e in as_tree(ordered)]
    starts: list[tuple[str, Align]] = [("FROM", "right")] if chains else []
    uses: list[tuple[str, Align]] = [("ACCESSED", "left"), ("HITS", "right")] if used else []
    columns: list[tuple[str, Align]] = [
        ("KEY", "left"),
        *starts,
        ("TOKENS", "right"),
        ("SIZE", "right"),
        ("CREATED", "left"),
        *uses,
        ("MODEL", "left"),
        ("NAMES", "left"),
    ]
    rows = [
        [
            lead + entry.key[:SHORT_KEY],
            *([f"{entry.start:,}"] if chains else []),
            f"{entry.tokens:,}",
            human_size(entry.nbytes),
            human_time(entry.created),
            *([human_time(known[entry.key].accessed), f"{known[entry.key].hits:,}"] if used else []),
            entry.identity.model[:8],
            ", ".join(entry.names),
        ]
        for lead, entry in lines
    ]
    emit_table(columns, rows)


def _say_what_is_lost(opened: CacheStore) -> None:
    parents = {entry.key: entry.parent for entry in opened.entries()}
    if lost := orphans(parents, entry_files(opened).is_there):
        say(f"{count(len(lost), 'entry continues', 'entries continue')} what is gone: `kvkeep gc` removes what is lost")
