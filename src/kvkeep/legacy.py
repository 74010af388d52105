"""Legacy caches: a tuple of (keys, values) a layer, as transformers handed them out before ``Cache`` objects.

A layer that keeps nothing is ``None``. Three models had layouts of their own once, which their configuration tells how
to read: Bloom and Falcon one dimension for batch and heads, Bloom's keys with the tokens last, and GPT-BigCode keys and
values in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import LayerRecord
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.layouts import LayerPlan, LayerState, describe_cross_tensors
from kvkeep.layouts.attention import attention_state

Pair = tuple[torch.Tensor, torch.Tensor]

_NOTHING = "none"


def is_legacy(cache: object) -> bool:
    """Whether this is a tuple or list of layers and not a ``Cache``."""
    return isinstance(cache, tuple | list)


def own_pairs(cache: Sequence[Any]) -> Sequence[Any]:
    """The decoder's own keys and values of layers of four tensors; what has no such layers, as it is."""
    return [layer[:2] for layer in cache] if _is_quadruple(cache) else cache


def describe_legacy_cross(cache: Sequence[Any]) -> list[LayerState]:
    """Describe what a tuple of four tensors a layer holds of an encoder.

    Raises:
        CacheMismatchError: for a tuple of other layers, naming the first.
    """
    if not _is_quadruple(cache):
        wrong = next((n for n, one in enumerate(cache) if not isinstance(one, tuple | list) or len(one) != 4), 0)
        raise CacheMismatchError(
            f"layer {wrong} of the tuple is not (keys, values, cross keys, cross values), as those of an "
            "encoder-decoder model are"
        )
    return describe_cross_tensors([_pair(layer[2:], number, 0, None) for number, layer in enumerate(cache)])


def _is_quadruple(cache: Sequence[Any]) -> bool:
    return bool(cache) and all(isinstance(layer, tuple | list) and len(layer) == 4 for layer in cache)


def describe_legacy(
    cache: Sequence[Any], plans: Sequence[LayerPlan], length: int, config: Any = None
) -> list[LayerState]:
    """Describe a tuple or list of layers whose rows end at ``length``; ``config`` is that of the text model.

    Raises:
        UnsupportedCacheError: for a layer whose state a tuple cannot hold, and for the four tensors a layer of an
            encoder-decoder model, naming the layer.
        CacheMismatchError: for what is not the keys and values of one sequence of so many tokens, naming the layer.
    """
    if not cache:
        raise CacheMismatchError("the tuple has no layers")
    if len(cache) != len(plans):
        raise CacheMismatchError(f"the cache has {len(cache)} layers, the model {len(plans)}: it is another model's")
    _check_plain(plans)
    states = []
    for number, (layer, plan) in enumerate(zip(cache, plans, strict=True)):
        try:
            states.append(_state(layer, plan, number, length, config))
        except CacheMismatchError:
            raise
        except ValueError as error:
            raise CacheMismatchError(f"layer {number} of the cache cannot be saved: {error}") from None
    if all(state.record.first for state in states if state.record.kind != _NOTHING):
        raise CacheMismatchError(
            "every layer of the tuple begins behind token 0, so nothing in it says how many tokens it has seen: "
            "save the Cache object that it came from"
        )
    return states


def tokens_for_pairs(cache: Any, plans: Sequence[LayerPlan]) -> int:
    """How many tokens a ``Cache`` holds that can be handed out as pairs.

    Raises:
        UnsupportedCacheError: for what is no cache that kvkeep keeps, and for a layer that keeps more than keys and
            values, naming it and its kind.
        CacheMismatchError: if the cache is empty.
    """
    if not compat.is_known_cache(cache):
        raise UnsupportedCacheError(f"a {type(cache).__name__} is not a cache that kvkeep can take apart")
    _check_plain(plans)
    tokens = compat.cached_tokens(cache)
    if not tokens:
        raise CacheMismatchError("the cache is empty: there are no keys and values to hand out")
    return tokens


