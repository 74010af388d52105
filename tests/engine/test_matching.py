from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkeep import matching
from kvkeep.keys import (
    BLOCK,
    DIGEST_SIZE,
    TokenIds,
    digest_fields,
    model_digest,
    namespace_digest,
    prefix_chain,
    prefix_hash,
)
from kvkeep.matching import PrefixIndex, best_of, usable
from kvkeep.prefixes import Prefix
from kvkeep.records import Identity
from kvkeep.storage.entry_chain import MAX_LINKS
from kvkeep.storage.rows import Row

NAMESPACE = namespace_digest("")


@pytest.fixture(autouse=True)
def _all_of_a_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups give every row, also those that go on with the same block."""
    if "alike" not in request.node.name:
        monkeypatch.setattr(matching, "ALIKE", 1_000_000)


def make_identity(weights: str = "a", tokenizer: str = "t") -> Identity:
    w, c, d, t = (digest_fields("test", part.encode()).hex() for part in (weights, "config", "dtypes", tokenizer))
    return Identity(weights=w, config=c, adapters=None, dtypes=d, tokenizer=t, model=model_digest(w, c, None, d))


A, B = make_identity("a"), make_identity("b")


def make_row(
    ids: Sequence[int],
    *,
    identity: Identity = A,
    namespace: bytes = NAMESPACE,
    start: int = 0,
    parent: str | None = None,
    form: str = "exact",
    salt: int = 0,
) -> Row:
    tokens = TokenIds.of(ids)
    chain = prefix_chain(tokens, namespace)
    prefix = prefix_hash(tokens, len(tokens), chain)
    name = [identity.model.encode(), identity.tokenizer.encode(), namespace, form.encode(), prefix, bytes([salt])]
    return Row(
        key=digest_fields("test key", *name).hex(),
        start=start,
        end=len(tokens),
        parent=parent,
        nbytes=1,
        created=0,
        identity=identity,
        namespace=namespace.hex(),
        prefix=prefix.hex(),
        form=form,
        attention=None,
        chain=b"".join(chain[start // BLOCK + 1 :]),
        trims=((start, 0),),
        snapshots=False,
    )


def look_up(
    index: PrefixIndex, ids: Sequence[int], *, identity: Identity = A, namespace: bytes = NAMESPACE, **options: object
) -> list[tuple[int, list[Row]]]:
    tokens = TokenIds.of(ids)
    chain = prefix_chain(tokens, namespace)
    return list(index.candidates(identity, namespace.hex(), Prefix(tokens), chain, **options))  # type: ignore[arg-type]


def test_the_deepest_shared_block_comes_first_and_whole_prefixes_lead():
    one, two, three = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    deep = make_row(one + two + three + [7, 7])
    whole_long, whole_short, apart = make_row([*one, 5, 6]), make_row([*one, 5]), make_row([*one, 8])
    nothing = make_row([9] * 300)
    index = PrefixIndex()
    for row in (nothing, whole_short, deep, apart, whole_long):
        index.add(row)

    found = look_up(index, one + two + [4] * BLOCK)
    assert [(tokens, {r.key for r in rows}) for tokens, rows in found] == [
        (2 * BLOCK, {deep.key}),
        (BLOCK, {whole_long.key, whole_short.key, apart.key}),
        (0, {nothing.key}),
    ]
    tokens, rows = look_up(index, [*one, 5, 6, 7])[0]
    assert (tokens, rows[:2]) == (BLOCK, [whole_long, whole_short])
    assert {row.key for row in rows[2:]} == {deep.key, apart.key}


def test_other_models_tokenizers_namespaces_and_forms_are_no_candidates():
    ids = [1] * 600
    index = PrefixIndex()
    tenant = namespace_digest("tenant")
    rows = [
        make_row(ids),
        make_row(ids, identity=B),
        make_row(ids, identity=make_identity("a", "u")),
        make_row(ids, namespace=tenant),
        make_row(ids, form="int8"),
    ]
    for row in rows:
        index.add(row)
    assert look_up(index, ids) == [(512, [rows[0]])]
    assert look_up(index, ids, identity=B) == [(512, [rows[1]])]
    assert look_up(index, ids, namespace=tenant) == [(512, [rows[3]])]
    assert look_up(index, ids, form="int8") == [(512, [rows[4]])]
    assert look_up(index, ids, tp=(2, 0)) == []


def test_no_more_than_near_rows_of_a_depth_beside_the_whole_ones():
    index = PrefixIndex()
    index.sync(make_row([n] * 300) for n in range(100))
    whole = [make_row([500] * n) for n in range(1, 31)]
    for row in whole:
        index.add(row)
    ((tokens, rows),) = look_up(index, [500] * 40, near=5)
    assert tokens == 0
    assert rows[:30] == whole[::-1]
    assert len(rows) == 35


def test_a_stretch_counts_only_while_its_parents_are_here():
    ids = list(range(1000))
    parent = make_row(ids[:700])
    child = make_row(ids[:900], start=600, parent=parent.key)
    grandchild = make_row(ids, start=900, parent=child.key)
    index = PrefixIndex()
    for row in (grandchild, child):
        index.add(row)
    assert look_up(index, ids) == []
    index.add(parent)
    assert look_up(index, ids) == [(768, [grandchild, child]), (512, [parent])]
    index.discard(child.key)
    assert look_up(index, ids) == [(512, [parent])]
    assert len(index) == 2
    index.add(child)
    index.discard(parent.key)
    assert look_up(index, ids) == []
    assert index.get(grandchild.key) is grandchild


@pytest.mark.parametrize("flaw", ["too short", "another model", "itself", "a circle"])
def test_a_stretch_with_an_impossible_parent_is_never_found(flaw: str):
    ids = list(range(1000))
    index = PrefixIndex()
    if flaw == "too short":
        parent = make_row(ids[:500])
    elif flaw == "another model":
        parent = make_row(ids[:600], identity=B)
    else:
        parent = make_row(ids[:700], start=600, parent="0" * 32)
    child = make_row(ids, start=600, parent=parent.key)
    if flaw == "itself":
        child = make_row(ids, start=600, parent=child.key)
    if flaw == "a circle":
        parent = make_row(ids[:700], start=600, parent=child.key)
    index.add(parent)
    index.add(child)
    assert child not in [row for _, rows in look_up(index, ids) for row in rows]


def test_a_row_replaces_the_one_with_its_key_and_sync_holds_exactly_what_is_given():
    ids = list(range(900))
    parent, whole = make_row(ids[:600]), make_row(ids)
    stretch = make_row(ids, start=600, parent=parent.key)
    assert stretch.key == whole.key
    index = PrefixIndex()
    index.sync([parent, stretch])
    assert look_up(index, ids)[0] == (768, [stretch])
    index.add(whole)
    assert look_up(index, ids)[0] == (768, [whole])
    index.discard(parent.key)
    assert look_up(index, ids) == [(768, [whole])]
    index.sync([parent, stretch])
    assert look_up(index, ids) == [(768, [stretch]), (512, [parent])]
    index.sync([])
    assert (index.rows(), look_up(index, ids)) == ([], [])


def test_changes_do_not_disturb_a_lookup_in_progress():
    ids = list(range(2000))
    rows = [make_row(ids[:n]) for n in range(100, 2001, 100)]
    index = PrefixIndex()
    index.sync(rows)
    tokens = TokenIds.of(ids)
    seen = []
    for _, found in index.candidates(A, NAMESPACE.hex(), Prefix(tokens), prefix_chain(tokens, NAMESPACE)):
        seen += found
        index.sync([make_row([9] * 300)])
    assert seen == rows[::-1]
    assert len(index) == 1


def test_strangers_are_those_of_other_identities_that_share_the_most():
    ids = list(range(900))
    index = PrefixIndex()
    near, far, short = (
        make_row(ids, identity=B),
        make_row(ids[:600], identity=make_identity("c")),
        make_row([5, 6], identity=B),
    )
    other_tenant = make_row(ids, identity=B, namespace=namespace_digest("x"))
    own = make_row(ids)
    reworded = make_row([7] * 300, identity=make_identity("a", "u"))
    index.sync([near, far, short, other_tenant, own, reworded])

    def strangers(prompt: list[int]) -> list[Row]:
        tokens = TokenIds.of(prompt)
        return index.strangers(A, Prefix(tokens), prefix_chain(tokens, NAMESPACE))

    assert strangers([*ids, 1]) == [near, far]
    assert strangers(ids[:700]) == [far, near]  # 600 tokens, told by its hash, and two blocks
    assert strangers([5, 6, 7]) == [short]  # told by its hash: it shares no whole block
    assert strangers([7] * 300) == [reworded]
    assert strangers([8, 9]) == []


# --- against brute force ---

BLOCKS = st.lists(st.sampled_from([[1] * BLOCK, [2] * BLOCK]), max_size=4)
TAILS = st.lists(st.sampled_from([1, 2]), max_size=3)
SEQUENCES = st.builds(lambda blocks, tail: [*itertools.chain.from_iterable(blocks), *tail], BLOCKS, TAILS).filter(bool)


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Model(RuleBasedStateMachine):
    """PrefixIndex beside a dictionary of token lists, over stretches, evictions in any order, and two identities."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.stored: dict[str, tuple[Row, list[int]]] = {}

    @rule(ids=SEQUENCES, identity=st.sampled_from([A, B]))
    def add_whole(self, ids: list[int], identity: Identity) -> None:
        row = make_row(ids, identity=identity)
        self.stored[row.key] = (row, ids)
        self.index.add(row)

    @rule(data=st.data(), more=SEQUENCES)
    def add_stretch(self, data: st.DataObject, more: list[int]) -> None:
        if not self.stored:
            return
        parent, before = data.draw(st.sampled_from(sorted(self.stored.values(), key=lambda pair: pair[0].key)))
        start = data.draw(st.integers(1, len(before)))
        ids = before[:start] + more
        row = make_row(ids, identity=parent.identity, start=start, parent=parent.key)
        if row.key != parent.key:
            self.stored[row.key] = (row, ids)
            self.index.add(row)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([*sorted(self.stored), "f" * 32]))
        self.stored.pop(key, None)
        self.index.discard(key)

    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        kept = data.draw(st.lists(st.sampled_from(sorted(self.stored)), unique=True)) if self.stored else []
        self.stored = {key: self.stored[key] for key in kept}
        self.index.sync([row for row, _ in self.stored.values()])

    def is_found(self, row: Row, seen: frozenset[str] = frozenset()) -> bool:
        if row.parent is None:
            return True
        if row.key in seen or row.parent not in self.stored or len(seen) == MAX_LINKS - 1:
            return False
        parent = self.stored[row.parent][0]
        return parent.start < row.start <= parent.end and self.is_found(parent, seen | {row.key})

    @rule(prompt=SEQUENCES, identity=st.sampled_from([A, B]))
    def look_up(self, prompt: list[int], identity: Identity) -> None:
        expected: dict[int, set[str]] = {}
        whole: dict[int, list[int]] = {}
        for row, ids in self.stored.values():
            if row.identity == identity and self.is_found(row):
                tokens = shared(ids, prompt)
                depth = tokens // BLOCK * BLOCK
                expected.setdefault(depth, set()).add(row.key)
                if tokens == len(ids):
                    whole.setdefault(depth, []).append(len(ids))
        found = look_up(self.index, prompt, identity=identity, near=1000)
        assert {tokens: {row.key for row in rows} for tokens, rows in found} == expected
        assert [tokens for tokens, _ in found] == sorted(expected, reverse=True)
        for tokens, rows in found:
            ends = sorted(whole.get(tokens, []), reverse=True)
            assert [row.end for row in rows[: len(ends)]] == ends
            assert len({row.key for row in rows}) == len(rows)

    @invariant()
    def holds_the_same_rows(self) -> None:
        assert {row.key for row in self.index.rows()} == set(self.stored)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


