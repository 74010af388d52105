"""Caches of encoder-decoder models: the decoder's own layers, and as many that hold what it sees of the encoder.

The cross layers are stored whole, a row a position of the encoder. Their rows are a stretch of their own, so they are
described and filled as the layers of a cache of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import EntryMeta, TensorSpec, tensor_name
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.layouts.attention import attention_state
from kvkeep.layouts.base import LayerPlan, LayerState
from kvkeep.layouts.buffers import LayerReader
from kvkeep.layouts.cachemap import describe_cache, fill_cache
from kvkeep.layouts.lending import HeldLayers
from kvkeep.layouts.registry import codec_for

_FULL = LayerPlan("full")


def describe_cross(cache: Any, count: int) -> list[LayerState]:
    """Describe the cross layers of a cache of both, of a model with ``count`` layers in its decoder.

    Raises:
        CacheMismatchError: if they are not all filled from one encoder input.
        UnsupportedCacheError: for a layer class without a codec, naming both.
    """
    cross = compat.first_layers(compat.cross_part(cache), count)
    positions = compat.cached_tokens(cross)
    if not positions:
        raise CacheMismatchError("the cross-attention layers of the cache are empty: the decoder has seen no encoder")
    for number, layer in enumerate(cross.layers):
        if (kind := codec_for(layer, number).plan(layer).kind) != _FULL.kind:
            raise UnsupportedCacheError(
                f"cross layer {number} of the cache is of the kind {kind!r}: it has not kept all of the encoder"
            )
    return describe_cache(cross, [_FULL] * count, positions)


def describe_cross_tensors(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[LayerState]:
    """Describe keys and values of cross layers, [1, heads, positions, dim] each.

    Raises:
        CacheMismatchError: for a layer whose tensors are not that, or have other positions than the first, naming it.
    """
    states = []
    for number, (keys, values) in enumerate(layers):
        try:
            states.append(attention_state(keys, values, _FULL, 0, layers[0][0].shape[-2]))
        except (ValueError, IndexError) as error:
            raise CacheMismatchError(f"cross layer {number} of the cache cannot be saved: {error}") from None
    return states


def positions_of(meta: EntryMeta) -> int:
    """How many positions of an encoder an entry holds, 0 if it is of no encoder-decoder model."""
    return meta.cross[0].rows if meta.cross else 0


def fill_paired(
    cache: Any,
    meta: EntryMeta,
    tensors: Mapping[str, TensorSpec],
    tokens: int,
    read: Callable[[str], LayerReader | HeldLayers],
    devices: Sequence[torch.device],
    *,
    next_row: bool = False,
    room: int = 0,
) -> list[dict[str, torch.Tensor]] | None:
    """Make an empty cache of both hold the first ``tokens`` decoder tokens of an entry, and all of its encoder.

    Args:
        cache: the cache.
        meta: the entry's metadata.
        tensors: its tensors.
        tokens: how many, 0 too.
        read: gives the reader of ``"layers"`` and of ``"cross"``, or what is held of them.
        devices: the device of each layer.
        next_row: as in :func:`~kvkeep.layouts.fill_cache`, which says what is returned and raised, too.
        room: likewise.
    """
    if not compat.is_paired(cache) or not meta.cross:
        raise ValueError("the entry and the cache are not both of an encoder-decoder model")
    own, cross = compat.decoder_part(cache), compat.cross_part(cache)
    for part in (own, cross):
        part.layers[:] = compat.first_layers(part, len(meta.layers)).layers
    row = fill_cache(own, meta, tensors, tokens, read("layers"), devices, next_row=next_row, room=room)
    try:
        alone = replace(meta, layers=meta.cross, cross=None, end=positions_of(meta))
        named = {
            tensor_name("layers", number, role): tensors[tensor_name("cross", number, role)]
            for number, layer in enumerate(meta.cross)
            for role in layer.tensors
        }
        fill_cache(cross, alone, named, positions_of(meta), read("cross"), devices)
    except BaseException:
        compat.empty_cache(cache)
        raise
    compat.mark_encoded(cache)
    return row
