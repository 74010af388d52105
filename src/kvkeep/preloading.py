"""Preloading: entries read into memory at process start, so that those who generate from them read nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvkeep import compat
from kvkeep.errors import EntryError, EntryNotFoundError, InvalidPromptError, InvalidRequestError
from kvkeep.identity import LiveIdentity
from kvkeep.layouts import HeldLayers, LayerReader, hold_layers
from kvkeep.prompts import is_messages
from kvkeep.records import Entry, Match
from kvkeep.settings import parse_size
from kvkeep.storage.entries import EntryFile
from kvkeep.storage.entry_chain import EntryChain

if TYPE_CHECKING:
    from kvkeep.store import CacheStore

log = logging.getLogger("kvkeep")

Read = Callable[[EntryFile | EntryChain, str], LayerReader]
"""Gives the reader of an open entry's layers."""


def preload(
    store: CacheStore,
    live: LiveIdentity,
    wanted: Any,
    lookup: Callable[[Any], Match],
    read: Read,
    *,
    device: str | torch.device | None,
    max_bytes: int | str | None,
) -> list[Entry]:
    """Hold in memory what names, keys and prompts stand for; see :meth:`kvkeep.BoundStore.preload`."""
    budget = None if max_bytes is None else parse_size(max_bytes, "max_bytes")
    place = None if device is None else _device(device)
    keys = list(dict.fromkeys(_key(store, live, one, lookup) for one in _listed(wanted)))
    if budget is not None:
        store.memory.shrink(budget)
    for key in keys:
        store.memory.load(key, partial(_hold, live.model(), read, place))
    held = {one.entry.key: one.entry for one in store.resident()}
    if gone := len(set(keys) - held.keys()):
        log.warning("kvkeep: %d of %d preloaded entries had to make way: max_bytes= is too small", gone, len(keys))
    return [held[key] for key in keys if key in held]


def _listed(wanted: Any) -> list[Any]:
    if isinstance(wanted, str):
        return [wanted]
    if isinstance(wanted, Mapping) or is_messages(wanted) or any(isinstance(one, int) for one in wanted):
        raise InvalidPromptError("preload takes a list of names and prompts: put a single prompt in a list")
    return list(wanted)


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.empty(0, device=device).device  # "cuda" is the current one
        if place.type == "meta":
            raise ValueError("nothing can be kept on 'meta'")
        return place
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise InvalidRequestError(f"device= is no device of this machine: {error}") from error


def _key(store: CacheStore, live: LiveIdentity, one: Any, lookup: Callable[[Any], Match]) -> str:
    """The key of the entry with this name or key, or of the longest one for this prompt."""
    what, entry = "a prompt", None
    if isinstance(one, str):
        what = f"{one!r} is no name or key of an entry, and as a prompt"
        with suppress(EntryNotFoundError, InvalidRequestError):  # a text may be no name at all
            entry = store.entry(one)
    if entry is None:
        try:
            match = lookup(one)
        except InvalidRequestError as error:
            if not isinstance(one, str):
                raise
            raise EntryNotFoundError(f"{what} it cannot be read: {error}") from error
        if match.entry is None or match.reason is not None:
            raise EntryNotFoundError(f"{what} is not stored ({match.reason}): warm it first")
        entry = match.entry
    if entry.identity != live.current() or entry.namespace != store.namespace_digest.hex():
        raise EntryNotFoundError(f"the entry {one!r} was not stored for this model, tokenizer and namespace")
    return entry.key


def _hold(model: Any, read: Read, device: torch.device | None, file: EntryFile | EntryChain) -> dict[str, HeldLayers]:
    """Read the layers of an open entry to a device, or to where the model keeps each of them."""
    meta, tensors = file.header.meta, file.header.tensors
    held = {}
    for stem, records in (("layers", meta.layers), ("cross", meta.cross or ())):
        places = compat.layer_devices(model, len(records)) if device is None else [device] * len(records)
        try:
            held[stem] = hold_layers(stem, records, tensors, read(file, stem), places)
        except ValueError as error:
            if isinstance(error, EntryError):
                raise
            raise InvalidRequestError(f"the entry {file.key} cannot be held in memory: {error}") from error
    return held
