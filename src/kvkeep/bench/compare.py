"""Every way to start from a prefix, side by side: model after model, each in a process of its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvkeep.bench.children import STEADY, ask
from kvkeep.bench.memory import RETURNED_AT_ONCE
from kvkeep.bench.peers import Peer, measure_peer, not_measured
from kvkeep.bench.results import Result, ratios_to
from kvkeep.bench.scratch import scratch_directory
from kvkeep.bench.sizes import Sweep
from kvkeep.bench.subjects import LLAMA, QWEN, SMOLLM2, Subject, real_subjects, with_layers
from kvkeep.bench.timing import Progress
from kvkeep.bench.ways import REFERENCE

_WORKER = (sys.executable, "-m", "kvkeep.bench.worker")


def subjects_for(sweep: Sweep) -> list[Subject]:
    """The models of a sweep: the real ones that are here and that it wants, and shapes cut to its layers."""
    real = real_subjects()[: sweep.real]
    shapes = [QWEN, LLAMA][: sweep.shapes]
    return [*(real or [SMOLLM2]), *(with_layers(shape, sweep.layers) for shape in shapes)]


def compare(
    subjects: Sequence[Subject], sweep: Sweep, *, parent: Path | None, peers: Sequence[Peer], progress: Progress
) -> list[Result]:
    """Compare all ways on all models, at every length.

    Args:
        subjects: the models.
        sweep: at which lengths, and how often.
        parent: where a directory is made, which is gone afterwards; ``None`` means in the user's cache directory.
        peers: other programs; one without an interpreter is not measured, and there is a result that says so.
        progress: called with what is being measured, the repetitions done, and how many there will be.

    Raises:
        KvkeepError: a process of ours failed. A peer that fails is not measured, for that reason.
    """
    results: list[Result] = []
    with scratch_directory(parent) as scratch:
        for number, subject in enumerate(subjects):
            directory = scratch / str(number)
            directory.mkdir()
            results += _one(subject, sweep, directory, peers, progress)
            shutil.rmtree(directory)  # the next one may need the room
    return ratios_to(REFERENCE, results)


def _one(
    subject: Subject, sweep: Sweep, directory: Path, peers: Sequence[Peer], progress: Progress
) -> Iterator[Result]:
    lengths = sweep.shape_lengths if subject.folder is None else sweep.lengths
    job: dict[str, Any] = {"subject": subject.to_json(), "directory": str(directory)}
    found = ask(
        _WORKER,
        {**job, "do": "times", "lengths": lengths, "sweep": asdict(sweep)},
        environment=STEADY,
        progress=progress,
    )
    results = [Result(**one) for one in found["results"]]
    prompts: dict[int, list[int]] = {int(length): ids for length, ids in found["prompts"].items()}
    peaks: dict[str, dict[str, int]] = {}
    if measured := [length for length in prompts if length in sweep.memory_lengths]:
        progress(f"{subject.name}: memory", 0, 1)
        peaks = ask(
            _WORKER, {**job, "do": "memory", "lengths": measured}, environment=RETURNED_AT_ONCE, progress=progress
        )
        progress(f"{subject.name}: memory", 1, 1)
    for one in results:
        yield replace(one, peak_bytes=peaks.get(str(one.prefix_tokens), {}).get(one.way))
    for peer in peers:
        if peer.python is None:
            yield not_measured(peer, subject, "no interpreter was named for it")
        else:
            yield from measure_peer(peer, peer.python, subject, prompts, sweep, directory, progress)
