"""Legacy caches: a tuple of (keys, values) a layer, as transformers handed them out before ``Cache`` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.layouts import LayerState

Pair = tuple[torch.Tensor, torch.Tensor]


def is_legacy(cache: object) -> bool:
    """Whether this is a tuple or list of layers and not a ``Cache``."""
    return isinstance(cache, tuple | list)


def legacy_pairs(cache: Sequence[Any]) -> list[Pair]:
    """The keys and values of every layer.

    Raises:
        UnsupportedCacheError: for the four tensors a layer of an encoder-decoder model.
        CacheMismatchError: for anything else that is not two tensors a layer, naming the layer.
    """
    pairs: list[Pair] = []
    for number, layer in enumerate(cache):
        if not isinstance(layer, tuple | list) or not all(isinstance(t, torch.Tensor) for t in layer):
            raise CacheMismatchError(f"layer {number} of the tuple is a {type(layer).__name__}, not (keys, values)")
        if len(layer) == 4:
            raise UnsupportedCacheError(
                f"layer {number} of the tuple has four tensors: caches of encoder-decoder models cannot be kept"
            )
        if len(layer) != 2:
            raise CacheMismatchError(f"layer {number} of the tuple has {len(layer)} tensors, not (keys, values)")
        pairs.append((layer[0], layer[1]))
    if not pairs:
        raise CacheMismatchError("the tuple has no layers")
    return pairs


def to_pairs(states: Sequence[LayerState]) -> tuple[Pair, ...]:
    """Described layers as a legacy tuple; the tensors are [1, heads, rows, dim] views of the cache's own."""
    return tuple((state.tensors["keys"][None], state.tensors["values"][None]) for state in states)
