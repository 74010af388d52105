"""What a model says of itself: its configuration, its forward, its devices."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvkeep.compat.versions import GENERATE_CACHE_ARGUMENT, parameters_of
from kvkeep.placement import device_of


def text_config(model: torch.nn.Module) -> Any:
    """The configuration of the decoder that owns the cache; a nested one would lose the layer kinds."""
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    named = getattr(config, "attribute_map", {}).get("num_hidden_layers")
    depth = getattr(config, "num_decoder_layers", None)  # T5 and its kin: the encoder's depth stands for both
    if depth and named == "num_layers" and depth != config.num_hidden_layers:
        config = copy.deepcopy(config)
        config.num_hidden_layers = depth
    return config


def forward_cache_argument(model: torch.nn.Module) -> str:
    """The name under which this model's forward takes a cache (remote code may still use the old one)."""
    parameters = parameters_of(model.forward)
    names = [name for name in ("cache", "past_key_values", "cache_params") if name in parameters]
    return names[0] if names else GENERATE_CACHE_ARGUMENT  # a wrapper that passes everything on


def unplaced_ids(model: Any) -> frozenset[int] | None:
    """Ids of padding that a model does not count when it places the tokens of one pass, but does count in a cache.

    ``None`` if it counts so, and does not say which they are.
    """
    found = [
        getattr(module, "padding_idx", None)
        for module in model.modules()
        if hasattr(module, "create_position_ids_from_inputs_embeds")
    ]
    return None if None in found else frozenset(one for one in found if one is not None)


def takes(model: torch.nn.Module, argument: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return argument in parameters_of(model.forward)


def attention_implementation(model: Any) -> str:
    """The name of the attention kernel the model runs, or ``"unknown"``."""
    return str(getattr(model.config, "_attn_implementation", None) or "unknown")


def has_experts(model: Any) -> bool:
    """Whether the model sends each token to some of many experts."""
    config = text_config(model)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
    return any((getattr(config, name, None) or 0) for name in names)


def layer_devices(model: Any, count: int) -> list[torch.device]:
    """The device each layer's KV is used on: the one that the decoder layer computes on, else the model's."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(decoder, "layers", None)
    default = device_of(model) or torch.device("cpu")
    if layers is None or len(layers) != count:
        return [default] * count
    return [device_of(layer) or default for layer in layers]
