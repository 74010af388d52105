"""The guard: a cached token is computed again, and its rows are compared with the stored ones before they are used.

Hashes say that an entry was computed by this model from these ids, as far as hashing sees. The guard asks the model
itself: a hit hands out one cached token fewer, the forward pass that comes anyway computes that token's keys and
values, and a row that differs by more than rounding proves that the stored KV is not this model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from kvkeep import compat
from kvkeep.inputs import Inputs
from kvkeep.layouts import cached_row
from kvkeep.prefill import CHUNK, feed, passes

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


def objection_to(
    model: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, at_least: float = 0.0
) -> str | None:
    """Why rows (computed, stored), each pair as :func:`row_errors` takes it, are not the same; ``None`` if so.

    They may differ by ``at_least``, where the number format does not allow for more.
    """
    if not pairs:
        return None
    errors, limit = row_errors(pairs), limit_for(model, pairs[0][1].dtype)
    # Where rounding is coarse it turns a token to another expert now and then, and all behind that layer differs.
    typical = limit > LIMITS[torch.float32] and compat.has_experts(model)
    error, limit = float(errors.median() if typical else errors.max()), max(limit, at_least)
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
