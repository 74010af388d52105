"""Headers: what is encoded is decoded, and a header is one of very few that pass."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash
from entry_drafts import Sample, everything, full, sample

from kvkeep.entry_format import (
    ALIGNMENT,
    CHAIN,
    DIGESTS,
    IDS,
    ITEM_SIZES,
    MAX_HEADER,
    MAX_TENSORS,
    MAX_TOKENS,
    MAX_UNITS,
    EntryMeta,
    Header,
    LayerRecord,
    TensorSpec,
    blocks,
    canonical_json,
    chain_length,
    decode_header,
    encode_header,
    first_units,
    header_length,
    lay_out,
    table_digest,
    tensor_name,
)
from kvkeep.errors import EntryDamagedError


def specs(meta: EntryMeta, tensors: list[tuple[str, str, tuple[int, ...]]]) -> dict[str, TensorSpec]:
    small = [(CHAIN, "U8", (chain_length(meta.start, meta.end), 16)), (DIGESTS, "U8", (first_units(meta)[1], 16))]
    return lay_out([*small, (IDS, "I32", (meta.end - meta.start,)), *tensors])


def encoded(one: Sample) -> tuple[EntryMeta, dict[str, TensorSpec], bytes, int]:
    """A header whose tensors stand in the order of their item sizes."""
    named = [(name, source.dtype, source.shape) for name, source in one.draft.tensors.items()]
    table = specs(one.draft.meta, sorted(named, key=lambda tensor: -ITEM_SIZES[tensor[1]]))
    aligned = {name: spec for name, spec in table.items() if spec.begin % ITEM_SIZES[spec.dtype] == 0}
    assert aligned == table
    raw = encode_header(one.draft.meta, table)
    return one.draft.meta, table, raw, len(raw) + max(spec.end for spec in table.values())


PLAIN = sample([full("F64"), full("F64")], end=600)


def test_what_is_encoded_is_decoded() -> None:
    meta, table, raw, size = encoded(PLAIN)
    assert header_length(raw[:8], size) == len(raw) - 8
    header = decode_header(raw[8:], size)
    assert header == Header(meta, table, len(raw), size)
    assert encode_header(header.meta, header.tensors) == raw


def test_every_member_survives() -> None:
    one = everything(start=250)
    meta = replace(
        one.draft.meta, recorded={"a": [1, {"b": None}], "é": "ü"}, creator={"torch": "2.13"}, digests="c" * 32
    )
    meta = replace(meta, key=replace(meta.key, form="int8", tp=(4, 3)))
    table = specs(meta, [(name, source.dtype, source.shape) for name, source in sorted_by_size(one)])
    raw = encode_header(meta, table)
    size = len(raw) + max(spec.end for spec in table.values())
    assert decode_header(raw[8:], size).meta == meta


def sorted_by_size(one: Sample) -> list:  # type: ignore[type-arg]
    return sorted(one.draft.tensors.items(), key=lambda item: -ITEM_SIZES[item[1].dtype])


def test_the_header_is_padded_to_the_alignment_and_sealed() -> None:
    raw = encoded(PLAIN)[2]
    assert len(raw) % ALIGNMENT == 0
    text = json.loads(json.loads(raw[8:])["__metadata__"]["kvkeep"])
    unsealed = raw[8:].replace(text["seal"].encode(), b"0" * 32)
    assert text["seal"] == xxhash.xxh3_128_hexdigest(unsealed)
    assert raw.endswith(b" ")


def test_the_length_of_a_header_does_not_depend_on_the_digests() -> None:
    meta, table, raw, _ = encoded(PLAIN)
    assert len(encode_header(replace(meta, digests="f" * 32), table)) == len(raw)


def test_reserved_fields_are_written_as_null() -> None:
    text = json.loads(json.loads(encoded(PLAIN)[2][8:])["__metadata__"]["kvkeep"])
    assert (text["codec"], text["auth"], text["key"]["tp"], text["format"], text["block"]) == (None, None, None, 1, 256)


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": [1, True, None], "a": "é\n"}) == '{"a":"\\u00e9\\n","b":[1,true,null]}'
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


def test_units_are_numbered_as_the_format_says() -> None:
    meta = everything().draft.meta  # 600, 300, snapshot, 600 + snapshot, none; cross 37; state
    first, count = first_units(meta)
    assert first == {
        ("layers", 0): 1,
        ("layers", 1): 4,
        ("layers", 2): 6,
        ("layers", 3): 7,
        ("layers", 4): 11,
        ("cross", 0): 11,
    }
    assert count == 13
    assert first_units(sample([], end=5).draft.meta) == ({}, 1)
    assert [blocks(rows) for rows in (0, 1, 255, 256, 257, 512)] == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("start", "end", "length"), [(0, 255, 0), (0, 256, 1), (255, 256, 1), (256, 257, 0), (256, 512, 1), (1, 1024, 4)]
)
def test_the_chain_holds_the_boundaries_behind_start(start: int, end: int, length: int) -> None:
    assert chain_length(start, end) == length == len([at for at in range(0, end + 1, 256) if start < at])


def test_names_and_table_digest() -> None:
    assert tensor_name("cross", 3, "values") == "cross.3.values"
    assert table_digest(b"abc") == table_digest(memoryview(b"abc")) == xxhash.xxh3_128_hexdigest(b"abc")
    assert TensorSpec("BF16", (2, 9, 64), 0, 2304).row_bytes == 128


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (b"", 0),
        (b"\0" * 7, 7),
        ((4088).to_bytes(8, "little"), 4095),
        ((4089).to_bytes(8, "little"), 10_000),
        ((0).to_bytes(8, "little"), 10_000),
        ((MAX_HEADER + 4096 - 8).to_bytes(8, "little"), 1 << 30),
        (b"\xff" * 8, 1 << 30),
    ],
)
def test_length_words_that_cannot_be(head: bytes, size: int) -> None:
    with pytest.raises(EntryDamagedError):
        header_length(head, size)


def test_a_header_of_another_size_or_with_a_changed_byte_is_refused() -> None:
    _, _, raw, size = encoded(PLAIN)
    for other in (size - 1, size + 1, 0):
        with pytest.raises(EntryDamagedError, match="the file has"):
            decode_header(raw[8:], other)
    with pytest.raises(EntryDamagedError, match="seal does not match"):
        decode_header(raw[8:-1] + b"\n", size)
    with pytest.raises(EntryDamagedError, match="no seal"):
        decode_header(b"{}" + b" " * 4086, size)
    with pytest.raises(EntryDamagedError, match="no seal"):
        decode_header(raw[8:] + raw[8:], size)


def decode(meta: EntryMeta, table: dict[str, TensorSpec]) -> Header:
    raw = encode_header(meta, table)
    return decode_header(raw[8:], len(raw) + max(spec.end for spec in table.values()))


@pytest.mark.parametrize(
    ("begin", "end", "message"),
    [(-4, -4, "overlap or leave a gap"), (4, 4, "overlap or leave a gap"), (0, 4, "do not fit its shape")],
)
def test_tensors_that_overlap_leave_a_gap_or_have_another_size_are_refused(begin: int, end: int, message: str) -> None:
    meta, table, _, _ = encoded(PLAIN)
    ids = table[IDS]
    moved = replace(ids, begin=ids.begin + begin, end=ids.end + end)
    with pytest.raises(EntryDamagedError, match=message):
        decode(meta, {**table, IDS: moved})


def test_a_tensor_that_does_not_begin_at_a_multiple_of_its_item_size_is_refused() -> None:
    meta = replace(PLAIN.draft.meta, layers=(), state={"odd": "snapshot"})
    table = lay_out(
        [
            ("state.odd", "U8", (3,)),
            (IDS, "I32", (600,)),
            (CHAIN, "U8", (2, 16)),
            (DIGESTS, "U8", (2, 16)),
        ]
    )
    with pytest.raises(EntryDamagedError, match="'ids' has offsets that do not fit its shape and dtype"):
        decode(meta, table)


def test_rows_from_before_the_stretch_are_refused() -> None:
    meta = sample([], start=250, end=600).draft.meta
    for first, fits in ((250, True), (300, True), (249, False), (0, False)):
        layer = LayerRecord(kind="full", first=first, rows=600 - first, tensors={"keys": "rows"}, scalars={})
        changed = replace(meta, layers=(layer,))
        table = specs(changed, [("layers.0.keys", "U8", (1, 600 - first, 4))])
        if fits:
            assert decode(changed, table).meta == changed
        else:
            with pytest.raises(EntryDamagedError, match="not rows of its stretch"):
                decode(changed, table)


@pytest.mark.parametrize(("end", "layers"), [(MAX_TOKENS + 1, 0), (MAX_TOKENS, 1 + MAX_UNITS // blocks(MAX_TOKENS))])
def test_endless_entries_are_refused(end: int, layers: int) -> None:
    """Rows without bytes cost nothing to claim, but what is kept about their digests would."""
    layer = LayerRecord(kind="full", rows=end, tensors={"keys": "rows"}, scalars={})
    meta = replace(PLAIN.draft.meta, end=end, layers=(layer,) * layers)
    table = specs(meta, [(f"layers.{n}.keys", "U8", (1, end, 0)) for n in range(layers)])
    with pytest.raises(EntryDamagedError, match="over the format's limits"):
        decode(meta, table)


def test_headers_over_the_limits_are_never_written() -> None:
    meta, table, _, _ = encoded(PLAIN)
    with pytest.raises(ValueError, match="over the format's limits"):
        encode_header(replace(meta, recorded={"note": "x" * (1 << 20)}), table)
    many = {f"t{n}": TensorSpec("U8", (0,), 0, 0) for n in range(MAX_TENSORS + 1)}
    with pytest.raises(ValueError, match="over the format's limits"):
        encode_header(meta, many)
