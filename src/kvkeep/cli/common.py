"""What the subcommands share: their options, how they open the store, and how they say things.

Data go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from kvkeep.records import Entry
    from kvkeep.storage.entries import EntryFiles
    from kvkeep.store import CacheStore

Format = Literal["human", "json"]
Align = Literal["left", "right"]

F = TypeVar("F", bound=Callable[..., Any])

SHORT_KEY = 12
"""Digits of a key that people see; any start of four digits or more that no other key shares will do."""


def store_option(function: F) -> F:
    """``--store`` after the subcommand as well; it wins over the one before it."""
    return click.option(
        "--store", type=click.Path(path_type=Path), callback=_inherit, help="Directory of the store, as before COMMAND."
    )(function)


def _inherit(ctx: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
    return value if value is not None else ctx.find_object(Path)


def format_option(function: F) -> F:
    """``--format human|json``."""
    kind = click.Choice(["human", "json"])
    return click.option("--format", type=kind, default="human", show_default=True, help="How to print the data.")(
        function
    )


def remote_option(function: F) -> F:
    """``--remote URL``."""
    return click.option(
        "--remote",
        metavar="URL|PATH",
        envvar="KVKEEP_REMOTE",
        help="What hosts share, such as s3://bucket/prefix; otherwise $KVKEEP_REMOTE.",
    )(function)


def examples(*commands: str) -> str:
    """What ``--help`` shows at its end: a command a line."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def open_store(path: Path | None, *, write: bool | None = False, **settings: Any) -> CacheStore:
    """Open a store that is there: to write if ``write``, else in the way that works without the right to write.

    With ``None`` not a byte in it changes, whatever the rights. The settings are those of ``CacheStore``.
    """
    from kvkeep.settings import default_store_path
    from kvkeep.storage import skeleton
    from kvkeep.store import open_existing

    where = path if path is not None else default_store_path()
    skeleton.check(where, readonly=write is None)  # looking at an empty directory does not make it a store
    readonly = write is None or (not write and not os.access(where, os.W_OK))
    return open_existing(where, readonly=readonly, **settings)


def entry_files(store: CacheStore) -> EntryFiles:
    """The files of a store, to look at whatever its index says."""
    from kvkeep.storage.entries import EntryFiles
    from kvkeep.storage.fs import Directory

    return EntryFiles(Directory(store.path, readonly=True))


# --- saying things ---


def say(message: str) -> None:
    """Print a line for people, on stderr."""
    click.echo(message, err=True)


def emit_json(data: object) -> None:
    """Print data as JSON, on stdout."""
    click.echo(json.dumps(data, indent=2))


def emit_table(columns: Sequence[tuple[str, Align]], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout: with rich on a terminal, else in plain columns."""
    if sys.stdout.isatty():
        _emit_rich(columns, rows)
        return
    widths = [max(len(line[i]) for line in [[title for title, _ in columns], *rows]) for i in range(len(columns))]
    for line in [[title for title, _ in columns], *rows]:
        cells = [
            cell.rjust(width) if align == "right" else cell.ljust(width)
            for cell, width, (_, align) in zip(line, widths, columns, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _emit_rich(columns: Sequence[tuple[str, Align]], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title, align in columns:
        table.add_column(title, justify=align, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a name may hold what rich reads as markup
    Console().print(table)


# --- words for numbers ---


def human_size(nbytes: int) -> str:
    """Bytes in decimal units, with three digits: ``46.1 MB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    if unit == "B":
        return f"{nbytes} B"
    return f"{size:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f} {unit}"


def human_time(seconds: int) -> str:
    """A moment in local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 entry``, ``2 entries``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def entries_word(number: int) -> str:
    """``1 entry``, ``2 entries``."""
    return count(number, "entry", "entries")


def one_line(entry: Entry) -> str:
    """An entry in a few words: key, names, tokens and size."""
    names = f" ({', '.join(entry.names)})" if entry.names else ""
    return f"{entry.key[:SHORT_KEY]}{names}  {count(entry.tokens, 'token')}, {human_size(entry.nbytes)}"


def entry_to_json(entry: Entry) -> dict[str, object]:
    """An entry as the JSON of all commands shows it."""
    return {
        "key": entry.key,
        "names": list(entry.names),
        "tokens": entry.tokens,
        "start": entry.start,
        "end": entry.end,
        "parent": entry.parent,
        "bytes": entry.nbytes,
        "created": entry.created,
        "model": entry.identity.model,
        "tokenizer": entry.identity.tokenizer,
        "namespace": entry.namespace,
    }
