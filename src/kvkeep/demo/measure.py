"""The demo's measurement: a process with the store against one without, in alternating pairs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvkeep.demo.process import WorkerProcess

PAIRS = 5
NEW_TOKENS = 32
BAR = 20.0
"""How many times sooner the first token must come, for prefixes of at least ``LONG`` tokens."""
LONG = 1500

_PAUSE = 0.2
"""Seconds before each timed call, in which the other process's threads go to sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result for one prefix: times in seconds, medians."""

    name: str
    model: str
    prefix_tokens: int
    prompt_tokens: int
    reused_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    identical: bool
    bytes: int
    reason: str | None

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came."""
        return self.cold_ttft_s / self.warm_ttft_s

    @property
    def missed(self) -> str | None:
        """Why this is no success, or ``None`` if it is one."""
        if not self.identical:
            return "the text differs from the control's"
        if not self.reused_tokens:
            return f"nothing was reused ({self.reason})"
        if self.prefix_tokens >= LONG and self.ratio < BAR:
            return f"the first token came {self.ratio:.1f} times sooner, less than {BAR:.0f}"
        return None

    def to_json(self) -> dict[str, object]:
        """The row as ``--format json`` prints it."""
        return {
            "name": self.name,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "cold_ttft_s": round(self.cold_ttft_s, 4),
            "warm_ttft_s": round(self.warm_ttft_s, 4),
            "ratio": round(self.ratio, 2),
            "identical": self.identical,
            "bytes": self.bytes,
        }


def measure(
    number: int,
    warmed: dict[str, Any],
    *,
    model: str,
    stored: WorkerProcess,
    control: WorkerProcess,
    scratch: Path,
    progress: Callable[[int, int], None],
) -> Row:
    """Measure prefix ``number`` of the manifest.

    Args:
        number: its place in the manifest.
        warmed: what the warming process said of it.
        model: how the row calls the model.
        stored: the process with the store.
        control: the process without one.
        scratch: an existing directory for the ids that the two write.
        progress: called with the calls done and the calls in all.
    """
    total = 2 * PAIRS + 2
    cold: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    for _ in range(PAIRS):
        for process, answers in ((control, cold), (stored, warm)):
            progress(len(cold) + len(warm), total)
            time.sleep(_PAUSE)
            process.ask("settle")  # it was idle while the other one computed, and that must cost neither
            answers.append(process.ask("first_token", number=number))
    texts: list[list[int]] = []
    for process, side in ((control, "cold"), (stored, "warm")):
        progress(2 * PAIRS + len(texts), total)
        path = scratch / f"{number}-{side}.json"
        process.ask("write_text", number=number, tokens=NEW_TOKENS, path=str(path))
        texts.append(json.loads(path.read_text(encoding="utf-8")))
    progress(total, total)
    return Row(
        name=warmed["name"],
        model=model,
        prefix_tokens=warmed["tokens"],
        prompt_tokens=warm[0]["prompt_tokens"],
        reused_tokens=min(answer["reused_tokens"] for answer in warm),
        cold_ttft_s=median(answer["seconds"] for answer in cold),
        warm_ttft_s=median(answer["seconds"] for answer in warm),
        identical=texts[0] == texts[1],
        bytes=warmed["bytes"],
        reason=warm[-1]["reason"],
    )