# --- usable ---


def test_a_full_layer_can_be_trimmed_anywhere():
    assert usable([(0, 0)], False, 1000, 700, 900) == (700, None)
    assert usable([(0, 0)], False, 1000, 2000, 900) == (900, None)
    assert usable([(0, 0)], False, 1000, 1000, 1000) == (1000, None)
    assert usable([(0, 0)], False, 1000, 0, 900) == (0, None)


def test_a_window_can_be_trimmed_as_far_as_its_rows_go_back():
    assert usable([(488, 512)], False, 1000, 999, 1000) == (999, None)  # rows 488 to 998 are the 511 before token 999
    assert usable([(488, 512)], False, 1000, 998, 1000)[0] == 0
    assert usable([(0, 512)], False, 500, 3, 499) == (3, None)


def test_what_cannot_be_trimmed_says_why():
    assert usable([(0, 0), (489, 512)], False, 1000, 999, 1000) == (
        0,
        "trim: the prompt can use 999 of the entry's 1000 tokens, "
        "and its sliding layers (window 512) keep no rows before token 489",
    )
    assert usable([(0, 0)], True, 1000, 1200, 999) == (
        0,
        "trim: the prompt can use 999 of the entry's 1000 tokens, and its state is valid at its end alone",
    )
    assert usable([(0, 0)], True, 1000, 1200, 1000) == (1000, None)
    assert usable([(3, 0)], False, 1000, 999, 1000)[0] == 0


