"""A process of the bench that holds one model: ``python -m kvkeep.bench.worker``, started by :mod:`.compare`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.bench.timing import Progress


def work(job: Mapping[str, Any], progress: Progress) -> Any:
    """Do one job: ``times`` of every way at every length, or the ``memory`` that every way takes.

    Args:
        job: ``do``, the ``subject``, its ``lengths`` and the ``directory`` with one folder a length; for times also the
            ``sweep``. Files are left for those lengths at which memory is to be measured.
        progress: called with what is being done, how much is done, and how much there is.

    Returns:
        For times, keyword arguments of :class:`~kvkeep.bench.results.Result`; for memory, bytes by length and way.
    """
    from kvkeep.bench.first_token import measure_ways
    from kvkeep.bench.memory import measure_memory
    from kvkeep.bench.sizes import Sweep
    from kvkeep.bench.subjects import Opened, Subject

    subject = Subject(**job["subject"])
    opened = Opened(subject)
    directory = Path(job["directory"])
    lengths = [length for length in job["lengths"] if length <= opened.longest]
    if job["do"] == "memory":
        return {length: measure_memory(opened, length, directory / str(length)) for length in lengths}
    sweep = Sweep(**job["sweep"])
    found = []
    for length in lengths:
        here = directory / str(length)
        here.mkdir()
        found += measure_ways(subject, opened, length, here, sweep, progress)
        if length not in sweep.memory_lengths:
            shutil.rmtree(here)
    return {
        "results": [one.to_arguments() for one in found],
        "prompts": {length: opened.prompt(length)[0].tolist() for length in lengths},
    }


def main() -> None:
    """Serve the parent at the other end of stdin and stdout."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)  # whatever else this process prints is no answer

        def send(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        result = work(
            json.loads(sys.stdin.readline()), lambda name, done, total: send({"progress": [name, done, total]})
        )
        send({"result": result})


if __name__ == "__main__":
    main()
