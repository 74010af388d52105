from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from kvkeep.errors import InvalidRequestError, StoreReadOnlyError
from kvkeep.storage.fs import Directory
from kvkeep.storage.refs import Ref, Refs

KEY, OTHER = "ab" * 16, "cd" * 16


def test_a_name_is_one_small_file(tmp_path: Path):
    refs = Refs(Directory(tmp_path))
    ref = Ref(name="system-prompt_v1.2", key=KEY, pin=True, expires=1_800_000_000, created=1_700_000_000)
    refs.put(ref)
    assert refs.get("system-prompt_v1.2") == ref
    path = tmp_path / "refs" / "system-prompt_v1.2.json"
    assert path.read_text() == (
        f'{{"created":1700000000,"expires":1800000000,"key":"{KEY}","name":"system-prompt_v1.2","pin":true}}'
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in (tmp_path / "refs").iterdir()] == ["system-prompt_v1.2.json"]


def test_a_name_points_at_the_entry_it_was_given_last(tmp_path: Path):
    refs = Refs(Directory(tmp_path))
    refs.put(Ref(name="a", key=KEY, created=1))
    refs.put(Ref(name="a", key=OTHER, created=2))
    assert refs.get("a") == Ref(name="a", key=OTHER, pin=False, expires=None, created=2)


def test_all_names_are_sorted_and_removed_ones_are_gone(tmp_path: Path):
    refs = Refs(Directory(tmp_path))
    assert (refs.all(), refs.get("a"), refs.remove("a")) == ([], None, False)
    for name in ("b", "a", "c", "..", "x" * 100):
        refs.put(Ref(name=name, key=KEY, created=1))
    assert refs.remove("b") is True
    assert [ref.name for ref in refs.all()] == ["..", "a", "c", "x" * 100]
    assert [ref.name for ref in Refs(Directory(tmp_path, readonly=True)).all()] == ["..", "a", "c", "x" * 100]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "é", "a\n", "a\0", "x" * 101, "/etc/passwd"])
def test_other_names_are_refused(tmp_path: Path, name: str):
    refs = Refs(Directory(tmp_path))
    for call in (refs.get, refs.remove, lambda name: refs.put(Ref(name=name, key=KEY, created=1))):
        with pytest.raises(InvalidRequestError, match="use 1 to 100 of A-Z"):
            call(name)
    assert list(tmp_path.iterdir()) == []


GOOD = f'{{"created":1,"expires":null,"key":"{KEY}","name":"a","pin":false}}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 4000,
        GOOD.replace('"a"', '"b"'),
        GOOD.replace('"a"', "1"),
        GOOD.replace(KEY, "../../etc"),
        GOOD.replace("false", "0"),
        GOOD.replace("null", "1.5"),
        GOOD.replace("1,", "true,"),
        GOOD.replace("}", ',"more":1}'),
        GOOD.replace('"pin":false', '"pins":false'),
        GOOD + " " * 5000,
    ],
)
def test_a_damaged_name_counts_as_absent_and_is_told(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture):
    refs = Refs(Directory(tmp_path))
    refs.put(Ref(name="z", key=KEY, created=1))
    (tmp_path / "refs" / "a.json").write_text(GOOD)
    assert refs.get("a") == Ref(name="a", key=KEY, created=1)
    (tmp_path / "refs" / "a.json").write_text(content)
    with caplog.at_level(logging.WARNING, "kvkeep"):
        assert refs.get("a") is None
    assert caplog.messages[0].startswith("refs/a.json is ignored: ")
    assert [ref.name for ref in refs.all()] == ["z"]


@pytest.mark.requirement("R32")
def test_a_link_in_a_names_place_is_not_followed(tmp_path: Path):
    (tmp_path / "outside").write_text(GOOD)
    root = tmp_path / "root"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "a.json").symlink_to(tmp_path / "outside")
    refs = Refs(Directory(root))
    assert refs.get("a") is None
    refs.put(Ref(name="a", key=OTHER, created=2))
    assert refs.get("a") == Ref(name="a", key=OTHER, created=2)
    assert (tmp_path / "outside").read_text() == GOOD


def test_a_read_only_store_names_nothing(tmp_path: Path):
    refs = Refs(Directory(tmp_path, readonly=True))
    with pytest.raises(StoreReadOnlyError):
        refs.put(Ref(name="a", key=KEY, created=1))
    with pytest.raises(StoreReadOnlyError):
        refs.remove("a")
