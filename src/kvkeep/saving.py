"""Storing: prefixes that are prefilled here, and caches that the user prefilled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvkeep import compat
from kvkeep.drafting import check_kept, describe, describe_encoder, draft_entry, entry_key
from kvkeep.entry_format import EntryKey
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError, UnsupportedRequestError
from kvkeep.guard import LIMITS, limit_for, objection_to, prove, row_errors, rows_of_layer
from kvkeep.identity import LiveIdentity
from kvkeep.inputs import Inputs
from kvkeep.layouts import (
    LayerPlan,
    LayerState,
    batch_pairs,
    describe_cross,
    describe_layers,
    describe_prefilled,
    plans_of,
    quantize,
    sliding_start,
)
from kvkeep.lines import Line
from kvkeep.manner import manner_of
from kvkeep.prefill import CHUNK, check_known, feed, prefill, with_encoder
from kvkeep.prefixes import uncut
from kvkeep.ranks import Ranks, ranks_of
from kvkeep.records import Entry
from kvkeep.storage.entries import Draft

if TYPE_CHECKING:
    from kvkeep.store import CacheStore

SLACK = 4
"""Rows that a warmed entry keeps of a sliding layer beyond its window: the guard computes one again, a prompt covered
to its last token is trimmed by one, and text whose last tokens merge with what follows reaches back by two or three
(measured on five tokenizers)."""

_QUANTIZED_LIMITS = {False: 1e-2, True: 0.5}
"""How far two honest rows may be apart that were quantized, relative to their size: in float32, and where rounding is
coarser or it cannot be told which of them came one by one. Measured in float32: 2e-6 and less, and 1 and more for
another token's."""


def warm(
    store: CacheStore,
    live: LiveIdentity,
    tokenizer: Any,
    inputs: Inputs,
    progress: Callable[[int, int], None] | None,
) -> Entry:
    """Prefill and store these inputs, unless they are stored already; one process does it, the others wait for it.

    State that is valid behind one token only is kept before the last one: so it serves this very prompt, too. Ranks
    that run the model together all do it, unless each of them has it stored.
    """
    if (ranks := ranks_of(live.model(), None)) is not None:
        return _warm_together(ranks, store, live, tokenizer, inputs, progress)
    inputs = _before_state(live, inputs)
    key = entry_key(inputs.prefix, live.current(), store.namespace_digest)
    entry = store.get(key.hash)
    if entry is None:
        store.check_writable()
        with store.locked(key.hash):
            # Whoever held the lock before may just have stored it.
            entry = store.get(key.hash) or _prefill(store, key, live, tokenizer, inputs, progress)
    return entry


def _before_state(live: LiveIdentity, inputs: Inputs) -> Inputs:
    """The inputs without the last token, where state is kept that is valid behind one token only."""
    snapshots = any(plan.snapshot for plan in live.asked(plans_of))
    return inputs.first(uncut(inputs.media, len(inputs) - 1) or len(inputs)) if snapshots else inputs


def _warm_together(
    ranks: Ranks,
    store: CacheStore,
    live: LiveIdentity,
    tokenizer: Any,
    inputs: Inputs,
    progress: Callable[[int, int], None] | None,
) -> Entry:
    entry, ready = None, False
    try:
        inputs = _before_state(live, inputs)
        key = entry_key(inputs.prefix, live.current(), store.namespace_digest)
        entry = store.get(key.hash)
        if entry is None:
            store.check_writable()
        ready = True
    finally:  # another rank waits for the answer, whatever it is
        stored, all_ready = ranks.least([entry is not None, ready])
    if entry is not None and stored:
        return entry
    if not all_ready:
        raise UnsupportedRequestError("another rank that runs this model cannot store: see what it raised")
    return _prefill(store, key, live, tokenizer, inputs, progress)


def _prefill(
    store: CacheStore,
    key: EntryKey,
    live: LiveIdentity,
    tokenizer: Any,
    inputs: Inputs,
    progress: Callable[[int, int], None] | None,
) -> Entry:
    model, plans, total, began = live.model(), _plans(live, len(inputs)), len(inputs), time.perf_counter()
    report = None if progress is None else lambda done: progress(done, total)
    inputs = with_encoder(model, inputs)
    cache = prefill(model, inputs, chunk=_chunk(live, total), progress=report)
    store.journal.prefilled(total, time.perf_counter() - began)
    states, cross = _prefilled(cache, plans, total, slack=SLACK)
    del cache
    _check_unchanged(key, live)  # a changed model goes on otherwise, too
    _check_end(live, inputs, states, plans, cross)
    draft = draft_entry(key, inputs.ids, states, model, tokenizer, fields=live.fields(), cross=cross)
    return _put(store, key, live, draft)


