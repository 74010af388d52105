"""What the volume has room for: the floor that stays free, and what happens on a volume that is full."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sized_drafts import on_disk, seeds, sized

from kvkeep import CacheStore
from kvkeep.errors import StoreFullError, StoreWriteError
from kvkeep.storage.fs import Directory
from kvkeep.storage.refs import Refs
from kvkeep.storage.row_database import RowDatabase, UnusableDatabaseError
from kvkeep.storage.rows import Row

MIB = 1 << 20
UNIT = 1 << 17
SPARE = 1 << 16
"""What stays free at least, for rows and names."""


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The size of a volume that holds nothing but the entries and so many foreign bytes."""
    size = [100 * UNIT, 0]

    def space(self: Directory) -> tuple[int, int]:
        held = sum(path.stat().st_size for path in (self.root / "entries").rglob("*.safetensors"))
        return size[0] - size[1] - held, size[0]

    monkeypatch.setattr(Directory, "space", space)
    return size


@pytest.mark.requirement("R27", part=True)
def test_the_volume_keeps_its_floor(tmp_path: Path, volume: list[int], monkeypatch: pytest.MonkeyPatch):
    store = CacheStore(tmp_path, min_free=4 * UNIT)
    entries = {seed: store.put(sized(UNIT, seed=seed)) for seed in range(10)}
    volume[1] = 86 * UNIT
    assert seeds(store, entries) == list(range(10)), "exactly at the floor"
    entries[10] = store.put(sized(UNIT, seed=10))
    assert len(seeds(store, entries)) == 10
    assert 10 in seeds(store, entries)
    volume[1] = 88 * UNIT
    entries[11] = store.put(sized(UNIT, seed=11))
    assert len(seeds(store, entries)) == 8
    before = seeds(store, entries)
    monkeypatch.setattr(Directory, "temporary", None)
    with pytest.raises(StoreFullError, match=r"524,288 are to stay free on the volume of .* lower min_free"):
        store.put(sized(9 * UNIT, seed=12))
    assert seeds(store, entries) == before, "nothing went, since it would not have been enough"


def test_the_floor_is_at_most_a_tenth_of_the_volume(tmp_path: Path, volume: list[int]):
    store = CacheStore(tmp_path)
    volume[1] = 88 * UNIT
    entries = {seed: store.put(sized(UNIT, seed=seed)) for seed in range(2)}
    assert seeds(store, entries) == [0, 1]
    entries[2] = store.put(sized(UNIT, seed=2))
    assert len(seeds(store, entries)) == 2
    store.name(entries[2], "a", pin=True)
    other = next(seed for seed in seeds(store, entries) if seed != 2)
    store.name(entries[other], "b", pin=True)
    with pytest.raises(StoreFullError, match="even without all that may be evicted"):
        store.put(sized(UNIT, seed=4))


def no_space(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_volume_evicts_once_and_tries_once_more(tmp_path: Path, monkeypatch, caplog, code: int):
    store = CacheStore(tmp_path, min_free=0)
    entries = {seed: store.put(sized(UNIT, seed=seed)) for seed in range(4)}
    allocate, calls = os.posix_fallocate, []

    def full(fails: int):
        def call(*arguments: int) -> None:
            calls.append(arguments)
            if len(calls) <= fails:
                raise OSError(code, os.strerror(code))
            allocate(*arguments)

        calls.clear()
        return call

    monkeypatch.setattr(os, "posix_fallocate", full(1))
    if code == errno.EIO:
        with pytest.raises(StoreWriteError):
            store.put(sized(2 * UNIT - SPARE, seed=9))
        assert seeds(store, entries) == [0, 1, 2, 3]
        return
    with caplog.at_level(logging.WARNING, "kvkeep"):
        entries[9] = store.put(sized(2 * UNIT - SPARE, seed=9))
    assert len(seeds(store, entries)) == 3, "two of the old ones went"
    assert [r.message for r in caplog.records] == [
        f"kvkeep: the volume of {tmp_path} is full; entries were evicted for a new one"
    ]
    monkeypatch.setattr(os, "posix_fallocate", full(99))
    with pytest.raises(StoreWriteError, match="make room") as caught:
        store.put(sized(UNIT - SPARE, seed=10))
    assert caught.value.errno == code
    assert len(calls) == 2
    assert len(seeds(store, entries)) == 2
    with pytest.raises(StoreWriteError):
        store.put(sized(50 * UNIT, seed=11))
    assert len(calls) == 3, "no second try where evicting all would not be enough"
    assert len(seeds(store, entries)) == 2
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_index_that_cannot_be_written_does_not_keep_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a volume with no byte left: room is made from what is known here, and rows follow."""
    store = CacheStore(tmp_path, max_bytes=3 * UNIT, min_free=0)
    entries = {seed: store.put(sized(UNIT, seed=seed)) for seed in range(3)}

    def write(self: RowDatabase, *changes: object) -> list[Row]:
        raise UnusableDatabaseError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(RowDatabase, "write", write)
        for seed in (3, 4):
            entries[seed] = store.put(sized(UNIT, seed=seed))
            assert sum(on_disk(store).values()) == 3 * UNIT
            assert entries[seed].key in on_disk(store)
    assert len(seeds(CacheStore(tmp_path), entries)) == 3
    assert len(seeds(store, entries)) == 3


@pytest.fixture
def tiny_volume(tmp_path: Path) -> Iterator[Path]:
    """A volume of 8 MiB."""
    mount = tmp_path / "volume"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode:  # a container without the right to mount
        pytest.skip(done.stderr.strip())
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(mount: Path) -> int:
    """Take every byte that is left, and return how many that leaves."""
    with (mount / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return shutil.disk_usage(mount).free


@pytest.mark.root
@pytest.mark.requirement("R5", part=True)
@pytest.mark.requirement("R27")
def test_a_volume_that_is_really_full(tiny_volume: Path, figures: list[str]):
    root = tiny_volume / "store"
    store = CacheStore(root, min_free=0)
    entries = {seed: store.put(sized(MIB, seed=seed)) for seed in range(5)}
    store.name(entries[0], "first", pin=True)
    assert fill(tiny_volume) == 0
    entries[5] = store.put(sized(MIB, seed=5))
    left = seeds(store, entries)
    assert left[0] == 0 and left[-1] == 5 and len(left) <= 5
    assert all(store.verify(entries[seed].key) is None for seed in left)

    for seed in left[1:]:
        store.name(entries[seed], f"n{seed}", pin=True)
    fill(tiny_volume)
    with pytest.raises(StoreWriteError, match="make room"):
        store.put(sized(MIB, seed=6))
    assert seeds(store, entries) == left

    fill(tiny_volume)
    fresh = CacheStore(root)
    assert len(fresh.entries()) == len(left)
    assert all(fresh.verify(entries[seed].key) is None for seed in left)
    environment = {**os.environ, "KVKEEP_STORE": str(root)}
    for words in (["ls"], ["verify"], ["stats"], ["gc", "--dry-run"]):
        done = subprocess.run([sys.executable, "-m", "kvkeep", *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for name in [f"n{seed}" for seed in left[1:]]:
        Refs(Directory(root)).remove(name)
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep", "gc", "--max-bytes", "1MiB"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert on_disk(fresh) == {entries[0].key: MIB}
    free = shutil.disk_usage(tiny_volume).free
    assert free >= (len(left) - 1) * MIB - MIB // 4, "but for what the index and journal took of it"
    figures.append(f"full volume: gc freed {free / MIB:.1f} MiB at 0 bytes free")
    assert [entry.key for entry in CacheStore(root).entries()] == [entries[0].key]
