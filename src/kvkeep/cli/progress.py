"""Progress bars on stderr, for a terminal; elsewhere nothing is drawn and rich is not imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[str, int, int], None]
"""Called with what is being worked on, how much of it is done, and how much there is."""


@contextmanager
def progress_bars(unit: str, *, wanted: bool = True) -> Iterator[Update]:
    """Draw one bar for each thing that is worked on, counted in ``unit``, with the time that is left."""
    if not wanted or not sys.stderr.isatty():
        yield lambda label, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    label_column = TextColumn("{task.description}", markup=False)
    columns = (label_column, BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as progress:
        tasks: dict[str, TaskID] = {}

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done, total=total)

        yield update
