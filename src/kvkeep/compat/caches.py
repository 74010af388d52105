"""The classes of caches and their layers: how each is made, filled, emptied and counted."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers import cache_utils as _cache_utils

from kvkeep.compat.owned import OwnedLayers, is_owned, owned_layers
from kvkeep.compat.quantized import QUANTIZED_CACHES
from kvkeep.compat.versions import parameters_of


def _layers(*names: str) -> tuple[Any, ...]:
    """Those of these classes that this version has."""
    return tuple(getattr(_cache_utils, name) for name in names if hasattr(_cache_utils, name))


DYNAMIC_LAYER = _cache_utils.DynamicLayer
DYNAMIC_SLIDING_LAYER = _cache_utils.DynamicSlidingWindowLayer
STATIC_LAYER = _cache_utils.StaticLayer
# 4.57 has old names for the same layer, as trivial subclasses.
STATIC_SLIDING_LAYERS = _layers("StaticSlidingWindowLayer", "SlidingWindowLayer", "ChunkedSlidingLayer")
INDEXED_LAYERS = _layers("DynamicIndexedLayer")
STATIC_INDEXED_LAYERS = _layers("StaticIndexedLayer")
LINEAR_LAYERS = _layers("LinearAttentionLayer")
DUMMY_LAYERS = _layers("DummyLayer")
# Layers that have a linear attention's state beside what another class keeps.
HYBRID_LAYERS: dict[type, type] = {
    hybrid: attention
    for name, attention in (
        ("LinearAttentionAndFullAttentionLayer", DYNAMIC_LAYER),
        ("LinearAttentionAndSlidingWindowAttentionLayer", DYNAMIC_SLIDING_LAYER),
        ("LinearAttentionAndStaticFullAttentionLayer", STATIC_LAYER),
        ("LinearAttentionAndStaticSlidingWindowAttentionLayer", STATIC_SLIDING_LAYERS[0]),
    )
    for hybrid in _layers(name)
}


def dynamic_cache(config: Any, *, offloading: bool = False) -> DynamicCache:
    """An empty cache as ``generate`` would prepare it."""
    cache = DynamicCache(config=config, offloading=offloading)
    add_repeats(cache, config)
    return cache


def planned_layers(config: Any) -> list[Any]:
    """The empty layers of the cache that a model of this configuration fills."""
    own = owned_layers(config)
    return list(dynamic_cache(config).layers) if own is None else own


def static_cache(config: Any, max_cache_len: int, *, offloading: bool = False) -> StaticCache:
    """An empty static cache with room for ``max_cache_len`` tokens."""
    cache = StaticCache(config=config, max_cache_len=max_cache_len, offloading=offloading)
    add_repeats(cache, config)
    return cache


def add_repeats(cache: Any, config: Any) -> None:
    """Give an empty cache a layer for each time that a model runs a layer, as Dory does in its first pass."""
    repeats = int(getattr(config, "n_recurrent_loops", None) or 1) - 1
    if repeats > 0 and config.recurrent_kv_cache_mode == "per_loop" and len(cache.layers) == config.num_hidden_layers:
        first = config.n_input_layers
        repeated = cache.layers[first : first + config.n_recurrent_layers] * repeats
        cache.layers += [copy.deepcopy(layer) for layer in repeated]


def complete_cache(config: Any) -> DynamicCache:
    """An empty cache that keeps every row of every layer, sliding ones too; a prefill into it can be cut anywhere.

    Where some layers slide that cannot keep every row, none does: the masks of all are as long as one of them says.
    """
    cache = DynamicCache(config=config)
    others = [layer for layer in cache.layers if type(layer) not in (DYNAMIC_LAYER, DYNAMIC_SLIDING_LAYER)]
    if not others:
        return DynamicCache()
    if any(getattr(layer, "sliding_window", None) for layer in others):
        return cache
    cache.layers[:] = [_dynamic_layer() if type(layer) is DYNAMIC_SLIDING_LAYER else layer for layer in cache.layers]
    return cache


def _dynamic_layer() -> Any:
    make: Any = DYNAMIC_LAYER  # untyped in one version
    return make()


def is_paired(cache: Any) -> bool:
    """Whether this is a cache of two: the decoder's own, and what it sees of the encoder."""
    return isinstance(cache, EncoderDecoderCache)


def paired(own: Any) -> EncoderDecoderCache:
    """An empty cache of two around the decoder's own; cross layers never slide and never grow."""
    return EncoderDecoderCache(own, DynamicCache())


def with_own_part_copied(cache: Any) -> EncoderDecoderCache:
    """A filled cache of two that may go on by itself: what it sees of the encoder is the same memory."""
    return EncoderDecoderCache(copy.deepcopy(cache.self_attention_cache), cache.cross_attention_cache)


def decoder_part(cache: Any) -> Any:
    """The cache of the decoder's own tokens, which has layers: of one without an encoder, the cache itself.

    A cache that a model brings itself is shown as one with layers, which write through.
    """
    if is_owned(cache):
        return OwnedLayers(cache)
    return cache.self_attention_cache if is_paired(cache) else cache


def cross_part(cache: Any) -> Any:
    """The cache of what the decoder sees of the encoder: of one without an encoder, the cache itself."""
    return cache.cross_attention_cache if is_paired(cache) else cache


def first_layers(cache: Any, count: int) -> Any:
    """A cache of the same layers without those behind the first so many, if they were never filled.

    For a decoder of fewer layers than its encoder ``generate`` makes as many as for that.
    """
    surplus = cache.layers[count:]
    if not surplus or any(getattr(layer, "is_initialized", True) for layer in surplus):
        return cache
    short = copy.copy(cache)
    short.layers = cache.layers[:count]
    return short


