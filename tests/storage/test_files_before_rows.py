"""Files that are there before their rows, or for longer, because another process is between the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from entry_drafts import full, sample

from kvkeep import CacheStore
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index, Row
from kvkeep.storage.listing import HeaderReader

ONE, OTHER = (sample([full("U8", heads=1, dim=1)], end=300, seed=seed).draft for seed in (1, 2))
KEY = ONE.meta.key.hash


def keys_of(store: CacheStore) -> set[str]:
    return {entry.key for entry in store.entries()}


@pytest.mark.requirement("R21", part=True)
@pytest.mark.parametrize("readonly", [False, True])
def test_an_entry_that_was_found_before_its_row_stays_found(tmp_path: Path, readonly: bool) -> None:
    CacheStore(tmp_path)
    store, other = CacheStore(tmp_path, readonly=readonly), CacheStore(tmp_path)
    assert keys_of(store) == keys_of(other) == set()
    EntryFiles(Directory(tmp_path)).put(ONE)  # whoever does this has not come to add its row yet
    found = store.get(KEY)
    assert found is not None and found.end == 300
    other.put(OTHER)  # so that the rows are read again
    assert KEY in keys_of(store)
    assert keys_of(other) == {OTHER.meta.key.hash} | ({KEY} if not readonly else set())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with one entry that has a row, and one whose file alone is there."""
    store = CacheStore(tmp_path)
    store.put(OTHER)
    EntryFiles(Directory(tmp_path)).put(ONE)
    return tmp_path


def open_index(root: Path) -> Index:
    directory = Directory(root)
    return Index(directory, EntryFiles(directory))


def test_a_file_that_goes_while_its_header_is_read_gets_no_row(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = HeaderReader.rows

    def racing(self: HeaderReader, keys: Iterable[str]) -> Iterator[Row]:
        rows = list(read(self, keys))
        EntryFiles(Directory(root)).remove(KEY)
        return iter(rows)

    monkeypatch.setattr(HeaderReader, "rows", racing)
    assert [row.key for row in open_index(root).rows()] == [OTHER.meta.key.hash]
    monkeypatch.undo()
    assert [row.key for row in open_index(root).rows()] == [OTHER.meta.key.hash]


def test_a_file_that_comes_back_while_it_is_missed_keeps_its_row(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = OTHER.meta.key.hash
    EntryFiles(Directory(root)).remove(missed)
    there = HeaderReader.is_there

    def racing(self: HeaderReader, key: str) -> bool:
        found = there(self, key)
        if key == missed and not found:
            EntryFiles(Directory(root)).put(OTHER)  # its row is still there
        return found

    monkeypatch.setattr(HeaderReader, "is_there", racing)
    index = open_index(root)
    index.rows()
    monkeypatch.undo()
    assert {row.key for row in index.rows()} == {KEY, missed}
    assert {row.key for row in open_index(root).rows()} == {KEY, missed}


def test_an_entry_that_is_found_while_it_is_removed_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = CacheStore(tmp_path), CacheStore(tmp_path)
    store.put(ONE)
    remove = EntryFiles.remove

    def racing(self: EntryFiles, key: str) -> bool:
        assert other.get(key) is not None  # between its row and its file
        return remove(self, key)

    monkeypatch.setattr(EntryFiles, "remove", racing)
    assert store.remove(KEY)
    monkeypatch.undo()
    assert keys_of(store) == keys_of(other) == keys_of(CacheStore(tmp_path)) == set()
