"""What a store may take: the budget is exact, eviction takes no more than it must, and some entries it never takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sized_drafts import LEAST, on_disk, seeds, sized, used

from kvkeep import CacheStore, Entry
from kvkeep.errors import EntryInUseError, EntryNotFoundError, StoreFullError
from kvkeep.eviction import Candidate
from kvkeep.keys import namespace_digest
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.refs import Ref, Refs

MIB = 1 << 20
TESTS = str(Path(__file__).parents[1])


@pytest.mark.requirement("R26", part=True)
def test_ten_of_10_mib_in_100_mib_stay(tmp_path: Path, figures: list[str]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)  # 110 MiB to the medium take long, and prove nothing here
        store = CacheStore(tmp_path, max_bytes="100MiB", min_free=0)
        entries = {seed: store.put(sized(10 * MIB, seed=seed)) for seed in range(10)}
        assert used(store) == 100 * MIB
        assert seeds(store, entries) == list(range(10))
        entries[10] = store.put(sized(10 * MIB, seed=10))
    assert used(store) == 100 * MIB
    assert len(seeds(store, entries)) == 10
    assert 10 in seeds(store, entries)
    figures.append("budget: 10 of 10 entries of 10 MiB kept in 100 MiB (diskcache: 0)")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as far as the store is concerned; recency has a resolution of a second."""
    now = [2_000_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_hits_decide_who_goes(tmp_path: Path, clock: list[float]):
    store = CacheStore(tmp_path, max_bytes=4 * LEAST, min_free=0)
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(4)}
    for seed in (2, 0, 3):
        clock[0] += 1
        store.journal.hit(entries[seed].key, 4, 0.1)
    for seed in (4, 5):
        entries[seed] = store.put(sized(LEAST, seed=seed))
        clock[0] += 1
        store.journal.hit(entries[seed].key, 4, 0.1)
    assert seeds(store, entries) == [0, 3, 4, 5]
    other = CacheStore(tmp_path, max_bytes=4 * LEAST, min_free=0)
    store.journal.flush()
    entries[6] = other.put(sized(LEAST, seed=6))
    assert seeds(other, entries) == [3, 4, 5, 6], "another process has read the hits of the first"


def test_cost_keeps_what_saves_more(tmp_path: Path):
    store = CacheStore(tmp_path, max_bytes=12 * LEAST, min_free=0, eviction="cost")
    small, large = store.put(sized(2 * LEAST, seed=1)), store.put(sized(8 * LEAST, seed=2))
    entries = {1: small, 2: large, 3: store.put(sized(4 * LEAST, seed=3))}
    assert seeds(store, entries) == [1, 3], "the same tokens in more bytes save less a byte"


def test_a_policy_of_ones_own(tmp_path: Path):
    asked: list[Candidate] = []

    class LargestFirst:
        def worth(self, candidate: Candidate, now: float) -> float:
            asked.append(candidate)
            return -candidate.nbytes

    store = CacheStore(tmp_path, max_bytes=10 * LEAST, min_free=0, eviction=LargestFirst())
    sizes = {1: 2, 2: 5, 3: 3, 4: 3}
    entries = {seed: store.put(sized(size * LEAST, seed=seed)) for seed, size in sizes.items()}
    assert seeds(store, entries) == [1, 3, 4]
    assert {one.nbytes // LEAST for one in asked} == {2, 5, 3}
    assert {(one.tokens, one.end, one.hits) for one in asked} == {(4, 4, 0)}


def test_an_error_of_a_policy_is_told_and_nothing_is_lost(tmp_path: Path):
    class Broken:
        def worth(self, candidate: Candidate, now: float) -> float:
            raise ValueError("no idea")

    store = CacheStore(tmp_path, max_bytes=2 * LEAST, min_free=0)
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(2)}
    broken = CacheStore(tmp_path, max_bytes=2 * LEAST, min_free=0, eviction=Broken())
    inode = (tmp_path / "index" / "cache.db").stat().st_ino
    with pytest.raises(ValueError, match="no idea"):
        broken.put(sized(LEAST, seed=2))
    assert seeds(store, entries) == [0, 1]
    assert (tmp_path / "index" / "cache.db").stat().st_ino == inode, "the index is not to blame"


@pytest.mark.parametrize("limit", ["max_bytes", "quota"])
def test_an_entry_over_the_limit_is_refused_before_it_is_written(tmp_path: Path, limit: str, monkeypatch):
    store = CacheStore(tmp_path, min_free=0, **{limit: 3 * LEAST})
    entries = {1: store.put(sized(LEAST, seed=1))}
    monkeypatch.setattr(Directory, "temporary", None)
    with pytest.raises(StoreFullError, match=rf"takes 24,577 bytes, .* may take 24,576 \({limit}\): raise {limit}, or"):
        store.put(sized(3 * LEAST + 1, seed=2))
    assert seeds(store, entries) == [1]


