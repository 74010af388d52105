from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.errors import InvalidRequestError
from kvkeep.storage import locks
from kvkeep.storage.fs import Directory
from kvkeep.storage.locks import KeyLocks

KEY = "ab" * 16

PRELUDE = """
import os, sys, time
from pathlib import Path
from kvkeep.storage.fs import Directory
from kvkeep.storage.locks import KeyLocks
root, key = Path(sys.argv[1]), sys.argv[2]
locks = KeyLocks(Directory(root))
"""

HOLD = """
with locks.hold(key, timeout=10) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def start(code: str, root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(root), KEY]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its input ends."""
    with start(HOLD, tmp_path) as process:
        assert line_of(process) == "True"
        yield process
        process.kill()


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "locks").iterdir())


def test_a_lock_is_a_file_while_it_is_held(tmp_path: Path):
    key_locks = KeyLocks(Directory(tmp_path))
    with key_locks.hold(KEY, timeout=0) as held:
        assert held is True
        assert files(tmp_path) == [f"{KEY}.lock"]
        with key_locks.hold("cd" * 16, timeout=0) as other:
            assert other is True
    assert files(tmp_path) == []


@pytest.mark.requirement("R21", part=True)
def test_a_second_holder_waits_for_its_time_and_takes_nothing_away(tmp_path: Path, holder: subprocess.Popen[str]):
    key_locks = KeyLocks(Directory(tmp_path))
    began, open_files = time.monotonic(), len(list(Path("/proc/self/fd").iterdir()))
    with key_locks.hold(KEY, timeout=0.3) as held:
        assert held is False
    assert 0.3 <= time.monotonic() - began < 5
    # Fewer, when what other tests left open is collected meanwhile.
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files
    assert files(tmp_path) == [f"{KEY}.lock"]
    with KeyLocks(Directory(tmp_path)).hold(KEY, timeout=0) as held:
        assert held is False


def test_the_next_one_gets_the_lock_when_it_is_released(tmp_path: Path, holder: subprocess.Popen[str]):
    assert holder.stdin is not None
    threading.Timer(0.2, holder.stdin.close).start()
    with KeyLocks(Directory(tmp_path)).hold(KEY, timeout=30) as held:
        assert held is True
        assert files(tmp_path) == [f"{KEY}.lock"]
    assert files(tmp_path) == []


@pytest.mark.requirement("R21", part=True)
def test_a_killed_holder_frees_the_lock_within_a_second(tmp_path: Path, holder: subprocess.Popen[str]):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with KeyLocks(Directory(tmp_path)).hold(KEY, timeout=30) as held:
        assert held is True
    assert time.monotonic() - began < 1


def test_a_killed_holder_frees_the_lock_though_a_child_it_forked_lives(tmp_path: Path):
    code = """
with locks.hold(key, timeout=10):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.read()
"""
    with start(code, tmp_path) as process:
        child = int(line_of(process))
        try:
            time.sleep(0.2)  # the child is past its first instructions
            process.kill()
            process.wait()
            with KeyLocks(Directory(tmp_path)).hold(KEY, timeout=1) as held:
                assert held is True
                os.kill(child, 0)  # raises if it is gone
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_leaves_the_block_releases_nothing(tmp_path: Path):
    code = """
with locks.hold(key, timeout=10):
    child = os.fork()
    if child:
        print(os.waitpid(child, 0)[1], flush=True)
        sys.stdin.read()
if child == 0:
    os._exit(0)
"""
    with start(code, tmp_path) as process:
        assert line_of(process) == "0"
        with KeyLocks(Directory(tmp_path)).hold(KEY, timeout=0) as held:
            assert held is False
        process.kill()


def test_a_release_counts_though_a_copy_of_the_descriptor_lives_on(tmp_path: Path):
    """As in a process that was forked by something other than Python."""
    key_locks, got = KeyLocks(Directory(tmp_path)), threading.Event()

    def wait() -> None:
        with key_locks.hold(KEY, timeout=60) as held:
            if held:
                got.set()

    with key_locks.hold(KEY, timeout=0):
        file = tmp_path / "locks" / f"{KEY}.lock"
        (number,) = [fd.name for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.readlink() == file]
        copy = os.dup(int(number))
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.3)
    try:
        assert got.wait(10)
    finally:
        os.close(copy)
        waiter.join()


