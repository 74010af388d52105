"""Records into header bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod

import xxhash

from kvkeep.entry_format.records import (
    ALIGNMENT,
    FORMAT_VERSION,
    ITEM_SIZES,
    MAC,
    MAX_HEADER,
    MAX_METADATA,
    MAX_TENSORS,
    METADATA_KEY,
    SEAL,
    ZERO_DIGEST,
    EntryMeta,
    LayerRecord,
    TensorSpec,
    canonical_json,
)
from kvkeep.keys import BLOCK


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, TensorSpec]:
    """Place tensors, given as (name, dtype, shape), one after the other without a gap, as safetensors demands."""
    specs: dict[str, TensorSpec] = {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + prod(shape) * ITEM_SIZES[dtype]
        specs[name] = TensorSpec(dtype, shape, begin, end)
        begin = end
    return specs


def encode_header(
    meta: EntryMeta, tensors: Mapping[str, TensorSpec], sign: Callable[[bytes], str] | None = None
) -> bytes:
    """The header bytes, length word and padding included.

    Its length does not depend on the digests, so that a writer can leave room for it and write it last.
    ``sign(header)`` gives the signature of an entry that is to have one.
    """
    text = canonical_json(_meta_to_json(meta))
    table: dict[str, object] = {"__metadata__": {METADATA_KEY: text}}
    for name, spec in tensors.items():
        table[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (spec.begin, spec.end)}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    if len(text) > MAX_METADATA or len(header) > MAX_HEADER or len(tensors) > MAX_TENSORS:
        raise ValueError(f"a header of {len(header)} bytes with {len(tensors)} tensors is over the format's limits")
    if sign is not None:
        mac = sign(header).encode()
        header = MAC.sub(lambda found: found[0].replace(found[1], mac), header)
    seal = xxhash.xxh3_128_hexdigest(header).encode()
    sealed = SEAL.sub(lambda found: found[0].replace(ZERO_DIGEST.encode(), seal), header)
    return len(sealed).to_bytes(8, "little") + sealed


def _meta_to_json(meta: EntryMeta) -> dict[str, object]:
    identity = meta.key.identity
    return {
        "format": FORMAT_VERSION,
        "block": BLOCK,
        "key": {
            "hash": meta.key.hash,
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
        "auth": None if meta.auth is None else {"key_id": meta.auth.key_id, "mac": meta.auth.mac},
        "digests": meta.digests,
        "seal": ZERO_DIGEST,
    }


def _layer_to_json(layer: LayerRecord) -> dict[str, object]:
    return {
        "kind": layer.kind,
        "first": layer.first,
        "rows": layer.rows,
        "tensors": dict(layer.tensors),
        "scalars": dict(layer.scalars),
    }
