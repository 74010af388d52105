"""The result of one measurement: a figure beside its bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["ratio", "ms", "s", "modules", "copies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure, the bar it is held against, and what was compared to get it.

    Attributes:
        name: what was measured.
        figure: the result, in ``unit``; ``None`` if it was not measured, and ``compared`` says why.
        unit: ``"ratio"`` of two medians of one run, or a median in ``"ms"`` or ``"s"``, or a number of ``"modules"``
            or ``"copies"``.
        bar: what the figure should be ``at``: at least, or at most.
        at: which side of the bar is good.
        compared: both sides and the sizes, in words.
    """

    name: str
    figure: float | None
    unit: Unit
    bar: float
    at: Literal["least", "most"]
    compared: str

    @property
    def reached(self) -> bool | None:
        """Whether the figure is on the good side of its bar, or right on it; ``None`` if there is no figure."""
        if self.figure is None:
            return None
        return self.figure >= self.bar if self.at == "least" else self.figure <= self.bar

    def to_json(self) -> dict[str, object]:
        """The row as ``--format json`` prints it."""
        return {
            "name": self.name,
            "figure": None if self.figure is None else round(self.figure, 4),
            "unit": self.unit,
            "bar": round(self.bar, 4),
            "at": self.at,
            "reached": self.reached,
            "compared": self.compared,
        }
