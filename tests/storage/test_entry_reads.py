"""Reading parts of an entry: exactly the rows that were asked for, in whatever order they are asked."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from entry_drafts import Layer, Sample, everything, full, read_everything, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.entry_format import ITEM_SIZES
from kvkeep.storage.entries import EntryFile, EntryFiles
from kvkeep.storage.fs import Directory


def read_rows(file: EntryFile, one: Sample, layer: int, first: int, last: int) -> dict[str, np.ndarray]:
    roles = file.header.meta.layers[layer].roles("rows")
    shapes = {role: one.content[f"layers.{layer}.{role}"][:, first:last].shape for role in roles}
    rows = {role: np.full(shape, 0xEE, np.uint8) for role, shape in shapes.items()}
    file.read_rows("layers", layer, first, last, {role: [memoryview(head) for head in rows[role]] for role in roles})
    return rows


def expected(one: Sample, layer: int, first: int, last: int, roles: object) -> dict[str, np.ndarray]:
    return {role: one.content[f"layers.{layer}.{role}"][:, first:last] for role in roles}  # type: ignore[attr-defined]


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[role], b[role]) for role in a)


shapes = st.tuples(
    st.sampled_from(sorted(ITEM_SIZES.keys() - {"BOOL"})),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 64, 1100]),
    st.sampled_from([0, 1, 300]),
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.dictionaries(st.sampled_from(["keys", "values", "indexer_keys"]), shapes, min_size=1),
    rows=st.integers(1, 1100),
    reads=st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 1100)), min_size=1, max_size=8),
    verify=st.sampled_from(["first", "always", "never"]),
)
def test_any_reads_of_any_layer(
    shapes: dict[str, tuple[str, int, int, int]], rows: int, reads: list[tuple[int, int]], verify: str
) -> None:
    one = sample([full(), Layer(rows=shapes)], end=rows)
    with tempfile.TemporaryDirectory() as root:
        files = EntryFiles(Directory(Path(root)), verify=verify)  # type: ignore[arg-type]
        files.put(one.draft)
        with files.open(one.key) as file:
            for a, b in reads:
                first, last = sorted((a % (rows + 1), b % (rows + 1)))
                assert same(read_rows(file, one, 1, first, last), expected(one, 1, first, last, shapes))


def test_every_pair_of_block_edges(tmp_path: Path, system: str) -> None:
    one = sample([full("F32", heads=2, dim=3, room=9)], end=700)
    files = EntryFiles(Directory(tmp_path), verify="always")
    files.put(one.draft)
    edges = [0, 1, 255, 256, 257, 511, 512, 513, 699, 700]
    with files.open(one.key) as file:
        for first in edges:
            for last in (edge for edge in edges if edge >= first):
                found = read_rows(file, one, 0, first, last)
                assert same(found, expected(one, 0, first, last, found)), (first, last)


def test_blocks_of_more_than_a_chunk(tmp_path: Path) -> None:
    one = sample([full("F64", heads=1, dim=700)], end=600)  # a block has 1.4 MB
    files = EntryFiles(Directory(tmp_path), verify="always")
    files.put(one.draft)
    with files.open(one.key) as file:
        for first, last in ((0, 600), (100, 600), (300, 301), (255, 513)):
            found = read_rows(file, one, 0, first, last)
            assert same(found, expected(one, 0, first, last, found))


def test_buffers_may_lie_apart(tmp_path: Path) -> None:
    """Rows go straight into a larger buffer: the room around them is left alone."""
    one = sample([full(heads=3)], end=600)
    files = EntryFiles(Directory(tmp_path))
    files.put(one.draft)
    arena = np.full((2, 3, 900, 32), 0xEE, np.uint8)
    with files.open(one.key) as file:
        targets = {
            role: [memoryview(arena[n, h, 100:400]) for h in range(3)] for n, role in enumerate(("keys", "values"))
        }
        file.read_rows("layers", 0, 70, 370, targets)
    assert np.array_equal(arena[0, :, 100:400], one.content["layers.0.keys"][:, 70:370])
    assert np.array_equal(arena[1, :, 100:400], one.content["layers.0.values"][:, 70:370])
    assert (arena[:, :, :100] == 0xEE).all()
    assert (arena[:, :, 400:] == 0xEE).all()


def test_threads_share_an_open_entry(tmp_path: Path, system: str) -> None:
    one = everything(room=5)
    files = EntryFiles(Directory(tmp_path))
    files.put(one.draft)
    wanted = {name: data.tobytes() for name, data in one.content.items()}
    found: list[bool] = []

    def work(file: EntryFile) -> None:
        found.extend(read_everything(file, one) == wanted for _ in range(10))

    with files.open(one.key) as file:
        threads = [threading.Thread(target=work, args=(file,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 60


@pytest.mark.parametrize("verify", ["first", "always"])
def test_whole_layers_take_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    """Neighbours in the file are read at once, about a MiB at a time."""
    one = sample([full(heads=4, dim=64)], end=1024)  # 2 roles of 4 heads of 256 KiB
    files = EntryFiles(Directory(tmp_path), verify=verify)  # type: ignore[arg-type]
    files.put(one.draft)
    with files.open(one.key) as file:
        read_rows(file, one, 0, 0, 1024)
        calls: list[int] = []
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: calls.append(at) or real(fd, views, at))
        read_rows(file, one, 0, 0, 1024)
    assert len(calls) == 2


def test_no_more_is_read_than_has_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time whole blocks, because they are checked; then the rows that were asked for."""
    one = sample([full("F32", heads=1, dim=8)], end=1000)
    files = EntryFiles(Directory(tmp_path))
    files.put(one.draft)
    sizes: list[int] = []
    real = os.preadv

    def counted(fd: int, views: list[memoryview], at: int) -> int:
        count = real(fd, views, at)
        sizes.append(count)
        return count

    with files.open(one.key) as file:
        file.read_ids()  # takes the digests along
        monkeypatch.setattr(os, "preadv", counted)
        for first, last, rows in (
            (300, 310, 256),
            (300, 310, 10),
            (250, 310, 256 + 54),
            (250, 310, 60),
            (700, 800, 488),
        ):
            sizes.clear()
            read_rows(file, one, 0, first, last)
            assert sum(sizes) == 2 * rows * 32, (first, last)
