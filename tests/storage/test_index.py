from __future__ import annotations

import json
import logging
import os
import pickle
import random
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import entry_drafts
import pytest
import xxhash
from entry_drafts import IDENTITY, Layer, everything, full, sample, sliding

from kvkeep.entry_format import Media
from kvkeep.storage import listing, row_database
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index, Row
from kvkeep.storage.row_checks import DamagedDatabaseError
from kvkeep.storage.row_database import RowDatabase

TINY = [full("U8", heads=1, dim=1)]


def put(root: Path, seed: int, **options: Any) -> Row:
    """Store an entry's file, without a row."""
    made = sample(options.pop("layers", TINY), end=options.pop("end", 300), seed=seed, **options)
    header, _ = EntryFiles(Directory(root)).put(made.draft)
    return Row.from_header(header, b"".join(made.draft.chain))


def open_index(root: Path, *, readonly: bool = False) -> Index:
    directory = Directory(root, readonly=readonly)
    return Index(directory, EntryFiles(directory))


def by_key(rows: list[Row]) -> dict[str, Row]:
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row for row in rows}


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Row]:
    """The rows of five entries, in files and in the index."""
    rows = by_key([put(tmp_path, seed) for seed in range(5)])
    index = open_index(tmp_path)
    assert by_key(index.rows()) == rows
    index.close()
    return rows


def in_database(root: Path) -> set[str]:
    """The keys as the rows have them; SQLite's own list of keys may be wrong, and is found out by whoever uses it."""
    return {key for (key,) in query(root, "SELECT key FROM Cache NOT INDEXED")}


def query(root: Path, statement: str) -> list[Any]:
    connection = sqlite3.connect(root / "index" / "cache.db")
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def change(root: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    connection = sqlite3.connect(root / "index" / "cache.db", isolation_level=None)
    for statement in statements:
        connection.execute(statement, values)
    connection.close()


# --- rows ---


def test_a_row_says_what_the_header_says(tmp_path: Path):
    other = replace(sliding(45, 256), kind="other")  # whatever it is called, it has a window
    made = sample([full(), sliding(44, 257), sliding(144, 157), other, sliding(44, 257), Layer(kind="empty")], end=300)
    header, _ = EntryFiles(Directory(tmp_path)).put(made.draft)
    chain = b"".join(made.draft.chain)
    assert len(chain) == 16
    assert Row.from_header(header, chain) == Row(
        key=made.key,
        start=0,
        end=300,
        parent=None,
        nbytes=(tmp_path / "entries" / made.key[:2] / f"{made.key}.safetensors").stat().st_size,
        created=1_700_000_000,
        identity=IDENTITY,
        namespace=made.draft.meta.key.namespace,
        prefix=made.draft.meta.key.prefix,
        form="exact",
        attention="sdpa",
        chain=chain,
        trims=((0, 0), (44, 257), (45, 256), (144, 157)),
        snapshots=False,
        media=(),
        tp=None,
    )


def test_snapshots_of_layers_and_of_the_model_count(tmp_path: Path):
    assert put(tmp_path, 1, layers=[full(), Layer(kind="linear", snapshots={"s": ("F32", (2,))})]).snapshots is True
    assert put(tmp_path, 2, state={"s": ("F32", (2,))}).snapshots is True
    made = everything(start=256)
    header, _ = EntryFiles(Directory(tmp_path)).put(made.draft)
    row = Row.from_header(header, b"".join(made.draft.chain))
    assert (row.start, row.end, row.parent, len(row.chain)) == (256, 600, "a" * 32, 16)
    assert row.media == (Media(kind="image", content="e" * 32, start=3, end=40),)
    assert row.trims == ((256, 0), (300, 200))


def test_a_row_survives_json(tmp_path: Path):
    row = replace(put(tmp_path, 1, end=1000), tp=(4, 3), media=(Media(kind="i", content="e" * 32, start=1, end=2),))
    text = row.to_json()
    assert Row.from_json(text) == row
    assert json.loads(text)["key"] == row.key
    assert "\n" not in text
    assert Row.from_json(text).identity is Row.from_json(text).identity


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("key", "g" * 32),
        ("key", "a" * 31),
        ("key", None),
        ("start", -1),
        ("start", True),
        ("start", 300),
        ("start", 1),
        ("end", 1.0),
        ("end", 512),
        ("parent", "a" * 32),
        ("parent", 7),
        ("nbytes", "1"),
        ("created", None),
        ("identity", []),
        ("identity", [None] * 6),
        ("identity", [[]] * 6),
        ("identity", "a" * 6),
        ("namespace", "../" + "a" * 29),
        ("prefix", 1),
        ("attention", 7),
        ("form", ""),
        ("form", "a b"),
        ("chain", "*"),
        ("chain", ""),
        ("chain", 5),
        ("trims", [[0]]),
        ("trims", [[0, -1]]),
        ("trims", {}),
        ("snapshots", 0),
        ("media", [["i", "e" * 32, 1]]),
        ("media", [[1, "e" * 32, 1, 2]]),
        ("tp", [1]),
        ("more", 1),
    ],
)
def test_a_row_that_cannot_be_is_refused(tmp_path: Path, member: str, value: object):
    source = json.loads(put(tmp_path, 1).to_json())
    source[member] = value
    with pytest.raises(ValueError):  # noqa: PT011
        Row.from_json(json.dumps(source))


