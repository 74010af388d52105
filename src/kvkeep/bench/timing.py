"""Times that can be compared: the sides take turns, and each is told by its median."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, the repetitions done, and how many there will be."""


def _nothing() -> None:
    pass


def medians(
    name: str,
    *sides: Callable[[], object],
    times: int,
    progress: Progress,
    between: Callable[[], object] = _nothing,
) -> list[float]:
    """Run the sides in turns, and return the median of each in seconds.

    Each side runs once before, untimed. Which one goes first changes with every turn, so that what one leaves behind
    (a busy disk, a cold cache) meets both alike.

    Args:
        name: what is measured.
        sides: what is timed. What a side returns is let go when its time has been taken.
        times: the number of turns.
        progress: called after each turn.
        between: called after each side, untimed.
    """
    for side in sides:
        side()
        between()
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(times):
        for number in sorted(range(len(sides)), reverse=turn % 2 == 1):
            began = time.perf_counter()
            result = sides[number]()
            seconds[number].append(time.perf_counter() - began)
            del result
            between()
        progress(name, turn + 1, times)
    return [median(one) for one in seconds]
