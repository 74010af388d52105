"""Everything that a live model computes with: where its tensors are held, and under which names.

One list serves both the fingerprint and the check before each call, so that neither can miss what the other sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import rope
from kvkeep.fingerprint.tensors import check_hashable

_WRAPPER = "_orig_mod"  # torch.compile keeps the module that it wraps under this name

_CONSTANTS = frozenset({"embed_positions", "freqs_ci", "pos_encoding", "scale_attn"})
"""Plain attributes of some modules of transformers 4 that hold constants; hashed like buffers."""

_REQUEST_STATE = frozenset({"rope_deltas"})
"""Plain attributes that a forward pass leaves behind; they belong to a request, not to the model."""

_KNOWN = _CONSTANTS | _REQUEST_STATE | {"_parameters", "_buffers", "_modules"}
_MAY_HOLD = (dict, list, tuple, torch.Tensor, nn.Module)


@dataclass(frozen=True, slots=True)
class Holding:
    """One place that holds a tensor: ``getattr(module, store)[key]``.

    Attributes:
        name: the path in the model, wrappers left out.
        weight: whether ``state_dict()`` shows it; otherwise it is a constant derived from the configuration.
    """

    name: str
    module: nn.Module
    store: Literal["_parameters", "_buffers", "__dict__"]
    key: str
    weight: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is held now."""
        tensor: torch.Tensor = getattr(self.module, self.store)[self.key]
        return tensor


def unwrap(model: nn.Module) -> nn.Module:
    """Take off what ``torch.compile`` and data-parallel wrappers put around a model."""
    while not model._parameters and not model._buffers and set(model._modules) in ({_WRAPPER}, {"module"}):
        (model,) = model.children()
    return model


def plain_name(name: str) -> str:
    """A dotted name without the parts that compiled submodules add.

    >>> plain_name("model.layers.0._orig_mod.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What ``state_dict()`` shows of an unwrapped model, by plain name: the tensors, and everything else."""
    tensors: dict[str, torch.Tensor] = {}
    extras: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            check_hashable(name, value)
            tensors[plain_name(name)] = value
        else:
            extras[plain_name(name)] = value
    return tensors, extras


def holdings(model: nn.Module, *, weights: bool = True) -> list[Holding]:
    """Every place of an unwrapped model that holds a tensor which decides its output.

    Args:
        model: the model.
        weights: also those that ``state_dict()`` shows; without them, no module is asked where it keeps its weights.

    Raises:
        UnsupportedRequestError: for a module that keeps tensors where ``state_dict()`` and the buffers do not show
            them, and for tensors without content.
    """
    modules = [(plain_name(path), module) for path, module in model.named_modules(remove_duplicate=True)]
    found = [holding for path, module in modules for holding in _held(path, module) if weights or not holding.weight]
    if weights:
        registered = {id(module) for _, module in modules}
        for _, module in modules:
            registered.update(id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values()))
        for path, module in modules:
            _check_nothing_hidden(path, module, registered)
    for holding in found:
        check_hashable(holding.name, holding.tensor)
    return found


def _held(path: str, module: nn.Module) -> Iterator[Holding]:
    dot = f"{path}." if path else ""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Holding(dot + key, module, "_parameters", key, weight=True)
    sources = rope.frequency_sources(module)
    for key, buffer in module._buffers.items():
        if buffer is None or (sources is not None and key.endswith(rope.FREQUENCIES)):
            continue
        yield Holding(dot + key, module, "_buffers", key, weight=key not in module._non_persistent_buffers_set)
    for key, source in (sources or {}).items():
        weight = key not in module._non_persistent_buffers_set
        yield Holding(dot + key, module, "_buffers" if source in module._buffers else "__dict__", source, weight)
    for key, value in vars(module).items():
        if key in _CONSTANTS and isinstance(value, torch.Tensor):
            yield Holding(dot + key, module, "__dict__", key, weight=False)


def _check_nothing_hidden(path: str, module: nn.Module, registered: set[int]) -> None:
    for key, value in vars(module).items():
        if not isinstance(value, _MAY_HOLD) or key in _KNOWN or key.endswith(rope.RUN_TIME_STATE):
            continue
        if any(_has_tensors(item) and id(item) not in registered for item in _items(value)):
            raise UnsupportedRequestError(
                f"{path or 'the model'} ({type(module).__qualname__}) holds tensors in its attribute {key!r}, which "
                "is neither a parameter, a buffer nor a submodule, so they cannot be fingerprinted; register them, "
                "or give bind(model_id=...) your own name for these weights"
            )


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(True for _ in chain(value.parameters(), value.buffers()))
    return isinstance(value, torch.Tensor)
