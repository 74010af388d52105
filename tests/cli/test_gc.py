import json
import subprocess
import sys
import time

import pytest

from kvkeep import CacheStore
from kvkeep.storage.fs import Directory


def tree(root):
    """Every file and directory with its content and what is known of it."""
    found = {}
    for path in [root, *root.rglob("*")]:
        known = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = content, known.st_ino, known.st_mode, known.st_mtime_ns, known.st_ctime_ns
    return found


def left(store):
    return sorted(entry.names for entry in CacheStore(store.path).entries())


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def littered(store, both, dead_pid):
    """The store with entry ``two`` expired, and what a killed process leaves."""
    store.name(both[1], "two", ttl=-1)
    (store.path / "tmp" / f"{dead_pid}-{'a' * 16}.safetensors").write_bytes(b"half")
    (store.path / "locks").mkdir(exist_ok=True)
    (store.path / "locks" / f"{'a' * 32}.lock").touch()
    store.journal.flush()
    return store


def lines(both, dead_pid, verb):
    two = both[1]
    return [
        f"{verb} temporary {dead_pid}-{'a' * 16}.safetensors, 4 B: the process that wrote it has ended",
        f"{verb} lock aaaaaaaaaaaa: nobody holds it",
        f"{verb} entry {two.key[:12]}, {two.nbytes / 1000:.0f} kB: its names have expired",
        f"{verb} name two, 109 B: it has expired",
    ]


def test_gc(littered, both, kvkeep, dead_pid):
    result = kvkeep("gc", "--min-free", "0")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == lines(both, dead_pid, "removed")
    freed, used = both[1].nbytes + 113, both[0].nbytes
    assert result.stderr == f"removed 1 entry, 3 other files, {freed / 1000:.0f} kB; {used / 1000:.1f} kB in use\n"
    assert left(littered) == [("one",)]
    again = kvkeep("gc", "--min-free", "0")
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr == f"removed 0 entries, 0 other files, 0 B; {used / 1000:.1f} kB in use\n"


def test_a_dry_run_says_the_same_and_changes_not_a_byte(littered, both, kvkeep, dead_pid):
    before = tree(littered.path)
    result = kvkeep("gc", "--dry-run", "--min-free", "0")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == lines(both, dead_pid, "would remove")
    assert result.stderr.startswith("would remove 1 entry, 3 other files, ")
    assert tree(littered.path) == before
    would = json.loads(kvkeep("gc", "--dry-run", "--format", "json", "--min-free", "0").stdout)
    assert tree(littered.path) == before
    does = json.loads(kvkeep("gc", "--format", "json", "--min-free", "0").stdout)
    assert would == {**does, "dry_run": True}


def test_as_json(littered, both, kvkeep, dead_pid):
    result = kvkeep("gc", "--format", "json", "--min-free", "0")
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert shown["removed"][2] == {
        "kind": "entry",
        "name": both[1].key,
        "bytes": both[1].nbytes,
        "reason": "its names have expired",
    }
    assert {name: shown[name] for name in shown if name != "removed"} == {
        "dry_run": False,
        "failed": [],
        "freed": both[1].nbytes + 113,
        "indexed": 0,
        "rows_dropped": 0,
        "used": both[0].nbytes,
        "max_bytes": None,
        "over": None,
    }


def test_over_the_budget(store, both, kvkeep, monkeypatch):
    one, two = both
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: two.created + 10)
        store.journal.hit(two.key, 4, 0.1)
    store.journal.flush()
    result = kvkeep("gc", "--max-bytes", str(two.nbytes), "--min-free", "0")
    assert result.exit_code == 0
    size = f"{two.nbytes / 1000:.0f} kB"
    assert result.stdout == (
        f"removed entry {one.key[:12]}, {one.nbytes / 1000:.1f} kB: the entries take more than they may\n"
    )
    assert result.stderr.endswith(f"; {size} of {size} in use\n")
    assert left(store) == [("two",)]


def test_pins_over_the_budget_are_told(store, both, kvkeep):
    store.name(both[0], "one", pin=True)
    result = kvkeep("gc", "--max-bytes", "1kB", "--min-free", "0")
    assert result.exit_code == 4
    over = (both[0].nbytes - 1000) / 1000
    assert result.stderr.splitlines()[-1].startswith(f"kvkeep: pinned entries and what they continue are {over:.1f} kB")
    assert left(store) == [("one",)]


def test_what_cannot_be_removed_is_told(littered, both, kvkeep, monkeypatch, dead_pid):
    def refuse(self, *name):
        raise PermissionError(13, "Permission denied", name[-1])

    monkeypatch.setattr(Directory, "remove", refuse)
    result = kvkeep("gc", "--min-free", "0")
    assert result.exit_code == 4
    assert f"could not remove temporary {dead_pid}-{'a' * 16}.safetensors, 4 B: Permission denied\n" in result.stderr
    assert result.stderr.endswith("kvkeep: 2 files could not be removed\n")


@pytest.mark.parametrize("words", [["--max-bytes", "much"], ["--min-free", "-1"], ["--grace", "-1"], ["--quota", ""]])
def test_wrong_sizes(store, both, kvkeep, words):
    assert kvkeep("gc", *words).exit_code == 2
    assert left(store) == [("one",), ("two",)]


def test_init_writes_limits_that_every_process_keeps_to(store, both, kvkeep):
    assert kvkeep("init", "--max-bytes", "10GiB").exit_code == 0
    assert kvkeep("init", "--quota", "500MB").exit_code == 0
    assert json.loads((store.path / "store.json").read_text()) == {
        "format": 1,
        "shared": False,
        "max_bytes": 10 << 30,
        "quota": 500_000_000,
    }
    assert json.loads(kvkeep("gc", "--format", "json").stdout)["max_bytes"] == 10 << 30
    assert kvkeep("init", "--max-bytes", "a lot").exit_code == 2
    assert kvkeep("init").exit_code == 0
    assert json.loads((store.path / "store.json").read_text())["max_bytes"] == 10 << 30
    assert left(store) == [("one",), ("two",)]
