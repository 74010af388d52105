"""An entry that continues others, read over its chain of files as if it were one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from kvkeep.entry_format import Header, LayerRecord, TensorSpec, tensor_name
from kvkeep.errors import EntryDamagedError
from kvkeep.keys import TokenIds, prefix_chain, prefix_hash
from kvkeep.storage.entry_reader import EntryFile, Rows
from kvkeep.storage.verified import FileIdentity

if TYPE_CHECKING:
    from kvkeep.storage.entries import EntryFiles

MAX_LINKS = 8
"""Entries in a chain, at most."""

PARENT_DIGESTS = "parent"
"""Under this name an entry records the digests of its parent, so that another parent under the same key is told."""


@dataclass(slots=True)
class Place:
    """Which file is being opened or read, for whoever has to say where trouble was.

    Attributes:
        key: the entry's key.
        file: which state of which file it is, once it is open.
    """

    key: str
    file: FileIdentity | None = None


class EntryChain:
    """An open entry with its parents down to token 0. Reads as :class:`EntryFile` does, from token 0 on.

    Attributes:
        key: the entry's key.
        header: the entry's header, with the layers as they are over all links.
        identity: which state of which file the entry itself is.
    """

    def __init__(self, links: Sequence[EntryFile], place: Place) -> None:
        """Take open files, the one from token 0 first; raises :class:`EntryDamagedError` if they make no chain."""
        self._links, self._place, last = links, place, links[-1]
        for parent, child in pairwise(links):
            _check_link(parent, child)
        self._layers = _joined([link.header.meta.layers for link in links], [link.header.meta.start for link in links])
        meta = replace(last.header.meta, start=0, parent=None, layers=tuple(self._layers))
        self.key, self.identity = last.key, last.identity
        self.header = Header(meta, last.header.tensors, last.header.data, last.header.size)

    def read_ids(self) -> TokenIds:
        """The token ids from token 0 on."""
        parts = []
        for link, stop in zip(self._links, self._stops(), strict=True):
            self._note(link)
            parts.append(link.read_ids().int32[: 4 * (stop - link.header.meta.start)])
        return TokenIds.from_int32(b"".join(parts))

    def read_rows(
        self, stem: str, number: int, first: int, last: int, targets: Rows, behind: Rows | None = None
    ) -> None:
        """Read rows [first, last) of one layer, counted from the first that the chain has of it."""
        begin = self._layers[number].first
        first, last = begin + first, begin + last
        for link, stop in zip(self._links, self._stops(), strict=True):
            record, spec = link.header.meta.layers[number], _widths(link, stem, number)
            low, high = max(first, record.first), min(last, stop)
            ahead = behind if record.first <= last < stop else None
            if low >= high and ahead is None:
                continue
            low = min(low, high)
            self._note(link)
            part = {
                role: [one[(low - first) * spec[role] : (high - first) * spec[role]] for one in heads]
                for role, heads in targets.items()
            }
            link.read_rows(stem, number, low - record.first, high - record.first, part, ahead)

    def read_snapshots(self, stem: str, number: int, targets: Mapping[str, memoryview]) -> None:
        """Read one layer's snapshots: they are the entry's own."""
        self._note(self._links[-1])
        self._links[-1].read_snapshots(stem, number, targets)

    def verify_all(self) -> None:
        """Check every byte of the entry itself, and the ids from token 0 on against its key."""
        meta = self.header.meta
        self._note(self._links[-1])
        self._links[-1].verify_all()
        ids = self.read_ids()
        if prefix_hash(ids, len(ids), prefix_chain(ids, bytes.fromhex(meta.key.namespace))).hex() != meta.key.prefix:
            raise EntryDamagedError("the key is not that of the token ids")

    def _stops(self) -> list[int]:
        """Behind which token each link's part ends."""
        return [*(link.header.meta.start for link in self._links[1:]), self.header.meta.end]

    def _note(self, link: EntryFile) -> None:
        self._place.key, self._place.file = link.key, link.identity


@contextmanager
def open_entry(files: EntryFiles, place: Place) -> Iterator[EntryFile | EntryChain]:
    """Open the entry at a place with all that it continues; the place follows what is being opened and read.

    Raises:
        FileNotFoundError: if it, or what it continues, is not there.
        EntryDamagedError: if one of them is not a sound entry, or they do not belong together.
        OSError: if one cannot be read.
    """
    with ExitStack() as opened:
        links: list[EntryFile] = []
        key: str | None = place.key
        while key is not None:
            place.key, place.file = key, None
            link = opened.enter_context(files.open(key))
            place.file = link.identity
            links.insert(0, link)
            if len(links) > MAX_LINKS:
                place.key, place.file = links[-1].key, links[-1].identity
                raise EntryDamagedError(f"the entry continues more than {MAX_LINKS - 1} others")
            key = link.header.meta.parent
        if len(links) == 1:
            yield links[0]
            return
        place.key, place.file = links[-1].key, links[-1].identity
        yield EntryChain(links, place)


def _check_link(parent: EntryFile, child: EntryFile) -> None:
    """Raise if an entry does not continue what its parent is."""
    one, two = parent.header.meta, child.header.meta
    same = (one.key.identity, one.key.namespace, one.key.form, one.key.tp)
    if same != (two.key.identity, two.key.namespace, two.key.form, two.key.tp) or not one.start < two.start <= one.end:
        raise EntryDamagedError("the entry that it continues is another's")
    if two.recorded.get(PARENT_DIGESTS) not in (None, one.digests):
        raise EntryDamagedError("the entry that it continues was computed anew since")
    if len(one.layers) != len(two.layers) or one.cross or two.cross:
        raise EntryDamagedError("the entry that it continues has other layers")
    for number, (before, after) in enumerate(zip(one.layers, two.layers, strict=True)):
        shapes = [_shapes(link.header.tensors, record, number) for link, record in ((parent, before), (child, after))]
        if before.kind != after.kind or shapes[0] != shapes[1]:
            raise EntryDamagedError(f"layer {number} of the entry that it continues is of another kind or shape")


def _shapes(tensors: Mapping[str, TensorSpec], record: LayerRecord, number: int) -> list[tuple[object, ...]]:
    """What of a layer's rows must be alike for one to continue another."""
    found: list[tuple[object, ...]] = [(role, how) for role, how in record.tensors.items() if how.startswith("=")]
    for role in record.roles("rows"):
        spec = tensors[tensor_name("layers", number, role)]
        found.append((role, spec.dtype, spec.shape[0], spec.shape[2], record.scalars.get("window")))
    return sorted(found, key=str)


def _joined(links: Sequence[Sequence[LayerRecord]], starts: Sequence[int]) -> list[LayerRecord]:
    """The layers over all links: each with as many rows before the last link's own as lie behind one another."""
    known: dict[tuple[int, ...], LayerRecord] = {}  # records that are alike are one object
    layers = []
    for records in zip(*links, strict=True):
        kind = tuple(map(id, records))
        if kind not in known:
            last = records[-1]
            first = last.first
            for at in range(len(records) - 1, 0, -1):
                if not records[at].rows or first != starts[at] or records[at - 1].first >= first:
                    break
                first = records[at - 1].first
            known[kind] = replace(last, first=first, rows=last.rows + last.first - first)
        layers.append(known[kind])
    return layers


def _widths(link: EntryFile, stem: str, number: int) -> dict[str, int]:
    roles = link.header.meta.layers[number].roles("rows")
    return {role: link.header.tensors[tensor_name(stem, number, role)].row_bytes for role in roles}
