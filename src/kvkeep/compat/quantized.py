"""Quantized caches: their classes, how one is made, and the settings that decide what is in one."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
from transformers import cache_utils as _cache_utils

_SETTINGS = ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length")

QUANTIZED_LAYERS: Mapping[type, str] = {
    getattr(_cache_utils, name): backend
    for name, backend in (
        ("QuantoQuantizedLayer", "quanto"),
        ("HQQQuantizedLayer", "hqq"),
        ("Fp8QuantizedLayer", "fp8"),
    )
    if hasattr(_cache_utils, name)
}
"""The layer classes that quantize, and the name of what does it."""

QUANTIZED_CACHES = frozenset(
    getattr(_cache_utils, name)
    for name in ("QuantizedCache", "QuantoQuantizedCache", "HQQQuantizedCache")
    if hasattr(_cache_utils, name)
)
_LONGEST = 64
_PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def quantized_cache(config: Any, settings: Mapping[str, Any] | None) -> Any:
    """An empty quantized cache, as ``generate`` makes it of a ``cache_config``: ``backend``, ``nbits``, ...

    Raises:
        ValueError, TypeError: for settings that transformers refuses, or a model that it does not quantize for.
        ImportError: if the backend is not installed.
    """
    given = {"config": config, "backend": "quanto", **(settings or {})}
    if "fp8" not in QUANTIZED_LAYERS.values() and given["backend"] == "fp8":
        raise ValueError("this transformers has no `fp8` backend")
    make: Any = _cache_utils.QuantizedCache
    return make(**given)


def quantized_twin(config: Any, cache: Any) -> Any:
    """An empty cache that quantizes as this one does, of a model with this configuration."""
    layer = cache.layers[0]
    settings = {name: getattr(layer, name) for name in _SETTINGS if hasattr(layer, name)}
    return quantized_cache(config, {"backend": QUANTIZED_LAYERS[type(layer)], **settings})


def full_rows(layer: Any) -> tuple[Any, Any]:
    """The keys and values of a filled quantized layer as the next token will see them, [1, heads, rows, dim] each."""
    found = []
    for packed, later in ((layer._quantized_keys, layer.keys), (layer._quantized_values, layer.values)):
        rows = layer._dequantize(packed)
        found.append(rows if later.dim() != rows.dim() else torch.cat([rows, later], dim=-2))
    return found[0], found[1]


def rows_quantized(layer: Any) -> int:
    """How many rows of a filled quantized layer are quantized; the others follow them as they were computed."""
    later = layer.keys.shape[-2] if layer.keys.dim() > 1 else 0
    return int(layer.cumulative_length) - int(later)


def tells_history(layer: Any) -> bool:
    """Whether a filled quantized layer shows which rows came after the first pass; fp8 appends them to the others."""
    return QUANTIZED_LAYERS[type(layer)] != "fp8"


def is_quantized(cache: Any) -> bool:
    """Whether some layer of a cache keeps its rows quantized."""
    return any(type(layer) in QUANTIZED_LAYERS for layer in getattr(cache, "layers", ()))


def quantizer_of(layer: Any) -> dict[str, str]:
    """What decides how a layer quantizes: the backend, its version, and the settings; all as text.

    Raises:
        ValueError: for a backend whose version is not known, because its package is not installed.
    """
    backend = QUANTIZED_LAYERS[type(layer)]
    found = {"backend": backend, "version": ""}
    if backend in _PACKAGES:
        try:
            found["version"] = importlib.metadata.version(_PACKAGES[backend])
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(f"{_PACKAGES[backend]}, which quantized it, is not installed") from None
    else:  # no library: the number format is the whole of it
        found["version"] = str(layer.fp8_dtype).removeprefix("torch.")
    return found | {name: str(getattr(layer, name)) for name in _SETTINGS if hasattr(layer, name)}


def form_of(cache: Any) -> str:
    """The form under which entries are kept that are bit for bit what this quantized cache holds.

    Raises:
        ValueError: if its layers do not all quantize alike.
    """
    kinds = {tuple(quantizer_of(layer).values()) if type(layer) in QUANTIZED_LAYERS else () for layer in cache.layers}
    if len(kinds) != 1 or () in kinds:
        raise ValueError("its layers do not all quantize alike")
    form = ":".join(("quantized", *kinds.pop()))
    if len(form) > _LONGEST:
        raise ValueError(f"{form!r} is too long to be the name of a form")
    return form
