"""Caches that the user prefilled, stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep import compat
from kvkeep.drafting import check_kept, describe_encoder
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.inputs import Inputs
from kvkeep.layouts import LayerPlan, LayerState, batch_pairs, describe_layers
from kvkeep.lines import Line
from kvkeep.proving import objection_of, quantized_objection
from kvkeep.records import Entry
from kvkeep.sharing import stored_alike
from kvkeep.storing import Storing, check_idle, chunk_for, describe_idle, plans_for


def save(storing: Storing, cache: Any, inputs: Inputs, *, guard: bool) -> Entry:
    """Store a cache that the user prefilled with exactly these inputs."""
    storing.store.check_writable()
    model = storing.live.model()
    plans = plans_for(storing.live, len(inputs))
    paired = inputs.encoder is not None
    states = describe_idle(model, cache, len(inputs), plans, paired=paired)
    if compat.is_quantized(cache):
        return _save_quantized(storing, cache, inputs, states, guard=guard)
    cross = describe_encoder(cache, len(plans)) if paired else []
    return _save_states(storing, inputs, states, plans, guard=guard, cross=cross)


def _save_quantized(
    storing: Storing, cache: Any, inputs: Inputs, states: Sequence[LayerState], *, guard: bool
) -> Entry:
    """Store a quantized cache as it is, under a form that only caches of the same settings are filled from."""
    live = storing.live
    try:
        form = compat.form_of(cache)
    except ValueError as error:
        raise UnsupportedCacheError(f"the cache cannot be saved: {error}") from None
    key = storing.key(inputs, form=form)
    chunk = chunk_for(live, len(inputs))
    objection = quantized_objection(live.model(), cache, inputs, chunk=chunk) if guard else None
    if objection is not None:
        raise CacheMismatchError(
            f"the quantized cache is not what a prefill of these inputs gives, with tokens behind it one by one: "
            f"{objection}. Rows that were quantized twice, as in long generations, cannot be checked: guard=False "
            "saves them unchecked. warm(prompt) stores exact rows, which load into quantized caches, too"
        )
    return storing.put(key, inputs, states)


def save_lines(storing: Storing, cache: Any, lines: Sequence[Line], *, guard: bool) -> list[Entry]:
    """Store each line of a cache that the user prefilled with several; lines that are the same once."""
    storing.store.check_writable()
    slots = max(line.padding + len(line.inputs) for line in lines)
    plans = plans_for(storing.live, slots)
    check_idle(storing.live.model())
    check_kept(cache, slots)
    pairs = batch_pairs(cache, slots)
    if any(keys.shape[0] != len(lines) for keys, _ in pairs):
        raise CacheMismatchError(f"the cache holds {pairs[0][0].shape[0]} lines and {len(lines)} were given")
    entries: dict[bytes, Entry] = {}
    for number, line in enumerate(lines):
        if line.inputs.ids.int64 not in entries:
            tokens = len(line.inputs)
            own = [tuple(rows[number : number + 1, :, -tokens:] for rows in pair) for pair in pairs]
            states = describe_layers([(keys, values) for keys, values in own], plans, tokens)
            entries[line.inputs.ids.int64] = _save_states(storing, line.inputs, states, plans, guard=guard)
    return [entries[line.inputs.ids.int64] for line in lines]


def _save_states(
    storing: Storing,
    inputs: Inputs,
    states: Sequence[LayerState],
    plans: Sequence[LayerPlan],
    *,
    guard: bool,
    cross: Sequence[LayerState] = (),
) -> Entry:
    key = storing.key(inputs)
    if guard:
        chunk = chunk_for(storing.live, len(inputs))
        objection = objection_of(storing.live.model(), inputs, states, plans, cross, chunk=chunk)
        if objection is not None:
            raise CacheMismatchError(
                f"the cache does not hold what this model computes for these inputs: {objection}. Save it with the "
                "model and exactly the inputs it was prefilled with (guard=False saves it unchecked)"
            )
    shared = None if cross else stored_alike(storing, key, inputs, states)
    return storing.put(key, inputs, states, cross=cross, continues=shared)
