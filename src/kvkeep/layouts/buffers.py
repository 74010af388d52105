"""What is stored of a layer as tensors: their shapes and dtypes, and their bytes to be read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from kvkeep.entry_format import LayerRecord, TensorSpec, tensor_name

Buffers = Mapping[str, Sequence[memoryview]]

_TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


class LayerReader(Protocol):
    """Reads what an entry stores of its layers."""

    def rows(self, layer: int, first: int, last: int, targets: Buffers, behind: Buffers | None) -> None:
        """Fill the buffers, one a head, with rows [first, last), and those of ``behind`` with the row that follows."""

    def snapshots(self, layer: int, targets: Mapping[str, memoryview]) -> None:
        """Fill the buffers with the layer's snapshots, all of them."""


def row_likes(
    record: LayerRecord, number: int, rows: int, tensors: Mapping[str, TensorSpec], stem: str = "layers"
) -> dict[str, torch.Tensor]:
    """For each role of one layer that is stored as rows a meta tensor [heads, rows, dim], with so many of them.

    Raises ``ValueError`` for a dtype that torch does not have.
    """
    likes = {}
    for role in record.roles("rows"):
        spec = tensors[tensor_name(stem, number, role)]
        likes[role] = _like(role, spec, (spec.shape[0], rows, spec.shape[2]))
    return likes


def snapshot_likes(
    record: LayerRecord, number: int, tensors: Mapping[str, TensorSpec], stem: str = "layers"
) -> dict[str, torch.Tensor]:
    """For each role of one layer that is stored as a snapshot a meta tensor of its shape; raises as the other."""
    specs = {role: tensors[tensor_name(stem, number, role)] for role in record.roles("snapshot")}
    return {role: _like(role, spec, spec.shape) for role, spec in specs.items()}


def _like(role: str, spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
    if spec.dtype not in _TORCH_DTYPES:
        raise ValueError(f"its {role} are stored as {spec.dtype}")
    return torch.empty(shape, dtype=_TORCH_DTYPES[spec.dtype], device="meta")


def whole_buffer(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def head_buffers(rows: torch.Tensor) -> list[memoryview]:
    """The bytes of each head of [heads, rows, dim], without a copy. Each head must be contiguous and on the CPU."""
    heads, count, width = rows.shape
    if not rows.numel():
        return [memoryview(bytearray()) for _ in range(heads)]
    stride = rows.stride(0)
    flat = rows.detach().as_strided(((heads - 1) * stride + count * width,), (1,)).view(torch.uint8)
    whole = memoryview(cast(Any, flat.numpy()))
    step, size = stride * rows.element_size(), count * width * rows.element_size()
    return [whole[head * step : head * step + size] for head in range(heads)]
