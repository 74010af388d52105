"""Damage of every kind is found: no bit of an entry can change without an EntryDamagedError."""

from __future__ import annotations

import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from entry_drafts import Sample, everything, full, read_everything, sample

from kvkeep.entry_format import DIGESTS
from kvkeep.errors import EntryDamagedError
from kvkeep.storage import entry_reader
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.entry_data import extents
from kvkeep.storage.fs import Directory

FLIPS = 5000  # each of two tests


class Stored:
    """One entry on disk, whose file the tests may change."""

    def __init__(self, root: Path, one: Sample) -> None:
        self.sample = one
        self.files = EntryFiles(Directory(root), verify="always")
        self.header, _ = self.files.put(one.draft)
        self.path = root / "entries" / one.key[:2] / f"{one.key}.safetensors"
        self.path.chmod(0o600)
        self.content = self.path.read_bytes()

    def verify(self) -> None:
        with self.files.open(self.sample.key) as file:
            file.verify_all()

    def read(self) -> None:
        with self.files.open(self.sample.key) as file:
            file.read_ids()
            read_everything(file, self.sample)

    @contextmanager
    def replaced(self, content: bytes) -> Iterator[None]:
        self.path.write_bytes(content)
        yield
        self.path.write_bytes(self.content)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path, everything(room=70))


def found(check: Callable[[], None]) -> bool:
    try:
        check()
    except EntryDamagedError:
        return True
    return False


