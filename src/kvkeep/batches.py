"""Filling the cache of a batch: each line from its own entry, all up to one slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvkeep import compat
from kvkeep.inputs import Inputs
from kvkeep.layouts import takes_lines
from kvkeep.lines import Filled, Line, common_cut, lay_out
from kvkeep.records import Match
from kvkeep.served import Served, miss

Fill = Callable[[Any, Inputs], Served]
"""Fills the empty cache of one line."""


def fill_batch(
    cache: Any,
    lines: Sequence[Line],
    lookup: Callable[[Inputs], Match],
    fill: Fill,
    *,
    config: Any,
    copies: int,
    watched: bool,
) -> Served:
    """Fill an empty cache of several lines with what is stored of all of them, up to one slot.

    Args:
        cache: for each line as many lines as ``copies``.
        lines: the lines.
        lookup: says how much of a prompt is stored.
        fill: fills a cache with that; for the guard, with one token fewer.
        config: the text configuration.
        copies: how many sequences come of each line.
        watched: whether each line's last cached token is to be computed again.
    """
    if not takes_lines(cache):
        return Served(miss(f"layout: a {type(cache).__name__} of these layers is filled one sequence at a time"))
    missed: list[Match] = []

    def reach(inputs: Inputs, tokens: int) -> int:
        match = lookup(inputs.first(tokens + 1))
        missed.extend([match] if not match else [])
        return match.tokens

    slots = max(line.padding + len(line.inputs) for line in lines)
    slot = slots - 1  # at least one must be left to feed
    while slot := common_cut(lines, reach, at_most=slot, watched=watched):
        found: dict[bytes, tuple[Filled, Served]] = {}
        for line in lines:
            tokens = slot - line.padding
            first = line.inputs.ids[: max(tokens, 0)].int64
            if tokens > 0 and first not in found:
                own = compat.dynamic_cache(config)
                served = fill(own, line.inputs.first(tokens + 1))
                found[first] = Filled(own, served.held), served
        places = [line.inputs.ids[: max(slot - line.padding, 0)].int64 for line in lines]
        ends = [line.padding + _end(found[first][1]) for line, first in zip(lines, places, strict=True) if first]
        if min(ends) < slot:  # some entry was not what its index said
            missed.extend(served.match for _, served in found.values() if not served.match)
            slot = min(ends)
            continue
        unwatched = [served.row is None for _, served in found.values()]
        if watched and any(unwatched) and not all(unwatched):
            return Served(miss("batch: of some lines one token can be computed again, of others none"))
        if any(_lacks_rows(one, cache) for one, _ in found.values()):
            return Served(miss("layout: the cache keeps every row of a layer of which an entry has a window alone"))
        held = slot if all(unwatched) else slot - 1
        lay_out(cache, held, [found[first][0] if first else None for first in places], copies)
        parts = tuple(
            replace(served, lines=tuple(_copies(places, first, copies))) for first, (_, served) in found.items()
        )
        reason = missed[0].reason if missed else None
        reused = sum(found[first][0].held for first in places if first)
        states = any(part.snapshots for part in parts)
        resident = all(part.match.resident for part in parts)
        match = replace(parts[-1].match, reason=reason, resident=resident)
        return Served(match, held, held, snapshots=states, reused=reused, parts=parts)
    if missed:
        return Served(missed[0])
    if watched and slots - 1 > min(line.padding for line in lines):
        return Served(miss("guard: of a line a single token is stored, and one must be computed again"))
    return Served(miss("batch: the lines share no slot to be cut at"))


def _lacks_rows(filled: Filled, cache: Any) -> bool:
    """Whether a line has fewer rows than a layer of the batch's cache keeps: 4.57 drafts with every row of windows."""
    kept = [bool(getattr(layer, "is_sliding", False)) for layer in cache.layers]
    return any(
        getattr(layer, "keys", None) is not None and layer.keys.shape[2] < filled.held and not any(kept[number:][:1])
        for number, layer in enumerate(filled.cache.layers)
    )


def _end(served: Served) -> int:
    """The tokens that a cache holds, with the one that is watched."""
    return served.held + (served.row is not None) if served.match else 0


def _copies(places: Sequence[bytes], first: bytes, copies: int) -> list[int]:
    """The lines of the cache that begin in this way."""
    return [place * copies + copy for place, one in enumerate(places) if one == first for copy in range(copies)]
