"""Codecs of attention layers: full and sliding, grown by concatenation or kept in fixed buffers.

Both kinds store rows. A full layer stores one row a token. A sliding layer with window w needs the last w - 1 rows to
continue; it may store more, and then it can also be trimmed by as many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import LayerRecord
from kvkeep.layouts.base import Empty, LayerPlan, LayerState


def attention_state(
    keys: torch.Tensor, values: torch.Tensor, plan: LayerPlan, first: int, length: int, slack: int | None = None
) -> LayerState:
    """The state of an attention layer whose ``keys`` and ``values`` ([1, heads, rows, dim]) start at ``first``.

    Raises ``ValueError`` where the tensors are not the rows [first, length) of one sequence, or lack rows that the
    plan needs. With ``slack``, a sliding layer keeps only that many rows more than it needs.
    """
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dim() != 4 or tensor.shape[0] != 1:
            raise ValueError(f"its {name} have the shape {list(tensor.shape)}; one sequence is [1, heads, rows, dim]")
        if first < 0:
            raise ValueError(f"its {name} hold {tensor.shape[2]} rows, more than the {length} tokens there are")
        if tensor.shape[2] != length - first:
            raise ValueError(f"its {name} hold {tensor.shape[2]} rows where tokens [{first}, {length}) need as many")
    needed = sliding_start(plan, length)
    if first > needed:
        raise ValueError(f"it holds rows from token {first} on, and needs them from {needed}")
    if plan.kind == "sliding" and slack is not None:
        cut = max(0, needed - slack - first)
        keys, values, first = keys[:, :, cut:], values[:, :, cut:], first + cut
    record = LayerRecord(
        kind=plan.kind,
        first=first,
        rows=length - first,
        tensors={"keys": "rows", "values": "rows"},
        scalars={"window": plan.window} if plan.kind == "sliding" else {},
    )
    return LayerState(record, {"keys": keys[0].detach(), "values": values[0].detach()})


def plan_of_window(layer: Any) -> LayerPlan:
    """The plan of a layer of full or sliding attention, which has the window at ``sliding_window``."""
    window = int(getattr(layer, "sliding_window", 0) or 0)
    if window == 1:
        raise ValueError("a window of 1, of which transformers keeps all rows")
    return LayerPlan("sliding", window) if window else LayerPlan("full")


def check_filled(layer: Any, length: int) -> None:
    """Refuse a layer that has not seen exactly ``length`` tokens, with a ``ValueError``."""
    if not layer.is_initialized or layer.keys is None:
        raise ValueError("it was never filled")
    if (seen := compat.seen_tokens(layer)) != length:
        raise ValueError(f"it has seen {seen} tokens, not {length}")


def sliding_start(plan: LayerPlan, length: int) -> int:
    """The first position whose row a layer needs to continue after ``length`` tokens."""
    return max(0, length - (plan.window - 1)) if plan.kind == "sliding" else 0


def check_rows(record: LayerRecord, first: int, last: int) -> tuple[int, int]:
    """The positions [first, last), if the record has keys and values of them; a ``ValueError`` if not."""
    if record.kind not in ("full", "sliding") or dict(record.tensors) != {"keys": "rows", "values": "rows"}:
        raise ValueError(f"the entry has a layer of kind {record.kind!r} there")
    if first < record.first or last > record.first + record.rows:
        raise ValueError(
            f"it needs rows [{first}, {last}), the entry has [{record.first}, {record.first + record.rows})"
        )
    return first, last


class DynamicCodec:
    """``DynamicLayer`` and ``DynamicSlidingWindowLayer``: tensors that every update replaces."""

    def plan(self, layer: Any) -> LayerPlan:
        return plan_of_window(layer)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        check_filled(layer, length)
        return attention_state(layer.keys, layer.values, plan, length - layer.keys.shape[-2], length)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        window = getattr(layer, "sliding_window", 0)
        if window and record.scalars.get("window") != window:
            raise ValueError(f"the entry's window is {record.scalars.get('window')}, the layer's {window}")
        return check_rows(record, max(0, tokens - (window - 1)) if window else 0, tokens)

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        return {role: empty(like) for role, like in likes.items()}

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        compat.fill_dynamic(layer, filled["keys"][None], filled["values"][None], tokens)

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return _row(layer, position, seen, layer.keys.shape[-2])


class StaticCodec:
    """``StaticLayer``: a buffer for every token there will be, written in place."""

    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan("full")

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        check_filled(layer, length)
        return attention_state(layer.keys[:, :, :length], layer.values[:, :, :length], plan, 0, length)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        if tokens > layer.max_cache_len:
            raise ValueError(f"its buffers have room for {layer.max_cache_len} tokens")
        return check_rows(record, 0, tokens)

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        return {role: buffer[0, :, :tokens] for role, buffer in _buffers(layer, likes, device).items()}

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        compat.set_static_length(layer, tokens)

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return _row(layer, position, seen, min(seen, layer.max_cache_len))


class StaticSlidingCodec:
    """``StaticSlidingWindowLayer``: a buffer of one window, of which the oldest slot is never read again."""

    def plan(self, layer: Any) -> LayerPlan:
        return plan_of_window(layer)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        check_filled(layer, length)
        held = min(length, layer.max_cache_len)
        return attention_state(layer.keys[:, :, :held], layer.values[:, :, :held], plan, length - held, length)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        window = record.scalars.get("window")
        size = layer.max_cache_len
        if not isinstance(window, int) or size > window:
            raise ValueError(f"the entry's window is {window}, the layer's at least {size}")
        if size < window and tokens > size:
            raise ValueError(f"its buffers have room for {size} tokens")
        oldest = max(0, tokens - size)  # once the window is full, nothing reads the oldest slot: it may stay empty
        return check_rows(record, max(oldest, min(record.first, oldest + (tokens >= window))), tokens)

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        held = min(tokens, layer.max_cache_len)
        return {
            role: buffer[0, :, held - likes[role].shape[1] : held]
            for role, buffer in _buffers(layer, likes, device).items()
        }

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        compat.set_static_length(layer, tokens)

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return _row(layer, position, seen, min(seen, layer.max_cache_len))


def _row(layer: Any, position: int, seen: int, held: int) -> Mapping[str, torch.Tensor] | None:
    """The rows of one token in a layer whose first ``held`` rows are those of the last tokens."""
    index = position - (seen - held)
    if not 0 <= index < held:
        return None
    return {"keys": layer.keys[:, :, index], "values": layer.values[:, :, index]}


def _buffers(layer: Any, rows: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The static layer's own buffers, allocated where that has not happened, and checked to fit one sequence."""
    if not layer.is_initialized:
        like = {role: t.new_empty((1, t.shape[0], 0, t.shape[2]), device=device) for role, t in rows.items()}
        compat.lazy_initialization(layer, like["keys"], like["values"])
    buffers = {"keys": layer.keys, "values": layer.values}
    for role, buffer in buffers.items():
        heads, _, dim = rows[role].shape
        if buffer.shape[:2] != (1, heads) or buffer.shape[3] != dim or buffer.dtype != rows[role].dtype:
            raise ValueError(f"its {role} are {list(buffer.shape)} {buffer.dtype}, not one sequence of the entry's")
    return buffers
