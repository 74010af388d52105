"""The directory: modes, atomic appearance, nothing left behind, nothing outside the root."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvkeep.errors import InvalidRequestError, StoreReadOnlyError, StoreWriteError
from kvkeep.storage.fileio import read_at
from kvkeep.storage.fs import Directory


def put(directory: Directory, *name: str, data: bytes = b"content") -> bool:
    with directory.temporary(".part") as temporary:
        temporary.write(0, data)
        return directory.publish(temporary, *name)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize(
    ("shared", "directories", "entries", "others"), [(False, 0o700, 0o400, 0o600), (True, 0o2770, 0o440, 0o660)]
)
@pytest.mark.requirement("R33", part=True)
def test_modes_do_not_depend_on_the_umask(
    tmp_path: Path, umask: int, shared: bool, directories: int, entries: int, others: int
) -> None:
    before = os.umask(umask)
    try:
        directory = Directory.create(tmp_path / "a" / "store", shared=shared)
        put(directory, "entries", "ab", "one")
        directory.write_atomic("refs", "name.json", data=b"{}")
        directory.append("journal", "1.jsonl", data=b"x")
        os.close(directory.open_lock("locks", "l"))
    finally:
        os.umask(before)
    root = tmp_path / "a" / "store"
    folders = [path for path in (root, *root.rglob("*")) if path.is_dir()]
    assert {path.name: mode(path) for path in folders} == dict.fromkeys(
        ["store", "tmp", "entries", "ab", "refs", "journal", "locks"], directories
    )
    assert mode(root / "entries" / "ab" / "one") == entries
    assert {mode(root / name) for name in ("refs/name.json", "journal/1.jsonl", "locks/l")} == {others}


def test_the_first_one_published_under_a_name_stays(tmp_path: Path, system: str) -> None:
    directory = Directory(tmp_path)
    assert put(directory, "entries", "ab", "one", data=b"first") is True
    assert put(directory, "entries", "ab", "one", data=b"second") is False
    assert directory.read("entries", "ab", "one") == b"first"
    assert directory.names("tmp") == []
    assert directory.stat("entries", "ab", "one").st_nlink == 1


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_volume_without_links_is_served_with_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls = []

    def no_link(*args: object, **options: object) -> None:
        calls.append(args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    directory = Directory(tmp_path)
    assert put(directory, "one", data=b"first")
    assert not put(directory, "one", data=b"second")
    assert put(directory, "two", data=b"third")
    assert (directory.read("one"), directory.read("two")) == (b"first", b"third")
    assert len(calls) == 1, "asked once a directory object"
    assert directory.names("tmp") == []


def test_a_volume_that_cannot_sync_directories_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    assert put(Directory(tmp_path), "entries", "one")


@pytest.mark.requirement("R1")
def test_what_was_published_is_durable_before_publish_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name and each file is synced, in the order that makes a name never precede its file."""
    steps: list[str] = []
    sync, link = os.fsync, os.link

    def note_sync(fd: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().relative_to(tmp_path).parts[:2]}")
        sync(fd)

    def note_link(*args: object, **options: object) -> None:
        steps.append("link")
        link(*args, **options)  # type: ignore[arg-type]

    directory = Directory(tmp_path)
    with directory.temporary(".part") as temporary:
        name = temporary.name
        temporary.write(0, b"x")
        monkeypatch.setattr(os, "fsync", note_sync)
        monkeypatch.setattr(os, "link", note_link)
        directory.publish(temporary, "entries", "ab", "one")
    assert steps == [f"sync {name}", "sync ()", "sync ('entries',)", "link", "sync ('entries', 'ab')"]


@pytest.mark.requirement("R4")
def test_a_name_that_could_not_be_made_durable_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(tmp_path)
    directory.ensure("entries")
    real = os.fsync

    def fail_on_directories(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    with directory.temporary(".part") as temporary:
        temporary.write(0, b"x")
        monkeypatch.setattr(os, "fsync", fail_on_directories)
        with pytest.raises(StoreWriteError) as caught:
            directory.publish(temporary, "entries", "one")
    assert caught.value.errno == errno.EIO
    assert directory.names("entries") == directory.names("tmp") == []


@pytest.mark.requirement("R4")
def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    directory = Directory(tmp_path)
    directory.ensure("tmp")
    directory.ensure("entries")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreWriteError, match="see whether the disk"), directory.temporary(".part") as temporary:
        directory.publish(temporary, "entries", "one")
    assert len(calls) == 1
    assert directory.names("entries") == directory.names("tmp") == []


