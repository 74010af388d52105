"""Format version 1 of an entry: what the header of its safetensors file says, and the checks it must pass.

This module turns records into header bytes and header bytes into records. It touches no disk and no tensor. The prose
of the format is ``FORMAT.md`` in every store; the two are changed together.

A header that passes :func:`decode_header` is internally consistent: every tensor that the layout names is there with a
shape that fits it, nothing else is, and the seal covers every byte of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NoReturn, TypeVar

import xxhash

from kvkeep.errors import EntryDamagedError, EntryUnknownError
from kvkeep.keys import BLOCK, DIGEST_SIZE, digest_fields, model_digest
from kvkeep.records import Identity

FORMAT_VERSION = 1
METADATA_KEY = "kvkeep"

MAX_HEADER = 1 << 20
MAX_METADATA = 512 << 10
MAX_TENSORS = 4096
MAX_DIMS = 8
MAX_TOKENS = 1 << 26
MAX_UNITS = 1 << 20
MAX_CONTAINERS = 1 << 15
"""Objects and arrays in a header: more of them take a parser long, in however few bytes."""
ALIGNMENT = 4096
"""Tensor data begin at a multiple of this, so that a file can be mapped or read with O_DIRECT."""

ITEM_SIZES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""The safetensors dtypes that an entry may hold, with their bytes an item."""

_NAME = re.compile(r"[a-z0-9._]{1,64}")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_SEAL = re.compile(rb'\\"seal\\":\\"([0-9a-f]{32})\\"')
_ZERO_DIGEST = "0" * 32
_DIGITS_AS_ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))

IDS = "ids"
CHAIN = "chain"
DIGESTS = "digests"

Storage = Literal["rows", "snapshot"]
Scalar = bool | int | str | None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies: offsets count from the start of the tensor data, as in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row of one head, for a tensor of shape [heads, slots, dim]."""
        return self.shape[-1] * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """How one cache layer keeps its state.

    Attributes:
        kind: stable name of the layer kind (``full``, ``sliding``, ...), never a class name.
        first: position of the first stored row.
        rows: number of stored rows; they end at the entry's ``end`` (those of a cross layer at the encoder's).
        tensors: for each role how it is stored: ``"rows"`` ([heads, slots, dim], slots >= rows), ``"snapshot"`` (valid
            at ``end`` only), or ``"=role"`` (the very tensor of that other role).
        scalars: what else the layer kind needs, such as ``window``.
    """

    kind: str
    first: int = 0
    rows: int = 0
    tensors: Mapping[str, str]
    scalars: Mapping[str, Scalar]

    def roles(self, storage: Storage) -> list[str]:
        """The roles stored in this way, in the order that digests are taken in."""
        return sorted(role for role, how in self.tensors.items() if how == storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """Something beside token ids that decides KV: a picture, audio, encoder input, unusual positions."""

    kind: str
    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryKey:
    """Everything that decides what an entry may be used for. Its hash is the entry's file name."""

    identity: Identity
    namespace: str
    prefix: str
    media: tuple[Media, ...] = ()
    form: str = "exact"
    tp: tuple[int, int] | None = None

    def hash(self) -> str:
        """The key as 32 hex digits."""
        media = [[m.kind, m.content, m.start, m.end] for m in self.media]
        return digest_fields(
            "kvkeep/key/1",
            bytes.fromhex(self.identity.model),
            bytes.fromhex(self.identity.tokenizer),
            bytes.fromhex(self.namespace),
            canonical_json(media).encode() if media else None,
            self.form.encode(),
            canonical_json(self.tp).encode() if self.tp else None,
            bytes.fromhex(self.prefix),
        ).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryMeta:
    """The metadata of an entry: all of its header except where the tensors lie."""

    key: EntryKey
    start: int
    end: int
    layers: tuple[LayerRecord, ...]
    created: int
    creator: Mapping[str, str]
    recorded: Mapping[str, Any]
    cross: tuple[LayerRecord, ...] | None = None
    state: Mapping[str, str] | None = None
    parent: str | None = None
    digests: str = _ZERO_DIGEST

    def groups(self) -> Iterator[tuple[str, int, LayerRecord]]:
        """Every layer with the name stem of its tensors (``layers`` or ``cross``) and its number."""
        for stem, layers in (("layers", self.layers), ("cross", self.cross or ())):
            for number, layer in enumerate(layers):
                yield stem, number, layer


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    Attributes:
        meta: the metadata.
        tensors: every tensor by name.
        data: file offset of the tensor data.
        size: size of the whole file in bytes.
    """

    meta: EntryMeta
    tensors: Mapping[str, TensorSpec]
    data: int
    size: int


def tensor_name(stem: str, number: int, role: str) -> str:
    """The name of a layer's tensor in the file."""
    return f"{stem}.{number}.{role}"


