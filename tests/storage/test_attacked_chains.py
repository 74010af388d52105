"""Chains of entries under attack: batches, keys, namespaces, read-only stores, limits, and several processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_entry_chain import IDS, PLAIN, draft, first_row, flipped, full_and_window, key_of, path_of, put_chain, served

from kvkeep import CacheStore, Entry
from kvkeep.errors import StoreFullError, StoreWriteError
from kvkeep.grounds import Ground
from kvkeep.storage.entry_chain import MAX_LINKS
from kvkeep.storage.fs import Directory

TURN = 70


def grow(store: CacheStore, before: Entry | None, end: int, ids: list[int]) -> Entry:
    ground = Ground() if before is None else store.ground(before.key, before.end)
    entry = store.put(draft(ids[:end], [("full", ground.start, 0, PLAIN)] * 2, ground=ground))
    store.supersede(entry, ground.replaced)
    return entry


def conversation(store: CacheStore, turns: int) -> Entry:
    ids = [7 * n * n % 251 + 3 for n in range(TURN * turns)]
    entry = None
    for turn in range(turns):
        entry = grow(store, entry, TURN * (turn + 1), ids)
        assert served(store, [*ids[: entry.end], 9])[0] == entry.end
    assert entry is not None
    return entry


# --- batches ---


def test_a_batch_keeps_no_more_of_a_conversation_than_others_do(tmp_path: Path):
    stores = [CacheStore(tmp_path / how, min_free=0, durability=how) for how in ("none", "batch")]
    last = [conversation(store, 20) for store in stores]
    for store in stores:
        store.flush()
    kept = [{(entry.key, entry.parent) for entry in store.entries()} for store in stores]
    assert kept[0] == kept[1] and len(kept[0]) <= MAX_LINKS
    assert last[0].key == last[1].key
    for how in ("none", "batch"):
        assert {(e.key, e.parent) for e in CacheStore(tmp_path / how, readonly=True).entries()} == kept[0]


def test_what_waits_in_a_batch_takes_nothing_away_before_it_is_durable(tmp_path: Path, monkeypatch):
    CacheStore(tmp_path, min_free=0, durability="none")
    first = CacheStore(tmp_path, min_free=0, durability="none")
    ids = [7 * n * n % 251 + 3 for n in range(TURN * 9)]
    entry = None
    for turn in range(8):
        entry = grow(first, entry, TURN * (turn + 1), ids)
    store = CacheStore(tmp_path, min_free=0, durability="batch")
    grow(store, entry, len(ids), ids)
    assert len(store.entries()) == 9
    assert served(CacheStore(tmp_path, readonly=True), ids)[0] >= 8 * TURN

    def refused(self: Directory, names):
        for name in (names := list(names)):
            self.remove(*name)
        return {name: OSError(errno.EIO, "no") for name in names}

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "make_durable", refused)
        with pytest.raises(StoreWriteError):
            store.flush()
    assert len(store.entries()) == 8
    assert served(store, ids)[0] == 8 * TURN
    grow(store, entry, len(ids), ids)
    store.flush()
    assert len(store.entries()) < 9
    assert served(CacheStore(tmp_path, min_free=0), [*ids, 9])[0] == len(ids)


def test_a_child_is_not_kept_whose_parent_in_the_same_batch_is_not(tmp_path: Path, monkeypatch):
    store = CacheStore(tmp_path, min_free=0, durability="batch")
    ids = [7 * n * n % 251 + 3 for n in range(TURN * 3)]
    root = grow(store, None, TURN, ids)
    child = grow(store, grow(store, root, 2 * TURN, ids), 3 * TURN, ids)
    real = Directory.make_durable

    def failing(self: Directory, names):
        names = list(names)
        failed = {name: OSError(errno.EIO, "no") for name in names if root.key in name[-1]}
        for name in failed:
            self.remove(*name)
        return real(self, [name for name in names if name not in failed]) | failed

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "make_durable", failing)
        with pytest.raises(StoreWriteError):
            store.flush()
    assert store.entries() == CacheStore(tmp_path, readonly=True).entries() == []
    assert served(store, ids)[0] == 0
    assert store.get(child.key) is None
    grow(store, None, len(ids), ids)
    assert served(store, [*ids, 9])[0] == len(ids)


def test_a_parent_that_another_process_removed_takes_the_waiting_child_with_it(tmp_path: Path):
    store, other = CacheStore(tmp_path, min_free=0, durability="batch"), CacheStore(tmp_path, min_free=0)
    ids = [7 * n * n % 251 + 3 for n in range(TURN * 2)]
    root = grow(store, None, TURN, ids)
    store.flush()
    assert [entry.key for entry in other.entries()] == [root.key]
    grow(store, root, 2 * TURN, ids)
    assert other.remove(root.key)
    store.flush()
    assert store.entries() == other.entries() == []
    assert list((tmp_path / "entries").glob("*/*.safetensors")) == []


# --- keys ---

ONE, TWO = bytes(range(32)), bytes(range(40, 72))


@pytest.mark.parametrize("parent_key", [None, TWO], ids=["unsigned", "another key"])
def test_a_child_whose_parent_is_not_trusted_here_stays_for_those_who_trust_it(tmp_path: Path, parent_key):
    plain = CacheStore(tmp_path, min_free=0, durability="none", key=parent_key)
    ids = IDS[:300]
    root = grow(plain, None, 100, ids)
    signer = CacheStore(tmp_path, min_free=0, durability="none", key=ONE, keys=[] if parent_key is None else [TWO])
    ground = Ground(100, root.key, plain.header(root.key).meta.digests)
    child = draft(ids, [("full", 100, 0, PLAIN)] * 2, ground=ground)
    signer._files.put(child)
    before = sorted(path.name for path in (tmp_path / "entries").glob("*/*.safetensors"))
    strict = CacheStore(tmp_path, min_free=0, durability="none", key=ONE)
    for _ in range(2):
        tokens, reason = served(strict, IDS[:400])
        assert (tokens, (reason or "").split(":")[0]) == (0, "untrusted")
        assert strict.get(key_of(child)) is None
        assert strict.verify(key_of(child)) is not None
        strict.gc()
    assert sorted(path.name for path in (tmp_path / "entries").glob("*/*.safetensors")) == before
    keys: dict[str, Any] = {} if parent_key is None else {"key": TWO, "keys": [ONE]}
    assert served(CacheStore(tmp_path, min_free=0, **keys), IDS[:400])[0] == 300


def test_keys_are_rotated_beneath_a_chain(tmp_path: Path):
    old = CacheStore(tmp_path, min_free=0, durability="none", key=ONE)
    ids = IDS[:300]
    root = grow(old, None, 100, ids)
    both = CacheStore(tmp_path, min_free=0, durability="none", key=TWO, keys=[ONE])
    child = grow(both, root, 300, ids)
    assert child.parent == root.key
    assert served(CacheStore(tmp_path, min_free=0, key=TWO, keys=[ONE]), IDS[:400])[0] == 300
    new = CacheStore(tmp_path, min_free=0, durability="none", key=TWO)
    assert served(new, IDS[:400])[0] == 0
    with pytest.raises(StoreWriteError):
        new.put(draft(ids, [("full", 100, 0, PLAIN)] * 2, ground=Ground(100, root.key)))
    assert served(both, IDS[:400])[0] == 300
    again = grow(new, None, 100, ids)
    assert (again.parent, served(new, IDS[:400])[0]) == (None, 300), "the same bytes, signed with another key"


def test_what_continues_an_untrusted_entry_makes_way_for_what_is_computed_whole(tmp_path: Path):
    old = CacheStore(tmp_path, min_free=0, durability="none", key=ONE)
    root = grow(old, None, 100, IDS)
    both = CacheStore(tmp_path, min_free=0, durability="none", key=TWO, keys=[ONE])
    child = grow(both, root, 300, IDS)
    new = CacheStore(tmp_path, min_free=0, durability="none", key=TWO)
    assert served(new, IDS[:400])[0] == 0
    again = grow(new, None, 300, IDS)
    assert (again.key, again.parent, served(new, IDS[:400])[0]) == (child.key, None, 300)
    assert served(both, IDS[:400])[0] == 300
    assert [one.parent for one in new.entries()] == [None, None]


# --- namespaces ---


def test_the_same_chain_in_two_namespaces_is_two_chains(tmp_path: Path, monkeypatch):
    import test_entry_chain

    real = test_entry_chain.namespace_digest
    stores = {name: CacheStore(tmp_path, min_free=0, durability="none", namespace=name) for name in ("", "b")}
    ids = [7 * n * n % 251 + 3 for n in range(TURN * 12)]
    last = {}
    for name, store in stores.items():
        with monkeypatch.context() as patched:
            patched.setattr(test_entry_chain, "namespace_digest", lambda _, name=name: real(name))
            entry = None
            for turn in range(12):
                entry = grow(store, entry, TURN * (turn + 1), ids)
            last[name] = entry
    counts = {name: sum(e.namespace == real(name).hex() for e in stores[""].entries()) for name in stores}
    assert counts[""] == counts["b"] <= MAX_LINKS
    stores[""].name(last[""], "pinned", pin=True)
    removed = stores["b"].remove_namespace("")
    assert sum(one.kind == "entry" for one in removed) == counts[""]
    assert served(stores[""], [*ids, 9])[0] == 0
    assert served(stores["b"], [*ids, 9])[0] == len(ids)
    assert served(CacheStore(tmp_path, min_free=0, namespace="b"), [*ids, 9])[0] == len(ids)


# --- read-only ---


def contents(root: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in sorted(root.rglob("*")):
        known = path.lstat()
        found[str(path.relative_to(root))] = known.st_mtime_ns, known.st_size, known.st_ino
    return found


@pytest.mark.parametrize("trouble", ["orphan", "ring", "damaged parent", "parent is a directory", "cut parent"])
def test_a_read_only_store_passes_over_broken_chains_and_writes_nothing(tmp_path: Path, trouble: str):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    keys = put_chain(store._files, [100, 300, 420])
    if trouble == "orphan":
        path_of(store, keys[1]).unlink()
    elif trouble == "ring":
        path_of(store, keys[1]).unlink()
        store._files.put(draft(IDS[:300], full_and_window(100, 300), ground=Ground(100, keys[2])))
    elif trouble == "damaged parent":
        flipped(path_of(store, keys[1]), first_row(store, keys[1]))
    elif trouble == "cut parent":
        path = path_of(store, keys[1])
        path.chmod(0o600)
        os.truncate(path, path.stat().st_size // 2)
    else:
        path_of(store, keys[1]).unlink()
        path_of(store, keys[1]).mkdir()
    before = contents(tmp_path)
    reader = CacheStore(tmp_path, readonly=True)
    for _ in range(2):
        assert served(reader, IDS[:500])[0] == 100
        assert reader.get(keys[2]) is None or trouble == "damaged parent"
        assert (reader.verify(keys[2]) is None) == (trouble == "damaged parent"), "of itself, not of its parents"
        reader.entries(), reader.descendants(keys[0]), reader.gc(dry_run=True, grace=0)
    assert contents(tmp_path) == before


# --- limits and names ---


def test_a_pinned_child_keeps_its_chain_under_a_budget(tmp_path: Path):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    ids = [7 * n * n % 251 + 3 for n in range(TURN * 4)]
    entry = None
    for turn in range(4):
        entry = grow(store, entry, TURN * (turn + 1), ids)
    store.name(entry, "pinned", pin=True)
    used = sum(one.nbytes for one in store.entries())
    small = [CacheStore(tmp_path, min_free=0, durability="none", max_bytes=used + 100_000) for _ in range(2)]
    for number in range(12):
        other = [number + 300 + n % 5 for n in range(150)]
        with suppress(StoreFullError):
            grow(small[number % 2], None, 150, other)
        assert served(small[1 - number % 2], [*ids, 9])[0] == len(ids)
    assert sum(one.nbytes for one in store.entries()) <= used + 100_000


def test_a_name_that_expires_on_a_parent_leaves_the_chain_whole(tmp_path: Path):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    ids = IDS[:400]
    root = grow(store, None, 100, ids)
    store.name(root, "root", ttl=-1)
    child = grow(store, root, 400, ids)
    store.name(child, "child", ttl=1000)
    store.gc(grace=0)
    assert served(store, [*ids, 9])[0] == 400
    assert {one.key for one in store.entries()} == {root.key, child.key}
    store.name(root, "root", ttl=-1)
    store.name(child, "child", ttl=-1)
    store.gc(grace=0)
    assert store.entries() == []


def test_what_has_a_name_is_not_superseded_by_a_waiting_entry(tmp_path: Path):
    store = CacheStore(tmp_path, min_free=0, durability="batch")
    ids = [7 * n * n % 251 + 3 for n in range(TURN * 9)]
    entry = None
    for turn in range(9):
        entry = grow(store, entry, TURN * (turn + 1), ids)
        if turn == 7:
            store.name(entry, "kept")
    store.flush()
    assert store.entry("kept").end == 8 * TURN
    assert served(store, [*ids[: 8 * TURN], 9])[0] == 8 * TURN


# --- several processes ---


def full_chain(store: CacheStore, ids: list[int]) -> Entry:
    entry = None
    for turn in range(MAX_LINKS):
        entry = grow(store, entry, TURN * (turn + 1), ids)
    assert entry is not None
    return entry


def test_a_batch_that_is_flushed_at_exit_leaves_the_index_as_it_was(tmp_path: Path):
    program = """
