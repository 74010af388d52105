"""What was found of one way to start, at one length of prefix of one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A way beside the others of its run. ``None`` everywhere means: not measured.

    Attributes:
        model: the model's name.
        weights: real or random, in words.
        way: the way's name.
        prefix_tokens: tokens that were computed before.
        prompt_tokens: the same and the question.
        seconds: from the call to the first new token, of each repetition; none if this was not measured.
        ratio: of the median to the reference's, in the same run.
        tokens_per_second: of the 32 tokens after the first.
        disk_bytes: of the files that it needs.
        peak_bytes: by how much a process grew, from a model that had answered once to the largest it got.
        same_tokens: whether all its tokens are those of the reference; of a peer, of its own cold run.
        note: what must be known to read the figures, or why there are none.
    """

    model: str
    weights: str
    way: str
    prefix_tokens: int
    prompt_tokens: int
    seconds: Sequence[float] = ()
    ratio: float | None = None
    tokens_per_second: float | None = None
    disk_bytes: int | None = None
    peak_bytes: int | None = None
    same_tokens: bool | None = None
    note: str = ""

    @property
    def first_token(self) -> float | None:
        """The median time to the first token, in seconds."""
        return median(self.seconds) if self.seconds else None

    def to_arguments(self) -> dict[str, Any]:
        """What ``Result(**...)`` makes it from again, after a passage through JSON."""
        return asdict(self)

    def to_json(self) -> dict[str, object]:
        """The result as ``--format json`` prints it."""
        return {
            "model": self.model,
            "weights": self.weights,
            "way": self.way,
            "prefix_tokens": self.prefix_tokens,
            "prompt_tokens": self.prompt_tokens,
            "first_token_s": _rounded(self.first_token),
            "repetitions_s": [round(one, 5) for one in self.seconds],
            "ratio": _rounded(self.ratio),
            "tokens_per_second": _rounded(self.tokens_per_second),
            "disk_bytes": self.disk_bytes,
            "peak_bytes": self.peak_bytes,
            "same_tokens": self.same_tokens,
            "note": self.note,
        }


def ratios_to(reference: str, results: Iterable[Result]) -> list[Result]:
    """The same results, each with its ratio to the way ``reference`` of its model and length."""
    known = list(results)
    times = {(one.model, one.prefix_tokens): one.first_token for one in known if one.way == reference}

    def ratio(one: Result) -> float | None:
        base = times.get((one.model, one.prefix_tokens))
        return one.first_token / base if one.first_token is not None and base else None

    return [replace(one, ratio=ratio(one)) for one in known]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