def flip(fd: int, bit: int) -> None:
    byte = os.pread(fd, 1, bit // 8)[0]
    os.pwrite(fd, bytes([byte ^ (1 << bit % 8)]), bit // 8)


def missed_flips(stored: Stored, bits: Iterator[int] | range | list[int], check: Callable[[], None]) -> list[int]:
    fd = os.open(stored.path, os.O_RDWR)
    missed = []
    try:
        for bit in bits:
            flip(fd, bit)
            if not found(check):
                missed.append(bit)
            flip(fd, bit)
    finally:
        os.close(fd)
    stored.verify()
    return missed


@pytest.mark.requirement("R9")
def test_every_bit_of_the_header(stored: Stored) -> None:
    bits = range(8 * stored.header.data)
    assert len(bits) == 8 * 4096
    assert missed_flips(stored, bits, lambda: stored.files.open(stored.sample.key).close()) == []


@pytest.mark.requirement("R9")
def test_random_bits_of_the_rest_room_included(stored: Stored) -> None:
    chosen = random.Random(1).sample(range(8 * stored.header.data, 8 * stored.header.size), FLIPS)
    assert missed_flips(stored, chosen, stored.verify) == []


@pytest.mark.requirement("R9")
def test_random_bits_of_data_are_found_by_reading_alone(stored: Stored) -> None:
    """All but the room, which reading does not touch."""
    data = [n for begin, end in extents(stored.header) for n in range(max(begin, stored.header.data), end)]
    dice = random.Random(2)
    chosen = [8 * n + dice.randrange(8) for n in dice.sample(data, FLIPS)]
    assert missed_flips(stored, chosen, stored.read) == []


def test_a_bit_of_the_room_is_found_by_verify_all_only(stored: Stored) -> None:
    spec = stored.header.tensors["layers.0.keys"]
    last = stored.header.data + spec.begin + spec.shape[1] * spec.row_bytes - 1  # of the first head
    first = last + 1 - 70 * spec.row_bytes
    for at in (first, last):
        fd = os.open(stored.path, os.O_RDWR)
        flip(fd, 8 * at)
        os.close(fd)
        stored.read()
        with pytest.raises(EntryDamagedError, match="room"):
            stored.verify()
        stored.path.write_bytes(stored.content)
    stored.verify()


@pytest.mark.requirement("R9")
def test_truncation(stored: Stored) -> None:
    sizes = {*range(64), *range(0, stored.header.size, 509), *range(0, stored.header.size, 4096)}
    sizes |= {stored.header.data, stored.header.data - 1, stored.header.size - 1}
    missed = []
    for size in sorted(sizes, reverse=True):
        os.truncate(stored.path, size)
        if not found(lambda: stored.files.open(stored.sample.key).close()):
            missed.append(size)
    assert missed == []


@pytest.mark.requirement("R10")
def test_a_file_that_shrinks_while_it_is_open(stored: Stored) -> None:
    with stored.files.open(stored.sample.key) as file:
        os.truncate(stored.path, stored.header.data + 5000)
        with pytest.raises(EntryDamagedError):
            read_everything(file, stored.sample)
        with pytest.raises(EntryDamagedError):
            file.verify_all()


def test_bytes_behind_the_end(stored: Stored) -> None:
    for extra in (b"\0", bytes(4096)):
        with stored.replaced(stored.content + extra):
            assert found(stored.verify)


@pytest.mark.requirement("R9")
def test_zeroed_tails_and_pages(stored: Stored) -> None:
    """A power cut can leave the right size with zeros; zeros over the room change nothing."""
    content = stored.content
    missed = []
    for begin in range(0, len(content), 4096):
        for damaged in (content[:begin] + bytes(len(content) - begin), zeroed(content, begin)):
            with stored.replaced(damaged):
                if damaged != content and not found(stored.verify):
                    missed.append(begin)
    assert missed == []


def zeroed(content: bytes, begin: int) -> bytes:
    return content[:begin] + bytes(len(content[begin : begin + 4096])) + content[begin + 4096 :]


@pytest.mark.requirement("R9")
def test_swapped_pages(stored: Stored) -> None:
    pages = [stored.content[at : at + 4096] for at in range(0, len(stored.content) - 4096, 4096)]
    rest = stored.content[4096 * len(pages) :]
    dice = random.Random(3)
    tried, missed = 0, []
    while tried < 60:
        a, b = dice.sample(range(len(pages)), 2)
        if pages[a] == pages[b]:
            continue
        tried += 1
        swapped = list(pages)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        with stored.replaced(b"".join(swapped) + rest):
            if not found(stored.verify):
                missed.append((a, b))
    assert missed == []


@pytest.mark.requirement("R9")
def test_swapped_rows_heads_and_layers_of_one_shape(tmp_path: Path) -> None:
    """Rows that are right as such, in the wrong place."""
    stored = Stored(tmp_path, sample([full(dim=64)] * 2, end=512))
    data, size = stored.header.data, 512 * 256
    for a, b in ((0, 256), (0, 65536), (0, size), (0, 2 * size), (0, 4 * size), (65536, size)):
        swapped = bytearray(stored.content)
        x, y = slice(data + a, data + a + 256), slice(data + b, data + b + 256)
        swapped[x], swapped[y] = stored.content[y], stored.content[x]
        with stored.replaced(bytes(swapped)):
            assert found(stored.read)


@pytest.mark.requirement("R13")
def test_an_entry_under_another_key(tmp_path: Path) -> None:
    files = EntryFiles(Directory(tmp_path))
    one, other = sample([full()], end=9), sample([full()], end=9, seed=1)
    files.put(one.draft)
    wrong = tmp_path / "entries" / other.key[:2] / f"{other.key}.safetensors"
    wrong.parent.mkdir(exist_ok=True)
    (tmp_path / "entries" / one.key[:2] / f"{one.key}.safetensors").rename(wrong)
    with pytest.raises(EntryDamagedError, match="another key"):
        files.open(other.key)


def test_damage_is_named(stored: Stored) -> None:
    places = {
        "layers.0.keys": "rows [0, 256) of layers.0",
        "layers.2.conv_states": "the snapshots of layers.2",
        "cross.0.values": "rows [0, 37) of cross.0",
        "state.mask": "the model's state",
        "ids": "the token ids",
        DIGESTS: "the digests",
    }
    for name, message in places.items():
        at = stored.header.data + stored.header.tensors[name].begin
        with stored.replaced(stored.content[:at] + bytes([stored.content[at] ^ 1]) + stored.content[at + 1 :]):
            with pytest.raises(EntryDamagedError) as caught:
                stored.verify()
            assert message in caught.value.reason


# --- what is checked when ------------------------------------------------------------


def rows(file_rows: int, heads: int = 2, width: int = 32) -> dict[str, list[memoryview]]:
    return {role: [memoryview(bytearray(file_rows * width)) for _ in range(heads)] for role in ("keys", "values")}


def test_a_partial_read_checks_the_blocks_that_it_touches(tmp_path: Path) -> None:
    stored = Stored(tmp_path, sample([full()] * 2, end=1000))
    at = stored.header.data + stored.header.tensors["layers.1.values"].begin + 300 * 32 + 5  # row 300, head 0
    with (
        stored.replaced(stored.content[:at] + bytes([stored.content[at] ^ 64]) + stored.content[at + 1 :]),
        stored.files.open(stored.sample.key) as file,
    ):
        for first, last in ((0, 256), (0, 1), (255, 256), (512, 1000), (999, 1000)):
            file.read_rows("layers", 1, first, last, rows(last - first))
        file.read_rows("layers", 0, 0, 1000, rows(1000))
        for first, last in ((0, 1000), (256, 512), (256, 257), (511, 512), (400, 401), (255, 257), (511, 513)):
            with pytest.raises(EntryDamagedError, match=r"rows \[256, 512\) of layers.1"):
                file.read_rows("layers", 1, first, last, rows(last - first))


@pytest.mark.parametrize(("verify", "noticed"), [("first", False), ("always", True), ("never", False)])
@pytest.mark.requirement("R9")
def test_what_was_found_right_is_remembered_while_the_file_is_the_same(
    tmp_path: Path, verify: str, noticed: bool
) -> None:
    stored = Stored(tmp_path, sample([full()], end=600))
    files = EntryFiles(Directory(tmp_path), verify=verify)  # type: ignore[arg-type]
    at = stored.header.data + stored.header.tensors["layers.0.keys"].begin
    with files.open(stored.sample.key) as file:
        file.read_rows("layers", 0, 0, 256, rows(256))
        fd = os.open(stored.path, os.O_RDWR)
        flip(fd, 8 * at)
        os.close(fd)
        assert found(lambda: file.read_rows("layers", 0, 0, 256, rows(256))) is noticed
        assert found(file.verify_all), "verify_all trusts nothing"
    with files.open(stored.sample.key) as file:  # another mtime: another file
        assert found(lambda: file.read_rows("layers", 0, 0, 256, rows(256))) is (verify != "never")


def test_headers_are_remembered_for_the_same_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path, sample([full()], end=300))
    first, always = EntryFiles(Directory(tmp_path)), EntryFiles(Directory(tmp_path), verify="always")
    key, real = stored.sample.key, entry_reader.decode_header
    decoded: list[int] = []
    monkeypatch.setattr(entry_reader, "decode_header", lambda text, size: decoded.append(size) or real(text, size))
    for files, count in ((first, 1), (first, 1), (always, 2), (always, 3), (first, 3)):
        with files.open(key) as file:
            assert file.header == stored.header
        assert len(decoded) == count
    other = tmp_path / "entries" / "aa" / ("a" * 32 + ".safetensors")
    other.parent.mkdir(exist_ok=True)
    other.hardlink_to(stored.path)
    with first.open(key), pytest.raises(EntryDamagedError, match="another key"):  # one file, two names
        first.open("a" * 32)
    stored.path.write_bytes(stored.content[:100] + b"x" + stored.content[101:])
    with pytest.raises(EntryDamagedError, match="seal"):
        first.open(key)


def test_a_block_that_failed_is_not_remembered(tmp_path: Path) -> None:
    stored = Stored(tmp_path, sample([full()], end=300))
    files = EntryFiles(Directory(tmp_path), verify="first")
    at = stored.header.data + stored.header.tensors["layers.0.keys"].begin
    with (
        stored.replaced(stored.content[:at] + b"\0" * 9 + stored.content[at + 9 :]),
        files.open(stored.sample.key) as f,
    ):
        for _ in range(2):
            assert found(lambda: f.read_rows("layers", 0, 0, 10, rows(10)))
        f.read_rows("layers", 0, 256, 300, rows(44))


# --- hostile files ------------------------------------------------------------


def sealed(header: bytes) -> bytes:
    zeros = b"0" * 32
    header += b" " * (-(8 + len(header)) % 4096)
    seal = xxhash.xxh3_128_hexdigest(header).encode()
    whole = header.replace(b'\\"seal\\":\\"' + zeros, b'\\"seal\\":\\"' + seal)
    return len(whole).to_bytes(8, "little") + whole


SEAL = '"__metadata__":{"kvkeep":"{\\"seal\\":\\"' + "0" * 32 + '\\"}"}'
MANY = ",".join(f'"t{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in range(500_000))
BOMBS = {
    "a huge length word": (1 << 63).to_bytes(8, "little") + b"{}" + bytes(10_000),
    "a length word of -1": b"\xff" * 8 + bytes(10_000),
    "500,000 tensors": sealed(("{" + SEAL + "," + MANY + "}").encode()),
    "as many tensors as fit": sealed(("{" + SEAL + "," + MANY[: MANY.rindex(",", 0, 1_040_000)] + "}").encode()),
    "empty tensors": sealed(("{" + SEAL + "," + ",".join(f'"{n}":{{}}' for n in range(95_000)) + "}").encode()),
    "deep lists": sealed(("{" + SEAL + ',"a":' + "[" * 1_000_000 + "]" * 30_000 + "}").encode()),
    "many lists": sealed(("{" + SEAL + ',"a":[' + ",".join(["[]"] * 340_000) + "]}").encode()),
    "long numbers": sealed(("{" + SEAL + ',"a":[' + ",".join(["9" * 4300] * 240) + "]}").encode()),
    "deep metadata": sealed(("{" + SEAL[:-3] + ',\\"a\\":' + "[" * 500_000 + '}"}}').encode()),
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "zeros": bytes(8192),
    "no seal": (4088).to_bytes(8, "little") + b"{}".ljust(4088),
}


@pytest.mark.parametrize("what", BOMBS)
@pytest.mark.requirement("R30", part=True)
def test_header_bombs_are_refused_soon_and_without_memory(tmp_path: Path, what: str) -> None:
    key = "a" * 32
    file = tmp_path / "entries" / "aa" / f"{key}.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(BOMBS[what])
    files = EntryFiles(Directory(tmp_path))
    times = []
    for _ in range(3):
        began = time.process_time()
        with pytest.raises(EntryDamagedError):
            files.open(key)
        times.append(time.process_time() - began)
    assert min(times) < 0.05
    tracemalloc.start()
    try:
        assert found(lambda: files.open(key).close())
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def plant_symlink(file: Path) -> None:
    target = file.parent.parent / "outside"
    target.write_bytes(b"x")
    file.symlink_to(target)


PLANTED: dict[str, Callable[[Path], None]] = {
    "a symbolic link": plant_symlink,
    "a dangling link": lambda file: file.symlink_to("/nonexistent"),
    "a FIFO": os.mkfifo,
    "a directory": lambda file: file.mkdir(),
    "an empty file": lambda file: file.touch(),
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.requirement("R32")
def test_what_is_planted_at_an_entrys_path_is_refused_and_set_aside(tmp_path: Path, system: str, what: str) -> None:
    one = sample([full()], end=9)
    file = tmp_path / "entries" / one.key[:2] / f"{one.key}.safetensors"
    file.parent.mkdir(parents=True)
    PLANTED[what](file)
    files = EntryFiles(Directory(tmp_path))
    with pytest.raises(EntryDamagedError):
        files.open(one.key)
    assert files.put(one.draft)[1] is True
    with files.open(one.key) as opened:
        opened.verify_all()
    assert os.path.lexists(tmp_path / "quarantine" / f"{one.key}-0.safetensors")


@pytest.mark.requirement("R32")
def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, system: str) -> None:
    one = sample([full()], end=9)
    outside = tmp_path / "outside"
    EntryFiles(Directory.create(outside)).put(one.draft)
    root = tmp_path / "store"
    root.mkdir()
    (root / "entries").symlink_to(outside / "entries")
    with pytest.raises(EntryDamagedError, match="not a file"):
        EntryFiles(Directory(root)).open(one.key)


@pytest.mark.requirement("R30", part=True)
def test_sealed_lies_about_the_layout_are_refused(stored: Stored) -> None:
    """A header that somebody changed and sealed again must still be consistent in itself."""
    header = stored.content[8 : stored.header.data]
    table = json.loads(header)
    meta = json.loads(table["__metadata__"]["kvkeep"])

    def lie(change: Callable[[dict, dict], None]) -> bytes:
        tensors, text = json.loads(header), json.loads(json.dumps(meta))
        change(tensors, text)
        text["seal"] = "0" * 32
        tensors["__metadata__"] = {"kvkeep": json.dumps(text, sort_keys=True, separators=(",", ":"))}
        return sealed(json.dumps(tensors, separators=(",", ":")).encode()) + stored.content[stored.header.data :]

    def setter(*path: str | int, value: object) -> Callable[[dict, dict], None]:
        def change(tensors: dict, text: dict) -> None:
            place = {"tensors": tensors, "meta": text}
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value

        return change

    def remover(*path: str | int) -> Callable[[dict, dict], None]:
        def change(tensors: dict, text: dict) -> None:
            place = text
            for step in path[:-1]:
                place = place[step]
            del place[path[-1]]

        return change

    with stored.replaced(lie(lambda tensors, text: None)):
        stored.verify()
    absent = [(name,) for name in meta] + [("key", name) for name in meta["key"]]
    absent += [("layers", 0, name) for name in meta["layers"][0]]
    lies = [remover(*path) for path in absent if path != ("seal",)]
    lies += [
        setter("meta", "format", value=2),
        setter("meta", "block", value=128),
        setter("meta", "codec", value={}),
        setter("meta", "auth", value={"key_id": "k", "mac": "0" * 64}),
        setter("meta", "new", value=1),
        setter("meta", "start", value=600),
        setter("meta", "start", value=1),
        setter("meta", "start", value=-1),
        setter("meta", "start", value=True),
        setter("meta", "end", value=601),
        setter("meta", "end", value=10**4000),
        setter("meta", "end", value=600.0),
        setter("meta", "parent", value="a" * 32),
        setter("meta", "created", value=None),
        setter("meta", "creator", value={"kvkeep": 1}),
        setter("meta", "recorded", value={"n": 10**20}),
        setter("meta", "digests", value="x"),
        setter("meta", "key", "hash", value="a" * 32),
        setter("meta", "key", "model", value="a" * 32),
        setter("meta", "key", "weights", value="a" * 32),
        setter("meta", "key", "form", value="other"),
        setter("meta", "key", "tp", value={"size": 2, "rank": 0}),
        setter("meta", "key", "media", value=[]),
        setter("meta", "key", "new", value=1),
        setter("meta", "layers", value={}),
        setter("meta", "layers", 0, "rows", value=10**9),
        setter("meta", "layers", 0, "rows", value=671),
        setter("meta", "layers", 0, "rows", value=10**4000),
        setter("meta", "layers", 0, "first", value=1),
        setter("meta", "layers", 0, "new", value=1),
        setter("meta", "layers", 0, "scalars", value={"a": []}),
        setter("meta", "layers", 0, "tensors", value={"keys": "rows"}),
        setter("meta", "layers", 0, "tensors", "keys", value="=keys"),
        setter("meta", "layers", 0, "tensors", "keys", value="=absent"),
        setter("meta", "layers", 0, "tensors", "keys", value=["rows"]),
        setter("meta", "layers", 0, "tensors", "keys", value="columns"),
        setter("meta", "layers", 2, "tensors", "conv_states", value="rows"),
        setter("meta", "cross", value=None),
        setter("meta", "cross", 0, "first", value=1),
        setter("meta", "state", value=None),
        setter("meta", "state", "mask", value="rows"),
        setter("tensors", "ids", "dtype", value="F32"),
        setter("tensors", "ids", "shape", value=[599]),
        setter("tensors", "ids", "shape", value=[600, 1]),
        setter("tensors", "layers.0.keys", "shape", value=[2, 670, 4, 2]),
        setter("tensors", "layers.0.keys", "shape", value=[10**30, 10**30, 0]),
        setter("tensors", "layers.0.keys", "data_offsets", value=[0, 1 << 62]),
        setter("tensors", "layers.0.keys", "data_offsets", value=[0]),
        setter("tensors", "layers.0.keys", "dtype", value="U8"),
        setter("tensors", "layers.0.keys", "new", value=1),
        setter("tensors", "extra", value={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        setter("tensors", "../x", value={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    ]
    accepted = []
    for number, change in enumerate(lies):
        with stored.replaced(lie(change)):
            if not found(lambda: stored.files.open(stored.sample.key).close()):
                accepted.append(number)
    assert accepted == []
