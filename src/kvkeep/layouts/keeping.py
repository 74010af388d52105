"""A sliding layer that goes on as ever, and keeps the rows that its window leaves behind: for what is to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import LayerRecord
from kvkeep.layouts.attention import DynamicCodec

_SlidingLayer: Any = compat.DYNAMIC_SLIDING_LAYER  # typed otherwise in each version


class KeepingLayer(_SlidingLayer):  # type: ignore[misc]
    """``DynamicSlidingWindowLayer`` that also has every row from the first that it was filled with."""

    keys: Any
    values: Any

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values, and return what the new tokens attend to."""
        self.kept.append((key_states, value_states))
        seen: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return seen


class KeepingCodec(DynamicCodec):
    """Fills and describes as for any sliding layer."""

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        """Make the layer go on, and keep what it was filled with."""
        super().finish(layer, filled, record, tokens)
        layer.kept = [(layer.keys, layer.values)]
