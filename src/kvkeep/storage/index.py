"""The index: a row an entry, so that a lookup opens no file but the one it wants.

It is derived. The files under ``entries/`` are the truth; rows that are missing, foreign or damaged are made again
from their headers, and no trouble with the index is ever an error to the caller. A read-only store keeps its rows in
memory and touches no database, and so does one on a network file system: SQLite's log of changes cannot be shared by
several hosts.

Order: a row is added after its file, and removed before it. So a row without a file is one that somebody is removing,
and a file without a row is one that somebody is adding, or put there by hand.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from kvkeep.errors import StoreWriteError
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.listing import HeaderReader, Listing
from kvkeep.storage.network import network_kind
from kvkeep.storage.row_checks import DamagedDatabaseError, MissingDatabaseError
from kvkeep.storage.row_database import Choose, RowDatabase, UnusableDatabaseError
from kvkeep.storage.rows import Row

__all__ = ["Choose", "Index", "Row"]

_log = logging.getLogger(__name__)

_ATTEMPTS = 5
_RETRY = 60.0  # seconds until a database that could not be used is tried again


class Index:
    """The rows of one store. Safe to use from several threads, and after a fork."""

    def __init__(self, directory: Directory, entries: EntryFiles) -> None:
        self._directory = directory
        self._headers = HeaderReader(directory, entries)
        self._lock = threading.RLock()
        self._in_memory = directory.readonly or _is_shared_by_hosts(directory)
        self._source: RowDatabase | Listing = self._listing() if self._in_memory else RowDatabase(directory)
        self._unwritten: dict[str, Row | None] = {}
        self._held: dict[str, Row] = {}
        self._opened = False
        self._answered = False  # whether nothing was read since the last answer of rows()
        self._retry_at: float | None = None
        _indexes.add(self)

    @property
    def damaged(self) -> dict[str, str]:
        """Why an entry has no row though its file is there, by key."""
        return dict(self._headers.damaged)

    def changed(self) -> bool:
        """Whether :meth:`rows` may differ from its last answer. Takes microseconds."""
        with self._lock:
            return not self._answered or self._retry_is_due() or self._source.changed()

    def rows(self) -> list[Row]:
        """The row of every entry. A row that has not changed is the same object as last time."""
        with self._lock:
            self._refresh()
            self._answered = True
            return list(self._known().values())

    def add(self, row: Row) -> None:
        """Add the row of an entry whose file is in place."""
        with self._lock:
            self._apply({row.key: row})

    def found(self, row: Row) -> None:
        """Add the row of an entry whose file was found without one, where nobody is going to add it any more, too."""
        with self._lock:
            self._open()
            self._write_found({row.key: row})
            self._answered = False

    def hold(self, row: Row) -> None:
        """Let this process find an entry whose row is not to be written yet, until it is added or discarded."""
        with self._lock:
            self._held[row.key] = row

    def exchange(self, row: Row | None, choose: Choose) -> list[Row]:
        """Add a row, if there is one, and remove those that ``choose(all rows)`` names; returns what was removed.

        Both in one transaction, so that no two processes choose for the same reason.
        """
        with self._lock:
            return self._apply({} if row is None else {row.key: row}, choose)

    def discard(self, key: str) -> None:
        """Remove the row of an entry whose file is about to be removed, or was found missing."""
        with self._lock:
            self._apply({key: None})

    def adopt(self, ripe: Callable[[str], bool]) -> list[str]:
        """Add rows for the files that have none, where ``ripe(key)``: somebody may be adding a young one himself.

        Returns their keys. Those that are damaged are in ``damaged`` then.
        """
        with self._lock:
            self._refresh()
            keys = self._headers.keys() - self._known().keys()
            found = {row.key: row for row in self._headers.rows(key for key in keys if ripe(key))}
            self._write_found(found)
            return sorted(found)

    def rebuild(self) -> None:
        """Make every row again from the headers of the entries."""
        with self._lock:
            self._opened = True
            self._headers.damaged.clear()
            if self._in_memory:
                self._source = self._listing()
            else:
                self.close()
                self._source, self._retry_at = RowDatabase(self._directory), None
                self._renew(self._source)
            self._refresh()

    def erase(self) -> None:
        """Put a new index in the place of the one that is there, which still holds what was once in it.

        Raises:
            StoreWriteError: another process uses it all the time.
        """
        with self._lock:
            self._opened = True
            if not self._in_memory:
                self.close()
                self._source, self._retry_at = RowDatabase(self._directory), None
                try:
                    self._replace(self._source, "rows were removed for good", logging.DEBUG, always=True)
                except (DamagedDatabaseError, UnusableDatabaseError) as error:
                    raise StoreWriteError(
                        errno.EBUSY, f"the index could not be made anew: {error}; try again"
                    ) from error
            self._refresh()

    def close(self) -> None:
        """Let go of open files; the next call opens them again."""
        with self._lock:
            if isinstance(self._source, RowDatabase):
                self._source.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, Row]:
        """The rows as of the last refresh, with what could not be written."""
        rows = self._held | self._source.rows
        for key, row in self._unwritten.items():
            rows.pop(key, None)
            if row is not None:
                rows[key] = row
        return rows

    def _listing(self) -> Listing:
        return Listing(self._directory, self._headers)

    def _retry_is_due(self) -> bool:
        return self._retry_at is not None and time.monotonic() >= self._retry_at

    def _refresh(self) -> None:
        self._opened, self._answered = True, False
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
                    self._write({})
                return None
            except DamagedDatabaseError as error:
                trouble = error
            except (UnusableDatabaseError, OSError) as error:  # OSError: the entries could not be listed for it
                return error
        return trouble or UnusableDatabaseError("others replace it again and again")

    def _replace(self, database: RowDatabase, why: str, level: int = logging.WARNING, *, always: bool = False) -> None:
        rows = {row.key: row for row in self._headers.rows(self._on_disk())}
        _log.log(level, "the index of %s is made anew from %d entries: %s", self._directory.root, len(rows), why)

        def complete() -> Iterator[Row]:
            """With what others have stored while headers were read."""
            keys = self._on_disk()
            yield from (row for key, row in rows.items() if key in keys)
            yield from self._headers.rows(keys - rows.keys())

        database.replace(complete, always=always)

    def _renew(self, database: RowDatabase) -> None:
        try:
            database.condemn()
            self._replace(database, "as asked", logging.DEBUG)
        except (DamagedDatabaseError, UnusableDatabaseError) as error:
            _log.debug("the refresh that follows will meet this too: %s", error)

    def _on_disk(self) -> set[str]:
        """The keys of the files that are to have a row."""
        return self._headers.keys() - self._held.keys()

    def _reconcile(self, database: RowDatabase) -> None:
        """Add rows for files that have none, and drop rows whose file is gone."""
        on_disk, known = self._on_disk(), database.rows.keys()
        found = {row.key: row for row in self._headers.rows(on_disk - known)}
        self._write_found(found, {key for key in known - on_disk if not self._headers.is_there(key)})

    def _write_found(self, found: Mapping[str, Row], missed: Collection[str] = ()) -> None:
        """Add rows made of files, and drop those of files that were missed, though others come and go at this moment.

        Whoever adds a file adds its row afterwards, and whoever removes one looks for its row once more afterwards. So
        files are looked at again while nobody can write rows, and, when those that are new can be seen, once more.
        """
        if found or missed:
            self._write(dict(found), partial(self._without_file, missed) if missed else None)
        if gone := self._without_file(found, found):
            self._write({}, partial(self._without_file, gone))

    def _without_file(self, keys: Iterable[str], rows: Mapping[str, Row]) -> list[str]:
        return [key for key in keys if key in rows and not self._headers.is_there(key)]

    def _apply(self, changes: dict[str, Row | None], choose: Choose | None = None) -> list[Row]:
        if not self._opened or choose is not None:  # what is to be chosen from may be needed in memory
            self._open()
        return self._write(changes, choose)

    def _open(self) -> None:
        try:
            self._refresh()
        except OSError as error:
            _log.warning("the entries of %s cannot be listed: %s", self._directory.root, error)

    def _write(self, changes: dict[str, Row | None], choose: Choose | None = None) -> list[Row]:
        """Write changes, and those that could not be written before; what fails again is kept in memory.

        Then ``choose`` is asked of what is known here, for a full disk is where room is wanted most.
        """
        self._unwritten.update(changes)
        for key in changes:
            self._held.pop(key, None)
        add = [row for row in self._unwritten.values() if row is not None]
        discard = [key for key, row in self._unwritten.items() if row is None]
        try:
            try:
                dropped = self._source.write(add, discard, choose)
            except DamagedDatabaseError as error:
                if isinstance(self._source, RowDatabase):
                    self._replace(self._source, str(error))
                dropped = self._source.write(add, discard, choose)
            self._unwritten.clear()
        except (DamagedDatabaseError, UnusableDatabaseError, OSError) as error:
            _log.warning("the index of %s could not be written: %s", self._directory.root, error)
            known = self._known()
            dropped = [known[key] for key in (choose(known) if choose is not None else ())]
            self._unwritten.update((row.key, None) for row in dropped)
        return dropped


_told: set[str] = set()


def _is_shared_by_hosts(directory: Directory) -> bool:
    """Whether other hosts may be using the store; said once."""
    kind, root = network_kind(directory.root), str(directory.root)
    if kind is not None and root not in _told:
        _told.add(root)
        _log.warning("%s is on a network file system (%s): each process reads the headers of its entries", root, kind)
    return kind is not None


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