@pytest.mark.requirement("R21", part=True)
def test_a_holder_that_raises_frees_the_lock(tmp_path: Path):
    key_locks = KeyLocks(Directory(tmp_path))
    with pytest.raises(ZeroDivisionError), key_locks.hold(KEY, timeout=0):
        raise ZeroDivisionError
    with key_locks.hold(KEY, timeout=0) as held:
        assert held is True


@pytest.mark.requirement("R20", part=True)
def test_sixteen_processes_do_the_work_once(tmp_path: Path):
    code = """
with locks.hold(key, timeout=60) as held:
    assert held
    if not (root / "done").exists():
        time.sleep(0.2)
        with open(root / "work", "a") as file:
            file.write("x")
        (root / "done").touch()
"""
    processes = [start(code, tmp_path) for _ in range(16)]
    assert [process.communicate()[0] for process in processes] == [""] * 16
    assert [process.returncode for process in processes] == [0] * 16
    assert (tmp_path / "work").read_text() == "x"
    assert files(tmp_path) == []


def test_no_two_processes_are_inside_at_once(tmp_path: Path):
    """The file is removed at each release, so a waiter on a removed file must not take itself for the holder."""
    code = """
for _ in range(40):
    with locks.hold(key, timeout=60) as held:
        assert held
        number = int((root / "count").read_text())
        time.sleep(0.0005)
        (root / "count").write_text(str(number + 1))
"""
    (tmp_path / "count").write_text("0")
    processes = [start(code, tmp_path) for _ in range(8)]
    assert [process.wait() for process in processes] == [0] * 8
    for process in processes:
        process.communicate()
    assert (tmp_path / "count").read_text() == "320"


def test_threads_of_one_process_exclude_each_other(tmp_path: Path):
    key_locks, inside, most = KeyLocks(Directory(tmp_path)), [0], [0]

    def work() -> None:
        for _ in range(10):
            with key_locks.hold(KEY, timeout=60):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


@pytest.mark.requirement("R21", part=True)
def test_without_locks_everybody_goes_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(locks, "fcntl", None)
    key_locks = KeyLocks(Directory(tmp_path))
    with key_locks.hold(KEY, timeout=60) as first, key_locks.hold(KEY, timeout=60) as second:
        assert (first, second) == (True, True)
    assert not (tmp_path / "locks").exists()


@pytest.mark.requirement("R21", part=True)
@pytest.mark.requirement("R25", part=True)
def test_a_volume_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    key_locks = KeyLocks(Directory(tmp_path))
    with key_locks.hold(KEY, timeout=60) as first, key_locks.hold(KEY, timeout=60) as second:
        assert (first, second) == (True, True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1  # the directory's own


def test_a_read_only_store_has_no_locks(tmp_path: Path):
    with KeyLocks(Directory(tmp_path, readonly=True)).hold(KEY, timeout=60) as held:
        assert held is True
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("plant", ["link", "fifo", "directory"])
@pytest.mark.requirement("R32")
def test_what_is_planted_in_a_locks_place_is_left_alone(tmp_path: Path, plant: str):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.write_text("precious")
    (root / "locks").mkdir(parents=True)
    place = root / "locks" / f"{KEY}.lock"
    if plant == "link":
        place.symlink_to(outside)
    elif plant == "fifo":
        os.mkfifo(place)
    else:
        place.mkdir()
    with KeyLocks(Directory(root)).hold(KEY, timeout=60) as held:
        assert held is True
    assert outside.read_text() == "precious"
    assert os.path.lexists(place)


def test_a_key_that_is_no_plain_name_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequestError), KeyLocks(Directory(tmp_path)).hold("../x", timeout=0):
        pass
