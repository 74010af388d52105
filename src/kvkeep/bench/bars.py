"""The bars that the comparison is held against."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from kvkeep.bench.results import Result
from kvkeep.bench.rows import Row
from kvkeep.bench.sizes import BAR_TOKENS
from kvkeep.bench.ways import REFERENCE, Kvkeep
from kvkeep.store import CacheStore

COLD = "cold prefill"


def bars_of(results: Sequence[Result]) -> list[Row]:
    """The rows on the first token, from the comparison on the first model; what was not measured says so."""
    maps = "mmap" in inspect.signature(CacheStore.__init__).parameters
    first = [one for one in results if (one.model, one.prefix_tokens) == (results[0].model, BAR_TOKENS)]
    found = {one.way: one for one in first}
    kvkeep, reference = found.get(Kvkeep.name), found.get(REFERENCE)
    if kvkeep is None or reference is None or kvkeep.first_token is None or reference.first_token is None:
        figure, words = None, f"not measured: no prefix of {BAR_TOKENS:,} tokens was compared"
    else:
        figure, words = kvkeep.ratio, _in_words(kvkeep, reference, first)
    unmapped = "not measured: this version of kvkeep reads entries and does not map them"
    return [
        Row(
            name="first token, read",
            figure=None if maps else figure,
            unit="ratio",
            bar=1.1,
            at="most",
            compared="not measured: entries are mapped here" if maps else words,
        ),
        Row(
            name="first token, mapped",
            figure=figure if maps else None,
            unit="ratio",
            bar=0.95,
            at="most",
            compared=words if maps else unmapped,
        ),
    ]


def _in_words(kvkeep: Result, reference: Result, all_ways: Sequence[Result]) -> str:
    """Both sides, and how much sooner the first token comes than without any cache."""
    ours, theirs = kvkeep.first_token or 0.0, reference.first_token or 0.0
    cold = next((one.first_token for one in all_ways if one.way == COLD), None)
    sooner = "" if cold is None else f"; {cold / ours:.1f}x sooner than without a cache ({cold * 1e3:.0f} ms)"
    same = "the same tokens" if kvkeep.same_tokens else "OTHER TOKENS"
    return (
        f"time of kv.generate to its first token, lookup, read and verification included, page cache warm "
        f"({ours * 1e3:.1f} ms) to model.generate from a cache shared in memory ({theirs * 1e3:.1f} ms), "
        f"{same}{sooner}: "
        f"{kvkeep.prefix_tokens:,} tokens, then {kvkeep.prompt_tokens - kvkeep.prefix_tokens} new ones; "
        f"{kvkeep.model}, {kvkeep.weights}, float32"
    )
