"""Finding a prefix among many entries, and making the index of many entries anew."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from kvkeep.bench.population import LAYERS, TOKENS, entry_ids, made_up_identity, populate
from kvkeep.bench.rows import Row
from kvkeep.bench.sizes import Sizes
from kvkeep.bench.timing import Progress, medians
from kvkeep.errors import KvkeepError
from kvkeep.keys import TokenIds
from kvkeep.prefixes import Prefix
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index
from kvkeep.store import CacheStore

BAR_ENTRIES = 10_000
"""The number of entries that the bars are meant for."""

_PROMPTS = 16


def measure_search(directory: Path, sizes: Sizes, progress: Progress) -> Iterator[Row]:
    """Measure lookup and rebuild in a store of many small entries in an empty directory."""
    store = CacheStore(directory)
    progress("writing entries", 0, 1)
    populate(directory, made_up_identity(), store.namespace_digest, entries=sizes.entries)
    progress("writing entries", 1, 1)
    yield _lookup(store, sizes, progress)
    yield _rebuild(directory, sizes, progress)


def _lookup(store: CacheStore, sizes: Sizes, progress: Progress) -> Row:
    identity = made_up_identity()
    filler = [250] * (sizes.lookup_tokens - TOKENS)
    step = max(1, sizes.entries // _PROMPTS)
    prompts = [Prefix(TokenIds.of(entry_ids(number) + filler)) for number in range(0, sizes.entries, step)]
    store.find(identity, Prefix(TokenIds.of([250] * 300)), limit=299)  # reads the index
    first: list[float] = []
    later: list[float] = []
    for turn in range(sizes.lookups + 1):
        for prompt in prompts:
            began = time.perf_counter()
            match = store.find(identity, prompt, limit=len(prompt) - 1)
            (later if turn else first).append(time.perf_counter() - began)
            if match.tokens != TOKENS:
                raise KvkeepError(f"the bench looked an entry of {TOKENS} tokens up and found {match.tokens}")
        progress("lookup", turn, sizes.lookups)
    less = "" if sizes.entries >= BAR_ENTRIES else f" (the bar is meant for {BAR_ENTRIES:,})"
    return Row(
        name="lookup",
        figure=median(later) * 1e3,
        unit="ms",
        bar=1.0,
        at="most",
        compared=f"median of the store's search with ids given, no identity check: {sizes.lookup_tokens:,} tokens, "
        f"{sizes.entries:,} entries of {TOKENS:,}{less}, made up; {median(first) * 1e3:.2f} ms where the entry found "
        "had not been read before",
    )


def _rebuild(directory: Path, sizes: Sizes, progress: Progress) -> Row:
    opened = Directory(directory)
    index = Index(opened, EntryFiles(opened))
    (seconds,) = medians("rebuild", index.rebuild, times=sizes.rebuilds, progress=progress)
    found = len(index.rows())
    index.close()
    if found != sizes.entries:
        raise KvkeepError(f"the bench rebuilt an index of {sizes.entries} entries and found {found}")
    scaled = "" if sizes.entries == BAR_ENTRIES else f", times {BAR_ENTRIES / sizes.entries:.4g}"
    return Row(
        name="rebuild",
        figure=seconds * BAR_ENTRIES / sizes.entries,
        unit="s",
        bar=3.0,
        at="most",
        compared=f"median time to rebuild the index from {sizes.entries:,} files of {LAYERS} layers and {TOKENS:,} "
        f"tokens, page cache warm{scaled}; keys and values are zeros, of one byte a row",
    )