@pytest.mark.parametrize("text", ["", "[]", "7", "null", "{}", "{", "[" * 100_000, "nul"])
def test_what_is_no_row_is_refused(text: str):
    with pytest.raises(ValueError):  # noqa: PT011
        Row.from_json(text)


# --- what the index is for ---


def test_a_new_store_has_no_rows(tmp_path: Path):
    index = open_index(tmp_path)
    assert index.changed() is True
    assert index.rows() == []
    assert index.changed() is False


def test_what_one_adds_or_discards_another_sees(tmp_path: Path):
    first, second = open_index(tmp_path), open_index(tmp_path)
    rows = [put(tmp_path, seed) for seed in range(3)]
    assert (len(first.rows()), len(second.rows())) == (3, 3)  # found by their files
    more = put(tmp_path, 3)
    first.add(more)
    assert second.changed() is True
    before = by_key(second.rows())
    assert before == by_key([*rows, more])
    assert second.changed() is False
    second.discard(rows[0].key)
    second.discard(rows[0].key)
    assert first.changed() is True
    after = by_key(first.rows())
    assert after == by_key([*rows[1:], more])
    assert in_database(tmp_path) == set(after)
    assert all(row is before[key] for key, row in by_key(second.rows()).items())  # nothing is read twice


def test_what_others_wrote_while_nothing_was_open_is_not_overlooked(tmp_path: Path, stored: dict[str, Row]):
    index, other = open_index(tmp_path), open_index(tmp_path)
    assert by_key(index.rows()) == by_key(other.rows()) == stored
    mine, its = put(tmp_path, 50), put(tmp_path, 51)
    index.close()
    other.add(its)
    index.add(mine)  # opens a new connection, which counts changes from its own start
    assert index.changed() is True
    assert by_key(index.rows()) == stored | {mine.key: mine, its.key: its}


def test_a_row_replaces_the_one_of_its_key(tmp_path: Path, stored: dict[str, Row]):
    first, second = open_index(tmp_path), open_index(tmp_path)
    assert by_key(second.rows()) == stored
    row = replace(next(iter(stored.values())), nbytes=1, created=2)
    first.add(row)
    assert second.changed() is True
    assert by_key(second.rows()) == stored | {row.key: row}
    assert in_database(tmp_path) == set(stored)


def test_opening_finds_files_without_rows_and_rows_without_files(tmp_path: Path, stored: dict[str, Row]):
    gone, *_ = stored
    assert EntryFiles(Directory(tmp_path)).remove(gone) is True
    by_hand = put(tmp_path, 77)
    index = open_index(tmp_path)
    expected = {key: row for key, row in stored.items() if key != gone} | {by_hand.key: by_hand}
    assert by_key(index.rows()) == expected
    assert in_database(tmp_path) == set(expected)


def test_adding_is_enough_to_open(tmp_path: Path, stored: dict[str, Row]):
    row = put(tmp_path, 77)
    open_index(tmp_path).add(row)
    assert in_database(tmp_path) == {*stored, row.key}


def test_a_damaged_entry_has_no_row_and_is_told_once(
    tmp_path: Path, stored: dict[str, Row], caplog: pytest.LogCaptureFixture
):
    key, torn, *_ = stored
    for name, at in ((key, 200), (torn, -1)):
        path = tmp_path / "entries" / name[:2] / f"{name}.safetensors"
        content = bytearray(path.read_bytes())
        path.unlink()
        content[at] ^= 1
        path.write_bytes(content if at > 0 else content[:5000])
    index = open_index(tmp_path)
    with caplog.at_level(logging.WARNING, "kvkeep"):
        index.rebuild()
        assert set(by_key(index.rows())) == set(stored) - {key, torn}
        open_index(tmp_path).rows()
    assert index.damaged == {key: "the header's seal does not match", torn: "the file ends early"}
    assert [message for message in caplog.messages if key in message] == [
        f"entry {key} is left out of the index: the header's seal does not match"
    ] * 2  # once for each of two that opened


