"""Many entries at once, written without waiting for the disk: whole and sound, but of next to no size.

Their keys and values are zeros that no disk block holds, one byte a row. Everything that a listing, a lookup or an
index reads of them is what it would be in a real entry.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from kvkeep.entry_format import (
    CHAIN,
    DIGESTS,
    IDS,
    EntryKey,
    EntryMeta,
    LayerRecord,
    blocks,
    encode_header,
    first_units,
    lay_out,
    table_digest,
    tensor_name,
)
from kvkeep.keys import BLOCK, DIGEST_SIZE, TokenIds, digest_fields, model_digest, prefix_chain, prefix_hash
from kvkeep.records import Identity

LAYERS = 30
TOKENS = 1600
"""Of each entry: 1,024 that all share, 256 that a few share, and 320 of its own."""

_ROLES = ("keys", "values")
_DTYPE = "F8_E4M3"  # one byte


def made_up_identity() -> Identity:
    """The identity of no model."""
    weights, config, dtypes, tokenizer = (
        digest_fields("kvkeep/bench", part.encode()).hex() for part in ("weights", "config", "dtypes", "tokenizer")
    )
    return Identity(
        weights=weights,
        config=config,
        adapters=None,
        dtypes=dtypes,
        tokenizer=tokenizer,
        model=model_digest(weights, config, None, dtypes),
    )


def entry_ids(number: int) -> list[int]:
    """The ids of entry ``number``."""
    group, own = divmod(number // 3, 200), divmod(number, 200)
    return [7] * 1024 + [*group] * 128 + [*own] * 160


def populate(store: Path, identity: Identity, namespace: bytes, *, entries: int) -> None:
    """Write entries into a store that is there."""
    for number in range(entries):
        _write(store / "entries", TokenIds.of(entry_ids(number)), identity, namespace)


def _write(directory: Path, ids: TokenIds, identity: Identity, namespace: bytes) -> None:
    chain = prefix_chain(ids, namespace)
    links = b"".join(chain[1:])
    key = EntryKey(identity=identity, namespace=namespace.hex(), prefix=prefix_hash(ids, len(ids), chain).hex())
    table = xxhash.xxh3_128_digest(ids.int32 + links) + _row_digests(len(ids)) * LAYERS
    layer = LayerRecord(kind="full", rows=len(ids), tensors=dict.fromkeys(_ROLES, "rows"), scalars={})
    meta = EntryMeta(
        key=key,
        start=0,
        end=len(ids),
        layers=(layer,) * LAYERS,
        created=0,
        creator={},
        recorded={},
        digests=table_digest(table),
    )
    rows = [
        (tensor_name("layers", number, role), _DTYPE, (1, len(ids), 1)) for number in range(LAYERS) for role in _ROLES
    ]
    units = first_units(meta)[1]
    specs = lay_out(
        [
            (IDS, "I32", (len(ids),)),
            (CHAIN, "U8", (len(chain) - 1, DIGEST_SIZE)),
            (DIGESTS, "U8", (units, DIGEST_SIZE)),
            *rows,
        ]
    )
    header = encode_header(meta, specs)
    name = key.hash
    path = directory / name[:2] / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header + ids.int32 + links + table)
        file.truncate(len(header) + max(spec.end for spec in specs.values()))


def _row_digests(tokens: int) -> bytes:
    """The digests of one layer's blocks, which are all zeros."""
    sizes = (min(BLOCK, tokens - block * BLOCK) * len(_ROLES) for block in range(blocks(tokens)))
    return b"".join(xxhash.xxh3_128_digest(bytes(size)) for size in sizes)
