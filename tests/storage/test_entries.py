"""Entries: what is put comes back bit for bit, from files that anybody can read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from entry_drafts import Layer, Sample, everything, full, read_everything, sample, sliding
from safetensors import safe_open

from kvkeep.entry_format import ALIGNMENT, ITEM_SIZES
from kvkeep.errors import EntryDamagedError, InvalidRequestError, StoreReadOnlyError, StoreWriteError
from kvkeep.keys import namespace_digest
from kvkeep.storage.entries import Draft, EntryFiles, FileIdentity, TensorSource
from kvkeep.storage.fs import Directory

SAMPLES = {
    "everything": everything(),
    "everything, a later stretch": everything(start=250),
    "everything, with room": everything(room=100),
    "one token": sample([full()], end=1),
    "one block": sample([full("F16")], end=256),
    "a block and one": sample([full("BF16", heads=3, dim=5)], end=257),
    "odd sizes": sample([full("F8_E5M2", heads=1, dim=3), full("U8", heads=2, dim=1, room=1)], end=301),
    "large rows": sample([full("F32", heads=2, dim=3000, room=5)], end=600),
    "wide": sample([full("F64", heads=1, dim=20_000)], end=20),
    "no heads": sample([full(heads=0), full(dim=0)], end=300),
    "no layers": sample([], end=5),
    "a window": sample([sliding(first=700, window=300)], end=1000),
    "a snapshot alone": sample([Layer(kind="linear", snapshots={"s": ("F32", (3, 2))})], end=3),
    "a scalar": sample([Layer(kind="linear", snapshots={"s": ("F64", ())})], end=3),
}


def path(root: Path, key: str) -> Path:
    return root / "entries" / key[:2] / f"{key}.safetensors"


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_put_comes_back(tmp_path: Path, system: str, name: str) -> None:
    one = SAMPLES[name]
    files = EntryFiles(Directory(tmp_path))
    header, published = files.put(one.draft)
    assert published is True
    with files.open(one.key) as file:
        assert file.header == header
        assert replace(file.header.meta, digests="0" * 32) == one.draft.meta
        assert file.read_ids() == one.draft.ids
        assert file.read_chain() == list(one.draft.chain)
        assert read_everything(file, one) == {name: data.tobytes() for name, data in one.content.items()}
        file.verify_all()
    assert list(files.keys()) == [one.key]
    assert files.size(one.key) == header.size == path(tmp_path, one.key).stat().st_size
    assert Directory(tmp_path).names("tmp") == []


@pytest.mark.parametrize("name", SAMPLES)
def test_safetensors_opens_it_and_sees_the_same_bits(tmp_path: Path, name: str) -> None:
    one = SAMPLES[name]
    header, _ = EntryFiles(Directory(tmp_path)).put(one.draft)
    with safe_open(path(tmp_path, one.key), framework="pt") as file:
        assert list(file.metadata()) == ["kvkeep"]
        assert sorted(file.keys()) == sorted([*one.content, "ids", "chain", "digests"])
        assert file.get_tensor("ids").tolist() == one.draft.ids.tolist()
        for tensor, data in one.content.items():
            found = file.get_tensor(tensor)
            assert tuple(found.shape) == header.tensors[tensor].shape
            raw = found.contiguous().reshape(-1).view(torch.uint8).numpy()
            if data.ndim == 3 and data.size:  # rows: [heads, slots, row bytes], the slots behind the rows empty
                slots = raw.reshape(data.shape[0], -1, data.shape[2])
                assert not slots[:, data.shape[1] :].any()
                raw = slots[:, : data.shape[1]]
            assert raw.tobytes() == data.tobytes()


def test_tensors_are_aligned_for_mapping_and_copying(tmp_path: Path) -> None:
    for number, one in enumerate(SAMPLES.values()):
        (tmp_path / str(number)).mkdir()
        header, _ = EntryFiles(Directory(tmp_path / str(number))).put(one.draft)
        assert header.data % ALIGNMENT == 0
        assert [n for n, spec in header.tensors.items() if spec.begin % ITEM_SIZES[spec.dtype]] == []
    header, _ = EntryFiles(Directory(tmp_path)).put(sample([full(dim=16)] * 3, end=333).draft)
    assert [header.tensors[f"layers.{n}.keys"].begin % 64 for n in range(3)] == [0, 0, 0]


def test_the_file_of_a_known_draft_never_changes(tmp_path: Path) -> None:
    """The format is frozen: the same draft is the same file, byte for byte, in every version of kvkeep."""
    one = everything(start=250, room=3)
    header, _ = EntryFiles(Directory(tmp_path)).put(one.draft)
    content = path(tmp_path, one.key).read_bytes()
    assert one.key == "f4f6b64f73b5d75fde71f858cfacc515"
    assert (header.size, xxhash.xxh3_128_hexdigest(content)) == (79446, "132f972709e9cb72972f36d4b58edae3")


def test_room_is_a_hole(tmp_path: Path) -> None:
    one = sample([full(dim=64, room=100_000)], end=300)
    header, _ = EntryFiles(Directory(tmp_path)).put(one.draft)
    known = path(tmp_path, one.key).stat()
    assert known.st_size == header.size > 100_000_000
    assert known.st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize(("shared", "modes"), [(False, (0o700, 0o400)), (True, (0o2770, 0o440))])
@pytest.mark.requirement("R12")
@pytest.mark.requirement("R33", part=True)
def test_modes(tmp_path: Path, umask: int, shared: bool, modes: tuple[int, int]) -> None:
    before = os.umask(umask)
    try:
        one = SAMPLES["one token"]
        EntryFiles(Directory(tmp_path, shared=shared)).put(one.draft)
    finally:
        os.umask(before)
    file = path(tmp_path, one.key)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (file.parent, file)] == list(modes)


def test_the_first_entry_of_a_key_stays(tmp_path: Path, system: str) -> None:
    """Two stretches of one prefix have one key."""
    files = EntryFiles(Directory(tmp_path))
    whole, stretch = everything(), everything(start=250)
    assert whole.key == stretch.key
    first, published = files.put(whole.draft)
    before = FileIdentity.of(path(tmp_path, whole.key).stat())
    second, again = files.put(stretch.draft)
    assert (published, again) == (True, False)
    assert second == first
    assert FileIdentity.of(path(tmp_path, whole.key).stat()) == before
    assert Directory(tmp_path).names("tmp") == []


def test_a_put_of_a_stored_key_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = SAMPLES["everything"]
    EntryFiles(Directory(tmp_path)).put(one.draft)
    monkeypatch.setattr(Directory, "temporary", lambda *_: pytest.fail("a file was written"))
    assert EntryFiles(Directory(tmp_path)).put(one.draft)[1] is False


def test_a_put_that_loses_the_race_keeps_the_winner(tmp_path: Path) -> None:
    """The other process publishes while this one is writing."""
    mine, theirs = everything(start=250), everything()
    directory = Directory(tmp_path)

    class Rival(Directory):
        def publish(self, temporary, *name):  # type: ignore[no-untyped-def]
            EntryFiles(directory).put(theirs.draft)
            return super().publish(temporary, *name)

    header, published = EntryFiles(Rival(tmp_path)).put(mine.draft)
    assert published is False
    assert header.meta.start == 0
    with EntryFiles(directory).open(mine.key) as file:
        file.verify_all()
        assert file.header == header
    assert directory.names("tmp") == []


def test_a_put_replaces_a_file_that_is_no_entry(tmp_path: Path, system: str) -> None:
    one = SAMPLES["one token"]
    file = path(tmp_path, one.key)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    files = EntryFiles(Directory(tmp_path))
    assert files.put(one.draft)[1] is True
    with files.open(one.key) as opened:
        opened.verify_all()
    assert sorted(p.name for p in (tmp_path / "quarantine").iterdir()) == [
        f"{one.key}-0.safetensors",
        f"{one.key}-0.txt",
    ]


@pytest.mark.requirement("R14", part=True)
def test_nothing_is_left_when_a_put_is_interrupted(tmp_path: Path, system: str) -> None:
    one = SAMPLES["large rows"]

    class Interrupted(Directory):
        def publish(self, temporary, *name):  # type: ignore[no-untyped-def]
            assert self.names("tmp") == [temporary.name[1]]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EntryFiles(Interrupted(tmp_path)).put(one.draft)
    files = EntryFiles(Directory(tmp_path))
    assert (list(files.keys()), Directory(tmp_path).names("tmp")) == ([], [])
    assert files.put(one.draft)[1] is True


@pytest.mark.requirement("R5", part=True)
def test_a_full_disk_leaves_nothing_and_the_next_put_works(tmp_path: Path) -> None:
    script = (
        "import resource, sys, pathlib\n"
        "from entry_drafts import full, sample\n"
        "from kvkeep.errors import StoreWriteError\n"
        "from kvkeep.storage.entries import EntryFiles\n"
        "from kvkeep.storage.fs import Directory\n"
        "directory = Directory(pathlib.Path(sys.argv[1]))\n"
        "files, one = EntryFiles(directory), sample([full(dim=64)], end=600)\n"
        "for limit in (0, 5000, 300_000, 600_000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        files.put(one.draft)\n"
        "    except StoreWriteError as error:\n"
        "        print(error.errno, directory.names('tmp'), list(files.keys()))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "print(files.put(one.draft)[1])\n"
        "files.open(one.key).verify_all()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.splitlines() == ["27 [] []"] * 4 + ["True"], ended.stderr


def test_a_read_only_store_takes_no_entry(tmp_path: Path) -> None:
    one = SAMPLES["one token"]
    with pytest.raises(StoreReadOnlyError):
        EntryFiles(Directory(tmp_path, readonly=True)).put(one.draft)
    assert list(tmp_path.iterdir()) == []


def broken(one: Sample) -> dict[str, Draft]:
    draft, tensors = one.draft, dict(one.draft.tensors)
    keys = tensors["layers.0.keys"]
    short = TensorSource(keys.dtype, keys.shape, [keys.parts[0][:-1], keys.parts[1]])
    strided = np.zeros((300, 128), np.uint8)[:, ::4]
    few = TensorSource(keys.dtype, (2, 299, 8), keys.parts)
    layer = replace(draft.meta.layers[0], rows=299)
    return {
        "a missing tensor": replace(draft, tensors={k: v for k, v in tensors.items() if k != "layers.0.keys"}),
        "a tensor too many": replace(draft, tensors=tensors | {"layers.1.keys": keys}),
        "a bad name": replace(draft, tensors=tensors | {"Layers": keys}),
        "a short part": replace(draft, tensors=tensors | {"layers.0.keys": short}),
        "too few slots": replace(draft, tensors=tensors | {"layers.0.keys": few}),
        "a part too few": replace(draft, tensors=tensors | {"layers.0.keys": replace(keys, parts=keys.parts[:1])}),
        "an unknown dtype": replace(draft, tensors=tensors | {"layers.0.keys": replace(keys, dtype="C64")}),
        "strided data": replace(
            draft, tensors=tensors | {"layers.0.keys": replace(keys, parts=[memoryview(strided), keys.parts[1]])}
        ),
        "rows that end elsewhere": replace(draft, meta=replace(draft.meta, layers=(layer,))),
        "ids of another length": replace(draft, ids=draft.ids[:299]),
        "a chain too short": replace(draft, chain=[]),
        "a parent at token 0": replace(draft, meta=replace(draft.meta, parent="a" * 32)),
        "a name that hides the seal": replace(draft, meta=replace(draft.meta, recorded={"seal": "0" * 32})),
        "too much metadata": replace(draft, meta=replace(draft.meta, recorded={"note": "x" * 600_000})),
    }


@pytest.mark.parametrize("what", broken(sample([full()], end=300)))
def test_a_draft_that_does_not_fit_is_refused_before_anything_is_published(tmp_path: Path, what: str) -> None:
    one = sample([full()], end=300)
    with pytest.raises(InvalidRequestError):
        EntryFiles(Directory(tmp_path)).put(broken(one)[what])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


FORMATS = [("F16", "<f2"), ("F32", "<f4"), ("F64", ">f8"), ("I64", "<i8"), ("BOOL", "?")]


@pytest.mark.parametrize(("dtype", "numpy"), FORMATS)
def test_buffers_of_any_format_are_taken_as_bytes(tmp_path: Path, dtype: str, numpy: str) -> None:
    one = sample([full(dtype)], end=300)
    numbers = {role: one.content[f"layers.0.{role}"].view(numpy) for role in ("keys", "values")}
    tensors = {
        "layers.0.keys": TensorSource(dtype, (2, 300, 8), [memoryview(head) for head in numbers["keys"]]),
        "layers.0.values": TensorSource(dtype, (2, 300, 8), [memoryview(h.reshape(-1)) for h in numbers["values"]]),
    }
    files = EntryFiles(Directory(tmp_path))
    files.put(replace(one.draft, tensors=tensors))
    found = {role: np.zeros((2, 300, 8), numpy) for role in numbers}
    with files.open(one.key) as file:
        file.read_rows("layers", 0, 0, 300, {role: [memoryview(head) for head in found[role]] for role in found})
    assert {role: data.tobytes() for role, data in found.items()} == {
        role: data.tobytes() for role, data in numbers.items()
    }


def test_keys_lists_entries_and_nothing_else(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    files = EntryFiles(directory)
    assert list(files.keys()) == []
    samples = [sample([full()], end=5, seed=seed) for seed in range(4)]
    for one in samples:
        files.put(one.draft)
    folder = tmp_path / "entries" / "00"
    folder.mkdir(exist_ok=True)
    for name in ("f" * 32 + ".safetensors", "0" * 31 + ".safetensors", "0" * 32, "0" * 32 + ".safetensors.new"):
        (folder / name).touch()
    (tmp_path / "entries" / "zz").touch()
    (tmp_path / "entries" / "yy").symlink_to(folder)
    assert list(files.keys()) == sorted(one.key for one in samples)


@pytest.mark.requirement("R11")
def test_removed_entries_are_gone_and_open_ones_are_read_to_the_end(tmp_path: Path) -> None:
    one = SAMPLES["everything"]
    files = EntryFiles(Directory(tmp_path))
    files.put(one.draft)
    with files.open(one.key) as file:
        assert files.remove(one.key) is True
        assert files.remove(one.key) is False
        file.verify_all()
    with pytest.raises(FileNotFoundError):
        files.open(one.key)
    with pytest.raises(FileNotFoundError):
        files.size(one.key)


@pytest.mark.parametrize("key", ["", "../../../etc/passwd", "A" * 32, "a" * 31, "a" * 33, "a" * 31 + "\n"])
@pytest.mark.requirement("R31", part=True)
def test_only_hex_digits_are_keys(tmp_path: Path, key: str) -> None:
    files = EntryFiles(Directory(tmp_path))
    for call in (files.open, files.size, files.remove):
        with pytest.raises(InvalidRequestError, match="32 hex digits"):
            call(key)
    assert list(tmp_path.iterdir()) == []


def test_quarantine_keeps_every_bad_file_and_its_reason(tmp_path: Path, system: str) -> None:
    one = SAMPLES["one token"]
    files = EntryFiles(Directory(tmp_path))
    for reason in ("first", "second"):
        files.put(one.draft)
        files.quarantine(one.key, reason)
        assert list(files.keys()) == []
    files.quarantine(one.key, "there is nothing")
    folder = tmp_path / "quarantine"
    assert [(folder / f"{one.key}-{n}.txt").read_text() for n in range(2)] == ["first\n", "second\n"]
    assert len(list(folder.iterdir())) == 4


def test_quarantine_spares_the_good_entry_that_took_the_place(tmp_path: Path) -> None:
    one = SAMPLES["one token"]
    files = EntryFiles(Directory(tmp_path))
    files.put(one.draft)
    with files.open(one.key) as bad:
        files.remove(one.key)
        files.put(one.draft)
        files.quarantine(one.key, "guard", identity=bad.identity)
        assert list(files.keys()) == [one.key]
    with files.open(one.key) as file:
        files.quarantine(one.key, "guard", identity=file.identity)
    assert list(files.keys()) == []


def test_quarantine_in_a_read_only_store_leaves_the_file(tmp_path: Path) -> None:
    one = SAMPLES["one token"]
    EntryFiles(Directory(tmp_path)).put(one.draft)
    before = sorted(tmp_path.rglob("*"))
    EntryFiles(Directory(tmp_path, readonly=True)).quarantine(one.key, "reason")
    assert sorted(tmp_path.rglob("*")) == before


def test_reads_of_layers_rows_or_roles_that_are_not_there_are_refused(tmp_path: Path) -> None:
    one = everything()
    files = EntryFiles(Directory(tmp_path))
    files.put(one.draft)
    good = {role: [memoryview(bytearray(32)) for _ in range(2)] for role in ("keys", "values")}
    with files.open(one.key) as file:
        for stem, number, first, last in (("layers", 5, 0, 1), ("layers", -1, 0, 1), ("state", 0, 0, 1)):
            with pytest.raises(InvalidRequestError, match="no layer"):
                file.read_rows(stem, number, first, last, good)
        for first, last in ((-1, 0), (2, 1), (600, 601)):
            with pytest.raises(InvalidRequestError, match="not within"):
                file.read_rows("layers", 0, first, last, good)
        for targets, message in (
            ({"keys": good["keys"]}, "buffers are given"),
            ({"keys": good["keys"][:1], "values": good["values"]}, "one buffer for each"),
            ({"keys": [memoryview(bytearray(31))] * 2, "values": good["values"]}, "of 32 bytes"),
            ({"keys": [memoryview(bytes(32))] * 2, "values": good["values"]}, "writable"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                file.read_rows("layers", 0, 0, 1, targets)
        file.read_rows("layers", 0, 600, 600, {})
        with pytest.raises(InvalidRequestError, match="buffers are given"):
            file.read_snapshots("layers", 2, {})
        with pytest.raises(InvalidRequestError, match="buffers are given"):
            file.read_state({})


def test_verify_all_compares_the_ids_with_the_key(tmp_path: Path) -> None:
    one = sample([full()], end=300)
    other = sample([full()], end=300, seed=1)
    files = EntryFiles(Directory(tmp_path))
    files.put(replace(one.draft, ids=other.draft.ids))
    with files.open(one.key) as file, pytest.raises(EntryDamagedError, match="key is not that of the token ids"):
        file.verify_all()
    files.remove(one.key)
    files.put(replace(one.draft, chain=[bytes(16)]))
    with files.open(one.key) as file, pytest.raises(EntryDamagedError, match="key is not that of the token ids"):
        file.verify_all()
    wrong = replace(one.draft.meta.key, namespace=namespace_digest("other").hex())
    draft = replace(one.draft, meta=replace(one.draft.meta, key=wrong))
    files.put(draft)
    with files.open(wrong.hash) as file, pytest.raises(EntryDamagedError, match="key is not that"):
        file.verify_all()


def test_a_volume_that_cannot_reserve_space_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert EntryFiles(Directory(tmp_path)).put(SAMPLES["everything"].draft)[1] is True


def test_no_space_is_noticed_before_data_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    monkeypatch.setattr(os, "pwrite", lambda *args: pytest.fail("data were written"))
    with pytest.raises(StoreWriteError, match="make room"):
        EntryFiles(Directory(tmp_path)).put(SAMPLES["everything"].draft)
    assert Directory(tmp_path).names("tmp") == []
