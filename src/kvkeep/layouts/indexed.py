"""Codecs of layers that keep, beside keys and values, an index of keys by which tokens are chosen (sparse attention).

The index is one more row a token. It is another tensor in each model: [batch, tokens, dim], as the layers of DeepSeek's
sparse attention have it, or [batch, heads, tokens, dim].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kvkeep.entry_format import LayerRecord
from kvkeep.layouts.attention import DynamicCodec
from kvkeep.layouts.base import Empty, LayerPlan, LayerState

_POSITIONS = "indexer_position_ids"  # [axes, batch, tokens], in the few models that have them


class IndexedCodec(DynamicCodec):
    """A dynamic layer with further tensors that grow by one row a token.

    Args:
        kind: the layer kind.
        roles: for each role the attribute that holds it.
        flag: the attribute that says whether the index is there, if the class has one.
    """

    def __init__(self, kind: str, roles: Mapping[str, str], flag: str | None = None) -> None:
        self._kind, self._roles, self._flag = kind, roles, flag

    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan(self._kind)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        state = super().describe(layer, LayerPlan("full"), length)
        tensors = dict(state.tensors)
        axes = {}
        for role, attribute in self._roles.items():
            index = getattr(layer, attribute)
            if index is None or not index.numel():
                continue
            tensors[role] = _rows(role, index, length)
            axes[f"axes.{role}"] = index.dim()
        if (positions := getattr(layer, _POSITIONS, None)) is not None:
            if positions.shape[1:] != (1, length):
                raise ValueError(f"its {_POSITIONS} have the shape {list(positions.shape)} for {length} tokens")
            tensors[_POSITIONS] = positions[:, 0, :, None].detach()
        record = replace(state.record, kind=self._kind, tensors=dict.fromkeys(tensors, "rows"), scalars=axes)
        return LayerState(record, tensors)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        if record.kind != self._kind or record.roles("rows") != _roles(record):
            raise ValueError(f"the entry has a layer of kind {record.kind!r} there")
        whole = replace(record, kind="full", tensors={"keys": "rows", "values": "rows"})
        return super().wanted(layer, whole, tokens)

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        return {role: empty(like) for role, like in likes.items()}

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        super().finish(layer, filled, record, tokens)
        for role, axes in _axes(record).items():
            rows = filled[role] if axes == 3 else filled[role][None]
            setattr(layer, self._roles[role], rows)
            if self._flag is not None:
                setattr(layer, self._flag, True)
                layer.indexer_dtype, layer.indexer_device = rows.dtype, rows.device
        if _POSITIONS in filled:
            setattr(layer, _POSITIONS, filled[_POSITIONS][:, :, 0][:, None])

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        found = super().row(layer, position, seen)
        if found is None:
            return None
        indexes = {role: getattr(layer, attribute) for role, attribute in self._roles.items()}
        if (positions := getattr(layer, _POSITIONS, None)) is not None:
            found = {**found, _POSITIONS: positions[None, :, 0, position, None]}
        there = {role: index for role, index in indexes.items() if index is not None and index.numel()}
        return {
            **found,
            **{role: x[:, position][:, None] if x.dim() == 3 else x[:, :, position] for role, x in there.items()},
        }


def _rows(role: str, index: torch.Tensor, length: int) -> torch.Tensor:
    if index.dim() not in (3, 4) or index.shape[0] != 1 or index.shape[-2] != length:
        raise ValueError(f"its {role} have the shape {list(index.shape)} for {length} tokens of one sequence")
    return (index if index.dim() == 3 else index[0]).detach()


def _roles(record: LayerRecord) -> list[str]:
    return sorted({"keys", "values", *_axes(record), *({_POSITIONS} & record.tensors.keys())})


def _axes(record: LayerRecord) -> dict[str, int]:
    """For each role of the index how many dimensions its tensor has."""
    return {
        name.removeprefix("axes."): value
        for name, value in record.scalars.items()
        if name.startswith("axes.") and isinstance(value, int)
    }


INDEXED = IndexedCodec("indexed", {"indexer_keys": "indexer_keys"}, flag="is_indexer_initialized")
"""``DynamicIndexedLayer``."""

SPARSE_M3 = IndexedCodec("sparse_m3", {"idx_keys": "idx_keys"})
"""The layer class of MiniMax M3."""