def mark_encoded(cache: Any) -> None:
    """Say that every cross layer is filled: a layer that is not marked so projects the encoder's output once more."""
    cache.is_updated = dict.fromkeys(range(len(cross_part(cache).layers)), True)


def counts_tokens(cache: Any) -> bool:
    """Whether some layer knows how many tokens the cache has seen; a state of linear attention alone does not."""
    cache = decoder_part(cache)
    return any(hasattr(layer, "get_seq_length") for layer in cache.layers) or not cache.layers


def is_used(cache: Any) -> bool:
    """Whether anything was ever put into a cache."""
    if is_paired(cache):
        return is_used(decoder_part(cache)) or is_used(cross_part(cache))
    cache = decoder_part(cache)
    states = (getattr(layer, "has_previous_state", {}) for layer in cache.layers)
    return cached_tokens(cache) > 0 or any(any(seen.values()) for seen in states)


def is_offloaded(cache: Any) -> bool:
    """Whether the cache moves its layers between devices by itself."""
    return any(bool(getattr(part, "offloading", False)) for part in (decoder_part(cache), cross_part(cache)))


def lazy_initialization(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Allocate a static layer's buffers for sequences shaped like ``keys`` and ``values`` ([1, heads, 0, dim])."""
    parameters = parameters_of(layer.lazy_initialization)
    if "value_states" in parameters or "args" in parameters:  # hybrid layers take whatever either of their parts does
        layer.lazy_initialization(keys, values)
    else:
        layer.lazy_initialization(keys)


def fill_dynamic(layer: Any, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
    """Make a dynamic layer hold ``keys`` and ``values`` ([1, heads, rows, dim]) after ``seen`` tokens."""
    layer.keys, layer.values = keys, values
    layer.device, layer.dtype, layer.is_initialized = keys.device, keys.dtype, True
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = seen
    window = getattr(layer, "_sliding_window_tensor", None)
    if window is not None:
        layer._sliding_window_tensor = window.to(keys.device)


def extend(cache: Any, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Append keys and values ([lines, heads, slots, dim]) to an empty layer, as a prefill of so many slots would.

    It is the layer that is asked, not the cache: an offloaded one would begin to move its layers.
    """
    slots = keys.shape[2]
    while number >= len(cache.layers):
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[number]
    if "cache_kwargs" in parameters_of(layer.update):
        layer.update(keys, values, {"cache_position": torch.arange(slots, device=keys.device)})
    else:
        layer.update(keys, values)


def empty_cache(cache: Any) -> None:
    """Make a cache hold nothing, as it was when it was made. 4.57 only zeroes what grows, and keeps its length."""
    if is_paired(cache):
        empty_cache(decoder_part(cache))
        empty_cache(cross_part(cache))
        cache.is_updated = dict.fromkeys(cache.is_updated, False)
        return
    cache = decoder_part(cache)
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DYNAMIC_LAYER):
            layer.keys = layer.values = None
            layer.is_initialized = False
            if hasattr(layer, "_quantized_keys"):
                vars(layer).update(_quantized_keys=None, _quantized_values=None)
        elif getattr(layer, "is_initialized", False):
            set_static_length(layer, 0)


def emptied(cache: Any) -> Any:
    """The same cache, holding nothing."""
    empty_cache(cache)
    return cache


def room_of(cache: Any) -> int | None:
    """How many tokens a cache holds at most, ``None`` if it grows; layers that slide hold any number."""
    layers = [layer for layer in decoder_part(cache).layers if isinstance(layer, STATIC_LAYER)]
    rooms = [int(layer.max_cache_len) for layer in layers if not isinstance(layer, STATIC_SLIDING_LAYERS)]
    return min(rooms, default=None)


def set_static_length(layer: Any, seen: int) -> None:
    """Set the counters of a static layer whose buffers already hold the rows of ``seen`` tokens.

    The tensor counter is written in place: its address may be baked into a compiled graph.
    """
    counter = getattr(layer, "cumulative_length", None)
    if isinstance(counter, torch.Tensor):
        # A sliding layer stops counting in the tensor once its window is full, and then counts in the int alone.
        counter.fill_(min(seen, layer.max_cache_len))
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = seen
    elif counter is not None:
        layer.cumulative_length = seen


def keeps_row(layer: Any, behind: int) -> bool:
    """Whether a layer still holds a token's row after ``behind`` more tokens."""
    if isinstance(layer, DYNAMIC_SLIDING_LAYER):
        return behind < int(layer.sliding_window) - 1
    return behind < int(layer.max_cache_len) if isinstance(layer, STATIC_SLIDING_LAYERS) else True


def seen_tokens(layer: Any) -> int:
    """How many tokens a layer has seen, 0 for one that was never filled or does not count."""
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") and layer.is_initialized else 0


def cached_tokens(cache: Any) -> int:
    """How many tokens a cache has seen, as far as its layers count them."""
    cache = decoder_part(cache)
    return max((seen_tokens(layer) for layer in cache.layers if hasattr(layer, "get_seq_length")), default=0)


def is_known_cache(cache: Any) -> bool:
    """Whether this is exactly a cache class whose state is all in its layers; a subclass may hold more."""
    if type(cache) is EncoderDecoderCache:
        return is_known_cache(decoder_part(cache)) and is_known_cache(cross_part(cache))
    return type(cache) in _KNOWN_CACHES or is_owned(cache)


_KNOWN_CACHES = {
    getattr(_cache_utils, name)
    for name in (
        *("DynamicCache", "StaticCache", "HybridCache", "SlidingWindowCache", "HybridChunkedCache"),
        *("OffloadedCache", "OffloadedStaticCache", "OffloadedHybridCache"),  # old names of offloading ones
    )
    if hasattr(_cache_utils, name)
} | QUANTIZED_CACHES
