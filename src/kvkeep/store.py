"""The store: entries in a directory, found by prefix, served with every check, shared by any number of processes."""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.capacity import Capacity
from kvkeep.catalog import Catalog, Obstacle, why_no_more
from kvkeep.clearing import Clearing
from kvkeep.collection import GRACE, QUARANTINE_DAYS, Collection, Collector, Removal
from kvkeep.entry_format import EntryKey, EntryMeta, Header
from kvkeep.errors import (
    EntryDamagedError,
    EntryError,
    EntryInUseError,
    EntryNotFoundError,
    EntryUnknownError,
    EntryUntrustedError,
    InvalidRequestError,
    StoreNotFoundError,
    StoreReadOnlyError,
    StoreWriteError,
)
from kvkeep.eviction import EvictionPolicy, PolicyName, policy_of
from kvkeep.grounds import MIN_SHARED, WHOLE, Ground, ground_on, supersede
from kvkeep.keys import TokenIds, namespace_digest
from kvkeep.matching import best_of
from kvkeep.prefixes import Prefix, before_tokens, shared_with_media
from kvkeep.records import Entry, GenerateReport, Identity, Match, Resident
from kvkeep.remote import Pushed, Remote
from kvkeep.resident import HeldEntry, ResidentTier
from kvkeep.settings import Durability, OnError, SaveMode, Verify, check_save, default_store_path, parse_size
from kvkeep.signing import KeySource, keyring
from kvkeep.storage import skeleton
from kvkeep.storage.batch import Batch
from kvkeep.storage.budget import Limits
from kvkeep.storage.chats import Chats
from kvkeep.storage.entries import Draft, EntryFile, EntryFiles
from kvkeep.storage.entry_chain import MAX_LINKS, PARENT_DIGESTS, EntryChain, Place, open_entry
from kvkeep.storage.fileio import changing
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Row
from kvkeep.storage.journal import Journal
from kvkeep.storage.locks import KeyLocks
from kvkeep.storage.refs import Ref, Refs
from kvkeep.storage.verified import FileIdentity
from kvkeep.tiers import Tier, open_tier
from kvkeep.trouble import Trouble

if TYPE_CHECKING:
    from kvkeep.bound import BoundStore

log = logging.getLogger("kvkeep")

_NEARBY = 256
"""How many entries are looked at to explain a miss."""

_FULL = {errno.ENOSPC, errno.EDQUOT}

ATTEMPTS = 8
"""How many entries a lookup may lose to damage or removal before it gives up; each loss is remembered."""


