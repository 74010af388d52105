"""The table from layer classes to codecs."""

from __future__ import annotations

from typing import Any

from kvkeep import compat
from kvkeep.errors import UnsupportedCacheError
from kvkeep.layouts.attention import DynamicCodec, StaticCodec, StaticSlidingCodec
from kvkeep.layouts.base import LayerCodec
from kvkeep.layouts.roomy import RoomyCodec, RoomyLayer

_CODECS: dict[type, LayerCodec] = {
    compat.DYNAMIC_LAYER: DynamicCodec(),
    compat.DYNAMIC_SLIDING_LAYER: DynamicCodec(),
    RoomyLayer: RoomyCodec(),
    compat.STATIC_LAYER: StaticCodec(),
    **dict.fromkeys(compat.STATIC_SLIDING_LAYERS, StaticSlidingCodec()),
}


def register_layer_codec(layer_class: type, codec: LayerCodec) -> None:
    """Keep layers of exactly this class with ``codec``. Subclasses are not included: they may hold more state."""
    _CODECS[layer_class] = codec


def codec_for(layer: Any, number: int) -> LayerCodec:
    """The codec of a live layer.

    Raises:
        UnsupportedCacheError: naming the class and the layer, for a class that has no codec.
    """
    codec = _CODECS.get(type(layer))
    if codec is None:
        known = ", ".join(sorted(cls.__name__ for cls in _CODECS))
        raise UnsupportedCacheError(
            f"layer {number} of the cache is a {type(layer).__name__}, which kvkeep cannot keep; it keeps {known}"
        )
    return codec