@pytest.mark.parametrize("part", ["ids", "chain", "digests", "ids and their digest"])
def test_a_row_is_not_made_from_damaged_tensors(tmp_path: Path, part: str):
    row = put(tmp_path, 1)
    path = tmp_path / "entries" / row.key[:2] / f"{row.key}.safetensors"
    with EntryFiles(Directory(tmp_path)).open(row.key) as file:
        header = file.header
    content = bytearray(path.read_bytes())

    def place(name: str) -> slice:
        return slice(header.data + header.tensors[name].begin, header.data + header.tensors[name].end)

    content[place(part.split()[0]).start] ^= 1
    if part == "ids and their digest":
        at = place("digests").start
        content[at : at + 16] = xxhash.xxh3_128_digest(content[place("ids")] + content[place("chain")])
    path.unlink()
    path.write_bytes(content)
    index = open_index(tmp_path)
    assert index.rows() == []
    assert set(index.damaged) == {row.key}


@pytest.mark.requirement("R13")
def test_a_file_under_the_key_of_another_entry_has_no_row(tmp_path: Path, stored: dict[str, Row]):
    key, other, *_ = stored
    files = [tmp_path / "entries" / name[:2] / f"{name}.safetensors" for name in (key, other)]
    files[0].unlink()
    files[1].rename(files[0])
    index = open_index(tmp_path)
    index.rebuild()
    assert set(by_key(index.rows())) == stored.keys() - {key, other}
    assert index.damaged == {key: "the file is the entry of another key"}


def test_what_is_stored_while_the_index_is_made_anew_is_in_it(
    tmp_path: Path, stored: dict[str, Row], monkeypatch: pytest.MonkeyPatch
):
    index = open_index(tmp_path)
    late: list[Row] = []
    rows_of = index._headers.rows

    def rows(keys: Iterable[str]) -> Iterator[Row]:
        yield from rows_of(keys)
        if not late:
            late.append(put(tmp_path, 77))
            EntryFiles(Directory(tmp_path)).remove(next(iter(stored)))

    monkeypatch.setattr(index._headers, "rows", rows)
    index.rebuild()
    assert in_database(tmp_path) == {*list(stored)[1:], late[0].key}


def test_of_two_that_find_the_same_damage_one_makes_the_index_anew(tmp_path: Path, stored: dict[str, Row]):
    first, second = RowDatabase(Directory(tmp_path)), RowDatabase(Directory(tmp_path))
    (tmp_path / "index" / "cache.db").write_bytes(b"x" * 5000)
    for database in (first, second):
        with pytest.raises(DamagedDatabaseError):
            database.refresh()
    rows = list(stored.values())[:2]
    first.replace(lambda: rows)
    second.replace(lambda: pytest.fail("the second one made it anew, too"))
    assert second.refresh() is True
    assert second.rows == by_key(rows)
    for database in (first, second):
        database.close()


def test_rebuilding_makes_every_row_again(tmp_path: Path, stored: dict[str, Row]):
    index, other = open_index(tmp_path), open_index(tmp_path)
    wrong = replace(next(iter(stored.values())), nbytes=1)
    index.add(wrong)
    assert by_key(other.rows()) == stored | {wrong.key: wrong}
    index.rebuild()
    assert by_key(index.rows()) == stored
    assert other.changed() is True
    assert by_key(other.rows()) == stored


# --- damage ---

DATABASE = ("cache.db", "cache.db-shm", "cache.db-wal")


def corrupt(content: bytes, how: random.Random) -> bytes | None:
    kind = how.randrange(5)
    changed = bytearray(content or b"x")
    if kind == 0:
        return None
    if kind == 1:
        return bytes(changed[: how.randrange(len(changed))])
    if kind == 2:
        return how.randbytes(how.randrange(20_000))
    if kind == 3:
        at = how.randrange(len(changed))
        changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
    for _ in range(how.choice([1, 1, 5, 50])):
        changed[how.randrange(len(changed))] ^= 1 << how.randrange(8)
    return bytes(changed)


