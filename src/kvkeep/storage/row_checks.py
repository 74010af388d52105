"""What a database of rows must look like, to the last setting, for kvkeep to have written it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import xxhash

from kvkeep.storage.rows import Row

SETTINGS: Mapping[str, int | str] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 1 << 62,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 0,
    "sqlite_cache_size": 1 << 13,
    "sqlite_journal_mode": "wal",
    "sqlite_mmap_size": 0,
    "sqlite_synchronous": 0,  # what a power cut takes from a derived database is found missing and made again
    "disk_min_file_size": 1 << 62,
    "disk_pickle_protocol": 0,
}
_COUNTERS = {"count", "size", "hits", "misses"}
_OBJECTS = {
    ("table", "Settings"),
    ("table", "Cache"),
    ("trigger", "Settings_count_insert"),
    ("trigger", "Settings_count_delete"),
    ("trigger", "Settings_size_insert"),
    ("trigger", "Settings_size_update"),
    ("trigger", "Settings_size_delete"),
}


class DamagedDatabaseError(Exception):
    """The database is missing or holds something that kvkeep did not write: replace it."""


class MissingDatabaseError(DamagedDatabaseError):
    """There is no database, as in a new store or after somebody removed it."""


def check_contents(reader: sqlite3.Connection) -> None:
    """Raise :class:`DamagedDatabaseError` for a table, trigger, view or setting that is not ours, or is missing."""
    objects = set(reader.execute("SELECT type, name FROM sqlite_master WHERE type <> 'index'"))
    settings = dict(reader.execute("SELECT key, value FROM Settings"))
    if objects != _OBJECTS or settings.keys() != SETTINGS.keys() | _COUNTERS:
        raise DamagedDatabaseError("it has other tables or settings than kvkeep's")
    if any(settings[name] != value for name, value in SETTINGS.items()):
        raise DamagedDatabaseError("its settings are not kvkeep's")


def checked_row(
    rowid: int, key: object, raw: object, expires: object, tag: object, mode: object, filename: object, value: object
) -> tuple[int, Row]:
    """Read one record of diskcache's table; :class:`DamagedDatabaseError` if it is not a row as kvkeep writes them."""
    if (raw, expires, mode, filename) != (1, None, 1, None) or not isinstance(value, str) or tag != checksum(value):
        raise DamagedDatabaseError("it holds a row that kvkeep did not write")
    row = Row.from_json(value)
    if row.key != key:
        raise DamagedDatabaseError("it holds a row under another entry's key")
    return rowid, row


def checksum(text: str) -> str:
    """What is stored beside a row, as its tag."""
    return xxhash.xxh3_64_hexdigest(text.encode())
