"""Drafts of entries with known content, for the storage tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvkeep.entry_format import ITEM_SIZES, EntryKey, EntryMeta, LayerRecord, Media
from kvkeep.keys import BLOCK, TokenIds, model_digest, namespace_digest, prefix_chain, prefix_hash
from kvkeep.records import Identity
from kvkeep.storage.entries import Draft, EntryFile, TensorSource

PARTS = {"weights": "1" * 32, "config": "2" * 32, "adapters": None, "dtypes": "4" * 32}
IDENTITY = Identity(**PARTS, tokenizer="5" * 32, model=model_digest(**PARTS))


@dataclass(frozen=True)
class Layer:
    """A layer to make up: ``rows`` roles as (dtype, heads, dim, room), ``snapshots`` as (dtype, shape)."""

    kind: str = "full"
    first: int = 0
    rows: Mapping[str, tuple[str, int, int, int]] = field(default_factory=dict)
    snapshots: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, int | str | bool | None] = field(default_factory=dict)


def full(dtype: str = "F32", heads: int = 2, dim: int = 8, room: int = 0) -> Layer:
    return Layer(rows={"keys": (dtype, heads, dim, room), "values": (dtype, heads, dim, room)})


def sliding(first: int, window: int) -> Layer:
    rows = {"keys": ("BF16", 1, 16, 0), "values": ("BF16", 1, 16, 0)}
    return Layer(kind="sliding", first=first, rows=rows, scalars={"window": window})


@dataclass(frozen=True)
class Sample:
    """A draft, and its content: [heads, rows, row bytes] for rows, [bytes] for the rest."""

    draft: Draft
    content: Mapping[str, np.ndarray]

    @property
    def key(self) -> str:
        return self.draft.meta.key.hash


def sample(
    layers: Sequence[Layer],
    *,
    end: int,
    start: int = 0,
    seed: int = 0,
    cross: Sequence[Layer] | None = None,
    cross_rows: int = 0,
    state: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    media: tuple[Media, ...] = (),
) -> Sample:
    """Make up an entry of tokens [start, end)."""
    ids = TokenIds.of((_bytes(seed, "ids", "I32", (4 * end,)).view("<u4") >> 1).tolist())
    namespace = namespace_digest("")
    chain = prefix_chain(ids, namespace)
    tensors: dict[str, TensorSource] = {}
    content: dict[str, np.ndarray] = {}
    records = [_make(f"layers.{n}", one, end - one.first, seed, tensors, content) for n, one in enumerate(layers)]
    crossed = [_make(f"cross.{n}", one, cross_rows, seed, tensors, content) for n, one in enumerate(cross or ())]
    for role, (dtype, shape) in (state or {}).items():
        _whole(f"state.{role}", dtype, shape, seed, tensors, content)
    meta = EntryMeta(
        key=EntryKey(
            identity=IDENTITY, namespace=namespace.hex(), prefix=prefix_hash(ids, end, chain).hex(), media=media
        ),
        start=start,
        end=end,
        parent=None if start == 0 else "a" * 32,
        layers=tuple(records),
        cross=None if cross is None else tuple(crossed),
        state=None if state is None else dict.fromkeys(state, "snapshot"),
        created=1_700_000_000,
        creator={"kvkeep": "0.1.0"},
        recorded={"attention": "sdpa"},
    )
    return Sample(Draft(meta, ids[start:end], chain[start // BLOCK + 1 : end // BLOCK + 1], tensors), content)


def _make(
    stem: str,
    layer: Layer,
    rows: int,
    seed: int,
    tensors: dict[str, TensorSource],
    content: dict[str, np.ndarray],
) -> LayerRecord:
    for role, (dtype, heads, dim, room) in layer.rows.items():
        data = _bytes(seed, f"{stem}.{role}", dtype, (heads, rows, dim * ITEM_SIZES[dtype]))
        content[f"{stem}.{role}"] = data
        tensors[f"{stem}.{role}"] = TensorSource(dtype, (heads, rows + room, dim), [memoryview(head) for head in data])
    for role, (dtype, shape) in layer.snapshots.items():
        _whole(f"{stem}.{role}", dtype, shape, seed, tensors, content)
    how = dict.fromkeys(layer.rows, "rows") | dict.fromkeys(layer.snapshots, "snapshot")
    how |= {role: f"={other}" for role, other in layer.aliases.items()}
    stored = rows if layer.rows else 0
    return LayerRecord(
        kind=layer.kind, first=layer.first if stored else 0, rows=stored, tensors=how, scalars=dict(layer.scalars)
    )


def _whole(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    seed: int,
    tensors: dict[str, TensorSource],
    content: dict[str, np.ndarray],
) -> None:
    data = _bytes(seed, name, dtype, (int(np.prod(shape)) * ITEM_SIZES[dtype],))
    content[name] = data
    tensors[name] = TensorSource(dtype, shape, [memoryview(data)])


def _bytes(seed: int, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes that are the same wherever the tests run."""
    data = np.frombuffer(hashlib.shake_128(f"{seed} {name}".encode()).digest(int(np.prod(shape))), np.uint8)
    return (data & 1 if dtype == "BOOL" else data.copy()).reshape(shape)


def everything(*, start: int = 0, room: int = 0) -> Sample:
    """An entry with every way of storing that the format has, of tokens [start, 600)."""
    layers = [
        full("F32", heads=2, dim=8, room=room),
        sliding(first=300, window=200),
        Layer(kind="linear", snapshots={"conv_states": ("F16", (1, 4, 3)), "recurrent_states": ("F64", (2, 5, 5))}),
        Layer(
            kind="mixed",
            first=start,
            rows={"keys": ("F8_E4M3", 3, 5, 0), "indexer_keys": ("I8", 1, 7, room)},
            snapshots={"scales": ("F32", (3,))},
            aliases={"values": "keys"},
            scalars={"name": "x", "flag": True, "none": None},
        ),
        Layer(kind="empty"),
    ]
    return sample(
        [layers[0] if start == 0 else Layer(first=start, rows=layers[0].rows), *layers[1:]],
        start=start,
        end=600,
        cross=[full("BF16", heads=2, dim=4)],
        cross_rows=37,
        state={"rope_deltas": ("I64", (1, 1)), "mask": ("BOOL", (9,))},
        media=(Media(kind="image", content="e" * 32, start=3, end=40),),
    )


def read_everything(file: EntryFile, sample: Sample) -> dict[str, bytes]:
    """Read all tensors of an entry through its public methods; rows as one string of bytes over all heads."""
    found: dict[str, bytes] = {}
    for stem, number, layer in file.header.meta.groups():
        rows = {r: np.zeros_like(sample.content[f"{stem}.{number}.{r}"]) for r in layer.roles("rows")}
        file.read_rows(stem, number, 0, layer.rows, {r: [memoryview(head) for head in rows[r]] for r in rows})
        snapshots = {r: np.zeros_like(sample.content[f"{stem}.{number}.{r}"]) for r in layer.roles("snapshot")}
        if snapshots:
            file.read_snapshots(stem, number, {r: memoryview(snapshots[r]) for r in snapshots})
        found |= {f"{stem}.{number}.{role}": data.tobytes() for role, data in (rows | snapshots).items()}
    state = {role: np.zeros_like(sample.content[f"state.{role}"]) for role in file.header.meta.state or {}}
    if state:
        file.read_state({role: memoryview(data) for role, data in state.items()})
    return found | {f"state.{role}": data.tobytes() for role, data in state.items()}