@pytest.mark.requirement("R6")
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_databases_damaged_by_chance_are_all_made_good(
    tmp_path: Path, stored: dict[str, Row], count: int, figures: list[str]
):
    """Whatever is done to its files, the index opens, answers rightly, and is whole afterwards for others."""
    folder = tmp_path / "index"
    index = open_index(tmp_path)
    index.rows()
    index.add(next(iter(stored.values())))
    live = {name: (folder / name).read_bytes() for name in DATABASE}  # as a killed process leaves them
    index.close()
    closed = {"cache.db": (folder / "cache.db").read_bytes()}
    first, *_ = stored
    how = random.Random(20)
    for _ in range(count):
        for path in folder.iterdir():
            path.unlink()
        files: dict[str, bytes | None] = dict(how.choice([live, closed]))
        name = how.choice(sorted(files))
        files[name] = corrupt(files[name] or b"", how)
        for file, content in files.items():
            if content is not None:
                (folder / file).write_bytes(content)
        index = open_index(tmp_path)
        assert by_key(index.rows()) == stored
        index.discard(first)
        assert set(by_key(index.rows())) == stored.keys() - {first}
        index.add(stored[first])
        assert by_key(index.rows()) == stored
        index.close()
        assert in_database(tmp_path) == set(stored)
    figures.append(f"index files damaged: {count}, wrong answers and exceptions: 0")


@pytest.mark.requirement("R6", part=True)
@pytest.mark.slow
def test_ten_thousand_entries_are_indexed_again_in_seconds(tmp_path: Path, figures: list[str]):
    files = EntryFiles(Directory(tmp_path, sync=False))
    for seed in range(10_000):
        files.put(sample([full("U8", heads=1, dim=1)], end=30, seed=seed).draft)
    began = time.perf_counter()
    assert len(open_index(tmp_path).rows()) == 10_000
    seconds = time.perf_counter() - began
    figures.append(f"an index of 10,000 entries made anew: {seconds:.1f} s")
    assert seconds < 12


@pytest.mark.parametrize("when", ["before rows", "before add", "before discard"])
@pytest.mark.requirement("R6")
def test_an_index_that_vanishes_under_a_process_is_made_anew(tmp_path: Path, stored: dict[str, Row], when: str):
    index, other = open_index(tmp_path), open_index(tmp_path)
    assert by_key(index.rows()) == by_key(other.rows()) == stored
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    row = put(tmp_path, 77)
    expected = stored | {row.key: row}
    if when == "before add":
        index.add(row)
    elif when == "before discard":
        index.discard(row.key)
        expected = stored
    assert index.changed() is True
    assert by_key(index.rows()) == expected
    assert in_database(tmp_path) == set(expected)
    assert other.changed() is True
    assert by_key(other.rows()) == stored | {row.key: row}


