"""The empty caches that ``load`` fills: of the kind asked for, or the caller's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep import compat
from kvkeep.errors import InvalidRequestError

_KINDS = ("dynamic", "static", "offloaded", "offloaded_static", "quantized")


def new_cache(
    model: Any, kind: str, max_cache_len: int | None, cache_config: Mapping[str, Any] | None, tokens: int
) -> Any:
    """An empty cache of a kind, as ``generate`` names them, for a prompt of so many tokens.

    Raises:
        InvalidRequestError: for an unknown kind, settings of another kind, or a static cache without enough room.
    """
    if kind not in _KINDS:
        raise InvalidRequestError(f"cache_implementation must be one of {', '.join(_KINDS)}, not {kind!r}")
    static, offloading = kind.endswith("static"), kind.startswith("offloaded")
    if max_cache_len is not None and not static:
        raise InvalidRequestError(f"max_cache_len is for static caches; one that is {kind} grows")
    if cache_config is not None and kind != "quantized":
        raise InvalidRequestError("cache_config is for cache_implementation='quantized'")
    own = compat.owned_cache(model)
    if own is not None and kind != "dynamic":
        raise InvalidRequestError(
            f"this model keeps its state in a {type(own).__name__}, of which there is no {kind} kind: leave out "
            "cache_implementation="
        )
    if own is not None:
        return own
    if kind == "quantized":
        return quantized_cache(model, cache_config)
    if not static:
        return _paired(model, compat.dynamic_cache(compat.text_config(model), offloading=offloading))
    if max_cache_len is None or max_cache_len < tokens:
        raise InvalidRequestError(
            f"a static cache needs max_cache_len of at least the prompt's {tokens} tokens plus the new ones"
        )
    return _paired(model, compat.static_cache(compat.text_config(model), max_cache_len, offloading=offloading))


def quantized_cache(model: Any, cache_config: Mapping[str, Any] | None) -> Any:
    """An empty quantized cache. Raises InvalidRequestError where transformers makes none by these settings."""
    if compat.is_encoder_decoder(model):
        raise InvalidRequestError("transformers has no quantized cache for encoder-decoder models: take another")
    try:
        return compat.quantized_cache(compat.text_config(model), cache_config)
    except (ValueError, TypeError, ImportError) as error:
        raise InvalidRequestError(f"transformers makes no such quantized cache: {error}") from error


def own_cache(model: Any, cache: Any, tokens: int) -> Any:
    """The caller's cache, emptied for a prompt of so many tokens.

    Raises:
        InvalidRequestError: for a cache that this model does not fill, or without enough room; it is as it was then.
    """
    if compat.is_paired(cache) != compat.is_encoder_decoder(model):
        raise InvalidRequestError(f"into= is a {type(cache).__name__}, which this model does not fill")
    if not compat.is_known_cache(cache):
        raise InvalidRequestError(f"into= takes a DynamicCache or StaticCache, not a {type(cache).__name__}")
    room = compat.room_of(cache)
    if room is not None and room < tokens:
        raise InvalidRequestError(f"into= has room for {room} tokens, and the prompt has {tokens}")
    return compat.emptied(cache)


def _paired(model: Any, cache: Any) -> Any:
    return compat.paired(cache) if compat.is_encoder_decoder(model) else cache