import sys
sys.path[:0] = sys.argv[1:3]
from test_attacked_chains import *
store = CacheStore(sys.argv[3], min_free=0, durability="batch")
store.entries()
conversation(store, 9)
"""
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(here), str(here.parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "neither a warning nor an index made anew"
    assert len(CacheStore(tmp_path, min_free=0).entries()) < 9


@pytest.mark.parametrize("opened", range(1, MAX_LINKS + 1))
def test_links_that_are_superseded_while_a_chain_is_opened_cost_no_hit(tmp_path: Path, monkeypatch, opened: int):
    reader, writer = (CacheStore(tmp_path, min_free=0, durability="none") for _ in range(2))
    ids = [7 * n * n % 251 + 3 for n in range(TURN * (MAX_LINKS + 1))]
    last = full_chain(writer, ids)
    assert served(reader, [*ids[: last.end], 9])[0] == last.end
    real, counted = reader._files.open, []

    def opening(key: str):
        counted.append(key)
        if len(counted) == opened:
            grow(writer, last, len(ids), ids)
        return real(key)

    monkeypatch.setattr(reader._files, "open", opening)
    assert served(reader, [*ids, 9])[0] >= last.end
    assert served(reader, [*ids, 9])[0] == len(ids)
    assert served(CacheStore(tmp_path, readonly=True), [*ids, 9])[0] == len(ids)
    assert not list((tmp_path / "quarantine").glob("*"))


@pytest.mark.parametrize("known", [False, True])
def test_an_entry_that_is_put_back_while_a_reader_misses_it_keeps_its_row(tmp_path: Path, monkeypatch, known: bool):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    ids = [7 * n * n % 251 + 3 for n in range(TURN * MAX_LINKS)]
    last = full_chain(store, ids)
    parent = store.entry(last.parent or "")
    assert CacheStore(tmp_path, readonly=True).entries() == store.entries()
    real, gone = store._files.open, list[str]()

    def opening(key: str):
        if key == parent.key and not gone:
            gone.append(key)
            raise FileNotFoundError(errno.ENOENT, "taken away")
        return real(key)

    if known:
        assert served(store, [*ids, 9])[0] == len(ids)
    monkeypatch.setattr(store._files, "open", opening)
    assert served(store, [*ids, 9])[0] in (parent.end, len(ids))
    assert gone
    assert served(store, [*ids, 9])[0] == len(ids)
    assert parent.key in {one.key for one in CacheStore(tmp_path, min_free=0).entries()}
    assert served(CacheStore(tmp_path, min_free=0), [*ids, 9])[0] == len(ids)


_WORKER = """
import sys
sys.path[:0] = sys.argv[1:3]
from test_attacked_chains import *
from test_entry_chain import *
store = CacheStore(sys.argv[3], min_free=0, durability=sys.argv[4], on_error="raise")
print("ready", flush=True)
sys.stdin.readline()
ids = [7 * n * n % 251 + 3 for n in range(TURN * 20)]
for turn in range(20):
    end = TURN * (turn + 1)
    found = store.find(IDENTITY, Prefix(TokenIds.of(ids[:end])), limit=end - 1)
    ground = store.ground(found.entry.key, found.tokens) if found.tokens >= MIN_SHARED else WHOLE
    try:
        entry = store.put(draft(ids[:end], [("full", ground.start, 0, PLAIN)] * 2, ground=ground))
    except EntryNotFoundError:
        entry = store.put(draft(ids[:end], [("full", 0, 0, PLAIN)] * 2))
    else:
        store.supersede(entry, ground.replaced)
    served(store, [*ids, 9])