def test_a_database_that_others_keep_busy_is_no_error(
    tmp_path: Path, stored: dict[str, Row], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_database, "_TIMEOUT", 0.1)
    index = open_index(tmp_path)
    index.rows()
    row, gone = put(tmp_path, 77), next(iter(stored))
    blocker = sqlite3.connect(tmp_path / "index" / "cache.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    index.add(row)
    expected = stored | {row.key: row}
    assert by_key(index.rows()) == expected
    assert time.monotonic() - began < 20
    blocker.execute("ROLLBACK")
    blocker.close()
    assert in_database(tmp_path) == set(stored)
    index.discard(gone)  # writes what waits, too
    del expected[gone]
    assert in_database(tmp_path) == set(expected)
    assert by_key(index.rows()) == expected


def test_an_index_in_a_place_that_cannot_be_used_is_done_without_until_it_can(
    tmp_path: Path, stored: dict[str, Row], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    (tmp_path / "index" / "cache.db").mkdir()
    index = open_index(tmp_path)
    row = put(tmp_path, 77)
    with caplog.at_level(logging.WARNING, "kvkeep"):
        assert by_key(index.rows()) == stored | {row.key: row}
        index.discard(row.key)
        index.add(row)
        assert by_key(index.rows()) == stored | {row.key: row}
    assert len([message for message in caplog.messages if "headers are read instead" in message]) == 1
    (tmp_path / "index" / "cache.db").rmdir()
    assert index.changed() is False
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    assert index.changed() is True
    assert by_key(index.rows()) == stored | {row.key: row}
    assert in_database(tmp_path) == {*stored, row.key}
    assert index.changed() is False


# --- hostility ---


def plant_pickle(root: Path, row: Row) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return (Path.touch, (root / "pwned",))

    values = (sqlite3.Binary(pickle.dumps(Payload())),)
    change(root, "UPDATE Cache SET mode = 4, value = ?", values=values)


def plant_pickled_key(root: Path, row: Row) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return (Path.touch, (root / "pwned",))

    values = (sqlite3.Binary(pickle.dumps(Payload())),)
    change(root, f"UPDATE Cache SET raw = 0, key = ? WHERE key = '{row.key}'", values=values)


def plant_file(root: Path, row: Row) -> None:
    change(root, f"UPDATE Cache SET mode = 3, value = NULL, filename = '../secret' WHERE key = '{row.key}'")


def plant_file_beside_a_value(root: Path, row: Row) -> None:
    change(root, f"UPDATE Cache SET filename = '../secret' WHERE key = '{row.key}'")


def plant_text(root: Path, row: Row) -> None:
    change(root, f"UPDATE Cache SET value = '{{}}' WHERE key = '{row.key}'")


def plant_blob(root: Path, row: Row) -> None:
    change(root, "UPDATE Cache SET value = CAST(value AS BLOB)")


def plant_edited_row(root: Path, row: Row) -> None:
    change(root, f"UPDATE Cache SET value = replace(value, '\"end\":300', '\"end\":301') WHERE key = '{row.key}'")


def plant_swapped_rows(root: Path, row: Row) -> None:
    change(
        root,
        "CREATE TEMP TABLE t AS SELECT key, value, tag FROM Cache ORDER BY key LIMIT 2",
        "UPDATE Cache SET value = (SELECT value FROM t WHERE t.key <> Cache.key), "
        "tag = (SELECT tag FROM t WHERE t.key <> Cache.key) WHERE key IN (SELECT key FROM t)",
    )


def plant_expiry(root: Path, row: Row) -> None:
    change(root, "UPDATE Cache SET expire_time = 1.0")


def plant_stranger(root: Path, row: Row) -> None:
    change(root, "INSERT INTO Cache (key, raw, mode, value) VALUES (7, 1, 1, 8)")


def plant_setting(root: Path, row: Row) -> None:
    change(root, "INSERT INTO Settings VALUES ('_directory', ?)", values=(str(root / "outside"),))


def plant_mapping(root: Path, row: Row) -> None:
    change(root, "UPDATE Settings SET value = 1099511627776 WHERE key = 'sqlite_mmap_size'")


def plant_policy(root: Path, row: Row) -> None:
    change(root, "UPDATE Settings SET value = 'least-recently-stored' WHERE key = 'eviction_policy'")


def plant_trigger(root: Path, row: Row) -> None:
    change(root, "CREATE TRIGGER t AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END")


def plant_view(root: Path, row: Row) -> None:
    change(root, "ALTER TABLE Cache RENAME TO Other", "CREATE VIEW Cache AS SELECT * FROM Other")


PLANTS = [value for name, value in sorted(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.requirement("R29", part=True)
def test_a_database_that_somebody_else_wrote_is_replaced_and_obeyed_in_nothing(
    tmp_path: Path, stored: dict[str, Row], plant: Callable[[Path, Row], None]
):
    secret, outside = tmp_path / "secret", tmp_path / "outside"
    secret.write_text("precious")
    outside.mkdir()
    running = open_index(tmp_path)
    assert by_key(running.rows()) == stored
    plant(tmp_path, next(iter(stored.values())))
    before = (tmp_path / "index" / "cache.db").stat().st_ino
    index = open_index(tmp_path)
    assert by_key(index.rows()) == stored
    index.discard(next(iter(stored)))
    index.add(next(iter(stored.values())))
    assert by_key(index.rows()) == stored
    assert running.changed() is True
    assert by_key(running.rows()) == stored
    assert (tmp_path / "index" / "cache.db").stat().st_ino != before
    assert in_database(tmp_path) == set(stored)
    assert secret.read_text() == "precious"
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "record",
    [(4, None, "text", False), (1, "../secret", "text", False), (1, None, b"x", False), (1, None, "text", True)],
)
@pytest.mark.requirement("R29", part=True)
def test_the_disk_of_diskcache_takes_text_only(tmp_path: Path, record: tuple[int, str | None, Any, bool]):
    from kvkeep.storage.json_disk import TextDisk

    (tmp_path / "secret").write_text("precious")
    disk = TextDisk(str(tmp_path))
    assert disk.fetch(1, None, "text", False) == "text"
    with pytest.raises(ValueError, match="the index holds text only"):
        disk.fetch(*record)
    with pytest.raises(ValueError, match="the index holds text only, not a file"):
        disk.filename()
    disk.remove("secret")
    assert (tmp_path / "secret").read_text() == "precious"


@pytest.mark.requirement("R29", part=True)
def test_diskcache_itself_refuses_what_is_not_text(tmp_path: Path, stored: dict[str, Row]):
    from kvkeep.storage.json_disk import open_cache
    from kvkeep.storage.row_checks import SETTINGS

    key, other, *_ = stored
    (tmp_path / "secret").write_text("precious")
    plant_file(tmp_path, stored[key])
    cache = open_cache(tmp_path / "index", SETTINGS, 1.0)
    with pytest.raises(ValueError, match="not a value of mode 3"):
        cache.get(key)
    assert Row.from_json(cache.get(other)) == stored[other]
    for value in (b"bytes", 7, None, {"a": 1}):
        with pytest.raises(ValueError, match="the index holds text only"):
            cache.set("key", value)
        with pytest.raises(ValueError, match="the index holds text only"):
            cache.set(value, "value")
    assert cache.delete(key) is True
    assert (tmp_path / "secret").read_text() == "precious"
    plant_pickled_key(tmp_path, stored[other])
    with pytest.raises(ValueError, match="not a pickled key"):
        list(cache)
    cache.close()
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "wal link", "folder link", "folder is a file"])
@pytest.mark.requirement("R32")
def test_what_is_planted_in_the_place_of_the_database_is_not_followed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
):
    """Not even where what it leads to is the sound index of another store."""
    root, outside = tmp_path / "root", tmp_path / "other" / "index"
    rows = by_key([put(Directory.create(root).root, seed) for seed in range(3)])
    victim = open_index(Directory.create(tmp_path / "other").root)
    victim.add(put(tmp_path / "other", 9))
    victim.close()
    before = {path.name: path.read_bytes() for path in outside.iterdir() if path.name != "cache.db-shm"}
    folder = root / "index"
    if kind == "folder link":
        folder.symlink_to(outside)
    elif kind == "folder is a file":
        folder.write_text("x")
    else:
        folder.mkdir()
    if kind == "link":
        (folder / "cache.db").symlink_to(outside / "cache.db")
    elif kind == "hard link":
        (folder / "cache.db").hardlink_to(outside / "cache.db")
    elif kind == "fifo":
        os.mkfifo(folder / "cache.db")
    elif kind == "wal link":
        index = open_index(root)
        index.rows()
        index.close()
        (folder / "cache.db-wal").unlink(missing_ok=True)
        (folder / "cache.db-wal").symlink_to(outside / "cache.db")
    index = open_index(root)
    assert by_key(index.rows()) == rows
    index.discard(next(iter(rows)))
    index.add(next(iter(rows.values())))
    index.close()
    assert {path.name: path.read_bytes() for path in outside.iterdir() if path.name != "cache.db-shm"} == before
    assert stat.S_ISREG((folder / "cache.db").lstat().st_mode)
    assert not folder.is_symlink()
    assert in_database(root) == set(rows)


