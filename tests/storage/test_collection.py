"""What a collection removes, and what it leaves alone: whatever a process that lives may be about to use."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sized_drafts import LEAST, on_disk, seeds, sized

from kvkeep import CacheStore, Entry
from kvkeep.collection import Collection, Removal
from kvkeep.errors import StoreReadOnlyError
from kvkeep.storage import skeleton
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index
from kvkeep.storage.locks import KeyLocks
from kvkeep.storage.refs import Ref, Refs

NOTHING = Collection(removed=(), failed=(), indexed=0, dropped=0, used=0, max_bytes=None, limit=None, short=0)


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Every file and directory with its content and what is known of it."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [root, *root.rglob("*")]:
        known = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = content, known.st_ino, known.st_mode, known.st_mtime_ns, known.st_ctime_ns
    return found


def names(done: Collection, kind: str) -> list[str]:
    return [one.name for one in done.removed if one.kind == kind]


def age(path: Path, seconds: float) -> None:
    """Nothing but a clock that goes on can make a file's ctime old."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass, as far as the store is concerned."""
    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])

    def pass_by(seconds: float) -> None:
        ahead[0] += seconds

    return pass_by


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    return CacheStore(tmp_path / "store", min_free=0)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_of_a_good_store_nothing_goes(store: CacheStore):
    assert store.gc() == NOTHING
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(3)}
    store.name(entries[1], "mine", ttl=100)
    done = store.gc(grace=0, quarantine_days=0)
    assert (done.removed, done.failed, done.used) == ((), (), 3 * LEAST)
    assert seeds(store, entries) == [0, 1, 2]
    assert store.entry("mine").key == entries[1].key


def test_an_entry_goes_with_the_last_of_its_names(store: CacheStore, later):
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(4)}
    store.name(entries[0], "short", ttl=10)
    store.name(entries[0], "shorter", ttl=5, pin=True)
    store.name(entries[1], "one", ttl=10)
    store.name(entries[1], "other", ttl=1000)
    store.name(entries[2], "always", ttl=10)
    store.name(entries[2], "always", ttl=None)
    later(8)  # names expire on the second
    assert names(store.gc(), "name") == ["shorter"]
    later(2)
    done = store.gc()
    assert names(done, "entry") == [entries[0].key]
    assert names(done, "name") == ["one", "short"]
    assert done.removed[0] == Removal("entry", entries[0].key, LEAST, "its names have expired")
    assert done.freed == LEAST + sum(one.nbytes for one in done.removed if one.kind == "name")
    assert done.used == 3 * LEAST
    assert seeds(store, entries) == [1, 2, 3]
    assert [ref.name for ref in Refs(Directory(store.path)).all()] == ["always", "other"]
    later(10_000)
    assert names(store.gc(), "entry") == [entries[1].key]
    assert store.gc().removed == ()


def test_a_chain_that_has_expired_goes_from_its_end_and_not_under_a_child(store: CacheStore, later):
    chain: dict[int, Entry] = {}
    for depth in range(3):
        chain[depth] = store.put(sized(LEAST, seed=1, depth=depth, parent=chain[depth - 1].key if depth else None))
        store.name(chain[depth], f"n{depth}", ttl=10)
    later(11)
    store.name(chain[1], "again")
    assert names(store.gc(), "entry") == [chain[2].key]
    assert seeds(store, chain) == [0, 1]
    store.name(chain[1], "again", ttl=1)
    later(2)
    assert names(store.gc(), "entry") == [chain[1].key], (
        "the names of the one below are gone: it is like one that had none"
    )
    assert seeds(store, chain) == [0]


