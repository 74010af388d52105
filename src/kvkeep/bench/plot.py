"""The chart of the comparison: how soon the first token comes, by the length of the prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.results import Result
from kvkeep.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES_WIDE, _INCHES_HIGH = 7.0, 5.0


def check_plot(path: Path) -> None:
    """Raise before anything is measured if no chart could be drawn, or not there.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidRequestError: the name does not end in ``.png``, or its folder is not there.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("A chart needs matplotlib: pip install 'kvkeep[plot]'") from error
    if path.suffix.lower() != ".png":
        raise InvalidRequestError(f"--plot writes a PNG image: name a file that ends in .png, not {path}")
    if not path.absolute().parent.is_dir():
        raise InvalidRequestError(f"there is no folder {path.absolute().parent} to write the chart into")


def draw(results: Sequence[Result], machine: str) -> Figure:
    """A figure with one panel a model, and in it one line a way, over prefixes in tokens and seconds.

    Args:
        results: what was measured; what was not is left out.
        machine: where, in words, for the line below.
    """
    from matplotlib.figure import Figure

    measured = [one for one in results if one.first_token is not None]
    models = list(dict.fromkeys((one.model, one.weights) for one in measured))
    figure = Figure(figsize=(_INCHES_WIDE * max(1, len(models)), _INCHES_HIGH), layout="constrained")
    panels = figure.subplots(1, max(1, len(models)), squeeze=False)[0]
    ways = list(dict.fromkeys(one.way for one in measured))
    for panel, (model, weights) in zip(panels, models, strict=False):
        for number, way in enumerate(ways):
            points = sorted(
                (one.prefix_tokens, one.first_token or 0.0) for one in measured if (one.model, one.way) == (model, way)
            )
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    label=way,
                    color=f"C{number % 10}",
                    marker="o" if number < 10 else "s",
                )
        panel.set_title(f"{model}\n{weights}, float32")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("prefix (tokens)")
        panel.set_ylabel("time to first token (s)")
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle("Time to first token")
    figure.supxlabel(machine, fontsize="x-small")
    return figure


def save(results: Sequence[Result], machine: str, path: Path) -> None:
    """Write the chart as a PNG image."""
    draw(results, machine).savefig(path, format="png", dpi=120)
