"""Writing one entry: tensor data are digested and written in one pass, the digests follow, and the header comes last.

Until the header is there, its place holds zeros, which no reader takes for a header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from kvkeep.entry_format import (
    CHAIN,
    DIGESTS,
    IDS,
    ITEM_SIZES,
    STRONG,
    Auth,
    EntryMeta,
    Header,
    LayerRecord,
    TensorSpec,
    blocks,
    chain_length,
    decode_header,
    encode_header,
    first_units,
    lay_out,
    table_digest,
    tensor_name,
)
from kvkeep.errors import EntryDamagedError, InvalidRequestError
from kvkeep.keys import BLOCK, DIGEST_SIZE, TokenIds
from kvkeep.signing import STRONG_SIZE, SigningKey
from kvkeep.storage.entry_data import CHUNK, as_bytes, extents, parts
from kvkeep.storage.fileio import Temporary
from kvkeep.storage.unit_digest import Pair, UnitDigest


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The data of one tensor, left where they are.

    Attributes:
        dtype: its safetensors name, such as ``"BF16"``.
        shape: for rows [heads, slots, dim]; slots beyond the layer's rows become a hole.
        parts: for rows one contiguous buffer a head, each of the layer's rows; else one buffer of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry that is to be written.

    Attributes:
        meta: its metadata; the digests in it are ignored.
        ids: the token ids of its stretch [start, end).
        chain: the prefix digests at the block boundaries in (start, end].
        tensors: every tensor that the layout names, by its name in the file.
    """

    meta: EntryMeta
    ids: TokenIds
    chain: Sequence[bytes]
    tensors: Mapping[str, TensorSource]


def plan(draft: Draft, key: SigningKey | None = None) -> Header:
    """The header that the draft will have, but for its digests and its signature with ``key``.

    Raises:
        InvalidRequestError: if draft and layout do not fit together, or the format has no room for it.
    """
    meta = replace(draft.meta, auth=None if key is None else Auth(key.id))
    small = chain_length(meta.start, meta.end)
    if len(draft.ids) != meta.end - meta.start or [len(link) for link in draft.chain] != [DIGEST_SIZE] * small:
        raise InvalidRequestError(f"the draft's ids and chain are not those of tokens [{meta.start}, {meta.end})")
    try:
        sources = sorted(draft.tensors.items(), key=_place)
        named = [(name, source.dtype, tuple(source.shape)) for name, source in sources]
        named += [(IDS, "I32", (len(draft.ids),)), (CHAIN, "U8", (small, DIGEST_SIZE))]
        units = first_units(meta)[1]
        named += [(DIGESTS, "U8", (units, DIGEST_SIZE))]
        named += [] if key is None else [(STRONG, "U8", (units, STRONG_SIZE))]
        specs = lay_out(sorted(named, key=_alignment, reverse=True))
        raw = encode_header(meta, specs)
        header = decode_header(raw[8:], len(raw) + max(spec.end for spec in specs.values()))
    except EntryDamagedError as error:
        raise InvalidRequestError(f"the draft of an entry does not fit its layout: {error.reason}") from None
    except (KeyError, ValueError) as error:
        raise InvalidRequestError(f"the draft of an entry does not fit the format: {error}") from None
    for name, heads, size in parts(header):
        if [part.nbytes for part in draft.tensors[name].parts] != [size] * heads:
            raise InvalidRequestError(f"the parts of {name!r} are not {heads} buffers of {size} bytes")
    return header


def _alignment(tensor: tuple[str, str, tuple[int, ...]]) -> int:
    """The power of two, up to 64, that divides a tensor's size.

    In falling order of it, each tensor begins at a multiple of its item size at least; and rows at a multiple of 64,
    without which a copy from the page cache can take twice the time.
    """
    size = prod(tensor[2]) * ITEM_SIZES[tensor[1]]
    return 64 if size % 64 == 0 else size & -size


