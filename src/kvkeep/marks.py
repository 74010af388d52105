"""Where remote objects lie, and how a lookup finds the longest stored prefix without listing anything.

An entry lies under its key. Besides, at some positions of its prefix there lies a small object, a *mark*, under the key
that an entry ending there would have; so whoever has a prompt can compute the name of the mark at any position. A mark
names an entry that goes through its position, and those that this one continues. The first mark of a name stays.

An entry of ``end`` tokens has marks

- at every multiple of 256 up to ``end``, which a lookup searches by halves;
- behind the last of them at ``end`` with its low 7, 6, ... 0 bits cleared: the way that a search bit by bit takes.

Marks are hints. What one says is only used to choose what to fetch, and a mark that is missing, stale or wrong costs a
request or a worse hit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvkeep.entry_format import EntryKey, canonical_json
from kvkeep.keys import BLOCK, prefix_hash
from kvkeep.matching import best_of
from kvkeep.prefixes import Prefix
from kvkeep.records import Identity
from kvkeep.storage.entry_chain import MAX_LINKS
from kvkeep.storage.rows import Row

Mark = tuple[Row, ...]
"""An entry, and behind it those that it continues, up to the one from token 0, with no more than a lookup needs."""

MAX_MARK = 16 << 10
"""Bytes of a mark, at most."""

WORTH = 64
"""Fewer tokens are not worth a request."""

_GUESSES = 2
_VERSION = 1
_KEY = re.compile(r"[0-9a-f]{32}")
_MAX_TRIMS = 16


def entry_name(key: str) -> str:
    """The name of an entry's object."""
    return f"v{_VERSION}/entries/{key[:2]}/{key}.safetensors"


def mark_name(key: str) -> str:
    """The name of the mark at the position that has this key."""
    return f"v{_VERSION}/marks/{key[:2]}/{key}.json"


