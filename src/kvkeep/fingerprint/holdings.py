"""Everything that a live model computes with: where its tensors are held, and under which names.

One list serves both the fingerprint and the check before each call, so that neither can miss what the other sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import rope
from kvkeep.fingerprint.adapters import AdapterLayer
from kvkeep.fingerprint.subclasses import follow, is_made_of_others, leaves, recipe
from kvkeep.fingerprint.tensors import check_hashable
from kvkeep.fingerprint.tuners import bare_child, wrapped
from kvkeep.placement import content_of, is_placed

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
        name: the path in the bare model.
        part: a weight (``state_dict()`` shows it), a constant derived from the configuration, or an adapter's.
        inner: the attributes to follow to a tensor inside it, where it is made of others (quantized weights).
    """

    name: str
    module: nn.Module
    store: str
    key: str
    part: Literal["weight", "constant", "adapter"]
    inner: tuple[str, ...] = ()

    @property
    def held(self) -> torch.Tensor:
        """The tensor that is held now."""
        tensor: torch.Tensor = getattr(self.module, self.store)[self.key]
        return tensor

    @property
    def tensor(self) -> torch.Tensor:
        """Its content, which may be elsewhere; see :func:`~kvkeep.placement.content_of`."""
        held = self.held
        return follow(content_of(self.module, self.key, held) if is_placed(held) else held, self.inner)

    @property
    def passing(self) -> bool:
        """Whether the content is read anew each time it is asked for: it lies on disk."""
        return is_placed(self.held) and self.tensor is not self.tensor


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A model taken apart.

    Attributes:
        modules: the modules of the bare model, by their path in it.
        layers: the layers that adapters are laid around, the outer before the inner.
        bare: for each path of such a layer in the model as it stands, the name of the child that it is laid around.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    layers: tuple[AdapterLayer, ...]
    bare: dict[str, str]

    def name(self, path: str) -> str | None:
        """The name in the bare model of what has this name in the model as it stands; ``None`` for adapters."""
        place, kept = "", []
        for part in path.split("."):
            bare = self.bare.get(place)
            if bare is not None and part != bare:
                return None
            if bare is None and part != _WRAPPER:
                kept.append(part)
            place = f"{place}.{part}" if place else part
        return ".".join(kept)


def anatomy(model: nn.Module, *, salted: bool = False) -> Anatomy:
    """Take an unwrapped model apart into the bare model and its adapters.

    Args:
        model: the model.
        salted: whether the caller's own word stands for what cannot be seen of adapters.

    Raises:
        UnsupportedRequestError: for adapters of a kind that is not known.
    """
    modules: dict[nn.Module, str] = {}
    layers: dict[nn.Module, AdapterLayer] = {}
    bare_names: dict[str, str] = {}

    def visit(place: str, path: str, module: nn.Module) -> None:
        bare = bare_child(path, module, salted=salted)
        if bare is not None:
            bare_names[place] = bare
            if module not in layers:
                layers[module] = AdapterLayer(path, module, bare, salted=salted)
            visit(_joined(place, bare), path, module._modules[bare])  # type: ignore[arg-type]
            return
        modules.setdefault(module, path)
        for name, child in module._modules.items():
            if child is not None:
                visit(_joined(place, name), path if name == _WRAPPER else _joined(path, name), child)

    visit("", "", model)
    return Anatomy(tuple((path, module) for module, path in modules.items()), tuple(layers.values()), bare_names)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def unwrap(model: nn.Module) -> nn.Module:
    """Take off what ``torch.compile``, data-parallel wrappers and PEFT put around a whole model.

    Raises:
        UnsupportedRequestError: for PEFT methods that change the prompt itself.
    """
    while True:
        bare = wrapped(model)
        if bare is None and not model._parameters and not model._buffers:
            bare = next((name for name in (_WRAPPER, "module") if set(model._modules) == {name}), None)
        if bare is None:
            return model
        model = model._modules[bare]  # type: ignore[assignment]


def state(
    model: nn.Module, parts: Anatomy, held: Iterable[Holding]
) -> tuple[dict[str, torch.Tensor], dict[str, Holding], dict[str, Any]]:
    """What ``state_dict()`` shows of the bare model, by its name there: tensors, those on disk, and everything else."""
    placed = {holding.name: holding for holding in held if holding.part == "weight" and is_placed(holding.held)}
    tensors: dict[str, torch.Tensor] = {}
    passing: dict[str, Holding] = {}
    extras: dict[str, Any] = {}
    for place, value in model.state_dict(keep_vars=True).items():
        name = parts.name(place)
        if name is None:
            continue
        if name in placed and placed[name].passing:
            passing[name] = placed[name]
        elif isinstance(value, torch.Tensor):
            content = placed[name].tensor if name in placed else value
            for path, leaf in leaves(content):
                tensors[".".join((name, *path))] = leaf
                check_hashable(name, leaf)
            if is_made_of_others(content):
                extras[f"{name}.recipe"] = recipe(content)
        else:
            extras[name] = value
    return tensors, passing, extras


def holdings(model: nn.Module, parts: Anatomy, *, weights: bool = True) -> list[Holding]:
    """Every place that holds a tensor which decides the model's output: of the bare model, and of adapters that act.

    Args:
        model: the unwrapped model.
        parts: its anatomy.
        weights: also those that ``state_dict()`` shows; without them, no module is asked where it keeps its weights.

    Raises:
        UnsupportedRequestError: for a module that keeps tensors where ``state_dict()`` and the buffers do not show
            them, and for tensors without content.
    """
    found = [h for path, module in parts.modules for h in _held(path, module) if weights or h.part == "constant"]
    for layer in parts.layers:
        tensors = [one for adapter in layer.parts for one in adapter.tensors]
        found += [Holding(f"{layer.path}.{one.name}", one.module, one.store, one.key, "adapter") for one in tensors]
    if weights:
        registered = {id(module) for module in model.modules()}
        for module in model.modules():
            registered.update(id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values()))
        inside = [(layer.path, module) for layer in parts.layers for part in layer.parts for module in part.modules]
        for path, module in (*parts.modules, *inside):
            _check_nothing_hidden(path, module, registered)
    found = [leaf for holding in found for leaf in _leaves_of(holding)]
    for holding in found:
        check_hashable(holding.name, holding.tensor)
    return found


def _leaves_of(holding: Holding) -> Iterator[Holding]:
    if not is_made_of_others(holding.tensor):
        yield holding
        return
    for path, _ in leaves(holding.tensor):
        yield replace(holding, name=".".join((holding.name, *path)), inner=path)


def _held(path: str, module: nn.Module) -> Iterator[Holding]:
    dot = f"{path}." if path else ""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Holding(dot + key, module, "_parameters", key, "weight")
    sources = rope.frequency_sources(module)
    for key, buffer in module._buffers.items():
        if buffer is None or (sources is not None and key.endswith(rope.FREQUENCIES)):
            continue
        yield Holding(dot + key, module, "_buffers", key, _part_of(module, key))
    for key, source in (sources or {}).items():
        store = "_buffers" if source in module._buffers else "__dict__"
        yield Holding(dot + key, module, store, source, _part_of(module, key))
    for key, value in vars(module).items():
        if key in _CONSTANTS and isinstance(value, torch.Tensor):
            yield Holding(dot + key, module, "__dict__", key, "constant")


def _part_of(module: nn.Module, buffer: str) -> Literal["weight", "constant"]:
    return "constant" if buffer in module._non_persistent_buffers_set else "weight"


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
