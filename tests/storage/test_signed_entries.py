"""With a key, only what was signed with it is served, whoever may write to the files."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from entry_drafts import Sample, everything, full, read_everything, sample
from safetensors import safe_open

from kvkeep import CacheStore
from kvkeep.errors import EntryDamagedError, EntryUnknownError, EntryUntrustedError, InvalidRequestError
from kvkeep.signing import SigningKey, keyring
from kvkeep.storage import unit_digest
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory

ONE, TWO = bytes(range(32)), bytes(range(40, 104))


def files(root: Path, key: bytes | None = ONE, *others: bytes, verify: str = "first") -> EntryFiles:
    root.mkdir(exist_ok=True)
    return EntryFiles(Directory(root), verify=verify, keys=None if key is None else keyring(key, others))  # type: ignore[arg-type]


def path(root: Path, one: Sample) -> Path:
    return root / "entries" / one.key[:2] / f"{one.key}.safetensors"


def read(opened: EntryFiles, one: Sample) -> dict[str, bytes]:
    with opened.open(one.key) as file:
        assert file.read_ids() == one.draft.ids
        return read_everything(file, one)


def content(one: Sample) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in one.content.items()}


def change(root: Path, one: Sample, work: Callable[[bytearray], None]) -> None:
    """Change a file as somebody who may write to it can: in place, so that all that is open sees it."""
    path(root, one).chmod(0o600)
    found = bytearray(path(root, one).read_bytes())
    work(found)
    with path(root, one).open("r+b") as file:
        file.write(found)
        file.truncate()


def resealed(data: bytearray, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Edit tensor table and metadata of a header, and seal it again as anybody can."""
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    meta = json.loads(table["__metadata__"]["kvkeep"])
    edit(table, meta)
    meta["seal"] = "0" * 32
    table["__metadata__"]["kvkeep"] = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    text = json.dumps(table, separators=(",", ":")).encode().ljust(length)
    seal = xxhash.xxh3_128_hexdigest(text)
    data[8 : 8 + length] = re.sub(rb'(seal\\":\\")0{32}', rb"\g<1>" + seal.encode(), text)


def tensor(data: bytearray, name: str) -> slice:
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return slice(8 + length + begin, 8 + length + end)