def canonical_json(value: object) -> str:
    """JSON with one spelling: sorted keys, no spaces, ASCII, no floats."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- digest units: what can be verified apart -----------------------------------------------------------------------


def blocks(rows: int) -> int:
    """How many digest blocks a stretch of rows has."""
    return -(-rows // BLOCK)


def first_units(meta: EntryMeta) -> tuple[dict[tuple[str, int], int], int]:
    """The number of each layer's first digest unit, and how many units there are.

    Unit 0 is the ids and the chain. Then each layer, in order, has one unit a block of rows (all its row tensors, all
    heads) and, if it has snapshots, one for them. Model state, if any, is the last unit.
    """
    first: dict[tuple[str, int], int] = {}
    unit = 1
    for stem, number, layer in meta.groups():
        first[stem, number] = unit
        unit += blocks(layer.rows) + bool(layer.roles("snapshot"))
    return first, unit + bool(meta.state)


def chain_length(start: int, end: int) -> int:
    """How many block boundaries of the prefix hash lie in (start, end]."""
    return end // BLOCK - start // BLOCK


def table_digest(table: bytes | memoryview) -> str:
    """The digest of the digests tensor, which the header holds."""
    return xxhash.xxh3_128(table).hexdigest()


# --- encoding -------------------------------------------------------------------------------------------------------


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, TensorSpec]:
    """Place tensors, given as (name, dtype, shape), one after the other without a gap, as safetensors demands."""
    specs: dict[str, TensorSpec] = {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + prod(shape) * ITEM_SIZES[dtype]
        specs[name] = TensorSpec(dtype, shape, begin, end)
        begin = end
    return specs


def encode_header(meta: EntryMeta, tensors: Mapping[str, TensorSpec]) -> bytes:
    """The header bytes, length word and padding included.

    Its length does not depend on the digests, so that a writer can leave room for it and write it last.
    """
    text = canonical_json(_meta_to_json(meta))
    table: dict[str, object] = {"__metadata__": {METADATA_KEY: text}}
    for name, spec in tensors.items():
        table[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (spec.begin, spec.end)}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    if len(text) > MAX_METADATA or len(header) > MAX_HEADER or len(tensors) > MAX_TENSORS:
        raise ValueError(f"a header of {len(header)} bytes with {len(tensors)} tensors is over the format's limits")
    seal = xxhash.xxh3_128_hexdigest(header).encode()
    sealed = _SEAL.sub(lambda found: found[0].replace(_ZERO_DIGEST.encode(), seal), header)
    return len(sealed).to_bytes(8, "little") + sealed


def _meta_to_json(meta: EntryMeta) -> dict[str, object]:
    identity = meta.key.identity
    return {
        "format": FORMAT_VERSION,
        "block": BLOCK,
        "key": {
            "hash": meta.key.hash(),
            "model": identity.model,
            "weights": identity.weights,
            "config": identity.config,
            "adapters": identity.adapters,
            "dtypes": identity.dtypes,
            "tokenizer": identity.tokenizer,
            "namespace": meta.key.namespace,
            "media": [{"kind": m.kind, "content": m.content, "start": m.start, "end": m.end} for m in meta.key.media],
            "form": meta.key.form,
            "tp": None if meta.key.tp is None else {"size": meta.key.tp[0], "rank": meta.key.tp[1]},
            "prefix": meta.key.prefix,
        },
        "start": meta.start,
        "end": meta.end,
        "parent": meta.parent,
        "layers": [_layer_to_json(layer) for layer in meta.layers],
        "cross": None if meta.cross is None else [_layer_to_json(layer) for layer in meta.cross],
        "state": None if meta.state is None else dict(meta.state),
        "created": meta.created,
        "creator": dict(meta.creator),
        "recorded": dict(meta.recorded),
        "codec": None,
        "auth": None,
        "digests": meta.digests,
        "seal": _ZERO_DIGEST,
    }


def _layer_to_json(layer: LayerRecord) -> dict[str, object]:
    return {
        "kind": layer.kind,
        "first": layer.first,
        "rows": layer.rows,
        "tensors": dict(layer.tensors),
        "scalars": dict(layer.scalars),
    }


# --- decoding -------------------------------------------------------------------------------------------------------


def header_length(head: bytes, size: int) -> int:
    """Read the length word of a file of ``size`` bytes; the header's JSON lies at [8, 8 + length)."""
    if len(head) < 8:
        _damaged(f"the file has {size} bytes, too few for a header")
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= MAX_HEADER or 8 + length > size or (8 + length) % ALIGNMENT:
        _damaged(f"a header length of {length} does not fit a file of {size} bytes")
    return length