def test_a_reader_that_closes_removes_no_file_by_its_name(tmp_path: Path):
    """By then the log of that name may belong to a database that has replaced the one it read."""
    writer, reader = open_index(tmp_path), open_index(tmp_path)
    rows = by_key([put(tmp_path, 1)])
    writer.add(rows[next(iter(rows))])
    assert by_key(reader.rows()) == rows
    rows |= by_key([put(tmp_path, 2)])
    writer.add(rows[list(rows)[1]])  # it is not the last to close, so what it wrote stays in the log
    writer.close()
    files = sorted(path.name for path in (tmp_path / "index").iterdir())
    assert "cache.db-wal" in files
    reader.close()
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == files
    assert by_key(open_index(tmp_path).rows()) == rows


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize(("shared", "folder_mode", "file_mode"), [(False, 0o700, 0o600), (True, 0o2770, 0o660)])
@pytest.mark.requirement("R33", part=True)
def test_the_modes_are_ours_whatever_the_umask(
    tmp_path: Path, umask: int, shared: bool, folder_mode: int, file_mode: int
):
    old = os.umask(umask)
    try:
        directory = Directory.create(tmp_path / "store", shared=shared)
        index = Index(directory, EntryFiles(directory))
        index.rows()
        index.add(put(directory.root, 1))
        index.rows()
        folder = directory.root / "index"
        assert stat.S_IMODE(folder.stat().st_mode) == folder_mode
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == dict.fromkeys(DATABASE, file_mode)
    finally:
        os.umask(old)


