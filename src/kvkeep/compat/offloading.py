"""Caches that move their layers between the device and the CPU by themselves: which layers, and where they rest.

A forward pass finds the first layer that is moved on its device, and fetches each other one while the one before it is
computed; behind it every layer is put back on the CPU. So that is how a cache must lie between two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def _moved(cache: Any) -> list[bool]:
    """For each layer whether the cache moves it."""
    if not getattr(cache, "offloading", False):
        return [False] * len(cache.layers)
    nothing = [False] * len(cache.layers)
    kinds = zip(
        cache.is_sliding,
        getattr(cache, "is_linear", nothing),
        getattr(cache, "is_dummy", nothing),
        strict=True,
    )
    return [not (linear or dummy or (sliding and cache.only_non_sliding)) for sliding, linear, dummy in kinds]


def resting_devices(cache: Any, devices: Sequence[torch.device]) -> list[torch.device]:
    """Where each layer's tensors lie between two forward passes, of a model that uses them on ``devices``."""
    moved = _moved(cache)
    first = moved.index(True) if True in moved else None
    return [
        torch.device("cpu") if moves and number != first else device
        for number, (moves, device) in enumerate(zip(moved, devices, strict=True))
    ]


def rest(cache: Any, devices: Sequence[torch.device] | None = None) -> None:
    """Put the filled layers of an offloaded cache where the next forward pass looks for them.

    Args:
        cache: any cache; one that is not offloaded is left as it is.
        devices: where the model uses each layer, if that is not where the layer was filled.
    """
    moved = _moved(cache)
    first = moved.index(True) if True in moved else None
    for number, (layer, moves) in enumerate(zip(cache.layers, moved, strict=True)):
        if not moves:
            continue
        if devices is not None:
            layer.device = devices[number]
        if number == first:
            layer.prefetch()
        else:
            layer.offload()


def wait_for_moves(cache: Any) -> None:
    """Return when no tensor of an offloaded cache is on its way any more: what arrives on the CPU may be late."""
    if not getattr(cache, "offloading", False):
        return
    cache.prefetch_stream.synchronize()
    for device in {layer.device for layer in cache.layers if isinstance(getattr(layer, "device", None), torch.device)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
