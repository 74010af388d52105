"""What an entry's header says, as records, and the limits of the format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvkeep.keys import digest_fields
from kvkeep.records import Identity
from kvkeep.signing import STRONG_SIZE

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

SEAL = re.compile(rb'\\"seal\\":\\"([0-9a-f]{32})\\"')
"""The seal as it lies in the header bytes, inside a JSON text inside JSON."""
MAC = re.compile(rb'\\"mac\\":\\"([0-9a-f]{64})\\"')
"""The signature of a signed entry, in the same way."""
ZERO_DIGEST = "0" * 32
"""What stands for a digest that is not known yet."""

IDS = "ids"
CHAIN = "chain"
DIGESTS = "digests"
STRONG = "strong"

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


@dataclass(frozen=True, kw_only=True)  # without slots, so that the hash is taken only once
class EntryKey:
    """Everything that decides what an entry may be used for. Its hash is the entry's file name."""

    identity: Identity
    namespace: str
    prefix: str
    media: tuple[Media, ...] = ()
    form: str = "exact"
    tp: tuple[int, int] | None = None

    @cached_property
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


@dataclass(frozen=True, slots=True)
class Auth:
    """Who signed an entry: the id of the key, and the signature, which is zeros until the entry is written."""

    key_id: str
    mac: str = "0" * (2 * STRONG_SIZE)


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
    digests: str = ZERO_DIGEST
    auth: Auth | None = None

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
