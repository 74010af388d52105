"""What a live model does with a cache: it is asked once, with a few tokens, before anything of it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvkeep import compat
from kvkeep.encoded import EncoderInput, item_of
from kvkeep.errors import UnsupportedCacheError
from kvkeep.guard import limit_for, row_errors
from kvkeep.inputs import Inputs, input_device
from kvkeep.keys import TokenIds
from kvkeep.layouts import plan_layers
from kvkeep.prefill import empty_cache, feed, feed_slots, known_ids, with_encoder

_PROBE = 8
"""Tokens of the longer prompt that shows whether a model reads forward alone."""

_PADDING = 3
"""Slots of padding before the probe that shows how a model places tokens."""

_FARTHEST = 256
"""The largest window whose end is probed."""

_HEARD = 6
"""Positions of an encoder that the probe's decoder is given."""

_PLAINLY_OTHER = 1e-3
"""A difference of logits that no rounding explains; what is not continued as it should differs by 0.1 and more."""

_OTHERWISE = (
    "computes a prompt otherwise when it is fed in two parts: its tokens see those behind them or are placed by what "
    "they are, or its state is not all in the cache"
)

_PLACES_OTHERWISE = (
    "counts the places of tokens from its padding id in a plain forward pass, and generate counts them from 0: a cache "
    "of the one would be wrong in the other"
)


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model goes on from a cache.

    Attributes:
        objection: why no cache of it can be kept, or ``None``.
        singly: whether it must be fed one token at a time: several at once would not see what the cache holds.
        skips: whether its decoder needs nothing of the encoder but what the cache holds.
    """

    objection: str | None = None
    singly: bool = False
    skips: bool = False


def manner_of(model: Any) -> Manner:
    """Ask a model whether it goes on from a cache as from the prompt that the cache was computed from.

    Some models let the tokens of a prompt see each other both ways, some count positions by what is padding, some keep
    state on their modules, and some do not look at their state when they are fed several tokens. So a short prompt is
    fed in one pass, and again in parts, with another prompt between them.
    """
    unplaced = compat.unplaced_ids(model)
    if unplaced is None or (unplaced and not compat.is_encoder_decoder(model)):
        return Manner(_PLACES_OTHERWISE)
    if hasattr(compat.text_config(model), "keep_window_size"):  # Doge: what a token sees is chosen among all tokens
        return Manner(_OTHERWISE)
    media = frozenset().union(*compat.media_tokens(model).values(), unplaced)
    known = [one for one in range(min(_PROBE * 4, known_ids(model) or 1)) if one not in media]
    length = _PROBE + _behind(model)
    try:
        probe = _probe(model, (known * length)[-length:])
        other = _probe(model, (known * _PROBE)[: _PROBE // 2])
        cache = empty_cache(model, probe)
        whole = feed(model, cache, probe, 0, length, logits=True)
        layers = len(compat.planned_layers(compat.text_config(model)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - somebody else's forward: it raises what it likes
        return Manner(f"takes no cache of the kind that its configuration asks for ({error})")
    objection = _oddity(cache, layers, heard=probe.encoder is not None)
    if objection is not None:
        return Manner(objection)
    if whole is None or whole.shape[1] != length:
        return Manner("gives no logits of all tokens, by which to ask it whether it goes on from a cache as it should")
    # A decoder is asked first whether it goes on without its encoder; it is fed several tokens at once in any case.
    ways = [(_PROBE // 2, False), (1, False)] if probe.encoder is None else [(_PROBE // 2, True), (_PROBE // 2, False)]
    if compat.is_owned(cache):  # such a model prepares the inputs of one token behind its own cache, not of several
        ways = [(1, False)]
    for step, unheard in ways:
        if _agrees(model, whole, probe, other, step, unheard=unheard):
            return Manner(singly=step == 1, skips=unheard)
    return Manner(_OTHERWISE)


def _behind(model: Any) -> int:
    """How many tokens the cache holds of the probe before its last ones.

    Where there is state, as many as are computed together or fill a window, within reason: beyond that some models go
    on otherwise, and nothing shows it when a prefix is stored, as no state can be cut back to the token before.
    """
    config = compat.text_config(model)
    try:
        plans = [plan for plan in plan_layers(config) if plan.snapshot]
    except UnsupportedCacheError:
        return 0
    windows = max((plan.window for plan in plans), default=0)
    return max(compat.stretch_computed_at_once(config), min(windows, _FARTHEST)) if plans else 0


def _probe(model: Any, ids: Sequence[int]) -> Inputs:
    inputs = Inputs(TokenIds.of(ids))
    return replace(inputs, encoder=_heard(model, ids)) if compat.is_encoder_decoder(model) else inputs


def _oddity(cache: Any, layers: int, *, heard: bool) -> str | None:
    """What is odd about a cache that the model was given to fill."""
    if not compat.is_used(cache):
        return "keeps its state in no cache that it is given"
    kept = len(compat.decoder_part(cache).layers)
    if kept != layers:
        return f"keeps {kept} layers in a cache, and its configuration names {layers}"
    if heard and compat.cached_tokens(compat.cross_part(cache)) != _HEARD:
        return "does not keep what its decoder sees of the encoder in the cache that it is given"
    return None


def _agrees(model: Any, whole: torch.Tensor, probe: Inputs, other: Inputs, step: int, *, unheard: bool) -> bool:
    """Whether the logits of a prompt that is fed in parts are those of the whole."""
    try:
        parts = _in_parts(model, probe, other, step, unheard=unheard)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - it may still take single tokens
        return False
    limit = max(limit_for(model, whole.dtype), _PLAINLY_OTHER)
    typical = limit > _PLAINLY_OTHER and compat.has_experts(model)  # which coarse rounding may turn elsewhere
    errors = [row_errors([(part[0][:, None], whole[0, first : first + part.shape[1], None])]) for first, part in parts]
    return bool(errors) and all(float(one.median() if typical else one.max()) <= limit for one in errors)


def _heard(model: Any, known: Sequence[int]) -> EncoderInput | None:
    """An encoder's part of a prompt, with its output: of an encoder of sounds or pictures, an output alone."""
    item, name = item_of(b""), compat.encoder_input_name(model, {})
    ids = torch.tensor([(list(known) * _HEARD)[:_HEARD]], device=model.device)
    if name == "input_ids":
        return with_encoder(model, Inputs(TokenIds.of(known), encoder=EncoderInput(item, name, {name: ids}))).encoder
    noise = torch.randn((1, _HEARD, compat.encoder_width(model)), generator=torch.Generator().manual_seed(len(known)))
    return EncoderInput(item, output=compat.encoded_as(noise.to(model.device, model.dtype)))


