"""What is brought to the medium, in which order, and how often; and what happens when that fails."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from entry_drafts import full, sample

import kvkeep.storage.json_disk  # noqa: F401 - or every child imports it anew
from kvkeep.errors import InvalidRequestError, StoreWriteError
from kvkeep.storage.fs import Directory
from kvkeep.store import CacheStore
from kvkeep.testing import syscalls
from kvkeep.testing.syscalls import Point, Traced

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SAMPLES = [sample([full("BF16")], end=70, seed=seed) for seed in range(10)]
SYNCS = ("fsync", "fdatasync", "syncfs")
needs_strace = pytest.mark.skipif(not syscalls.is_possible(), reason="needs strace, and leave to trace a child process")


def putting(root: Path, durability: str, then: Callable[[CacheStore], object] = lambda store: None) -> Traced:
    """The calls of ten puts, into a store that has all its directories."""
    store = CacheStore(root)
    for one in SAMPLES:
        store.put(one.draft)
        store.remove(one.key)
    del store
    kept = []

    def puts() -> None:
        store = CacheStore(root, durability=durability)
        kept.append(store)  # or it is flushed when it goes
        for one in SAMPLES:
            store.put(one.draft)
        then(store)

    traced = syscalls.trace(puts)
    assert traced.finished and traced.failure is None, traced.failure
    return traced


def files_synced(traced: Traced) -> int:
    """How many entries' files were brought to the medium."""
    opened: dict[str, bool] = {}
    count = 0
    for line in traced.lines:
        if found := re.match(r"openat\(.*= (\d+)$", line):
            opened[found[1]] = ".safetensors" in line
        elif found := re.match(r"fsync\((\d+)\)", line):
            count += opened.get(found[1], False)
    return count


@needs_strace
@pytest.mark.requirement("R1", part=True)
def test_file_and_directory_are_on_the_medium_before_the_row(tmp_path: Path, figures: list[str]) -> None:
    traced = putting(tmp_path / "store", "full")
    order, opened = "", {}
    for line in traced.lines:
        if found := re.match(r"openat\((?:\w+), \"(.*?)\".*= (\d+)$", line):
            opened[found[2]] = found[1]
        elif found := re.match(r"fsync\((\d+)\)", line):
            name = opened.get(found[1], "")
            order += "f" if name.endswith(".safetensors") else "d" if re.fullmatch("[0-9a-f]{2}", name) else ""
        elif line.startswith("linkat"):
            order += "l"
        elif (found := re.match(r"pwrite64\((\d+)", line)) and "cache.db" in opened.get(found[1], ""):
            order += "r"
    assert re.fullmatch("r*(fldr+){10}", order), order
    figures.append(f"ten puts, durability full: {traced.count(*SYNCS)} syncs")


@needs_strace
def test_without_durability_nothing_is_synced(tmp_path: Path) -> None:
    assert putting(tmp_path / "store", "none").count(*SYNCS) == 0


@needs_strace
def test_a_batch_is_synced_once_and_gets_its_rows_then(tmp_path: Path, figures: list[str]) -> None:
    traced = putting(tmp_path / "one", "batch")
    assert traced.count(*SYNCS) == 0
    traced = putting(tmp_path / "two", "batch", lambda store: store.flush())
    assert files_synced(traced) == len(SAMPLES)
    shards = len({one.key[:2] for one in SAMPLES})
    assert traced.count(*SYNCS) == len(SAMPLES) + shards + 2  # and entries/, and the root
    figures.append(f"ten puts, durability batch: {traced.count(*SYNCS)} syncs")


def test_a_batch_is_found_here_at_once_and_by_others_when_it_is_flushed(tmp_path: Path) -> None:
    other = CacheStore(tmp_path / "store")
    assert other.entries() == []
    store = CacheStore(tmp_path / "store", durability="batch")
    for one in SAMPLES:
        store.put(one.draft)
    keys = {one.key for one in SAMPLES}
    assert {entry.key for entry in store.entries()} == keys
    assert other.entries() == []
    gone = SAMPLES[0].key
    store.remove(gone)
    store.flush()
    assert {entry.key for entry in other.entries()} == {entry.key for entry in store.entries()} == keys - {gone}
    assert all(store.verify(key) is None for key in keys - {gone})


