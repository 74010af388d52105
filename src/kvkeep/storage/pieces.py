"""Stretches of a file on their way to their destinations, and the digest units that go over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvkeep.keys import BLOCK
from kvkeep.storage.entry_data import CHUNK


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the file and the buffer that it goes to. Every ``stride`` bytes of it begin another digest unit."""

    offset: int
    view: memoryview
    unit: int
    stride: int

    def digested(self) -> Iterator[tuple[int, memoryview]]:
        """Each unit that goes over some of the piece, with that part."""
        for unit, at in enumerate(range(0, len(self.view), self.stride), self.unit):
            yield unit, self.view[at : at + self.stride]


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
    block = BLOCK * width
    many = max(1, CHUNK // block) if block else 1
    if len(lead):
        yield Piece(offset, lead, base + first // BLOCK, block)
    offset += len(lead)
    row, last = first, first + (len(target) // width if width else 0)
    while row < last:
        end = min(last, (row // BLOCK + (1 if row % BLOCK else many)) * BLOCK)
        view = target[(row - first) * width : (end - first) * width]
        yield Piece(offset + (row - first) * width, view, base + row // BLOCK, block)
        row = end
    if len(tail):
        yield Piece(offset + len(target), tail, base + (last - 1) // BLOCK, block)


def neighbours(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces that follow each other in the file, grouped up to about ``limit`` bytes."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (piece.offset != group[0].offset + size or size >= limit):
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece.view)
    if group:
        yield group
