"""Codecs of quantized layers: what full rows fill, and what is kept bit for bit for a layer of the same settings.

An entry of full rows fills a quantized layer as a prefill of these rows does; that is lossy, once. A quantized layer
itself is kept as snapshots, because its numbers are packed and scaled in groups that may reach over many tokens: the
packed tensors, their scales, and the last rows, which are not quantized yet.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import LayerRecord, canonical_json
from kvkeep.layouts.attention import check_filled, check_rows
from kvkeep.layouts.base import Empty, LayerPlan, LayerState
from kvkeep.layouts.deferred import quantize

KIND = "quantized"

Packed = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Tensors by name, and what else makes a quantized tensor of them, as JSON takes it."""


@dataclass(frozen=True, slots=True)
class Backend:
    """How the tensors that one backend quantizes are taken apart and put together again, without unpacking them."""

    take: Callable[[Any], Packed]
    make: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], Any]
    shape: Callable[[Any], tuple[int, ...]]


class QuantizedCodec:
    """A layer class of one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan(KIND, snapshot=True)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        check_filled(layer, length)
        if plan.kind != "full":
            raise ValueError(f"the model's own layer is of the kind {plan.kind}, of which it keeps all rows")
        if getattr(layer, "_pending_beam_idx", None) is not None:
            raise ValueError("its beams are still to be reordered")
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, str | int] = dict(compat.quantizer_of(layer))
        for side in ("keys", "values"):
            packed = getattr(layer, f"_quantized_{side}")
            residual = getattr(layer, side)
            later = int(residual.shape[-2]) if residual.dim() == 4 else 0
            shape = self._backend.shape(packed)
            if len(shape) != 4 or shape[0] != 1 or shape[2] != length - later:
                raise ValueError(f"its {side} are {list(shape)} and {later} rows more, not one sequence of {length}")
            parts, meta = self._backend.take(packed)
            tensors |= {f"{side}.{name}": part.detach() for name, part in parts.items()}
            if later:
                tensors[f"{side}.residual"] = residual.detach()
            scalars |= {f"{side}.meta": canonical_json(meta), f"{side}.dtype": _dtype_name(residual.dtype)}
        record = LayerRecord(kind=KIND, tensors=dict.fromkeys(tensors, "snapshot"), scalars={**scalars, "seen": length})
        return LayerState(record, tensors)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        if record.kind != KIND:
            return check_rows(record, 0, tokens)
        mine = compat.quantizer_of(layer)
        if odd := sorted(name for name in mine if record.scalars.get(name) != mine[name]):
            stored = ", ".join(f"{name} {record.scalars.get(name)}" for name in odd)
            raise ValueError(f"the entry was quantized with {stored}, the layer quantizes with other settings")
        if record.scalars.get("seen") != tokens:
            raise ValueError(f"what is quantized are {record.scalars.get('seen')} tokens together")
        return 0, 0

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        # On the CPU: full rows of all layers together may be more than the device has room for.
        layer.device = device
        return {role: torch.empty_like(like, device="cpu") for role, like in likes.items()}

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        moved = {role: tensor.to(layer.device) for role, tensor in filled.items()}
        if record.kind != KIND:
            try:
                quantize(layer, moved["keys"][None], moved["values"][None])
            except (ValueError, AssertionError, RuntimeError) as error:  # groups that do not come out even, say
                raise ValueError(f"these {tokens} tokens cannot be quantized so: {error}") from error
            return
        for side in ("keys", "values"):
            parts = {
                role.removeprefix(f"{side}."): tensor for role, tensor in moved.items() if role.startswith(f"{side}.")
            }
            dtype = _dtype(record.scalars[f"{side}.dtype"])
            residual = parts.pop("residual", torch.tensor([], dtype=dtype, device=layer.device))
            setattr(layer, side, residual)
            meta = json.loads(str(record.scalars[f"{side}.meta"]))
            setattr(layer, f"_quantized_{side}", self._backend.make(parts, meta))
        layer.dtype, layer.is_initialized = layer.keys.dtype, True
        layer.cumulative_length = tokens

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no number format")
    return dtype


# --- optimum-quanto: a tensor subclass around packed numbers, scales and shifts ---


def _quanto_classes() -> tuple[Any, Any]:
    module = importlib.import_module("optimum.quanto.tensor.weights.qbits")
    return module.WeightQBitsTensor, module.PackedTensor


def _take_quanto(packed: Any) -> Packed:
    tensor_class, packed_class = _quanto_classes()
    if type(packed) is not tensor_class or type(packed._data) is not packed_class:
        raise ValueError(f"a {type(packed).__name__} is packed in a way that kvkeep does not know")
    outer, inner = packed.__tensor_flatten__()[1], packed._data.__tensor_flatten__()[1]
    parts = {"data": packed._data._data, "scale": packed._scale, "shift": packed._shift}
    return parts, {"outer": outer, "inner": inner}


def _make_quanto(parts: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Any:
    tensor_class, packed_class = _quanto_classes()
    data = packed_class.__tensor_unflatten__({"_data": parts["data"]}, meta["inner"], None, None)
    held = {"_data": data, "_scale": parts["scale"], "_shift": parts["shift"]}
    return tensor_class.__tensor_unflatten__(held, meta["outer"], None, None)


# --- HQQ: a tensor of packed numbers, and a dictionary ---


def _take_hqq(packed: Any) -> Packed:
    data, held = packed
    parts: dict[str, torch.Tensor] = {"data": data}
    meta: dict[str, Any] = {}
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            parts[name] = value
        elif isinstance(value, torch.dtype):
            meta[name] = {"dtype": _dtype_name(value)}
        elif isinstance(value, torch.Size):
            meta[name] = {"size": list(value)}
        elif value is None or isinstance(value, bool | int | str):
            meta[name] = {"value": value}
        else:
            raise ValueError(f"its {name} is a {type(value).__name__}, which kvkeep does not know there")
    return parts, meta


def _make_hqq(parts: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Any:
    held: dict[str, Any] = {name: tensor for name, tensor in parts.items() if name != "data"}
    for name, stored in meta.items():
        if "dtype" in stored:
            held[name] = _dtype(stored["dtype"])
        else:
            held[name] = torch.Size(stored["size"]) if "size" in stored else stored["value"]
    return parts["data"], held


# --- fp8, of transformers' own: a tensor and its scale ---


def _take_fp8(packed: Any) -> Packed:
    data, scale = packed
    return {"data": data, "scale": scale}, {}


def _make_fp8(parts: Mapping[str, torch.Tensor], _: Mapping[str, Any]) -> Any:
    return parts["data"], parts["scale"]


BACKENDS: Mapping[str, Backend] = {
    "quanto": Backend(_take_quanto, _make_quanto, lambda packed: tuple(packed.shape)),
    "hqq": Backend(_take_hqq, _make_hqq, lambda packed: tuple(packed[1]["shape"])),
    "fp8": Backend(_take_fp8, _make_fp8, lambda packed: tuple(packed[0].shape)),
}
