"""``kvkeep verify``: check every byte of what is stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.chains import as_tree, chain_of
from kvkeep.cli.common import (
    SHORT_KEY,
    Format,
    emit_json,
    entries_word,
    entry_files,
    format_option,
    open_store,
    say,
    store_option,
)
from kvkeep.cli.progress import progress_bars
from kvkeep.errors import EntryDamagedError

if TYPE_CHECKING:
    from kvkeep.store import CacheStore


@click.command("verify")
@click.argument("wanted", metavar="[KEY|NAME]...", nargs=-1)
@click.option(
    "--key-file", type=click.Path(path_type=Path), help="Keys, one of which must have signed; else $KVKEEP_KEY_FILE."
)
@format_option
@store_option
def command(store: Path | None, wanted: tuple[str, ...], key_file: Path | None, format: Format) -> None:
    """Check every byte of the entries, or of those given by key, start of a key or name with what these continue.

    Prints one line an entry. A damaged entry is set aside, where no lookup finds it, and the exit code is 5. With keys,
    entries that none of them has signed are told in the same way, and stay.

    Example: kvkeep verify handbook
    """
    opened = open_store(store, key=key_file)
    targets = _targets(opened, wanted)
    results: list[tuple[str, tuple[str, ...], str | None]] = []
    lines_show_it = format == "human" and sys.stdout.isatty()
    with progress_bars("entries", wanted=not lines_show_it) as update:
        for number, (key, names) in enumerate(targets.items()):
            update("verifying", number, len(targets))
            results.append((key, names, opened.verify(key)))
            if format == "human":
                click.echo(_line(*results[-1]))
        update("verifying", len(targets), len(targets))
    if format == "json":
        emit_json([{"key": k, "names": list(n), "ok": why is None, "reason": why} for k, n, why in results])
    damaged = sum(why is not None for _, _, why in results)
    if damaged:
        raise EntryDamagedError(f"{damaged} of {entries_word(len(results))} damaged")
    say(f"{entries_word(len(results))} whole")


def _targets(opened: CacheStore, wanted: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The keys to check, with their names: also of files that the index has not heard of. Parents before children."""
    if wanted:
        chosen = [opened.entry(text) for text in wanted]
        entries = {entry.key: entry for entry in opened.entries()}
        return {link.key: link.names for entry in chosen for link in chain_of(entries, entry)[0]}
    targets = {entry.key: entry.names for _, entry in as_tree(opened.entries())}
    for key in sorted(entry_files(opened).keys()):
        targets.setdefault(key, ())
    return targets


def _line(key: str, names: tuple[str, ...], reason: str | None) -> str:
    label = key[:SHORT_KEY] + (f" ({', '.join(names)})" if names else "")
    return f"ok       {label}" if reason is None else f"damaged  {label}: {reason}"
