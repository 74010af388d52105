"""What a cache was filled with, and who fills it: what ``generation`` asks of ``serving``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvkeep.guard import StoredRow
from kvkeep.inputs import Inputs
from kvkeep.lines import Line
from kvkeep.records import GenerateReport, Match
from kvkeep.settings import SaveMode
from kvkeep.storage.verified import FileIdentity


@dataclass(frozen=True, slots=True)
class Served:
    """What a cache was filled with.

    Attributes:
        match: what was found.
        held: how many tokens it was filled with; one fewer than matched where the guard will watch.
        cached: how many it holds now: what cannot be fed at once was fed already.
        row: the stored rows of the token behind them, for the guard; ``None`` where nothing can be compared.
        file: which file they come from.
        snapshots: whether state is among it that is valid behind one token only.
        reused: how many of the prompt's tokens these are, over all its lines.
        lines: which lines of the cache ``row`` belongs to; ``None`` for all.
        parts: of a batch what each of its lines was filled with, those once that begin in the same way.
        positions: how many positions of an encoder it was filled with.
        encoder: what stands in for the encoder's output then; ``None`` where the decoder needs it all the same.
    """

    match: Match
    held: int = 0
    cached: int = 0
    row: StoredRow | None = None
    file: FileIdentity | None = None
    snapshots: bool = False
    reused: int = 0
    lines: tuple[int, ...] | None = None
    parts: tuple[Served, ...] = ()
    positions: int = 0
    encoder: Any = None

    @property
    def watched(self) -> list[Served]:
        """What of it is compared with what the model computes."""
        return [part for part in self.parts or (self,) if part.row is not None]


@dataclass(frozen=True, slots=True)
class Kept:
    """What was stored of a call.

    Attributes:
        key: the entry's key, or ``None``.
        reason: why nothing was stored that was to be.
    """

    key: str | None = None
    reason: str | None = None


class Pending(Protocol):
    """What is to be stored of a call when it has ended."""

    def end(self, cache: Any, sequences: Any, reused: int) -> Kept:
        """Store it, now that ``generate`` has returned these sequences with this cache."""


class Keeper(Protocol):
    """Who stores what calls have computed: ``autosave``."""

    def wants(self, mode: SaveMode | None) -> bool:
        """Whether anything is to be stored of calls in this mode; the bind's own where it is ``None``."""

    def begin(
        self, inputs: Inputs, mode: SaveMode | None, way: str, *, chunked: bool = False, watched: bool = False
    ) -> Pending | Kept | None:
        """Before a call of one sequence is served: what is to be stored when it has ended, or what was stored now."""


class Source(Protocol):
    """Where the KV of a prompt comes from: ``serving``."""

    guard: bool
    """Whether calls are guarded that do not say so themselves."""

    keeper: Keeper | None
    """Who stores what calls have computed."""

    def lookup(self, inputs: Inputs) -> Match:
        """How many leading tokens of a prompt could be served, at most all but the last."""

    def fill(
        self,
        cache: Any,
        inputs: Inputs,
        *,
        guard: bool,
        new_tokens: int = 0,
        at_most: int | None = None,
        chunked: bool = False,
    ) -> Served:
        """Fill an empty cache with as much as is stored of a prompt that so many new tokens are going to follow.

        With ``at_most`` with no more tokens than that, and without any pass of the model, which others wait for. With
        ``chunked`` the rest of the prompt is going to be fed in several passes.
        """

    def fill_lines(
        self,
        cache: Any,
        lines: Sequence[Line],
        *,
        copies: int,
        guard: bool,
        ids: torch.Tensor | None = None,
        chunked: bool = False,
    ) -> Served:
        """Fill an empty cache of several lines, each with padding before it, and each so many times.

        ``ids``, [lines of the cache, slots], are going to be fed, with ``chunked`` in several passes.
        """

    def arguments(self, inputs: Inputs, *, guard: bool) -> tuple[dict[str, Any], Served]:
        """The same as arguments for ``generate``: a filled cache, and what keeps the config from contradicting it."""

    def refuted(self, served: Served, why: str) -> Match:
        """Take back what was served, because the model itself computes otherwise."""

    def reported(self, report: GenerateReport) -> None:
        """Take note of what one call reused."""

    def amended(self, report: GenerateReport) -> None:
        """Take note of what was stored of a call that was reported before."""


def miss(reason: str | None) -> Match:
    """Nothing was found, or nothing may be used, and why."""
    return Match(tokens=0, entry=None, reason=reason)
