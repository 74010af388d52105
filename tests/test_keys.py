"""Ids and hashes: the same everywhere and for ever, and never the same for two different things.

The constants were computed from the text of FORMAT.md, not with kvkeep.
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.entry_format import EntryKey, Media
from kvkeep.errors import InvalidPromptError
from kvkeep.keys import (
    BLOCK,
    TokenIds,
    common_prefix,
    digest_fields,
    model_digest,
    namespace_digest,
    prefix_chain,
    prefix_hash,
)
from kvkeep.prompts import read_ids
from kvkeep.records import Identity

IDS = [(i * i * 31 + 7) % 50021 for i in range(1000)] + [2**31 - 1, 0, 2**31 - 2]
NAMESPACES = {
    "": (
        "69907c26d4419cbfcf11c2e0c67f46e8",
        [
            "cdf0a1aeb0df03305425fd5a28c462ef",
            "5fb8b1a3cb69c536131502e1d6960400",
            "2583a21d28118d6878cf379326c379f7",
            "712aef69576698c29bf7656202a19a30",
        ],
        {
            0: "cdf0a1aeb0df03305425fd5a28c462ef",
            1: "1ecd711ff3dc227e094bce2ca517e7bc",
            2: "5b07911baf46ec4fad9b1e72a5717083",
            255: "b577ea2b32f46e3577d97972f500e8b8",
            256: "5fb8b1a3cb69c536131502e1d6960400",
            257: "e8ee7f7fa6354c9a88802cf9524fcd99",
            511: "c77b8b419f9ac30ea92b83e481c8de5e",
            512: "2583a21d28118d6878cf379326c379f7",
            513: "a3a264e7d32d8e376bded42aefef3537",
            767: "880c662396f762b588ccf4d19a98d009",
            768: "712aef69576698c29bf7656202a19a30",
            769: "d27b3da91434d618a78c3a21b7ed3607",
            1000: "3f0eef5a3f0298f2cc5df11fe3418db7",
            1003: "784e323b9313d8a6315c5aacd5de3ef8",
        },
    ),
    "tenant-é": (
        "64582643c134983a1256a6fb9a5a4802",
        [
            "9f6d03ce9f99d1f7305b036227283f16",
            "a72d59c78fbb579bcc6d69dac5bab26d",
            "38be914bb41da70d6cfce8534ead03bd",
            "54475661b146a03b4c26fe9e24fbcd37",
        ],
        {
            0: "9f6d03ce9f99d1f7305b036227283f16",
            1: "fb975feccbdc2f4ad6095169588b966e",
            2: "dcad391e252991b4c860f36072f22a0b",
            255: "82948c58a581f26ae38208ae5c2fa7da",
            256: "a72d59c78fbb579bcc6d69dac5bab26d",
            257: "41e6a829c6bf5c2d8c43f282b09674b6",
            511: "2e11ecb1ec4b9d8f17e648d4d31b51c4",
            512: "38be914bb41da70d6cfce8534ead03bd",
            513: "96dade3da685b1eb5bc7bf01c26a72e2",
            767: "21bc8b0c2d83d4eaaca7951023c2e282",
            768: "54475661b146a03b4c26fe9e24fbcd37",
            769: "04b40c580af40b816c14232312160ef6",
            1000: "7364e5cddc6977162e8e6f3c77965312",
            1003: "928b054e3b7f9852965e57c9514e1f50",
        },
    ),
}
WEIGHTS, CONFIG, ADAPTERS, DTYPES, TOKENIZER = (f"{k * 0x1234567:032x}" for k in range(1, 6))
PREFIX = f"{0xABCDEF:032x}"


def key(**changes: object) -> EntryKey:
    identity = Identity(
        weights=WEIGHTS,
        config=CONFIG,
        adapters=None,
        dtypes=DTYPES,
        tokenizer=TOKENIZER,
        model=model_digest(WEIGHTS, CONFIG, None, DTYPES),
    )
    parts: dict[str, object] = {"identity": identity, "namespace": namespace_digest("").hex(), "prefix": PREFIX}
    return EntryKey(**(parts | changes))  # type: ignore[arg-type]


# --- golden vectors ---


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.requirement("R17", part=True)
def test_the_prefix_chain_is_the_one_of_the_format(name: str) -> None:
    digest, links, hashes = NAMESPACES[name]
    ids = TokenIds.of(IDS)
    namespace = namespace_digest(name)
    chain = prefix_chain(ids, namespace)
    assert namespace.hex() == digest
    assert [link.hex() for link in chain] == links
    assert {n: prefix_hash(ids, n, chain).hex() for n in hashes} == hashes


@pytest.mark.requirement("R17", part=True)
def test_the_key_is_the_one_of_the_format() -> None:
    assert model_digest(WEIGHTS, CONFIG, None, DTYPES) == "b3c3869f635f343dda103efe5994cd63"
    assert model_digest(WEIGHTS, CONFIG, ADAPTERS, DTYPES) == "2c628be3b848b92e14c90cd60ad96c7e"
    picture = Media(kind="image", content=f"{77:032x}", start=3, end=9)
    assert key().hash == "1886c779998b74519f1ee4f4ec898731"
    assert key(media=(picture,)).hash == "976964a66f34b1ddd26aa83bb0105d07"
    assert key(tp=(4, 1)).hash == "1a0a34add69958384a6eefeb251904bb"
    assert key(form="int8").hash == "765357707a69fe770198b70fa6664348"


def test_digest_fields_is_the_one_of_the_format() -> None:
    assert digest_fields("d").hex() == "6210748240ef72046909313260b3b2f6"
    assert digest_fields("d", b"").hex() == "6ad229fc3c21aa5c6ba6c30da3289658"
    assert digest_fields("d", None).hex() == "1a4b48f3109d786508639e21d776db93"
    assert digest_fields("d", b"a", b"bc").hex() == "783a3510dbfd3622b30f1ed609951444"
    assert digest_fields("d", b"ab", b"c").hex() == "ec9b169ebff80344dce3c43a866b0e01"


ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICES = ["cpu"] if ACCELERATOR is None else ["cpu", ACCELERATOR.type]
KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: IDS,
    "tuple": lambda: tuple(IDS),
    "one row": lambda: [IDS],
    "numpy scalars": lambda: list(np.array(IDS, np.int64)),
    **{f"numpy {one}": lambda one=one: np.array(IDS, one) for one in ("<i8", ">i8", "<i4", ">i4", "u4", "u8")},
    "a numpy row": lambda: np.array([IDS], np.int32),
    "every second of a numpy array": lambda: np.repeat(np.array(IDS), 2)[::2],
    "a numpy array read backwards": lambda: np.array(IDS[::-1])[::-1],
    "a tensor's slice": lambda: torch.tensor(IDS).repeat_interleave(3)[::3],
    "a tensor's column": lambda: torch.tensor(IDS).expand(4, -1).t()[:, 2],
    **{
        f"{one} on {device}": lambda one=one, device=device: torch.tensor([IDS], dtype=one, device=device)
        for one in (torch.int32, torch.int64)
        for device in DEVICES
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.requirement("R17", part=True)
def test_a_prompt_of_any_kind_has_the_hashes_of_the_format(kind: str) -> None:
    ids = read_ids(KINDS[kind]())
    for name, (_, links, hashes) in NAMESPACES.items():
        chain = prefix_chain(ids, namespace_digest(name))
        assert [link.hex() for link in chain] == links
        assert {n: prefix_hash(ids, n, chain).hex() for n in hashes} == hashes


@pytest.mark.parametrize("narrow", [np.uint8, np.int8, np.int16, np.uint16, torch.uint8, torch.int8, torch.int16])
def test_narrow_integers_have_the_hashes_of_wide_ones(narrow: Any) -> None:
    small = [n % 128 for n in range(600)]
    array_of = torch.tensor if isinstance(narrow, torch.dtype) else np.array
    narrow_ids, ids = read_ids(array_of(small, dtype=narrow)), TokenIds.of(small)
    assert prefix_chain(narrow_ids, namespace_digest("")) == prefix_chain(ids, namespace_digest(""))
    assert narrow_ids == ids


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 511, 512, 513])
def test_a_shorter_prompt_has_the_hashes_of_its_stretch_of_a_longer_one(length: int) -> None:
    for name, (_, links, hashes) in NAMESPACES.items():
        ids = TokenIds.of(IDS[:length])
        chain = prefix_chain(ids, namespace_digest(name))
        assert [link.hex() for link in chain] == links[: 1 + length // 256]
        assert prefix_hash(ids, length, chain).hex() == hashes[length]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
@pytest.mark.requirement("R17", part=True)
def test_another_process_computes_the_same(seed: str) -> None:
    script = (
        "from kvkeep.keys import *\n"
        f"ids = TokenIds.of({IDS!r})\n"
        "chain = prefix_chain(ids, namespace_digest('tenant-é'))\n"
        "print(prefix_hash(ids, 1003, chain).hex())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == NAMESPACES["tenant-é"][2][1003]


# --- nothing runs into something else ---


@pytest.mark.requirement("R17", part=True)
def test_fields_never_share_an_encoding() -> None:
    lists: list[tuple[bytes | None, ...]] = [
        (),
        (b"",),
        (None,),
        (b"", b""),
        (b"", None),
        (None, b""),
        (b"\xff" * 8,),
        (b"ab", b"c"),
        (b"a", b"bc"),
        (b"abc",),
        (b"abc", b""),
        (b"", b"abc"),
        (b"\x01" + bytes(7) + b"a",),
        (b"a", b"\x01" + bytes(7)),
        (bytes(8),),
        (bytes(16),),
    ]
    assert len({digest_fields("d", *fields) for fields in lists}) == len(lists)
    assert digest_fields("d", b"x") != digest_fields("dx")
    assert digest_fields("a", b"x") != digest_fields("b", b"x")


@given(st.lists(st.one_of(st.none(), st.binary(max_size=9)), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
def test_different_fields_have_different_digests(a: list[bytes | None], b: list[bytes]) -> None:
    assert (digest_fields("d", *a) == digest_fields("d", *b)) is (a == b)


def test_every_part_of_a_key_changes_it() -> None:
    identity = key().identity
    picture = Media(kind="image", content="1" * 32, start=0, end=2)
    other = {
        "plain": key(),
        "model": key(identity=Identity(**{**as_dict(identity), "model": "9" * 32})),
        "tokenizer": key(identity=Identity(**{**as_dict(identity), "tokenizer": "9" * 32})),
        "namespace": key(namespace="9" * 32),
        "prefix": key(prefix="9" * 32),
        "form": key(form="exac"),
        "tp": key(tp=(1, 0)),
        "tp rank": key(tp=(1, 1)),
        "media": key(media=(picture,)),
        "two media": key(media=(picture, picture)),
        "media kind": key(media=(Media(kind="audio", content="1" * 32, start=0, end=2),)),
        "media content": key(media=(Media(kind="image", content="2" * 32, start=0, end=2),)),
        "media start": key(media=(Media(kind="image", content="1" * 32, start=1, end=2),)),
        "media end": key(media=(Media(kind="image", content="1" * 32, start=0, end=3),)),
        "swapped": key(namespace=PREFIX, prefix=namespace_digest("").hex()),
    }
    assert len({one.hash for one in other.values()}) == len(other)


def as_dict(identity: Identity) -> dict[str, str | None]:
    return {name: getattr(identity, name) for name in Identity.__dataclass_fields__}


def test_every_part_of_a_model_changes_it() -> None:
    parts = [(WEIGHTS, CONFIG, None, DTYPES), (WEIGHTS, CONFIG, ADAPTERS, DTYPES), (CONFIG, WEIGHTS, None, DTYPES)]
    parts += [(WEIGHTS, CONFIG, None, ADAPTERS), (WEIGHTS, DTYPES, None, CONFIG), (ADAPTERS, CONFIG, None, DTYPES)]
    assert len({model_digest(*one) for one in parts}) == len(parts)


@pytest.mark.requirement("R19")
def test_prefixes_of_other_lengths_ids_and_namespaces_never_share_a_hash() -> None:
    ids = TokenIds.of(IDS)
    found = set()
    for name in ("", "a", "b"):
        chain = prefix_chain(ids, namespace_digest(name))
        found |= {prefix_hash(ids, n, chain) for n in range(len(ids) + 1)}
    assert len(found) == 3 * (len(ids) + 1)
    for at in (0, 255, 256, 999):
        changed = TokenIds.of([*IDS[:at], IDS[at] + 1, *IDS[at + 1 :]])
        chain = prefix_chain(changed, namespace_digest(""))
        assert (
            prefix_hash(changed, at, chain).hex() == prefix_hash(ids, at, prefix_chain(ids, namespace_digest(""))).hex()
        )
        assert prefix_hash(changed, at + 1, chain) not in found


@pytest.mark.requirement("R17", part=True)
def test_blocks_cannot_be_moved_or_swapped() -> None:
    """A sum or xor of block hashes would not see these."""
    a, b = list(range(256)), list(range(1000, 1256))
    orders = [a + b, b + a, a + a, b + b, a, b, a + b + a, b + a + a]
    hashes = set()
    for order in orders:
        ids = TokenIds.of(order)
        hashes.add(prefix_hash(ids, len(ids), prefix_chain(ids, namespace_digest(""))))
    assert len(hashes) == len(orders)


# --- ids ---


def test_the_kind_of_sequence_does_not_matter() -> None:
    values = [0, 1, 255, 256, 2**31 - 1]
    kinds: list[Iterable[int]] = [
        values,
        tuple(values),
        iter(values),
        (value for value in values),
        array("q", values),
        array("i", values),
        np.array(values, np.int64),
        np.array(values, np.int32),
        np.array(values, np.uint32),
        torch.tensor(values),
    ]
    ids = [TokenIds.of(kind) for kind in kinds]
    assert {one.int64 for one in ids} == {b"".join(value.to_bytes(8, "little") for value in values)}
    assert {one.int32 for one in ids} == {b"".join(value.to_bytes(4, "little") for value in values)}
    assert all(a == b and hash(a) == hash(b) for a, b in combinations(ids, 2))
    assert TokenIds.of(bytes([1, 2, 3])).tolist() == TokenIds.of(bytearray([1, 2, 3])).tolist() == [1, 2, 3]


@pytest.mark.parametrize("good", [[], [0], [2**31 - 1], [0] * 1000])
def test_ids_in_range(good: list[int]) -> None:
    ids = TokenIds.of(good)
    assert (ids.tolist(), len(ids)) == (good, len(good))
    assert TokenIds.from_int32(ids.int32) == ids
    assert TokenIds(ids.int64) == ids


@pytest.mark.parametrize(
    "bad", [-1, 2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1, -(2**31), -(2**63), 2**64, 1.0, "1", None]
)
@pytest.mark.parametrize("at", [0, 1, 700])
def test_ids_out_of_range_are_refused(bad: object, at: int) -> None:
    values: list[object] = [5] * 701
    values[at] = bad
    with pytest.raises(InvalidPromptError, match="token ids must"):
        TokenIds.of(values)  # type: ignore[arg-type]


def test_bytes_that_are_no_ids_are_refused() -> None:
    with pytest.raises(InvalidPromptError, match="64-bit"):
        TokenIds(b"\0" * 9)
    with pytest.raises(InvalidPromptError, match="32-bit"):
        TokenIds.from_int32(b"\0" * 5)
    with pytest.raises(InvalidPromptError, match="2\\*\\*31"):
        TokenIds.from_int32(b"\xff\xff\xff\xff")


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(-5, 300), st.integers(-5, 300))
def test_stretches_are_those_of_a_list(values: list[int], first: int, last: int) -> None:
    assert TokenIds.of(values)[first:last].tolist() == values[first:last]


def test_a_stretch_has_no_step() -> None:
    with pytest.raises(ValueError, match="step 1"):
        TokenIds.of([1, 2, 3])[::2]


@pytest.mark.requirement("R36", part=True)
def test_ids_are_never_shown() -> None:
    assert repr(TokenIds.of([4711, 4712])) == "TokenIds(2 tokens)"


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_the_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    shared = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    x, y = TokenIds.of(a), TokenIds.of(b)
    assert common_prefix(x.int32, y.int32) == common_prefix(x.int64, y.int64, 8) == shared


def test_long_prompts_are_hashed_block_by_block() -> None:
    ids = TokenIds.of(range(128 * 1024))
    chain = prefix_chain(ids, namespace_digest(""))
    assert len(chain) == 1 + 128 * 1024 // BLOCK
    assert prefix_chain(ids[: 100 * BLOCK + 7], namespace_digest("")) == chain[:101]
