"""What makes a directory a store, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from entry_drafts import full, sample

import kvkeep
from kvkeep.errors import InvalidRequestError, StoreFormatError, StoreNotFoundError, StoreWriteError
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.skeleton import SKELETON, StoreInfo, check, init

COMMITTED = Path(kvkeep.__file__).parents[2] / "cache_store"


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def state(path: Path) -> tuple[int, ...]:
    known = path.stat()
    return known.st_ino, known.st_size, known.st_mode, known.st_mtime_ns, known.st_ctime_ns


def fresh_clone(target: Path) -> Path:
    target.mkdir()
    for name in SKELETON:
        shutil.copyfile(COMMITTED / name, target / name)
    return target


def test_the_committed_store_is_what_init_creates(tmp_path: Path) -> None:
    init(tmp_path / "store")
    made = files(tmp_path / "store")
    assert sorted(made) == sorted(SKELETON)
    assert made == {name: (COMMITTED / name).read_bytes() for name in SKELETON}


def test_init_creates_a_private_store(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        init(tmp_path / "a" / "store")
    finally:
        os.umask(before)
    root = tmp_path / "a" / "store"
    assert check(root) == StoreInfo(format=1, shared=False)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE((root / name).stat().st_mode) for name in SKELETON} == {0o600}


def test_init_creates_a_shared_store(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        init(tmp_path, shared=True)
    finally:
        os.umask(before)
    assert check(tmp_path) == StoreInfo(format=1, shared=True)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o2770
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in SKELETON} == {0o660}
    init(tmp_path)
    assert check(tmp_path).shared is True, "a plain init leaves it shared"


def test_init_twice_changes_nothing(tmp_path: Path, system: str) -> None:
    init(tmp_path)
    (tmp_path / "warm.toml").write_text("mine")
    (tmp_path / "FORMAT.md").unlink()
    before = {name: state(tmp_path / name) for name in SKELETON if name != "FORMAT.md"}
    init(tmp_path)
    assert (tmp_path / "warm.toml").read_text() == "mine"
    assert {name: state(tmp_path / name) for name in before} == before
    assert (tmp_path / "FORMAT.md").read_bytes() == (COMMITTED / "FORMAT.md").read_bytes()


def test_a_fresh_clone_is_a_store_and_gets_its_folders_when_they_are_needed(tmp_path: Path, system: str) -> None:
    root = fresh_clone(tmp_path / "store")
    assert check(root) == StoreInfo(format=1, shared=False)
    init(root)
    assert sorted(path.name for path in root.iterdir()) == sorted(SKELETON)
    one = sample([full()], end=9)
    EntryFiles(Directory(root)).put(one.draft)
    assert sorted(path.name for path in root.iterdir()) == sorted([*SKELETON, "entries", "tmp"])


def test_a_private_store_does_not_become_shared(tmp_path: Path) -> None:
    init(tmp_path)
    with pytest.raises(InvalidRequestError, match="private store"):
        init(tmp_path, shared=True)


@pytest.mark.requirement("R37")
def test_generated_files_stay_out_of_version_control(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    init(tmp_path / "store")
    directory = Directory(tmp_path / "store")
    for folder in ("entries", "index", "journal", "locks", "quarantine", "refs", "tmp"):
        directory.write_atomic(folder, "FORMAT.md", data=b"x")
    directory.write_atomic("index.db", data=b"x")
    found = git("status", "--porcelain", "--untracked-files=all").splitlines()
    assert sorted(found) == sorted(f"?? store/{name}" for name in SKELETON)


@pytest.mark.requirement("R37")
def test_the_cache_directory_tag_is_one(tmp_path: Path) -> None:
    init(tmp_path)
    assert (tmp_path / "CACHEDIR.TAG").read_bytes()[:43] == b"Signature: 8a477f597d28d172789f06886806bc55"


def test_an_init_that_was_cut_short_can_be_done_again(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "123-0123456789abcdef.new").write_bytes(b"half")
    init(tmp_path)
    assert check(tmp_path).format == 1


@pytest.mark.parametrize("content", [{"tmp/notes.txt": b"x"}, {"notes.txt": b"x"}, {"sub/notes.txt": b""}])
@pytest.mark.requirement("R37")
def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for call in (init, check):
        with pytest.raises(StoreFormatError, match="choose another directory"):
            call(tmp_path)
    assert files(tmp_path) == content


@pytest.mark.requirement("R37")
def test_the_root_and_the_home_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for path in ("/", "//", str(tmp_path), ".", "link", str(tmp_path / "x" / "..")):
        for call in (init, check):
            with pytest.raises(StoreFormatError, match="directory of its own"):
                call(path)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_where_nothing_is_there_is_no_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(StoreNotFoundError, match="kvkeep init"):
            check(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for call in (init, check):
        with pytest.raises(StoreFormatError, match="cannot be used as a directory"):
            call(tmp_path / "file")


@pytest.mark.requirement("R8", part=True)
def test_a_newer_format_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    root = fresh_clone(tmp_path / "store")
    (root / "store.json").write_text('{"format": 2, "shared": false}')
    (root / "FORMAT.md").unlink()
    before = {path: state(path) for path in (root, *root.iterdir())}
    for call in (init, check):
        with pytest.raises(StoreFormatError, match="format 2, which a newer kvkeep reads; upgrade"):
            call(root)
    assert {path: state(path) for path in (root, *root.iterdir())} == before


NONSENSE = [
    *("", "{", "[]", "{}", "\0", "[" * 30_000),
    *('{"format": 0}', '{"format": true}', '{"format": "1"}', '{"format": 1.0}'),
    *('{"format": 1, "shared": 1}', '{"format": 1, "x": "' + "x" * 70_000 + '"}'),
]


@pytest.mark.parametrize("content", NONSENSE)
def test_a_store_file_that_makes_no_sense_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "store.json").write_text(content)
    for call in (init, check):
        with pytest.raises(StoreFormatError, match=r"store\.json"):
            call(tmp_path)


def test_members_that_this_version_does_not_know_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text(json.dumps({"format": 1, "shared": False, "colour": "blue"}))
    assert check(tmp_path) == StoreInfo(format=1, shared=False)


@pytest.mark.requirement("R32")
def test_a_store_file_that_is_a_link_or_a_fifo_is_refused(tmp_path: Path) -> None:
    init(tmp_path / "good")
    for name, plant in (
        ("a", lambda path: path.symlink_to(tmp_path / "good" / "store.json")),
        ("b", os.mkfifo),
        ("c", lambda path: path.mkdir()),
    ):
        (tmp_path / name).mkdir()
        plant(tmp_path / name / "store.json")
        with pytest.raises(StoreFormatError, match="cannot be read"):
            check(tmp_path / name)


def test_a_private_store_that_anybody_may_write_to_is_refused(tmp_path: Path) -> None:
    root = fresh_clone(tmp_path / "store")
    for mode, allowed in ((0o755, True), (0o777, False), (0o1777, True), (0o702, False)):
        root.chmod(mode)
        if allowed:
            assert check(root).format == 1
        else:
            with pytest.raises(StoreFormatError, match="anybody may write"):
                check(root)
            with pytest.raises(StoreFormatError, match="anybody may write"):
                init(root)


def test_a_private_store_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, shared, empty = fresh_clone(tmp_path / "store"), tmp_path / "shared", tmp_path / "empty"
    init(shared, shared=True)
    empty.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    for path, call in ((root, check), (root, init), (empty, init)):
        with pytest.raises(StoreFormatError, match="another user's"):
            call(path)
    assert check(root, readonly=True).shared is False
    assert check(shared).shared is True
    assert list(empty.iterdir()) == []


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((StoreWriteError, StoreFormatError), match="directory"):
        init(tmp_path / "file" / "store")