def test_a_temporary_file_is_gone_after_any_end(tmp_path: Path, system: str) -> None:
    directory = Directory(tmp_path)
    with directory.temporary(".part") as temporary:
        assert directory.names("tmp") == [temporary.name[1]]
        temporary.write(3, b"abc")
        view = memoryview(bytearray(6))
        assert read_at(temporary.fd, 0, [view[:2], view[2:]]) == 6
        assert view.tobytes() == b"\0\0\0abc"
    assert directory.names("tmp") == []
    with pytest.raises(KeyboardInterrupt), directory.temporary(".part"):
        raise KeyboardInterrupt
    assert directory.names("tmp") == []


def test_small_files_are_replaced_whole(tmp_path: Path, system: str) -> None:
    directory = Directory(tmp_path)
    directory.write_atomic("refs", "a.json", data=b"long content")
    directory.write_atomic("refs", "a.json", data=b"new")
    assert directory.read("refs", "a.json") == b"new"
    with pytest.raises(OSError, match="too large") as caught:
        directory.read("refs", "a.json", limit=2)
    assert caught.value.errno == errno.EFBIG
    assert directory.names("tmp") == []


def test_append_move_remove_and_names(tmp_path: Path, system: str) -> None:
    directory = Directory(tmp_path)
    directory.append("journal", "1", data=b"a\n")
    directory.append("journal", "1", data=b"b\n")
    assert directory.read("journal", "1") == b"a\nb\n"
    assert directory.move(("journal", "1"), ("old", "2")) is True
    assert directory.move(("journal", "1"), ("old", "2")) is False
    assert directory.names("journal") == []
    assert directory.names("old") == ["2"]
    assert directory.names("absent") == []
    assert directory.names() == ["journal", "old"]
    assert [directory.exists(*name) for name in (("old", "2"), ("old", "3"), ("x", "y"))] == [True, False, False]
    assert directory.remove("old", "2") is True
    assert directory.remove("old", "2") is False


