"""Stretches of a file on their way to their destinations, and the digest units that go over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvkeep.entry_format import blocks
from kvkeep.keys import BLOCK
from kvkeep.storage.entry_data import CHUNK


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the file and the buffers that it goes to, one after the other.

    Either it lies in one digest unit, or it goes to one buffer and begins a new unit every ``stride`` bytes.
    """

    offset: int
    views: Sequence[memoryview]
    unit: int
    stride: int

    def digested(self) -> Iterator[tuple[int, memoryview]]:
        """Each unit that goes over some of the piece, with that part."""
        if len(self.views) == 1:
            view = self.views[0]
            for unit, at in enumerate(range(0, len(view), self.stride), self.unit):
                yield unit, view[at : at + self.stride]
        else:
            for view in self.views:
                yield self.unit, view


def head_pieces(
    offset: int, lead: memoryview, target: memoryview, tail: memoryview, *, first: int, width: int, base: int
) -> Iterator[Piece]:
    """The pieces of one head, from ``offset`` on: ``lead`` and ``tail`` complete the blocks at the target's ends.

    Args:
        offset: where the bytes for ``lead`` begin in the file.
        lead: takes the rows before the target.
        target: takes the rows that are wanted.
        tail: takes the rows behind the target.
        first: the target's first row.
        width: bytes a row.
        base: the unit of row 0.
    """
    if not len(target):
        return
    block = BLOCK * width
    last = first + len(target) // width
    low, high = first // BLOCK, blocks(last) - 1
    split = min(last, (low + 1) * BLOCK) if first % BLOCK else first
    if split > first:
        views = [lead, target[: (split - first) * width], tail if low == high else tail[:0]]
        yield Piece(offset, [view for view in views if len(view)], base + low, block)
        if low == high:
            return
    offset += len(lead)
    end = max(split, high * BLOCK) if len(tail) else last
    step = BLOCK * max(1, CHUNK // block)
    for row in range(split, end, step):
        view = target[(row - first) * width : (min(row + step, end) - first) * width]
        yield Piece(offset + (row - first) * width, [view], base + row // BLOCK, block)
    if len(tail):
        yield Piece(offset + (end - first) * width, [target[(end - first) * width :], tail], base + high, block)


def neighbours(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces that follow each other in the file, grouped up to about ``limit`` bytes."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (piece.offset != group[0].offset + size or size >= limit):
            yield group
            group, size = [], 0
        group.append(piece)
        size += sum(map(len, piece.views))
    if group:
        yield group
