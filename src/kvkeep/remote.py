"""A store's remote: entries on a tier that other hosts share, of which the directory is a verified copy.

A remote is not trusted and may be away at any time. What goes wrong with it is a reason, and no error for callers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvkeep.breaker import Breaker, Remembered
from kvkeep.capacity import Capacity
from kvkeep.catalog import Catalog
from kvkeep.downloads import Downloads, Wanted
from kvkeep.entry_format import EntryKey, decode_header, header_length
from kvkeep.errors import (
    EntryDamagedError,
    EntryNotFoundError,
    EntryUnknownError,
    EntryUntrustedError,
    StoreError,
    TierError,
    UnsupportedRequestError,
)
from kvkeep.marks import MAX_MARK, WORTH, Mark, Route, Search, decode_mark, encode_mark, entry_name, keys_of, mark_name
from kvkeep.prefixes import Prefix
from kvkeep.records import Identity
from kvkeep.storage.batch import Batch
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.entry_chain import Place, open_entry
from kvkeep.storage.locks import KeyLocks
from kvkeep.storage.rows import Row
from kvkeep.tiers import Tier

log = logging.getLogger("kvkeep")

_TRIES = 3
"""How many of the entries that marks name are tried, when one is gone or not what it should be."""

_ABSENT_FOR = 30.0
_PRESENT_FOR = 300.0
_BAD_FOR = 600.0
_AT_ONCE = 8
_WAIT = 600.0


class _LeftAloneError(Exception):
    """The remote failed a while ago, and is not to be asked now."""


@dataclass(frozen=True, slots=True)
class Brought:
    """What asking a remote gave.

    Attributes:
        changed: whether there may be more here than before.
        reason: why nothing came of what is there, as in :class:`~kvkeep.Match`; ``None`` where nothing is there.
    """

    changed: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push stored in a remote: entries and their bytes, and marks. All are 0 if everything was there."""

    entries: int = 0
    nbytes: int = 0
    marks: int = 0


