"""The resident tier: entries in memory, within a budget, for all binds of one store.

A prompt is compared with the ids that an entry brought along, by the same rules as on disk, and what is served costs no
look at its file. It is served only as long as the store still has the entry: what is removed, evicted or set aside
there, by whichever process, is let go here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvkeep.catalog import Catalog, Obstacle
from kvkeep.entry_format import EntryMeta, Header, TensorSpec, tensor_name
from kvkeep.errors import EntryDamagedError, EntryNotFoundError, InvalidRequestError
from kvkeep.forks import renew_after_fork
from kvkeep.keys import TokenIds, common_prefix
from kvkeep.matching import usable
from kvkeep.prefixes import Prefix, before_tokens, shared_with_media
from kvkeep.records import Identity
from kvkeep.storage.entries import EntryFile, EntryFiles
from kvkeep.storage.entry_chain import EntryChain, Place, open_entry
from kvkeep.storage.index import Row
from kvkeep.storage.rows import trims
from kvkeep.storage.verified import FileIdentity


class Layers(Protocol):
    """The layers of one stem, in memory."""

    nbytes: int
    devices: set[str]


@dataclass(slots=True, eq=False)
class HeldEntry:
    """An entry in memory, with all that it continues: from token 0 on.

    Attributes:
        lineage: its row, and behind it those of what it continues.
        header: its header, with the layers as they are over all of these.
        identity: which state of which file it was read from.
        ids: its token ids from token 0 on.
        layers: its layers: those of ``"layers"``, and of ``"cross"`` where there are such.
        trims: what decides how it can be cut, as :attr:`~kvkeep.storage.rows.Row.trims` but over all of these.
        hits: how often it was served.
    """

    lineage: list[Row]
    header: Header
    identity: FileIdentity
    ids: TokenIds
    layers: Mapping[str, Any]
    trims: tuple[tuple[int, int], ...]
    hits: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(held.nbytes for held in self.layers.values())

    @property
    def device(self) -> str:
        """Where they lie: one device, or several with commas between."""
        return ",".join(sorted({device for held in self.layers.values() for device in held.devices}))

    def read_ids(self) -> TokenIds:
        """The token ids from token 0 on."""
        return self.ids

    def usable(self, prefix: Prefix, limit: int) -> int:
        """How many leading tokens of a prompt it serves, at most ``limit``."""
        meta = self.header.meta
        common = min(common_prefix(self.ids.int32, prefix.ids.int32), limit)
        common, _ = shared_with_media(meta.key.media, prefix.media, common)
        return usable(self.trims, self.lineage[0].snapshots, meta.end, common, limit)[0]


class ResidentTier:
    """The entries that one store holds in memory. Safe to use from several threads; a forked child has them, too.

    Attributes:
        max_bytes: what their tensors may take together: beyond it those go that were not served for the longest time.
            ``None`` is no limit.
    """

    def __init__(self, files: EntryFiles, catalog: Catalog) -> None:
        self.max_bytes: int | None = None
        self._files, self._catalog = files, catalog
        self._entries: OrderedDict[str, HeldEntry] = OrderedDict()
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the locks anew."""
        self._mutex, self._loading = threading.Lock(), threading.Lock()

    def entries(self) -> list[HeldEntry]:
        """What is held, the one that was served last at the end; what the store has no more is let go."""
        with self._mutex:
            held = list(self._entries.values())
        return [one for one in held if self._is_current(one)]

    def best(
        self,
        identity: Identity,
        namespace: str,
        prefix: Prefix,
        limit: int,
        *,
        obstacle: Obstacle | None = None,
        form: str = "exact",
    ) -> tuple[int, HeldEntry | None]:
        """The most leading tokens of a prompt that one of them serves, and which; arguments as of a search on disk."""
        wanted = identity, namespace, form, None, prefix.before
        with self._mutex:
            held = [one for one in self._entries.values() if _group(one.header.meta) == wanted]
        found = [(tokens, one) for one in held if (tokens := one.usable(prefix, limit))]
        for tokens, one in sorted(found, key=lambda pair: pair[0], reverse=True):
            if (obstacle is None or obstacle(one.lineage[0], tokens) is None) and self._is_current(one):
                return tokens, one
        return 0, None

    def served(self, entry: HeldEntry) -> None:
        """Note that an entry was served."""
        with self._mutex:
            entry.hits += 1
            if self._entries.get(entry.lineage[0].key) is entry:
                self._entries.move_to_end(entry.lineage[0].key)

    def load(self, key: str, read: Callable[[EntryFile | EntryChain], Mapping[str, Layers]]) -> None:
        """Hold an entry whose layers ``read`` reads; one of the same key makes way for it.

        Raises:
            EntryNotFoundError: it is not there.
            EntryDamagedError: it is not what was stored, and is set aside.
            InvalidRequestError: it takes more than ``max_bytes``.
        """
        with self._loading:
            lineage, place = self._catalog.lineage(key), Place(key)
            if not lineage:
                raise EntryNotFoundError(f"the entry {key} is gone, or what it continues is: warm it again")
            try:
                with open_entry(self._files, place) as file:
                    self._make_room(key, nbytes_of(file.header.meta, file.header.tensors))
                    header, ids = file.header, file.read_ids()
                    entry = HeldEntry(lineage, header, file.identity, ids, read(file), trims(header.meta))
            except FileNotFoundError:
                self._catalog.lost(place.key)
                raise EntryNotFoundError(f"the entry {place.key} is gone: warm it again") from None
            except EntryDamagedError as error:
                self._catalog.damaged(place.key, error, place.file)
                raise
            with self._mutex:
                self._entries[key] = entry

    def drop(self, key: str) -> None:
        """Let go of an entry, and of what continues it; does nothing if there is none."""
        with self._mutex:
            for one in list(self._entries.values()):
                if any(row.key == key for row in one.lineage):
                    del self._entries[one.lineage[0].key]

    def shrink(self, max_bytes: int | None) -> None:
        """Set the budget, and let go of what is over it."""
        self.max_bytes = max_bytes
        self._make_room("", 0)

    def _make_room(self, key: str, need: int) -> None:
        """Let go of what must go for so many bytes under a key, its own entry first."""
        budget = self.max_bytes
        if budget is not None and need > budget:
            raise InvalidRequestError(f"the entry {key} takes {need:,} bytes of memory, and max_bytes= is {budget:,}")
        with self._mutex:
            self._entries.pop(key, None)
            while budget is not None and need + sum(one.nbytes for one in self._entries.values()) > budget:
                self._entries.popitem(last=False)

    def _is_current(self, entry: HeldEntry) -> bool:
        if self._catalog.is_current(entry.lineage):
            return True
        with self._mutex:
            if self._entries.get(entry.lineage[0].key) is entry:
                del self._entries[entry.lineage[0].key]
        return False


def nbytes_of(meta: EntryMeta, tensors: Mapping[str, TensorSpec]) -> int:
    """How many bytes the tensors of an entry's layers take in memory, over all that it continues."""
    total = 0
    for stem, number, layer in meta.groups():
        for role, how in layer.tensors.items():
            spec = tensors.get(tensor_name(stem, number, role))
            if spec is not None:
                total += spec.shape[0] * layer.rows * spec.row_bytes if how == "rows" else spec.end - spec.begin
    return total


def _group(meta: EntryMeta) -> tuple[object, ...]:
    key = meta.key
    return key.identity, key.namespace, key.form, key.tp, before_tokens(key.media)
