"""Prefill: the forward pass that computes a prefix's cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvkeep import compat
from kvkeep.errors import InvalidPromptError, KvkeepError, UnsupportedCacheError
from kvkeep.inputs import Inputs, input_device
from kvkeep.keys import TokenIds

CHUNK = 512
"""Tokens a forward pass: bounds the memory of activations and lets long work show its progress."""


def prefill(
    model: Any,
    inputs: Inputs,
    *,
    tokens: int | None = None,
    chunk: int = CHUNK,
    cache: Any = None,
    begin: int = 0,
    boundaries: Mapping[int, Callable[[Any], None]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """Compute a cache of the inputs with every row of every layer kept, without dropout and without gradients.

    The model's training mode is restored afterwards.

    Args:
        model: the model.
        inputs: what it is fed.
        tokens: how many tokens of it; all of them by default.
        chunk: tokens a forward pass, more where a picture would be cut.
        cache: a cache to extend instead of a new one.
        begin: how many tokens it holds.
        boundaries: what to call with the cache when it holds so many tokens.
        progress: called with the number of tokens done.

    Raises:
        InvalidPromptError: for an id that the model does not know, or media that it does not take.
        UnsupportedCacheError: if the model did not fill the cache it was given.
    """
    check_known(model, inputs.ids)
    inputs = with_encoder(model, inputs)
    cache = empty_cache(model, inputs) if cache is None else cache
    total = len(inputs) if tokens is None else tokens
    boundaries = boundaries or {}
    for first, end in passes(inputs, total, chunk, begin, boundaries):
        feed(model, cache, inputs, first, end)
        if end in boundaries:
            boundaries[end](cache)
        if progress is not None:
            progress(end)
    if compat.counts_tokens(cache) and compat.cached_tokens(cache) != total:
        raise UnsupportedCacheError(
            f"{type(model).__name__} left {compat.cached_tokens(cache)} tokens in the cache it was given for {total}"
        )
    return cache


def empty_cache(model: Any, inputs: Inputs) -> Any:
    """An empty cache for these inputs that keeps every row of every layer."""
    own = compat.owned_cache(model)
    own = compat.complete_cache(compat.text_config(model)) if own is None else own
    return own if inputs.encoder is None else compat.paired(own)


def with_encoder(model: Any, inputs: Inputs) -> Inputs:
    """The inputs on the model's device, with the encoder run, where there is one that has not.

    Raises:
        InvalidPromptError: if the encoder refuses what it is given.
    """
    encoder = inputs.encoder
    if encoder is None or encoder.output is not None:
        return inputs
    inputs = inputs.on(input_device(model))
    try:
        with _evaluating(model), torch.no_grad():
            return inputs.encoded(compat.encode(model, encoder.name, (inputs.encoder or encoder).values or {}))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # somebody else's forward, with somebody else's input: it raises what it likes
        raise InvalidPromptError(f"the encoder does not take this prompt: {error}") from error


def passes(
    inputs: Inputs, tokens: int, chunk: int, begin: int = 0, boundaries: Collection[int] = ()
) -> Iterator[tuple[int, int]]:
    """The stretches [begin, end) of the first ``tokens`` tokens that are fed in one pass each.

    One ends at each of the boundaries, which must not lie within an item of media.
    """
    while begin < tokens:
        ahead = [one for one in boundaries if begin < one]
        end = min(inputs.whole(begin + chunk), tokens, *ahead)
        yield begin, end
        begin = end


def check_known(model: Any, ids: TokenIds) -> None:
    """Raise InvalidPromptError for an id that the model does not know."""
    rows, values = known_ids(model), np.frombuffer(ids.int32, dtype="<i4")
    if rows is None or not len(values) or values.max() < rows:
        return
    known = frozenset().union(*compat.media_tokens(model).values())  # their embeddings come from elsewhere
    largest = max((one for one in ids.tolist() if one not in known), default=0)
    if largest >= rows:
        raise InvalidPromptError(_unknown(largest, rows))


def check_ids(model: Any, ids: torch.Tensor) -> None:
    """The same for a tensor of ids of any shape; for a negative id, too."""
    smallest, largest = (int(one) for one in torch.aminmax(ids))
    if smallest < 0:
        raise InvalidPromptError(f"token ids are at least 0, and the prompt holds {smallest}")
    rows = known_ids(model)
    plain = compat.text_config(model) is model.config or compat.media_tokens(model)
    if rows is not None and largest >= rows and plain:  # of others nobody knows what they do with their ids
        check_known(model, TokenIds.of(ids.flatten().tolist()))


def _unknown(largest: int, rows: int) -> str:
    return (
        f"the prompt holds the id {largest}, and the model knows ids below {rows}: the tokenizer is another model's, "
        "or has tokens that the model was not resized for"
    )


def known_ids(model: Any) -> int | None:
    """How many ids the model knows, or ``None`` if its input embeddings are not one table, whole in this process."""
    reader = model.get_decoder() if compat.is_encoder_decoder(model) else model
    embeddings = reader.get_input_embeddings() if hasattr(reader, "get_input_embeddings") else None
    weight = getattr(embeddings, "weight", None)
    return None if weight is None or weight.dim() != 2 else int(weight.shape[0]) or None


def feed(model: Any, cache: Any, inputs: Inputs, begin: int, end: int, *, logits: bool = False) -> torch.Tensor | None:
    """Extend a cache of ``begin`` tokens to ``end`` in one forward pass, without dropout and without gradients.

    Returns:
        With ``logits`` those of all these tokens, [1, tokens, vocabulary], if the model has any.

    Raises:
        InvalidPromptError: if a model for media refuses the prompt.
    """
    once = {"logits_to_keep": 0 if logits else 1} if compat.takes(model, "logits_to_keep") else {}
    if inputs.encoder is not None:
        return _feed_decoder(model, cache, with_encoder(model, inputs), begin, end)
    with _evaluating(model), torch.no_grad():
        if not compat.media_tokens(model):
            device = input_device(model)
            arguments = {compat.forward_cache_argument(model): cache, "use_cache": True, **once}
            arguments |= compat.owned_positions(cache, begin, end, device)
            if compat.takes(model, "position_ids"):  # as generate does; some models would count from 0 again
                arguments["position_ids"] = torch.arange(begin, end, device=device)[None]
            return _logits(model(input_ids=inputs.tensor(device, begin, end), **arguments))
        try:
            with compat.positions_kept(model):
                return _logits(model(**_with_media(model, cache, inputs, begin, end, once)))
        except (KvkeepError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # somebody else's forward, with somebody else's media: it raises what it likes
            raise InvalidPromptError(f"the model does not take this prompt: {error}") from error


def feed_slots(
    model: Any, cache: Any, ids: Any, mask: torch.Tensor | None, begin: int, end: int
) -> torch.Tensor | None:
    """Extend a cache of several lines of ``begin`` slots to ``end``, as ``generate`` would place their tokens.

    Args:
        model: a model of text.
        cache: holds ``begin`` slots.
        ids: [lines, slots].
        mask: likewise, or ``None`` where no slot is padding.

    Returns:
        Logits, [lines, slots, vocabulary], if the model has any.
    """
    arguments: dict[str, Any] = {compat.forward_cache_argument(model): cache, "use_cache": True}
    seen = torch.ones_like(ids) if mask is None else mask
    if mask is not None and compat.takes(model, "attention_mask"):  # Mamba takes one of the tokens fed alone
        arguments["attention_mask"] = seen[:, :end]
    if compat.takes(model, "position_ids"):
        arguments["position_ids"] = (seen.long().cumsum(-1) - 1).clamp(min=0)[:, begin:end]
    with _evaluating(model), torch.no_grad():
        return _logits(model(input_ids=ids[:, begin:end], **arguments))


def _feed_decoder(model: Any, cache: Any, inputs: Inputs, begin: int, end: int) -> torch.Tensor | None:
    device, encoder = input_device(model), inputs.encoder
    arguments = {
        **({} if encoder is None else {**encoder.others, compat.ENCODER_OUTPUTS: encoder.output}),
        "decoder_input_ids": inputs.tensor(device, begin, end),
        compat.forward_cache_argument(model): cache,
        "use_cache": True,
    }
    if compat.takes(model, "cache_position"):
        arguments["cache_position"] = torch.arange(begin, end, device=device)
    try:
        with _evaluating(model), torch.no_grad():
            return _logits(model(**arguments))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise InvalidPromptError(f"the model does not take this prompt: {error}") from error


def _logits(outputs: Any) -> torch.Tensor | None:
    found = getattr(outputs, "logits", None)
    return found if isinstance(found, torch.Tensor) else None


def _with_media(model: Any, cache: Any, inputs: Inputs, begin: int, end: int, others: dict[str, Any]) -> dict[str, Any]:
    inputs = inputs.on(input_device(model))
    return compat.stretch_inputs(
        model,
        cache,
        inputs.tensor(input_device(model)),
        begin,
        end,
        before=inputs.values,
        media=inputs.between(begin, end),
        types=inputs.types,
        others=others,
    )


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
