"""What a hit costs the system, and that nobody ever writes to an entry: by the calls that a process makes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from entry_drafts import IDENTITY, full, read_everything, sample

import kvkeep.storage.json_disk  # noqa: F401 - or every child imports it anew
from kvkeep.prefixes import Prefix
from kvkeep.store import CacheStore
from kvkeep.testing import syscalls

pytestmark = pytest.mark.skipif(not syscalls.is_possible(), reason="needs strace, and leave to trace a child process")

SAMPLES = [sample([full("BF16", room=30)], end=300, seed=seed) for seed in range(3)]
PREFIX = Prefix(SAMPLES[0].draft.ids)


def hit(store: CacheStore) -> None:
    match = store.serve(
        IDENTITY, PREFIX, limit=300, use=lambda file, tokens: read_everything(file, SAMPLES[0]) and None
    )
    assert match.entry is not None
    assert match.entry.key == SAMPLES[0].key


@pytest.mark.requirement("R12")
def test_an_entry_is_never_opened_for_writing(tmp_path: Path) -> None:
    """Whatever is done to a store: the only files of entries that are written have no name of an entry yet."""
    root = tmp_path / "store"

    def everything() -> None:
        store = CacheStore(root, max_bytes="10MB", min_free=0)
        for one in SAMPLES:
            store.put(one.draft)
            store.put(one.draft)
        store.name(store.entry(SAMPLES[0].key), "first", pin=True)
        hit(store)
        assert store.verify(SAMPLES[1].key) is None
        store.gc()
        store.remove(SAMPLES[2].key)
        (root / "index" / "cache.db").unlink()
        assert len(CacheStore(root, verify="always").entries()) == 2

    traced = syscalls.trace(everything)
    assert traced.failure is None, traced.failure
    entry = re.compile(r'"(?:.*/)?[0-9a-f]{32}\.safetensors"')
    opened = [line for line in traced.lines if line.startswith("open") and entry.search(line)]
    assert len(opened) > len(SAMPLES)
    assert [line for line in opened if "O_RDONLY" not in line] == []
    assert [line for line in traced.lines if re.match("truncate|chmod|fchmodat", line) and entry.search(line)] == []
    for path in root.glob("entries/*/*.safetensors"):
        assert path.stat().st_mode & 0o777 == 0o400


@pytest.mark.requirement("R22")
def test_a_hit_takes_no_lock_and_writes_nothing(tmp_path: Path, figures: list[str]) -> None:
    root = tmp_path / "store"
    store = CacheStore(root)
    for one in SAMPLES:
        store.put(one.draft)
    del store
    kept = []

    def hits(count: int) -> syscalls.Traced:
        def run() -> None:
            kept.append(CacheStore(root))
            for _ in range(count):
                hit(kept[0])

        traced = syscalls.trace(run)
        assert traced.failure is None, traced.failure
        return traced

    ten, eleven = hits(10), hits(11)
    more = list(eleven.lines[len(ten.lines) :])  # what the eleventh hit does
    assert [line for line in more if not re.match(r"(openat|close|fcntl)\(", line)] == []
    assert [line for line in more if line.startswith("openat") and "O_RDONLY" not in line] == []
    assert [line for line in more if "F_WRLCK" in line] == []
    assert eleven.count("flock", "fsync", "fdatasync", "linkat", "renameat", "write") == ten.count(
        "flock", "fsync", "fdatasync", "linkat", "renameat", "write"
    )
    store = CacheStore(root)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        found = store.find(IDENTITY, PREFIX, limit=300)
        times.append(time.perf_counter() - began)
        assert found.entry is not None
    figures.append(f"calls of a hit: {len(more)}, finding it: {sorted(times)[100] * 1e6:.0f} us")