def _place(item: tuple[str, TensorSource]) -> tuple[str, int, str]:
    stem, _, rest = item[0].partition(".")
    number, _, role = rest.partition(".")
    return (stem, int(number), role) if number.isdigit() else (stem, -1, rest)


def write(temporary: Temporary, draft: Draft, header: Header, key: SigningKey | None = None) -> Header:
    """Write the planned entry into an empty file, signed with the key that it was planned with; return its header."""
    temporary.allocate(header.size, extents(header))
    digests = list(_write_units(temporary, draft, header, strong=key is not None))
    table, strong = (b"".join(one) for one in zip(*digests, strict=True))
    _write_tensor(temporary, header, header.tensors[DIGESTS], table)
    if key is None:
        meta = replace(header.meta, digests=table_digest(table))
        raw = encode_header(meta, header.tensors)
    else:
        _write_tensor(temporary, header, header.tensors[STRONG], strong)
        meta = replace(header.meta, digests=table_digest(table), auth=Auth(key.id))
        raw = encode_header(meta, header.tensors, lambda text: key.sign(text, strong))
        meta = decode_header(raw[8:], header.size).meta
    temporary.write(0, raw)
    return replace(header, meta=meta)


def _write_units(temporary: Temporary, draft: Draft, header: Header, *, strong: bool) -> Iterator[Pair]:
    """Write all but the digests, and yield those of each unit in order."""
    ids, chain = draft.ids.int32, b"".join(draft.chain)
    _write_tensor(temporary, header, header.tensors[IDS], ids)
    _write_tensor(temporary, header, header.tensors[CHAIN], chain)
    first = UnitDigest(strong=strong)
    first.update(memoryview(ids + chain))
    yield first.digests()
    for stem, number, layer in header.meta.groups():
        yield from _write_rows(temporary, draft, header, f"{stem}.{number}", layer, strong)
        if layer.roles("snapshot"):
            names = [tensor_name(stem, number, role) for role in layer.roles("snapshot")]
            yield _write_whole(temporary, draft, header, names, strong)
    if header.meta.state:
        states = [f"state.{role}" for role in sorted(header.meta.state)]
        yield _write_whole(temporary, draft, header, states, strong)


def _write_rows(
    temporary: Temporary, draft: Draft, header: Header, stem: str, layer: LayerRecord, strong: bool
) -> Iterator[Pair]:
    """Write a layer's rows, and yield the digests of each block.

    A digest goes over all roles and heads of a block, while the file holds one head after the other: so all blocks of
    the layer are digested side by side.
    """
    states = [UnitDigest(strong=strong) for _ in range(blocks(layer.rows))]
    for role in layer.roles("rows"):
        spec = header.tensors[f"{stem}.{role}"]
        step = BLOCK * spec.row_bytes
        for head, part in enumerate(draft.tensors[f"{stem}.{role}"].parts):
            data = as_bytes(part)
            offset = header.data + spec.begin + head * spec.shape[1] * spec.row_bytes
            for begin, chunk in _chunks(data, max(step, CHUNK // step * step) if step else 0):
                for at in range(0, len(chunk), step):
                    states[(begin + at) // step].update(chunk[at : at + step])
                temporary.write(offset + begin, chunk)
    for state in states:
        yield state.digests()


def _write_whole(temporary: Temporary, draft: Draft, header: Header, names: Sequence[str], strong: bool) -> Pair:
    state = UnitDigest(strong=strong)
    for name in names:
        for begin, chunk in _chunks(as_bytes(draft.tensors[name].parts[0]), CHUNK):
            state.update(chunk)
            temporary.write(header.data + header.tensors[name].begin + begin, chunk)
    return state.digests()


def _write_tensor(temporary: Temporary, header: Header, spec: TensorSpec, data: bytes) -> None:
    temporary.write(header.data + spec.begin, data)


def _chunks(data: memoryview, size: int) -> Iterator[tuple[int, memoryview]]:
    for begin in range(0, len(data), size or 1):
        yield begin, data[begin : begin + size]
