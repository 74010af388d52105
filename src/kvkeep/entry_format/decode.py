"""Header bytes into records: what passes is internally consistent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import xxhash

from kvkeep.entry_format.fields import damaged, naturals, object_of
from kvkeep.entry_format.metadata import meta_from_json
from kvkeep.entry_format.records import (
    ALIGNMENT,
    CHAIN,
    DIGESTS,
    IDS,
    ITEM_SIZES,
    MAC,
    MAX_CONTAINERS,
    MAX_DIMS,
    MAX_HEADER,
    MAX_METADATA,
    MAX_TENSORS,
    MAX_TOKENS,
    MAX_UNITS,
    METADATA_KEY,
    SEAL,
    STRONG,
    ZERO_DIGEST,
    EntryMeta,
    Header,
    TensorSpec,
    tensor_name,
)
from kvkeep.entry_format.units import chain_length, first_units
from kvkeep.errors import EntryDamagedError
from kvkeep.keys import DIGEST_SIZE
from kvkeep.signing import STRONG_SIZE

_NAME = re.compile(r"[a-z0-9._]{1,64}")
_METADATA_FIRST = b'{"__metadata__":'
_PLACE = re.compile(
    rb'"(ids|chain|digests)":\{"dtype":"\w+","shape":\[[0-9,]*\],"data_offsets":\[([0-9]{1,18}),([0-9]{1,18})\]\}'
)
_DECODER = json.JSONDecoder()
_DIGITS_AS_ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))


def header_length(head: bytes, size: int) -> int:
    """Read the length word of a file of ``size`` bytes; the header's JSON lies at [8, 8 + length)."""
    if len(head) < 8:
        damaged(f"the file has {size} bytes, too few for a header")
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= MAX_HEADER or 8 + length > size or (8 + length) % ALIGNMENT:
        damaged(f"a header length of {length} does not fit a file of {size} bytes")
    return length


def decode_header(header: bytes, size: int) -> Header:
    """Check and read the JSON part of a header, of a file of ``size`` bytes.

    Raises:
        EntryDamagedError: with the first check that failed. A header of an unknown format version, or with a reserved
            field that this version does not know how to honour, is refused the same way.
    """
    _check_seal(header)
    with _json_errors():
        table = object_of(_parse(header))
        meta = _metadata(table.pop("__metadata__", None))
    if meta.auth is not None:
        signed_part(header)
    tensors = _tensors_from_json(table)
    _check_layout(meta, tensors)
    data = 8 + len(header)
    end = max((spec.end for spec in tensors.values()), default=0)
    if data + end != size:
        damaged(f"the file has {size} bytes, its header describes {data + end}")
    return Header(meta, tensors, data, size)


def decode_listing(header: bytes) -> tuple[EntryMeta, dict[str, tuple[int, int]]]:
    """Check and read of a header what it takes to list an entry, in a fraction of the time.

    Returns:
        The metadata, and where the tensors of ids, chain and digests lie: offsets from the start of the tensor data,
        which nobody has checked against the other tensors or the file's size.

    Raises:
        EntryDamagedError: as :func:`decode_header` does.
    """
    _check_seal(header)
    with _json_errors():
        if header.startswith(_METADATA_FIRST):  # as this version writes it: most of the header need not be parsed
            metadata, end = _DECODER.raw_decode(header.decode("ascii"), len(_METADATA_FIRST))
            found = _PLACE.findall(header, end)
            if len(found) == 3 and len({name for name, _, _ in found}) == 3:
                return _metadata(metadata), {name.decode(): (int(begin), int(end)) for name, begin, end in found}
        table = object_of(_parse(header))
        meta = _metadata(table.pop("__metadata__", None))
        return meta, {name: _offsets(table, name) for name in (IDS, CHAIN, DIGESTS)}


def _check_seal(header: bytes) -> None:
    found = SEAL.findall(header)
    if len(found) != 1:
        damaged("the header has no seal")
    if header.count(b"{") + header.count(b"[") > MAX_CONTAINERS:
        damaged("the header holds too many objects and arrays")
    if xxhash.xxh3_128_hexdigest(header.replace(found[0], ZERO_DIGEST.encode())).encode() != found[0]:
        damaged("the header's seal does not match")


def signed_part(header: bytes) -> bytes:
    """What the signature of a signed entry goes over, of the JSON part of its header.

    Raises:
        EntryDamagedError: if there is no one place of a signature in it.
    """
    content = bytearray(header)
    for what in (MAC, SEAL):
        places = [found.span(1) for found in what.finditer(header)]
        if len(places) != 1:
            damaged("the header has not one place of a signature")
        begin, end = places[0]
        content[begin:end] = b"0" * (end - begin)
    return bytes(content)


