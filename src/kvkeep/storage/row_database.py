"""The rows of the index in ``index/cache.db``, a diskcache database that any number of processes share.

diskcache writes. Reading goes past it: one statement over a connection of our own gives every row, and SQLite's
``data_version`` tells when another connection has written. Should a diskcache ever lay its table out differently, the
statement fails, which makes the database one to replace.

Nothing that a database holds is believed: a table, setting or row that this module did not write makes all of it
damaged, and a damaged database is replaced, never mended. Not for several threads; the index locks.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvkeep.storage.fs import Directory
from kvkeep.storage.locks import KeyLocks
from kvkeep.storage.row_checks import (
    SETTINGS,
    DamagedDatabaseError,
    MissingDatabaseError,
    check_contents,
    checked_row,
    checksum,
)
from kvkeep.storage.rows import Row

_FOLDER = "index"
_FILE = "cache.db"
_FILES = (_FILE, "cache.db-wal", "cache.db-shm", "cache.db-journal")
_LOCK = "index"
_TIMEOUT = 5.0
_MANY = 500

Choose = Callable[[Mapping[str, Row]], Collection[str]]
"""``choose(rows)``: the keys of those of all rows that are to be removed in the same transaction."""

_PASSING = ("locked", "busy", "full", "unable to open", "I/O error")
_SELECT = "SELECT rowid, key, raw, expire_time, tag, mode, filename, value FROM Cache"


class UnusableDatabaseError(Exception):
    """The database cannot be opened or written at the moment, whatever it holds."""


class RowDatabase:
    """The shared database, and its rows as of the last refresh.

    Attributes:
        rows: the rows by key.
    """

    def __init__(self, directory: Directory) -> None:
        self.rows: dict[str, Row] = {}
        self._directory = directory
        self._locks = KeyLocks(directory)
        self._reader: sqlite3.Connection | None = None
        self._closer: weakref.finalize[..., RowDatabase] | None = None
        self._cache: Any = None
        self._file: tuple[int, int] | None = None  # the database that is open, or was last
        self._read_from: tuple[int, int] | None = None  # the one that the rows come from
        self._condemned: tuple[int, ...] | None = None
        self._version: int | None = None  # as this connection counts; another one counts otherwise
        self._times: dict[int, float] = {}
        self._keys: dict[int, str] = {}

    def close(self) -> None:
        """Let go of the connection, for instance before a fork; the next call opens it again."""
        if self._closer is not None:
            self._closer()
        self._reader = self._closer = None

    def condemn(self) -> None:
        """Let :meth:`replace` replace the database that is there now, as long as it stays as it is."""
        self._condemned = self._state()

    def changed(self) -> bool:
        """Whether the rows may differ from those of the last refresh."""
        if self._reader is None:
            return True
        try:
            if self._identity() != self._file or self._read_from != self._file:
                return True
            return _data_version(self._reader) != self._version
        except (OSError, sqlite3.Error):
            return True

    def refresh(self) -> bool:
        """Bring ``rows`` up to date, reading only what is new. ``True`` if the database is another one than before."""
        if not self.changed():
            return False
        with self._condemning():
            self._read(self._open())
            before, self._read_from = self._read_from, self._file
            return before != self._file

    def write(self, add: Collection[Row], discard: Collection[str], choose: Choose | None = None) -> list[Row]:
        """Add or replace rows and remove others, in one transaction. ``rows`` shows it after the next refresh.

        With ``choose``, those that it names are removed, too: of the rows as they are by then, which no other process
        changes meanwhile. Returns them.
        """
        with self._condemning():
            reader = self._open()  # checks it
            dropped: list[Row] = []

            def more() -> Iterable[str]:
                self._read(reader)  # what was committed last: nobody else can write now
                rows = {key: row for key, row in self.rows.items() if key not in discard}
                rows.update((row.key, row) for row in add)
                if choose is not None:
                    dropped.extend(rows[key] for key in choose(rows))
                return [row.key for row in dropped]

            with self._locks.hold(_LOCK, timeout=_TIMEOUT):
                file = self._find()
                missing = self._write(add, discard, more if choose is not None else None)
                if self._find() != file:
                    raise DamagedDatabaseError("it was removed while it was written")
            for key in self.rows.keys() & set(missing):
                if reader.execute("SELECT 1 FROM Cache NOT INDEXED WHERE key = ?", (key,)).fetchall():
                    raise DamagedDatabaseError("a row in it cannot be found by its key")
            return dropped

    def replace(self, rows: Callable[[], Iterable[Row]], *, always: bool = False) -> None:
        """Put a new database in the place of the one that was found damaged, unless another process has done so.

        Args:
            rows: gives its rows. It is called while no other process can write.
            always: whatever is there, for it is not what it holds that is wrong, but what it once held.
        """
        with _translated(), self._locks.hold(_LOCK, timeout=_TIMEOUT) as alone:
            if not alone:
                raise UnusableDatabaseError("another process has held its lock for too long")
            if not always and self._state() not in (None, self._condemned):
                return
            self.close()
            self._cache = self._file = self._read_from = None
            self._clear()
            os.close(self._directory.open_lock(_FOLDER, _FILE))  # SQLite gives its other files the modes of this one
            self._write(rows(), ())
            self._file = self._read_from = self._identity()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        try:
            folder = stat.S_ISDIR(self._directory.stat(_FOLDER).st_mode)
        except FileNotFoundError:
            folder = True
        for name in ((_FOLDER, file) for file in _FILES) if folder else [(_FOLDER,)]:
            self._directory.remove(*name)

    def _read(self, reader: sqlite3.Connection) -> None:
        """Bring ``rows`` up to date with what was committed last."""
        reader.execute("BEGIN")  # one state of the database for all statements
        try:
            times = dict(reader.execute("SELECT rowid, store_time FROM Cache"))
            self._version = _data_version(reader)
            fresh = [rowid for rowid, _ in times.items() - self._times.items()]
            found = [checked_row(*record) for record in _records(reader, fresh)]
        finally:
            if reader.in_transaction:
                reader.execute("ROLLBACK")
        for rowid in self._times.keys() - times.keys() | set(fresh):
            self.rows.pop(self._keys.pop(rowid, ""), None)
        for rowid, row in found:
            self._keys[rowid] = row.key
            self.rows[row.key] = row
        self._times = times
        if len(self.rows) != len(times):
            raise DamagedDatabaseError("it holds an entry twice")

    def _write(
        self, add: Iterable[Row], discard: Iterable[str], more: Callable[[], Iterable[str]] | None = None
    ) -> list[str]:
        """Write, and return which of the rows to discard diskcache did not find."""
        from kvkeep.storage import json_disk  # diskcache takes long to import, and most processes only read

        try:
            if self._cache is None:
                _check_writable(self._directory.path(_FOLDER, _FILE))
                self._cache = json_disk.open_cache(self._directory.path(_FOLDER), SETTINGS, _TIMEOUT)
            try:
                with self._cache.transact():
                    discard = [*discard, *(more() if more is not None else ())]
                    for row in add:
                        text = row.to_json()
                        self._cache.set(row.key, text, tag=checksum(text))
                    missing = [key for key in discard if not self._cache.delete(key)]
            finally:
                self._cache.close()
        except json_disk.Timeout:
            raise UnusableDatabaseError("other processes keep it busy") from None
        return missing

    def _identity(self) -> tuple[int, int]:
        """Tells databases apart as long as one of them is open; the number of one that is closed may be used again."""
        status = self._directory.stat(_FOLDER, _FILE)
        return status.st_dev, status.st_ino

    def _state(self) -> tuple[int, ...] | None:
        try:
            status = self._directory.stat(_FOLDER, _FILE)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    @contextmanager
    def _condemning(self) -> Iterator[None]:
        try:
            with _translated():
                yield
        except DamagedDatabaseError:
            self.close()
            self.condemn()
            raise

    def _find(self) -> tuple[int, int]:
        """The identity of the database file; checks that all its files are plain, for SQLite follows links."""
        try:
            identity = self._identity()
            for name in _FILES:
                try:
                    status = self._directory.stat(_FOLDER, name)
                except FileNotFoundError:
                    continue
                if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                    raise DamagedDatabaseError(f"{_FOLDER}/{name} is not a plain file")
            return identity
        except FileNotFoundError:
            raise MissingDatabaseError("there is none") from None
        except OSError as error:
            raise DamagedDatabaseError(str(error)) from None

    def _open(self) -> sqlite3.Connection:
        """The connection to the database that is there now, checked."""
        file = self._find()
        if self._reader is not None and file == self._file:
            return self._reader
        self.close()
        self._file = file
        # The lock keeps others from replacing the database between the opening of its several files.
        with self._locks.hold(_LOCK, timeout=_TIMEOUT):
            # Read-only: the last to close a writable one removes the write-ahead log by its name, and that may by then
            # be the log of a database that has replaced this one.
            reader = sqlite3.connect(
                self._directory.path(_FOLDER, _FILE).as_uri() + "?mode=ro",
                uri=True,
                timeout=_TIMEOUT,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                for pragma in ("mmap_size = 0", "trusted_schema = 0"):
                    reader.execute(f"PRAGMA {pragma}")
                check_contents(reader)
            except BaseException:
                reader.close()
                raise
        self._version = None
        self._reader, self._closer = reader, weakref.finalize(self, reader.close)
        self._closer.atexit = False  # what a batch holds is written then
        return reader


def _data_version(reader: sqlite3.Connection) -> int:
    return int(reader.execute("PRAGMA data_version").fetchone()[0])


def _check_writable(path: Path) -> None:
    """Find out in ``_TIMEOUT`` seconds what a diskcache that opens takes minutes for: that others keep it locked."""
    connection = sqlite3.connect(path, timeout=_TIMEOUT, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def _records(reader: sqlite3.Connection, rowids: list[int]) -> list[tuple[Any, ...]]:
    if len(rowids) > _MANY:
        wanted = set(rowids)
        return [record for record in reader.execute(_SELECT).fetchall() if record[0] in wanted]
    marks = ",".join("?" * len(rowids))
    return reader.execute(f"{_SELECT} WHERE rowid IN ({marks})", rowids).fetchall()


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what SQLite, diskcache and the system raise into the two errors of this module."""
    try:
        yield
    except sqlite3.OperationalError as error:
        kind = UnusableDatabaseError if any(word in str(error) for word in _PASSING) else DamagedDatabaseError
        raise kind(str(error)[:100]) from error  # some messages quote what was found
    except (sqlite3.Error, ValueError) as error:
        raise DamagedDatabaseError(str(error)[:100]) from error
    except OSError as error:
        raise UnusableDatabaseError(str(error)) from error
