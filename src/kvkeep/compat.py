"""What differs between the transformers versions that kvkeep supports, and nothing else.

Everything here asks for a feature, never for a version number, so that a version in between is served too. No other
module looks at transformers' internals in a way that depends on its version.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers import cache_utils as _cache_utils

from kvkeep.placement import device_of

TRANSFORMERS: str = transformers.__version__

# 5.24 renamed `past_key_values` to `cache`: the argument of generate and forward, and the field of outputs.
_GENERATE_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
GENERATE_CACHE_ARGUMENT = "cache" if "cache" in _GENERATE_PARAMETERS else "past_key_values"

GENERATE_ARGUMENTS = frozenset({"input_ids", *inspect.signature(GenerationMixin.generate).parameters})
"""Arguments of ``generate`` that are no inputs of the model."""

DYNAMIC_LAYER = _cache_utils.DynamicLayer
DYNAMIC_SLIDING_LAYER = _cache_utils.DynamicSlidingWindowLayer
STATIC_LAYER = _cache_utils.StaticLayer
# 4.57 has old names for the same layer, as trivial subclasses.
STATIC_SLIDING_LAYERS = tuple(
    getattr(_cache_utils, name)
    for name in ("StaticSlidingWindowLayer", "SlidingWindowLayer", "ChunkedSlidingLayer")
    if hasattr(_cache_utils, name)
)

_PREFILLS = hasattr(GenerationMixin, "_prefill")
SEAM = (
    "_expand_inputs_for_generation",
    "_prepare_cache_for_generation",
    "_prefill" if _PREFILLS else "_update_model_kwargs_for_generation",
)
"""The methods of ``GenerationMixin`` that ``attachment`` wraps: the inputs, the cache, and the first forward pass."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What the model's configuration says of one cache layer: its kind and, for sliding ones, the window."""

    kind: str
    window: int = 0


def text_config(model: torch.nn.Module) -> Any:
    """The configuration of the decoder that owns the cache; a nested one would lose the layer kinds."""
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def layer_plans(config: Any) -> tuple[LayerPlan | str, ...]:
    """One plan a layer, or the class name of a layer that is neither full nor sliding attention."""
    plans: list[LayerPlan | str] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) is DYNAMIC_LAYER:
            plans.append(LayerPlan("full"))
        elif type(layer) is DYNAMIC_SLIDING_LAYER and layer.sliding_window > 1:  # with 1, transformers keeps all rows
            plans.append(LayerPlan("sliding", int(layer.sliding_window)))
        else:
            plans.append(type(layer).__name__)
    return tuple(plans)


def dynamic_cache(config: Any) -> DynamicCache:
    """An empty cache as ``generate`` would prepare it."""
    return DynamicCache(config=config)


def static_cache(config: Any, max_cache_len: int) -> StaticCache:
    """An empty static cache with room for ``max_cache_len`` tokens."""
    return StaticCache(config=config, max_cache_len=max_cache_len)


def complete_cache() -> DynamicCache:
    """An empty cache that keeps every row of every layer, sliding ones too; a prefill into it can be cut anywhere."""
    return DynamicCache()


def forward_cache_argument(model: torch.nn.Module) -> str:
    """The name under which this model's forward takes a cache (remote code may still use the old one)."""
    parameters = inspect.signature(model.forward).parameters
    names = [name for name in ("cache", "past_key_values") if name in parameters]
    return names[0] if names else GENERATE_CACHE_ARGUMENT  # a wrapper that passes everything on