store.flush()
"""


def test_two_processes_that_store_one_conversation_leave_it_whole(tmp_path: Path):
    CacheStore(tmp_path, min_free=0)
    here = Path(__file__).parent
    command = [sys.executable, "-c", _WORKER, str(here), str(here.parent), str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = [subprocess.Popen([*command, how], text=True, **pipes) for how in ("none", "batch")]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    ids = [7 * n * n % 251 + 3 for n in range(TURN * 20)]
    reader = CacheStore(tmp_path, readonly=True)
    while any(worker.poll() is None for worker in workers):
        served(reader, [*ids, 9])  # checks every row
    said = [worker.communicate(timeout=60)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert not [errors for errors in said if errors], "what went wrong was told"
    store = CacheStore(tmp_path, min_free=0)
    time.sleep(1.1)  # so often a read-only store looks for what others have stored
    assert served(store, [*ids, 9])[0] == served(reader, [*ids, 9])[0] == len(ids)
    assert all(store.verify(one.key) is None for one in store.entries())
    assert not list((tmp_path / "quarantine").glob("*"))
    assert len(store.entries()) <= 3 * MAX_LINKS


# --- the index ---


def test_a_chain_outlives_its_index(tmp_path: Path):
    store = CacheStore(tmp_path, min_free=0, durability="none")
    ids = [7 * n * n % 251 + 3 for n in range(TURN * (MAX_LINKS + 4))]
    last = full_chain(store, ids)
    for turn in range(MAX_LINKS, MAX_LINKS + 3):
        shutil.rmtree(tmp_path / "index")
        assert served(store, [*ids, 9])[0] == last.end
        last = grow(store, last, TURN * (turn + 1), ids)
        shutil.rmtree(tmp_path / "index")
        assert served(CacheStore(tmp_path, min_free=0), [*ids, 9])[0] == last.end
    assert {one.key for one in CacheStore(tmp_path, readonly=True).entries()} == {one.key for one in store.entries()}