def test_a_name_that_is_renewed_at_that_moment_keeps_its_entry(store: CacheStore, later, monkeypatch):
    entry = store.put(sized(LEAST, seed=1))
    store.name(entry, "mine", ttl=10)
    later(11)
    from kvkeep.storage.entries import EntryFiles

    take_away, expire = EntryFiles.take_away, Refs.expire

    def renew_and_take(self: EntryFiles, key: str) -> str | None:
        store.name(entry, "mine", ttl=100)
        return take_away(self, key)

    monkeypatch.setattr(EntryFiles, "take_away", renew_and_take)
    assert store.gc().removed == ()
    assert seeds(store, {1: entry}) == [1]
    assert store.entry("mine").key == entry.key
    assert store.verify(entry.key) is None
    assert [row.key for row in Index(Directory(store.path), store._files).rows()] == [entry.key]

    monkeypatch.setattr(EntryFiles, "take_away", take_away)
    later(100)
    move = Directory.move

    def renew_and_expire(self: Refs, ref: Ref) -> bool:
        other = store.put(sized(LEAST, seed=2))
        store.name(other, "mine", pin=True)
        return expire(self, ref)

    monkeypatch.setattr(Refs, "expire", renew_and_expire)
    done = store.gc()
    assert names(done, "name") == []
    assert store.entry("mine").nbytes == LEAST
    assert Refs(Directory(store.path)).get("mine").pin is True

    def replace_in_between(self: Directory, source: tuple[str, ...], target: tuple[str, ...]) -> bool:
        moved = move(self, source, target)
        if source[0] == "refs":
            monkeypatch.setattr(Directory, "move", move)
            Refs(self).put(Ref(name="mine", key=entry.key, created=7))
        return moved

    monkeypatch.setattr(Refs, "expire", expire)
    store.name(store.entry("mine"), "mine", ttl=-1)
    old = Refs(Directory(store.path)).get("mine")
    monkeypatch.setattr(Directory, "move", replace_in_between)
    Refs(Directory(store.path)).expire(old)
    assert Refs(Directory(store.path)).get("mine").created == 7
    assert list((store.path / "tmp").iterdir()) == []


def test_temporary_files_of_the_dead_go_and_others_when_they_are_old(store: CacheStore, later):
    store.put(sized(LEAST, seed=1))
    tmp = store.path / "tmp"
    dead, alive = dead_pid(), os.getpid()
    marked = tmp / f"{dead}-{'b' * 16}.safetensors"  # as of a process of the same number in another container
    for name in (f"{dead}-{'a' * 16}.safetensors", marked.name, f"{alive}-{'c' * 16}.safetensors", "something"):
        (tmp / name).write_bytes(b"12345")
    with marked.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        done = store.gc()
    assert done.removed == (
        Removal("temporary", f"{dead}-{'a' * 16}.safetensors", 5, "the process that wrote it has ended"),
    )
    later(3599)
    assert names(store.gc(), "temporary") == [marked.name]
    later(2)
    assert names(store.gc(), "temporary") == [f"{alive}-{'c' * 16}.safetensors", "something"]
    assert list(tmp.iterdir()) == []


def test_a_writer_marks_its_file(store: CacheStore, monkeypatch: pytest.MonkeyPatch):
    """So that it is safe from a collection that does not know its process."""
    monkeypatch.setattr("kvkeep.collection._is_alive", lambda pid: False)
    publish = Directory.publish
    found: list[Collection] = []

    def collect_and_publish(self: Directory, *arguments: object) -> bool:
        found.append(store.gc())
        return publish(self, *arguments)

    monkeypatch.setattr(Directory, "publish", collect_and_publish)
    entry = store.put(sized(LEAST, seed=1))
    assert [done.removed for done in found] == [()]
    assert store.verify(entry.key) is None


def test_what_was_set_aside_is_kept_for_a_while(store: CacheStore, later):
    entry = store.put(sized(LEAST, seed=1))
    path = store.path / "entries" / entry.key[:2] / f"{entry.key}.safetensors"
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    age(path, 1e8)
    assert store.verify(entry.key) is not None
    aside = sorted(path.name for path in (store.path / "quarantine").iterdir())
    assert aside == [f"{entry.key}-0.safetensors", f"{entry.key}-0.txt"]
    assert store.gc().removed == ()
    later(29.9 * 86400)
    assert store.gc().removed == ()
    later(0.2 * 86400)
    done = store.gc()
    assert names(done, "quarantine") == aside
    assert list((store.path / "quarantine").iterdir()) == []