def _in_parts(
    model: Any, probe: Inputs, other: Inputs, step: int, *, unheard: bool = False
) -> list[tuple[int, torch.Tensor]]:
    """The logits of half a prompt, and of its other half by steps of so many tokens; each with its first token.

    With ``unheard``, the decoder is not given what the encoder made of its part with the other half.
    """
    half = len(probe) - _PROBE // 2
    cache, between = (empty_cache(model, probe) for _ in range(2))
    parts = [(0, feed(model, cache, probe, 0, half, logits=True))]
    feed(model, between, other, 0, len(other))
    if unheard:
        probe = probe.encoded(compat.nothing_encoded(model, _HEARD))
    parts += [
        (first, feed(model, cache, probe, first, first + step, logits=True)) for first in range(half, len(probe), step)
    ]
    return [(first, part) for first, part in parts if part is not None]


def places_by_mask(model: Any) -> bool:
    """Ask a model whether it computes a prompt behind padding as the prompt alone.

    Some place tokens by their slot, padding counted: what they compute of a padded line serves no other.
    """
    known = range(max(1, min(_PROBE, known_ids(model) or 1)))
    ids = torch.tensor([[0] * _PADDING + list(known)], device=input_device(model))
    mask = (torch.arange(ids.shape[1], device=ids.device) >= _PADDING).long()[None]
    try:
        padded = feed_slots(model, compat.complete_cache(compat.text_config(model)), ids, mask, 0, ids.shape[1])
        inputs = Inputs(TokenIds.of(known))
        alone = feed(model, empty_cache(model, inputs), inputs, 0, len(known), logits=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - somebody else's forward: it raises what it likes
        return False
    if padded is None or alone is None:
        return False
    limit = max(limit_for(model, alone.dtype), _PLAINLY_OTHER)
    errors = row_errors([(padded[0, -1:, None], alone[0, -1:, None])])
    return float(errors.max()) <= limit