# --- read-only ---


def test_a_read_only_store_has_rows_and_touches_nothing(tmp_path: Path):
    rows = by_key([put(tmp_path, seed) for seed in range(3)])
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    index = open_index(tmp_path, readonly=True)
    assert index.changed() is True
    assert by_key(index.rows()) == rows
    index.discard(next(iter(rows)))  # the file is still there, so it comes back at the next refresh
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("readonly", [True, False])
def test_who_only_reads_never_imports_diskcache(tmp_path: Path, stored: dict[str, Row], readonly: bool):
    code = """
import sys
from pathlib import Path
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index
directory = Directory(Path(sys.argv[1]), readonly=sys.argv[2] == "True")
print(len(Index(directory, EntryFiles(directory)).rows()), *sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(readonly)]
    count, *modules = subprocess.run(command, check=True, text=True, capture_output=True).stdout.split()
    assert count == "5"
    assert {"diskcache", "pickle", "numpy", "torch"}.isdisjoint(modules)


def test_a_read_only_store_sees_what_others_add_and_remove(tmp_path: Path):
    rows = by_key([put(tmp_path, seed) for seed in range(3)])
    index = open_index(tmp_path, readonly=True)
    assert by_key(index.rows()) == rows
    more, gone = put(tmp_path, 9), next(iter(rows))
    EntryFiles(Directory(tmp_path)).remove(gone)
    deadline = time.monotonic() + 10
    while not index.changed():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = by_key(index.rows())
    assert found == {key: row for key, row in rows.items() if key != gone} | {more.key: more}
    time.sleep(0.2)
    index.rows()
    time.sleep(1.1)
    assert index.changed() is False


def test_a_directory_that_has_just_changed_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another change in the same tick of the clock would not show."""
    monkeypatch.setattr(listing, "_POLL", 0.0)
    row = put(tmp_path, 1)
    index = open_index(tmp_path, readonly=True)
    os.utime(tmp_path / "entries" / row.key[:2])
    index.rows()
    assert index.changed() is True
    time.sleep(0.2)
    index.rows()
    assert index.changed() is False


# --- processes and threads ---


@pytest.mark.requirement("R23", part=True)
def test_a_forked_child_and_its_parent_go_on_apart(tmp_path: Path, stored: dict[str, Row]):
    index = open_index(tmp_path)
    assert by_key(index.rows()) == stored
    mine, its = put(tmp_path, 50), put(tmp_path, 51)
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = by_key(index.rows()).keys() >= stored.keys()
            index.add(its)
            ok = ok and by_key(index.rows()).keys() >= {*stored, its.key}
        finally:
            os._exit(0 if ok else 1)
    index.add(mine)
    assert os.waitpid(child, 0)[1] == 0
    assert by_key(index.rows()) == stored | {mine.key: mine, its.key: its}
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.requirement("R23", part=True)
def test_a_fork_carries_no_connection(tmp_path: Path, stored: dict[str, Row]):
    index = open_index(tmp_path)
    index.rows()

    def open_files(pid: int | str) -> set[str]:
        found = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                found.add(str(path.readlink()))
        return found

    database = str((tmp_path / "index" / "cache.db").resolve())
    assert database in open_files("self")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert database not in open_files(child)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


@pytest.mark.requirement("R23", part=True)
def test_threads_share_an_index(tmp_path: Path):
    index = open_index(tmp_path)
    rows = by_key([put(tmp_path, seed) for seed in range(40)])
    pending, errors = list(rows.values()), []

    def work() -> None:
        try:
            while pending:
                index.add(pending.pop())
                index.rows()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert by_key(index.rows()) == rows
    assert in_database(tmp_path) == set(rows)


