"""Which stored entries share the most with a prompt, by digests alone, and how much of one can be used.

A prompt and an entry share as many blocks of 256 tokens as their chains of digests have in common from the start. The
entries of one kind lie in the order of their packed chains, so those that share the most with a prompt are around the
place where the prompt itself would lie, and to both sides they share less and less. Any entry may come or go at any
time; nothing is assumed of which lengths are there.

What is shared within a block cannot be told from digests, except whether an entry is wholly a prefix of the prompt.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain as chain_of
from itertools import islice
from operator import itemgetter

from kvkeep.entry_format import EntryMeta, Media
from kvkeep.keys import BLOCK, DIGEST_SIZE, common_prefix, prefix_hash
from kvkeep.prefixes import Prefix, before_tokens, media_before, with_media
from kvkeep.records import Identity
from kvkeep.storage.entry_chain import MAX_LINKS
from kvkeep.storage.rows import Row, has_snapshots, trims

NEAR = 64
"""How many rows of a depth are offered on the chance that they share some tokens of one more block."""

ALIKE = 4
"""How many of these at most go on with the same block, and so share the same tokens of it; the shortest are taken."""

_Group = tuple[str, str, str, str, tuple[int, int] | None, tuple[Media, ...]]
_Place = tuple[bytes, str, Row]  # packed chain from token 0, with its media, key, row


class PrefixIndex:
    """Rows, ready to be looked up by prefix. Safe to use from several threads, also while it is iterated over.

    A row that starts behind token 0 is found only while the rows of all its parents are here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}
        self._paths: dict[str, bytes] = {}
        self._children: dict[str, set[str]] = {}
        self._shelves: dict[_Group, list[_Place]] = {}  # neither this nor a list in it changes: they are replaced

    # --- contents ---

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> Row | None:
        """The row of a key."""
        return self._rows.get(key)

    def rows(self) -> list[Row]:
        """All rows."""
        return list(self._rows.values())

    def is_whole(self, key: str) -> bool:
        """Whether the row of a key is here, and those of all that it continues."""
        return key in self._paths

    def lineage(self, row: Row) -> list[Row]:
        """A row, and behind it those that it continues, up to the one from token 0; none if one of them is gone."""
        links: list[Row] = []
        link: Row | None = row
        while link is not None and len(links) < MAX_LINKS:
            links.append(link)
            if link.parent is None:
                return links
            link = self._rows.get(link.parent)
        return []

    def add(self, row: Row) -> None:
        """Add a row, in the place of another with its key."""
        self._update([row], [])

    def discard(self, key: str) -> None:
        """Remove the row of a key, if it is here."""
        self._update([], [key])

    def sync(self, rows: Iterable[Row]) -> None:
        """Hold exactly these rows; one that was here before, as the same object, costs next to nothing."""
        wanted = {row.key: row for row in rows}
        gone = self._rows.keys() - wanted.keys()
        self._update([row for key, row in wanted.items() if self._rows.get(key) is not row], gone)

    # --- lookups ---

    def candidates(
        self,
        identity: Identity,
        namespace: str,
        prefix: Prefix,
        chain: Sequence[bytes],
        *,
        form: str = "exact",
        tp: tuple[int, int] | None = None,
        near: int = NEAR,
    ) -> Iterator[tuple[int, list[Row]]]:
        """The rows that may serve a prompt, the deepest shared block first.

        Args:
            identity: what the prompt's KV would be computed with.
            namespace: digest of the namespace, 32 hex digits.
            prefix: the prompt.
            chain: its :func:`~kvkeep.keys.prefix_chain`.
            form: how the entries are stored.
            tp: tensor-parallel (size, rank).
            near: how many rows of a depth to give beyond those that are wholly a prefix of the prompt; at most
                ``ALIKE`` of them go on with the same block.

        Yields:
            (tokens, rows): these rows share the first ``tokens`` ids with the prompt, and the media that begin among
            them: a multiple of 256, and fewer than 256 more. First those that are wholly a prefix of the prompt, the
            longest first, and all of them; then at most ``near`` others. The last tokens are 0: no whole block shared.
        """
        group = (identity.model, identity.tokenizer, namespace, form, tp, prefix.before)
        for tokens, whole, others in _around(self._shelves.get(group, []), prefix, chain):
            yield tokens, whole + list(islice(others, near))

    def strangers(self, identity: Identity, prefix: Prefix, chain: Sequence[bytes]) -> list[Row]:
        """Rows that share tokens with a prompt but were computed with something else, the most shared first."""
        found: list[tuple[int, str, Row]] = []
        for group, places in self._shelves.items():
            if group[:2] == (identity.model, identity.tokenizer) or group[-1] != prefix.before:
                continue
            nearest = next(_around(places, prefix, chain), None)  # what shares less explains less
            if nearest is not None:
                tokens, whole, others = nearest
                row = whole[0] if whole else next(others)
                found.append((row.end if whole else tokens, row.key, row))
        return [row for tokens, _, row in sorted(found, key=itemgetter(0, 1), reverse=True) if tokens]

    def has_other_start(self, identity: Identity, namespace: str, before: tuple[Media, ...]) -> bool:
        """Whether anything is stored for this identity and namespace behind something else before token 0."""
        wanted = (identity.model, identity.tokenizer, namespace)
        return any(group[:3] == wanted and group[-1] != before for group in self._shelves)

    def has_namespace(self, namespace: str) -> bool:
        """Whether any entry is in the namespace with this digest."""
        return any(group[2] == namespace for group in self._shelves)

    # --- inside ---

    def _update(self, add: Iterable[Row], discard: Iterable[str]) -> None:
        with self._lock:
            shelves: dict[_Group, list[_Place]] = {}
            for key in discard:
                self._take_out(key, shelves)
            for row in add:
                self._take_out(row.key, shelves)
                self._rows[row.key] = row
                if row.parent is not None:
                    self._children.setdefault(row.parent, set()).add(row.key)
                self._place(row.key, shelves)
            kept = {group: places for group, places in (self._shelves | shelves).items() if places}
            self._shelves = kept

    def _take_out(self, key: str, shelves: dict[_Group, list[_Place]]) -> None:
        row = self._rows.get(key)
        if row is None:
            return
        waiting = [key]
        while waiting:  # its children cannot be found without it
            name = waiting.pop()
            path = self._paths.pop(name, None)
            if path is not None:
                shelf = self._shelf(self._rows[name], shelves)
                del shelf[bisect_left(shelf, (path, name))]
                waiting.extend(self._children.get(name, ()))
        del self._rows[key]
        if row.parent is not None:
            siblings = self._children[row.parent]
            siblings.discard(key)
            if not siblings:
                del self._children[row.parent]

    def _place(self, key: str, shelves: dict[_Group, list[_Place]]) -> None:
        """Put a row where lookups find it, if its parents are there, and then the children that waited for it."""
        waiting = [key]
        while waiting:
            row = self._rows[waiting.pop()]
            path = self._path(row)
            if path is not None:
                self._paths[row.key] = path
                insort(self._shelf(row, shelves), (path, row.key, row))
                waiting.extend(self._children.get(row.key, ()))

    def _path(self, row: Row) -> bytes | None:
        """The packed chain from token 0 on, as far as the parents are here."""
        if row.parent is None:
            return _with_media(row)
        parent, path = self._rows.get(row.parent), self._paths.get(row.parent)
        if parent is None or path is None or _group(parent) != _group(row):
            return None
        if not parent.start < row.start <= parent.end:
            return None
        if not self.lineage(row):
            return None
        return path[: row.start // BLOCK * DIGEST_SIZE] + _with_media(row)

    def _shelf(self, row: Row, shelves: dict[_Group, list[_Place]]) -> list[_Place]:
        """A copy of the group's list, to be changed and published at the end."""
        group = _group(row)
        if group not in shelves:
            shelves[group] = list(self._shelves.get(group, ()))
        return shelves[group]


def _group(row: Row) -> _Group:
    return row.identity.model, row.identity.tokenizer, row.namespace, row.form, row.tp, before_tokens(row.media)


def _with_media(row: Row) -> bytes:
    """A row's packed chain, by which rows with other media are other rows."""
    if not row.media:
        return row.chain
    chain = [row.chain[at : at + DIGEST_SIZE] for at in range(0, len(row.chain), DIGEST_SIZE)]
    return b"".join(with_media(chain, row.media, row.start // BLOCK + 1))


def _around(
    places: list[_Place], prefix: Prefix, chain: Sequence[bytes]
) -> Iterator[tuple[int, list[Row], Iterator[Row]]]:
    """Walk from the prompt's own place outwards: shared tokens, rows that are wholly a prefix of it, other rows."""
    path = b"".join(with_media(chain[1:], prefix.media, 1))
    low = high = bisect_left(places, (path,))
    while low > 0 or high < len(places):
        ends = [at for at in (low - 1, high) if 0 <= at < len(places)]
        depth = max(common_prefix(places[at][0], path, DIGEST_SIZE) for at in ends)
        shared = path[: depth * DIGEST_SIZE]
        below = bisect_left(places, (shared,), hi=low)
        above = _behind(places, shared, high, len(places))
        whole = _whole(places, below, shared, prefix, chain)
        keys = {row.key for row in whole}
        others = chain_of(_unlike(places, below, low, len(shared)), _unlike(places, high, above, len(shared)))
        yield depth * BLOCK, whole, (row for row in others if row.key not in keys)
        low, high = below, above


def _unlike(places: list[_Place], begin: int, end: int, shared: int) -> Iterator[Row]:
    """Of the rows [begin, end), whose paths share so many bytes, those without a further block, and a few a block."""
    while begin < end:
        path = places[begin][0]
        if len(path) == shared:
            yield places[begin][2]
            begin += 1
            continue
        stop = _behind(places, path[: shared + DIGEST_SIZE], begin, end)
        yield from (place[2] for place in islice(places, begin, min(stop, begin + ALIKE)))
        begin = stop


def _behind(places: list[_Place], start: bytes, begin: int, end: int) -> int:
    """The end of the rows from ``begin`` on whose path starts so."""
    return bisect_right(places, start, lo=begin, hi=end, key=lambda place: place[0][: len(start)])


def _whole(places: list[_Place], at: int, shared: bytes, prefix: Prefix, chain: Sequence[bytes]) -> list[Row]:
    """Of the rows from ``at`` on that have no more than the shared blocks, those whose rest is the prompt's too."""
    hashes: dict[int, str] = {}
    found = []
    for place in islice(places, at, None):
        if place[0] != shared:
            break
        row = place[2]
        if row.end <= len(prefix):
            if row.end not in hashes:
                hashes[row.end] = prefix_hash(prefix.ids, row.end, chain).hex()
            if hashes[row.end] == row.prefix and row.media == media_before(prefix.media, row.end):
                found.append(row)
    return sorted(found, key=lambda row: row.end, reverse=True)


def usable(
    trims: Iterable[tuple[int, int]], snapshots: bool, end: int, common: int, limit: int
) -> tuple[int, str | None]:
    """How many leading tokens of an entry a prompt can use.

    Args:
        trims: (first stored row, window or 0) of its layers with rows; see :class:`~kvkeep.storage.rows.Row`.
        snapshots: whether it holds state that is valid at ``end`` only.
        end: the entry's tokens.
        common: how many leading ids it shares with the prompt.
        limit: how many tokens the prompt can use at most.

    Returns:
        The tokens, and why it is 0 although something is shared: a reason for a :class:`~kvkeep.Match`.
    """
    tokens = min(common, limit)
    if tokens >= end:
        return end, None
    if tokens <= 0:
        return 0, None
    obstacle: str | None = None
    if snapshots:
        obstacle = "its state is valid at its end alone"
    for first, window in trims:
        # The next token attends to window - 1 tokens before it; more tokens never need an earlier row.
        if first > max(0, tokens - (window - 1) if window else 0):
            kind = f"sliding layers (window {window})" if window else "full layers"
            obstacle = f"its {kind} keep no rows before token {first}"
    if obstacle is None:
        return tokens, None
    return 0, f"trim: the prompt can use {tokens} of the entry's {end} tokens, and {obstacle}"


def joined_trims(lineage: Sequence[Row]) -> tuple[tuple[int, int], ...]:
    """The :attr:`~kvkeep.storage.rows.Row.trims` of an entry together with what it continues.

    Where layers of one window begin at different rows, the fewest rows count.
    """
    first: dict[int, int] = {}
    for row in reversed(lineage):
        own: dict[int, int] = {}
        for begin, window in row.trims:
            own[window] = max(begin, own.get(window, 0))
        for window, begin in own.items():
            first[window] = min(begin, first.get(window, begin)) if begin == row.start else begin
    return tuple((begin, window) for window, begin in first.items())


def best_of(
    lineage: Sequence[Row], common: int, limit: int, *, rows_alone: bool = False
) -> tuple[int, Row, str | None]:
    """How many leading tokens a prompt can use of an entry or of one that it continues, and which that is.

    Args:
        lineage: see :meth:`PrefixIndex.lineage`.
        common: how many leading ids the entry shares with the prompt.
        limit: how many tokens the prompt can use at most.
        rows_alone: whether state that is valid at the end of an entry alone does not matter, because it comes from
            elsewhere.

    Returns:
        The tokens, the row, and why it is 0 although something is shared, as :func:`usable`.
    """
    best, found, why = 0, lineage[0], None
    for at, row in enumerate(lineage):
        trims = joined_trims(lineage[at:]) if row.start else row.trims
        tokens, obstacle = usable(trims, row.snapshots and not rows_alone, row.end, common, limit)
        common = min(common, row.start)  # behind that, what it continues may go on otherwise
        why = why or obstacle
        if tokens and tokens >= best:  # of two that give as many, the one with less to open
            best, found = tokens, row
    return best, found, None if best else why


def orphans(parents: Mapping[str, str | None], is_there: Callable[[str], bool]) -> set[str]:
    """The keys of entries that nothing can use: what they continue, directly or through others, is gone.

    Args:
        parents: the key of each entry's parent, or ``None``, by its own key.
        is_there: says of a key that is not among them whether its file is there all the same.
    """

    def is_whole(key: str) -> bool:
        for _ in range(MAX_LINKS):
            if key not in parents:
                return is_there(key)
            parent = parents[key]
            if parent is None:
                return True
            key = parent
        return False

    return {key for key in parents if not is_whole(key)}


def can_trim(meta: EntryMeta, tokens: int) -> bool:
    """Whether the first ``tokens`` tokens of an entry, and at least one, can be used without the rest of it."""
    return tokens > 0 and usable(trims(meta), has_snapshots(meta), meta.end, tokens, tokens)[0] > 0
