"""What the entries of a store may take, and how room is made: by budget, by quota, and by what the volume has free.

Order, as everywhere: an entry's row goes first, then its file. Rows are chosen and removed in one transaction of the
index, so that several writers together remove no more than the limits ask for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NoReturn

from kvkeep.catalog import Catalog
from kvkeep.entry_format import Header
from kvkeep.errors import StoreFullError
from kvkeep.eviction import Candidate, EvictionPolicy
from kvkeep.storage.budget import Limits, Plan, choose, plan, with_parents
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Choose
from kvkeep.storage.journal import Journal, Use
from kvkeep.storage.refs import Refs
from kvkeep.storage.rows import Row

log = logging.getLogger("kvkeep")

_SPARE = 1 << 16
"""Bytes that an entry needs beside its own: for its row and its name."""

Keys = Callable[[], Collection[str]]


class Capacity:
    """Keeps one store within its limits. Safe to use from several threads and processes."""

    def __init__(
        self,
        directory: Directory,
        files: EntryFiles,
        catalog: Catalog,
        *,
        refs: Refs,
        journal: Journal,
        limits: Limits,
        policy: EvictionPolicy,
    ) -> None:
        self.limits = limits
        self._directory = directory
        self._files = files
        self._catalog = catalog
        self._refs = refs
        self._journal = journal
        self._policy = policy

    # --- storing ---

    def check_fits(self, nbytes: int) -> None:
        """Raise StoreFullError if an entry of at least so many bytes fits no budget, whatever is evicted for it."""
        for name, limit in (("max_bytes", self.limits.max_bytes), ("quota", self.limits.quota)):
            if limit is not None and nbytes > limit:
                raise StoreFullError(
                    f"the entry takes at least {nbytes:,} bytes, and {limit:,} are allowed ({name}): raise {name}, or "
                    "store a shorter prefix"
                )

    def admit(self, header: Header) -> None:
        """Make sure, before an entry is written, that it may be: it would stay, and the volume has room for it.

        Raises:
            StoreFullError: it must not be written. Nothing was removed for it.
        """
        new = Row.from_meta(header.meta, header.size, b"")
        if self._has_budget():
            rows = {row.key: row for row in self._catalog.rows()}
            made = plan(
                {**rows, new.key: new}, self.limits, new=new, keep=self._refs.pinned, worth=lambda row: row.created
            )
            if made.limit is not None:
                self._refuse(new, made)
        short = new.nbytes + self.floor() - self._directory.space()[0]
        if short > 0 and not self._free(short, keep=[new.parent] if new.parent else []):
            raise StoreFullError(
                f"the entry takes {new.nbytes:,} bytes, and {self.floor():,} are to stay free on the volume of "
                f"{self._directory.root}, even without all that may be evicted: make room there, or lower min_free"
            )

    def add(self, row: Row) -> None:
        """Add the row of an entry whose file was just published, and evict what the limits then ask for.

        Raises:
            StoreFullError: it does not fit beside what must stay, and is gone again. Nothing else was removed.
        """
        if not self._has_budget():
            self._catalog.add(row)
            return
        made = Plan()

        def over(rows: Mapping[str, Row]) -> list[str]:
            nonlocal made
            made = plan(rows, self.limits, new=row, keep=self._refs.pinned, worth=self._worth())
            return [row.key] if made.limit is not None else [victim.key for victim in made.victims]

        dropped = self._exchange(row, over)
        if made.limit is not None:
            self._files.remove(row.key)
            self._catalog.removed(row.key)
            self._refuse(row, made)
        self._remove_files(dropped, self._refs.pinned)

    def relieve(self, nbytes: int) -> bool:
        """After a volume or a quota of the system was found full: evict so many bytes; ``False`` if there are not.

        Once for one entry: what is still full then is not kvkeep's to empty.
        """
        return self._free(nbytes + _SPARE, keep=[])

    # --- collecting ---

    def floor(self) -> int:
        """Bytes that are to stay free: ``min_free``, at most a tenth of the volume, and room for rows and names."""
        return max(min(self.limits.min_free, self._directory.space()[1] // 10), _SPARE)

    def excess(self, rows: Mapping[str, Row]) -> Plan:
        """What of these rows has to go for budget and quotas to hold."""
        return plan(rows, self.limits, new=None, keep=self._refs.pinned, worth=self._worth())

    def shortage(self, rows: Mapping[str, Row], freed: int = 0) -> list[Row]:
        """What of these rows has to go for the floor to hold, if so many bytes are freed before; none if it cannot."""
        need = self.floor() - self._directory.space()[0] - freed
        victims, short = choose(rows, need, keep=self._refs.pinned() if need > 0 else (), worth=self._worth())
        return [] if short else victims

    def evict(self, choice: Choose, held: Keys | None = None) -> list[Row]:
        """Remove the entries that ``choice(all rows)`` names, and return them, without those that stay after all.

        Args:
            choice: names the entries, while no other process can change the rows.
            held: gives the keys of entries that stay, asked once more when nobody new can find them; pinned ones if
                it is left out.
        """
        dropped = self._exchange(None, choice)
        return self._remove_files(dropped, held if held is not None else self._refs.pinned)

    # --- inside ---

    def _has_budget(self) -> bool:
        return self.limits.max_bytes is not None or self.limits.quota is not None

    def _free(self, need: int, keep: Collection[str]) -> bool:
        enough = True

        def least(rows: Mapping[str, Row]) -> list[str]:
            nonlocal enough
            victims, short = choose(rows, need, keep={*self._refs.pinned(), *keep}, worth=self._worth())
            enough = not short
            return [row.key for row in victims] if enough else []

        self.evict(least)
        return enough

    def _worth(self) -> Callable[[Row], float]:
        """What entries are worth, by the policy; hits are read when the first is asked for."""
        uses: Mapping[str, Use] | None = None
        now = time.time()

        def worth(row: Row) -> float:
            nonlocal uses
            if uses is None:
                uses = self._journal.uses()
            use = uses.get(row.key)
            return self._policy.worth(
                Candidate(
                    nbytes=row.nbytes,
                    tokens=row.end - row.start,
                    end=row.end,
                    created=row.created,
                    used=row.created if use is None else use.last,
                    hits=0 if use is None else use.hits,
                ),
                now,
            )

        return worth

    def _exchange(self, row: Row | None, choice: Choose) -> list[Row]:
        """Change rows; an error of the choice, which may be the user's policy, must not look like the index's."""
        trouble: list[Exception] = []

        def guarded(rows: Mapping[str, Row]) -> Collection[str]:
            try:
                return choice(rows)
            except Exception as error:  # noqa: BLE001  # a policy may raise anything
                trouble.append(error)
                return ()

        dropped = self._catalog.exchange(row, guarded)
        if trouble:
            raise trouble[0]
        return dropped

    def _remove_files(self, rows: Iterable[Row], held: Keys) -> list[Row]:
        """Remove the files of dropped rows, except of entries that somebody has come to hold meanwhile.

        They are moved away first. Whoever holds an entry, by a name or by one that continues it, looks whether it is
        there after that: so either this is seen here, or he sees that the entry is not there.
        """
        taken: dict[str, tuple[Row, str]] = {}
        gone: list[Row] = []
        for row in rows:
            try:
                name = self._take_away(row.key)
            except OSError as error:
                log.warning("kvkeep: the entry %s could not be evicted: %s", row.key, error)
                self._catalog.add(row)  # it takes up what it took up
                continue
            if name is None:
                gone.append(row)
            else:
                taken[row.key] = row, name
        kept = set[str]()
        if taken:
            continued = {row.parent for row in self._catalog.rows() if row.parent is not None}
            kept = with_parents({key: row for key, (row, _) in taken.items()}, {*held(), *continued})
        for key, (row, name) in taken.items():
            if key in kept:
                self._files.put_back(name, key)
                self._catalog.add(row)
            else:
                gone.append(row)
                try:
                    self._files.discard(name)
                except OSError as error:  # a collection will find it
                    log.warning("kvkeep: the evicted entry %s is left in tmp: %s", row.key, error)
        for row in gone:
            self._catalog.removed(row.key)
        return gone

    def _take_away(self, key: str) -> str | None:
        try:
            return self._files.take_away(key)
        except OSError:  # a volume so full that it has no room for another name
            self._files.remove(key)
            return None

    def _refuse(self, row: Row, made: Plan) -> NoReturn:
        limit = self.limits.quota if made.limit == "quota" else self.limits.max_bytes
        where = "its namespace" if made.limit == "quota" else "the store"
        what = f"the entry takes {row.nbytes:,} bytes, and {where} may take {limit:,} ({made.limit})"
        if row.nbytes > (limit or 0):
            raise StoreFullError(f"{what}: raise {made.limit}, or store a shorter prefix")
        raise StoreFullError(
            f"{what}, of which pinned entries and what they continue leave {made.short:,} too few: raise {made.limit}, "
            "or take the pin off a name (store.name(entry, name) without pin=) or remove one with `kvkeep rm`"
        )
