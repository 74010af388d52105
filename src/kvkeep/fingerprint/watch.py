"""Whether a model is still the one that was fingerprinted: the check before every call.

Reading all weights again would take a tenth of a second and more, so each tensor is compared by what moves when it is
written (its identity, memory, version counter) and by a sample of its bytes for the writes that move nothing (fused
optimizer steps, ``.data.add_``, numpy aliases). A write of a few elements through ``.data`` can pass unseen, and so can
a change of weights that are offloaded to disk.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from kvkeep.fingerprint import config
from kvkeep.fingerprint.adapters import LayerStamp, is_plain
from kvkeep.fingerprint.holdings import Holding, anatomy, holdings, unwrap
from kvkeep.fingerprint.model import compute_dtypes, device_types
from kvkeep.fingerprint.rope import scalings
from kvkeep.fingerprint.subclasses import follow
from kvkeep.fingerprint.tuners import peft_bases
from kvkeep.placement import content_of, is_placed

_LINES, _LINE = 16, 64  # a sample is 16 stretches of 64 bytes, spread evenly


class ModelWatch:
    """Remembers a live model, and tells in about a millisecond whether it has changed since.

    Make the watch first and fingerprint after it: a change in between is then seen by the next :meth:`changed`. After
    a change, fingerprint again and make a new watch. The watch does not keep the model alive, and reading it from
    several threads is safe.

    Seen: replaced, resized, cast or moved tensors; writes through autograd's counters (optimizer steps, ``add_``,
    ``copy_``, ``load_state_dict``); dense writes behind them, for tensors on the CPU; replaced, added or removed
    modules; parametrizations; changed configuration fields; adapters switched, scaled or merged; autocast.

    Args:
        model: the model; wrappers are looked through.
        weights: watch the weights, too; not for a model that is known by the caller's ``model_id``.
        salted: the caller's own word stands for what cannot be seen of adapters.

    Raises:
        UnsupportedRequestError: for models that :func:`fingerprint_model` refuses, too.
    """

    __slots__ = ("_adapters", "_bare", "_devices", "_layers", "_links", "_model", "_settings")

    def __init__(self, model: nn.Module, *, weights: bool = True, salted: bool = False) -> None:
        model = unwrap(model)
        self._model = weakref.ref(model)
        parts = anatomy(model, salted=salted)
        held = holdings(model, parts, weights=weights)
        self._bare = _Stamps([one for _, one in parts.modules], [one for one in held if one.part != "adapter"])
        self._links = [_Link.of(layer.module, layer.bare) for layer in parts.layers]
        self._layers = [LayerStamp.of(layer) for layer in parts.layers]
        inside = [module for layer in parts.layers for adapter in layer.parts for module in adapter.modules]
        self._adapters = _Stamps(inside, [one for one in held if one.part == "adapter"])
        self._devices = device_types(model)
        self._settings = copy.deepcopy(_settings(model, self._devices))

    def changed(self) -> bool:
        """Whether the model differs from what it was when the watch was made, or is gone."""
        model = self._model()
        return (
            model is None
            or self.weights_changed()
            or not all(stamp.matches() for stamp in self._layers)
            or not self._adapters.match()
            or _settings(model, self._devices) != self._settings
        )

    def weights_changed(self) -> bool:
        """Whether the bare model's modules or tensors differ from what they were, or are gone; adapters aside."""
        return not (all(link.matches() for link in self._links) and self._bare.match())


class _Stamps:
    """Modules and tensors as they were."""

    __slots__ = ("_modules", "_sample", "_tensors", "_views")

    def __init__(self, modules: list[nn.Module], held: list[Holding]) -> None:
        self._modules = [_ModuleStamp.of(module) for module in modules]
        held = [holding for holding in held if not holding.passing]
        self._tensors = [_TensorStamp.of(holding) for holding in held]
        self._views = [view for holding in held if (view := _sample_view(holding.tensor)) is not None]
        self._sample = _sampled(self._views)

    def match(self) -> bool:
        if not all(stamp.matches() for stamp in self._modules):
            return False
        memory = []  # keeps what the views look at alive while they look
        for stamp in self._tensors:
            storage = stamp.matching_storage()
            if storage is None:
                return False
            memory.append(storage)
        return _sampled(self._views) == self._sample