def decode_header(header: bytes, size: int) -> Header:
    """Check and read the JSON part of a header, of a file of ``size`` bytes.

    Raises:
        EntryDamagedError: with the first check that failed. A header of an unknown format version, or with a reserved
            field that this version does not know how to honour, is refused the same way.
    """
    meta, table = decode_meta(header)
    tensors = _tensors_from_json(table)
    _check_layout(meta, tensors)
    data = 8 + len(header)
    end = max((spec.end for spec in tensors.values()), default=0)
    if data + end != size:
        _damaged(f"the file has {size} bytes, its header describes {data + end}")
    return Header(meta, tensors, data, size)


def decode_meta(header: bytes) -> tuple[EntryMeta, dict[str, Any]]:
    """Check and read the metadata of a header alone; the table of tensors comes along as it is, unchecked.

    Enough to list an entry, in a fraction of the time; not to read its tensors.

    Raises:
        EntryDamagedError: as :func:`decode_header` does.
    """
    found = _SEAL.findall(header)
    if len(found) != 1:
        _damaged("the header has no seal")
    if header.count(b"{") + header.count(b"[") > MAX_CONTAINERS:
        _damaged("the header holds too many objects and arrays")
    if xxhash.xxh3_128_hexdigest(header.replace(found[0], _ZERO_DIGEST.encode())).encode() != found[0]:
        _damaged("the header's seal does not match")
    try:
        table = _object(_parse(header))
        metadata = _object(table.pop("__metadata__", None))
        text = metadata.pop(METADATA_KEY, None)
        if not isinstance(text, str) or metadata or len(text) > MAX_METADATA:
            _damaged("the header's metadata are not one kvkeep text")
        return _meta_from_json(_object(_parse(text.encode()))), table
    except (ValueError, RecursionError) as error:
        if isinstance(error, EntryDamagedError):
            raise
        _damaged(f"the header is not JSON: {type(error).__name__}")


def _parse(text: bytes) -> object:
    if b"0" * 21 in text.translate(_DIGITS_AS_ZEROS):  # a parser takes quadratic time for a long integer
        return json.loads(text, parse_int=_integer)
    return json.loads(text)


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("an integer is out of range")
    return int(digits)


def _damaged(reason: str) -> NoReturn:
    raise EntryDamagedError(reason)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        _damaged("the header holds something else where an object must be")
    return value


_T = TypeVar("_T")