@st.composite
def lineages(draw: st.DrawFn) -> list[Row]:
    """An entry and what it continues, each with rows of a full layer and of windows, as they may be stored."""
    links: list[Row] = []
    windows = draw(st.lists(st.sampled_from([2, 3, 7, 50]), max_size=2, unique=True))
    full = draw(st.booleans()) or not windows
    for number in range(draw(st.integers(1, 4))):
        start = draw(st.integers(links[-1].start + 1, links[-1].end)) if links else 0
        end = start + draw(st.integers(1, 30))
        trims = [(start, 0)] if full else []
        trims += [(draw(st.integers(start, end - 1)), window) for window in windows]
        parent = links[-1].key if links else None
        row = make_row(range(end), start=start, parent=parent, salt=number)
        links.append(replace(row, trims=tuple(trims), snapshots=draw(st.booleans())))
    return links[::-1]


@settings(deadline=None, max_examples=1000)
@given(lineages(), st.integers(0, 120), st.integers(0, 120))
def test_what_can_be_used_of_a_chain_agrees_with_counting_rows(lineage: list[Row], common: int, limit: int):
    def has(links: list[Row], window: int, position: int) -> bool:
        """Whether the chain holds the row of a position, without a gap up to the end."""
        row, *parents = links
        first = next((first for first, of in row.trims if of == window), None)
        if first is None:
            return False
        return position >= first or bool(
            parents and first == row.start and position < first and has(parents, window, position)
        )

    def possible(links: list[Row], tokens: int) -> bool:
        """Whether every row that the next token attends to is there."""
        if tokens == links[0].end:
            return True
        return not links[0].snapshots and all(
            has(links, window, position)
            for _, window in links[0].trims
            for position in range(max(0, tokens - (window - 1)) if window else 0, tokens)
        )

    # Behind what another continues of it, an entry may go on otherwise.
    alike = [common, *(min(common, row.start) for row in lineage[:-1])]
    counts = [
        max((t for t in range(1, min(shared, limit, links[0].end) + 1) if possible(links, t)), default=0)
        for links, shared in ((lineage[at:], alike[at]) for at in range(len(lineage)))
    ]
    tokens, row, reason = best_of(lineage, common, limit)
    assert tokens == max(counts)
    assert not tokens or tokens <= row.end
    assert (reason is not None) == (tokens == 0 and min(common, limit) > 0)