@dataclass(frozen=True, slots=True)
class _Link:
    """What an adapter layer is laid around."""

    module: weakref.ref[nn.Module]
    key: str
    child: int

    @classmethod
    def of(cls, module: nn.Module, key: str) -> _Link:
        return cls(weakref.ref(module), key, id(module._modules[key]))

    def matches(self) -> bool:
        module = self.module()
        return module is not None and id(module._modules.get(self.key)) == self.child


@dataclass(frozen=True, slots=True)
class _ModuleStamp:
    """A module, its submodules, and the names of its tensors."""

    module: weakref.ref[nn.Module]
    children: tuple[str | int, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    state: Any

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleStamp:
        state = copy.deepcopy(_module_state(module))
        return cls(weakref.ref(module), _children(module), _filled(module._parameters), _filled(module._buffers), state)

    def matches(self) -> bool:
        module = self.module()
        return (
            module is not None
            and _children(module) == self.children
            and _filled(module._parameters) == self.parameters
            and _filled(module._buffers) == self.buffers
            and (self.state is None or _module_state(module) == self.state)
        )


def _children(module: nn.Module) -> tuple[str | int, ...]:
    children = module._modules
    return (*children, *map(id, children.values())) if children else ()


def _filled(tensors: Mapping[str, torch.Tensor | None]) -> tuple[str, ...]:
    return tuple([name for name, tensor in tensors.items() if tensor is not None]) if tensors else ()


def _module_state(module: nn.Module) -> Any:
    """What a module computes with besides tensors, where it is known to be changed at run time."""
    if peft_bases(module):  # inside an adapter
        return {key: value for key, value in vars(module).items() if key[0] != "_" and is_plain(value)}
    return scalings(module) or None


@dataclass(frozen=True, slots=True)
class _TensorStamp:
    """A tensor in its place, by all that moves when it is replaced or written in the open."""

    module: weakref.ref[nn.Module]
    store: str
    key: str
    tensor: weakref.ref[torch.Tensor]
    storage: Any  # a weak reference to the storage, so that its address is not given to another
    address: int
    version: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    placed: bool  # its content is elsewhere
    inner: tuple[str, ...]

    @classmethod
    def of(cls, holding: Holding) -> _TensorStamp:
        tensor = holding.tensor
        return cls(
            weakref.ref(holding.module),
            holding.store,
            holding.key,
            weakref.ref(tensor),
            StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
            tensor.data_ptr(),
            None if tensor.is_inference() else tensor._version,  # tensors born in inference mode have no counter
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            is_placed(holding.held),
            holding.inner,
        )

    def matching_storage(self) -> Any:
        """The tensor's storage if the tensor is what it was, else ``None``."""
        tensor, module = self.tensor(), self.module()
        held = getattr(module, self.store, {}).get(self.key)
        if self.placed and module is not None and held is not None:
            held = content_of(module, self.key, held)
        if self.inner and held is not None:
            held = follow(held, self.inner)
        if held is not tensor or tensor is None:
            return None
        storage = tensor.untyped_storage()
        same = (
            storage._cdata == self.storage.cdata
            and tensor.data_ptr() == self.address
            and (self.version is None or tensor._version == self.version)
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.dtype == self.dtype
        )
        return storage if same else None


def _settings(model: nn.Module, devices: list[str]) -> Any:
    return config.live_fields(model.config), compute_dtypes(model, devices)


def _sample_view(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """A strided look at a CPU tensor's memory that does not own it; read it only while the storage is held."""
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = reach * tensor.element_size()
    memory = memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))
    if nbytes <= _LINES * _LINE:
        return np.ndarray((nbytes,), np.uint8, buffer=memory)
    return np.ndarray((_LINES, _LINE), np.uint8, buffer=memory, strides=((nbytes - _LINE) // (_LINES - 1), 1))


def _sampled(views: list[np.ndarray[Any, np.dtype[np.uint8]]]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join([view.tobytes() for view in views]))
