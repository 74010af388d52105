"""Codecs of layers that hold state which is valid behind their last token only: linear attention, alone and beside KV.

Such state is kept as snapshots, one tensor each, without the batch dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvkeep.entry_format import LayerRecord
from kvkeep.layouts.base import Empty, LayerCodec, LayerPlan, LayerState

_KINDS = ("conv", "recurrent")


def snapshot(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """One sequence's state, without the batch dimension, which comes first."""
    if not tensor.dim() or tensor.shape[0] != 1:
        raise ValueError(f"its {name} has the shape {list(tensor.shape)}; one sequence begins with 1")
    return tensor[0].detach()


def has_states(layer: Any) -> bool:
    """Whether a layer has states of linear attention."""
    return hasattr(layer, "number_of_states")


def lay_states(layer: Any, own: Sequence[Any], copies: int) -> None:
    """Fill the states of a batch's empty layer with those of each line's own layer, each ``copies`` times."""
    first = own[0]
    for role in _states(first):
        kind, number = _which(role)
        states = torch.cat([getattr(one, f"{kind}_states")[number].repeat_interleave(copies, dim=0) for one in own])
        if not getattr(layer, f"is_{kind}_states_initialized")[number]:
            layer.lazy_initialization(**{f"{kind}_states": states}, state_idx=number)
        getattr(layer, f"{kind}_states")[number].copy_(states)
    for number in range(first.number_of_states):
        layer.has_previous_state[number] = first.has_previous_state[number]


class LinearCodec:
    """``LinearAttentionLayer``: convolution and recurrent states, several of each, written in place."""

    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan("linear", snapshot=True)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        if layer.record_past:
            raise ValueError("it records the past, to be cropped: crop(0) ends that")
        tensors = {role: snapshot(role, state) for role, state in _states(layer).items()}
        if not tensors:
            raise ValueError("it was never filled")
        scalars = {"states": layer.number_of_states}
        scalars |= {f"seen.{number}": bool(seen) for number, seen in layer.has_previous_state.items()}
        return LayerState(
            LayerRecord(kind="linear", tensors=dict.fromkeys(tensors, "snapshot"), scalars=scalars), tensors
        )

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        if record.kind != "linear" or record.scalars.get("states") != layer.number_of_states:
            raise ValueError(f"the entry has a layer of kind {record.kind!r} there")
        return 0, 0

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        for role, like in likes.items():
            kind, number = _which(role)
            if not getattr(layer, f"is_{kind}_states_initialized")[number]:
                first = torch.empty((1, *like.shape), dtype=like.dtype, device=device)
                layer.lazy_initialization(**{f"{kind}_states": first}, state_idx=number)
        states = _states(layer)
        for role, like in likes.items():
            if states[role].shape != (1, *like.shape) or states[role].dtype != like.dtype:
                raise ValueError(f"its {role} is {list(states[role].shape)} {states[role].dtype}, not the entry's")
        return {role: states[role][0] for role in likes}

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        for number in range(layer.number_of_states):
            layer.has_previous_state[number] = bool(record.scalars[f"seen.{number}"])

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return None


class HybridCodec:
    """A layer with the state of linear attention beside the keys and values of another class."""

    def __init__(self, attention: LayerCodec) -> None:
        self._attention, self._linear = attention, LinearCodec()

    def plan(self, layer: Any) -> LayerPlan:
        plan = self._attention.plan(layer)
        return replace(plan, kind=f"linear+{plan.kind}", snapshot=True)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        # Of the plan given, not of the layer: a static one does not know its window.
        attention = replace(plan, kind=plan.kind.removeprefix("linear+"), snapshot=False)
        attended = self._attention.describe(layer, attention, length)
        linear = self._linear.describe(layer, plan, length)
        record = replace(
            attended.record,
            kind=f"linear+{attended.record.kind}",
            tensors={**attended.record.tensors, **linear.record.tensors},
            scalars={**attended.record.scalars, **linear.record.scalars},
        )
        return LayerState(record, {**attended.tensors, **linear.tensors})

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        self._linear.wanted(layer, _linear_part(record), tokens)
        return self._attention.wanted(layer, _attention_part(record), tokens)

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        states = {role: like for role, like in likes.items() if _is_state(role)}
        rows = {role: like for role, like in likes.items() if not _is_state(role)}
        return {
            **self._attention.allocate(layer, rows, tokens, device, empty),
            **self._linear.allocate(layer, states, tokens, device, empty),
        }

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        self._attention.finish(layer, filled, _attention_part(record), tokens)
        self._linear.finish(layer, filled, record, tokens)

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return None


class NothingCodec:
    """``DummyLayer``: the place of a layer that keeps nothing, or uses what another one keeps."""

    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan("none")

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        return LayerState(LayerRecord(kind="none", tensors={}, scalars={}), {})

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        if record.kind != "none":
            raise ValueError(f"the entry has a layer of kind {record.kind!r} there, and this one keeps nothing")
        return 0, 0

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        return {}

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        pass

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return None


def _states(layer: Any) -> dict[str, torch.Tensor]:
    """The states of linear attention that are filled, by role, each with its batch dimension."""
    return {
        f"{kind}.{number}": state
        for kind in _KINDS
        for number, state in getattr(layer, f"{kind}_states").items()
        if getattr(layer, f"is_{kind}_states_initialized")[number]
    }


def _is_state(role: str) -> bool:
    return role.startswith(tuple(f"{kind}." for kind in _KINDS))


def _which(role: str) -> tuple[str, int]:
    kind, _, number = role.partition(".")
    return kind, int(number)


def _linear_part(record: LayerRecord) -> LayerRecord:
    tensors = {role: how for role, how in record.tensors.items() if _is_state(role)}
    kind = "linear" if record.kind.startswith("linear+") else record.kind
    return replace(record, kind=kind, tensors=tensors)


def _attention_part(record: LayerRecord) -> LayerRecord:
    tensors = {role: how for role, how in record.tensors.items() if not _is_state(role)}
    return replace(record, kind=record.kind.removeprefix("linear+"), tensors=tensors)
