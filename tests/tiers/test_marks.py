"""The longest stored prefix by marks: what is found, and in how many requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import ceil, log2

import pytest
from entry_drafts import IDENTITY

from kvkeep.keys import BLOCK, TokenIds, namespace_digest
from kvkeep.marks import Found, Mark, Route, Search, decode_mark, encode_mark, keys_of, most_requests, positions
from kvkeep.prefixes import Prefix
from kvkeep.storage.rows import Row

NAMESPACE = namespace_digest("")
FULL = ((0, 0),)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def route(ids: Sequence[int]) -> Route:
    return Route(IDENTITY, NAMESPACE, Prefix(TokenIds.of(ids)))


class Marks:
    """Marks as a remote keeps them: the first of a name stays."""

    def __init__(self) -> None:
        self.held: dict[str, Mark] = {}
        self.asked = 0

    def put(self, ids: Sequence[int], *, trims: tuple[tuple[int, int], ...] = FULL, snapshots: bool = False) -> str:
        """An entry of these ids from token 0."""
        own = route(ids)
        return self.put_chain(ids, [(0, len(ids), trims, snapshots)], own)

    def put_chain(self, ids: Sequence[int], links: Sequence[tuple], own: Route | None = None) -> str:
        own = own or route(ids)
        lineage: list[Row] = []
        for start, end, trims, snapshots in links:
            row = decode_mark(encode_mark([_row(own.key(end), start, end, trims, snapshots), *lineage]))[0]
            lineage.insert(0, row)
            for key in keys_of(own, start, end):
                self.held.setdefault(key, tuple(lineage))
        return lineage[0].key

    def look(self, key: str) -> Mark | None:
        self.asked += 1
        return self.held.get(key)

    def search(self, ids: Sequence[int], have: int = 0) -> list[Found]:
        self.asked = 0
        found = Search(route(ids), limit=len(ids) - 1, have=have, look=self.look).run()
        assert self.asked <= most_requests(len(ids), have)
        return found


def _row(key: str, start: int, end: int, trims: tuple[tuple[int, int], ...], snapshots: bool) -> Row:
    return Row(
        key=key,
        start=start,
        end=end,
        parent=None,
        nbytes=1,
        created=1,
        identity=IDENTITY,
        namespace="",
        prefix="",
        form="exact",
        attention=None,
        chain=b"",
        trims=trims,
        snapshots=snapshots,
    )


@pytest.mark.parametrize(("end", "where"), [(1, [1]), (255, [128, 192, 224, 240, 248, 252, 254, 255]), (256, [256])])
def test_where_marks_lie(end: int, where: list[int]) -> None:
    assert positions(0, end) == where


def test_what_a_chain_adds_is_behind_its_start() -> None:
    assert positions(300, 900) == [512, 768, 896, 900]


@pytest.mark.parametrize("stored", [256, 300, 511, 512, 1900, 2048, 8192, 8191, 31_999])
@pytest.mark.parametrize("more", [1, 40, 3000])
def test_a_stored_prefix_is_found_within_the_bound(stored: int, more: int) -> None:
    marks, ids = Marks(), tokens(1, stored)
    key = marks.put(ids)
    prompt = ids + tokens(2, more)
    assert marks.search(prompt) == [Found(stored, key)]
    # Looking behind its end takes a few more where so many tokens follow that another entry could have more of them.
    behind = min(len(prompt) - 1, stored // BLOCK * BLOCK + BLOCK - 1) - stored
    assert marks.asked <= 2 + log2(len(prompt) // BLOCK) + (2 if behind >= 64 else 0)


def test_what_is_not_there_takes_few_requests() -> None:
    marks = Marks()
    marks.put(tokens(1, 5000))
    assert marks.search(tokens(2, 32_000)) == []
    assert marks.asked <= 3
    assert marks.search(tokens(2, 100)) == []
    assert marks.asked <= 2
    assert marks.search(tokens(2, 60)) == []
    assert marks.asked == 0


def test_short_prefixes_are_found_to_the_token() -> None:
    for stored in (64, 100, 129, 255):
        marks, ids = Marks(), tokens(1, stored)
        key = marks.put(ids)
        assert marks.search(ids + tokens(2, 30)) == [Found(stored, key)]
        assert marks.asked <= 3


@pytest.mark.parametrize("shared", [256, 700, 1024, 1900, 4000])
def test_what_goes_on_otherwise_is_cut(shared: int) -> None:
    marks, ids = Marks(), tokens(1, 5000)
    key = marks.put(ids)
    found = marks.search(ids[:shared] + tokens(2, 3000))
    assert found == [Found(shared // BLOCK * BLOCK, key)]  # by marks; the ids of the entry then tell more
    assert marks.asked <= 2 + log2((shared + 3000) // BLOCK) + 2


def test_a_prompt_that_is_wholly_stored() -> None:
    marks, ids = Marks(), tokens(1, 5000)
    key = marks.put(ids)
    assert marks.search(ids) == [Found(4999, key)]
    assert marks.asked <= 2 + log2(5000 // BLOCK)


def test_what_is_here_is_not_asked_for_again() -> None:
    marks, ids = Marks(), tokens(1, 5000)
    marks.put(ids)
    assert marks.search(ids + tokens(2, 100), have=5000) == []
    assert marks.asked <= 5
    assert marks.search(ids[:1000] + tokens(2, 8000), have=1000) == []
    assert marks.asked <= 6


def test_the_one_with_most_is_found_behind_one_that_was_first() -> None:
    marks, shared = Marks(), tokens(1, 1800)
    marks.put(shared + tokens(2, 3000))
    better = marks.put(shared + tokens(3, 150))
    found = marks.search(shared + tokens(3, 150) + tokens(4, 20))
    assert found[0] == Found(1950, better)


def test_state_that_cannot_be_cut_is_found_by_its_end() -> None:
    marks, ids = Marks(), tokens(1, 5000)
    longer = marks.put(ids, trims=(), snapshots=True)
    shorter = marks.put(ids[:1000], trims=(), snapshots=True)
    assert marks.search(ids + tokens(2, 100)) == [Found(5000, longer)]
    assert marks.asked <= 2 + log2(5100 // BLOCK)
    # Of what goes through 1024 nothing can be used; what ends at 1000 is found by its own marks.
    assert marks.search(ids[:1100] + tokens(2, 500)) == [Found(1000, shorter)]
    # What goes through 256 has its mark there, and an entry that ends there may have had none: it is worth a look.
    assert marks.search(ids[:400] + tokens(2, 500)) == [Found(256, route(ids).key(256))]


def test_links_of_a_chain_are_found_by_those_that_continue_them() -> None:
    marks, ids = Marks(), tokens(1, 3000)
    own = route(ids)
    marks.put_chain(ids, [(0, 1000, (), True), (1000, 1500, (), True), (1500, 3000, (), True)])
    for prompt, best in ((3000, 3000), (1600, 1500), (1200, 1000)):
        assert marks.search(ids[:prompt] + tokens(2, 600))[0] == Found(best, own.key(best))


def test_gaps_cost_tokens_and_never_more_requests() -> None:
    chance = random.Random(5)
    for _ in range(60):
        marks, ids = Marks(), tokens(1, 6000)
        ends = chance.sample(range(64, 6000), 4)
        for end in ends:
            marks.put(ids[:end], snapshots=chance.random() < 0.5)
        for key in chance.sample(sorted(marks.held), len(marks.held) // 3):
            del marks.held[key]
        prompt = ids[: chance.randrange(64, 6000)] + tokens(9, 500)
        for found in marks.search(prompt):
            assert found.tokens < len(prompt)
        assert marks.asked <= 2 * (2 + ceil(log2(len(prompt) // BLOCK + 1))) + 16


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"links":[]}',
        b'{"links":[[1,2,3,[],false]]}',
        b'{"links":[["' + b"a" * 32 + b'",5,9,[],false]]}',
        b'{"links":[["' + b"a" * 32 + b'",0,9,[[1]],false]]}',
        b'{"links":[["' + b"a" * 32 + b'",0,-9,[],false]]}',
        b'{"links":[["' + b"a" * 32 + b'",0,true,[],false]]}',
        b'{"links":[["../../../../../../../../../etc/p",0,9,[],false]]}',
        b"[" * 5000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_mark_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"mark|Expecting|decode"):
        decode_mark(data)
