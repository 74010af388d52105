"""Operations on a store of three entries that are cut short, and what must hold then: for the tests with strace.

An operation runs in a child process. Then this one opens the store: every row has its file, every entry is whole, what
the operation does not concern is there, and the same operation works.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from entry_drafts import full, sample

import kvkeep.storage.json_disk  # noqa: F401 - or every child imports it anew
from kvkeep.storage import entry_writer
from kvkeep.store import CacheStore
from kvkeep.testing import syscalls
from kvkeep.testing.syscalls import Point

FIRST, SECOND, THIRD, NEW = (sample([full("BF16", room=30)], end=300, seed=seed) for seed in range(4))
STORED = {one.key for one in (FIRST, SECOND, THIRD)}
NBYTES = entry_writer.plan(FIRST.draft).size
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Operation:
    """One thing that is done to a store.

    Attributes:
        run: does it.
        may_be: the keys that a store may have when it was cut short.
        done: the keys that it has afterwards.
        reads: whether it is one that reads, so that the system's own errors reach the caller.
        later: whether it may leave to the next time what it could not do.
    """

    run: Callable[[Path], object]
    may_be: tuple[set[str], ...]
    done: set[str]
    reads: bool = False
    later: bool = False


def put(root: Path) -> None:
    store = CacheStore(root)
    store.put(NEW.draft)
    store.journal.flush()


def remove(root: Path) -> None:
    CacheStore(root).remove(FIRST.key)


def quarantine(root: Path) -> None:
    CacheStore(root).verify(FIRST.key)


def reindex(root: Path) -> None:
    CacheStore(root).entries()


def collect(root: Path) -> None:
    CacheStore(root).gc()


def evict(root: Path) -> None:
    """Two of three fit, and one is not pinned."""
    CacheStore(root, max_bytes=2 * NBYTES).gc()


OPERATIONS = {
    "put": Operation(put, (STORED, STORED | {NEW.key}), STORED | {NEW.key}),
    "remove": Operation(remove, (STORED, STORED - {FIRST.key}), STORED - {FIRST.key}),
    "quarantine": Operation(quarantine, (STORED, STORED - {FIRST.key}), STORED - {FIRST.key}, reads=True, later=True),
    "gc": Operation(collect, (STORED, STORED - {FIRST.key}), STORED - {FIRST.key}, later=True),
    "evict": Operation(evict, (STORED, STORED - {FIRST.key}), STORED - {FIRST.key}, later=True),
    "reindex": Operation(reindex, (STORED,), STORED, reads=True),
}


class Scene:
    """An operation, and stores to do it on."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.operation = OPERATIONS[name]
        self._folder = folder
        self._template = folder / "template"
        self._count = 0
        store = CacheStore(self._template)
        for one in (FIRST, SECOND, THIRD):
            store.put(one.draft)
        for number, key in enumerate(sorted(STORED)):  # pinned, or one makes way where the disk is said to be full
            expires = {"ttl": 0.0, "pin": False} if (name, key) == ("gc", FIRST.key) else {"pin": True}
            if (name, key) != ("evict", FIRST.key):
                store.name(store.entry(key), f"name-{number}", **expires)
        del store
        if name == "quarantine":
            path = self._template / "entries" / FIRST.key[:2] / f"{FIRST.key}.safetensors"
            path.chmod(0o600)
            content = bytearray(path.read_bytes())
            content[5000] ^= 1
            path.write_bytes(content)
        if name == "reindex":
            for path in (self._template / "index").iterdir():
                path.unlink()

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        """A store to do the operation on."""
        self._count += 1
        root = self._folder / str(self._count)
        shutil.copytree(self._template, root)
        yield root
        shutil.rmtree(root)

    def points(self) -> list[Point]:
        """The calls of the operation when nothing goes wrong."""
        with self.fresh() as root:
            traced = syscalls.trace(lambda: self.operation.run(root))
            assert traced.finished and traced.failure is None, traced.failure
            assert self.wrong(root, self.operation.done) == []
        return traced.calls()

    def wrong(self, root: Path, *may_be: set[str], leftover: AbstractSet[str] = frozenset()) -> list[str]:
        """What is not as it should be in a store that has one of these sets of keys.

        ``leftover`` are the keys whose rows may be there though their files are not.
        """
        without = rows_of(root) - files_of(root) - leftover
        found = [f"the index has a row of {key}, which has no file" for key in without]
        store = CacheStore(root)
        keys = {entry.key for entry in store.entries()}
        if keys not in may_be:
            found.append(f"it has {len(keys)} entries: {sorted(keys)}")
        if keys != files_of(root):
            found.append("rows and files differ")
        for key in keys:
            reason = store.verify(key)
            if reason is not None and (self.name, key) != ("quarantine", FIRST.key):
                found.append(f"{key}: {reason}")
        return found

    def wrong_afterwards(self, root: Path) -> list[str]:
        """What is not as it should be when the operation is done again."""
        self.operation.run(root)
        found = self.wrong(root, self.operation.done)
        if self.name == "quarantine" and not list((root / "quarantine").glob("*.safetensors")):
            found.append("the damaged file is gone")
        return found


@pytest.fixture(params=OPERATIONS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Each operation; its stores lie in memory where there is room, for a sync is no part of what is tried."""
    if not syscalls.is_possible():
        pytest.skip("needs strace (Debian's package strace), and leave to trace a child process")
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        yield Scene(request.param, Path(folder))


def files_of(root: Path) -> set[str]:
    """The keys of the files of entries."""
    return {path.stem for path in root.glob("entries/*/*") if not path.is_dir()}


def rows_of(root: Path) -> set[str]:
    """The rows as they lie there, whatever kvkeep makes of them; none while there is no table yet."""
    path = root / "index" / "cache.db"
    if not path.exists():
        return set()
    connection = sqlite3.connect(path)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'Cache'").fetchall():
            return set()
        return {key for (key,) in connection.execute("SELECT key FROM Cache")}
    finally:
        connection.close()


def temporary_files(root: Path) -> list[Path]:
    """What lies in ``tmp/``."""
    return list((root / "tmp").iterdir()) if (root / "tmp").exists() else []