@pytest.fixture
def fast_digests_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if somebody could make data of any digest that is not cryptographic."""
    same = SimpleNamespace(update=lambda data: None, digest=lambda: b"\x01" * 16)
    monkeypatch.setattr(unit_digest, "xxhash", SimpleNamespace(xxh3_128=lambda: same))


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("one", [everything(room=70), everything(start=250), sample([], end=5)], ids=["all", "2", "3"])
def test_a_signed_entry_comes_back_with_the_key_and_without(tmp_path: Path, one: Sample) -> None:
    header, published = files(tmp_path).put(one.draft)
    assert published is True
    assert header.meta.auth is not None
    assert header.meta.auth.key_id == SigningKey.of(ONE).id
    for key in (ONE, None):
        assert read(files(tmp_path, key, verify="always"), one) == content(one)
        with files(tmp_path, key).open(one.key) as file:
            assert file.header == header
            file.verify_all()
    with safe_open(path(tmp_path, one), framework="pt") as file:
        assert "strong" in file.keys()  # noqa: SIM118


@pytest.mark.requirement("R34")
def test_the_signature_is_the_one_of_the_format(tmp_path: Path) -> None:
    """Computed from FORMAT.md alone."""
    one = everything(room=3)
    files(tmp_path).put(one.draft)
    data = bytearray(path(tmp_path, one).read_bytes())
    header = bytes(data[8 : 8 + int.from_bytes(data[:8], "little")])
    (mac,), (seal,) = (
        re.findall(rb'\\"mac\\":\\"([0-9a-f]{64})\\"', header),
        re.findall(rb'seal\\":\\"(\w{32})', header),
    )
    unsigned = header.replace(mac, b"0" * 64).replace(seal, b"0" * 32)
    strong = bytes(data[tensor(data, "strong")])
    assert blake2b(unsigned + strong, digest_size=32, key=ONE).hexdigest().encode() == mac
    first = bytes(data[tensor(data, "ids")] + data[tensor(data, "chain")])
    assert strong[:32] == blake2b(first, digest_size=32).digest()
    assert len(strong) == 2 * len(data[tensor(data, "digests")])


@pytest.mark.requirement("R34")
def test_every_bit_of_a_signed_entry_is_signed_or_counts_for_nothing(tmp_path: Path, fast_digests_lie: None) -> None:
    """Of 2,000 flipped bits, in header and data, with a seal and digests that agree, none is served."""
    one = sample([full(dim=4)], end=300)
    files(tmp_path).put(one.draft)
    good = bytearray(path(tmp_path, one).read_bytes())
    opened = files(tmp_path, verify="always")
    dice, wrong = random.Random(3), []
    length = int.from_bytes(good[:8], "little")
    text = len(good[8 : 8 + length].rstrip())
    for at in [dice.randrange(8, 8 + text) for _ in range(1000)] + [
        dice.randrange(8 + length, len(good)) for _ in range(1000)
    ]:
        bit = 1 << dice.randrange(8)

        def flip(data: bytearray, at: int = at, bit: int = bit) -> None:
            data[:] = good
            data[at] ^= bit
            header = bytes(data[8 : 8 + length])
            places = [found.span(1) for found in re.finditer(rb'\\"seal\\":\\"([0-9a-f]{32})\\"', header)]
            if len(places) == 1:
                begin, end = places[0]
                zeroed = header[:begin] + b"0" * 32 + header[end:]
                data[8 + begin : 8 + end] = xxhash.xxh3_128_hexdigest(zeroed).encode()

        change(tmp_path, one, flip)
        if path(tmp_path, one).read_bytes() == good:  # a bit of the seal, made good again
            continue
        try:
            read(opened, one)
            if good[tensor(good, "digests")] == path(tmp_path, one).read_bytes()[tensor(good, "digests")]:
                wrong.append(at)
        except EntryDamagedError:
            continue
    assert wrong == []


ATTACKS: dict[str, Callable[[bytearray], None]] = {
    "the signature taken away": lambda data: resealed(
        data, lambda table, meta: (meta.update(auth=None), table.pop("strong"))
    ),
    "another key's name": lambda data: resealed(data, lambda table, meta: meta["auth"].update(key_id="f" * 16)),
    "another signature": lambda data: resealed(data, lambda table, meta: meta["auth"].update(mac="f" * 64)),
    "another kind of signature": lambda data: resealed(data, lambda table, meta: meta.update(auth={"rsa": 1})),
    "another time": lambda data: resealed(data, lambda table, meta: meta.update(created=1)),
    "another window": lambda data: resealed(data, lambda table, meta: meta["layers"][0].update(kind="sliding")),
    "two tensors swapped": lambda data: resealed(
        data,
        lambda table, meta: table.update(
            {"layers.0.keys": table["layers.0.values"], "layers.0.values": table["layers.0.keys"]}
        ),
    ),
    "other strong digests": lambda data: data.__setitem__(tensor(data, "strong"), bytes(96)),
}


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_deliberate_change_is_refused(tmp_path: Path, attack: str) -> None:
    one = sample([full()], end=300)
    files(tmp_path).put(one.draft)
    change(tmp_path, one, ATTACKS[attack])
    with pytest.raises(EntryDamagedError):
        read(files(tmp_path), one)


@pytest.mark.requirement("R34")
def test_data_and_digests_changed_together_are_refused(tmp_path: Path) -> None:
    """All that an entry without a key has to say for itself is made to agree."""
    one, other = (sample([full()], end=300, seed=seed) for seed in (1, 2))
    files(tmp_path).put(one.draft)
    forged = replace(one.draft, tensors=other.draft.tensors)
    plain = tmp_path / "plain"
    files(plain, None).put(forged)
    shutil.copyfile(path(plain, one), path(tmp_path, one))
    assert read(files(tmp_path, None), one) == content(other), "without a key it passes: this is what the key is for"
    with pytest.raises(EntryUntrustedError, match="not signed"):
        read(files(tmp_path), one)

    files(tmp_path / "theirs", TWO).put(forged)
    shutil.copyfile(path(tmp_path / "theirs", one), path(tmp_path, one))
    with pytest.raises(EntryUntrustedError, match=SigningKey.of(TWO).id):
        read(files(tmp_path), one)
    change(
        tmp_path,
        one,
        lambda data: resealed(data, lambda table, meta: meta["auth"].update(key_id=SigningKey.of(ONE).id)),
    )
    with pytest.raises(EntryDamagedError, match="not what the key"):
        read(files(tmp_path), one)


@pytest.mark.requirement("R34")
def test_another_signed_entry_under_this_name_is_refused(tmp_path: Path) -> None:
    one, other = (sample([full()], end=300, seed=seed) for seed in (1, 2))
    for each in (one, other):
        files(tmp_path).put(each.draft)
    path(tmp_path, one).unlink()
    shutil.copyfile(path(tmp_path, other), path(tmp_path, one))
    with pytest.raises(EntryDamagedError, match="another key"):
        read(files(tmp_path), one)


@pytest.mark.requirement("R34")
def test_a_trimmed_read_checks_what_it_reads(tmp_path: Path, fast_digests_lie: None) -> None:
    one = sample([full()], end=600)
    files(tmp_path).put(one.draft)

    def spoil(row: int) -> Callable[[bytearray], None]:
        def work(data: bytearray) -> None:
            data[tensor(data, "layers.0.values").start + 32 * row] ^= 1

        return work

    def rows(first: int, last: int) -> None:
        buffers = {role: [memoryview(bytearray(32 * (last - first))) for _ in range(2)] for role in ("keys", "values")}
        with files(tmp_path).open(one.key) as file:
            file.read_rows("layers", 0, first, last, buffers)

    change(tmp_path, one, spoil(300))
    rows(0, 256)
    rows(512, 600)
    for first, last in ((250, 257), (257, 258), (511, 512)):
        with pytest.raises(EntryDamagedError, match=r"rows \[256, 512\)"):
            rows(first, last)


@pytest.mark.requirement("R34")
def test_digests_that_change_behind_the_signature_are_refused(tmp_path: Path, fast_digests_lie: None) -> None:
    one, other = (sample([full()], end=300, seed=seed) for seed in (1, 2))
    files(tmp_path).put(one.draft)
    files(tmp_path / "other").put(replace(one.draft, tensors=other.draft.tensors))
    forged = path(tmp_path / "other", one).read_bytes()
    with files(tmp_path).open(one.key) as file:

        def swap(data: bytearray) -> None:
            length = int.from_bytes(data[:8], "little")
            data[8 + length :] = forged[8 + length :]

        change(tmp_path, one, swap)
        with pytest.raises(EntryDamagedError, match="signed"):
            read_everything(file, one)


@pytest.mark.requirement("R34")
def test_what_was_found_right_without_a_key_is_not_with_one(tmp_path: Path) -> None:
    one = sample([full()], end=300)
    files(tmp_path, None).put(one.draft)
    assert read(files(tmp_path, None), one) == content(one)
    with pytest.raises(EntryUntrustedError):
        read(files(tmp_path), one)
    assert read(files(tmp_path, None), one) == content(one)


@pytest.mark.requirement("R34")
def test_keys_are_changed_without_losing_entries(tmp_path: Path) -> None:
    old, new = (sample([full()], end=300, seed=seed) for seed in (1, 2))
    files(tmp_path, ONE).put(old.draft)
    files(tmp_path, TWO, ONE).put(new.draft)
    for one in (old, new):
        assert read(files(tmp_path, TWO, ONE), one) == content(one)
    assert read(files(tmp_path, TWO), new) == content(new)
    with pytest.raises(EntryUntrustedError):
        read(files(tmp_path, TWO), old)
    with pytest.raises(EntryUntrustedError):
        read(files(tmp_path, ONE), new)


@pytest.mark.requirement("R34")
def test_an_unsigned_entry_makes_way_for_a_signed_one(tmp_path: Path) -> None:
    one = sample([full()], end=300)
    files(tmp_path, None).put(one.draft)
    assert files(tmp_path).put(one.draft)[1] is True
    assert read(files(tmp_path), one) == content(one)
    assert files(tmp_path, None).put(one.draft)[1] is False
    assert len(list((tmp_path / "quarantine").glob("*.safetensors"))) == 1


def test_a_signature_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    one = sample([full()], end=300)
    files(tmp_path).put(one.draft)
    change(tmp_path, one, ATTACKS["another kind of signature"])
    for key in (ONE, None):
        with pytest.raises(EntryUnknownError, match="signed in this way"):
            read(files(tmp_path, key), one)


@pytest.mark.requirement("R34")
def test_what_signing_costs(tmp_path: Path, figures: list[str]) -> None:
    one = sample([full("F32", heads=8, dim=64)] * 4, end=1024)
    size, times = sum(data.nbytes for data in one.content.values()), []
    for number, key in enumerate((None, ONE)):
        began = time.perf_counter()
        files(tmp_path / str(number), key).put(one.draft)
        stored = time.perf_counter()
        read(files(tmp_path / str(number), key, verify="always"), one)
        times += [stored - began, time.perf_counter() - stored]
    added = [size / max(1e-9, times[2] - times[0]) / 1e9, size / max(1e-9, times[3] - times[1]) / 1e9]
    figures.append(
        f"signing: {size / 1e6:.0f} MB stored in {1e3 * times[2]:.0f} ms, {1e3 * times[0]:.0f} without a key; "
        f"read in {1e3 * times[3]:.0f} ms, {1e3 * times[1]:.0f} without ({added[1]:.2f} GB/s for the key's part)"
    )
    assert added[1] > 0.05


# --- the store -------------------------------------------------------------------------------------------------------

PROMPT = list(range(3, 303))


@pytest.mark.requirement("R34")
def test_a_store_with_a_key_serves_only_what_it_signed(tmp_path: Path, tiny_llama: Any, caplog: Any) -> None:
    CacheStore(tmp_path / "store").bind(tiny_llama).warm(PROMPT, name="plain")
    signed = CacheStore(tmp_path / "store", key=ONE)
    kv = signed.bind(tiny_llama)
    (key,) = [entry.key for entry in signed.entries()]
    with caplog.at_level(logging.WARNING, "kvkeep"):
        for _ in range(2):
            match = kv.lookup([*PROMPT, 5])
            assert (match.tokens, match.reason) == (
                0,
                "untrusted: it is not signed, and this store was opened with a key",
            )
        assert kv.load([*PROMPT, 5]) is None
    assert sum("passed over" in record.message for record in caplog.records) == 1
    assert "not signed" in (signed.verify(key) or "")
    assert CacheStore(tmp_path / "store").bind(tiny_llama).lookup([*PROMPT, 5]).tokens == 300, "others still have it"

    assert kv.warm(PROMPT).key == key
    assert kv.lookup([*PROMPT, 5]).tokens == 300
    assert signed.verify(key) is None
    assert signed.header(key).meta.auth is not None
    for store, tokens in (
        (CacheStore(tmp_path / "store"), 300),
        (CacheStore(tmp_path / "store", key=TWO), 0),
        (CacheStore(tmp_path / "store", key=TWO, keys=[ONE]), 300),
        (CacheStore(tmp_path / "store", key=TWO, readonly=True), 0),
        (CacheStore(tmp_path / "store", key=ONE, readonly=True, verify="always"), 300),
    ):
        match = store.bind(tiny_llama).lookup([*PROMPT, 5])
        assert match.tokens == tokens
        assert (match.reason or "").startswith("untrusted: it is signed with the key") is (tokens == 0)


@pytest.mark.requirement("R34")
def test_a_forged_entry_is_set_aside_and_computed_again(tmp_path: Path, tiny_llama: Any) -> None:
    store = CacheStore(tmp_path / "store", key=ONE)
    kv = store.bind(tiny_llama)
    entry = kv.warm(PROMPT)
    expected = kv.load([*PROMPT, 5]).layers[0].keys.clone()
    file = store.path / "entries" / entry.key[:2] / f"{entry.key}.safetensors"
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    resealed(data, lambda table, meta: meta["recorded"].update(attention="other"))
    file.unlink()
    file.write_bytes(data)
    assert kv.load([*PROMPT, 5]) is None
    assert kv.lookup([*PROMPT, 5]).tokens == 0
    assert len(list((store.path / "quarantine").glob("*.safetensors"))) == 1
    kv.warm(PROMPT)
    assert kv.load([*PROMPT, 5]).layers[0].keys.equal(expected)


def test_a_key_and_no_verification_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="verify"):
        CacheStore(tmp_path / "store", key=ONE, verify="never")
