"""The protocol of a layer codec, and the record it makes of a live layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvkeep.compat import LayerPlan
from kvkeep.entry_format import LayerRecord

Empty = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerState:
    """A live layer as it will be stored: its record, and the tensors by role, each [heads, rows, dim]."""

    record: LayerRecord
    tensors: Mapping[str, torch.Tensor]


class LayerCodec(Protocol):
    """How the layers of one class are taken apart and put together again.

    The same layer kind may be kept by several classes (a dynamic and a static one, say): their codecs write and read
    the same records, which is what makes an entry loadable into either.
    """

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        """Describe a layer that has seen ``length`` tokens of one sequence.

        The tensors are views of the layer's own. Raises ``ValueError`` with what is odd about the layer.
        """

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        """The positions [first, last) whose rows this layer needs to continue after ``tokens`` tokens.

        Raises ``ValueError`` where the record cannot fill this layer.
        """

    def allocate(
        self, layer: Any, rows: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        """Destinations for the wanted rows, each [heads, rows, dim] with every head contiguous, on ``device``.

        ``rows`` holds a meta tensor of that shape and dtype for each role; ``empty`` makes a new tensor on ``device``
        like one of them.
        """

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], tokens: int) -> None:
        """Make the layer continue after ``tokens`` tokens, now that its destinations are filled."""

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        """The rows of one token, by role, each [batch, heads, dim], of a layer that has seen ``seen`` tokens.

        ``None`` where it does not keep them any more.
        """
