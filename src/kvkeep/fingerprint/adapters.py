"""Adapters by content: everything that an adapter layer computes with beside the bare layer.

Only adapters that act count, in their order. What they are called does not.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvkeep.fingerprint.encoding import canonical_json
from kvkeep.fingerprint.tensors import tensor_digests
from kvkeep.fingerprint.tuners import (
    acting_adapters,
    adapter_names,
    by_adapter,
    check_known,
    check_same_for_all_requests,
    is_whole_model,
    peft_bases,
    unknown,
    variant_name,
)
from kvkeep.keys import digest_fields

_STORES = ("_parameters", "_buffers", "_modules")

_NOT_COMPUTED_WITH = frozenset(
    {
        *("training", "kwargs", "adapter_layer_names", "other_param_names", "frozen_peft_weight_names"),
        *("active_adapters", "disable_adapters", "merged_adapters"),  # what acts is found out from these
    }
)


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter: ``getattr(module, store)[key]``, under a name without the adapter's."""

    name: str
    module: nn.Module
    store: str
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is held now."""
        tensor: torch.Tensor = getattr(self.module, self.store)[self.key]
        return tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What one adapter is in one layer: the tensors and settings that the layer computes with, by name."""

    tensors: tuple[AdapterTensor, ...]
    modules: tuple[nn.Module, ...]
    settings: Mapping[str, Any]


class AdapterLayer:
    """A module that adapters are laid around.

    Args:
        path: the name, in the bare model, of what it is laid around.
        module: the module.
        bare: the name of the child that it is laid around.
        salted: the caller's own word stands for what cannot be seen here.

    Raises:
        UnsupportedRequestError: for a kind of layer that is not known.
    """

    __slots__ = ("bare", "module", "parts", "path", "unmerges")

    def __init__(self, path: str, module: nn.Module, bare: str, *, salted: bool) -> None:
        self.path, self.module, self.bare = path, module, bare
        check_same_for_all_requests(path, module)
        acting, self.unmerges = acting_adapters(module)
        if acting and not salted:
            check_known(path, module)
        self.parts = tuple(self._part(name, salted) for name in acting)

    def described(self, digests: Mapping[AdapterTensor, bytes]) -> Iterator[dict[str, Any]]:
        """What acts here, one plain value after another in the order in which they act."""
        for part in self.parts:
            yield {
                "layer": type(self.module).__qualname__,
                "unmerges": self.unmerges,
                "settings": part.settings,
                "tensors": {one.name: digests[one] for one in part.tensors},
            }

    def _part(self, name: str, salted: bool) -> Part:
        tensors: list[AdapterTensor] = []
        modules: list[nn.Module] = []
        settings: dict[str, Any] = {}
        for label, module, store, key in _entries(self.module, self.bare, name):
            value = getattr(module, store)[key]
            if isinstance(value, torch.Tensor):
                tensors.append(AdapterTensor(label, module, store, key))
            elif isinstance(value, nn.Module):
                self._add_module(label, value, tensors, modules, settings)
            elif is_plain(value):
                settings[label] = value
            elif variant_name(self.path, value) or salted:
                settings[label] = type(value).__qualname__
            else:
                raise unknown(self.path, self.module, f"computes with {label}, a {type(value).__qualname__}")
        return Part(tuple(tensors), tuple(modules), _switched_on(settings))

    def _add_module(
        self,
        label: str,
        module: nn.Module,
        tensors: list[AdapterTensor],
        modules: list[nn.Module],
        settings: dict[str, Any],
    ) -> None:
        for path, one in module.named_modules(prefix=label):
            if "BaseTunerLayer" in peft_bases(one):
                raise unknown(self.path, self.module, f"has an adapter on top of another in {path}")
            modules.append(one)
            settings[path] = [type(one).__qualname__, _switched_on(_scalars(one))]
            for store in ("_parameters", "_buffers"):
                held = getattr(one, store).items()
                tensors += [AdapterTensor(f"{path}.{key}", one, store, key) for key, value in held if value is not None]


