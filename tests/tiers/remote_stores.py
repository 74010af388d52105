"""Stores with one remote, and what is put into them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from entry_drafts import IDENTITY, Layer, Sample, full, read_everything, sample

from kvkeep import CacheStore, Entry, Match
from kvkeep.keys import TokenIds
from kvkeep.prefixes import Prefix
from kvkeep.storage.entries import EntryFile
from kvkeep.storage.entry_chain import PARENT_DIGESTS, EntryChain
from kvkeep.tiers import MemoryTier, Part, Stat


class CountingTier(MemoryTier):
    """A tier in memory that counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def get(self, name: str, *args: Any, **settings: Any) -> Part | None:
        self.asked.append(("get", name))
        return super().get(name, *args, **settings)

    def stat(self, name: str) -> Stat | None:
        self.asked.append(("stat", name))
        return super().stat(name)

    def list(self, prefix: str) -> Any:
        raise AssertionError("nothing is ever listed")

    def count(self, what: str) -> int:
        """How often something below ``what`` was asked for."""
        return sum(name.startswith(f"v1/{what}/") for _, name in self.asked)


def open_store(path: Path, remote: Any, **settings: Any) -> CacheStore:
    return CacheStore(path, remote=remote, **{"min_free": 0, "durability": "none", **settings})


def link(start: int, end: int, seed: int = 0) -> Sample:
    """Tokens [start, end) of one long prefix."""
    return sample([Layer(first=start, rows={"keys": ("F32", 2, 8, 0)})], start=start, end=end, seed=seed)


def put_chain(store: CacheStore, ends: Sequence[int], seed: int = 0) -> list[Entry]:
    """Entries that continue each other, one up to each of the ends."""
    entries: list[Entry] = []
    for start, end in zip([0, *ends], ends, strict=False):
        made = link(start, end, seed).draft
        if entries:
            last = entries[-1].key
            digests = store.header(last).meta.digests
            made = replace(made, meta=replace(made.meta, parent=last, recorded={PARENT_DIGESTS: digests}))
        entries.append(store.put(made))
    return entries


def ask(store: CacheStore, end: int, *, seed: int = 0, more: int = 100) -> tuple[Match, str]:
    """A lookup of a prompt that goes on behind the first ``end`` tokens, and the digest of the keys it is served."""
    found = ""

    def use(file: EntryFile | EntryChain, tokens: int) -> None:
        nonlocal found
        heads = [memoryview(bytearray(tokens * 32)) for _ in range(2)]
        file.read_rows("layers", 0, 0, tokens, {"keys": heads})
        found = digest(b"".join(heads))

    prefix = Prefix(TokenIds.of([*link(0, end, seed).draft.ids.tolist(), *[9] * more]))
    return store.serve(IDENTITY, prefix, limit=len(prefix) - 1, use=use), found


def keys_of_chain(ends: Sequence[int], seed: int = 0) -> str:
    """The digest of the keys of the first ``ends[-1]`` tokens, as :func:`ask` gives them."""
    rows = [link(start, end, seed).content["layers.0.keys"] for start, end in zip([0, *ends], ends, strict=False)]
    return digest(np.concatenate(rows, axis=1).tobytes())


def one_sample(end: int = 1000, seed: int = 0) -> Sample:
    return sample([full("F32", heads=2, dim=8)], end=end, seed=seed)


def digest(data: bytes) -> str:
    """What stands for bytes where they are compared: a failure would print them all."""
    return hashlib.sha256(data).hexdigest()


def served_bytes(store: CacheStore, one: Sample) -> dict[str, str] | str | None:
    """The digest of every tensor of a sample as it is served, or the reason of a miss."""
    found: dict[str, bytes] = {}
    prefix = Prefix(TokenIds.of([*one.draft.ids.tolist(), 5]))
    match = store.serve(
        IDENTITY, prefix, limit=len(prefix) - 1, use=lambda file, tokens: found.update(read_everything(file, one))
    )
    return {name: digest(data) for name, data in found.items()} or match.reason


def bytes_of(one: Sample) -> dict[str, str]:
    """The digests of a sample's tensors."""
    return {name: digest(data.tobytes()) for name, data in one.content.items()}