class CacheStore:
    """A directory of prefilled KV caches.

    Any number of processes may use one directory at once and may be killed at any moment. The directory is made when
    it does not exist, unless the store is read-only.

    Args:
        path: the directory; ``None`` means ``$KVKEEP_STORE``, else a folder in the user's cache directory.
        namespace: keeps tenants apart: nothing stored under one is ever found under another.
        readonly: never write, not even an index; for stores on a read-only mount or owned by somebody else.
        shared: let the directory's group read and write (modes 2770 and 0440) instead of this user alone. Decided when
            the store is made; an existing one stays what it is.
        verify: ``"first"`` checks the digests of what is read once a process, ``"always"`` each time, ``"never"`` not.
        on_error: ``"miss"`` turns whatever is wrong with the store while a program looks up or generates into a miss
            with a reason, and logs it once in a while; ``"raise"`` raises it. What asks for something to be stored
            raises in any case.
        strict_identity: make an entry that another attention kernel computed a miss. Without it, kernels that
            transformers ships serve each other: the same numbers, rounded differently.
        lock_timeout: seconds to wait for another process that prefills the same prefix.
        max_bytes: what all entries together may take, in bytes or as ``"10GiB"`` or ``"500MB"``: storing evicts what is
            over it. ``None`` means what the store itself says (``kvkeep init --max-bytes``), or no limit.
        min_free: what the volume keeps free, of which at most a tenth of it counts; below it storing evicts, or is
            refused.
        quota: what the entries of each namespace may take, so that no tenant flushes the others; else as ``max_bytes``.
        durability: what a power cut may take of what was stored; what is served is right in any case. ``"full"``:
            nothing, for an entry is on the medium before its row. ``"batch"``: the last 64 entries or 5 seconds, which
            are brought there together, and by :meth:`flush`. ``"none"``: what the system had not written by itself.
        eviction: who goes first: ``"lru"`` the one unused the longest, ``"cost"`` the one whose bytes save the least
            work, or an :class:`~kvkeep.eviction.EvictionPolicy` of your own.

        key: sign what is stored, and serve only what is signed with this key or one of ``keys``: 32 to 64 secret
            bytes, or the path of a file of keys, one a line in hex digits, of which the first signs. ``None`` means
            the file that ``$KVKEEP_KEY_FILE`` names, if it is set; without a key, signatures are not looked at.
        keys: further keys whose entries are served, such as the one that ``key`` replaces.
        save: what is stored of every ``generate``; see :meth:`BoundStore.generate <kvkeep.BoundStore.generate>`.
            ``"never"`` by default: one-off prompts must not fill a disk.
        min_tokens: what is shorter is not stored by ``save``.
        remote: a place that other hosts share: a URL such as ``s3://bucket/prefix``, the path of a directory, or a
            :class:`~kvkeep.tiers.Tier`. What is not here is looked for there, and fetched with every check before
            anybody finds it; what goes wrong there is a miss with a reason.
        remote_options: what ``obstore.store.from_url`` takes beside the URL; see :class:`~kvkeep.tiers.ObjectTier`.

    Raises:
        StoreNotFoundError: if the directory is absent and ``readonly`` is set.
        StoreFormatError: if the directory is something else, or a store of a newer format.

    Example:
        >>> store = CacheStore(getfixture("tmp_path") / "store")
        >>> store.entries()
        []
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "",
        readonly: bool = False,
        shared: bool = False,
        verify: Verify = "first",
        on_error: OnError = "miss",
        strict_identity: bool = False,
        lock_timeout: float = 600.0,
        max_bytes: int | str | None = None,
        min_free: int | str = "1GiB",
        quota: int | str | None = None,
        eviction: PolicyName | EvictionPolicy = "lru",
        durability: Durability = "full",
        save: SaveMode = "never",
        min_tokens: int = 64,
        key: KeySource | None = None,
        keys: Iterable[KeySource] = (),
        remote: str | os.PathLike[str] | Tier | None = None,
        remote_options: Mapping[str, Any] | None = None,
    ) -> None:
        if verify not in ("first", "always", "never"):
            raise InvalidRequestError(f"verify must be 'first', 'always' or 'never', not {verify!r}")
        if on_error not in ("miss", "raise"):
            raise InvalidRequestError(f"on_error must be 'miss' or 'raise', not {on_error!r}")
        if durability not in ("full", "batch", "none"):
            raise InvalidRequestError(f"durability must be 'full', 'batch' or 'none', not {durability!r}")
        self._keys = keyring(key, keys)
        if self._keys is not None and verify == "never":
            raise InvalidRequestError("a key needs verify='first' or 'always', for a signature goes over digests")
        if remote is not None and readonly:
            raise InvalidRequestError("what comes from a remote is stored here: remote= does not go with readonly=True")
        check_save(save)
        policy, floor = policy_of(eviction), parse_size(min_free, "min_free")
        budget = None if max_bytes is None else parse_size(max_bytes, "max_bytes")
        share = None if quota is None else parse_size(quota, "quota")
        self.path = Path(path) if path is not None else default_store_path()
        self.namespace = namespace
        self.namespace_digest = namespace_digest(namespace)
        self.readonly = readonly
        self.on_error = on_error
        self.strict_identity = strict_identity
        self.lock_timeout = lock_timeout
        self.save: SaveMode = save
        self.min_tokens = min_tokens
        with skeleton.opening(self.path):
            if not readonly:
                skeleton.init(self.path, shared=shared)
            found = skeleton.check(self.path, readonly=readonly)
            self._directory = Directory(self.path, readonly=readonly, shared=found.shared, sync=durability == "full")
        self._files = EntryFiles(self._directory, verify=verify, keys=self._keys)
        self.journal = Journal(self._directory)
        self._trouble = Trouble(f"the store {self.path}", raises=on_error == "raise")
        self._catalog = Catalog(
            self._directory, self._files, on_damage=self.journal.damaged, on_trouble=self._trouble.reason
        )
        self.memory = ResidentTier(self._files, self._catalog)
        self.chats = Chats(self._directory, namespace)
        self._locks = KeyLocks(self._directory)
        self._refs = Refs(self._directory)
        self._capacity = Capacity(
            self._directory,
            self._files,
            self._catalog,
            refs=self._refs,
            journal=self.journal,
            limits=Limits(
                max_bytes=budget if budget is not None else found.max_bytes,
                quota=share if share is not None else found.quota,
                min_free=floor,
            ),
            policy=policy,
        )
        self._supersede = partial(supersede, self._catalog, self._capacity, self._refs)
        self._batch: Batch | None = None
        if durability == "batch" and not readonly:
            self._batch = Batch(
                self._files, add=self._capacity.add, forget=self._catalog.forget, supersede=self._supersede
            )
            weakref.finalize(self, self._batch.flush_quietly)  # also at exit, while the directory is still open
        self._remote: Remote | None = None
        if remote is not None:
            self._remote = Remote(
                open_tier(remote, remote_options),
                files=self._files,
                catalog=self._catalog,
                capacity=self._capacity,
                locks=self._locks,
                batch=self._batch,
                lock_timeout=lock_timeout,
            )

    def __repr__(self) -> str:
        return f"CacheStore({str(self.path)!r})"

    def bind(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        model_id: str | None = None,
        salt: str | None = None,
        guard: bool = True,
        save: SaveMode | None = None,
        on_report: Callable[[GenerateReport], None] | None = None,
    ) -> BoundStore:
        """Fingerprint the live model and tokenizer, and return the store as it is for exactly these.

        Args:
            model: a transformers model that can generate. It is not kept alive.
            tokenizer: its tokenizer or processor; ``None`` if you only ever pass token ids.
            model_id: your own word for the weights, instead of hashing them.
            salt: anything that decides KV and that hashing cannot see.
            guard: compute one token of every hit again and compare it, so that what hashing cannot see is seen.
            save: what is stored of every ``generate``; the store's setting by default.
            on_report: called with the report of every ``generate``.
        """
        from kvkeep.bound import BoundStore  # imports torch and transformers

        if save is not None:
            check_save(save)
        return BoundStore(
            self, model, tokenizer, model_id=model_id, salt=salt, guard=guard, save=save, on_report=on_report
        )

    # --- what is stored ---

    def entries(self) -> list[Entry]:
        """Every entry, the oldest first."""
        names = self._names()
        rows = sorted(self._catalog.rows(), key=lambda row: (row.created, row.key))
        return [_entry(row, names.get(row.key, ())) for row in rows]

    def resident(self) -> list[Resident]:
        """What :meth:`BoundStore.preload <kvkeep.BoundStore.preload>` holds in memory, the latest served at the end."""
        names = self._names()
        return [
            Resident(
                entry=_entry(held.lineage[0], names.get(held.lineage[0].key, ())),
                nbytes=held.nbytes,
                device=held.device,
                hits=held.hits,
            )
            for held in self.memory.entries()
        ]

    def entry(self, wanted: str) -> Entry:
        """The entry with this name, key, or unambiguous start of a key (at least 4 digits).

        Raises:
            EntryNotFoundError: if there is none, or more than one.
        """
        ref = self._refs.get(wanted)
        key = wanted if ref is None else ref.key
        entries = self.entries()
        found = [entry for entry in entries if entry.key == key]
        if not found and ref is None and len(wanted) >= 4:
            found = [entry for entry in entries if entry.key.startswith(wanted)]
        if len(found) != 1:
            what = f"{len(found)} entries have keys that start with" if found else "no entry has the key or name"
            raise EntryNotFoundError(f"{what} {wanted!r}; `kvkeep ls` shows them all")
        return found[0]

    def header(self, key: str) -> Header:
        """The checked header of an entry.

        Raises:
            EntryNotFoundError: if there is none.
            EntryDamagedError: if it is not what was stored.
        """
        try:
            with self._files.open(key) as file:
                return file.header
        except FileNotFoundError:
            raise EntryNotFoundError(f"no entry has the key {key}") from None

    def read_ids(self, key: str) -> TokenIds:
        """The token ids of an entry. Raises as :meth:`header` does."""
        try:
            with self._files.open(key) as file:
                return file.read_ids()
        except FileNotFoundError:
            raise EntryNotFoundError(f"no entry has the key {key}") from None

    def get(self, key: str) -> Entry | None:
        """The entry with exactly this key, if its file is there and its header is sound, and all that it continues is.

        One that continues what is gone serves nobody any more, and is removed.

        Raises:
            StoreError: it cannot be read now.
        """
        with skeleton.opening(self.path):
            return self._get(key)

    def _get(self, key: str) -> Entry | None:
        found = self._row_of(key)
        if found is None:
            return None
        (row, _), link = found, found
        for _ in range(MAX_LINKS):
            parent = link[0].parent
            if parent is None:
                return _entry(row, self._names().get(key, ()))
            before, (_, meta) = self._row_of(parent), link
            if before is None and self._files.is_there(parent):
                return None  # of a newer version, or signed with a key that others have: it is theirs
            if before is None or meta.recorded.get(PARENT_DIGESTS) not in (None, before[1].digests):
                break
            link = before
        if not self.readonly:
            log.warning("kvkeep: entry %s continues one that is gone; it will be computed again", key)
            self._catalog.forget(key)
            self._files.remove(key)
        return None

    def fetch(self, key: EntryKey) -> Entry | None:
        """The entry with exactly this key, as :meth:`get`; one that is not here is fetched from the remote."""
        entry = self.get(key.hash)
        if entry is None and self._remote is not None and self._remote.bring_key(key).changed:
            entry = self.get(key.hash)
        return entry

    def push(self, key: str) -> Pushed:
        """Store an entry in the remote, with those that it continues; what is there already stays.

        Raises:
            InvalidRequestError: this store has no remote.
            EntryNotFoundError: no entry has this key, or what it continues is gone.
            EntryDamagedError: it is damaged, or continues what another host has computed otherwise there.
            TierError: the remote failed.
        """
        if self._remote is None:
            raise InvalidRequestError("this store has no remote: open it with CacheStore(path, remote=...)")
        return self._remote.push(key)

    def _row_of(self, key: str) -> tuple[Row, EntryMeta] | None:
        """The row and the metadata of an entry by itself, if its file is there and its header is sound."""
        try:
            with self._files.open(key) as file:
                row = self._catalog.row(key)
                if row is None:
                    row = self._catalog.found(Row.from_header(file.header, b"".join(file.read_chain())))
                return None if row is None else (row, file.header.meta)
        except FileNotFoundError:
            return None
        except EntryDamagedError as error:
            self._catalog.damaged(key, error)
            return None

    def verify(self, key: str, *, read_data: bool = True) -> str | None:
        """Check every byte of an entry: ``None`` if it is whole, else what is wrong. A damaged one is set aside.

        Without ``read_data`` only its header and ids, and that what it continues is there.
        """
        place = Place(key)
        try:
            with open_entry(self._files, place) as file:
                if read_data:
                    file.verify_all()
                else:
                    file.read_ids()
        except FileNotFoundError:
            return "the file is gone" if place.key == key else f"the entry {place.key} that it continues is gone"
        except EntryDamagedError as error:
            self._catalog.damaged(place.key, error, place.file)
            return error.reason if place.key == key else f"{place.key}, which it continues: {error.reason}"
        return None

    def descendants(self, key: str) -> list[Entry]:
        """The entries that continue this one, and those that continue them, each after what it continues."""
        children: dict[str, list[Entry]] = {}
        for entry in self.entries():
            if entry.parent is not None:
                children.setdefault(entry.parent, []).append(entry)
        found, seen, waiting = list[Entry](), {key}, [key]
        while waiting:
            for entry in children.get(waiting.pop(0), ()):
                if entry.key not in seen:
                    seen.add(entry.key)
                    found.append(entry)
                    waiting.append(entry.key)
        return found

    def remove(self, key: str, *, cascade: bool = False) -> bool:
        """Remove an entry and the names that point at it. Whoever reads it right now reads it to the end.

        Args:
            key: the entry's key.
            cascade: also remove the entries that continue it.

        Returns:
            Whether it was there.

        Raises:
            EntryInUseError: others continue it, which could not be read without it; nothing was removed.
            StoreReadOnlyError, StoreWriteError: if it could not be removed.
        """
        self.check_writable()
        with changing(self.path):
            others = self.descendants(key)
        if others and not cascade:
            raise EntryInUseError(
                f"{len(others)} {'entries continue' if len(others) > 1 else 'entry continues'} {key}, and would be "
                "lost with it: remove them first, or with cascade=True (kvkeep rm --cascade)"
            )
        for entry in reversed(others):
            self._remove(entry.key)
        return self._remove(key)

    def _remove(self, key: str) -> bool:
        with changing(self.path):
            for ref in self._refs.all():
                if ref.key == key:
                    self._refs.remove(ref.name)
        if self._batch is not None:
            self._batch.drop(key)
        self._catalog.forget(key)
        self.memory.drop(key)
        there = self._files.remove(key)
        self._catalog.removed(key)
        return there

    def remove_namespace(self, namespace: str | None = None, *, dry_run: bool = False) -> list[Removal]:
        """Remove all that is stored in a namespace, pinned or not, and what tells of it.

        That is: its entries with their names, damaged ones that were set aside, its conversations, and its rows and
        counters: the files of the index are made anew. Damaged entries of which nobody can tell whose they are go as
        well, and so do files that killed processes left behind. Nothing else of other namespaces is touched.

        Safe beside other processes: whoever reads an entry right now reads it to the end. What somebody stores in the
        namespace at the same time may stay, so stop its writers before.

        Args:
            namespace: its name; ``None`` means the store's own.
            dry_run: remove nothing, and say what would go.

        Returns:
            What was removed, or would be.

        Raises:
            StoreReadOnlyError: if this store never writes, and it is no dry run.
            StoreWriteError: something could not be removed, and all else is gone.
        """
        if not dry_run:
            self.check_writable()
        name = self.namespace if namespace is None else namespace
        with changing(self.path):
            clearing = Clearing(
                directory=self._directory,
                files=self._files,
                catalog=self._catalog,
                refs=self._refs,
                journal=self.journal,
                chats=Chats(self._directory, name),
                namespace=namespace_digest(name).hex(),
                dry_run=dry_run,
            )
            clearing.clear(drop=self._batch.drop if self._batch is not None else lambda key: None)
            collector = Collector(self._directory, self._catalog, self._refs, self._capacity, dry_run=dry_run)
            removed, failed = collector.collect_leftovers()
            self.memory.entries()  # what is gone is let go in memory, too
        if (failed := [*clearing.failed, *failed]) and not dry_run:
            what = "; ".join(f"{one.kind} {one.name}: {one.reason}" for one in failed[:3])
            raise StoreWriteError(f"{len(failed)} of what was to be removed could not be, and all else is gone: {what}")
        return [*clearing.removed, *removed]

    def name(self, entry: Entry, name: str, *, pin: bool = False, ttl: float | None = None) -> Entry:
        """Point a name at an entry; a name points at one entry, the latest.

        Raises:
            EntryNotFoundError: the entry is not there, or was evicted before it had the name.
        """
        self.check_writable()
        now = int(time.time())
        expires = None if ttl is None else int(now + ttl)
        self._refs.put(Ref(name=name, key=entry.key, pin=pin, expires=expires, created=now))
        if not self._files.is_there(entry.key):  # asked after the name is there, as whoever evicts does the reverse
            raise EntryNotFoundError(f"the entry {entry.key} is not there any more: store it again, and name that")
        return replace(entry, names=tuple(sorted({*entry.names, name})))

    def gc(
        self, *, dry_run: bool = False, grace: float = GRACE, quarantine_days: float = QUARANTINE_DAYS
    ) -> Collection:
        """Remove what has expired, what killed processes left behind, and what is over the limits.

        Safe beside other processes that read and write.

        Args:
            dry_run: remove nothing, and say what would go.
            grace: seconds that a file nobody accounts for is left alone, because it may be in the making.
            quarantine_days: days that damaged entries are kept to be looked at.

        Raises:
            StoreReadOnlyError: if this store never writes, and it is no dry run.
        """
        if not dry_run:
            self.check_writable()
        with changing(self.path):
            return Collector(
                self._directory,
                self._catalog,
                self._refs,
                self._capacity,
                grace=grace,
                quarantine_days=quarantine_days,
                dry_run=dry_run,
            ).collect()

    def repair(self) -> Collection:
        """Make rows and files agree, and remove the entries that continue what is gone.

        What is damaged inside is found by :meth:`verify`. Safe beside other processes; none has to be told.

        Raises:
            StoreReadOnlyError: if this store never writes.
        """
        self.check_writable()
        with changing(self.path):
            return Collector(self._directory, self._catalog, self._refs, self._capacity, grace=0).repair()

    def flush(self) -> None:
        """Make durable what was stored with ``durability="batch"``, and let other processes find it.

        Raises:
            StoreWriteError: an entry could not be made durable, and is gone.
        """
        if self._batch is not None:
            with changing(self.path):
                self._batch.flush()

    def check_writable(self) -> None:
        """Raise StoreReadOnlyError if this store never writes."""
        if self.readonly:
            raise StoreReadOnlyError(f"the store {self.path} was opened read-only")

    def check_fits(self, nbytes: int) -> None:
        """Raise StoreFullError if an entry of at least so many bytes fits no budget, whatever is evicted for it."""
        self._capacity.check_fits(nbytes)

    def _names(self) -> dict[str, tuple[str, ...]]:
        names: dict[str, tuple[str, ...]] = {}
        for ref in self._refs.all():
            names[ref.key] = (*names.get(ref.key, ()), ref.name)
        return names

    # --- finding and serving ---

    def find(
        self, identity: Identity, prefix: Prefix, *, limit: int, obstacle: Obstacle | None = None, form: str = "exact"
    ) -> Match:
        """The longest stored part of ``prefix`` that is usable, up to ``limit`` tokens, by what the index knows.

        What a remote has more of is fetched before.
        """
        return self._find(identity, prefix, limit, obstacle, form, memory=True)[0]

    def _find(
        self,
        identity: Identity,
        prefix: Prefix,
        limit: int,
        obstacle: Obstacle | None,
        form: str,
        *,
        memory: bool,
    ) -> tuple[Match, HeldEntry | None]:
        """What :meth:`find` returns, and the entry, if it is held in memory: of what serves as much, that is taken."""
        namespace, above, held = self.namespace_digest, 0, None
        if memory:
            above, held = self.memory.best(identity, namespace.hex(), prefix, limit, obstacle=obstacle, form=form)
        search = partial(
            self._catalog.search, identity, namespace, prefix, limit, obstacle=obstacle, form=form, above=above
        )
        tokens, row, reason = search()
        if self._remote is not None:
            have = max(above, tokens)
            brought = self._remote.bring(identity, namespace, prefix, limit=limit, have=have, form=form)
            if brought.changed:
                tokens, row, reason = search()
            reason = reason if row is not None else brought.reason or reason
        if row is not None:
            held = None
        elif held is not None:
            tokens, row = above, held.lineage[0]
            reason = why_no_more(row, prefix, tokens, min(row.end, limit))
        entry = None if row is None else _entry(row, ())
        exact = entry is None or entry.exact
        return Match(tokens=tokens, entry=entry, reason=reason, exact=exact, resident=held is not None), held

    def nearby(self, identity: Identity, starts: Sequence[Prefix]) -> tuple[list[Entry], list[Entry]]:
        """The entries that may share the most tokens with a prompt: some that may serve it, and others that do not.

        Args:
            identity: what the first were computed with; the others with something else, or in another namespace.
            starts: the prompt, and other beginnings that it could have had.
        """
        own: dict[str, Row] = {}
        others: dict[str, Row] = {}
        for prefix in starts:
            rows, strangers = self._catalog.nearby(identity, self.namespace_digest, prefix, _NEARBY)
            own.update((row.key, row) for row in rows)
            others.update((row.key, row) for row in strangers)
        names = self._names()
        found, foreign = ([_entry(row, names.get(row.key, ())) for row in rows.values()] for rows in (own, others))
        return found, foreign

    def recorded_by_stranger(self, identity: Identity, prefix: Prefix) -> Mapping[str, Any]:
        """What the nearest entry that was computed with something else says of how; empty if there is none."""
        row = self._catalog.stranger(identity, self.namespace_digest, prefix)
        try:
            return {} if row is None else self.header(row.key).meta.recorded
        except (EntryError, OSError):
            return {}

    def serve(
        self,
        identity: Identity,
        prefix: Prefix,
        *,
        limit: int,
        use: Callable[[EntryFile | EntryChain, int], None],
        lend: Callable[[HeldEntry, int], None] | None = None,
        obstacle: Obstacle | None = None,
        form: str = "exact",
    ) -> Match:
        """Find the longest usable prefix and hand its open, checked file to ``use(file, tokens)``.

        With ``lend``, what serves as much and is held in memory is handed to that instead, and no file is opened.
        An entry that is gone or damaged makes way for the next best one. Raises what ``use`` raises, except that a
        read error and a ``ValueError`` (the entry does not fit) are misses.
        """
        trouble: str | None = None
        for _ in range(ATTEMPTS):
            match, held = self._find(identity, prefix, limit, obstacle, form, memory=lend is not None)
            if match.entry is None:
                return replace(match, reason=trouble or match.reason)
            place = Place(match.entry.key)
            try:
                if held is not None and lend is not None:
                    _check_echo(held, identity, self.namespace_digest.hex(), prefix, match.tokens, form)
                    lend(held, match.tokens)
                    self.memory.served(held)
                    return match
                with open_entry(self._files, place) as file:
                    _check_echo(file, identity, self.namespace_digest.hex(), prefix, match.tokens, form)
                    use(file, match.tokens)
                return replace(match, reason=trouble or match.reason)
            except FileNotFoundError:
                self._catalog.lost(place.key)
            except EntryDamagedError as error:
                trouble = f"{_code(error)}: {error.reason}"
                self._catalog.damaged(place.key, error, place.file)
            except OSError as error:
                return Match(tokens=0, entry=None, reason=self.failed(error))
            except ValueError as error:
                return Match(tokens=0, entry=None, reason=f"layout: {error}")
        return Match(tokens=0, entry=None, reason=trouble or "unreadable: the entries found were gone when opened")

    def failed(self, error: Exception) -> str:
        """The reason of a miss for whatever went wrong here, logged once in a while; with ``on_error="raise"`` raises.

        For programs that generate, whose work goes on.
        """
        return self._trouble.reason(error)

    def refute(self, key: str, reason: str, file: FileIdentity | None) -> None:
        """Set an entry aside that is whole and yet wrong, as a live model has shown; with ``file``, only that file."""
        self.memory.drop(key)
        self._catalog.damaged(key, EntryDamagedError(reason), file)
        if self._remote is not None:
            self._remote.refuse(key, reason)

    @contextmanager
    def locked(self, key: str) -> Iterator[bool]:
        """Hold the advisory lock of a key, so that one process prefills it; yields whether it is really held."""
        with self._locks.hold(key, timeout=self.lock_timeout) as held:
            yield held

    def put(self, draft: Draft) -> Entry:
        """Store an entry, as durable as the store makes it: file first, then its row. The first one under a key stays.

        What the limits then ask for is evicted: never this entry, and no more than they ask for.

        Raises:
            EntryNotFoundError: what it was to continue is gone, and nothing was stored.
            StoreFullError: it does not fit beside what must stay, and nothing was stored.
            StoreReadOnlyError, StoreWriteError: nothing was stored.
        """
        self.check_writable()
        began = time.perf_counter()
        header, published = self._write(draft)
        if not published:
            if (stored := self.get(header.meta.key.hash)) is not None:
                return stored
            header, published = self._write(draft)  # what was there continued an entry that is gone
            if not published and header.meta.parent != draft.meta.parent:  # or one that others trust: it makes way, too
                self._files.quarantine(header.meta.key.hash, f"it continues {header.meta.parent}, which is of no use")
                header, published = self._write(draft)
            if not published:
                raise StoreWriteError("an entry of this key is there that continues one which cannot be used here")
        row = Row.from_header(header, b"".join(draft.chain))
        if self._batch is None:
            self._capacity.add(row)
        else:
            self._catalog.hold(row)
            self._batch.put(row)
        # Asked when the row is there, as whoever evicts does the reverse.
        if row.parent is not None and not self._files.is_there(row.parent):
            self._remove(row.key)
            raise EntryNotFoundError(f"the entry {row.parent} that this one was to continue is gone")
        if published:
            self.journal.stored(row.nbytes, time.perf_counter() - began)
        names: tuple[str, ...] = ()
        with suppress(OSError):  # it is stored, and only its names cannot be read
            names = self._names().get(row.key, ())
        return _entry(row, names)

    def ground(self, key: str, tokens: int, *, links: int = MAX_LINKS) -> Ground:
        """What a new entry is to continue whose first ``tokens`` tokens the entry with this key holds, to the bit.

        The chain gets at most so many links.
        """
        lineage = self._catalog.lineage(key)
        usable, row, _ = best_of(lineage, tokens, tokens, rows_alone=True) if lineage else (0, None, None)
        if row is None or usable < MIN_SHARED:
            return WHOLE
        found = ground_on(lineage[lineage.index(row) :], usable, links=links)
        try:
            return found if found.parent is None else replace(found, digests=self.header(found.parent).meta.digests)
        except (EntryError, OSError):
            return WHOLE

    def supersede(self, entry: Entry, keys: Sequence[str]) -> None:
        """Remove those of some entries that a new one makes superfluous, once it is durable. A named one stays."""
        if keys and (self._batch is None or not self._batch.replaces(entry.key, keys)):
            self._supersede(entry.key, keys)

    def _write(self, draft: Draft) -> tuple[Header, bool]:
        """Write an entry's file; where the volume is found full, evict once and try once more."""
        try:
            return self._files.put(draft, admit=self._capacity.admit)
        except StoreWriteError as error:
            if error.errno not in _FULL or not self._capacity.relieve(self._files.size_of(draft)):
                raise
            log.warning("kvkeep: the volume of %s is full; entries were evicted for a new one", self.path)
        return self._files.put(draft)


