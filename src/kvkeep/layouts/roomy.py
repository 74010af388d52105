"""A dynamic layer with room behind its rows: the first tokens after a load are appended without copying the prefix."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import LayerRecord
from kvkeep.layouts.attention import DynamicCodec
from kvkeep.layouts.base import Empty

_DynamicLayer: Any = compat.DYNAMIC_LAYER  # typed otherwise in each version


class RoomyLayer(_DynamicLayer):  # type: ignore[misc]
    """``DynamicLayer``, which appends in place while it can, and grows by concatenation as ever when it cannot.

    It can while its tensors are still the views of its own buffers that it made itself. Whoever crops, reorders or
    replaces them, or copies the layer, gets the behaviour of ``DynamicLayer`` from then on.

    What is lent to it is copied into such buffers with the first tokens, and not before.

    Attributes:
        room: tokens that a load leaves room for.
        later: makes the buffers then, from meta tensors like them; ``None`` where it owns what it was filled with.
    """

    keys: Any
    values: Any
    later: Empty | None

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.later = None
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None
        self._owner: weakref.ref[RoomyLayer] | None = None

    def own(self, keys: torch.Tensor, values: torch.Tensor, rows: int) -> None:
        """Take over buffers [1, heads, slots, dim] whose first rows are filled."""
        self._buffers, self._owner = (keys, values), weakref.ref(self)
        compat.fill_dynamic(self, keys[:, :, :rows], values[:, :, :rows], rows)
        self._views = self.keys, self.values

    def borrow(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold lent rows, [1, heads, rows, dim], until the first ones are to be appended."""
        self._buffers, self._owner = None, weakref.ref(self)
        compat.fill_dynamic(self, keys, values, keys.shape[2])
        self._views = self.keys, self.values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values, and return all of them."""
        buffers = self._fitting(key_states, value_states)
        if buffers is None:
            self._buffers = self._views = self.later = None
            grown: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return grown
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            buffer[:, :, begin:end] = new
        self.keys, self.values = self._views = buffers[0][:, :, :end], buffers[1][:, :, :end]
        return self.keys, self.values

    def _fitting(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The buffers, if the new rows can be written behind the others there."""
        if torch.compiler.is_compiling():  # a graph would hold on to where the room was
            return None
        views = self._views
        if views is None or self._owner is None or self._owner() is not self:
            return None
        if self.keys is not views[0] or self.values is not views[1] or torch.is_grad_enabled():
            return None
        buffers = self._buffers if self.later is None else self._own_later(self.later)
        if buffers is None:
            return None
        end = views[0].shape[-2] + new[0].shape[-2]
        for buffer, states in zip(buffers, new, strict=True):
            same = (buffer.shape[0], buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device) == (
                *(states.shape[0], states.shape[1], states.shape[3]),
                *(states.dtype, states.device),
            )
            if not same or end > buffer.shape[2] or (buffer.is_inference() and not torch.is_inference_mode_enabled()):
                return None
        return buffers

    def _own_later(self, empty: Empty) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy what is lent into buffers with room."""
        self.later, held = None, self.keys.shape[2]
        wide = []
        for rows in (self.keys[0], self.values[0]):
            wide.append(empty(with_room(rows, self.room)))
            wide[-1][:, :held] = rows
        buffers = wide[0][None], wide[1][None]
        self.own(*buffers, held)
        return buffers

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and files: the rows without the room."""
        state = {**vars(self), "later": None, "_buffers": None, "_views": None, "_owner": None}
        if self._views is not None:
            state["keys"], state["values"] = self.keys.contiguous(), self.values.contiguous()
        return state


class RoomyCodec(DynamicCodec):
    """Loads into buffers with room. What is described is as for any dynamic layer."""

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        """Destinations at the beginning of buffers with room, or what is lent until there are such."""
        if layer.later is not None:
            return super().allocate(layer, likes, tokens, device, empty)
        wide = {role: empty(with_room(like, layer.room)) for role, like in likes.items()}
        layer._buffers = wide["keys"][None], wide["values"][None]
        return {role: one[:, : likes[role].shape[1]] for role, one in wide.items()}

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        """Make the layer own its buffers, or hold what is lent to it."""
        if layer.later is not None:
            layer.borrow(filled["keys"][None], filled["values"][None])
        else:
            layer.own(*layer._buffers, tokens)


def with_room(like: torch.Tensor, room: int) -> torch.Tensor:
    """A meta tensor like one of [heads, rows, dim] with room for more rows."""
    return torch.empty((like.shape[0], like.shape[1] + room, like.shape[2]), dtype=like.dtype, device="meta")
