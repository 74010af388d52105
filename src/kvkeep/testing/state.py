"""What a live layer holds, attribute by attribute, and whether two layers hold the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class HeldState:
    """The attributes of a layer, also those inside of dicts and lists, by their path.

    Attributes:
        tensors: the tensors.
        values: numbers and texts.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, bool | int | float | str]

    @classmethod
    def of(cls, layer: Any, left_out: Collection[str] = ()) -> HeldState:
        """What a layer holds, without the attributes of these names."""
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, bool | int | float | str] = {}
        for name, held in vars(layer).items():
            for path, value in _leaves(name, held) if name not in left_out else ():
                if isinstance(value, torch.Tensor):
                    tensors[path] = value
                elif isinstance(value, bool | int | float | str):
                    values[path] = value
        return cls(tensors, values)

    def copy(self) -> HeldState:
        """The same with tensors of its own."""
        return HeldState({path: tensor.detach().clone() for path, tensor in self.tensors.items()}, dict(self.values))

    def places(self) -> set[int]:
        """The addresses of the memory that the tensors lie in."""
        return {memory_of(tensor) for tensor in self.tensors.values() if tensor.numel()}


def memory_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor lies in; views have that of what they look at."""
    return tensor.untyped_storage().data_ptr()


def _leaves(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(held, dict):
        items = [(str(key), value) for key, value in held.items()]
    elif isinstance(held, list | tuple):
        items = [(str(number), value) for number, value in enumerate(held)]
    else:
        yield path, held
        return
    for name, value in items:
        yield from _leaves(f"{path}.{name}", value)


def difference(mine: HeldState, other: HeldState) -> str | None:
    """What differs in ``mine`` from ``other``, or ``None``. Further numbers and texts of ``mine`` do not count."""
    if odd := sorted(mine.tensors.keys() ^ other.tensors.keys()):
        where = "is missing" if odd[0] in other.tensors else "should not be there"
        return f"the tensor {odd[0]} {where}"
    for path, tensor in other.tensors.items():
        if not same_bits(mine.tensors[path], tensor):
            return f"the tensor {path} differs: {_shown(mine.tensors[path])}, not {_shown(tensor)}"
    for path, value in other.values.items():
        if path not in mine.values or mine.values[path] != value:
            return f"{path} is {mine.values.get(path)!r}, not {value!r}"
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals itself here, and 0 is not -0."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def same_outputs(one: Any, other: Any) -> bool:
    """Whether two results, which may be nested, have the same tensors bit for bit."""
    mine, others = ([leaf for _, leaf in _leaves("", result)] for result in (one, other))
    return len(mine) == len(others) and all(
        same_bits(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else type(a) is type(b)
        for a, b in zip(mine, others, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} with a sum of {float(tensor.double().sum()):g}"
