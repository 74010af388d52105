"""Entries that continue others: read as one, refused where they do not belong together, found whatever is removed."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entry_drafts import IDENTITY
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvkeep import CacheStore
from kvkeep.entry_format import ITEM_SIZES, EntryKey, EntryMeta, LayerRecord
from kvkeep.errors import EntryDamagedError, EntryInUseError, EntryNotFoundError
from kvkeep.grounds import MIN_SHARED, WHOLE, Ground
from kvkeep.keys import BLOCK, TokenIds, namespace_digest, prefix_chain, prefix_hash
from kvkeep.prefixes import Prefix
from kvkeep.storage.entries import Draft, EntryFiles, TensorSource
from kvkeep.storage.entry_chain import MAX_LINKS, EntryChain, Place, open_entry
from kvkeep.storage.fs import Directory

Roles = dict[str, tuple[str, int, int]]  # dtype, heads, dim

Layer = tuple[str, int, int, Roles]  # kind, first row, window

PLAIN: Roles = {"keys": ("F32", 2, 4), "values": ("BF16", 2, 6)}
EVERY: Roles = {"keys": ("F8_E4M3", 1, 5), "values": ("F32", 3, 2), "indexer_keys": ("I8", 1, 7)}


def rows_of(ids: Sequence[int], layer: int, roles: Roles) -> dict[str, np.ndarray]:
    """[heads, rows, row bytes] for each role: what a model would compute, each row from all ids up to it."""
    found, state = {}, np.empty(len(ids), np.uint64)
    behind = 17 + layer
    for number, one in enumerate(ids):
        behind = (behind * 6364136223846793005 + one + 1) % (1 << 64)
        state[number] = behind
    for place, (role, (dtype, heads, dim)) in enumerate(sorted(roles.items())):
        columns = np.arange(1, heads * dim * ITEM_SIZES[dtype] + 1, dtype=np.uint64)
        mixed = (state[:, None] >> np.uint64(20)) * (columns * np.uint64(2654435761)) + np.uint64(place)
        bytes_ = (mixed >> np.uint64(24)).astype(np.uint8).reshape(len(ids), heads, -1)
        found[role] = np.ascontiguousarray(bytes_.transpose(1, 0, 2))
    return found


def draft(
    ids: Sequence[int],
    layers: Sequence[Layer],
    *,
    ground: Ground = WHOLE,
    room: int = 0,
) -> Draft:
    """A draft of what a prefill of these ids gives."""
    namespace, end, start = namespace_digest(""), len(ids), ground.start
    chain = prefix_chain(TokenIds.of(ids), namespace)
    tensors, records = {}, []
    for number, (kind, first, window, roles) in enumerate(layers):
        rows = rows_of(ids, number, roles)
        for role, (dtype, heads, dim) in roles.items():
            parts = [memoryview(head[first:].copy()) for head in rows[role]]
            tensors[f"layers.{number}.{role}"] = TensorSource(dtype, (heads, end - first + room, dim), parts)
        how = dict.fromkeys(roles, "rows") | ({"shared": "=keys"} if "keys" in roles else {})
        scalars: dict[str, Any] = {"window": window} if window else {}
        if kind == "linear":
            how, scalars = {"recurrent.0": "snapshot"}, {"states": 1, "seen.0": end}
            state = rows_of(ids, number, {"x": ("F32", 1, 4)})["x"][0, -1]
            tensors[f"layers.{number}.recurrent.0"] = TensorSource("F32", (4,), [memoryview(state.copy())])
        held = end - first if roles else 0
        records.append(LayerRecord(kind=kind, first=first if held else 0, rows=held, tensors=how, scalars=scalars))
    prefix = prefix_hash(TokenIds.of(ids), end, chain).hex()
    meta = EntryMeta(
        key=EntryKey(identity=IDENTITY, namespace=namespace.hex(), prefix=prefix),
        start=start,
        end=end,
        parent=ground.parent,
        layers=tuple(records),
        cross=None,
        state=None,
        created=1_700_000_000,
        creator={},
        recorded={} if ground.digests is None else {"parent": ground.digests},
    )
    return Draft(meta, TokenIds.of(ids)[start:], chain[start // BLOCK + 1 : end // BLOCK + 1], tensors)


def key_of(made: Draft) -> str:
    return made.meta.key.hash


# --- read as one ---


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int, list[int]]]]:
    """Ids, and links as (start, end, room, each sliding layer's first row); link by link from token 0."""
    ends: list[int] = []
    links: list[tuple[int, int, int, list[int]]] = []
    start = 0
    for _ in range(draw(st.integers(2, MAX_LINKS))):
        if links:
            start = draw(st.integers(start + 1, ends[-1]))
        lengths = st.integers(start + 1, start + draw(st.sampled_from([12, 40, 300])))
        end = draw(lengths.filter(lambda end: end not in ends))  # else it would have the key of another
        firsts = [draw(st.one_of(st.just(start), st.integers(start, end - 1))) for _ in range(2)]
        links.append((start, end, draw(st.integers(0, 9)), firsts))
        ends.append(end)
    return [draw(st.integers(0, 9)) for _ in range(5)] * (max(ends) // 5 + 1), links


@settings(max_examples=50)
@given(chain=chains(), data=st.data())
def test_any_rows_of_any_layer_are_those_of_the_whole(chain, data):
    ids, links = chain
    shapes: list[Roles] = [PLAIN, PLAIN, EVERY, {}, {}]
    with tempfile.TemporaryDirectory() as folder:
        files = EntryFiles(Directory(Path(folder), sync=False), verify="always")
        ground, key = WHOLE, ""
        for start, end, room, (one, two) in links:
            layers = [
                ("full", start, 0, shapes[0]),
                ("sliding", one, 8, shapes[1]),
                ("indexed", two, 33, shapes[2]),
                ("linear", 0, 0, {}),
                ("none", 0, 0, {}),
            ]
            made = draft(ids[:end], layers, ground=replace(ground, start=start), room=room)
            header, _ = files.put(made)
            key = key_of(made)
            ground = Ground(0, key, header.meta.digests)
        last = links[-1][1]
        place = Place(key)
        with open_entry(files, place) as file:
            assert isinstance(file, EntryChain)
            assert (file.key, file.header.meta.key.hash, file.header.meta.end) == (key, key, last)
            file.verify_all()
            assert file.read_ids().tolist() == ids[:last]
            state = bytearray(16)
            file.read_snapshots("layers", 3, {"recurrent.0": memoryview(state)})
            assert state == rows_of(ids[:last], 3, {"x": ("F32", 1, 4)})["x"][0, -1].tobytes()
            for number in range(3):
                record, whole = file.header.meta.layers[number], rows_of(ids[:last], number, shapes[number])
                first = lowest([(link[0], [link[0], *link[3]][number]) for link in links], last)
                assert (record.first, record.rows) == (first, last - first)
                begin = data.draw(st.integers(0, record.rows))
                stop = data.draw(st.one_of(*(st.just(edge) for edge in edges(links, first, begin, record.rows))))
                read_and_compare(file, number, whole, first, begin, stop)


def lowest(links: Sequence[tuple[int, int]], end: int) -> int:
    """The lowest row from which on all are stored, of links as (start, first row), by looking at each row."""
    stops = [*(start for start, _ in links[1:]), end]
    stored = {row for (_, first), stop in zip(links, stops, strict=True) for row in range(first, stop)}
    return next(row + 1 for row in range(end - 1, -2, -1) if row not in stored)


def edges(links: Sequence[Any], first: int, begin: int, rows: int) -> list[int]:
    """Ends of a range of rows that begins with ``begin``: at the borders of links, beside these, and the last ones."""
    near = {link[0] - first + by for link in links for by in (-1, 0, 1)} | {begin, begin + 1, rows - 1, rows}
    return sorted(edge for edge in near if begin <= edge <= rows)


def read_and_compare(file: Any, number: int, whole: dict[str, np.ndarray], first: int, begin: int, stop: int) -> None:
    def buffers(begin: int, stop: int) -> dict[str, list[memoryview]]:
        return {r: [memoryview(bytearray((stop - begin) * one.shape[2])) for _ in one] for r, one in whole.items()}

    rows, behind = buffers(begin, stop), buffers(stop, stop + 1)
    last = file.header.meta.layers[number].rows == stop
    file.read_rows("layers", number, begin, stop, rows, None if last else behind)
    for role, one in whole.items():
        for head, stored in enumerate(one):
            assert rows[role][head].tobytes() == stored[first + begin : first + stop].tobytes()
            if not last:
                assert behind[role][head].tobytes() == stored[first + stop].tobytes()


# --- links that are damaged, gone, or somebody else's ---

IDS = [7 * n * n % 251 + 3 for n in range(700)]
ENDS = [100, 300, 420]


def full_and_window(start: int, end: int, *, roles: Roles = PLAIN, window: int = 40) -> list[Layer]:
    return [("full", start, 0, roles), ("sliding", max(start, end - window - 3), window, roles)]


def put_chain(files: EntryFiles, ends: Sequence[int], ids: Sequence[int] = IDS) -> list[str]:
    keys: list[str] = []
    ground = WHOLE
    for end in ends:
        made = draft(ids[:end], full_and_window(ground.start, end), ground=ground)
        header, published = files.put(made)
        assert published
        keys.append(key_of(made))
        ground = Ground(end, keys[-1], header.meta.digests)
    return keys


def served(store: CacheStore, ids: Sequence[int], roles: Sequence[Roles] = (PLAIN, PLAIN)) -> tuple[int, str | None]:
    """How many tokens are served, and the reason; fails if a row that continuing needs is wrong."""

    def use(file: Any, tokens: int) -> None:
        assert file.read_ids().tolist()[:tokens] == list(ids[:tokens])
        for number, record in enumerate(file.header.meta.layers):
            if record.kind == "linear":
                state = bytearray(16)
                file.read_snapshots("layers", number, {"recurrent.0": memoryview(state)})
                assert tokens == file.header.meta.end
                assert state == rows_of(ids[:tokens], number, {"x": ("F32", 1, 4)})["x"][0, -1].tobytes()
                continue
            whole = rows_of(ids[:tokens], number, roles[number])
            first = max(0, tokens - record.scalars["window"] + 1) if record.kind == "sliding" else 0
            assert record.first <= first
            begin, stop = first - record.first, tokens - record.first
            buffers = {r: [bytearray((stop - begin) * one.shape[2]) for _ in one] for r, one in whole.items()}
            targets = {r: [memoryview(head) for head in heads] for r, heads in buffers.items()}
            file.read_rows("layers", number, begin, stop, targets)
            for role, one in whole.items():
                assert [bytes(head) for head in buffers[role]] == [head[first:].tobytes() for head in one]

    match = store.serve(IDENTITY, Prefix(TokenIds.of(ids)), limit=len(ids) - 1, use=use)
    return match.tokens, match.reason


def path_of(store: CacheStore, key: str) -> Path:
    return store.path / "entries" / key[:2] / f"{key}.safetensors"


def first_row(store: CacheStore, key: str) -> int:
    header = store.header(key)
    return header.data + header.tensors["layers.0.keys"].begin


def flipped(path: Path, at: int) -> None:
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    path.chmod(0o400)


def another(store: CacheStore, key: str) -> None:
    """Put the file of another sound entry in the place of this one."""
    made = draft(list(range(50)), full_and_window(0, 50))
    store._files.put(made)
    path_of(store, key_of(made)).replace(path_of(store, key))


def anew(store: CacheStore, key: str) -> None:
    """Compute an entry anew, to other bytes under the same key, as another chunking would."""
    header = store.header(key)
    end = header.meta.end
    path_of(store, key).unlink()
    made = draft(IDS[:end], full_and_window(0, end))
    rows = made.tensors["layers.0.values"]
    parts = [memoryview(bytes(part)[:-1] + bytes([bytes(part)[-1] ^ 1])) for part in rows.parts]
    store._files.put(replace(made, tensors={**made.tensors, "layers.0.values": replace(rows, parts=parts)}))


TROUBLES = {
    "a flipped bit of its rows": lambda store, key: flipped(path_of(store, key), first_row(store, key)),
    "a flipped bit of its header": lambda store, key: flipped(path_of(store, key), 300),
    "it is gone": lambda store, key: path_of(store, key).unlink(),
    "it is empty": lambda store, key: (path_of(store, key).chmod(0o600), path_of(store, key).write_bytes(b"")),
    "it is a directory": lambda store, key: (path_of(store, key).unlink(), path_of(store, key).mkdir()),
    "another entry lies there": another,
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("link", [0, 1, 2])
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_trouble_with_a_link_costs_what_continues_it_and_no_more(tmp_path: Path, trouble, link, known):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    keys = put_chain(store._files, ENDS)
    if known:
        assert served(store, IDS[:500]) == (420, None)
    trouble(store, keys[link])
    if not known:
        store = CacheStore(tmp_path, min_free=0, durability="none")
    left = ENDS[link - 1] if link else 0
    tokens, reason = served(store, IDS[:500])
    assert tokens == left
    assert reason is not None or tokens, "a miss has a reason"
    assert served(store, IDS[:500])[0] == served(CacheStore(tmp_path, readonly=True), IDS[:500])[0] == left
    assert served(store, IDS[:310])[0] == min(left, 300)
    assert served(store, IDS[:99])[0] == (98 if link else 0)
    assert store.get(keys[2]) is None
    again = store.put(draft(IDS[:420], full_and_window(0, 420)))
    assert (again.start, served(store, IDS[:500])) == (0, (420, None))


@pytest.mark.parametrize("link", [0, 1])
def test_what_continues_an_entry_that_was_computed_anew_is_a_miss(tmp_path: Path, link: int):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    keys = put_chain(store._files, ENDS)
    assert served(store, IDS[:500]) == (420, None)
    anew(store, keys[link])
    place = Place(keys[link + 1])
    with pytest.raises(EntryDamagedError, match="computed anew"), open_entry(store._files, place):
        pass
    assert place.key == keys[link + 1], "the child is the one to set aside"
    assert store.get(keys[2]) is None

    def use(file: Any, tokens: int) -> None:
        assert file.header.meta.end == tokens == ENDS[link]

    match = store.serve(IDENTITY, Prefix(TokenIds.of(IDS[:500])), limit=499, use=use)
    assert match.tokens == ENDS[link]


def other_identity(made: Draft) -> Draft:
    other = replace(IDENTITY, tokenizer="9" * 32)
    return replace(made, meta=replace(made.meta, key=replace(made.meta.key, identity=other)))


def other_namespace(made: Draft) -> Draft:
    namespace = namespace_digest("another")
    chain = prefix_chain(made.ids, namespace)
    prefix = prefix_hash(made.ids, len(made.ids), chain).hex()
    key = replace(made.meta.key, namespace=namespace.hex(), prefix=prefix)
    return replace(made, meta=replace(made.meta, key=key), chain=chain[1:])


def other_form(made: Draft) -> Draft:
    return replace(made, meta=replace(made.meta, key=replace(made.meta.key, form="quantized:x")))


NARROW: Roles = {"keys": ("F32", 2, 4), "values": ("BF16", 2, 5)}
HOSTILE: dict[str, tuple[Callable[[], Draft], int]] = {
    "another model": (lambda: other_identity(draft(IDS[:100], full_and_window(0, 100))), 100),
    "another namespace": (lambda: other_namespace(draft(IDS[:100], full_and_window(0, 100))), 100),
    "another form": (lambda: other_form(draft(IDS[:100], full_and_window(0, 100))), 100),
    "a gap": (lambda: draft(IDS[:100], full_and_window(0, 100)), 101),
    "other ids": (lambda: draft([*IDS[:99], 1], full_and_window(0, 100)), 100),
    "fewer layers": (lambda: draft(IDS[:100], full_and_window(0, 100)[:1]), 100),
    "another kind": (lambda: draft(IDS[:100], [("full", 0, 0, PLAIN), ("full", 0, 0, PLAIN)]), 100),
    "another window": (lambda: draft(IDS[:100], full_and_window(0, 100, window=41)), 100),
    "another shape": (lambda: draft(IDS[:100], full_and_window(0, 100, roles=NARROW)), 100),
    "another dtype": (lambda: draft(IDS[:100], full_and_window(0, 100, roles={**PLAIN, "keys": ("I32", 2, 4)})), 100),
    "more heads": (lambda: draft(IDS[:100], full_and_window(0, 100, roles={**PLAIN, "keys": ("F32", 3, 4)})), 100),
    "fewer roles": (lambda: draft(IDS[:100], full_and_window(0, 100, roles={"keys": ("F32", 2, 4)})), 100),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_parent_that_does_not_belong_to_it_is_refused(tmp_path: Path, name: str):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    make, start = HOSTILE[name]
    parent = make()
    store._files.put(parent)
    child = draft(IDS[:300], full_and_window(start, 300), ground=Ground(start, key_of(parent)))
    store._files.put(child)
    place = Place(key_of(child))
    with pytest.raises(EntryDamagedError), open_entry(store._files, place) as file:
        file.verify_all()
    assert place.key == key_of(child)
    found: list[int] = []
    match = store.serve(
        IDENTITY, Prefix(TokenIds.of(IDS[:500])), limit=499, use=lambda file, tokens: found.append(file.header.meta.end)
    )
    assert match.tokens <= 100, "of the parent, if that is one for this prompt"
    assert found == ([match.tokens] if match.tokens == 100 else [100] if match.tokens else [])
    assert match.tokens or match.reason


@pytest.mark.parametrize("length", [1, 2, 3])
def test_entries_that_continue_one_another_in_a_ring_are_refused(tmp_path: Path, length: int):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    keys = [key_of(draft(IDS[: 200 + n], full_and_window(0, 200 + n))) for n in range(length)]
    for n in range(length):
        ground = Ground(100, keys[(n + 1) % length])
        store._files.put(draft(IDS[: 200 + n], full_and_window(100, 200 + n), ground=ground))
    began = time.monotonic()
    for key in keys:
        with (
            pytest.raises(EntryDamagedError, match="continues more than 7 others"),
            open_entry(store._files, Place(key)),
        ):
            pass
        assert store.entry(key).parent in keys
        assert len(store.descendants(key)) == length - 1
    assert served(store, IDS[:500])[0] == 0
    assert [store.get(key) for key in keys] == [None] * length
    assert time.monotonic() - began < 5


def test_of_a_chain_that_is_too_long_the_first_links_serve(tmp_path: Path):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    keys = put_chain(store._files, range(100, 320, 20))
    assert served(store, IDS[:500]) == (100 + 7 * 20, None)
    for key in keys[MAX_LINKS:]:
        with pytest.raises(EntryDamagedError), open_entry(store._files, Place(key)):
            pass
    assert [store.get(key) for key in keys[MAX_LINKS:]] == [None] * 3
    assert [store.get(key) is not None for key in keys[:MAX_LINKS]] == [True] * MAX_LINKS


def test_what_goes_on_otherwise_than_its_parent_leaves_the_parent_as_good_as_it_was(tmp_path: Path):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    fork = [*IDS[:200], *range(100)]
    whole = store.put(draft(IDS[:600], [("full", 0, 0, PLAIN)] * 2))
    found = store.find(IDENTITY, Prefix(TokenIds.of(fork)), limit=len(fork) - 1)
    assert found.tokens == 200 and found.entry is not None
    ground = store.ground(found.entry.key, found.tokens)
    child = store.put(draft(fork, [("full", ground.start, 0, PLAIN)] * 2, ground=ground))
    assert (child.start, child.parent) == (200, whole.key)
    again = CacheStore(tmp_path, min_free=0)
    for prompt, tokens in (([*fork, 9], 300), (fork, 299), (IDS[:601], 600), ([*IDS[:400], 1], 400)):
        assert served(again, prompt)[0] == tokens
    assert {entry.key for entry in again.entries()} == {whole.key, child.key}


# --- random trees of prefixes ---

SEGMENTS = [
    [n % 83 for n in range(70)],
    [n % 83 if n < 40 else 5 for n in range(100)],
    [n % 19 + 100 for n in range(256)],
    [n % 7 for n in range(33)],
    [n % 83 if n < 64 else 6 for n in range(130)],
]
WINDOW, SLACK = 40, 4


class Prefixes(RuleBasedStateMachine):
    """Store, look up, trim, remove and lose entries over a tree of prefixes, in two processes' worth of stores.

    The model is a plain dict of the token lists that were stored under each key; which of them can be used is told
    from the files that are there, by looking at each row.
    """

    @initialize(kind=st.sampled_from(["full", "windowed", "state"]))
    def begin(self, kind: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.stores = [CacheStore(self.folder.name, min_free=0, durability="none") for _ in range(2)]
        self.kind = kind
        self.stored: dict[str, list[int]] = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def layers(self, start: int, end: int) -> list[Layer]:
        second = {
            "full": ("full", start, 0, PLAIN),
            "windowed": ("sliding", max(start, end - WINDOW + 1 - SLACK), WINDOW, PLAIN),
            "state": ("linear", 0, 0, {}),
        }
        return [("full", start, 0, PLAIN), second[self.kind]]

    def links(self, key: str) -> list[tuple[int, int, int]]:
        """(start, end, first row of the second layer) of an entry and what it continues, from token 0; none if lost."""
        files, found, child = self.stores[0]._files, list[tuple[int, int, int]](), None
        while True:
            if not files.is_there(key):
                return []
            with files.open(key) as file:
                meta = file.header.meta
            if child is not None and child.recorded["parent"] != meta.digests:
                return []
            found.insert(0, (meta.start, meta.end, meta.layers[1].first))
            if meta.parent is None:
                return found
            key, child = meta.parent, meta

    def usable(self, key: str, ids: list[int]) -> int:
        mine, links = self.stored[key], self.links(key)
        if not links:
            return 0
        assert links[-1][1] == len(mine)
        assert len(links) <= MAX_LINKS
        pairs = zip(mine, ids[:-1], strict=False)
        common = next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(mine), len(ids) - 1))
        if common == len(mine) or self.kind == "full":
            return common
        first = lowest([(start, first) for start, _, first in links], len(mine))
        return common if self.kind == "windowed" and first <= max(0, common - WINDOW + 1) else 0

    @rule(which=st.integers(0, 1), path=st.lists(st.integers(0, 4), min_size=1, max_size=4), cut=st.integers(0, 90))
    def put(self, which: int, path: list[int], cut: int) -> None:
        store, ids = self.stores[which], self.prompt(path, cut)
        found = store.find(IDENTITY, Prefix(TokenIds.of(ids)), limit=len(ids) - 1)
        alike = found.entry is not None and found.tokens >= MIN_SHARED and bool(self.links(found.entry.key))
        ground = store.ground(found.entry.key, found.tokens) if alike and found.entry is not None else WHOLE
        made = draft(ids, self.layers(ground.start, len(ids)), ground=ground)
        try:
            entry = store.put(made)
        except EntryNotFoundError:
            ground = WHOLE
            entry = store.put(draft(ids, self.layers(0, len(ids))))
        assert entry.key == key_of(made)
        self.stored[entry.key] = ids
        store.supersede(entry, ground.replaced)
        assert self.links(entry.key)
        self.look_up(1 - which, path, cut, [9])

    @rule(
        which=st.integers(0, 1),
        path=st.lists(st.integers(0, 4), min_size=1, max_size=5),
        cut=st.integers(0, 90),
        tail=st.lists(st.integers(0, 9), max_size=3),
    )
    def look_up(self, which: int, path: list[int], cut: int, tail: list[int]) -> None:
        ids = self.prompt(path, cut) + tail
        expected = max((self.usable(key, ids) for key in self.stored), default=0)
        tokens, reason = served(self.stores[which], ids)
        assert tokens == expected
        assert tokens or reason

    @rule(which=st.integers(0, 1), number=st.integers(0, 99), cascade=st.booleans())
    def remove(self, which: int, number: int, cascade: bool) -> None:
        store = self.stores[which]
        entries = store.entries()
        if entries:
            key = entries[number % len(entries)].key
            others = {entry.key for entry in store.descendants(key)}
            try:
                store.remove(key, cascade=cascade)
            except EntryInUseError:
                assert others and not cascade
            else:
                here = {entry.key for entry in store.entries()}
                assert not here & {key, *others} and not any(entry.parent == key for entry in store.entries())

    @rule(number=st.integers(0, 99))
    def lose(self, number: int) -> None:
        keys = sorted(key for key in self.stored if self.stores[0]._files.is_there(key))
        if keys:
            path_of(self.stores[0], keys[number % len(keys)]).unlink()

    @rule(which=st.integers(0, 1))
    def collect(self, which: int) -> None:
        whole = {key for key in self.stored if self.links(key)}
        self.stores[which].gc(grace=0)
        assert whole == {key for key in self.stored if self.links(key)}

    def prompt(self, path: list[int], cut: int) -> list[int]:
        ids = [one for segment in path for one in SEGMENTS[segment]]
        return ids[: max(1, len(ids) - cut)]


def test_of_any_tree_of_prefixes_the_longest_usable_one_is_served():
    run_state_machine_as_test(Prefixes, settings=settings(max_examples=15, stateful_step_count=25, deadline=None))


# --- several processes ---

_WORKER = """
import random, sys
sys.path[:0] = sys.argv[1:3]
from test_entry_chain import *
from kvkeep.errors import StoreFullError
dice = random.Random(int(sys.argv[4]))
store = CacheStore(sys.argv[3], min_free=0, durability="none", max_bytes=int(sys.argv[5]), on_error="raise")
counts = {"stored": 0, "continued": 0, "parent gone": 0, "full": 0, "hits": 0, "removed": 0}
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    ids = [one for segment in dice.choices(range(5), k=dice.randint(1, 4)) for one in SEGMENTS[segment]]
    ids = ids[: len(ids) - dice.randint(0, 30)]
    counts["hits"] += served(store, [*ids, 9])[0] > 0
    found = store.find(IDENTITY, Prefix(TokenIds.of(ids)), limit=len(ids) - 1)
    ground = store.ground(found.entry.key, found.tokens) if found.tokens >= MIN_SHARED else WHOLE
    try:
        try:
            entry = store.put(draft(ids, full_and_window(ground.start, len(ids)), ground=ground))
        except EntryNotFoundError:
            counts["parent gone"] += 1
            entry = store.put(draft(ids, full_and_window(0, len(ids))))
        else:
            store.supersede(entry, ground.replaced)
        counts["stored"] += 1
        counts["continued"] += entry.parent is not None
    except StoreFullError:
        counts["full"] += 1
    if dice.random() < 0.1 and (entries := store.entries()):
        counts["removed"] += store.remove(dice.choice(entries).key, cascade=True)
print(counts)
"""


def test_processes_that_continue_entries_beside_others_that_evict_them_never_read_anything_wrong(
    tmp_path: Path, figures: list[str]
):
    CacheStore(tmp_path, min_free=0)
    budget = 8 * len(SEGMENTS) * 8192
    here = Path(__file__).parent
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(here), str(here.parent), str(tmp_path), str(number), str(budget)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    said = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 3, said
    assert not [errors for _, errors in said if "damaged" in errors or "Traceback" in errors]
    totals: Counter[str] = Counter()
    for output, _ in said:
        totals.update(ast.literal_eval(output))
    store = CacheStore(tmp_path, min_free=0)
    entries = {entry.key: entry for entry in store.entries()}
    assert sum(entry.nbytes for entry in entries.values()) <= budget
    assert all(entry.parent is None or entry.parent in entries for entry in entries.values())
    assert all(store.verify(key) is None for key in entries)
    assert list((tmp_path / "quarantine").glob("*")) == []
    assert totals["continued"] > 10
    figures.append(f"3 processes that continue and evict entries: {dict(totals)}")
