"""Caches that some models bring themselves: classes of their modeling files, with one list of tensors for each role.

transformers 4.57 keeps the state of Mamba, Jamba, Zamba, Bamba, Falcon-H1, LFM2 and Qwen3-Next so; 5.24 has none of
these classes any more, and keeps the same tensors in the layers of a ``DynamicCache``. Here such a cache is shown as
layers with the attributes of those, which read and write the lists; and an empty one is made for a model.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from kvkeep.compat.media import media_tokens
from kvkeep.compat.models import forward_cache_argument, layer_devices, text_config

_CLASSES = {
    "bamba": "HybridMambaAttentionDynamicCache",
    "falcon_h1": "FalconHybridMambaAttentionDynamicCache",
    "falcon_mamba": "FalconMambaCache",
    "granitemoehybrid": "HybridMambaAttentionDynamicCache",
    "jamba": "HybridMambaAttentionDynamicCache",
    "lfm2": "Lfm2HybridConvCache",
    "mamba": "MambaCache",
    "mamba2": "Mamba2Cache",
    "qwen3_next": "Qwen3NextDynamicCache",
    "zamba": "ZambaHybridDynamicCache",
    "zamba2": "Zamba2HybridDynamicCache",
}
"""The class of each model's cache, by the package of ``transformers.models`` that has it."""

_ATTEND_AND_KEEP_STATE = ("falcon_h1", "zamba", "zamba2")
"""Packages whose attention layers have a state beside their keys and values."""

_STRETCH = 64
"""Tokens that Qwen3-Next computes together; no configuration says it."""

_GROWING = ("falcon_h1", "lfm2")
"""Packages whose lists of keys and values begin empty, and get one item after the other."""


class _Rows:
    """The keys and values of one layer, [1, heads, rows, dim] each, as a dynamic layer has them."""

    def __init__(self, cache: Any, number: int) -> None:
        self._cache, self._number = cache, number
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None
        self.is_initialized = self.keys is not None

    @property
    def keys(self) -> torch.Tensor | None:
        return _row_tensor(self._cache.key_cache, self._number)

    @keys.setter
    def keys(self, keys: torch.Tensor) -> None:
        _put(self._cache.key_cache, self._number, keys)

    @property
    def values(self) -> torch.Tensor | None:
        return _row_tensor(self._cache.value_cache, self._number)

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        _put(self._cache.value_cache, self._number, values)

    def get_seq_length(self) -> int:
        """How many tokens the layer has seen."""
        return 0 if self.keys is None else int(self.keys.shape[-2])


class _State:
    """The convolution and the recurrent state of one layer, [1, ...] each, as a layer of linear attention has them."""

    number_of_states = 1
    record_past = False

    def __init__(self, cache: Any, number: int, used: Callable[[], bool]) -> None:
        self._cache, self._number, self._used = cache, number, used
        self._filled: dict[str, bool] = {}

    @property
    def conv_states(self) -> dict[int, Any]:
        return {0: self._tensor("conv")}

    @property
    def recurrent_states(self) -> dict[int, Any]:
        return {0: self._tensor("recurrent")}

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        return {0: self._is_filled("conv")}

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        return {0: self._is_filled("recurrent")}

    @property
    def has_previous_state(self) -> MutableMapping[int, bool]:
        return _Seen(self._cache, self._used())

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
    ) -> None:
        """Take a state of this shape, dtype and device.

        Raises:
            ValueError: where the model's own has another shape.
        """
        for role, like in (("conv", conv_states), ("recurrent", recurrent_states)):
            if like is None:
                continue
            place, now = _place_of(self._cache, role), self._tensor(role)
            if place is None:
                raise ValueError(f"a {type(self._cache).__name__} has no {role} state")
            if now is not None and now.shape != like.shape:
                raise ValueError(f"its {role} state is {list(now.shape)}, the entry's {list(like.shape)}")
            if now is None or (now.dtype, now.device) != (like.dtype, like.device):
                if isinstance(place, torch.Tensor):  # those of all layers are one
                    raise ValueError(
                        f"its {role} state is {now.dtype} on {now.device}, not {like.dtype} on {like.device}"
                    )
                place[self._number] = torch.zeros_like(like)
            self._filled[role] = True

    def _tensor(self, role: str) -> Any:
        place = _place_of(self._cache, role)
        return None if place is None else place[self._number]

    def _is_filled(self, role: str) -> bool:
        if role not in self._filled:
            self._filled[role] = self._tensor(role) is not None and self._used()
        return self._filled[role]