def test_locks_of_the_dead_go_and_held_ones_stay(store: CacheStore):
    locks = KeyLocks(Directory(store.path))
    (store.path / "locks").mkdir(exist_ok=True)
    left = store.path / "locks" / f"{'a' * 32}.lock"
    left.touch()
    with locks.hold("b" * 32, timeout=1):
        done = store.gc()
        assert done.removed == (Removal("lock", "a" * 32, 0, "nobody holds it"),)
        assert not left.exists()
        assert (store.path / "locks" / f"{'b' * 32}.lock").exists()
    assert store.gc().removed == ()


def test_rows_and_files_are_made_to_agree(store: CacheStore, tmp_path: Path, later):
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(3)}
    other = CacheStore(tmp_path / "other", min_free=0)
    foreign = {seed: other.put(sized(LEAST, seed=seed)) for seed in range(10, 12)}
    for entry in foreign.values():
        source = other.path / "entries" / entry.key[:2] / f"{entry.key}.safetensors"
        target = store.path / "entries" / entry.key[:2] / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(source.read_bytes())
    damaged = store.path / "entries" / foreign[11].key[:2] / f"{foreign[11].key}.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:5000])
    (store.path / "entries" / entries[0].key[:2] / f"{entries[0].key}.safetensors").unlink()
    done = store.gc()
    assert (done.indexed, done.dropped) == (0, 1), "young files may be in the making"
    later(3601)
    done = store.gc()
    assert (done.indexed, done.dropped, done.removed) == (1, 0, ())
    assert seeds(store, entries | foreign) == [1, 2, 10]
    assert seeds(CacheStore(store.path), entries | foreign) == [1, 2, 10]
    assert not damaged.exists()
    assert [path.name for path in (store.path / "quarantine").glob("*.safetensors")] == [
        f"{foreign[11].key}-0.safetensors"
    ]


def test_what_is_over_the_limits_goes(store: CacheStore, later):
    entries = {seed: store.put(sized(LEAST, seed=seed, tenant="AB"[seed % 2])) for seed in range(8)}
    for seed in range(8):
        later(1)
        store.journal.hit(entries[seed].key, 4, 0.1)
    store.name(entries[0], "mine", pin=True)
    limited = CacheStore(store.path, min_free=0, max_bytes=6 * LEAST, quota=3 * LEAST)
    store.journal.flush()
    done = limited.gc()
    assert names(done, "entry") == [entries[2].key, entries[1].key] or set(names(done, "entry")) == {
        entries[2].key,
        entries[1].key,
    }
    assert (done.used, done.max_bytes, done.limit) == (6 * LEAST, 6 * LEAST, None)
    smaller = CacheStore(store.path, min_free=0, max_bytes=2 * LEAST)
    for seed in (3, 4, 5):
        store.name(entries[seed], f"n{seed}", pin=True)
    done = smaller.gc()
    assert seeds(store, entries) == [0, 3, 4, 5], "all goes that may"
    assert (done.used, done.limit, done.short) == (4 * LEAST, "max_bytes", 2 * LEAST)


def test_the_floor_is_reached_if_it_can_be(store: CacheStore, monkeypatch: pytest.MonkeyPatch):
    entries = {seed: store.put(sized(1 << 20, seed=seed)) for seed in range(5)}
    free = [(3 << 20) + 1000]
    monkeypatch.setattr(Directory, "space", lambda self: (free[0], 1 << 40))
    limited = CacheStore(store.path, min_free=5 << 20)
    assert len(names(limited.gc(dry_run=True), "entry")) == 2
    assert len(names(limited.gc(), "entry")) == 2
    assert len(seeds(store, entries)) == 3
    free[0] = 1 << 20
    assert limited.gc().removed == (), "nothing goes where all would not be enough"


