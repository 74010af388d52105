"""Codecs of layers that keep, beside keys and values, an index of keys by which tokens are chosen (sparse attention).

The index is one more row a token. It is another tensor in each model: [batch, tokens, dim], as the layers of DeepSeek's
sparse attention have it, or [batch, heads, tokens, dim].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvkeep.entry_format import LayerRecord
from kvkeep.layouts.attention import DynamicCodec, StaticCodec
from kvkeep.layouts.base import Empty, LayerCodec, LayerPlan, LayerState

_POSITIONS = "indexer_position_ids"  # [axes, batch, tokens], in the few models that have them; these always grow
_PLAIN = {"keys": "rows", "values": "rows"}


@dataclass(frozen=True, slots=True)
class Index:
    """Where a layer class has its index: the attribute, which is also the role, and the method that appends to it.

    Attributes:
        attribute: the tensor's name.
        update: the method; with no tokens it allocates a static layer's buffer.
        counter: how many tokens a static layer's buffer holds; ``None`` for one that grows.
        flag: says whether the index is there, if the class has such an attribute.
    """

    attribute: str
    update: str
    counter: str | None = None
    flag: str | None = None


class IndexedCodec:
    """The keys and values of another class, and an index that grows by one row a token.

    Args:
        kind: the layer kind.
        attention: the codec of the keys and values.
        index: where the index is.
    """

    def __init__(self, kind: str, attention: LayerCodec, index: Index) -> None:
        self._kind, self._attention, self._index = kind, attention, index

    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan(self._kind)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        state = self._attention.describe(layer, LayerPlan("full"), length)
        role, tensors, axes = self._index.attribute, dict(state.tensors), {}
        if (index := self._held(layer, length)) is not None:
            tensors[role] = _rows(role, index, length)
            axes[f"axes.{role}"] = index.dim()
        if (positions := getattr(layer, _POSITIONS, None)) is not None:
            if positions.shape[1:] != (1, length):
                raise ValueError(f"its {_POSITIONS} have the shape {list(positions.shape)} for {length} tokens")
            tensors[_POSITIONS] = positions[:, 0, :, None].detach()
        record = replace(state.record, kind=self._kind, tensors=dict.fromkeys(tensors, "rows"), scalars=axes)
        return LayerState(record, tensors)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        roles = {"keys", "values", *({self._index.attribute} if self._axes(record) else ())}
        if record.kind != self._kind or {*record.roles("rows")} - {_POSITIONS} != roles:
            raise ValueError(f"the entry has a layer of kind {record.kind!r} there")
        return self._attention.wanted(layer, _attention_part(record), tokens)

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        attention = {role: like for role, like in likes.items() if role in _PLAIN}
        targets = {
            **{role: empty(like) for role, like in likes.items() if role == _POSITIONS},
            **self._attention.allocate(layer, attention, tokens, device, empty),
        }
        if (like := likes.get(self._index.attribute)) is not None:
            grows = self._index.counter is None
            targets[self._index.attribute] = empty(like) if grows else self._buffer(layer, like, device)[:, :tokens]
        return targets

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        attention = {role: rows for role, rows in filled.items() if role in _PLAIN}
        self._attention.finish(layer, attention, _attention_part(record), tokens)
        where, axes = self._index, self._axes(record)
        if axes and where.counter is not None:
            getattr(layer, where.counter).fill_(tokens)
        elif axes:
            rows = filled[where.attribute]
            setattr(layer, where.attribute, rows if axes == 3 else rows[None])
            if where.flag is not None:
                setattr(layer, where.flag, True)
                layer.indexer_dtype, layer.indexer_device = rows.dtype, rows.device
        if _POSITIONS in filled:
            setattr(layer, _POSITIONS, filled[_POSITIONS][:, :, 0][:, None])

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        found = self._attention.row(layer, position, seen)
        if found is None:
            return None
        if (positions := getattr(layer, _POSITIONS, None)) is not None:
            found = {**found, _POSITIONS: positions[None, :, 0, position, None]}
        index = getattr(layer, self._index.attribute)
        if index is None or not index.numel():
            return found
        row = index[:, position][:, None] if index.dim() == 3 else index[:, :, position]
        return {**found, self._index.attribute: row}

    def _held(self, layer: Any, length: int) -> torch.Tensor | None:
        """The index of exactly so many tokens, ``None`` if the layer has none."""
        index: torch.Tensor | None = getattr(layer, self._index.attribute)
        if index is None or not index.numel():
            return None
        if self._index.counter is None:
            return index
        if (seen := int(getattr(layer, self._index.counter))) != length:
            raise ValueError(f"its {self._index.attribute} have seen {seen} tokens, not {length}")
        return index[..., :length, :]

    def _buffer(self, layer: Any, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A static layer's own buffer as [heads, room, dim], allocated where that has not happened."""
        name, (heads, _, dim) = self._index.attribute, like.shape
        if getattr(layer, name) is None:
            axes = 4 if self._index.flag is None else 3
            none = like.new_empty((1, heads, 0, dim) if axes == 4 else (1, 0, dim), device=device)
            getattr(layer, self._index.update)(none)
        buffer: torch.Tensor = getattr(layer, name)
        room = buffer if buffer.dim() == 3 else buffer[0]
        if (room.shape[0], room.shape[2], room.dtype, buffer.shape[0]) != (heads, dim, like.dtype, 1):
            raise ValueError(f"its {name} are {list(buffer.shape)} {buffer.dtype}, not one sequence of the entry's")
        return room

    def _axes(self, record: LayerRecord) -> int | None:
        """How many dimensions the index has in memory, ``None`` if the entry has none."""
        axes = record.scalars.get(f"axes.{self._index.attribute}")
        return axes if isinstance(axes, int) else None


def _rows(role: str, index: torch.Tensor, length: int) -> torch.Tensor:
    if index.dim() not in (3, 4) or index.shape[0] != 1 or index.shape[-2] != length:
        raise ValueError(f"its {role} have the shape {list(index.shape)} for {length} tokens of one sequence")
    return (index if index.dim() == 3 else index[0]).detach()


def _attention_part(record: LayerRecord) -> LayerRecord:
    return replace(record, kind="full", tensors=_PLAIN)


INDEXED = IndexedCodec(
    "indexed", DynamicCodec(), Index("indexer_keys", "update_indexer", flag="is_indexer_initialized")
)
"""``DynamicIndexedLayer``."""

STATIC_INDEXED = IndexedCodec(
    "indexed",
    StaticCodec(),
    Index("indexer_keys", "update_indexer", "indexer_cumulative_length", flag="is_indexer_initialized"),
)
"""``StaticIndexedLayer``."""

SPARSE_M3 = IndexedCodec("sparse_m3", DynamicCodec(), Index("idx_keys", "update_index"))
"""The layer class of MiniMax M3."""

STATIC_SPARSE_M3 = IndexedCodec("sparse_m3", StaticCodec(), Index("idx_keys", "update_index", "idx_cumulative_length"))
"""The same, of fixed size."""