def adapters_digest(layers: Iterable[AdapterLayer], *, threads: int | None) -> str | None:
    """One digest of all adapters that act, by content and place; ``None`` if none does."""
    acting = [layer for layer in layers if layer.parts]
    tensors = {one: one.tensor for layer in acting for part in layer.parts for one in part.tensors}
    digests = tensor_digests(tensors, threads=threads)
    by_path: dict[str, list[dict[str, Any]]] = {}
    for layer in acting:
        by_path.setdefault(layer.path, []).extend(layer.described(digests))
    return digest_fields("kvkeep/adapters/2", canonical_json(by_path, where="the adapters")).hex() if acting else None


def _entries(module: nn.Module, bare: str, adapter: str) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Everything that a layer holds for one adapter or for all: label, and where it is held (module, store, key)."""
    names = adapter_names(module)
    for store in _STORES:
        for key, value in getattr(module, store).items():
            if key == bare or value is None or "dropout" in key:
                continue
            if by_adapter(value):
                yield from ((key, value, inner, adapter) for inner in _STORES if adapter in getattr(value, inner))
            else:
                yield key, module, store, key
    for key, value in vars(module).items():
        if key[0] == "_" or "dropout" in key or key in _NOT_COMPUTED_WITH:
            continue
        if key == "forward" and "_hf_hook" in vars(module):  # accelerate moves tensors between devices there
            continue
        if not isinstance(value, dict):
            yield key, module, "__dict__", key
        elif adapter in value:
            yield key, module, key, adapter
        elif not names.issuperset(value):
            yield key, module, "__dict__", key


def _scalars(module: nn.Module) -> dict[str, Any]:
    """The plain settings of a module inside an adapter."""
    return {
        key: value
        for key, value in vars(module).items()
        if key[0] != "_" and key != "training" and "dropout" not in key and is_plain(value)
    }


def _switched_on(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that are off: a newer version has more of them, and computes the same."""
    return {
        key: value
        for key, value in settings.items()
        if not (value is None or value is False or (isinstance(value, list | tuple | dict) and not value))
    }


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, texts and the like alone."""
    if isinstance(value, dict):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype)


@dataclass(frozen=True, slots=True)
class LayerStamp:
    """What acts in a layer and how, as it was; the tensors are watched one by one."""

    module: weakref.ref[nn.Module]
    size: int
    acting: tuple[str, ...]
    switches: Any
    keys: tuple[str, ...]
    values: list[Any]
    held: list[int]

    @classmethod
    def of(cls, layer: AdapterLayer) -> LayerStamp:
        """The stamp of a layer as it is now."""
        module = layer.module
        settings = {key: _copied(value) for key, value in vars(module).items() if _is_setting(key, value)}
        acting = acting_adapters(module)[0]
        return cls(
            weakref.ref(module),
            len(vars(module)),
            acting,
            copy.deepcopy(_switches(module)),
            tuple(settings),
            list(settings.values()),
            _held(module, acting),
        )

    def matches(self) -> bool:
        """Whether the layer still is what it was."""
        module = self.module()
        if module is None:
            return False
        now = vars(module)
        return (
            len(now) == self.size
            and _switches(module) == self.switches
            and [now.get(key) for key in self.keys] == self.values
            and _held(module, self.acting) == self.held
        )


def _switches(module: nn.Module) -> tuple[Any, ...]:
    layer: Any = module
    if is_whole_model(module):
        return ()
    return layer.disable_adapters, layer.active_adapters, layer.merged_adapters, len(module._forward_pre_hooks)


def _held(module: nn.Module, acting: tuple[str, ...]) -> list[int]:
    """What the layer and its containers hold for the adapters that act, by address."""
    children = module._modules.values()
    found = list(map(id, children))
    if acting:
        for child in children:
            if child is not None and (child._modules or child._parameters or child._buffers):
                for name in acting:
                    found.append(id(child._modules.get(name)))
                    found.append(name in child._parameters or name in child._buffers)
    return found


def _is_setting(key: str, value: Any) -> bool:
    if key[0] == "_" or key in _NOT_COMPUTED_WITH or isinstance(value, torch.Tensor):
        return False
    return not (isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values()))


def _copied(value: Any) -> Any:
    """A copy of a setting that later changes of the original do not reach."""
    return copy.deepcopy(value) if is_plain(value) else dict(value) if isinstance(value, dict) else value
