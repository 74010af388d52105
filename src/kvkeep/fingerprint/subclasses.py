"""Tensors that are made of other tensors, as quantized weights are: their parts, and what else they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that wraps others, in the way that torch itself takes such tensors apart."""
    return hasattr(tensor, "__tensor_flatten__")


def leaves(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors that a tensor is made of, each with the attributes that lead to it; a plain one alone."""
    if not is_made_of_others(tensor):
        yield (), tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined, unused-ignore]
    for name in names:
        for path, leaf in leaves(getattr(tensor, name)):
            yield (name, *path), leaf


def follow(tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
    """The tensor at the end of a path of attributes."""
    for name in path:
        tensor = getattr(tensor, name)
    return tensor


def recipe(tensor: torch.Tensor) -> list[Any]:
    """What a tensor is beside the tensors that it is made of: its class, dtype, shape, and the settings it names."""
    names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined, unused-ignore]
    inner = {name: recipe(part) for name in names if is_made_of_others(part := getattr(tensor, name))}
    return [type(tensor).__qualname__, tensor.dtype, list(tensor.shape), settings, inner]
