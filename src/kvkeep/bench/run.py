"""The bench from beginning to end."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvkeep.bench.calls import measure_calls
from kvkeep.bench.copies import measure_copies
from kvkeep.bench.disk import measure_disk
from kvkeep.bench.identity import measure_identity
from kvkeep.bench.rows import Row
from kvkeep.bench.scratch import scratch_directory
from kvkeep.bench.search import measure_search
from kvkeep.bench.sizes import Sizes
from kvkeep.bench.startup import measure_startup
from kvkeep.bench.timing import Progress

_MEASUREMENTS = {
    "disk": measure_disk,
    "identity": measure_identity,
    "copies": measure_copies,
    "calls": measure_calls,
    "startup": measure_startup,
    "search": measure_search,
}


def run_bench(sizes: Sizes, *, parent: Path | None, progress: Progress) -> list[Row]:
    """Measure everything in a directory of its own, which is gone afterwards; no store of the user's is touched.

    Args:
        sizes: how much, and how often.
        parent: where the directory is made; ``None`` means in the user's cache directory.
        progress: called with what is being measured, the repetitions done, and how many there will be.
    """
    rows: list[Row] = []
    with scratch_directory(parent) as scratch:
        for name, measure in _MEASUREMENTS.items():
            directory = scratch / name
            rows += measure(directory, sizes, progress)
            shutil.rmtree(directory)  # the next one may need the room
    return rows