def test_pins_stay_and_when_they_fill_the_budget_the_next_is_refused(tmp_path: Path):
    store = CacheStore(tmp_path, max_bytes=3 * LEAST, min_free=0)
    entries = {}
    for seed in range(3):
        entries[seed] = store.put(sized(LEAST, seed=seed))
        store.name(entries[seed], f"n{seed}", pin=seed != 1)
    entries[3] = store.put(sized(LEAST, seed=3))
    assert seeds(store, entries) == [0, 2, 3]
    store.name(entries[3], "n3", pin=True)
    with pytest.raises(
        StoreFullError, match=r"pinned entries .* leave 8,192 too few: raise max_bytes, or take the pin"
    ):
        store.put(sized(LEAST, seed=4))
    assert seeds(store, entries) == [0, 2, 3]
    assert list((tmp_path / "tmp").iterdir()) == []
    store.name(entries[2], "n2")
    entries[4] = store.put(sized(LEAST, seed=4))
    assert seeds(store, entries) == [0, 3, 4]


def test_a_pin_ends_with_its_name(tmp_path: Path, clock: list[float]):
    store = CacheStore(tmp_path, max_bytes=2 * LEAST, min_free=0)
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(2)}
    store.name(entries[0], "a", pin=True, ttl=100)
    store.name(entries[1], "b", pin=True)
    clock[0] += 99
    with pytest.raises(StoreFullError):
        store.put(sized(LEAST, seed=2))
    clock[0] += 1
    entries[2] = store.put(sized(LEAST, seed=2))
    assert seeds(store, entries) == [1, 2]