class OwnedAttentionLayer(_Rows):
    """One attention layer of such a cache."""


class OwnedLinearLayer(_State):
    """One layer of such a cache with a state alone."""


class OwnedHybridLayer(_Rows, _State):
    """One layer of such a cache with keys and values, and a state."""

    def __init__(self, cache: Any, number: int, used: Callable[[], bool]) -> None:
        _Rows.__init__(self, cache, number)
        _State.__init__(self, cache, number, used)


class OwnedLayers:
    """A model's own cache as layers, which write through.

    Attributes:
        layers: one for each layer of the model.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.layers: list[Any] = []
        used = functools.cache(functools.partial(_is_used, cache))  # without attention it looks at every state
        for number in range(_depth(cache)):
            if not _attends(cache, number):
                self.layers.append(OwnedLinearLayer(cache, number, used))
            elif _package(type(cache)) in _ATTEND_AND_KEEP_STATE:
                self.layers.append(OwnedHybridLayer(cache, number, used))
            else:
                self.layers.append(OwnedAttentionLayer(cache, number))

    def reset(self) -> None:
        """Make the cache hold nothing, as it was when it was made."""
        cache = self._cache
        for role in ("conv", "recurrent"):
            place = _place_of(cache, role)
            if isinstance(place, torch.Tensor):
                setattr(cache, _names_of(cache)[role], torch.zeros_like(place))
            elif place is not None:
                for number in range(_depth(cache)):
                    _clear(place, number, lazy=_is_lazy(cache))
        for rows in (getattr(cache, "key_cache", None), getattr(cache, "value_cache", None)):
            if rows is None:
                continue
            if _package(type(cache)) in _GROWING:
                rows.clear()
                continue
            for number, held in enumerate(rows):
                rows[number] = None if _is_lazy(cache) else torch.empty((1, 0), device=held.device)
        _Seen(cache, seen=True)[0] = False
        self.layers[:] = OwnedLayers(cache).layers


class _Seen(dict[int, bool]):
    """Whether a layer has a state to go on from; setting it sets it for the whole cache, as these know no other way."""

    def __init__(self, cache: Any, seen: bool) -> None:
        super().__init__({0: seen})
        self._cache = cache

    def __setitem__(self, number: int, seen: bool) -> None:
        super().__setitem__(number, seen)
        if isinstance(getattr(self._cache, "has_previous_state", None), bool) and not _is_lazy(self._cache):
            self._cache.has_previous_state = seen


def is_owned(cache: Any) -> bool:
    """Whether this is exactly such a cache; a subclass may hold more."""
    package = _package(type(cache))
    return package is not None and type(cache) is _class_of(package)


def owned_class(config: Any) -> Any:
    """The class of the cache that a model of this configuration brings itself, or ``None``."""
    package = _package(type(config))
    return None if package is None else _class_of(package)


def owned_layers(config: Any) -> list[Any] | None:
    """The layers that such a cache of a model of this configuration has, empty; ``None`` if it brings none."""
    make = owned_class(config)
    if make is None:
        return None
    depth = int(config.num_hidden_layers)
    return OwnedLayers(_made(make, config, torch.float32, [torch.device("meta")] * depth)).layers


def owned_cache(model: Any) -> Any:
    """An empty cache of the class that this model brings itself for one sequence; ``None`` if it brings none."""
    config = text_config(model)
    make = owned_class(config)
    if make is None or media_tokens(model):
        return None
    return _made(make, config, model.dtype, layer_devices(model, int(config.num_hidden_layers)))


def owned_positions(cache: Any, begin: int, end: int, device: Any) -> dict[str, torch.Tensor]:
    """The argument by which a model is told where the tokens [begin, end) are, which it brings its own cache for.

    Without attention there is nothing that counts: at the beginning, the positions are those of the convolution.
    """
    if not is_owned(cache):
        return {}
    if begin == 0 and not hasattr(cache, "key_cache"):
        end = int(cache.conv_kernel_size)
    return {"cache_position": torch.arange(begin, end, device=device)}


def stretch_computed_at_once(config: Any) -> int:
    """How many tokens of one pass a model with state computes together at most, before it carries on."""
    named = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size"))
    return int(next(filter(None, named), _STRETCH))


def hand_owned(model: Any, cache: Any, model_kwargs: dict[str, Any], held: int, ids: torch.Tensor) -> None:
    """Put a filled cache of ``held`` tokens of a prompt among what the inputs of the first pass are prepared from."""
    model_kwargs[forward_cache_argument(model)] = cache
    model_kwargs["cache_position"] = torch.arange(held, ids.shape[1], device=ids.device)


# --- the lists of one cache ---


def _package(kind: type) -> str | None:
    """The package of ``transformers.models`` that a class is of, if its models bring their own cache."""
    parts = kind.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 and parts[2] in _CLASSES else None


@functools.lru_cache(maxsize=64)
def _class_of(package: str) -> Any:
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    return getattr(module, _CLASSES[package], None)


def _made(make: Callable[..., Any], config: Any, dtype: torch.dtype, devices: Sequence[torch.device]) -> Any:
    known = inspect.signature(make).parameters
    given = {
        "batch_size": 1,
        "max_batch_size": 1,
        "dtype": dtype,
        "device": devices[0] if devices else None,
        "devices": list(devices),
    }
    return make(config, **{name: value for name, value in given.items() if name in known})


def _names_of(cache: Any) -> dict[str, str]:
    recurrent = "recurrent_states" if hasattr(cache, "recurrent_states") else "ssm_states"
    return {"conv": "conv_cache" if hasattr(cache, "conv_cache") else "conv_states", "recurrent": recurrent}


def _place_of(cache: Any, role: str) -> Any:
    """Where the states of one role lie, by the number of the layer: a list, a mapping or one tensor."""
    return getattr(cache, _names_of(cache)[role], None)


def _depth(cache: Any) -> int:
    return len(_place_of(cache, "conv"))


def _attends(cache: Any, number: int) -> bool:
    if not hasattr(cache, "key_cache"):
        return False
    if hasattr(cache, "transformer_layers"):
        return number in cache.transformer_layers
    return bool(cache.layer_types[number] == "full_attention")


def _is_lazy(cache: Any) -> bool:
    """Whether a cache of this class has ``None`` for what is not filled."""
    return isinstance(getattr(type(cache), "has_previous_state", None), property)


def _is_used(cache: Any) -> bool:
    told = getattr(cache, "has_previous_state", None)
    if told is not None:
        return bool(told)
    if hasattr(cache, "key_cache"):
        return any(_row_tensor(cache.key_cache, number) is not None for number in range(len(cache.key_cache)))
    return any(bool(state.any()) for state in cache.conv_states)


def _row_tensor(rows: Any, number: int) -> torch.Tensor | None:
    """The rows of a layer, if there are any: what is empty is no tensor, or one of fewer dimensions."""
    held = rows[number] if number < len(rows) else None
    return held if isinstance(held, torch.Tensor) and held.dim() == 4 else None


def _put(rows: Any, number: int, tensor: torch.Tensor) -> None:
    while len(rows) <= number:
        rows.append(torch.tensor([]))
    rows[number] = tensor


def _clear(place: Any, number: int, *, lazy: bool) -> None:
    held = place[number]
    place[number] = None if lazy or held is None else torch.zeros_like(held)