def _prefilled(
    cache: Any, plans: Sequence[LayerPlan], length: int, *, slack: int
) -> tuple[list[LayerState], list[LayerState]]:
    """What was prefilled here, and, of an encoder-decoder model, what it holds of the encoder."""
    states = describe_prefilled(compat.decoder_part(cache), plans, length, slack=slack)
    return states, describe_cross(cache, len(plans)) if compat.is_paired(cache) else []


def _check_end(
    live: LiveIdentity,
    inputs: Inputs,
    states: Sequence[LayerState],
    plans: Sequence[LayerPlan],
    cross: Sequence[LayerState],
) -> None:
    """Refuse what the model itself does not go on from: the last token, computed from the rest, must be the same.

    Raises:
        UnsupportedCacheError: if it is not. Some models go wrong once a window has moved on.
    """
    last, model = len(inputs) - 1, live.model()
    within = any(one.start <= last < one.end for one in inputs.media)
    if not last or within or live.length_rule() is not None or not all(plan.plain for plan in plans):
        return
    row = [{role: rows[:, -1:] for role, rows in state.tensors.items()} for state in states]
    objection = prove(model, _before(model, states, plans, last, cross), inputs, row)
    if objection is not None:
        raise UnsupportedCacheError(
            f"{type(model).__name__} goes on from a cache of {last} tokens otherwise than it computes them: {objection}"
        )


def save(store: CacheStore, live: LiveIdentity, tokenizer: Any, cache: Any, inputs: Inputs, *, guard: bool) -> Entry:
    """Store a cache that the user prefilled with exactly these inputs."""
    store.check_writable()
    model = live.model()
    plans = _plans(live, len(inputs))
    paired = inputs.encoder is not None
    states = describe_idle(model, cache, len(inputs), plans, paired=paired)
    if compat.is_quantized(cache):
        return _save_quantized(store, live, tokenizer, cache, inputs, states, guard=guard)
    cross = describe_encoder(cache, len(plans)) if paired else []
    return _save_states(store, live, tokenizer, inputs, states, plans, guard=guard, cross=cross)


def _save_quantized(
    store: CacheStore,
    live: LiveIdentity,
    tokenizer: Any,
    cache: Any,
    inputs: Inputs,
    states: Sequence[LayerState],
    *,
    guard: bool,
) -> Entry:
    """Store a quantized cache as it is, under a form that only caches of the same settings are filled from."""
    model = live.model()
    try:
        form = compat.form_of(cache)
    except ValueError as error:
        raise UnsupportedCacheError(f"the cache cannot be saved: {error}") from None
    key = entry_key(inputs.prefix, live.current(), store.namespace_digest, form=form)
    objection = _quantized_objection(model, cache, inputs, chunk=_chunk(live, len(inputs))) if guard else None
    if objection is not None:
        raise CacheMismatchError(
            f"the quantized cache is not what a prefill of these inputs gives, with tokens behind it one by one: "
            f"{objection}. Rows that were quantized twice, as in long generations, cannot be checked: guard=False "
            "saves them unchecked. warm(prompt) stores exact rows, which load into quantized caches, too"
        )
    return _put(store, key, live, draft_entry(key, inputs.ids, states, model, tokenizer, fields=live.fields()))