def takes(model: torch.nn.Module, argument: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return argument in inspect.signature(model.forward).parameters


def has_seam(model: torch.nn.Module) -> bool:
    """Whether ``generate`` of this model goes through the two methods that the hand-over wraps, as it knows them."""
    return _class_has_seam(cast(Any, type(model)))


@functools.lru_cache(maxsize=64)
def _class_has_seam(model_class: Any) -> bool:
    if not all(hasattr(model_class, name) for name in SEAM):
        return False
    wanted = ["generation_config", "model_kwargs", "generation_mode"]
    return list(inspect.signature(getattr(model_class, SEAM[1])).parameters)[1:4] == wanted


def run_guarded(
    model: Any,
    original: Callable[..., Any],
    ids: Any,
    agrees: Callable[[Any], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the last method of ``SEAM`` with the guard in it.

    Args:
        model: the model.
        original: the method.
        ids: the prompt's ids, [1, tokens].
        agrees: called with the cache once the first forward pass is over; when it says no, the cache is empty and the
            pass runs again over the whole prompt.
        args: the arguments of the method by position.
        kwargs: those by name.
    """
    if _PREFILLS:
        outputs = original(*args, **kwargs)
        if agrees(outputs[GENERATE_CACHE_ARGUMENT]):
            return outputs
        del outputs
        return original(*args, **kwargs)
    # 4.57: the method is called with what the pass returned, and before anything is sampled from it.
    outputs = kwargs["outputs"] if "outputs" in kwargs else args[0]
    model_kwargs = kwargs["model_kwargs"] if "model_kwargs" in kwargs else args[1]
    if not agrees(model_kwargs[GENERATE_CACHE_ARGUMENT]):
        model_kwargs["cache_position"] = torch.arange(ids.shape[1], device=ids.device)
        wanted = {f"output_{name}": True for name in ("attentions", "hidden_states") if outputs.get(name) is not None}
        inputs = model.prepare_inputs_for_generation(ids, **model_kwargs) | wanted
        for name, value in model(**inputs, return_dict=True).items():
            outputs[name] = value
    return original(*args, **kwargs)


def is_offloaded(cache: Any) -> bool:
    """Whether the cache moves its layers between devices by itself."""
    return bool(getattr(cache, "offloading", False))


def lazy_initialization(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Allocate a static layer's buffers for sequences shaped like ``keys`` and ``values`` ([1, heads, 0, dim])."""
    if "value_states" in inspect.signature(layer.lazy_initialization).parameters:
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


def empty_cache(cache: Any) -> None:
    """Make a cache hold nothing, as it was when it was made. 4.57 only zeroes what grows, and keeps its length."""
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DYNAMIC_LAYER):
            layer.keys = layer.values = None
            layer.is_initialized = False
        elif layer.is_initialized:
            set_static_length(layer, 0)


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
    """How many tokens a layer has seen, 0 for one that was never filled."""
    return int(layer.get_seq_length()) if layer.is_initialized else 0


def cached_tokens(cache: Any) -> int:
    """How many tokens a cache has seen, as far as its layers count them."""
    return max((seen_tokens(layer) for layer in cache.layers if hasattr(layer, "get_seq_length")), default=0)


def names_cache_kind(generation_config: Any) -> bool:
    """Whether a generation config asks for a cache kind, beside which ``generate`` refuses a cache object.

    ``cache_implementation=None`` as an argument of the call overrules it; a copy of the config without it does not:
    what it leaves open is filled in again from the model's own.
    """
    return getattr(generation_config, "cache_implementation", None) is not None


def attention_implementation(model: Any) -> str:
    """The name of the attention kernel the model runs, or ``"unknown"``."""
    return str(getattr(model.config, "_attn_implementation", None) or "unknown")


def generation_inputs(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``generate``'s model inputs decides KV: all but masks, positions, the cache and bookkeeping."""
    ignored = {
        "attention_mask",
        "position_ids",
        "cache",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
    given = {name: value for name, value in model_kwargs.items() if name not in ignored and value is not None}
    if given.get("mm_encoder_outputs") == {}:  # 5.24 sets it for prompts without pictures, too
        del given["mm_encoder_outputs"]
    return given


def is_plain_causal(model: Any) -> bool:
    """Whether the configuration is that of a text model alone, and names no attention to what follows."""
    config = text_config(model)
    return config is model.config and not getattr(config, "use_bidirectional_attention", None)


def has_experts(model: Any) -> bool:
    """Whether the model sends each token to some of many experts."""
    config = text_config(model)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
    return any((getattr(config, name, None) or 0) for name in names)


def media_token_ids(model: Any) -> frozenset[int]:
    """The ids that stand for pictures, films and sound in this model's prompts."""
    found = (getattr(model.config, name, None) for name in _MEDIA_TOKENS)
    return frozenset(one for one in found if isinstance(one, int))


_MEDIA_TOKENS = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]


def is_known_cache(cache: Any) -> bool:
    """Whether this is exactly a cache class whose state is all in its layers; a subclass may hold more."""
    return type(cache) in _KNOWN_CACHES


_KNOWN_CACHES = {
    getattr(_cache_utils, name)
    for name in ("DynamicCache", "StaticCache", "HybridCache", "SlidingWindowCache", "HybridChunkedCache")
    if hasattr(_cache_utils, name)
}


def layer_devices(model: Any, count: int) -> list[torch.device]:
    """The device each layer's KV is used on: the one that the decoder layer computes on, else the model's."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(decoder, "layers", None)
    default = device_of(model) or torch.device("cpu")
    if layers is None or len(layers) != count:
        return [default] * count
    return [device_of(layer) or default for layer in layers]
