"""The codec of layers that keep a window of rows, and of all tokens compressed ones with what is not yet compressed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import LayerRecord
from kvkeep.layouts.attention import DynamicCodec
from kvkeep.layouts.base import LayerPlan, LayerState
from kvkeep.layouts.states import snapshot

_STATES = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")


class CompressedCodec(DynamicCodec):
    """The two layer classes of DeepSeek-V4, whose values are their keys.

    Args:
        kind: the layer kind.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan(self._kind, int(layer.sliding_window), snapshot=True)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        state = super().describe(layer, LayerPlan("sliding", int(layer.sliding_window)), length)
        tensors = {"keys": state.tensors["keys"]}
        how = {"keys": "rows", "values": "=keys"}
        if layer.values is not layer.keys:
            raise ValueError("its values are not its keys")
        for role, held in _held(layer):
            tensors[role] = snapshot(role, held)
            how[role] = "snapshot"
        counts = {f"count.{name}": int(count) for name, count in layer.entry_count.items()}
        record = replace(
            state.record,
            kind=self._kind,
            tensors=how,
            scalars={**state.record.scalars, "rate": int(layer.compress_rate), **counts},
        )
        return LayerState(record, tensors)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        counts = {f"count.{name}" for name in layer.entry_count}
        if record.kind != self._kind or not counts <= record.scalars.keys():
            raise ValueError(f"the entry has a layer of kind {record.kind!r} there")
        if record.scalars.get("rate") != layer.compress_rate:
            raise ValueError(f"the entry compresses {record.scalars.get('rate')} tokens to one")
        plain = replace(record, kind="sliding", tensors={"keys": "rows", "values": "rows"})
        return super().wanted(layer, plain, tokens)

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        keys = filled["keys"][None]
        compat.fill_dynamic(layer, keys, keys, tokens)
        for role, state in filled.items():
            if role != "keys":
                attribute, _, name = role.partition(".")
                getattr(layer, attribute)[name] = state[None]
        for name in layer.entry_count:
            layer.entry_count[name] = int(record.scalars[f"count.{name}"] or 0)

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return None


def _held(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute in _STATES:
        for name, state in getattr(layer, attribute, {}).items():
            if state is not None:
                yield f"{attribute}.{name}", state
