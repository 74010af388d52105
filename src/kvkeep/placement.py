"""Where the content of a model's tensors really is: behind accelerate's offloading, or in the shards of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def content_of(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a module computes with under the name of one of its tensors.

    For an offloaded tensor that is what accelerate keeps elsewhere, read from disk each time if it lies there; for a
    sharded one the shard of this process. Any other tensor is its own content.
    """
    if tensor.is_meta:
        for hook in _hooks(module):
            weights = getattr(hook, "weights_map", None)
            if weights is not None and key in weights:
                kept: torch.Tensor = weights[key]
                return kept
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


def is_placed(tensor: torch.Tensor) -> bool:
    """Whether the content of a tensor is elsewhere, as far as :func:`content_of` knows."""
    return tensor.is_meta or isinstance(getattr(tensor, "_local_tensor", None), torch.Tensor)


def device_of(module: nn.Module) -> torch.device | None:
    """The device that a module computes on: that of its first parameter, unless it is offloaded; ``None`` without."""
    for inner in module.modules():
        for parameter in inner._parameters.values():
            if parameter is None:
                continue
            if not parameter.is_meta:
                return parameter.device
            for hook in _hooks(inner):
                device = getattr(hook, "execution_device", None)
                if device is not None:
                    return torch.device(device)
    return None


def shard_of(model: nn.Module) -> tuple[int, int] | None:
    """(size, rank) of this process in the group that shares the model's tensors, or ``None`` if it has them whole."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    for mesh in meshes_of(model)[:1]:
        return int(mesh.size()), int(mesh.mesh.flatten().tolist().index(torch.distributed.get_rank()))
    size = int(getattr(model, "_tp_size", None) or 1)
    return (size, torch.distributed.get_rank() % size) if size > 1 else None


def gathers_weights(model: nn.Module) -> bool:
    """Whether the weights are whole within a pass alone (FSDP, DeepSpeed's ZeRO-3): they change with every pass."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        return True
    return any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def meshes_of(model: nn.Module) -> list[Any]:
    """The meshes of ranks that the model's tensors are spread over."""
    own = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if not any(own) and int(getattr(model, "_tp_size", None) or 1) > 1:
        own = [getattr(model, "_device_mesh", None)]
    return [mesh for mesh in dict.fromkeys(own) if mesh is not None and mesh.size() > 1]


def _hooks(module: nn.Module) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))
