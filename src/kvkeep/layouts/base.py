"""The protocol of a layer codec, and the record it makes of a live layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvkeep.entry_format import LayerRecord

Empty = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one cache layer of a model is: its kind and, for sliding ones, the window.

    Attributes:
        kind: the layer kind.
        window: how many tokens it looks back at, 0 for all.
        snapshot: whether it holds state that is valid behind its last token only.
    """

    kind: str
    window: int = 0
    snapshot: bool = False

    @property
    def plain(self) -> bool:
        """Whether the layer is attention with keys and values, and nothing more."""
        return self.kind in ("full", "sliding")

    @property
    def copies(self) -> bool:
        """Whether what the layer holds of one sequence can be laid into a layer of several, line by line."""
        return self.kind.removeprefix("linear+") in ("full", "sliding", "linear", "none")


@dataclass(frozen=True, slots=True)
class LayerState:
    """A live layer as it will be stored: its record, and the tensors by role.

    Those that are stored as rows are [heads, rows, dim], snapshots have any shape.
    """

    record: LayerRecord
    tensors: Mapping[str, torch.Tensor]


class LayerCodec(Protocol):
    """How the layers of one class are taken apart and put together again.

    The same layer kind may be kept by several classes (a dynamic and a static one, say): their codecs write and read
    the same records, which is what makes an entry loadable into either.
    """

    def plan(self, layer: Any) -> LayerPlan:
        """What an empty layer of the class will keep. Raises ``ValueError`` if that is nothing that can be kept."""

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        """Describe a layer that has seen ``length`` tokens of one sequence.

        The tensors are views of the layer's own. Raises ``ValueError`` with what is odd about the layer.
        """

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        """The positions [first, last) whose rows this layer needs to continue after ``tokens`` tokens.

        Raises ``ValueError`` where the record cannot fill this layer.
        """

    def allocate(
        self, layer: Any, likes: Mapping[str, torch.Tensor], tokens: int, device: torch.device, empty: Empty
    ) -> Mapping[str, torch.Tensor]:
        """Destinations for the wanted rows and the snapshots, on ``device``.

        ``likes`` holds for each role a meta tensor of the shape and dtype that is wanted. Of rows, [heads, rows, dim],
        every head must be contiguous, and a snapshot altogether; ``empty`` makes a new tensor on ``device`` like one.
        """

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        """Make the layer continue after ``tokens`` tokens, now that its destinations are filled."""

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        """The rows of one token, by role, each [batch, heads, dim], of a layer that has seen ``seen`` tokens.

        ``None`` where it does not keep them any more.
        """
