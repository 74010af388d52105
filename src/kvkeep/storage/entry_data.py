"""Where the bytes of an entry lie in its file, and what is room."""

from __future__ import annotations

from collections.abc import Iterator

from kvkeep.entry_format import CHAIN, DIGESTS, IDS, STRONG, Header, tensor_name
from kvkeep.errors import InvalidRequestError

CHUNK = 1 << 20
"""Bytes that are digested and then written, or read and then digested, at once: while they are in the CPU's cache."""


def parts(header: Header) -> Iterator[tuple[str, int, int]]:
    """For each tensor of layers and state its name, in how many parts it has its data, and the bytes of each.

    Rows have one part a head, as long as there are rows; what else is in the head's slots is room.
    """
    rows = {
        tensor_name(stem, number, role): layer.rows
        for stem, number, layer in header.meta.groups()
        for role in layer.roles("rows")
    }
    for name, spec in header.tensors.items():
        if name in rows:
            yield name, spec.shape[0], rows[name] * spec.row_bytes
        elif name not in (IDS, CHAIN, DIGESTS, STRONG):
            yield name, 1, spec.end - spec.begin


def extents(header: Header) -> Iterator[tuple[int, int]]:
    """The stretches [begin, end) of the file that hold data, header included, in order. Between them lies room."""
    heads_and_sizes = {name: (heads, size) for name, heads, size in parts(header)}
    begin = end = 0
    stretches = [(0, header.data)]
    for name, spec in sorted(header.tensors.items(), key=lambda item: item[1].begin):
        heads, size = heads_and_sizes.get(name, (1, spec.end - spec.begin))
        for head in range(heads):
            at = header.data + spec.begin + head * ((spec.end - spec.begin) // heads)
            stretches.append((at, at + size))
    for start, stop in stretches:
        if start != end:
            yield begin, end
            begin = start
        end = stop
    yield begin, end


def as_bytes(part: memoryview) -> memoryview:
    """A contiguous buffer of any format and shape, seen as bytes."""
    if not part.c_contiguous:
        raise InvalidRequestError("a tensor's data must lie in one contiguous stretch")
    return part.cast("B") if part.nbytes else memoryview(b"")  # Python does not cast what has a 0 in its shape