def _quantized_objection(model: Any, cache: Any, inputs: Inputs, *, chunk: int) -> str | None:
    """Why a quantized cache is not what one prefill of its quantized rows and then single tokens give; ``None`` if so.

    Rounding takes a number to the next level now and then, so what counts of a row is the median over the layers.
    """
    begin = compat.rows_quantized(cache.layers[0])
    check_known(model, inputs.ids)
    computed = prefill(model, inputs, tokens=begin, chunk=chunk)
    twin = compat.quantized_twin(compat.text_config(model), cache)
    for mine, full in zip(twin.layers, computed.layers, strict=True):
        quantize(mine, full.keys, full.values)
    for at in range(begin, len(inputs)):
        feed(model, twin, inputs, at, at + 1)
    errors = []
    for mine, theirs in zip(twin.layers, cache.layers, strict=True):
        for new, old in zip(compat.full_rows(mine), compat.full_rows(theirs), strict=True):
            if new.shape != old.shape:
                return f"it holds {list(old.shape)}, not {list(new.shape)}"
            errors.append(row_errors([(new[0].transpose(0, 1), old[0].transpose(0, 1))]))
    first = cache.layers[0]
    coarse = not compat.tells_history(first) or limit_for(model, first.keys.dtype) > LIMITS[torch.float32]
    error, limit = float(torch.stack(errors).median(dim=0).values.max()), _QUANTIZED_LIMITS[coarse]
    if error <= limit:  # not the other way round: a NaN is no agreement
        return None
    return f"a row computed again differs from the one in the cache by {error:.1e} of its size (limit {limit:.0e})"


def save_lines(
    store: CacheStore, live: LiveIdentity, tokenizer: Any, cache: Any, lines: Sequence[Line], *, guard: bool
) -> list[Entry]:
    """Store each line of a cache that the user prefilled with several; lines that are the same once."""
    store.check_writable()
    model = live.model()
    slots = max(line.padding + len(line.inputs) for line in lines)
    plans = _plans(live, slots)
    _check_idle(model)
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
            entry = _save_states(store, live, tokenizer, line.inputs, states, plans, guard=guard)
            entries[line.inputs.ids.int64] = entry
    return [entries[line.inputs.ids.int64] for line in lines]


def _save_states(
    store: CacheStore,
    live: LiveIdentity,
    tokenizer: Any,
    inputs: Inputs,
    states: Sequence[LayerState],
    plans: Sequence[LayerPlan],
    *,
    guard: bool,
    cross: Sequence[LayerState] = (),
) -> Entry:
    model = live.model()
    key = entry_key(inputs.prefix, live.current(), store.namespace_digest)
    if guard:
        objection = _objection(model, inputs, states, plans, cross, chunk=_chunk(live, len(inputs)))
        if objection is not None:
            raise CacheMismatchError(
                f"the cache does not hold what this model computes for these inputs: {objection}. Save it with the "
                "model and exactly the inputs it was prefilled with (guard=False saves it unchecked)"
            )
    draft = draft_entry(key, inputs.ids, states, model, tokenizer, fields=live.fields(), cross=cross)
    return _put(store, key, live, draft)


def _put(store: CacheStore, key: EntryKey, live: LiveIdentity, draft: Draft) -> Entry:
    """Store what was computed, if the model is still the one that the key names."""
    _check_unchanged(key, live)
    return store.put(draft)


def _check_unchanged(key: EntryKey, live: LiveIdentity) -> None:
    if live.current() != key.identity:
        raise CacheMismatchError("the model was changed while its KV was computed: nothing was stored; try again")


def _check_idle(model: Any) -> None:
    if model.training:
        raise UnsupportedRequestError("the model is in training mode, where caches are noisy: call model.eval()")


def describe_idle(
    model: Any, cache: Any, length: int, plans: Sequence[LayerPlan], *, paired: bool = False
) -> list[LayerState]:
    """Describe a cache of a model that is not being trained."""
    _check_idle(model)
    return describe(cache, plans, length, compat.text_config(model), paired=paired)


def _plans(live: LiveIdentity, length: int) -> tuple[LayerPlan, ...]:
    model, rule = live.model(), live.length_rule()
    if rule is not None and rule.refuses(length):
        raise UnsupportedCacheError(
            f"{type(model).__name__} has other rotary frequencies for every length beyond {rule.switch} tokens, so "
            f"that KV of {length} tokens would serve no other prompt: store a shorter prefix"
        )
    plans = plans_of(model)
    objection = live.asked(manner_of).objection
    if objection is not None:
        raise UnsupportedCacheError(f"{type(model).__name__} {objection}")
    return plans


def _chunk(live: LiveIdentity, length: int) -> int:
    """Tokens a forward pass: all of them where the first ones need the frequencies that the last ones switch on.

    So, too, where several tokens fed behind others would not see the state that these left.
    """
    rule = live.length_rule()
    whole = (rule is not None and length > rule.switch) or live.asked(manner_of).singly
    return length if whole else CHUNK


