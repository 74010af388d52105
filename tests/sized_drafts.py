"""Drafts of entries of an exact size in bytes, for the tests of budgets: of any namespace, and in chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from entry_drafts import Layer, sample

from kvkeep import CacheStore, Entry
from kvkeep.keys import namespace_digest, prefix_chain, prefix_hash
from kvkeep.storage.entries import Draft
from kvkeep.storage.entry_writer import plan

STRETCH = 4
"""Tokens that one link of a chain holds."""

LEAST = 8192
"""The bytes that an entry takes at least: the header's blocks, and then some."""


def sized(nbytes: int, *, seed: int = 0, tenant: str = "", depth: int = 0, parent: str | None = None) -> Draft:
    """A draft whose file has ``nbytes`` bytes; with a depth, the link of a chain so deep below token 0."""
    base = plan(_draft(1, seed, tenant, depth, parent)).size - 1
    draft = _draft(nbytes - base, seed, tenant, depth, parent)
    assert plan(draft).size == nbytes
    return draft


def _draft(padding: int, seed: int, tenant: str, depth: int, parent: str | None) -> Draft:
    layer = Layer(kind="padding", snapshots={"bytes": ("U8", (padding,))})
    end, namespace = (depth + 1) * STRETCH, namespace_digest(tenant)
    made = sample([layer], start=depth * STRETCH, end=end, seed=seed).draft
    ids = sample([], end=end, seed=seed).draft.ids
    prefix = prefix_hash(ids, end, prefix_chain(ids, namespace))
    key = replace(made.meta.key, namespace=namespace.hex(), prefix=prefix.hex())
    return replace(made, meta=replace(made.meta, key=key, parent=parent))


def used(store: CacheStore) -> int:
    """The bytes of all entries, as the store lists them."""
    return sum(entry.nbytes for entry in store.entries())


def on_disk(store: CacheStore) -> dict[str, int]:
    """The size of each entry's file, by key."""
    return {path.stem: path.stat().st_size for path in (store.path / "entries").rglob("*.safetensors")}


def seeds(store: CacheStore, entries: Mapping[int, Entry]) -> list[int]:
    """Which of these are still there; files and rows agree."""
    here = {entry.key for entry in store.entries()}
    assert here == on_disk(store).keys()
    return [seed for seed, entry in entries.items() if entry.key in here]
