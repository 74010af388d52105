"""Removing what nobody can want any more: what has expired, what was left behind by the dead, what is too much.

Safe beside writers and readers: nothing is taken that a process that lives may be about to use, and whatever is removed
is looked at once more when nobody new can come upon it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvkeep.capacity import Capacity
from kvkeep.catalog import Catalog
from kvkeep.matching import orphans
from kvkeep.storage.budget import LimitName
from kvkeep.storage.entries import ENTRIES, QUARANTINE, SUFFIX
from kvkeep.storage.fileio import in_use
from kvkeep.storage.fs import TMP, Directory
from kvkeep.storage.locks import KeyLocks
from kvkeep.storage.refs import Ref, Refs
from kvkeep.storage.rows import Row

Kind = Literal["entry", "name", "temporary", "quarantine", "lock", "chat", "index"]

GRACE = 3600.0
"""Seconds for which a file that nobody accounts for is taken to be in the making."""

QUARANTINE_DAYS = 30.0
"""Days for which a damaged entry is kept to be looked at."""

_DAY = 86_400.0
_WRITER = re.compile(r"([0-9]{1,10})-[0-9a-f]{16}(\..*)?")


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing that was removed, or would be.

    Attributes:
        kind: what it was.
        name: its key, name or file name.
        nbytes: bytes of its file.
        reason: why.
    """

    kind: Kind
    name: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a collection did, or would do.

    Attributes:
        removed: what was removed, in that order.
        failed: what could not be, with the reason in the place of its own.
        indexed: entries that had no row in the index and got one.
        dropped: rows of the index without an entry, which are gone.
        used: bytes of the entries that are left.
        max_bytes: what they may take, or ``None``.
        limit: the limit that cannot be kept, because of pins; or ``None``.
        short: by how many bytes it cannot.
    """

    removed: tuple[Removal, ...]
    failed: tuple[Removal, ...]
    indexed: int
    dropped: int
    used: int
    max_bytes: int | None
    limit: LimitName | None
    short: int

    @property
    def freed(self) -> int:
        """Bytes of all that was removed."""
        return sum(one.nbytes for one in self.removed)


class Collector:
    """One collection in one store.

    Args:
        directory: the store.
        catalog: the rows of its entries.
        refs: their names.
        capacity: their limits.
        grace: see :data:`GRACE`.
        quarantine_days: see :data:`QUARANTINE_DAYS`.
        dry_run: remove nothing, and change nothing.
    """

    def __init__(
        self,
        directory: Directory,
        catalog: Catalog,
        refs: Refs,
        capacity: Capacity,
        *,
        grace: float = GRACE,
        quarantine_days: float = QUARANTINE_DAYS,
        dry_run: bool = False,
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._refs = refs
        self._capacity = capacity
        self._locks = KeyLocks(directory)
        self._grace = grace
        self._quarantine = quarantine_days * _DAY
        self._dry = dry_run
        self._now = time.time()
        self._removed: list[Removal] = []
        self._failed: list[Removal] = []

    def collect(self) -> Collection:
        """Do it. What cannot be removed is noted and does not stop the rest."""
        indexed, dropped = ([], []) if self._dry else self._catalog.mend(self._is_ripe)
        self._collect_temporaries()
        self._collect_quarantine()
        self._collect_locks()
        self._collect_orphans()
        self._collect_expired()
        return self._report(len(indexed), len(dropped), *self._collect_excess())

    def repair(self) -> Collection:
        """Only what is out of order: rows and files that do not agree, and entries that continue what is gone."""
        indexed, dropped = self._catalog.mend(lambda key: True)
        self._collect_orphans()
        return self._report(len(indexed), len(dropped), None, 0)

    def _report(self, indexed: int, dropped: int, limit: LimitName | None, short: int) -> Collection:
        return Collection(
            removed=tuple(self._removed),
            failed=tuple(self._failed),
            indexed=indexed,
            dropped=dropped,
            used=sum(row.nbytes for row in self._left().values()),
            max_bytes=self._capacity.limits.max_bytes,
            limit=limit,
            short=short,
        )

    def collect_leftovers(self) -> tuple[list[Removal], list[Removal]]:
        """Only what killed processes left in ``tmp`` and ``locks``; returns what was removed, and what could not be."""
        self._collect_temporaries()
        self._collect_locks()
        return self._removed, self._failed

    # --- files that nobody accounts for ---

    def _collect_temporaries(self) -> None:
        for name in self._directory.names(TMP):
            if self._age(TMP, name) >= self._grace:
                self._remove_file("temporary", (TMP, name), "nobody has touched it for long")
            elif self._is_of_the_dead(name):
                self._remove_file("temporary", (TMP, name), "the process that wrote it has ended")

    def _is_of_the_dead(self, name: str) -> bool:
        """Whether the process that a temporary file is named after is no more.

        The same number may be another process in another container or on another machine: its mark on the file tells.
        """
        written = _WRITER.fullmatch(name)
        if written is None or _is_alive(int(written[1])):
            return False
        try:
            fd = self._directory.open_read(TMP, name)
        except OSError:
            return False
        try:
            return not in_use(fd)
        finally:
            os.close(fd)

    def _collect_quarantine(self) -> None:
        for name in self._directory.names(QUARANTINE):
            if self._age(QUARANTINE, name) >= self._quarantine:
                self._remove_file("quarantine", (QUARANTINE, name), "it was set aside long ago")

    def _collect_locks(self) -> None:
        for key in self._locks.orphans():
            removal = Removal("lock", key, 0, "nobody holds it")
            if self._dry or self._locks.clear(key):
                self._removed.append(removal)

    # --- entries ---

    def _collect_orphans(self) -> None:
        """Remove entries that continue what is gone, whatever their names: nothing can use them any more."""

        def lost(rows: Mapping[str, Row]) -> list[str]:
            lone = orphans({key: row.parent for key, row in rows.items()}, self._is_there)
            return _leaves_first(rows, {key for key in lone if self._is_ripe(key)})

        self._evict(lost, "what it continues is gone", held=set)

    def _is_there(self, key: str) -> bool:
        return self._age(ENTRIES, key[:2], key + SUFFIX) > -1.0

    def _collect_expired(self) -> None:
        """Remove names that have expired, and then the entries that had only such names, children before parents."""
        expired = [ref for ref in self._refs.all() if not ref.counts(self._now)]
        if not expired:
            return
        why = "its names have expired"
        self._evict(lambda rows: _unnamed(rows, expired, self._named()), why, held=self._named)
        for ref in expired:  # last, so that whoever is killed here can be followed by another who knows as much
            nbytes = self._size("refs", f"{ref.name}.json")
            self._try(Removal("name", ref.name, nbytes, "it has expired"), partial(self._refs.expire, ref))

    def _named(self) -> set[str]:
        return {ref.key for ref in self._refs.all() if ref.counts(self._now)}

    def _collect_excess(self) -> tuple[LimitName | None, int]:
        limits = self._capacity.limits
        missed: tuple[LimitName | None, int] = None, 0

        def excess(rows: Mapping[str, Row]) -> list[str]:
            nonlocal missed
            made = self._capacity.excess(rows)
            missed = made.limit, made.short
            return [row.key for row in made.victims]

        if limits.max_bytes is not None or limits.quota is not None:
            self._evict(excess, "the entries take more than they may")
        freed = sum(one.nbytes for one in self._removed) if self._dry else 0
        self._evict(
            lambda rows: [row.key for row in self._capacity.shortage(rows, freed)], "the volume has too little free"
        )
        return missed

    def _evict(
        self,
        choice: Callable[[Mapping[str, Row]], list[str]],
        reason: str,
        held: Callable[[], set[str]] | None = None,
    ) -> None:
        if self._dry:
            left = self._left()
            rows = [left[key] for key in choice(left)]
        else:
            rows = self._capacity.evict(choice, held)
        self._removed.extend(Removal("entry", row.key, row.nbytes, reason) for row in rows)

    def _left(self) -> dict[str, Row]:
        gone = {one.name for one in self._removed if one.kind == "entry"}
        return {row.key: row for row in self._catalog.rows() if row.key not in gone}

    # --- inside ---

    def _is_ripe(self, key: str) -> bool:
        """Whether a file without a row lies there for so long that nobody can be about to add the row."""
        return self._age(ENTRIES, key[:2], key + SUFFIX) >= self._grace

    def _age(self, *name: str) -> float:
        """Seconds since a file or its name changed; below zero if that cannot be told, or it is no file."""
        try:
            known = self._directory.stat(*name)
        except OSError:
            return -1.0
        return self._now - max(known.st_mtime, known.st_ctime)

    def _size(self, *name: str) -> int:
        try:
            return self._directory.stat(*name).st_size
        except OSError:
            return 0

    def _remove_file(self, kind: Kind, name: tuple[str, ...], reason: str) -> None:
        removal = Removal(kind, name[-1], self._size(*name), reason)
        self._try(removal, lambda: self._directory.remove(*name))

    def _try(self, removal: Removal, remove: Callable[[], bool]) -> None:
        try:
            if self._dry or remove():
                self._removed.append(removal)
        except OSError as error:
            self._failed.append(Removal(removal.kind, removal.name, removal.nbytes, str(error.strerror or error)))


def _unnamed(rows: Mapping[str, Row], expired: Iterable[Ref], named: set[str]) -> list[str]:
    """The keys of entries whose names have all expired and that no other entry continues, children before parents."""
    return _leaves_first(rows, {ref.key for ref in expired if ref.key in rows} - named)


def _leaves_first(rows: Mapping[str, Row], wanted: set[str]) -> list[str]:
    """Those of some entries that no other entry continues but one of them, children before parents."""
    left, found = dict(rows), list[str]()
    while True:
        parents = {row.parent for row in left.values()}
        leaves = sorted(key for key in wanted & left.keys() if key not in parents)
        if not leaves:
            return found
        found += leaves
        for key in leaves:
            del left[key]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
