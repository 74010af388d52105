"""Caches that are filled from an entry and extended, so that what is new can be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvkeep import compat
from kvkeep.layouts.attention import attention_state
from kvkeep.layouts.base import LayerPlan, LayerState
from kvkeep.layouts.cachemap import describe_cache
from kvkeep.layouts.keeping import KeepingLayer


def describe_kept(cache: Any, plans: Sequence[LayerPlan], length: int, *, slack: int) -> list[LayerState]:
    """Describe a :func:`keeping_cache` of ``length`` tokens, with up to ``slack`` more rows of windows than needed.

    Raises:
        UnsupportedCacheError, CacheMismatchError: as :func:`~kvkeep.layouts.describe_cache`.
    """
    states = describe_cache(cache, plans, length)
    for number, (layer, plan) in enumerate(zip(cache.layers, plans, strict=True)):
        if isinstance(layer, KeepingLayer):
            keys, values = (torch.cat(parts, dim=-2) for parts in zip(*layer.kept, strict=True))
            states[number] = attention_state(keys, values, plan, length - keys.shape[-2], length, slack)
    return states


def keeping_cache(config: Any) -> Any:
    """An empty cache that is filled from an entry and keeps every row that is computed behind it."""
    cache = compat.dynamic_cache(config)
    cache.layers[:] = [
        KeepingLayer(layer.sliding_window) if type(layer) is compat.DYNAMIC_SLIDING_LAYER else layer
        for layer in cache.layers
    ]
    return cache
