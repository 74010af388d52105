"""Asking the model: whether a cache holds what it computes for these inputs, and whether it goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvkeep import compat
from kvkeep.errors import UnsupportedCacheError
from kvkeep.guard import LIMITS, StoredRow, limit_for, objection_to, prove, row_errors, rows_of_layer
from kvkeep.identity import LiveIdentity
from kvkeep.inputs import Inputs
from kvkeep.layouts import LayerPlan, LayerState, describe_cross, describe_prefilled, quantize, sliding_start
from kvkeep.prefill import check_known, feed, prefill

_QUANTIZED_LIMITS = {False: 1e-2, True: 0.5}
"""How far two honest rows may be apart that were quantized, relative to their size: in float32, and where rounding is
coarser or it cannot be told which of them came one by one. Measured in float32: 2e-6 and less, and 1 and more for
another token's."""

_STEPS_LIMIT = 3e-3
"""How far a state and the rows behind it may be apart that were computed at once and one by one, in float32.

The two are other algorithms, and the difference runs through the layers behind. Measured on wide random weights up to
1.5e-3 (Zamba; 1.2e-4 for Qwen3-Next, 1e-5 for others), and 1.2 and more for rows of other tokens, which is why there
must be rows of all of them: a state alone forgets, 2e-5 and less are left of another first token after 700, and its own
two ways of being computed agree to 5e-6."""


def prefilled_states(
    cache: Any, plans: Sequence[LayerPlan], length: int, *, slack: int
) -> tuple[list[LayerState], list[LayerState]]:
    """What was prefilled here, and, of an encoder-decoder model, what it holds of the encoder."""
    states = describe_prefilled(compat.decoder_part(cache), plans, length, slack=slack)
    return states, describe_cross(cache, len(plans)) if compat.is_paired(cache) else []


def check_end(
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


def objection_of(
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
        own, seen = prefilled_states(prefill(model, inputs, chunk=chunk), plans, len(inputs), slack=len(inputs))
        if [state.record.rows for state in seen] != [state.record.rows for state in cross]:
            counts = cross[0].record.rows, seen[0].record.rows
            return f"it holds {counts[0]} positions of an encoder where the model computes {counts[1]}"
        pairs = []
        for number, (new, old) in enumerate(zip([*own, *seen], [*states, *cross], strict=True)):
            if (new.record.tensors, new.record.scalars) != (old.record.tensors, old.record.scalars):
                return f"layer {number} holds other tensors than the model's own"
            pairs += _pairs(new.tensors, new.record.first, old)
        return _other_kind(pairs) or objection_to(
            model, pairs, at_least=_STEPS_LIMIT if _has_state_and_rows(states) else 0.0
        )
    row = [{role: rows[:, -1:] for role, rows in state.tensors.items()} for state in states]
    if not last:
        return _unlike(model, _before(model, states, plans, 0), inputs, row)
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
    return _other_kind(pairs) or objection_to(model, pairs) or _unlike(model, cache, inputs, row)


def _other_kind(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    """Why rows (computed, held), each pair [rows, heads, dim], are not of one shape and number format."""
    for new, old in pairs:
        if (new.shape[1:], new.dtype) != (old.shape[1:], old.dtype):
            shapes = [f"{list(one.shape[1:])} {one.dtype}" for one in (old, new)]
            return f"a row is {shapes[0]}, where the model computes {shapes[1]}"
    return None


def _unlike(model: Any, cache: Any, inputs: Inputs, row: StoredRow) -> str | None:
    """:func:`~kvkeep.guard.prove`, of a cache that may hold what no model goes on from."""
    try:
        return prove(model, cache, inputs, row)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:  # heads or widths that do not fit those that are computed
        return f"the model does not go on from it ({error})"


def _has_state_and_rows(states: Sequence[LayerState]) -> bool:
    """Whether there is state of linear attention, and rows of every token beside it."""
    records = [state.record for state in states]
    linear = any(record.kind.startswith("linear") for record in records)
    return linear and any(record.rows and record.first == 0 for record in records)


def quantized_objection(model: Any, cache: Any, inputs: Inputs, *, chunk: int) -> str | None:
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
