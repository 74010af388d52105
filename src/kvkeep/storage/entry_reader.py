"""Reading one entry: only what is asked for, straight into its destination, checked against the entry's digests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from types import TracebackType
from typing import final

from kvkeep.entry_format import (
    CHAIN,
    DIGESTS,
    IDS,
    STRONG,
    Header,
    LayerRecord,
    blocks,
    decode_header,
    first_units,
    header_length,
    signed_part,
    table_digest,
    tensor_name,
)
from kvkeep.errors import EntryDamagedError, EntryUntrustedError, InvalidPromptError, InvalidRequestError
from kvkeep.keys import BLOCK, DIGEST_SIZE, TokenIds, prefix_chain, prefix_hash
from kvkeep.settings import Verify
from kvkeep.signing import STRONG_SIZE, Keyring, same
from kvkeep.storage.entry_data import CHUNK, as_bytes, extents
from kvkeep.storage.fileio import read_at
from kvkeep.storage.pieces import Piece, head_pieces, neighbours
from kvkeep.storage.unit_digest import UnitDigest
from kvkeep.storage.verified import HEADERS, UNITS, Checked, FileIdentity

_FIRST_READ = 16 << 10
_SCRATCH = 8 << 20
_ZEROS = bytes(CHUNK)
_EMPTY = memoryview(b"")

Rows = Mapping[str, Sequence[memoryview]]


@final
class EntryFile:
    """An open entry with a sound header. A context manager; reading is safe from several threads.

    What a method has read is what was stored, or it raised: :class:`EntryDamagedError` where the bytes are others (the
    destinations then hold garbage), ``OSError`` where they cannot be read.

    Attributes:
        key: the entry's key.
        header: the checked header.
        identity: which state of which file this is.
    """

    def __init__(self, fd: int, key: str, verify: Verify, keys: Keyring | None = None) -> None:
        self._fd = fd
        self._verify = verify
        self._keys = keys
        self._tables: tuple[bytes, bytes] | None = None
        try:
            self.key = key
            self.identity = FileIdentity.of(os.fstat(fd))
            known = (self.identity, keys)
            checked = self._read_header() if verify == "always" else HEADERS.get(known, self._read_header)
            self.header, self._strong = checked.header, checked.strong
            if self.header.meta.key.hash != key:
                raise EntryDamagedError("the file is the entry of another key")
        except BaseException:
            self.close()
            raise
        self._first, self._units = first_units(self.header.meta)
        self._found_right = UNITS.get((self.identity, self.header.meta.digests, keys), lambda: bytearray(self._units))

    def _read_header(self) -> Checked:
        size = self.identity.size
        head = self._read(0, min(_FIRST_READ, size))
        length = header_length(head, size)
        text = head[8 : 8 + length]
        text += self._read(8 + len(text), length - len(text))
        header = decode_header(text, size)
        if self._keys is None:
            return Checked(header)
        return Checked(header, self._check_signature(text, header, self._keys))

    def _check_signature(self, text: bytes, header: Header, keys: Keyring) -> bytes:
        """The digest of the strong digests that one of the keys has signed with the header."""
        auth = header.meta.auth
        if auth is None:
            raise EntryUntrustedError("it is not signed, and this store was opened with a key")
        key = keys.get(auth.key_id)
        if key is None:
            raise EntryUntrustedError(f"it is signed with the key {auth.key_id}, which this store was not opened with")
        spec = header.tensors[STRONG]  # as the layout has it, and within the file
        strong = self._read(header.data + spec.begin, spec.end - spec.begin)
        if not same(key.sign(signed_part(text), strong), auth.mac):
            raise EntryDamagedError(f"it is not what the key {auth.key_id} has signed")
        return blake2b(strong).digest()

    def close(self) -> None:
        """Close the file, once."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> EntryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what can be read -------------------------------------------------------------------------------------------

    def read_ids(self) -> TokenIds:
        """The token ids of the stretch [start, end)."""
        return self._read_start(force=False)[0]

    def read_chain(self) -> list[bytes]:
        """The prefix digests at the block boundaries in (start, end]."""
        return self._read_start(force=False)[1]

    def read_rows(
        self, stem: str, number: int, first: int, last: int, targets: Rows, behind: Rows | None = None
    ) -> None:
        """Read rows [first, last) of one layer, counted from the first row that is stored.

        Blocks are checked whole, so the first time up to one block more is read at each end.

        Args:
            stem: ``"layers"`` or ``"cross"``.
            number: the layer's number.
            first: the first row.
            last: the row after the last.
            targets: for every role that is stored as rows, one writable buffer of (last - first) rows a head.
            behind: the same of one row a head, which take the row behind the others.
        """
        layer = self._layer(stem, number)
        end = last + (behind is not None)
        if not 0 <= first <= last or end > layer.rows:
            raise InvalidRequestError(f"rows [{first}, {end}) are not within the {layer.rows} that are stored")
        if first < end:
            self._read_rows(stem, number, first, last, targets, behind, force=False)

    def read_snapshots(self, stem: str, number: int, targets: Mapping[str, memoryview]) -> None:
        """Read one layer's snapshots, for every role that is stored so, into writable buffers of their size."""
        layer = self._layer(stem, number)
        names = [tensor_name(stem, number, role) for role in layer.roles("snapshot")]
        _check_roles(targets, layer.roles("snapshot"))
        unit = self._first[stem, number] + blocks(layer.rows)
        self._read_whole(unit, names, [targets[role] for role in layer.roles("snapshot")], force=False)

    def read_state(self, targets: Mapping[str, memoryview]) -> None:
        """Read the model's state, for every role, into writable buffers of their size."""
        roles = sorted(self.header.meta.state or {})
        _check_roles(targets, roles)
        self._read_whole(
            self._units - 1, [f"state.{role}" for role in roles], [targets[role] for role in roles], force=False
        )

    def verify_all(self) -> None:
        """Read and check every byte: each unit whatever was found before, the ids against the key, and the room."""
        ids, chain = self._read_start(force=True)
        meta = self.header.meta
        if meta.start == 0:
            whole = prefix_chain(ids, bytes.fromhex(meta.key.namespace))
            if whole[1:] != chain or prefix_hash(ids, len(ids), whole).hex() != meta.key.prefix:
                raise EntryDamagedError("the key is not that of the token ids")
        for stem, number, layer in meta.groups():
            for first, last, targets in self._scratch_rows(stem, number, layer):
                self._read_rows(stem, number, first, last, targets, None, force=True)
            self._verify_whole(
                self._first[stem, number] + blocks(layer.rows),
                [tensor_name(stem, number, role) for role in layer.roles("snapshot")],
            )
        self._verify_whole(self._units - 1, [f"state.{role}" for role in sorted(meta.state or {})])
        self._check_room()

    # --- inside: tensors to pieces ----------------------------------------------------------------------------------

    def _layer(self, stem: str, number: int) -> LayerRecord:
        layers = {"layers": self.header.meta.layers, "cross": self.header.meta.cross or ()}.get(stem, ())
        if not 0 <= number < len(layers):
            raise InvalidRequestError(f"the entry has no layer {stem}.{number}")
        return layers[number]

    def _read_start(self, *, force: bool) -> tuple[TokenIds, list[bytes]]:
        ids, chain = (bytearray(s.end - s.begin) for s in (self.header.tensors[IDS], self.header.tensors[CHAIN]))
        self._read_whole(0, [IDS, CHAIN], [memoryview(ids), memoryview(chain)], force=force)
        try:
            known = TokenIds.from_int32(bytes(ids))
        except InvalidPromptError as error:
            raise EntryDamagedError(f"the stored ids are not token ids: {error}") from None
        return known, [bytes(chain[at : at + DIGEST_SIZE]) for at in range(0, len(chain), DIGEST_SIZE)]

    def _read_whole(self, unit: int, names: Sequence[str], targets: Sequence[memoryview], *, force: bool) -> None:
        """Read tensors that make up one unit."""
        units = self._unchecked(range(unit, unit + 1), force)
        pieces: list[Piece] = []
        for name, target in zip(names, targets, strict=True):
            spec = self.header.tensors[name]
            view = _writable(target, spec.end - spec.begin, name)
            begin = self.header.data + spec.begin
            pieces += [Piece(begin + at, view[at : at + CHUNK], unit, CHUNK) for at in range(0, len(view), CHUNK)]
        self._run(pieces, units)

    def _read_rows(
        self, stem: str, number: int, first: int, last: int, targets: Rows, behind: Rows | None, *, force: bool
    ) -> None:
        layer = self._layer(stem, number)
        base, stop = self._first[stem, number], last + (behind is not None)
        low, high = first // BLOCK, blocks(stop)
        units = self._unchecked(range(base + low, base + high), force)
        begin = low * BLOCK if base + low in units else first
        end = min(high * BLOCK, layer.rows) if base + high - 1 in units else stop
        stretches = [(first, last, targets)] if behind is None else [(first, last, targets), (last, stop, behind)]
        for _, _, buffers in stretches:
            _check_roles(buffers, layer.roles("rows"))
        pieces: list[Piece] = []
        for role in layer.roles("rows"):
            spec = self.header.tensors[tensor_name(stem, number, role)]
            width = spec.row_bytes
            if any(len(buffers[role]) != spec.shape[0] for _, _, buffers in stretches):
                raise InvalidRequestError(f"{role!r} needs one buffer for each of its {spec.shape[0]} heads")
            for head in range(spec.shape[0]):
                tensor = self.header.data + spec.begin + head * spec.shape[1] * width
                for row, to, buffers in stretches:
                    lead = (first - begin) * width if buffers is targets else 0
                    tail = (end - stop) * width if to == stop else 0
                    pieces += head_pieces(
                        tensor + row * width - lead,
                        _scratch(lead),
                        _writable(buffers[role][head], (to - row) * width, role),
                        _scratch(tail),
                        first=row,
                        width=width,
                        base=base,
                    )
        self._run(pieces, units)

    def _verify_whole(self, unit: int, names: Sequence[str]) -> None:
        if names:
            sizes = [self.header.tensors[name].end - self.header.tensors[name].begin for name in names]
            self._read_whole(unit, names, [memoryview(bytearray(size)) for size in sizes], force=True)

    def _scratch_rows(self, stem: str, number: int, layer: LayerRecord) -> Iterator[tuple[int, int, Rows]]:
        """Stretches that cover a layer's rows, with buffers for each."""
        shapes = {role: self.header.tensors[tensor_name(stem, number, role)] for role in layer.roles("rows")}
        block = BLOCK * sum(spec.shape[0] * spec.row_bytes for spec in shapes.values())
        step = BLOCK * max(1, _SCRATCH // max(1, block))
        for first in range(0, layer.rows, step):
            last = min(first + step, layer.rows)
            yield (
                first,
                last,
                {
                    role: [memoryview(bytearray((last - first) * spec.row_bytes)) for _ in range(spec.shape[0])]
                    for role, spec in shapes.items()
                },
            )

    def _check_room(self) -> None:
        """Room is zeros: a static cache that takes it over must find no NaN in it."""
        stretches = [*extents(self.header), (self.header.size, self.header.size)]
        for (_, begin), (end, _) in pairwise(stretches):
            for at in range(begin, end, CHUNK):
                size = min(CHUNK, end - at)
                if self._read(at, size) != _ZEROS[:size]:
                    raise EntryDamagedError("the room behind the rows is not empty")

    # --- inside: pieces to bytes ------------------------------------------------------------------------------------

    def _unchecked(self, units: range, force: bool) -> frozenset[int]:
        if force:
            return frozenset(units)
        if self._verify == "never":
            return frozenset()
        return frozenset(unit for unit in units if self._verify == "always" or not self._found_right[unit])

    def _run(self, pieces: Iterable[Piece], units: frozenset[int]) -> None:
        """Read the pieces, neighbours at once, and compare the digests of the given units.

        Not too many at once: the system then reads ahead while what was read is copied.
        """
        states = {unit: UnitDigest(strong=self._keys is not None) for unit in units}
        for group in neighbours(pieces, CHUNK):
            views = [piece.view for piece in group]
            if read_at(self._fd, group[0].offset, views) != sum(map(len, views)):
                raise EntryDamagedError("the file ends early")
            for piece in group if states else ():
                for unit, view in piece.digested():
                    if unit in states:
                        states[unit].update(view)
        for unit, state in states.items():
            if state.digests() != self._digests(unit):
                raise EntryDamagedError(f"{self._describe(unit)} are not what was stored")
            self._found_right[unit] = 1

    def _digests(self, unit: int) -> tuple[bytes, bytes]:
        if self._tables is None:
            table, strong = self._read_tensor(DIGESTS), b""
            if table_digest(table) != self.header.meta.digests:
                raise EntryDamagedError("the digests are not what was stored")
            if self._strong is not None:
                strong = self._read_tensor(STRONG)
                if blake2b(strong).digest() != self._strong:  # it may have been changed since the signature was checked
                    raise EntryDamagedError("the strong digests are not what was signed")
            self._tables = table, strong
        fast, strong = self._tables
        fast = fast[unit * DIGEST_SIZE : (unit + 1) * DIGEST_SIZE]
        return fast, strong[unit * STRONG_SIZE : (unit + 1) * STRONG_SIZE]

    def _read_tensor(self, name: str) -> bytes:
        spec = self.header.tensors[name]
        return self._read(self.header.data + spec.begin, spec.end - spec.begin)

    def _describe(self, unit: int) -> str:
        if unit == 0:
            return "the token ids"
        for stem, number, layer in self.header.meta.groups():
            block = unit - self._first[stem, number]
            if block < blocks(layer.rows):
                return f"rows [{block * BLOCK}, {min((block + 1) * BLOCK, layer.rows)}) of {stem}.{number}"
            if block == blocks(layer.rows) and layer.roles("snapshot"):
                return f"the snapshots of {stem}.{number}"
        return "the model's states"

    def _read(self, offset: int, size: int) -> bytes:
        content = bytearray(size)
        if read_at(self._fd, offset, [memoryview(content)] if size else []) != size:
            raise EntryDamagedError("the file ends early")
        return bytes(content)


def _scratch(size: int) -> memoryview:
    return memoryview(bytearray(size)) if size else _EMPTY


def _check_roles(targets: Mapping[str, object], roles: Sequence[str]) -> None:
    if sorted(targets) != roles:
        raise InvalidRequestError(f"buffers are given for {sorted(targets)}; what is stored is {roles}")


def _writable(target: memoryview, size: int, name: str) -> memoryview:
    if target.nbytes != size or target.readonly:
        raise InvalidRequestError(f"the buffer for {name!r} must be writable and of {size} bytes, not {target.nbytes}")
    return as_bytes(target)
