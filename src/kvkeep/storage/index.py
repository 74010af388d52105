"""The index: a row an entry, so that a lookup opens no file but the one it wants.

It is derived. The files under ``entries/`` are the truth; rows that are missing, foreign or damaged are made again
from their headers, and no trouble with the index is ever an error to the caller. A read-only store keeps its rows in
memory and touches no database.

Order: a row is added after its file, and removed before it. So a row without a file is one that somebody is removing,
and a file without a row is one that somebody is adding, or put there by hand.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator

from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.listing import HeaderReader, Listing
from kvkeep.storage.row_checks import DamagedDatabaseError, MissingDatabaseError
from kvkeep.storage.row_database import RowDatabase, UnusableDatabaseError
from kvkeep.storage.rows import Row

__all__ = ["Index", "Row"]

_log = logging.getLogger(__name__)

_ATTEMPTS = 5
_RETRY = 60.0  # seconds until a database that could not be used is tried again


class Index:
    """The rows of one store. Safe to use from several threads, and after a fork."""

    def __init__(self, directory: Directory, entries: EntryFiles) -> None:
        self._directory = directory
        self._headers = HeaderReader(directory, entries)
        self._lock = threading.RLock()
        self._source: RowDatabase | Listing = self._listing() if directory.readonly else RowDatabase(directory)
        self._unwritten: dict[str, Row | None] = {}
        self._opened = False
        self._retry_at: float | None = None
        _indexes.add(self)

    @property
    def damaged(self) -> dict[str, str]:
        """Why an entry has no row though its file is there, by key."""
        return dict(self._headers.damaged)

    def changed(self) -> bool:
        """Whether :meth:`rows` may differ from its last answer. Takes microseconds."""
        with self._lock:
            return not self._opened or self._retry_is_due() or self._source.changed()

    def rows(self) -> list[Row]:
        """The row of every entry. A row that has not changed is the same object as last time."""
        with self._lock:
            self._refresh()
            rows = dict(self._source.rows)
            for key, row in self._unwritten.items():
                rows.pop(key, None)
                if row is not None:
                    rows[key] = row
            return list(rows.values())

    def add(self, row: Row) -> None:
        """Add the row of an entry whose file is in place."""
        with self._lock:
            self._apply({row.key: row})

    def discard(self, key: str) -> None:
        """Remove the row of an entry whose file is about to be removed, or was found missing."""
        with self._lock:
            self._apply({key: None})

    def rebuild(self) -> None:
        """Make every row again from the headers of the entries."""
        with self._lock:
            self._opened = True
            self._headers.damaged.clear()
            if self._directory.readonly:
                self._source = self._listing()
            else:
                self.close()
                self._source, self._retry_at = RowDatabase(self._directory), None
                self._renew(self._source)
            self._refresh()

    def close(self) -> None:
        """Let go of open files; the next call opens them again."""
        with self._lock:
            if isinstance(self._source, RowDatabase):
                self._source.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _listing(self) -> Listing:
        return Listing(self._directory, self._headers)

    def _retry_is_due(self) -> bool:
        return self._retry_at is not None and time.monotonic() >= self._retry_at

    def _refresh(self) -> None:
        self._opened = True
        if self._retry_is_due():
            self._source, self._retry_at = RowDatabase(self._directory), None
        if isinstance(self._source, RowDatabase):
            trouble = self._refresh_database(self._source)
            if trouble is None:
                return
            _log.warning("the index of %s cannot be used, headers are read instead: %s", self._directory.root, trouble)
            self._source.close()
            self._source, self._retry_at = self._listing(), time.monotonic() + _RETRY
        self._source.refresh()

    def _refresh_database(self, database: RowDatabase) -> Exception | None:
        """Bring the database's rows up to date; what is wrong with it if that cannot be done."""
        trouble: Exception | None = None
        for _ in range(_ATTEMPTS):  # others may replace or damage it at the same time
            try:
                if trouble is not None:
                    level = logging.DEBUG if isinstance(trouble, MissingDatabaseError) else logging.WARNING
                    self._replace(database, str(trouble), level)
                    trouble = None
                if database.refresh():
                    self._reconcile(database)
                    continue  # and see that it is still this one
                if self._unwritten:
                    self._apply({})
                return None
            except DamagedDatabaseError as error:
                trouble = error
            except UnusableDatabaseError as error:
                return error
        return trouble or UnusableDatabaseError("others replace it again and again")

    def _replace(self, database: RowDatabase, why: str, level: int = logging.WARNING) -> None:
        rows = {row.key: row for row in self._headers.rows(self._headers.keys())}
        _log.log(level, "the index of %s is made anew from %d entries: %s", self._directory.root, len(rows), why)

        def complete() -> Iterator[Row]:
            """With what others have stored while headers were read."""
            keys = self._headers.keys()
            yield from (row for key, row in rows.items() if key in keys)
            yield from self._headers.rows(keys - rows.keys())

        database.replace(complete)

    def _renew(self, database: RowDatabase) -> None:
        try:
            database.condemn()
            self._replace(database, "as asked", logging.DEBUG)
        except (DamagedDatabaseError, UnusableDatabaseError) as error:
            _log.debug("the refresh that follows will meet this too: %s", error)

    def _reconcile(self, database: RowDatabase) -> None:
        """Add rows for files that have none, and drop rows whose file is gone."""
        on_disk = self._headers.keys()
        changes: dict[str, Row | None] = {row.key: row for row in self._headers.rows(on_disk - database.rows.keys())}
        changes.update((key, None) for key in database.rows.keys() - on_disk if not self._headers.is_there(key))
        if changes:
            self._apply(changes)

    def _apply(self, changes: dict[str, Row | None]) -> None:
        """Write changes, and those that could not be written before; what fails again is kept in memory."""
        if not self._opened:
            self._refresh()
        self._unwritten.update(changes)
        add = [row for row in self._unwritten.values() if row is not None]
        discard = [key for key, row in self._unwritten.items() if row is None]
        try:
            try:
                self._source.write(add, discard)
            except DamagedDatabaseError as error:
                if isinstance(self._source, RowDatabase):
                    self._replace(self._source, str(error))
                self._source.write(add, discard)
            self._unwritten.clear()
        except (DamagedDatabaseError, UnusableDatabaseError) as error:
            _log.warning("the index of %s could not be written: %s", self._directory.root, error)


# SQLite must not take a connection through a fork, not even to close it there, so all are closed before.
_indexes: weakref.WeakSet[Index] = weakref.WeakSet()
_forking: list[Index] = []


def _before_fork() -> None:
    for index in list(_indexes):
        index._lock.acquire()
        _forking.append(index)
        index.close()


def _after_fork() -> None:
    while _forking:
        _forking.pop()._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