def _take(source: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = source.pop(name, None)
    if not isinstance(value, kind) or (kind is int and not _natural(value)):
        _damaged(f"the header's {name!r} is not a valid {kind.__name__}")
    return value


def _take_hex(source: dict[str, Any], name: str) -> str:
    value = _take(source, name, str)
    if not _HEX32.fullmatch(value):
        _damaged(f"the header's {name!r} is not 32 hex digits")
    return value


def _take_optional_hex(source: dict[str, Any], name: str) -> str | None:
    return _take_hex(source, name) if source.get(name) is not None else source.pop(name, None)


def _require(source: dict[str, Any], *names: str) -> None:
    for name in names:
        if name not in source:
            _damaged(f"the header lacks {name!r}, which may be null but not absent")


def _nothing_left(source: dict[str, Any], where: str) -> None:
    if source:
        _damaged(f"the header's {where} holds the unknown member {min(source)!r}")


def _meta_from_json(top: dict[str, Any]) -> EntryMeta:
    version = top.pop("format", None)
    if version != FORMAT_VERSION or top.pop("block", None) != BLOCK:
        raise EntryUnknownError(f"format {version!r} is not the format {FORMAT_VERSION} that this version reads")
    _require(top, "codec", "auth", "parent", "cross", "state")
    for reserved in ("codec", "auth"):
        if top.pop(reserved, None) is not None:
            raise EntryUnknownError(f"this version does not read entries with {reserved!r}")
    key, key_hash = _key_from_json(_take(top, "key", dict))
    cross, state = top.pop("cross", None), top.pop("state", None)
    meta = EntryMeta(
        key=key,
        start=_take(top, "start", int),
        end=_take(top, "end", int),
        parent=_take_optional_hex(top, "parent"),
        layers=_layers_from_json(_take(top, "layers", list)),
        cross=None if cross is None else _layers_from_json(cross),
        state=None if state is None else dict(_object(state)),
        created=_take(top, "created", int),
        creator=_take(top, "creator", dict),
        recorded=_take(top, "recorded", dict),
        digests=_take_hex(top, "digests"),
    )
    _take_hex(top, "seal")
    _nothing_left(top, "metadata")
    if key.hash() != key_hash:
        _damaged("the header's key is not the hash of its parts")
    if not all(isinstance(version, str) for version in meta.creator.values()):
        _damaged("the header's creator holds a version that is no text")
    if not meta.start < meta.end or (meta.parent is None) != (meta.start == 0):
        _damaged(f"tokens [{meta.start}, {meta.end}) with parent {meta.parent} are not a stretch of a prefix")
    return meta


def _key_from_json(source: dict[str, Any]) -> tuple[EntryKey, str]:
    _require(source, "adapters", "tp")
    key_hash = _take_hex(source, "hash")
    weights, config = _take_hex(source, "weights"), _take_hex(source, "config")
    adapters, dtypes = _take_optional_hex(source, "adapters"), _take_hex(source, "dtypes")
    model = _take_hex(source, "model")
    if model != model_digest(weights, config, adapters, dtypes):
        _damaged("the header's model is not the digest of its parts")
    media = []
    for item in _take(source, "media", list):
        one = _object(item)
        media.append(
            Media(
                kind=_take(one, "kind", str),
                content=_take_hex(one, "content"),
                start=_take(one, "start", int),
                end=_take(one, "end", int),
            )
        )
        _nothing_left(one, "media")
    tp = source.pop("tp", None)
    if tp is not None:
        shard = _object(tp)
        tp = (_take(shard, "size", int), _take(shard, "rank", int))
        _nothing_left(shard, "tp")
    key = EntryKey(
        identity=Identity(
            weights=weights,
            config=config,
            adapters=adapters,
            dtypes=dtypes,
            tokenizer=_take_hex(source, "tokenizer"),
            model=model,
        ),
        namespace=_take_hex(source, "namespace"),
        prefix=_take_hex(source, "prefix"),
        media=tuple(media),
        form=_take(source, "form", str),
        tp=tp,
    )
    _nothing_left(source, "key")
    return key, key_hash


def _layers_from_json(source: object) -> tuple[LayerRecord, ...]:
    if not isinstance(source, list):
        _damaged("the header's layers are not a list")
    seen: dict[str, LayerRecord] = {}  # layers are mostly alike, and each kind need be checked only once
    layers: list[LayerRecord] = []
    for item in source:
        spelled = repr(item)  # not ``item`` itself, for which true is 1
        if spelled not in seen:
            seen[spelled] = _layer_from_json(_object(item))
        layers.append(seen[spelled])
    return tuple(layers)


def _layer_from_json(source: dict[str, Any]) -> LayerRecord:
    tensors, scalars = _take(source, "tensors", dict), _take(source, "scalars", dict)
    if not all(value is None or isinstance(value, bool | int | str) for value in scalars.values()):
        _damaged("a layer's scalars hold something that is no scalar")
    record = LayerRecord(
        kind=_take(source, "kind", str),
        first=_take(source, "first", int),
        rows=_take(source, "rows", int),
        tensors=tensors,
        scalars=scalars,
    )
    _nothing_left(source, "layer")
    return record


def _tensors_from_json(table: dict[str, Any]) -> dict[str, TensorSpec]:
    if len(table) > MAX_TENSORS:
        _damaged(f"the header lists {len(table)} tensors, more than {MAX_TENSORS}")
    tensors: dict[str, TensorSpec] = {}
    for name, item in table.items():
        one = _object(item)
        dtype, shape, offsets = one.pop("dtype", None), one.pop("shape", None), one.pop("data_offsets", None)
        if one or not _NAME.fullmatch(name) or dtype not in ITEM_SIZES:
            _damaged(f"tensor {name[:64]!r} has a name, dtype or member that the format does not allow")
        if not _naturals(shape) or len(shape) > MAX_DIMS or not _naturals(offsets) or len(offsets) != 2:
            _damaged(f"tensor {name!r} has no valid shape and offsets")
        spec = TensorSpec(dtype, tuple(shape), offsets[0], offsets[1])
        if spec.end - spec.begin != prod(spec.shape) * ITEM_SIZES[dtype] or spec.begin % ITEM_SIZES[dtype]:
            _damaged(f"tensor {name!r} has offsets that do not fit its shape and dtype")
        tensors[name] = spec
    position = 0
    for spec in sorted(tensors.values(), key=lambda s: (s.begin, s.end)):
        if spec.begin != position:
            _damaged("the tensors overlap or leave a gap")
        position = spec.end
    return tensors


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(map(_natural, value))


def _check_layout(meta: EntryMeta, tensors: Mapping[str, TensorSpec]) -> None:
    """Every tensor that the layout names is there with a shape that fits, and no other is."""
    units = first_units(meta)[1]
    if meta.end > MAX_TOKENS or units > MAX_UNITS:
        _damaged(f"{meta.end} tokens in {units} digest units are over the format's limits")
    expected = {IDS, CHAIN, DIGESTS}
    if (
        _shape(tensors, IDS, "I32") != (meta.end - meta.start,)
        or _shape(tensors, CHAIN, "U8") != (chain_length(meta.start, meta.end), DIGEST_SIZE)
        or _shape(tensors, DIGESTS, "U8") != (units, DIGEST_SIZE)
    ):
        _damaged("the tensors of ids, chain and digests do not fit the layout")
    for stem, number, layer in meta.groups():
        within = (meta.start, meta.end) if stem == "layers" else (0, layer.rows)  # cross layers count encoder positions
        if layer.rows and not within[0] <= layer.first == within[1] - layer.rows:
            rows = f"[{layer.first}, {layer.first + layer.rows})"
            _damaged(f"{stem}.{number} holds the rows {rows}, not rows of its stretch up to the end")
        for role, how in layer.tensors.items():
            if isinstance(how, str) and how.startswith("=") and layer.tensors.get(how[1:]) in ("rows", "snapshot"):
                continue
            name = tensor_name(stem, number, role)
            expected.add(name)
            spec = tensors.get(name)
            if spec is None or how not in ("rows", "snapshot"):
                _damaged(f"tensor {name[:64]!r} of the layout is missing")
            if how == "rows" and (len(spec.shape) != 3 or not 0 < layer.rows <= spec.shape[1]):
                _damaged(f"tensor {name!r} has no room for {layer.rows} rows")
    for role, how in (meta.state or {}).items():
        if how != "snapshot":
            _damaged(f"state {role[:64]!r} is stored in an unknown way")
        expected.add(f"state.{role}")
    if expected != set(tensors):
        _damaged("the file holds other tensors than its layout names")


def _shape(tensors: Mapping[str, TensorSpec], name: str, dtype: str) -> tuple[int, ...] | None:
    spec = tensors.get(name)
    return spec.shape if spec is not None and spec.dtype == dtype else None
