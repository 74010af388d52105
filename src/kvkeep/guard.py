"""The guard: a cached token is computed again, and its rows are compared with the stored ones before they are used.

Hashes say that an entry was computed by this model from these ids, as far as hashing sees. The guard asks the model
itself: a hit hands out one cached token fewer, the forward pass that comes anyway computes that token's keys and
values, and a row that differs by more than rounding proves that the stored KV is not this model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvkeep import compat
from kvkeep.encoded import EncoderInput, item_of
from kvkeep.inputs import Inputs, input_device
from kvkeep.keys import TokenIds
from kvkeep.layouts import cached_row
from kvkeep.prefill import CHUNK, empty_cache, feed, feed_slots, known_ids, passes, with_encoder

StoredRow = Sequence[Mapping[str, torch.Tensor]]
"""What is stored of one token: for each layer its rows by role, each [heads, 1, dim]; nothing for layers without."""

LIMITS: Mapping[torch.dtype, float] = {
    torch.float64: 5e-5,
    torch.float32: 5e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
"""The largest relative difference between two honest rows, by the number format they were computed in.

Measured on CPU between chunked prefill and continuation: float32 up to 3e-6 on real models and 2e-5 on models of wide
random weights, float16 3e-3, bfloat16 2e-2. A changed model or another prompt's rows are far above: 5e-3 and more."""

_PROBE = 8
"""Tokens of the longer prompt that shows whether a model reads forward alone."""

_PADDING = 3
"""Slots of padding before the probe that shows how a model places tokens."""

_HEARD = 6
"""Positions of an encoder that the probe's decoder is given."""

_PLAINLY_OTHER = 1e-3
"""A difference of logits that no rounding explains; what is not continued as it should differs by 0.1 and more."""

_OTHERWISE = (
    "computes a prompt otherwise when it is fed in two parts: its tokens see those behind them or are placed by what "
    "they are, or its state is not all in the cache"
)

_MATMUL_FORMATS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}


def compare(
    model: Any, cache: Any, position: int, seen: int, stored: StoredRow, lines: Sequence[int] | None = None
) -> str | None:
    """Why a cache that has seen ``seen`` tokens holds other rows of one token than the stored ones; ``None`` if not.

    Layers whose window has moved on behind the token are left out. With ``lines``, the stored rows are those of these
    lines of the cache.
    """
    pairs = []
    for computed, rows in zip(cached_row(cache, position, seen), stored, strict=True):
        if computed is not None:
            for role, row in rows.items():
                new = computed[role] if lines is None else computed[role][list(lines)]
                pairs.append((new, row.transpose(0, 1)))
    if not pairs:
        return "no layer holds the row of the token that was to be computed again"
    return objection_to(model, pairs)


