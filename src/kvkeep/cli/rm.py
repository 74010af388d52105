"""``kvkeep rm``: remove entries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.chains import as_tree
from kvkeep.cli.choosing import Choice, choosing_options
from kvkeep.cli.common import (
    SHORT_KEY,
    Format,
    count,
    emit_json,
    entries_word,
    entry_to_json,
    examples,
    format_option,
    human_size,
    one_line,
    open_store,
    say,
    store_option,
)
from kvkeep.cli.gc import removal_line, removal_to_json
from kvkeep.errors import EntryInUseError, InvalidRequestError

if TYPE_CHECKING:
    from kvkeep.collection import Removal
    from kvkeep.records import Entry
    from kvkeep.store import CacheStore


@click.command(
    "rm",
    epilog=examples(
        "kvkeep rm handbook 1f3a --dry-run",
        "kvkeep rm --filter 'accessed>30d' --filter 'size>100MB' --cascade",
    ),
)
@click.argument("wanted", metavar="[KEY|NAME...]", nargs=-1)
@click.option("--namespace", metavar="NS", help="Remove all of this namespace instead ('' is the default one).")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--cascade", is_flag=True, help="Remove the entries that continue them, too.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@choosing_options
@format_option
@store_option
def command(
    store: Path | None,
    wanted: tuple[str, ...],
    namespace: str | None,
    yes: bool,
    cascade: bool,
    dry_run: bool,
    choice: Choice,
    format: Format,
) -> None:
    """Remove entries, given by key, the start of a key (four digits or more) or name, with the names that they have.

    Or all entries that --model, --name and --filter leave, but for pinned ones: give these by key or name.

    If one of them is not there, nothing is removed; nor if others continue one of them, without --cascade: those could
    not be read without it. Whoever reads an entry at that moment reads it to the end.

    With --namespace, all that is stored in a namespace goes, pinned or not: entries, names, damaged entries that were
    set aside, conversations, and what the index and the counters tell of them.
    """
    if (namespace is None) == (not (wanted or choice)) or (namespace is not None and choice):
        raise InvalidRequestError("give keys or names of entries, or which ones with --filter, or --namespace")
    if namespace is not None:
        _remove_namespace(store, namespace, yes=yes, dry_run=dry_run, format=format)
        return
    opened = open_store(store, write=not dry_run)
    entries = _chosen(opened, wanted, choice, cascade)
    amount = f"{entries_word(len(entries))}, {human_size(sum(entry.nbytes for entry in entries))}"
    if entries and not dry_run and not yes:
        for entry in entries:
            say(one_line(entry))
        _ask(f"Remove {amount}?")
    for entry in entries:
        if not dry_run:
            opened.remove(entry.key)
        if format == "human":
            click.echo(f"{'would remove' if dry_run else 'removed'} {one_line(entry)}")
    if format == "json":
        emit_json([entry_to_json(entry) for entry in entries])
    say(f"would remove {amount}; nothing was removed" if dry_run else f"removed {amount}")


def _remove_namespace(store: Path | None, namespace: str, *, yes: bool, dry_run: bool, format: Format) -> None:
    opened = open_store(store, write=None if dry_run else True)
    if not dry_run and not yes:
        _ask(f"Remove all of the namespace {namespace!r}: {_amount(opened.remove_namespace(namespace, dry_run=True))}?")
    removed = opened.remove_namespace(namespace, dry_run=dry_run)
    if format == "json":
        emit_json([removal_to_json(removal) for removal in removed])
    else:
        for removal in removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {removal_line(removal)}")
    amount = _amount(removed)
    say(f"would remove {amount}; nothing was removed" if dry_run else f"removed {amount}")


def _amount(removed: list[Removal]) -> str:
    entries = sum(removal.kind == "entry" for removal in removed)
    others = count(len(removed) - entries, "other file")
    return f"{entries_word(entries)}, {others}, {human_size(sum(removal.nbytes for removal in removed))}"


def _chosen(store: CacheStore, wanted: tuple[str, ...], choice: Choice, cascade: bool) -> list[Entry]:
    """The entries to remove, those that continue others before these; EntryInUseError if more would be lost."""
    given = [store.entry(text) for text in wanted] if wanted else _not_pinned(store)
    chosen = {known.entry.key: known.entry for known in choice.of(given, store)}
    others = {entry.key: entry for key in chosen for entry in store.descendants(key) if entry.key not in chosen}
    if others and not cascade:
        for entry in others.values():
            say(one_line(entry))
        raise EntryInUseError(
            f"{count(len(others), 'entry continues', 'entries continue')} what is to be removed, and would be lost "
            f"({', '.join(key[:SHORT_KEY] for key in others)}): name them as well, or give --cascade"
        )
    depths = {entry.key: depth for depth, entry in as_tree(store.entries())}
    return sorted((chosen | others).values(), key=lambda entry: -depths.get(entry.key, 0))


def _not_pinned(store: CacheStore) -> list[Entry]:
    from kvkeep.storage.fs import Directory
    from kvkeep.storage.refs import Refs

    pinned = Refs(Directory(store.path, readonly=True)).pinned()
    return [entry for entry in store.entries() if entry.key not in pinned]


def _ask(question: str) -> None:
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort as error:
        say("")  # ends the line of the question
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise InvalidRequestError("nothing was removed, since nobody answered the question: give --yes") from None
    if not agreed:
        say("nothing was removed")
        raise click.exceptions.Exit(1)
