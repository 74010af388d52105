"""Layers kept in memory, and lent to any number of caches: whoever writes into what was lent gets a copy of it first.

torch itself keeps that promise, whatever the caches or their owner do with the tensors: their storages are copied on
write. Where torch cannot, tensors are copied when they are lent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvkeep.entry_format import LayerRecord, TensorSpec
from kvkeep.layouts.buffers import LayerReader, head_buffers, row_likes, snapshot_likes, whole_buffer

Tensors = Mapping[str, torch.Tensor]

_VIEWS = 16
"""For how many different stretches of a layer views are kept."""


class HeldLayers:
    """All that an entry has of its layers, in memory. It is never written into; safe to use from several threads.

    Attributes:
        nbytes: bytes of the tensors.
        devices: where they lie.
    """

    def __init__(self, rows: Sequence[Tensors], snapshots: Sequence[Tensors]) -> None:
        """Take over tensors, for each layer by role: rows as [heads, rows, dim], snapshots of any shape."""
        # Made ready to be lent here, once: later it may happen in several threads at the same time.
        self._rows, self._snapshots = ([_ready(layer) for layer in layers] for layers in (rows, snapshots))
        self._views: dict[tuple[int, int, int], Tensors] = {}
        tensors = [tensor for layer in (*self._rows, *self._snapshots) for tensor in layer.values()]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.devices = {str(tensor.device) for tensor in tensors}

    def rows(self, number: int, first: int, last: int) -> Tensors:
        """Views of rows [first, last) of one layer, by role: to be read, and not to be handed out but as loans."""
        views = self._views.get((number, first, last))
        if views is None:  # most calls cut where others did, and making views is most of a hand-out
            if len(self._views) >= _VIEWS * len(self._rows):
                self._views.clear()
            views = {role: tensor[:, first:last] for role, tensor in self._rows[number].items()}
            self._views[number, first, last] = views
        return views

    def snapshots(self, number: int) -> Tensors:
        """The snapshots of one layer, by role, for which the same goes."""
        return self._snapshots[number]


def _ready(layer: Tensors) -> Tensors:
    return {role: lent(tensor) for role, tensor in layer.items()}


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same content: it has the same memory until somebody writes into either."""
    try:
        shared: torch.Tensor = torch._lazy_clone(tensor)
    except (AttributeError, RuntimeError):  # another torch, or memory that is not torch's own
        return tensor.clone()
    return shared


@torch.inference_mode(mode=False)
@torch.no_grad()
def hold_layers(
    stem: str,
    records: Sequence[LayerRecord],
    tensors: Mapping[str, TensorSpec],
    read: LayerReader,
    devices: Sequence[torch.device],
) -> HeldLayers:
    """Read all that an entry has of its layers.

    Args:
        stem: ``"layers"`` or ``"cross"``.
        records: the layers.
        tensors: the entry's tensors.
        read: reads them.
        devices: where to keep each layer.

    Raises:
        ValueError: for a layer of a dtype that torch does not have.
        EntryDamagedError, OSError: from ``read``.
    """
    held: tuple[list[Tensors], list[Tensors]] = [], []
    for number, (record, device) in enumerate(zip(records, devices, strict=True)):
        rows = {role: _new(like) for role, like in row_likes(record, number, record.rows, tensors, stem).items()}
        snapshots = {role: _new(like) for role, like in snapshot_likes(record, number, tensors, stem).items()}
        if rows:
            read.rows(number, 0, record.rows, {role: head_buffers(one) for role, one in rows.items()}, None)
        if snapshots:
            read.snapshots(number, {role: whole_buffer(one) for role, one in snapshots.items()})
        for kept, read_now in zip(held, (rows, snapshots), strict=True):
            kept.append({role: one.to(device) for role, one in read_now.items()})
    return HeldLayers(*held)


def _new(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, device="cpu")