def objection_to(model: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    """Why rows (computed, stored), each pair as :func:`row_errors` takes it, are not the same; ``None`` if so."""
    if not pairs:
        return None
    errors, limit = row_errors(pairs), limit_for(model, pairs[0][1].dtype)
    # Where rounding is coarse it turns a token to another expert now and then, and all behind that layer differs.
    typical = limit > LIMITS[torch.float32] and compat.has_experts(model)
    error = float(errors.median() if typical else errors.max())
    if error <= limit:  # not the other way round: a NaN is no agreement
        return None
    return f"a row computed again differs from the stored one by {error:.1e} of its size (limit {limit:.0e})"


def row_errors(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """How far the rows of the pairs (new, old) are apart, each relative to its old row, as 2-norms; a NaN stays one.

    Args:
        pairs: new rows and old rows, each [rows, heads, dim]; one old row may stand against many new ones.
    """
    by_shape: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for new, old in pairs:
        by_shape.setdefault((new.shape, old.shape, new.device), []).append((new, old))
    errors = []
    for (_, _, device), group in by_shape.items():
        new = torch.stack([pair[0] for pair in group]).flatten(2).float()
        old = torch.stack([pair[1] for pair in group]).flatten(2).float().to(device)
        scale = torch.linalg.vector_norm(old, dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        errors.append((torch.linalg.vector_norm(new - old, dim=-1) / scale).flatten().cpu())
    return torch.cat(errors)


def limit_for(model: Any, dtype: torch.dtype) -> float:
    """The limit for rows of this dtype, as precisely as the model computes them now."""
    formats: list[torch.dtype] = [dtype]
    device = model.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        formats.append(torch.get_autocast_dtype(device))
    weights = getattr(model, "dtype", dtype)
    if weights in LIMITS:
        formats.append(weights)
    if torch.float32 in formats:
        formats.append(_MATMUL_FORMATS[torch.get_float32_matmul_precision()])
    return max(LIMITS.get(one, max(LIMITS.values())) for one in formats)


class _EnoughError(BaseException):  # not an Exception: nobody in between may take it for a failure
    """Ends a forward pass whose later layers are not wanted."""


def rows_of_layer(
    model: Any, inputs: Inputs, tokens: int, number: int, *, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of so many tokens at one layer, [1, heads, tokens, dim], without the layers behind it."""
    cache = compat.complete_cache(compat.text_config(model))
    update = cache.update
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())  # must be put back behind each layer

    def stop_behind(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        result = update(keys, values, layer, *args, **kwargs)
        if layer == number and not offloaded:
            raise _EnoughError
        return result

    cache.update = stop_behind  # type: ignore[method-assign, assignment]
    with _forwards_restored(model):
        for begin, end in passes(inputs, tokens, chunk):
            with suppress(_EnoughError), torch.compiler.set_stance("force_eager"):  # no graph ends in the middle
                feed(model, cache, inputs, begin, end)
    layer: Any = cache.layers[number]
    return layer.keys, layer.values


@contextmanager
def _forwards_restored(model: Any) -> Iterator[None]:
    """Take off what a pass that ends early leaves on modules: 4.57 wraps ``forward`` to record hidden states."""
    before = [(module, vars(module).get("forward")) for module in model.modules()]
    try:
        yield
    finally:
        for module, forward in before:
            if vars(module).get("forward") is not forward:
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward


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
        return Manner(_OTHERWISE)
    if hasattr(compat.text_config(model), "keep_window_size"):  # Doge: what a token sees is chosen among all tokens
        return Manner(_OTHERWISE)
    media = frozenset().union(*compat.media_tokens(model).values(), unplaced)
    known = [one for one in range(min(_PROBE * 4, known_ids(model) or 1)) if one not in media]
    try:
        probe = _probe(model, (known * _PROBE)[-_PROBE:])
        other = _probe(model, (known * _PROBE)[: _PROBE // 2])
        cache = empty_cache(model, probe)
        whole = feed(model, cache, probe, 0, _PROBE, logits=True)
        layers = len(compat.dynamic_cache(compat.text_config(model)).layers)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - somebody else's forward: it raises what it likes
        return Manner(f"takes no cache of the kind that its configuration asks for ({error})")
    objection = _oddity(cache, layers, heard=probe.encoder is not None)
    if objection is not None:
        return Manner(objection)
    if whole is None or whole.shape[1] != _PROBE:
        return Manner("gives no logits of all tokens, by which to ask it whether it goes on from a cache as it should")
    # A decoder is asked first whether it goes on without its encoder; it is fed several tokens at once in any case.
    ways = [(_PROBE // 2, False), (1, False)] if probe.encoder is None else [(_PROBE // 2, True), (_PROBE // 2, False)]
    for step, unheard in ways:
        if _agrees(model, whole, probe, other, step, unheard=unheard):
            return Manner(singly=step == 1, skips=unheard)
    return Manner(_OTHERWISE)


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
    half = len(probe) // 2
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


def prove(model: Any, cache: Any, inputs: Inputs, stored: StoredRow) -> str | None:
    """Feed the token that follows what the cache holds, and compare its rows with the stored ones.

    The cache holds one token more afterwards.

    Args:
        model: the live model.
        cache: a filled cache.
        inputs: the prompt; its token at the cache's length is fed.
        stored: the stored rows of that token.

    Returns:
        Why they are not the model's, or ``None`` if they are.
    """
    held = compat.cached_tokens(cache)
    feed(model, cache, inputs, held, held + 1)
    return compare(model, cache, held, held + 1, stored)