def to_pairs(
    states: Sequence[LayerState], cross: Sequence[LayerState] = ()
) -> tuple[tuple[torch.Tensor, ...] | None, ...]:
    """Described layers as a legacy tuple; the tensors are [1, heads, rows, dim] views of the cache's own.

    With cross layers, theirs are behind them: four a layer.
    """
    own = tuple(
        None if state.record.kind == _NOTHING else (state.tensors["keys"][None], state.tensors["values"][None])
        for state in states
    )
    if not cross:
        return own
    return tuple((*(one or ()), *(two or ())) for one, two in zip(own, to_pairs(cross), strict=True))


def _check_plain(plans: Sequence[LayerPlan]) -> None:
    for number, plan in enumerate(plans):
        if not plan.plain and plan.kind != _NOTHING:
            raise UnsupportedCacheError(
                f"layer {number} of this model is of the kind {plan.kind!r}, whose state is more than the keys and "
                "values that a tuple holds: use the Cache object"
            )


def _state(layer: Any, plan: LayerPlan, number: int, length: int, config: Any) -> LayerState:
    if plan.kind == _NOTHING:
        if not _is_nothing(layer):
            raise CacheMismatchError(f"layer {number} of this model keeps nothing, and the tuple has something there")
        return LayerState(LayerRecord(kind=_NOTHING, tensors={}, scalars={}), {})
    keys, values = _pair(layer, number, length, config)
    first = length - keys.shape[2] if keys.dim() == 4 else 0
    return attention_state(keys, values, plan, first, length)


def _is_nothing(layer: Any) -> bool:
    return layer is None or (isinstance(layer, tuple | list) and all(one is None for one in layer))


def _pair(layer: Any, number: int, length: int, config: Any) -> Pair:
    """Keys and values, [1, heads, rows, dim] each if they were kept as they should be."""
    model_type = str(getattr(config, "model_type", None))
    if isinstance(layer, torch.Tensor) and model_type == "gpt_bigcode":
        return _split(layer, length, config)
    if not isinstance(layer, tuple | list):
        raise CacheMismatchError(f"layer {number} of the tuple is a {type(layer).__name__}, not (keys, values)")
    if len(layer) == 4:
        raise UnsupportedCacheError(
            f"layer {number} of the tuple has four tensors, as of an encoder-decoder model, which this one is not"
        )
    if len(layer) != 2:
        raise CacheMismatchError(f"layer {number} of the tuple has {len(layer)} tensors, not (keys, values)")
    keys, values = layer
    for name, tensor in (("keys", keys), ("values", values)):
        if not isinstance(tensor, torch.Tensor):
            raise CacheMismatchError(f"the {name} of layer {number} of the tuple are a {type(tensor).__name__}")
    merged = _MERGED.get(model_type)
    if merged is not None and 3 in (keys.dim(), values.dim()):
        return merged(keys, values, length, config)
    return keys, values


# --- layouts of old: each raises ValueError where a tensor is not exactly what the configuration makes it ---


def _bloom(keys: torch.Tensor, values: torch.Tensor, tokens: int, config: Any) -> Pair:
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    _expect("keys", keys, (heads, dim, tokens))
    _expect("values", values, (heads, tokens, dim))
    return keys.transpose(1, 2)[None], values[None]


def _falcon(keys: torch.Tensor, values: torch.Tensor, tokens: int, config: Any) -> Pair:
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if not config.new_decoder_architecture:  # that one repeats its few heads before they are kept
        heads = 1 if config.multi_query else config.num_kv_heads
    _expect("keys", keys, (heads, tokens, dim))
    _expect("values", values, (heads, tokens, dim))
    return keys[None], values[None]


def _split(fused: torch.Tensor, tokens: int, config: Any) -> Pair:
    """GPT-BigCode's tensor: the keys, and behind them the values, in its last dimension."""
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    _expect("tensor", fused, (1, tokens, 2 * dim) if config.multi_query else (1, heads, tokens, 2 * dim))
    if config.multi_query:
        fused = fused[:, None]
    return fused[..., :dim], fused[..., dim:]


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"the shape of its {name} is {list(tensor.shape)}; by the model's configuration one sequence of so many "
            f"tokens has {list(shape)}"
        )


_MERGED: Mapping[str, Callable[[torch.Tensor, torch.Tensor, int, Any], Pair]] = {"bloom": _bloom, "falcon": _falcon}
"""For models that had one dimension for batch and heads once, how their 3-D tensors are read."""