def test_a_dry_run_says_the_same_and_changes_nothing(tmp_path: Path, later):
    root = tmp_path / "store"
    store = CacheStore(root, min_free=0)
    entries = {seed: store.put(sized(LEAST, seed=seed)) for seed in range(6)}
    store.name(entries[0], "gone", ttl=10)
    store.name(entries[1], "kept", pin=True)
    later(11)
    (root / "tmp" / f"{dead_pid()}-{'a' * 16}.new").write_bytes(b"half")
    (root / "locks").mkdir(exist_ok=True)
    (root / "locks" / f"{'a' * 32}.lock").touch()
    store.journal.flush()
    before = tree(root)
    dry = CacheStore(root, readonly=True, min_free=0, max_bytes=3 * LEAST).gc(dry_run=True)
    assert tree(root) == before
    with pytest.raises(StoreReadOnlyError):
        CacheStore(root, readonly=True).gc()
    assert tree(root) == before
    wet = CacheStore(root, min_free=0, max_bytes=3 * LEAST).gc()
    assert dry == wet
    assert {one.kind for one in wet.removed} == {"entry", "name", "temporary", "lock"}
    assert len(names(wet, "entry")) == 3
    assert names(wet, "entry")[0] == entries[0].key
    assert tree(root).keys() < before.keys()


def test_what_cannot_be_removed_is_told_and_does_not_stop_the_rest(store: CacheStore, later):
    store.put(sized(LEAST, seed=1))
    for name in ("stuck", "z"):
        (store.path / "tmp" / name).write_bytes(b"x")
    (store.path / "tmp" / "folder").mkdir()
    later(4000)
    remove = Directory.remove
    with pytest.MonkeyPatch.context() as patch:

        def refuse(self: Directory, *name: str) -> bool:
            if name[-1] == "stuck":
                raise PermissionError(1, "not yours")
            return remove(self, *name)

        patch.setattr(Directory, "remove", refuse)
        done = store.gc()
    assert [(one.name, one.reason) for one in done.failed if one.name == "stuck"] == [("stuck", "not yours")]
    assert names(done, "temporary") == ["z"]


def test_a_new_store_says_so_after_init(tmp_path: Path):
    skeleton.init(tmp_path)
    assert CacheStore(tmp_path, readonly=True).gc(dry_run=True) == NOTHING


