"""What an entry is worth, so that the one worth least makes room: a small protocol, and two ways to answer it.

Whatever the answer, an entry that others continue (its children) stays as long as they do, and so do pinned ones and
the one just written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from kvkeep.errors import InvalidRequestError

PolicyName = Literal["lru", "cost"]

_DAY = 86_400.0
_ATTENTION = 8192
"""Tokens before one at which looking at them costs about as much as the rest of its work (4,000 to 24,000)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An entry that could make room.

    Attributes:
        nbytes: bytes of its file.
        tokens: tokens that a prefill would feed to compute it again.
        end: number of tokens of its whole prefix.
        created: Unix time in seconds.
        used: when it was last hit, as far as is known; ``created`` if it never was. The last seconds of other
            processes are not known.
        hits: how often it was hit, as far as is known.
    """

    nbytes: int
    tokens: int
    end: int
    created: int
    used: int
    hits: int


@runtime_checkable
class EvictionPolicy(Protocol):
    """Says what keeping an entry is worth. Entries go in the order of their worth, among equals the oldest first."""

    def worth(self, candidate: Candidate, now: float) -> float:
        """The worth of an entry at a Unix time; only the order matters."""
        ...


class LeastRecentlyUsed:
    """The entry goes that was not used for the longest time."""

    def worth(self, candidate: Candidate, now: float) -> float:
        """The time of its last use."""
        return float(max(candidate.used, candidate.created))


class CostAware:
    """The entry goes whose bytes save the least: prefill work times hits, halved by every ``half_life`` unused, a byte.

    So among entries that are used alike a long prefix of a small cache outlives a short one of a large cache.

    Args:
        half_life: seconds without a hit after which an entry is worth half.
    """

    def __init__(self, half_life: float = 7 * _DAY) -> None:
        if not half_life > 0:
            raise InvalidRequestError(f"half_life is a positive number of seconds, not {half_life!r}")
        self._half_life = half_life

    def worth(self, candidate: Candidate, now: float) -> float:
        """Work that it saves, for each of its bytes."""
        work = candidate.tokens * (1 + (candidate.end - candidate.tokens / 2) / _ATTENTION)
        unused = max(0.0, now - max(candidate.used, candidate.created))
        return float((1 + candidate.hits) * work / max(1, candidate.nbytes) * 0.5 ** (unused / self._half_life))


def policy_of(given: PolicyName | EvictionPolicy) -> EvictionPolicy:
    """The policy of this name, or the one given.

    Raises:
        InvalidRequestError: it is neither.
    """
    if given == "lru":
        return LeastRecentlyUsed()
    if given == "cost":
        return CostAware()
    if isinstance(given, EvictionPolicy):
        return given
    raise InvalidRequestError(f"eviction is 'lru', 'cost' or an object with a method worth, not {given!r}")
