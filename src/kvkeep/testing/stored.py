"""Layers as entries of the real format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvkeep import compat
from kvkeep.drafting import draft_entry, entry_key
from kvkeep.keys import TokenIds, model_digest
from kvkeep.layouts import Buffers, LayerState, fill_cache
from kvkeep.prefixes import Prefix
from kvkeep.records import Identity
from kvkeep.storage.entries import EntryFile, EntryFiles
from kvkeep.storage.fs import Directory

_NOBODY = "0" * 32
_IDENTITY = Identity(
    weights=_NOBODY,
    config=_NOBODY,
    adapters=None,
    dtypes=_NOBODY,
    tokenizer=_NOBODY,
    model=model_digest(_NOBODY, _NOBODY, None, _NOBODY),
)
_MODEL = SimpleNamespace(config=SimpleNamespace(model_type="testing"))


class Shelf:
    """Entries in a directory, which is the caller's to remove."""

    def __init__(self, folder: Path) -> None:
        self._files = EntryFiles(Directory(folder), verify="always")
        self._count = 0

    @contextmanager
    def entry(self, state: LayerState, length: int) -> Iterator[EntryFile]:
        """A layer written to an entry of its own, and the file opened, with every byte of it checked."""
        ids = TokenIds.of(range(length))
        self._count += 1
        key = entry_key(Prefix(ids), _IDENTITY, self._count.to_bytes(16, "big"))
        self._files.put(draft_entry(key, ids, [state], _MODEL, None))
        with self._files.open(key.hash) as file:
            file.verify_all()
            yield file


def loaded(file: EntryFile, layer: Any, tokens: int) -> Any:
    """The layer, filled with the first tokens of a stored one. Raises ``ValueError`` where that cannot be."""
    cache = _OneLayer(layer)
    fill_cache(cache, file.header.meta, file.header.tensors, tokens, _Reader(file), [torch.device("cpu")])
    return cache.layers[0]


def emptied(layer: Any) -> Any:
    """The layer, emptied as a whole cache is before something else is loaded into it."""
    return compat.emptied(_OneLayer(layer)).layers[0]


class _OneLayer:
    """A cache, as far as filling it asks for one."""

    def __init__(self, layer: Any) -> None:
        self.layers = [layer]

    def reset(self) -> None:
        self.layers[0].reset()


class _Reader:
    def __init__(self, file: EntryFile) -> None:
        self._file = file

    def rows(self, layer: int, first: int, last: int, targets: Buffers, behind: Buffers | None) -> None:
        self._file.read_rows("layers", layer, first, last, targets, behind)

    def snapshots(self, layer: int, targets: Mapping[str, memoryview]) -> None:
        self._file.read_snapshots("layers", layer, targets)