_WRITER = """
import os, signal, sys, time
from contextlib import suppress
sys.path.insert(0, sys.argv[1])
from sized_drafts import LEAST, sized
from kvkeep import CacheStore
from kvkeep.errors import EntryNotFoundError
store = CacheStore(sys.argv[2], min_free=0)
number, doomed = int(sys.argv[3]), sys.argv[4] == "doomed"
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + float(sys.argv[5])
seed = 0
while time.monotonic() < end:
    seed += 1
    draft = sized(LEAST, seed=10_000 * number + seed)
    with suppress(EntryNotFoundError):
        store.name(store.put(draft), f"w{number}-{seed}", ttl=0)  # expired when it is written
    time.sleep(0.02)
    while True:
        try:
            entry = store.name(store.put(draft), f"w{number}-{seed}", ttl=1000)
            break
        except EntryNotFoundError:
            print("again", flush=True)
    print(entry.key, flush=True)
    if doomed and seed == 2:
        with store._directory.temporary(".safetensors") as temporary:
            temporary.write(0, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.requirement("R24")
def test_collections_in_a_loop_beside_8_writers_lose_nothing_acknowledged(tmp_path: Path, figures: list[str]):
    store = CacheStore(tmp_path, min_free=0)
    tests = str(Path(__file__).parents[1])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, tests, str(tmp_path), str(n), "doomed" if n % 4 == 3 else "well", "3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(8)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    collections, removed = 0, 0
    while any(writer.poll() is None for writer in writers):
        done = store.gc()
        assert done.failed == ()
        collections += 1
        removed += len(names(done, "entry"))
    said = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [-9 if n % 4 == 3 else 0 for n in range(8)]
    acknowledged = {key for some in said for key in some if key != "again"}
    store.gc()
    assert acknowledged <= on_disk(store).keys()
    listed = {entry.key for entry in store.entries()}
    unlisted = on_disk(store).keys() - listed  # a writer that was killed before the row: a later collection adds it
    assert listed <= on_disk(store).keys()
    assert not unlisted & acknowledged
    assert len(unlisted) <= 2, "one of each that was killed"
    assert {entry.key for entry in CacheStore(tmp_path).entries()} == listed
    assert all(store.verify(key) is None for key in acknowledged)
    assert list((tmp_path / "tmp").iterdir()) == [], "those of the killed are gone, too"
    figures.append(
        f"gc beside 8 writers: {collections} collections, {len(acknowledged)} entries acknowledged, 0 lost, "
        f"{removed} taken when their names had expired, {sum(some.count('again') for some in said)} put again"
    )


# --- entries that continue what is gone ---


def chain_of(store: CacheStore, length: int, seed: int = 1) -> dict[int, Entry]:
    chain: dict[int, Entry] = {}
    for depth in range(length):
        parent = chain[depth - 1].key if depth else None
        chain[depth] = store.put(sized(LEAST, seed=seed, depth=depth, parent=parent))
    return chain


def test_what_continues_what_is_gone_goes_after_the_grace_time(store: CacheStore, later):
    chain, other = chain_of(store, 4), chain_of(store, 2, seed=2)
    store.name(chain[3], "mine", pin=True)
    store._remove(chain[1].key)
    assert store.gc().removed == (), "the files are young"
    later(3601)
    foreseen = store.gc(dry_run=True)
    assert foreseen.removed == tuple(
        Removal("entry", chain[depth].key, LEAST, "what it continues is gone") for depth in (3, 2)
    )
    assert foreseen.used == 3 * LEAST
    assert seeds(store, chain) == [0, 2, 3]
    done = store.gc()
    assert done == foreseen
    assert seeds(store, chain | {4: other[0], 5: other[1]}) == [0, 4, 5]
    assert store.gc().removed == ()


def test_what_continues_a_file_that_has_no_row_yet_stays(store: CacheStore, later):
    chain = chain_of(store, 2)
    store._catalog.forget(chain[0].key)
    later(1800)
    age(store.path / "entries" / chain[1].key[:2] / f"{chain[1].key}.safetensors", 7200)
    assert store.gc(grace=1800).removed == ()
    assert store.gc(dry_run=True, grace=0).removed == ()
    assert (store.gc().removed, len(on_disk(store))) == ((), 2)


def test_an_old_one_stays_while_a_young_one_continues_it(store: CacheStore, monkeypatch: pytest.MonkeyPatch):
    from kvkeep.collection import Collector

    chain = chain_of(store, 3)
    store._remove(chain[0].key)
    ripe = {chain[1].key}
    monkeypatch.setattr(Collector, "_is_ripe", lambda self, key: key in ripe)
    assert store.gc().removed == ()
    ripe.add(chain[2].key)
    assert names(store.gc(), "entry") == [chain[2].key, chain[1].key]
    assert on_disk(store) == {}


def test_rings_and_chains_that_are_too_long_go(store: CacheStore, later):
    chain = chain_of(store, 10)
    one, two = (sized(LEAST, seed=seed, depth=1, parent="a" * 32).meta.key.hash for seed in (5, 6))
    ring = [sized(LEAST, seed=5, depth=1, parent=two), sized(LEAST, seed=6, depth=1, parent=one)]
    for draft in ring:  # put() itself would not
        store._files.put(draft)
    later(3601)
    gone = names(store.gc(), "entry")
    assert gone == [chain[9].key, chain[8].key]
    assert seeds(CacheStore(store.path), chain) == list(range(8))
