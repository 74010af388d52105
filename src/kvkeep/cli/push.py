"""``kvkeep push``: store entries in a remote, where other hosts find them."""

from __future__ import annotations

from pathlib import Path

import click

from kvkeep.cli.choosing import Choice, choosing_options
from kvkeep.cli.common import (
    SHORT_KEY,
    Format,
    emit_json,
    entries_word,
    examples,
    format_option,
    human_size,
    open_store,
    remote_option,
    say,
    store_option,
)
from kvkeep.cli.progress import progress_bars
from kvkeep.errors import InvalidRequestError


@click.command(
    "push",
    epilog=examples(
        "kvkeep push support handbook --remote s3://bucket/prefix",
        "kvkeep push --name 'support-*' --remote /mnt/shared/kv",
    ),
)
@click.argument("wanted", metavar="[KEY|NAME]...", nargs=-1)
@remote_option
@choosing_options
@format_option
@store_option
def command(store: Path | None, wanted: tuple[str, ...], remote: str | None, choice: Choice, format: Format) -> None:
    """Store entries in a remote with what they continue: all of them, or those that are given or left by the filters.

    What is there already stays, and costs no upload. Prints one line an entry: the bytes that were sent for it.
    """
    if remote is None:
        raise InvalidRequestError("give --remote, or set $KVKEEP_REMOTE")
    opened = open_store(store, write=True, remote=remote)
    given = [opened.entry(text) for text in wanted] if wanted else opened.entries()
    chosen = [known.entry for known in choice.of(given, opened)]
    sent = 0
    rows: list[dict[str, object]] = []
    with progress_bars("entries") as update:
        for number, entry in enumerate(chosen):
            update("pushing", number, len(chosen))
            pushed = opened.push(entry.key)
            sent += pushed.nbytes
            rows.append({"key": entry.key, "names": list(entry.names), "sent": pushed.nbytes, "marks": pushed.marks})
            if format == "human":
                names = f" ({', '.join(entry.names)})" if entry.names else ""
                what = human_size(pushed.nbytes) if pushed.entries else "already there"
                click.echo(f"{entry.key[:SHORT_KEY]}{names}: {what}")
        update("pushing", len(chosen), len(chosen))
    if format == "json":
        emit_json(rows)
    say(f"{entries_word(len(chosen))} at {remote}, {human_size(sent)} sent")
