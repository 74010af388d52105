"""Which entries must go so that a limit holds: no fewer, and no more. Only computes; nothing is removed here."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvkeep.storage.rows import Row

Worth = Callable[[Row], float]
"""What keeping an entry is worth; see :mod:`kvkeep.eviction`."""

LimitName = Literal["max_bytes", "quota"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a store may hold, in bytes of its entries' files.

    Attributes:
        max_bytes: all entries together; ``None`` is no limit.
        quota: those of each namespace; ``None`` is no limit.
        min_free: what the volume must have free, of which at most a tenth of the volume counts.
    """

    max_bytes: int | None = None
    quota: int | None = None
    min_free: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What must go.

    Attributes:
        victims: the entries, in the order in which they go: a child before its parent.
        limit: the limit that cannot be kept even so, or ``None``.
        short: by how many bytes it cannot.
    """

    victims: tuple[Row, ...] = ()
    limit: LimitName | None = None
    short: int = 0


def choose(
    rows: Mapping[str, Row], need: int, *, keep: Collection[str], worth: Worth, namespace: str | None = None
) -> tuple[list[Row], int]:
    """The entries worth least that together free ``need`` bytes.

    Args:
        rows: all entries by key.
        need: bytes to free; nothing goes if it is not positive.
        keep: keys of entries that stay; so do those that they continue.
        worth: says which go first. Among equals the oldest do.
        namespace: of which namespace they are, if that matters.

    Returns:
        The entries, a child before its parent, and how many bytes are still missing when all that may go is gone.
    """
    if need <= 0:
        return [], 0
    kept = frozenset(keep)  # what they continue is never ready to go before them
    children = Counter(row.parent for row in rows.values() if row.parent is not None)

    def ready(candidates: Iterable[Row]) -> list[tuple[float, int, str]]:
        return [
            (worth(row), row.created, row.key)
            for row in candidates
            if not children[row.key] and row.key not in kept and namespace in (None, row.namespace)
        ]

    victims: list[Row] = []
    heap = ready(rows.values())
    heapq.heapify(heap)
    while need > 0 and heap:
        row = rows[heapq.heappop(heap)[2]]
        victims.append(row)
        need -= row.nbytes
        parent = None if row.parent is None else rows.get(row.parent)
        if parent is not None:
            children[parent.key] -= 1
            for item in ready([parent]):
                heapq.heappush(heap, item)
    return victims, max(need, 0)


def plan(
    rows: Mapping[str, Row], limits: Limits, *, new: Row | None, keep: Callable[[], Collection[str]], worth: Worth
) -> Plan:
    """What must go so that budget and quotas hold.

    Args:
        rows: all entries by key, the new one included.
        limits: budget and quota.
        new: the entry just written, which stays; its namespace's quota is the only one looked at. Nothing goes if a
            limit cannot be kept beside it. Without one, every quota is, and all goes that may.
        keep: gives the keys of entries that stay whatever the limits; asked only where something must go.
        worth: says which go first.
    """
    used = sum(row.nbytes for row in rows.values())
    by_namespace = Counter[str]()
    for row in rows.values():
        by_namespace[row.namespace] += row.nbytes
    over = {} if limits.quota is None else {name: size - limits.quota for name, size in by_namespace.items()}
    if new is not None:
        over = {name: size for name, size in over.items() if name == new.namespace}
    over = {name: size for name, size in over.items() if size > 0}
    too_much = 0 if limits.max_bytes is None else used - limits.max_bytes
    if not over and too_much <= 0:
        return Plan()
    kept = {*keep(), *(() if new is None else (new.key,))}
    left, victims = dict(rows), list[Row]()
    missed: tuple[LimitName | None, int] = None, 0
    steps: list[tuple[LimitName, str | None, int]] = [("quota", name, size) for name, size in sorted(over.items())]
    for limit, namespace, size in [*steps, ("max_bytes", None, too_much)]:
        need = size if namespace is not None else size - sum(row.nbytes for row in victims)
        found, short = choose(left, need, keep=kept, worth=worth, namespace=namespace)
        if short and new is not None:
            return Plan((), limit, short)
        if short:
            missed = limit, short
        victims += found
        for row in found:
            del left[row.key]
    return Plan(tuple(victims), *missed)


def with_parents(rows: Mapping[str, Row], keys: Iterable[str]) -> set[str]:
    """These keys, with those of all entries that they continue."""
    kept: set[str] = set()
    for key in keys:
        link: str | None = key
        while link is not None and link not in kept:
            kept.add(link)
            link = rows[link].parent if link in rows else None
    return kept
