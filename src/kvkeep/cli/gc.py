"""``kvkeep gc``: remove what nobody can want any more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.common import (
    SHORT_KEY,
    Format,
    count,
    emit_json,
    entries_word,
    format_option,
    human_size,
    open_store,
    say,
    store_option,
)
from kvkeep.errors import StoreFullError, StoreWriteError

if TYPE_CHECKING:
    from kvkeep.collection import Collection, Removal


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and change nothing.")
@click.option("--max-bytes", metavar="SIZE", help="What all entries may take, instead of what the store itself says.")
@click.option("--quota", metavar="SIZE", help="What the entries of each namespace may take, instead of that.")
@click.option(
    "--min-free", metavar="SIZE", default="1GiB", show_default=True, help="What is to be free, at most a tenth of all."
)
@click.option(
    "--grace", metavar="SECONDS", type=click.FloatRange(min=0), default=3600, show_default=True,
    help="How long a file that nobody accounts for is left alone.",
)  # fmt: skip
@click.option(
    "--quarantine-days", metavar="DAYS", type=click.FloatRange(min=0), default=30, show_default=True,
    help="How long damaged entries are kept.",
)  # fmt: skip
@format_option
@store_option
def command(
    store: Path | None,
    dry_run: bool,
    max_bytes: str | None,
    quota: str | None,
    min_free: str,
    grace: float,
    quarantine_days: float,
    format: Format,
) -> None:
    """Remove what has expired, what killed processes left behind, and what is over the limits; never what is pinned.

    That is: expired names and the entries that have no other; temporary and lock files that nobody uses; damaged
    entries that were set aside long ago; and entries that the store has no room for.

    Safe beside processes that read and write the store. Entries that the index has not heard of are added to it.
    The exit code is 4 if something could not be removed, or if pinned entries alone are over the limits.

    Example: kvkeep gc --dry-run --max-bytes 5GiB
    """
    opened = open_store(store, write=None if dry_run else True, max_bytes=max_bytes, quota=quota, min_free=min_free)
    done = opened.gc(dry_run=dry_run, grace=grace, quarantine_days=quarantine_days)
    if format == "json":
        emit_json(_to_json(done, dry_run))
    else:
        for removal in done.removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {removal_line(removal)}")
    for removal in done.failed:
        say(f"could not remove {removal_line(removal)}")
    _say_what_was_done(done, dry_run)
    if done.limit is not None:
        raise StoreFullError(
            f"pinned entries and what they continue are {human_size(done.short)} over {done.limit}: raise it, or "
            "remove some names with `kvkeep rm`"
        )
    if done.failed:
        raise StoreWriteError(f"{count(len(done.failed), 'file')} could not be removed")


def _say_what_was_done(done: Collection, dry_run: bool) -> None:
    entries = sum(removal.kind == "entry" for removal in done.removed)
    amount = f"{entries_word(entries)}, {count(len(done.removed) - entries, 'other file')}, {human_size(done.freed)}"
    limit = "" if done.max_bytes is None else f" of {human_size(done.max_bytes)}"
    mended = "" if not done.indexed else f"; {entries_word(done.indexed)} added to the index"
    say(f"{'would remove' if dry_run else 'removed'} {amount}; {human_size(done.used)}{limit} in use{mended}")


def removal_line(removal: Removal) -> str:
    """A removal in a few words: what, how large and why."""
    name = removal.name[:SHORT_KEY] if removal.kind in ("entry", "lock") else removal.name
    size = "" if removal.kind == "lock" else f", {human_size(removal.nbytes)}"
    return f"{removal.kind} {name}{size}: {removal.reason}"


def _to_json(done: Collection, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "removed": [removal_to_json(removal) for removal in done.removed],
        "failed": [removal_to_json(removal) for removal in done.failed],
        "freed": done.freed,
        "indexed": done.indexed,
        "rows_dropped": done.dropped,
        "used": done.used,
        "max_bytes": done.max_bytes,
        "over": None if done.limit is None else {"limit": done.limit, "bytes": done.short},
    }


def removal_to_json(removal: Removal) -> dict[str, object]:
    """A removal as JSON shows it."""
    return {"kind": removal.kind, "name": removal.name, "bytes": removal.nbytes, "reason": removal.reason}
