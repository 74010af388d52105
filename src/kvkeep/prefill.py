"""Prefill: the forward pass that computes a prefix's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvkeep import compat
from kvkeep.errors import InvalidPromptError, UnsupportedCacheError
from kvkeep.keys import TokenIds
from kvkeep.placement import device_of

CHUNK = 512
"""Tokens a forward pass: bounds the memory of activations and lets long work show its progress."""


def prefill(model: Any, ids: TokenIds, *, chunk: int = CHUNK, progress: Callable[[int], None] | None = None) -> Any:
    """Compute the cache of ``ids`` with every row of every layer kept, without dropout and without gradients.

    The model's training mode is restored afterwards. ``chunk`` is the tokens a forward pass;
    ``progress`` is called with the number of tokens done.

    Raises:
        InvalidPromptError: for an id that the model does not know.
        UnsupportedCacheError: if the model did not fill the cache it was given.
    """
    check_known(model, ids)
    cache = compat.complete_cache()
    for begin in range(0, len(ids), chunk):
        feed(model, cache, ids[begin : begin + chunk])
        if progress is not None:
            progress(min(begin + chunk, len(ids)))
    if compat.cached_tokens(cache) != len(ids):
        raise UnsupportedCacheError(
            f"{type(model).__name__} left {compat.cached_tokens(cache)} tokens in the cache it was given for {len(ids)}"
        )
    return cache


def check_known(model: Any, ids: TokenIds) -> None:
    """Raise InvalidPromptError for an id that the model does not know."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(ids.tolist(), default=0)
    if largest >= rows:
        raise InvalidPromptError(f"the prompt holds the id {largest}, and the model knows ids below {rows}")


def media_in(model: Any, ids: TokenIds) -> str | None:
    """Why these ids do not decide their KV alone, or ``None`` if they do."""
    media = compat.media_token_ids(model)
    found = media.intersection(ids.tolist()) if media else None
    return f"the prompt holds the id {min(found)}, which stands for a picture, film or sound" if found else None


def feed(model: Any, cache: Any, ids: TokenIds) -> None:
    """Extend a cache by these ids in one forward pass, without dropout and without gradients."""
    arguments: dict[str, Any] = {compat.forward_cache_argument(model): cache, "use_cache": True}
    if compat.takes(model, "logits_to_keep"):
        arguments["logits_to_keep"] = 1
    with _evaluating(model), torch.no_grad():
        model(input_ids=id_tensor(ids).to(input_device(model)), **arguments)


def id_tensor(ids: TokenIds) -> torch.Tensor:
    """The ids as an int64 tensor of shape [1, tokens], on the CPU."""
    return torch.frombuffer(bytearray(ids.int64), dtype=torch.int64)[None]


def input_device(model: Any) -> torch.device:
    """The device that token ids are fed on: that of the input embeddings."""
    return device_of(model.get_input_embeddings()) or torch.device("cpu")


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        if training:
            model.eval()
        yield
    finally:
        for module in training:
            module.training = True