def test_a_pin_that_comes_between_writing_and_adding_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is refused then, and its file is gone again."""
    store = CacheStore(tmp_path, max_bytes=LEAST, min_free=0)
    entries = {0: store.put(sized(LEAST, seed=0))}
    publish = Directory.publish

    def pin_and_publish(self: Directory, *arguments: object) -> bool:
        store.name(entries[0], "late", pin=True)
        return publish(self, *arguments)

    monkeypatch.setattr(Directory, "publish", pin_and_publish)
    with pytest.raises(StoreFullError, match="pinned"):
        store.put(sized(LEAST, seed=1))
    assert seeds(store, entries) == [0]


def test_a_pin_that_comes_during_eviction_is_kept_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CacheStore(tmp_path, max_bytes=LEAST, min_free=0)
    entries = {0: store.put(sized(LEAST, seed=0))}
    take_away = EntryFiles.take_away

    def name_before(self: EntryFiles, key: str) -> str | None:
        Refs(Directory(tmp_path)).put(Ref(name="late", key=entries[0].key, pin=True, created=1))
        return take_away(self, key)

    monkeypatch.setattr(EntryFiles, "take_away", name_before)
    entries[1] = store.put(sized(LEAST, seed=1))
    assert seeds(store, entries) == [0, 1], "kept, over the budget"
    assert (tmp_path / "tmp").exists() and list((tmp_path / "tmp").iterdir()) == []
    store.remove(entries[1].key)
    store.remove(entries[0].key)
    with pytest.raises(EntryNotFoundError, match="store it again"):
        store.name(entries[0], "too-late", pin=True)


def test_warm_starts_again_when_its_entry_is_evicted_before_it_has_its_name(tmp_path: Path, tiny_llama, monkeypatch):
    store = CacheStore(tmp_path, min_free=0)
    kv = store.bind(tiny_llama)
    name, seen = CacheStore.name, []

    def lose_it_once(self: CacheStore, entry: Entry, *arguments: object, **options: object) -> Entry:
        seen.append(entry.key)
        if len(seen) == 1:
            store._files.remove(entry.key)
        return name(self, entry, *arguments, **options)

    monkeypatch.setattr(CacheStore, "name", lose_it_once)
    entry = kv.warm(list(range(3, 40)), name="mine", pin=True)
    assert seen == [entry.key] * 2
    assert store.entry("mine").key == entry.key
    assert store.verify(entry.key) is None


def test_chains_are_evicted_from_their_end(tmp_path: Path):
    store = CacheStore(tmp_path, max_bytes=4 * LEAST, min_free=0)
    chain: dict[int, Entry] = {}
    for depth in range(3):
        parent = chain[depth - 1].key if depth else None
        chain[depth] = store.put(sized(LEAST, seed=1, depth=depth, parent=parent))
    chain[9] = store.put(sized(LEAST, seed=9))
    chain[10] = store.put(sized(LEAST, seed=10))
    left = seeds(store, chain)
    assert 10 in left and len(left) == 4
    assert left in ([0, 1, 9, 10], [0, 1, 2, 10]), "either the last link, or what is no link"
    for seed in range(11, 15):
        chain[seed] = store.put(sized(LEAST, seed=seed))
        links = [n for n in seeds(store, chain) if n < 3]
        assert links == list(range(len(links)))
    store = CacheStore(tmp_path, max_bytes=2 * LEAST, min_free=0)
    assert len(store.gc().removed) == 2
    below = store.put(sized(LEAST, seed=50))
    store.put(sized(LEAST, seed=50, depth=1, parent=below.key))
    assert below.key in {entry.key for entry in store.entries()}, "what the one just written continues stays"


def test_a_smaller_budget_holds_from_the_next_put_on(tmp_path: Path):
    store = CacheStore(tmp_path, min_free=0)
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(6)}
    small = CacheStore(tmp_path, max_bytes=3 * LEAST, min_free=0)
    assert len(seeds(small, entries)) == 6
    entries[6] = small.put(sized(LEAST, seed=6))
    assert len(seeds(store, entries)) == 3
    again = small.put(sized(LEAST, seed=6))
    assert again.key == entries[6].key
    assert 6 in seeds(store, entries)


def test_the_store_itself_may_carry_its_limits(tmp_path: Path):
    from kvkeep.storage import skeleton

    skeleton.init(tmp_path)
    skeleton.set_limits(tmp_path, {"max_bytes": 2 * LEAST})
    skeleton.set_limits(tmp_path, {"quota": 5 * LEAST})
    assert skeleton.check(tmp_path) == skeleton.StoreInfo(1, False, max_bytes=2 * LEAST, quota=5 * LEAST)
    store = CacheStore(tmp_path, min_free=0)
    for seed in range(4):
        store.put(sized(LEAST, seed=seed))
    assert used(store) == 2 * LEAST
    told = CacheStore(tmp_path, min_free=0, max_bytes=3 * LEAST)
    for seed in range(4, 8):
        told.put(sized(LEAST, seed=seed))
    assert used(told) == 3 * LEAST
    text = (tmp_path / "store.json").read_text()
    (tmp_path / "store.json").write_text(text.replace(str(2 * LEAST), '"lots"'))
    with pytest.raises(OSError, match="max_bytes is a number of bytes"):
        CacheStore(tmp_path)


@pytest.mark.requirement("R28")
def test_a_flood_in_one_namespace_costs_no_other_a_hit(tmp_path: Path, figures: list[str]):
    store = CacheStore(tmp_path, max_bytes=20 * LEAST, quota=8 * LEAST, min_free=0)
    mine = {seed: store.put(sized(LEAST, seed=seed, tenant="B")) for seed in range(8)}
    for seed in range(100, 160):
        entry = store.put(sized(LEAST, seed=seed, tenant="A"))
        assert entry.namespace == namespace_digest("A").hex()
        assert store.verify(entry.key) is None
    hits = sum(store.get(entry.key) is not None for entry in mine.values())
    assert hits == 8
    theirs = [entry for entry in store.entries() if entry.namespace == namespace_digest("A").hex()]
    assert sum(entry.nbytes for entry in theirs) == 8 * LEAST
    with pytest.raises(StoreFullError, match="its namespace may take"):
        store.put(sized(9 * LEAST, seed=99, tenant="B"))
    figures.append(f"flood of 60 entries in one namespace: {hits} of 8 entries of another are still hits")


class Machine(RuleBasedStateMachine):
    """Puts, pins, removals and hits in any order, beside what the rules say must come of them."""

    now = 2e9  # the time for the store, so that the same steps give the same

    @initialize(
        budget=st.integers(3, 9),
        quota=st.none() | st.integers(2, 6),
        policy=st.sampled_from(["lru", "cost"]),
    )
    def open(self, budget: int, quota: int | None, policy: str) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.budget = budget * LEAST
        self.quota = None if quota is None else quota * LEAST
        self.options = {"max_bytes": self.budget, "quota": self.quota, "eviction": policy, "min_free": 0}
        self.store = CacheStore(self.root, **self.options)
        self.entries: dict[str, Entry] = {}
        self.pins: dict[str, str] = {}
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    def kept(self, *keys: str | None) -> set[str]:
        found: set[str] = set()
        for key in [*self.pins.values(), *keys]:
            while key is not None and key in self.entries and key not in found:
                found.add(key)
                key = self.entries[key].parent
        return found

    def put(self, nbytes: int, tenant: str, seed: int, parent: Entry | None = None) -> None:
        depth = 0 if parent is None else parent.end // 4
        draft = sized(nbytes, seed=seed, tenant=tenant, depth=depth, parent=None if parent is None else parent.key)
        key, namespace = draft.meta.key.hash, namespace_digest(tenant).hex()
        before = dict(self.entries)
        if key in before:
            assert self.store.put(draft).key == key
            return
        kept = self.kept(None if parent is None else parent.key)
        need = nbytes + sum(before[one].nbytes for one in kept)
        need_here = nbytes + sum(before[one].nbytes for one in kept if before[one].namespace == namespace)
        fits = need <= self.budget and (self.quota is None or need_here <= self.quota)
        try:
            entry = self.store.put(draft)
        except StoreFullError:
            assert not fits
            return
        assert fits
        self.entries = {one.key: one for one in self.store.entries()}
        assert entry.key == key and key in self.entries
        gone = [one for one in before.values() if one.key not in self.entries]
        assert not {one.key for one in gone} & kept
        total, here = self.sums(namespace)
        assert total <= self.budget and (self.quota is None or here <= self.quota)
        own = [one.nbytes for one in gone if one.namespace == namespace]
        if gone:
            over = total + max(one.nbytes for one in gone) > self.budget
            assert over or (self.quota is not None and own and here + max(own) > self.quota), "more went than must"

    def sums(self, namespace: str) -> tuple[int, int]:
        return sum(one.nbytes for one in self.entries.values()), sum(
            one.nbytes for one in self.entries.values() if one.namespace == namespace
        )

    @rule(size=st.integers(0, 4 * LEAST), tenant=st.sampled_from("AB"))
    def put_new(self, size: int, tenant: str) -> None:
        self.count += 1
        self.put(LEAST + size, tenant, self.count)

    @rule(tenant=st.sampled_from("AB"), seed=st.integers(1, 5))
    def put_what_may_be_there(self, tenant: str, seed: int) -> None:
        self.put(LEAST, tenant, 1000 + seed)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), size=st.integers(0, LEAST))
    def put_child(self, data: st.DataObject, size: int) -> None:
        parent = self.any(data)
        self.count += 1
        tenant = "A" if parent.namespace == namespace_digest("A").hex() else "B"
        self.put(LEAST + size, tenant, self.count, parent)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), name=st.sampled_from("xyz"), pin=st.booleans())
    def name(self, data: st.DataObject, name: str, pin: bool) -> None:
        entry = self.any(data)
        self.store.name(entry, name, pin=pin)
        self.pins.pop(name, None)
        if pin:
            self.pins[name] = entry.key

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        Machine.now += 1
        self.store.journal.hit(self.any(data).key, 4, 0.001)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = self.any(data)
        if any(one.parent == entry.key for one in self.entries.values()):
            with pytest.raises(EntryInUseError):
                self.store.remove(entry.key)
            return
        self.store.remove(entry.key)
        self.pins = {name: key for name, key in self.pins.items() if key != entry.key}
        del self.entries[entry.key]

    @rule()
    def collect(self) -> None:
        self.store.gc()

    @rule()
    def reopen(self) -> None:
        self.store.journal.flush()
        self.store = CacheStore(self.root, **self.options)

    def any(self, data: st.DataObject) -> Entry:
        return self.entries[data.draw(st.sampled_from(sorted(self.entries)))]

    @invariant()
    def files_rows_and_memory_agree(self) -> None:
        if hasattr(self, "store"):
            assert {one.key: one.nbytes for one in self.store.entries()} == on_disk(self.store)
            assert on_disk(self.store) == {key: one.nbytes for key, one in self.entries.items()}


@pytest.mark.requirement("R26")
def test_the_budget_is_hard_and_eviction_minimal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(time, "time", lambda: Machine.now)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


_WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from sized_drafts import LEAST, on_disk, seeds, sized, used
from kvkeep import CacheStore
from kvkeep.errors import StoreFullError
store = CacheStore(sys.argv[2], max_bytes=20 * LEAST, min_free=0)
print("ready", flush=True)
sys.stdin.readline()
for seed in range(int(sys.argv[3]) * 1000, int(sys.argv[3]) * 1000 + 30):
    print(store.put(sized(LEAST, seed=seed)).key, flush=True)
"""


@pytest.mark.requirement("R26", part=True)
def test_four_processes_together_evict_no_more_than_they_must(tmp_path: Path, figures: list[str]):
    CacheStore(tmp_path)
    began = time.perf_counter()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, TESTS, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    keys = [writer.communicate(timeout=120)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4
    assert len({key for some in keys for key in some}) == 120
    store = CacheStore(tmp_path, min_free=0)
    assert used(store) == 20 * LEAST, "120 were put one by one into room for 20: each took the place of one other"
    assert {entry.key for entry in store.entries()} == on_disk(store).keys()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert all(store.verify(entry.key) is None for entry in store.entries())
    figures.append(f"4 processes, 120 puts into room for 20: 20 kept, {time.perf_counter() - began:.1f} s")