def test_a_batch_is_flushed_when_it_is_full_when_it_is_old_and_when_the_store_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeep.storage import batch

    other = CacheStore(tmp_path / "store")
    assert other.entries() == []  # or it makes an index anew, of all that it finds
    store = CacheStore(tmp_path / "store", durability="batch")
    monkeypatch.setattr(batch, "ENTRIES", 3)
    for count, one in enumerate(SAMPLES[:4], 1):
        store.put(one.draft)
        assert len(other.entries()) == (3 if count >= 3 else 0)
    monkeypatch.setattr(batch, "SECONDS", 0.0)
    store.put(SAMPLES[4].draft)
    assert len(other.entries()) == 5
    monkeypatch.setattr(batch, "SECONDS", 60.0)
    store.put(SAMPLES[5].draft)
    assert len(other.entries()) == 5
    del store
    assert len(other.entries()) == 6


def test_what_another_removed_from_a_batch_is_no_trouble(tmp_path: Path) -> None:
    store, other = CacheStore(tmp_path / "store", durability="batch"), CacheStore(tmp_path / "store")
    for one in SAMPLES[:2]:
        store.put(one.draft)
    assert other.remove(SAMPLES[0].key)
    store.flush()
    assert [entry.key for entry in store.entries()] == [entry.key for entry in other.entries()] == [SAMPLES[1].key]


def test_what_a_batch_could_not_make_durable_is_gone_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.storage import fs

    store = CacheStore(tmp_path / "store", durability="batch")
    for one in SAMPLES[:3]:
        store.put(one.draft)
    calls = []

    def sync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        os.fsync(fd)

    monkeypatch.setattr(fs, "sync_file", sync)
    with pytest.raises(StoreWriteError):
        store.flush()
    assert len(calls) == 3
    assert {entry.key for entry in store.entries()} == {SAMPLES[0].key, SAMPLES[2].key}
    assert {entry.key for entry in CacheStore(tmp_path / "store").entries()} == {SAMPLES[0].key, SAMPLES[2].key}
    store.flush()


def test_a_forked_child_leaves_the_batch_to_its_parent(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store", durability="batch")
    store.put(SAMPLES[0].draft)
    child = os.fork()
    if child == 0:
        store.flush()
        os._exit(0)
    os.waitpid(child, 0)
    other = CacheStore(tmp_path / "store")
    Directory(tmp_path / "store").remove("index", "cache.db")
    store.flush()
    assert [entry.key for entry in other.entries()] == [SAMPLES[0].key]


@pytest.mark.parametrize("wrong", ["", "Full", None, True])
def test_other_durabilities_are_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="durability"):
        CacheStore(tmp_path / "store", durability=wrong)  # type: ignore[arg-type]


@needs_strace
@pytest.mark.requirement("R4")
def test_a_failed_sync_is_not_tried_again_and_the_entry_is_not_there(tmp_path: Path) -> None:
    """A second fsync may say that all is well though the pages are lost."""

    def put() -> None:
        CacheStore(root).put(SAMPLES[0].draft)

    root = tmp_path / "counted"
    CacheStore(root)
    lines = syscalls.trace(put).lines
    opened, number, syncs = {}, 0, 0
    for line in lines:
        if found := re.match(r"openat\(.*= (\d+)$", line):
            opened[found[1]] = line
        elif found := re.match(r"fsync\((\d+)\)", line):
            syncs += 1
            if ".safetensors" in opened.get(found[1], ""):
                number = syncs
    assert number
    root = tmp_path / "failing"
    CacheStore(root)
    traced = syscalls.fail_at(put, Point("fsync", number), "EIO")
    assert traced.failure is not None
    assert "StoreWriteError" in traced.failure.kinds
    at = next(n for n, line in enumerate(traced.lines) if "INJECTED" in line)
    later = [line.partition("(")[0] for line in traced.lines[at + 1 :]]
    assert "fsync" not in later
    assert "linkat" not in later
    assert "unlinkat" in later
    assert CacheStore(root).entries() == []
    assert list((root / "tmp").iterdir()) == []
