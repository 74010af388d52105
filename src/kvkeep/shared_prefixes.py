"""The beginnings that several prompts of one job share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvkeep.keys import TokenIds, common_prefix


def shared_prefixes(prompts: Sequence[TokenIds], min_tokens: int) -> list[tuple[int, int]]:
    """The beginnings of at least ``min_tokens`` tokens that two prompts or more share and then part, or end.

    Returns:
        For each (number of a prompt that begins so, tokens), the shorter ones first.

    >>> prompts = [TokenIds.of(ids) for ids in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [7, 8])]
    >>> shared_prefixes(prompts, 2)
    [(2, 2), (0, 3)]
    """
    # In the order of their bytes: what shares the most lies side by side.
    order = sorted(range(len(prompts)), key=lambda number: prompts[number].int32)
    found: dict[bytes, tuple[int, int]] = {}
    for one, two in pairwise(order):
        tokens = common_prefix(prompts[one].int32, prompts[two].int32)
        if tokens >= max(1, min_tokens):
            found.setdefault(prompts[one].int32[: 4 * tokens], (one, tokens))
    return sorted(found.values(), key=lambda item: (item[1], item[0]))