def test_of_many_that_go_on_alike_a_few_stand_for_all():
    """A prompt that shares a part of one more block with one of them shares it with all of these."""
    index = PrefixIndex()
    crowds = [[*([number] * BLOCK), *tail] for number in range(3) for tail in ([n] * BLOCK for n in range(40))]
    lone = [9] * (BLOCK - 1)
    index.sync(make_row(ids) for ids in [*crowds, lone])
    ((tokens, rows),) = look_up(index, [1] * 100 + [7] * 400, near=64)
    assert tokens == 0
    assert len(rows) == 3 * matching.ALIKE + 1
    assert {row.chain[:DIGEST_SIZE] for row in rows} == {row.chain[:DIGEST_SIZE] for row in index.rows()}


def test_a_lookup_among_ten_thousand_long_entries_is_quick():
    """A machine that is busy may take several times as long; a walk over all entries takes a hundred times as long."""
    system = [7] * 1024
    index = PrefixIndex()
    index.sync(make_row(system + [n % 4000] * BLOCK + [n] * 2048) for n in range(10_000))
    prompt = TokenIds.of(system + [77] * BLOCK + [4077] * 7000)
    chain = prefix_chain(prompt, NAMESPACE)
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        tokens, rows = next(index.candidates(A, NAMESPACE.hex(), Prefix(prompt), chain))
        seconds.append(time.perf_counter() - began)
    assert tokens == 1024 + BLOCK + 2048
    assert len(rows) == 1
    assert median(seconds) < 0.001


def test_every_pair_of_a_small_world_is_found():
    world = [list(parts) * BLOCK for parts in itertools.product([1, 2], repeat=1)] + [
        [1] * n for n in (1, 255, 256, 257, 511, 512, 513)
    ]
    index = PrefixIndex()
    rows = [make_row(ids, salt=number) for number, ids in enumerate(world)]
    index.sync(rows)
    for prompt in world:
        found = {row.key: tokens for tokens, group in look_up(index, prompt) for row in group}
        assert found == {row.key: shared(ids, prompt) // BLOCK * BLOCK for row, ids in zip(rows, world, strict=True)}