def test_appends_of_several_threads_stay_whole(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    lines = [b"%d" % n * 500 + b"\n" for n in range(8)]

    def work(line: bytes) -> None:
        for _ in range(20):
            directory.append("journal", "1", data=line)

    threads = [threading.Thread(target=work, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = directory.read("journal", "1").splitlines(keepends=True)
    assert sorted(found) == sorted(lines * 20)


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "/etc", "a\0", "é", "a b", "x" * 129, "a\n"])
@pytest.mark.requirement("R31", part=True)
def test_names_that_are_no_plain_components_are_refused(tmp_path: Path, bad: str) -> None:
    directory = Directory(tmp_path / ".." / tmp_path.name)
    for call in (directory.open_read, directory.remove, directory.open_lock, directory.stat, directory.ensure):
        with pytest.raises(InvalidRequestError, match="not a file name"):
            call("entries", bad)
    with pytest.raises(InvalidRequestError, match="needs a name"):
        directory.open_read()
    assert list(tmp_path.iterdir()) == []


def test_names_never_lists_what_cannot_be_named(tmp_path: Path) -> None:
    for name in ("good", "bad name", "-x_.Y"):
        (tmp_path / name).touch()
    assert Directory(tmp_path).names() == ["-x_.Y", "good"]


@pytest.mark.requirement("R32")
def test_no_link_is_followed_at_any_depth(tmp_path: Path, system: str) -> None:
    outside = tmp_path / "outside"
    (outside / "ab").mkdir(parents=True)
    (outside / "ab" / "one").write_bytes(b"secret")
    root = tmp_path / "store"
    root.mkdir()
    directory = Directory(root)
    (root / "entries").symlink_to(outside)
    (root / "file").symlink_to(outside / "ab" / "one")
    (root / "tmp").symlink_to(outside)
    for name in (("entries", "ab", "one"), ("file",)):
        with pytest.raises(OSError, match=r"Not a directory|symbolic links") as caught:
            directory.open_read(*name)
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    for change in (
        lambda: directory.append("file", data=b"x"),
        lambda: directory.open_lock("file"),
        lambda: directory.write_atomic("refs", "a", data=b"x"),
        lambda: directory.remove("entries", "ab", "one"),
        lambda: directory.ensure("entries", "new"),
    ):
        with pytest.raises(StoreWriteError):
            change()
    assert sorted(path.name for path in outside.rglob("*")) == ["ab", "one"]
    assert (outside / "ab" / "one").read_bytes() == b"secret"
    assert directory.remove("file") is True  # the link, not what it leads to
    assert (outside / "ab" / "one").exists()


def test_the_root_itself_may_be_reached_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert put(Directory(tmp_path / "link"), "one")
    assert (tmp_path / "real" / "one").read_bytes() == b"content"


@pytest.mark.requirement("R32")
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, system: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    directory = Directory(tmp_path)
    for name in ("fifo", "folder"):
        with pytest.raises(OSError, match="not a regular file") as caught:
            directory.open_read(name)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(StoreWriteError):
            directory.open_lock(name)
        with pytest.raises(StoreWriteError):
            directory.append(name, data=b"x")


def test_a_directory_removed_behind_our_back_is_made_again(tmp_path: Path, system: str) -> None:
    directory = Directory(tmp_path)
    put(directory, "entries", "ab", "one")
    (tmp_path / "entries" / "ab" / "one").unlink()
    (tmp_path / "entries" / "ab").rmdir()
    (tmp_path / "tmp").rmdir()
    assert put(directory, "entries", "ab", "one")


def test_a_read_only_directory_refuses_every_change(tmp_path: Path, system: str) -> None:
    (tmp_path / "one").write_bytes(b"x")
    directory = Directory(tmp_path, readonly=True)
    for change in (
        lambda: directory.write_atomic("a", data=b""),
        lambda: directory.append("a", data=b""),
        lambda: directory.remove("one"),
        lambda: directory.move(("one",), ("two",)),
        lambda: directory.ensure("a"),
        lambda: directory.open_lock("a"),
        lambda: put(directory, "a"),
    ):
        with pytest.raises(StoreReadOnlyError, match="readonly=True"):
            change()
    assert directory.read("one") == b"x"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_failed_write_says_what_to_do_and_keeps_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    directory = Directory(tmp_path)
    with pytest.raises(StoreWriteError, match="make room, or remove entries with `kvkeep rm`") as caught:
        directory.write_atomic("refs", "a", data=b"x")
    assert caught.value.errno == errno.ENOSPC
    assert directory.names("tmp") == directory.names("refs") == []


def test_a_missing_root_is_not_made_by_opening_it(tmp_path: Path, system: str) -> None:
    with pytest.raises(FileNotFoundError):
        Directory(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_room_in_a_file_takes_no_space(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    with directory.temporary(".part") as temporary:
        temporary.allocate(64 << 20, [(0, 4096), (32 << 20, (32 << 20) + 4096)])
        directory.publish(temporary, "sparse")
    known = directory.stat("sparse")
    assert known.st_size == 64 << 20
    assert 8192 <= known.st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("count", [1, 511, 513, 1500])
def test_any_number_of_buffers_is_filled(tmp_path: Path, system: str, count: int) -> None:
    content = bytes(i % 251 for i in range(3 * count + 10))
    (tmp_path / "one").write_bytes(content)
    fd = Directory(tmp_path).open_read("one")
    views = [memoryview(bytearray(size)) for size in (0, *[3] * count, 0)]
    try:
        assert read_at(fd, 5, views) == 3 * count
        assert b"".join(views) == content[5 : 5 + 3 * count]
        assert read_at(fd, len(content) - 2, views) == 2
        assert read_at(fd, len(content), views) == 0
    finally:
        os.close(fd)


def test_a_process_killed_while_it_writes_leaves_no_name(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, os, signal\n"
        "from kvkeep.storage.fs import Directory\n"
        "with Directory(pathlib.Path(sys.argv[1])).temporary('.part') as temporary:\n"
        "    temporary.write(0, b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert put(Directory(tmp_path), "one")


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may do less than it was asked to: 2 GiB a call at most, and less near a quota."""
    read, write = os.preadv, os.pwrite

    def short_read(fd: int, views: list[memoryview], at: int) -> int:
        return read(fd, [view[:3] for view in views[:2] if len(view)][: 1 if len(views[0]) > 3 else 2], at)

    monkeypatch.setattr(os, "preadv", short_read)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    content = bytes(range(100))
    directory = Directory(tmp_path)
    directory.write_atomic("one", data=content)
    assert (tmp_path / "one").read_bytes() == content
    fd = directory.open_read("one")
    views = [memoryview(bytearray(size)) for size in (1, 2, 10, 3, 0, 30, 60)]
    assert read_at(fd, 2, views) == 98
    os.close(fd)
    assert b"".join(views)[:98] == content[2:]
