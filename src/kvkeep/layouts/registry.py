"""The table from layer classes to codecs."""

from __future__ import annotations

from typing import Any

from kvkeep import compat
from kvkeep.errors import UnsupportedCacheError
from kvkeep.layouts.attention import DynamicCodec, StaticCodec, StaticSlidingCodec
from kvkeep.layouts.base import LayerCodec
from kvkeep.layouts.compressed import CompressedCodec
from kvkeep.layouts.indexed import INDEXED, SPARSE_M3, STATIC_INDEXED, STATIC_SPARSE_M3
from kvkeep.layouts.keeping import KeepingCodec, KeepingLayer
from kvkeep.layouts.quantized import BACKENDS, QuantizedCodec
from kvkeep.layouts.roomy import RoomyCodec, RoomyLayer
from kvkeep.layouts.states import HybridCodec, LinearCodec, NothingCodec

_CODECS: dict[type, LayerCodec] = {
    compat.DYNAMIC_LAYER: DynamicCodec(),
    compat.DYNAMIC_SLIDING_LAYER: DynamicCodec(),
    RoomyLayer: RoomyCodec(),
    KeepingLayer: KeepingCodec(),
    compat.STATIC_LAYER: StaticCodec(),
    **dict.fromkeys(compat.STATIC_SLIDING_LAYERS, StaticSlidingCodec()),
}
_CODECS |= {hybrid: HybridCodec(_CODECS[attention]) for hybrid, attention in compat.HYBRID_LAYERS.items()}
_CODECS |= dict.fromkeys(compat.LINEAR_LAYERS, LinearCodec())
_CODECS |= dict.fromkeys(compat.DUMMY_LAYERS, NothingCodec())
_CODECS |= dict.fromkeys(compat.INDEXED_LAYERS, INDEXED)
_CODECS |= dict.fromkeys(compat.STATIC_INDEXED_LAYERS, STATIC_INDEXED)
_CODECS |= {compat.OwnedAttentionLayer: DynamicCodec(), compat.OwnedLinearLayer: LinearCodec()}
_CODECS[compat.OwnedHybridLayer] = HybridCodec(DynamicCodec())
_CODECS |= {layer: QuantizedCodec(BACKENDS[backend]) for layer, backend in compat.QUANTIZED_LAYERS.items()}

_BY_NAME: dict[tuple[str, str], LayerCodec] = {
    ("deepseek_v4", "DeepseekV4HCACache"): CompressedCodec("compressed_hca"),
    ("deepseek_v4", "DeepseekV4CSACache"): CompressedCodec("compressed_csa"),
    ("minimax_m3_vl", "MiniMaxM3VLSparseCacheLayer"): SPARSE_M3,
    ("minimax_m3_vl", "MiniMaxM3VLSparseStaticCacheLayer"): STATIC_SPARSE_M3,
}
"""Codecs of classes that live beside a model, by its module and their name, so that it need not be imported."""


def register_layer_codec(layer_class: type, codec: LayerCodec) -> None:
    """Keep layers of exactly this class with ``codec``. Subclasses are not included: they may hold more state."""
    _CODECS[layer_class] = codec


def codec_for(layer: Any, number: int) -> LayerCodec:
    """The codec of a live layer.

    Raises:
        UnsupportedCacheError: naming the class and the layer, for a class that has no codec.
    """
    kind = type(layer)
    codec = _CODECS.get(kind)
    if codec is None and kind.__module__.startswith("transformers.models."):
        codec = _BY_NAME.get((kind.__module__.split(".")[2], kind.__name__))
    if codec is None:
        known = ", ".join(sorted(cls.__name__ for cls in _CODECS))
        raise UnsupportedCacheError(
            f"layer {number} of the cache is a {kind.__name__}, which kvkeep cannot keep; it keeps {known}"
        )
    return codec