STRESS = """
import random, sys, time, logging
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from entry_drafts import full, sample
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index, Row
logging.disable(logging.WARNING)
root, number = Path(sys.argv[1]), int(sys.argv[2])
how, files = random.Random(number), EntryFiles(Directory(root))
index, mine, end, seed = Index(Directory(root), files), {}, time.monotonic() + float(sys.argv[4]), number * 10**6
while time.monotonic() < end:
    what = how.random()
    if what < 0.4 or not mine:
        seed += 1
        made = sample([full("U8", heads=1, dim=1)], end=300, seed=seed)
        header, _ = files.put(made.draft)
        mine[made.key] = Row.from_header(header, b"".join(made.draft.chain))
        index.add(mine[made.key])
    elif what < 0.6:
        key, _ = mine.popitem()
        index.discard(key)
        files.remove(key)
    elif what < 0.94:
        found = {row.key: row for row in index.rows()}
        assert mine.items() <= found.items(), "an entry that was acknowledged is lost"
    elif what < 0.96:
        index.rebuild()
    elif what < 0.98:
        (root / "index" / "cache.db").unlink(missing_ok=True)
    else:
        index.close()
        index = Index(Directory(root), files)
print(*mine)
"""


def start_stress(root: Path, number: int, seconds: float) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        STRESS,
        str(root),
        str(number),
        str(Path(entry_drafts.__file__).parent),
        str(seconds),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seconds", [2.5, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.requirement("R23", part=True)
def test_processes_that_add_discard_rebuild_and_delete_lose_nothing(tmp_path: Path, seconds: float):
    workers = [start_stress(tmp_path, number, seconds) for number in range(4)]
    killed = [start_stress(tmp_path, number, 60) for number in range(10, 12)]
    time.sleep(seconds * 0.6)
    for process in killed:
        process.kill()
        process.communicate()
    left: set[str] = set()
    for process in workers:
        left.update(process.communicate()[0].split())
    assert [process.returncode for process in workers] == [0] * len(workers)
    on_disk = set(EntryFiles(Directory(tmp_path)).keys())
    assert left <= on_disk
    assert set(by_key(open_index(tmp_path).rows())) == on_disk == in_database(tmp_path)
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]


# --- speed ---


@pytest.fixture
def large(tmp_path: Path) -> Iterator[RowDatabase]:
    """Ten thousand rows of 16k tokens."""
    row = put(tmp_path, 1)
    rows = [
        replace(row, key=f"{n:032x}", end=16384, chain=random.Random(n).randbytes(16 * 64), created=n)
        for n in range(10_000)
    ]
    database = RowDatabase(Directory(tmp_path))
    database.replace(lambda: rows)
    yield database
    database.close()


def test_ten_thousand_rows_load_at_once_and_refresh_for_less(tmp_path: Path, large: RowDatabase):
    """Compared with reading and parsing the same text, because the machine may be busy."""
    text = [value for (value,) in query(tmp_path, "SELECT value FROM Cache")]

    def seconds(call: Callable[[], object]) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    parse = min(seconds(lambda: [json.loads(one) for one in text]) for _ in range(3))
    loads = [seconds(large.refresh)]
    for _ in range(2):
        again = RowDatabase(Directory(tmp_path))
        loads.append(seconds(again.refresh))
        again.close()
    assert len(large.rows) == 10_000
    load = min(loads)
    assert load < 12 * parse
    other = RowDatabase(Directory(tmp_path))
    other.write([replace(large.rows[f"{5:032x}"], nbytes=7)], [f"{6:032x}"])
    assert large.changed() is True
    refresh = seconds(large.refresh)
    assert (len(large.rows), large.rows[f"{5:032x}"].nbytes) == (9_999, 7)
    assert refresh < load / 3
    assert large.changed() is False
    other.close()


def test_a_database_that_is_replaced_while_it_is_completed_is_completed_again(
    tmp_path: Path, stored: dict[str, Row], monkeypatch: pytest.MonkeyPatch
):
    """Another process puts one with fewer rows in its place, just when this one has added what was missing."""

    def thin_out(keep: int) -> None:
        for file in (tmp_path / "index").iterdir():
            file.unlink()
        database = RowDatabase(Directory(tmp_path))
        database.replace(lambda: list(stored.values())[:keep])
        database.close()

    index = open_index(tmp_path)
    assert by_key(index.rows()) == stored
    thin_out(3)
    write, left = RowDatabase.write, [2, 1]

    def write_and_lose(self: RowDatabase, *changes: Any) -> list[Row]:
        dropped = write(self, *changes)
        if left:
            keep = left.pop()
            monkeypatch.setattr(RowDatabase, "write", write)
            thin_out(keep)
            monkeypatch.setattr(RowDatabase, "write", write_and_lose)
        return dropped

    monkeypatch.setattr(RowDatabase, "write", write_and_lose)
    assert by_key(index.rows()) == stored
    assert left == []
    assert in_database(tmp_path) == set(stored)
    index.close()