def _objection(
    model: Any,
    inputs: Inputs,
    states: Sequence[LayerState],
    plans: Sequence[LayerPlan],
    cross: Sequence[LayerState],
    *,
    chunk: int,
) -> str | None:
    """Why the model says that these states are not what it computes for these inputs.

    The rows of a layer that has them all say whether the ids are right, each of them; the rows of the last token, in
    every layer, say whether the model is. Where windows have moved on, only the whole prefill can say either; where
    there are media or an encoder, all of it is compared.
    """
    check_known(model, inputs.ids)
    last = len(inputs) - 1
    if inputs.media or cross or not all(plan.plain for plan in plans):
        own, seen = _prefilled(prefill(model, inputs, chunk=chunk), plans, len(inputs), slack=len(inputs))
        if [state.record.rows for state in seen] != [state.record.rows for state in cross]:
            counts = cross[0].record.rows, seen[0].record.rows
            return f"it holds {counts[0]} positions of an encoder where the model computes {counts[1]}"
        pairs = []
        for number, (new, old) in enumerate(zip([*own, *seen], [*states, *cross], strict=True)):
            if (new.record.tensors, new.record.scalars) != (old.record.tensors, old.record.scalars):
                return f"layer {number} holds other tensors than the model's own"
            pairs += _pairs(new.tensors, new.record.first, old)
        return objection_to(model, pairs)
    row = [{role: rows[:, -1:] for role, rows in state.tensors.items()} for state in states]
    if not last:
        return prove(model, _before(model, states, plans, 0), inputs, row)
    whole = next((number for number, state in enumerate(states) if state.record.first == 0), None)
    if whole is not None and all(
        state.record.first <= sliding_start(plan, last) for state, plan in zip(states, plans, strict=True)
    ):
        cache = _before(model, states, plans, last)
        keys, values = rows_of_layer(model, inputs, last, whole, chunk=chunk)
    else:
        whole = len(states) - 1 if whole is None else whole  # the deepest layer depends on the most ids
        cache = prefill(model, inputs, tokens=last, chunk=chunk)
        keys, values = cache.layers[whole].keys, cache.layers[whole].values
    pairs = _pairs({"keys": keys[0], "values": values[0]}, 0, states[whole])
    return objection_to(model, pairs) or prove(model, cache, inputs, row)


def _pairs(
    computed: Mapping[str, torch.Tensor], first: int, stored: LayerState
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One layer's tensors as :func:`~kvkeep.guard.row_errors` takes them; computed rows start at ``first``.

    Rows are compared as far as both are there.
    """
    pairs = []
    for role, old in stored.tensors.items():
        new = computed[role]
        if stored.record.tensors[role] == "rows":
            begin = max(first, stored.record.first)
            new, old = new[:, begin - first :], old[:, begin - stored.record.first :]
            rows = min(new.shape[1], old.shape[1])
            pairs.append((new[:, :rows].transpose(0, 1), old[:, :rows].transpose(0, 1)))
        else:
            pairs.append((new.reshape(1, 1, -1), old.reshape(1, 1, -1)))
    return pairs


def _before(
    model: Any,
    states: Sequence[LayerState],
    plans: Sequence[LayerPlan],
    tokens: int,
    cross: Sequence[LayerState] = (),
) -> Any:
    """A cache of the first ``tokens`` tokens, of the very memory that the states lie in."""
    cache = compat.dynamic_cache(compat.text_config(model))
    devices = compat.layer_devices(model, len(states))
    for layer, state, plan, device in zip(cache.layers, states, plans, devices, strict=True):
        begin = sliding_start(plan, tokens) - state.record.first
        keys, values = (state.tensors[role][None, :, begin:-1].to(device) for role in ("keys", "values"))
        if tokens:
            compat.fill_dynamic(layer, keys, values, tokens)
    if not cross:
        return cache
    pair = compat.paired(cache)
    for number, (state, device) in enumerate(zip(cross, devices, strict=True)):
        keys, values = (state.tensors[role][None].to(device) for role in ("keys", "values"))
        compat.extend(pair.cross_attention_cache, number, keys, values)
    compat.mark_encoded(pair)
    return pair
