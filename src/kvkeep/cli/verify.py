"""``kvkeep verify``: check every byte of what is stored."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.chains import as_tree, chain_of
from kvkeep.cli.choosing import Choice, choosing_options
from kvkeep.cli.common import (
    SHORT_KEY,
    Format,
    emit_json,
    entries_word,
    entry_files,
    examples,
    format_option,
    open_store,
    say,
    store_option,
)
from kvkeep.cli.progress import progress_bars
from kvkeep.errors import EntryDamagedError

if TYPE_CHECKING:
    from kvkeep.store import CacheStore

Part = Callable[[list[str]], set[str]]

_SLICE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%")


def _read_part(_context: click.Context, _parameter: click.Parameter, given: str | None) -> Part:
    """What of some keys is to be read."""
    if given is None:
        return set
    share, slice_ = _SHARE.fullmatch(given), _SLICE.fullmatch(given)
    if share and float(share[1]) <= 100:
        percent = float(share[1])
        return lambda keys: set(random.sample(keys, math.ceil(len(keys) * percent / 100)))
    if slice_ and 1 <= int(slice_[1]) <= int(slice_[2]):
        number, count = int(slice_[1]) - 1, int(slice_[2])
        return lambda keys: {key for key in keys if int(key, 16) % count == number}
    raise click.BadParameter(f"{given!r} is no part such as 3/7 or 10%")


@click.command(
    "verify",
    epilog=examples(
        "kvkeep verify handbook",
        "kvkeep verify --filter 'accessed<1d' --sort hits",
        "kvkeep verify --read-data 3/7 --repair",
    ),
)
@click.argument("wanted", metavar="[KEY|NAME]...", nargs=-1)
@click.option(
    "--key-file", type=click.Path(path_type=Path), help="Keys, one of which must have signed; else $KVKEEP_KEY_FILE."
)
@click.option(
    "--read-data",
    "part",
    metavar="N/T|X%",
    callback=_read_part,
    help="Read the data of this part only: the N-th of T parts, or X percent by chance; of the others the headers.",
)
@click.option("--repair", is_flag=True, help="Then make index and files agree, and remove what continues what is gone.")
@choosing_options
@format_option
@store_option
def command(
    store: Path | None,
    wanted: tuple[str, ...],
    key_file: Path | None,
    part: Part,
    repair: bool,
    choice: Choice,
    format: Format,
) -> None:
    """Check every byte of the entries, or of those given by key, start of a key or name with what these continue.

    Or of those that --model, --name and --filter leave, in the order of --sort, so that Ctrl-C can end it when the most
    important ones are checked.

    Prints one line an entry. A damaged entry is set aside, where no lookup finds it, and the exit code is 5. With keys,
    entries that none of them has signed are told in the same way, and stay. With --repair the exit code is 0 when what
    was wrong has been put right.
    """
    opened = open_store(store, write=repair, key=key_file)
    targets = _targets(opened, wanted, choice)
    read = part(list(targets))
    results: list[tuple[str, tuple[str, ...], str | None]] = []
    lines_show_it = format == "human" and sys.stdout.isatty()
    with progress_bars("entries", wanted=not lines_show_it) as update:
        for number, (key, names) in enumerate(targets.items()):
            update("verifying", number, len(targets))
            results.append((key, names, opened.verify(key, read_data=key in read)))
            if format == "human":
                click.echo(_line(*results[-1]))
        update("verifying", len(targets), len(targets))
    if format == "json":
        emit_json([{"key": k, "names": list(n), "ok": why is None, "reason": why} for k, n, why in results])
    damaged = sum(why is not None for _, _, why in results)
    told = f"{damaged} of {entries_word(len(results))} damaged"
    if repair:
        say(f"{told}; {_repaired(opened)}")
    elif damaged:
        raise EntryDamagedError(told)
    else:
        unread = len(targets.keys() - read)
        say(f"{entries_word(len(results))} whole" + (f", {unread:,} of them by their headers" if unread else ""))


def _repaired(opened: CacheStore) -> str:
    done = opened.repair()
    return f"{entries_word(len(done.removed))} removed that continued what is gone"


def _targets(opened: CacheStore, wanted: tuple[str, ...], choice: Choice) -> dict[str, tuple[str, ...]]:
    """The keys to check, with their names: also of files that the index has not heard of. Parents before children."""
    if wanted or choice or choice.order is not None:
        given = [opened.entry(text) for text in wanted] if wanted else opened.entries()
        chosen = [known.entry for known in choice.of(given, opened)]
        entries = {entry.key: entry for entry in opened.entries()}
        return {link.key: link.names for entry in chosen for link in chain_of(entries, entry)[0]}
    targets = {entry.key: entry.names for _, entry in as_tree(opened.entries())}
    for key in sorted(entry_files(opened).keys()):
        targets.setdefault(key, ())
    return targets


def _line(key: str, names: tuple[str, ...], reason: str | None) -> str:
    label = key[:SHORT_KEY] + (f" ({', '.join(names)})" if names else "")
    return f"ok       {label}" if reason is None else f"damaged  {label}: {reason}"