def _check_echo(
    file: EntryFile | EntryChain | HeldEntry,
    identity: Identity,
    namespace: str,
    prefix: Prefix,
    tokens: int,
    form: str,
) -> None:
    """What the file says of itself must be what was asked for, whatever the index said."""
    key = file.header.meta.key
    if key.identity != identity or key.namespace != namespace or key.form != form or key.tp:
        raise EntryDamagedError("the file is not the entry that the index describes")
    if file.header.meta.start or file.header.meta.end < tokens:
        raise EntryDamagedError("the file holds other tokens than the index says")
    before = before_tokens(key.media)
    if before != prefix.before or bool(before) != bool(file.header.meta.cross):
        raise EntryDamagedError("the file holds what another encoder input gave than the index says")
    if shared_with_media(key.media, prefix.media, tokens)[1] is not None:
        raise EntryDamagedError("the file holds other media than the index says")
    if file.read_ids().int32[: 4 * tokens] != prefix.ids.int32[: 4 * tokens]:
        raise EntryDamagedError("the stored token ids are not those that its key stands for")


def _code(error: EntryDamagedError) -> str:
    """The word that the reason of a miss begins with."""
    if isinstance(error, EntryUntrustedError):
        return "untrusted"
    return "unknown" if isinstance(error, EntryUnknownError) else "damaged"


def _entry(row: Row, names: tuple[str, ...]) -> Entry:
    return Entry(
        key=row.key,
        start=row.start,
        end=row.end,
        nbytes=row.nbytes,
        created=row.created,
        identity=row.identity,
        namespace=row.namespace,
        parent=row.parent,
        names=tuple(sorted(names)),
        form=row.form,
    )


def open_existing(path: str | os.PathLike[str] | None, *, readonly: bool = False, **settings: Any) -> CacheStore:
    """Open a store that must already be there, as the command does.

    Raises:
        StoreNotFoundError: if there is none.
    """
    where = Path(path) if path is not None else default_store_path()
    if not where.is_dir():
        raise StoreNotFoundError(f"there is no store at {where}; `kvkeep init` makes one")
    return CacheStore(where, readonly=readonly, **settings)
