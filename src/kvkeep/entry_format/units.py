"""Digest units: the parts of an entry that can be verified apart."""

from __future__ import annotations

import xxhash

from kvkeep.entry_format.records import EntryMeta
from kvkeep.keys import BLOCK


def blocks(rows: int) -> int:
    """How many digest blocks a stretch of rows has."""
    return -(-rows // BLOCK)


def first_units(meta: EntryMeta) -> tuple[dict[tuple[str, int], int], int]:
    """The number of each layer's first digest unit, and how many units there are.

    Unit 0 is the ids and the chain. Then each layer, in order, has one unit a block of rows (all its row tensors, all
    heads) and, if it has snapshots, one for them. Model state, if any, is the last unit.
    """
    first: dict[tuple[str, int], int] = {}
    unit = 1
    for stem, number, layer in meta.groups():
        first[stem, number] = unit
        unit += blocks(layer.rows) + bool(layer.roles("snapshot"))
    return first, unit + bool(meta.state)


def chain_length(start: int, end: int) -> int:
    """How many block boundaries of the prefix hash lie in (start, end]."""
    return end // BLOCK - start // BLOCK


def table_digest(table: bytes | memoryview) -> str:
    """The digest of the digests tensor, which the header holds."""
    return xxhash.xxh3_128(table).hexdigest()