@contextmanager
def _json_errors() -> Iterator[None]:
    try:
        yield
    except EntryDamagedError:
        raise
    except (ValueError, RecursionError) as error:
        damaged(f"the header is not JSON: {type(error).__name__}")


def _metadata(source: object) -> EntryMeta:
    metadata = object_of(source)
    text = metadata.pop(METADATA_KEY, None)
    if not isinstance(text, str) or metadata or len(text) > MAX_METADATA:
        damaged("the header's metadata are not one kvkeep text")
    return meta_from_json(object_of(_parse(text.encode())))


def _offsets(table: Mapping[str, Any], name: str) -> tuple[int, int]:
    offsets = object_of(table.get(name)).get("data_offsets")
    if not isinstance(offsets, list) or not naturals(offsets) or len(offsets) != 2:
        damaged(f"the header says not where its {name} are")
    return offsets[0], offsets[1]


def _parse(text: bytes) -> object:
    if b"0" * 21 in text.translate(_DIGITS_AS_ZEROS):  # a parser takes quadratic time for a long integer
        return json.loads(text, parse_int=_integer)
    return json.loads(text)


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("an integer is out of range")
    return int(digits)


def _tensors_from_json(table: dict[str, Any]) -> dict[str, TensorSpec]:
    if len(table) > MAX_TENSORS:
        damaged(f"the header lists {len(table)} tensors, more than {MAX_TENSORS}")
    tensors: dict[str, TensorSpec] = {}
    for name, item in table.items():
        one = object_of(item)
        dtype, shape, offsets = one.pop("dtype", None), one.pop("shape", None), one.pop("data_offsets", None)
        if one or not _NAME.fullmatch(name) or not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            damaged(f"tensor {name[:64]!r} has a name, dtype or member that the format does not allow")
        if not naturals(shape) or len(shape) > MAX_DIMS or not naturals(offsets) or len(offsets) != 2:
            damaged(f"tensor {name!r} has no valid shape and offsets")
        spec = TensorSpec(dtype, tuple(shape), offsets[0], offsets[1])
        if spec.end - spec.begin != prod(spec.shape) * ITEM_SIZES[dtype] or spec.begin % ITEM_SIZES[dtype]:
            damaged(f"tensor {name!r} has offsets that do not fit its shape and dtype")
        tensors[name] = spec
    position = 0
    for spec in sorted(tensors.values(), key=lambda s: (s.begin, s.end)):
        if spec.begin != position:
            damaged("the tensors overlap or leave a gap")
        position = spec.end
    return tensors


def _check_layout(meta: EntryMeta, tensors: Mapping[str, TensorSpec]) -> None:
    """Every tensor that the layout names is there with a shape that fits, and no other is."""
    expected = _check_own_tensors(meta, tensors)
    for stem, number, layer in meta.groups():
        within = (meta.start, meta.end) if stem == "layers" else (0, layer.rows)  # cross layers count encoder positions
        if layer.rows and not within[0] <= layer.first == within[1] - layer.rows:
            rows = f"[{layer.first}, {layer.first + layer.rows})"
            damaged(f"{stem}.{number} holds the rows {rows}, not rows of its stretch up to the end")
        for role, how in layer.tensors.items():
            if isinstance(how, str) and how.startswith("=") and layer.tensors.get(how[1:]) in ("rows", "snapshot"):
                continue
            name = tensor_name(stem, number, role)
            expected.add(name)
            spec = tensors.get(name)
            if spec is None or how not in ("rows", "snapshot"):
                damaged(f"tensor {name[:64]!r} of the layout is missing")
            if how == "rows" and (len(spec.shape) != 3 or not 0 < layer.rows <= spec.shape[1]):
                damaged(f"tensor {name!r} has no room for {layer.rows} rows")
    for role, how in (meta.state or {}).items():
        if how != "snapshot":
            damaged(f"state {role[:64]!r} is stored in an unknown way")
        expected.add(f"state.{role}")
    if expected != set(tensors):
        damaged("the file holds other tensors than its layout names")


def _check_own_tensors(meta: EntryMeta, tensors: Mapping[str, TensorSpec]) -> set[str]:
    """The tensors that every entry has are there with their shapes; returns their names."""
    units = first_units(meta)[1]
    if meta.end > MAX_TOKENS or units > MAX_UNITS:
        damaged(f"{meta.end} tokens in {units} digest units are over the format's limits")
    own = {
        IDS: ("I32", (meta.end - meta.start,)),
        CHAIN: ("U8", (chain_length(meta.start, meta.end), DIGEST_SIZE)),
        DIGESTS: ("U8", (units, DIGEST_SIZE)),
    }
    if meta.auth is not None:
        own[STRONG] = ("U8", (units, STRONG_SIZE))
    if any(name not in tensors or (tensors[name].dtype, tensors[name].shape) != own[name] for name in own):
        damaged("the tensors of ids, chain and digests do not fit the layout")
    return set(own)
