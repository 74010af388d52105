"""Prefixes that are prefilled here and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvkeep import compat
from kvkeep.boundaries import Boundaries, boundaries_within, holds_state
from kvkeep.entry_format import EntryKey
from kvkeep.errors import UnsupportedRequestError
from kvkeep.grounds import MIN_SHARED
from kvkeep.guard import prove
from kvkeep.identity import LiveIdentity
from kvkeep.inputs import Inputs
from kvkeep.layouts import LayerPlan, describe_kept, keeping_cache, plans_of
from kvkeep.manner import manner_of
from kvkeep.prefill import prefill, with_encoder
from kvkeep.prefixes import uncut
from kvkeep.proving import check_end, prefilled_states
from kvkeep.ranks import Ranks, ranks_of
from kvkeep.records import Entry
from kvkeep.storage.entry_chain import MAX_LINKS
from kvkeep.storing import Shared, Storing, chunk_for, plans_for

Progress = Callable[[int, int], None]

SLACK = 4
"""Rows that a warmed entry keeps of a sliding layer beyond its window: the guard computes one again, a prompt covered
to its last token is trimmed by one, and text whose last tokens merge with what follows reaches back by two or three
(measured on five tokenizers)."""


def warm(
    storing: Storing, inputs: Inputs, progress: Progress | None, cuts: Callable[[], Collection[int]] | None = None
) -> Entry:
    """Prefill and store these inputs, unless they are stored already; one process does it, the others wait for it.

    What is stored of their beginning is not computed and not stored again. State that is valid behind one token only
    is kept before the last one: so it serves this very prompt, too. Ranks that run the model together all do it,
    unless each of them has it stored.

    Args:
        storing: where to.
        inputs: what to prefill.
        progress: called with tokens done and tokens in all.
        cuts: says after how many tokens it should be possible to go on otherwise; asked where that is not possible
            anywhere.
    """
    if (ranks := ranks_of(storing.live.model(), None)) is not None:
        return _warm_together(ranks, storing, inputs, progress)
    inputs = _before_state(storing, inputs)
    boundaries = [] if cuts is None else boundaries_within(storing.live, inputs, cuts)
    entry = _kept(storing, inputs, progress, boundaries)
    for cut in [*boundaries, *_before_last(storing.live, inputs)]:
        # An entry that was there stays as it is; what it has no rows for is stored apart.
        if storing.store.find(entry.identity, inputs.prefix, limit=cut).tokens < cut:
            _kept(storing, inputs.first(cut), None, ())
    return entry


def _before_last(live: LiveIdentity, inputs: Inputs) -> list[int]:
    """The tokens that serve this very prompt, where layers with a window do not keep the rows for any fewer."""
    if live.length_rule() is not None or not any(plan.window for plan in live.asked(plans_of)):
        return []
    tokens = uncut(inputs.media, len(inputs) - 1)
    return [tokens] if tokens > 0 and not holds_state(live) else []


def _kept(storing: Storing, inputs: Inputs, progress: Progress | None, boundaries: Collection[int]) -> Entry:
    """The entry of exactly these inputs; prefilled if it is not stored."""
    key = storing.key(inputs)
    entry = _stored(storing, key, inputs, boundaries)
    if entry is None:
        storing.store.check_writable()
        with storing.store.locked(key.hash):
            # Whoever held the lock before may just have stored it.
            entry = _stored(storing, key, inputs, boundaries) or _prefill(storing, key, inputs, progress, boundaries)
    return entry


def _stored(storing: Storing, key: EntryKey, inputs: Inputs, cuts: Collection[int]) -> Entry | None:
    """The entry, if it is stored with all of its boundaries."""
    entry = storing.store.fetch(key)
    if entry is None or not holds_state(storing.live):
        return entry
    if all(storing.store.fetch(storing.key(inputs.first(cut))) for cut in cuts):
        return entry
    full = storing.store.ground(entry.key, entry.end).parent != entry.key  # a chain that takes no further entry
    return entry if full else None


def _before_state(storing: Storing, inputs: Inputs) -> Inputs:
    """The inputs without the last token, where state is kept that is valid behind one token only."""
    return inputs.first(uncut(inputs.media, len(inputs) - 1) or len(inputs)) if holds_state(storing.live) else inputs


def _warm_together(ranks: Ranks, storing: Storing, inputs: Inputs, progress: Progress | None) -> Entry:
    entry, ready = None, False
    try:
        inputs = _before_state(storing, inputs)
        key = storing.key(inputs)
        entry = storing.store.get(key.hash)
        if entry is None:
            storing.store.check_writable()
        ready = True
    finally:  # another rank waits for the answer, whatever it is
        stored, all_ready = ranks.least([entry is not None, ready])
    if entry is not None and stored:
        return entry
    if not all_ready:
        raise UnsupportedRequestError("another rank that runs this model cannot store: see what it raised")
    return _prefill(storing, key, inputs, progress, alone=False)


def _prefill(
    storing: Storing,
    key: EntryKey,
    inputs: Inputs,
    progress: Progress | None,
    cuts: Collection[int] = (),
    *,
    alone: bool = True,
) -> Entry:
    live, store = storing.live, storing.store
    model, plans, total, began = live.model(), plans_for(live, len(inputs)), len(inputs), time.perf_counter()
    report = None if progress is None else lambda done: progress(done, total)
    inputs, chunk = with_encoder(model, inputs), chunk_for(live, total)
    slack = SLACK + (total - min(cuts) if cuts else 0)
    boundaries = Boundaries(plans, cuts if holds_state(live) else ())
    stored = _stored_beginning(storing, inputs) if alone else None
    begin = 0 if stored is None else stored[1].tokens
    calls = {**_early_look(storing, plans, inputs, chunk, begin), **boundaries.calls}
    if stored is None:
        cache, shared = prefill(model, inputs, chunk=chunk, boundaries=calls, progress=report), None
        states, cross = prefilled_states(cache, plans, total, slack=slack)
    else:
        cache, shared = stored
        prefill(model, inputs, chunk=chunk, cache=cache, begin=begin, boundaries=calls, progress=report)
        states, cross = describe_kept(cache, plans, total, slack=slack), []
    store.journal.prefilled(total - begin, time.perf_counter() - began)
    del cache, stored
    storing.check_unchanged(key)  # a changed model goes on otherwise, too
    check_end(live, inputs, states, plans, cross)
    links = MAX_LINKS - bool(boundaries.found)
    entry = storing.put(key, inputs, states, cross=cross, continues=shared, links=links)
    for cut, (start, rows) in boundaries.found.items():
        storing.put_boundary(inputs.first(cut), rows, entry, start)
    return entry


def _early_look(
    storing: Storing, plans: Sequence[LayerPlan], inputs: Inputs, chunk: int, begin: int
) -> dict[int, Callable[[Any], None]]:
    """What to call after the first of several passes: it raises StoreFullError where the entry will fit no budget.

    Counted are the rows of full layers that are new, by those that are there: the entry has at least these.
    """
    first, total = begin + chunk, len(inputs)

    def look(cache: Any) -> None:
        layers = zip(compat.decoder_part(cache).layers, plans, strict=False)
        full = [layer for layer, plan in layers if plan.plain and not plan.window]
        rows = sum(layer.keys.nbytes + layer.values.nbytes for layer in full)
        storing.store.check_fits(rows * (total - begin) // first)

    return {first: look} if first < total and not inputs.media else {}


def _stored_beginning(storing: Storing, inputs: Inputs) -> tuple[Any, Shared] | None:
    """A cache with what is stored of these inputs' beginning, to be extended; ``None`` where that is not worth it.

    Or where it is not known to be right: with media or an encoder, where rotary frequencies depend on the length, and
    where a model does not go on from a cache by several tokens at once.
    """
    live = storing.live
    model = live.model()
    config = compat.text_config(model)
    if inputs.media or inputs.encoder is not None or live.length_rule() is not None:
        return None
    if compat.owned_class(config) is not None or live.asked(manner_of).singly:
        return None
    if storing.source.lookup(inputs).tokens < MIN_SHARED:
        return None
    cache = keeping_cache(config)
    served = storing.source.fill(cache, inputs, guard=storing.guard)
    entry, tokens = served.match.entry, served.match.tokens
    if entry is None or tokens < MIN_SHARED:
        return None
    if served.row is not None:
        objection = prove(model, cache, inputs, served.row)
        if objection is not None:
            storing.source.refuted(served, objection)
            return None
        cache = keeping_cache(config)  # with that token as it is stored, not as it was computed again
        again = storing.source.fill(cache, inputs, guard=False).match
        if again.entry is None or (again.entry.key, again.tokens) != (entry.key, tokens):
            return None
    return cache, Shared(entry.key, tokens)
