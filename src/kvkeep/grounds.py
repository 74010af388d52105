"""What a new entry continues, so that it holds only what is new, and chains stay short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvkeep.capacity import Capacity
from kvkeep.catalog import Catalog
from kvkeep.matching import joined_trims, usable
from kvkeep.storage.entry_chain import MAX_LINKS
from kvkeep.storage.refs import Refs
from kvkeep.storage.rows import Row

MIN_SHARED = 64
"""Tokens that must be stored already for an entry to continue another: fewer are not worth a second file to open."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a new entry continues.

    Attributes:
        start: the first token that its own file holds.
        parent: key of the entry that it continues; ``None`` if it holds all from token 0 on.
        digests: what that entry says its digests' digest is.
        replaced: keys of entries that it holds anew because the chain would have become too long, children first.
    """

    start: int = 0
    parent: str | None = None
    digests: str | None = None
    replaced: tuple[str, ...] = ()


WHOLE = Ground()


def ground_on(lineage: Sequence[Row], start: int, *, links: int = MAX_LINKS) -> Ground:
    """Where an entry begins whose first ``start`` tokens another holds, with what that continues.

    A chain that is full is taken together at its end: as many links as cost the fewest tokens for each link that they
    free. So a conversation that is stored after each turn is written about twice, however long it becomes.

    Args:
        lineage: see :meth:`~kvkeep.matching.PrefixIndex.lineage`.
        start: how many of its tokens are the new entry's.
        links: how many links the chain may have.
    """
    if len(lineage) < links:
        return Ground(start, lineage[0].key)
    taken = min(range(1, len(lineage) + 1), key=lambda count: ((start - lineage[count - 1].start) / count, -count))
    replaced = tuple(row.key for row in lineage[:taken])
    parent = lineage[taken].key if taken < len(lineage) else None
    return Ground(lineage[taken - 1].start, parent, replaced=replaced)


def outdated(rows: Mapping[str, Row], keys: Sequence[str], lineage: Sequence[Row]) -> list[str]:
    """Those of some entries that a new one makes superfluous: it can be trimmed to them, and nothing else needs them.

    Args:
        rows: all entries.
        keys: the entries in question, children first.
        lineage: the new entry with what it continues.
    """
    new, trims = lineage[0], joined_trims(lineage)
    children: dict[str, set[str]] = {}
    for row in rows.values():
        if row.parent is not None:
            children.setdefault(row.parent, set()).add(row.key)
    found: list[str] = []
    for key in keys:
        old = rows.get(key)
        if old is None or key == new.key or not children.get(key, set()) <= set(found):
            continue
        if not old.snapshots and usable(trims, new.snapshots, new.end, old.end, old.end)[0] == old.end:
            found.append(key)
    return found


def supersede(catalog: Catalog, capacity: Capacity, refs: Refs, key: str, others: Sequence[str]) -> None:
    """Remove those of some entries, children first, that the one with this key makes superfluous.

    One that has a name stays, and so does one that another entry continues.
    """
    lineage = catalog.lineage(key)

    def named() -> set[str]:
        return {ref.key for ref in refs.all()}

    def choose(rows: Mapping[str, Row]) -> list[str]:
        names = named()
        return outdated(rows, [other for other in others if other not in names], lineage)

    if lineage:
        capacity.evict(choose, named)