class Remote:
    """One tier, as one store uses it. Safe to use from several threads.

    Args:
        tier: the tier.
        files: the store's entries.
        catalog: the store's rows.
        capacity: what the store may hold.
        locks: the store's locks: an entry is fetched once a host, and others wait for it.
        batch: where entries wait to be made durable, if they do.
        lock_timeout: seconds to wait for another process that fetches the same entry.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        files: EntryFiles,
        catalog: Catalog,
        capacity: Capacity,
        locks: KeyLocks,
        batch: Batch | None = None,
        lock_timeout: float = _WAIT,
    ) -> None:
        self.tier = tier
        self.breaker = Breaker()
        self._files = files
        self._catalog = catalog
        self._locks = locks
        self._lock_timeout = lock_timeout
        self._capacity = capacity
        self._batch = batch
        self._downloads = Downloads(
            tier, files, admit=capacity.admit, add=self._add, learn=self._learn, remove=self._take_back
        )
        self._marks: Remembered[Mark] = Remembered(_PRESENT_FOR)
        self._absent: Remembered[bool] = Remembered(_ABSENT_FOR)
        self._bad: Remembered[str] = Remembered(_BAD_FOR)

    # --- fetching ---

    def bring(
        self, identity: Identity, namespace: bytes, prefix: Prefix, *, limit: int, have: int, form: str = "exact"
    ) -> Brought:
        """Fetch the entry that gives a prompt the most tokens, if the remote has one that gives more than is here.

        Args:
            identity: what it must have been computed with.
            namespace: the namespace's digest.
            prefix: the prompt.
            limit: how many of its tokens can be used at most.
            have: how many can be used of what is here.
            form: how it must be stored.
        """
        if limit - have < WORTH:
            return Brought()
        route, wanted = Route(identity, namespace, prefix, form), Wanted(identity, namespace.hex(), form)

        def ask() -> Brought:
            reason: str | None = None
            for found in Search(route, limit=limit, have=have, look=self._look).run()[:_TRIES]:
                if self._is_here(found.key):
                    continue
                brought = self._fetch(found.key, wanted)
                if brought.changed:
                    return brought
                reason = reason or brought.reason
            return Brought(reason=reason)

        return self._asking(ask)

    def bring_key(self, key: EntryKey) -> Brought:
        """Fetch the entry with exactly this key, if the remote has it and it is not here."""
        wanted = Wanted(key.identity, key.namespace, key.form)

        def ask() -> Brought:
            if key.tp or self._is_here(key.hash) or self._absent.get(entry_name(key.hash)):
                return Brought()
            self._begin()
            there = self.tier.stat(entry_name(key.hash))
            self.breaker.worked()
            if there is None:
                self._absent.set(entry_name(key.hash), True)
                return Brought()
            return self._fetch(key.hash, wanted)

        return self._asking(ask)

    def _asking(self, ask: Callable[[], Brought]) -> Brought:
        try:
            return ask()
        except _LeftAloneError:
            return Brought(reason="remote: it failed a while ago, and is left alone for some time")
        except TierError as error:
            self.breaker.failed()
            log.warning("kvkeep: the remote failed, and is left alone for a while: %s", error)
            return Brought(reason=f"remote: {error}")
        except StoreError as error:
            return Brought(reason=f"remote: what it has could not be stored here: {error}")
        except Exception as error:  # whatever a tier does, the caller's work goes on
            self.breaker.failed()
            log.warning("kvkeep: the remote failed, and is left alone for a while", exc_info=True)
            return Brought(reason=f"remote: {type(error).__name__}: {error}")

    def _begin(self) -> None:
        """To be called before a request."""
        if not self.breaker.allows():
            raise _LeftAloneError

    def _look(self, key: str) -> Mark | None:
        """The mark of a position."""
        name = mark_name(key)
        if (known := self._marks.get(name)) is not None:
            return known
        if self._absent.get(name):
            return None
        self._begin()
        part = self.tier.get(name)
        self.breaker.worked()
        mark: Mark | None = None
        if part is not None:
            try:
                if part.stat.size > MAX_MARK:
                    raise ValueError(f"it is not a mark: it has {part.stat.size} bytes")
                mark = decode_mark(part.read())
            except ValueError as error:
                log.warning("kvkeep: %s in the remote is passed over: %s", name, error)
        if mark is None:
            self._absent.set(name, True)
        else:
            self._marks.set(name, mark)
        return mark

    def _is_here(self, key: str) -> bool:
        return self._files.is_there(key) and bool(self._catalog.lineage(key))

    def _fetch(self, key: str, wanted: Wanted) -> Brought:
        """Fetch an entry, one process at a time."""
        if (why := self._bad.get(key)) is not None or self._absent.get(entry_name(key)):
            return Brought(reason=None if why is None else f"remote: {why}")
        try:
            with self._locks.hold(f"{key}-remote", timeout=self._lock_timeout) as free:
                if self._is_here(key):  # whoever held the lock before has just fetched it
                    return Brought(changed=True)
                if not free:
                    return Brought(reason="remote: another process is fetching the entry still")
                self._begin()
                fetched = self._downloads.bring(key, wanted)
        except EntryNotFoundError:  # a mark outlived its entry
            self._absent.set(entry_name(key), True)
            return Brought()
        except EntryDamagedError as error:
            why = f"the entry {key} there is {_kind(error)} ({error.reason})"
            log.warning("kvkeep: %s; it was not taken over", why)
        else:
            log.info("kvkeep: fetched the entry %s from the remote, %d bytes", key, fetched)
            return Brought(changed=True)
        self._bad.set(key, why)
        return Brought(reason=f"remote: {why}")

    def refuse(self, key: str, reason: str) -> None:
        """Do not fetch an entry again for a while: a live model has shown that it is wrong."""
        self._bad.set(key, reason)

    def _add(self, row: Row) -> None:
        if self._batch is None:
            self._capacity.add(row)
        else:
            self._catalog.hold(row)
            self._batch.put(row)

    def _learn(self, row: Row) -> None:
        if self._catalog.row(row.key) is None:
            self._catalog.found(row)

    def _take_back(self, key: str) -> None:
        if self._batch is not None:
            self._batch.drop(key)
        self._catalog.forget(key)
        self._files.remove(key)

    # --- pushing ---

    def push(self, key: str) -> Pushed:
        """Store an entry in the remote, with those that it continues. What is there stays, and costs no upload.

        An entry is there before its marks, and what it continues before it.

        Raises:
            EntryNotFoundError: it is not here, or not whole.
            EntryDamagedError: it is damaged, or continues what others have computed otherwise there.
            UnsupportedRequestError: it is one rank's share of a cache.
            TierError: the remote failed.
        """
        lineage = self._catalog.lineage(key)
        if not lineage:
            raise EntryNotFoundError(f"no entry has the key {key}, or what it continues is gone")
        done = Pushed()
        for number in range(len(lineage) - 1, -1, -1):
            one = self._push_link(lineage[number:], keep=bool(number))
            done = Pushed(done.entries + one.entries, done.nbytes + one.nbytes, done.marks + one.marks)
        return done

    def _push_link(self, lineage: list[Row], *, keep: bool) -> Pushed:
        """Store one entry; with ``keep`` another one continues it, so what is there must be this very one."""
        row, name = lineage[0], entry_name(lineage[0].key)
        try:
            with open_entry(self._files, Place(row.key)) as file:
                file.verify_all()
                ids, meta = file.read_ids(), file.header.meta
            if meta.key.tp:
                raise UnsupportedRequestError("one rank's share of a tensor-parallel cache is not pushed")
            data = self._files.read_whole(row.key)
        except FileNotFoundError:
            raise EntryNotFoundError(f"the entry {row.key} is gone") from None
        stored = self.tier.stat(name) is None and self.tier.put_if_absent(name, data)
        if not stored and keep and self._digests_there(name) != meta.digests:
            raise EntryDamagedError(f"the entry {row.key} is in the remote as another host has computed it")
        route = Route(meta.key.identity, bytes.fromhex(row.namespace), Prefix(ids, meta.key.media), meta.key.form)
        mark, alive = encode_mark(lineage), Remembered[bool](_PRESENT_FOR)
        alive.set(row.key, True)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            keys = keys_of(route, row.start, row.end)
            marks = sum(pool.map(lambda key: self._put_mark(key, mark, alive), keys))
        for known in (self._marks, self._absent):
            for key in keys_of(route, row.start, row.end):
                known.forget(mark_name(key))
        return Pushed(int(stored), len(data) if stored else 0, marks)

    def _put_mark(self, key: str, mark: bytes, alive: Remembered[bool]) -> bool:
        """Put a mark, in the place of one that is stale; whether it was put."""
        name = mark_name(key)
        if self.tier.put_if_absent(name, mark):
            return True
        part = self.tier.get(name)
        if part is not None:
            try:
                named = decode_mark(part.read())[0].key
            except ValueError:
                named = None
            if named is not None:
                if alive.get(named) is None:
                    alive.set(named, self.tier.stat(entry_name(named)) is not None)
                if alive.get(named):
                    return False
            self.tier.delete(name)
        return self.tier.put_if_absent(name, mark)

    def _digests_there(self, name: str) -> str | None:
        part = self.tier.get(name, 0, 1 << 20, bulk=True)
        if part is None:
            return None
        data, size = part.read(), part.stat.size
        return decode_header(data[8 : 8 + header_length(data[:8], size)], size).meta.digests


def _kind(error: EntryDamagedError) -> str:
    if isinstance(error, EntryUntrustedError):
        return "not trusted"
    return "of a kind that this version does not know" if isinstance(error, EntryUnknownError) else "damaged"
