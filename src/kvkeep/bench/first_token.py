"""The time from ``generate(ids)`` to the first token, of every way to start, which take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from kvkeep.bench.results import Result
from kvkeep.bench.sizes import Sweep
from kvkeep.bench.subjects import ANSWER, Opened, Subject
from kvkeep.bench.timing import Progress
from kvkeep.bench.ways import REFERENCE, Situation, Way, ways_of

LONG = 2048
"""Tokens; a longer prefix is computed anew only once."""


def measure_ways(
    subject: Subject, opened: Opened, tokens: int, directory: Path, sweep: Sweep, progress: Progress
) -> list[Result]:
    """Measure every way at one length; the files stay in an empty ``directory`` for whoever measures memory.

    Each repetition generates one token. The tokens that are compared are the first, or 33 where decoding is measured.

    Args:
        subject: what the model is called.
        opened: the model.
        tokens: of the prefix.
        directory: an empty one.
        sweep: how often.
        progress: called with what is being done, steps done, and how many there will be.
    """
    label = f"{subject.name}, {tokens:,} tokens"
    situation = Situation.computed(opened, tokens, directory, lambda done: progress(f"{label}: prefill", done, tokens))
    ways = ways_of(situation)
    for way in ways:
        way.prepare()
    decodes = tokens in sweep.decode_lengths
    total = sweep.starts + (len(ways) if decodes else 0)
    colds = sweep.colds if tokens <= LONG else 1
    seconds, answers = _take_turns(ways, sweep.starts, colds, lambda done: progress(label, done, total))
    rates: dict[str, float] = {}
    for done, way in enumerate(ways if decodes else (), start=sweep.starts + 1):
        way.before()
        answers[way.name], rates[way.name] = _decode(way)
        progress(label, done, total)
    return [
        Result(
            model=subject.name,
            weights=subject.weights,
            way=way.name,
            prefix_tokens=tokens,
            prompt_tokens=situation.prompt.shape[1],
            seconds=tuple(seconds[way.name]),
            tokens_per_second=rates.get(way.name),
            disk_bytes=sum(path.stat().st_size for path in way.files()),
            same_tokens=answers[way.name] == answers[REFERENCE],
        )
        for way in ways
    ]


def _take_turns(
    ways: Sequence[Way], starts: int, colds: int, progress: Callable[[int], None]
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """The seconds of every start, and the token that it gave.

    Which way goes first changes with every turn. Each runs once before, untimed, unless it computes the prefix.
    """
    for way in ways:
        if not way.recomputes:
            way.before()
            way.generate(max_new_tokens=1)
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    answers: dict[str, list[int]] = {}
    for turn in range(starts):
        for way in ways if turn % 2 == 0 else reversed(ways):
            if way.recomputes and turn >= colds:
                continue
            way.before()
            began = time.perf_counter()
            out = way.generate(max_new_tokens=1)
            seconds[way.name].append(time.perf_counter() - began)
            answers[way.name] = _new(way, out)
        progress(turn + 1)
    return seconds, answers


class _Clock(BaseStreamer):
    """Notes when each token came; ``generate`` shows it the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def _decode(way: Way) -> tuple[list[int], float]:
    """The tokens of a whole answer, and how many of them came a second once the first was there."""
    clock = _Clock()
    out = way.generate(max_new_tokens=ANSWER, streamer=clock)
    return _new(way, out), (ANSWER - 1) / (clock.times[-1] - clock.times[-ANSWER])


def _new(way: Way, out: torch.Tensor) -> list[int]:
    found: list[int] = out[0, way.situation.prompt.shape[1] :].tolist()
    return found
