"""Quantized caches in ``generate``: the first pass runs on full rows, and behind it all of them are quantized at once.

So does transformers without a store: the pass over the prompt attends to the keys and values as they were computed, and
only later tokens see quantized ones. A stored prefix that was quantized before that pass would give other logits.
"""

from __future__ import annotations

from typing import Any

import torch

from kvkeep import compat


def take_quantized(cache: Any) -> list[Any]:
    """Put layers of full rows in the place of an empty cache's quantized ones, and return these, if it has any.

    The cache is as long to be filled and continued as any dynamic one, until :func:`put_quantized`.
    """
    if not compat.is_quantized(cache):
        return []
    taken: list[Any] = list(cache.layers)
    make: Any = compat.DYNAMIC_LAYER  # untyped in one version
    cache.layers[:] = [make() for _ in taken]
    return taken


def put_quantized(cache: Any, layers: list[Any]) -> None:
    """Put the quantized layers back, each filled with the rows of the one that stood in for it."""
    for number, layer in enumerate(layers):
        full = cache.layers[number]
        if full.is_initialized:
            quantize(layer, full.keys, full.values)
        cache.layers[number] = layer  # one by one, so that full rows go as quantized ones come


def quantize(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Fill an empty quantized layer with keys and values ([lines, heads, rows, dim]), as a prefill of them does."""
    with torch.no_grad():
        layer.update(keys, values)