def positions(start: int, end: int) -> list[int]:
    """Where an entry of tokens [start, end) has marks that what it continues need not have.

    >>> positions(0, 600)
    [256, 512, 576, 592, 600]
    """
    tail = {end >> bit << bit for bit in range(BLOCK.bit_length() - 1)} - {0}
    return sorted({*range((start // BLOCK + 1) * BLOCK, end + 1, BLOCK), *tail})


class Route:
    """The keys that the positions of one prefix have."""

    def __init__(self, identity: Identity, namespace: bytes, prefix: Prefix, form: str = "exact") -> None:
        self.identity = identity
        self.namespace = namespace.hex()
        self.prefix = prefix
        self.form = form
        self._chain = prefix.chain(namespace)
        self._keys: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.prefix)

    def key(self, tokens: int) -> str:
        """The key that an entry of its first ``tokens`` tokens has."""
        if tokens not in self._keys:
            first = self.prefix[:tokens]
            digest = prefix_hash(self.prefix.ids, tokens, self._chain).hex()
            self._keys[tokens] = EntryKey(
                identity=self.identity, namespace=self.namespace, prefix=digest, media=first.media, form=self.form
            ).hash
        return self._keys[tokens]

    def shared(self, mark: Mark, tokens: int) -> int:
        """How many leading tokens this prefix surely shares with what a mark behind ``tokens`` of them names."""
        whole = [link.end for link in mark if link.end <= len(self) and self.key(link.end) == link.key]
        return max([tokens, *whole])


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """An entry that may serve a prompt, and how many of its tokens as far as marks tell."""

    tokens: int
    key: str


class Search:
    """One lookup: which entries may serve a prompt with more tokens than there are already.

    With ``blocks`` of 256 tokens that are new it asks for at most ``2 + log2(blocks)`` marks to find the last boundary
    with one, and behind that for at most 2 more, or 8 where nothing that was found can be cut to what is shared. Where
    there is nothing it asks for at most 3. Where entries are gone, or cannot be cut, it looks further back: in all it
    never asks for more than :func:`most_requests`.

    Args:
        route: the prompt.
        limit: how many tokens it can use at most.
        have: how many it has.
        look: gives the mark of a key, or ``None``.
    """

    def __init__(self, route: Route, *, limit: int, have: int, look: Callable[[str], Mark | None]) -> None:
        self._route = route
        self._limit = limit
        self._have = self._best = have
        self._look = look
        self._left = most_requests(len(route), have)
        self._known = 0  # tokens up to which marks must be there, as what goes through there is known
        self._present: list[int] = []
        self._found: dict[str, int] = {}

    def run(self) -> list[Found]:
        """What was found, the most tokens first."""
        deepest = self._deepest_block()
        self._look_behind(deepest)
        back = 1
        while not self._found and deepest - back > self._have // BLOCK and self._left:
            # What goes through there cannot be cut there: perhaps something ends before.
            self._known = 0
            if self._is_there((deepest - back) * BLOCK):
                self._look_behind(deepest - back)
            back *= 2
        if self._found:
            return sorted((Found(tokens, key) for key, tokens in self._found.items()), reverse=True)
        # Another entry was first to have its mark where one may end.
        ends = sorted((tokens for tokens in self._present if self._have < tokens <= self._limit), reverse=True)
        return [Found(tokens, self._route.key(tokens)) for tokens in ends[:_GUESSES]]

    def _deepest_block(self) -> int:
        """The last block boundary with a mark, by halves; the one before what is new if there is none."""
        low, high = self._have // BLOCK, len(self._route) // BLOCK + 1
        step = low + 1  # first: is there anything new at all
        while step < high and self._left:
            if self._is_there(step * BLOCK):
                low = max(step, min(self._known // BLOCK, high - 1))
            else:
                high = step
            step = (low + high + 1) // 2 if high - low > 1 else high
        return low

    def _look_behind(self, block: int) -> None:
        """Search behind a boundary, bit by bit, as long as it can give more than what was found."""
        at = block * BLOCK
        for bit in range(BLOCK.bit_length() - 2, -1, -1):
            most = min(at + (2 << bit) - 1, self._limit)
            if most - self._best < WORTH or not self._left:
                return
            step = at + (1 << bit)
            if step <= len(self._route) and self._is_there(step):
                at = step

    def _is_there(self, tokens: int) -> bool:
        if tokens <= self._known:
            return True
        self._left -= 1
        mark = self._look(self._route.key(tokens))
        if mark is None:
            return False
        self._present.append(tokens)
        shared = self._route.shared(mark, tokens)
        self._known = max(self._known, shared)
        for at in range(len(mark)):  # the ones before it serve where it is gone
            usable, row, _ = best_of(mark[at:], shared, self._limit)
            if usable > self._have:
                self._found[row.key] = max(usable, self._found.get(row.key, 0))
                self._best = max(self._best, usable)
        return True


def most_requests(tokens: int, have: int) -> int:
    """How many marks a lookup asks for at most, whatever is there."""
    blocks = tokens // BLOCK - have // BLOCK
    return 2 * (2 + blocks.bit_length()) + 2 * (BLOCK.bit_length() - 1)


# --- as bytes ---


def encode_mark(lineage: Sequence[Row]) -> bytes:
    """A mark as bytes, of an entry's :meth:`~kvkeep.matching.PrefixIndex.lineage`."""
    links = [[row.key, row.start, row.end, [list(one) for one in row.trims], row.snapshots] for row in lineage]
    return canonical_json({"links": links}).encode()


def decode_mark(data: bytes) -> Mark:
    """The mark that bytes stand for; raises ``ValueError`` for what is none."""
    try:
        source = json.loads(data)["links"]
        links = tuple(_link(*one) for one in source)
    except (TypeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not a mark: {type(error).__name__}") from None
    if not 0 < len(links) <= MAX_LINKS or links[-1].start:
        raise ValueError("it is not a mark of a chain")
    if not all(parent.start < child.start <= parent.end for child, parent in pairwise(links)):
        raise ValueError("it is not a mark of entries that continue each other")
    return links


def _link(key: Any, start: Any, end: Any, trims: Any, snapshots: Any) -> Row:
    numbers = [start, end, *(number for pair in trims for number in pair)]
    if not isinstance(key, str) or not _KEY.fullmatch(key) or not isinstance(snapshots, bool):
        raise TypeError
    if not all(type(number) is int and 0 <= number < 1 << 32 for number in numbers) or len(trims) > _MAX_TRIMS:
        raise TypeError
    if not start < end or any(len(pair) != 2 for pair in trims):
        raise TypeError
    return Row(
        key=key,
        start=start,
        end=end,
        parent=None,
        nbytes=0,
        created=0,
        identity=_NOBODY,
        namespace="",
        prefix="",
        form="",
        attention=None,
        chain=b"",
        trims=tuple((first, window) for first, window in trims),
        snapshots=snapshots,
    )


_NOBODY = Identity(weights="", config="", adapters=None, dtypes="", tokenizer="", model="")


def keys_of(route: Route, start: int, end: int) -> Iterator[str]:
    """The keys of the positions where an entry of tokens [start, end) has its marks."""
    return (route.key(tokens) for tokens in positions(start, end))
