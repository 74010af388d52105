"""Serving: caches filled from a store, for the live model that they are for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvkeep import compat
from kvkeep.generation import Served
from kvkeep.guard import prove
from kvkeep.identity import LiveIdentity
from kvkeep.keys import TokenIds
from kvkeep.layouts import fill_cache
from kvkeep.matching import can_trim
from kvkeep.records import GenerateReport, Match
from kvkeep.saving import LENGTH_DEPENDENT
from kvkeep.storage.entries import EntryFile

if TYPE_CHECKING:
    from kvkeep.store import CacheStore

log = logging.getLogger("kvkeep")


class Serving:
    """The :class:`~kvkeep.generation.Source` of one store and one live model.

    Attributes:
        guard: whether calls that do not say so themselves are guarded.
        reported: called with the report of every call.
    """

    def __init__(
        self, store: CacheStore, live: LiveIdentity, *, guard: bool, reported: Callable[[GenerateReport], None]
    ) -> None:
        self.guard = guard
        self.reported = reported
        self._store = store
        self._live = live

    def fill(self, cache: Any, ids: TokenIds, *, guard: bool) -> Served:
        """Fill an empty cache with the longest stored prefix of ``ids``, at most all but the last.

        For the guard, the cache gets one token fewer, and that token's stored rows come along.
        """
        model = self._live.model()
        served = Served(_miss(None))

        def use(file: EntryFile, tokens: int) -> None:
            nonlocal served

            def read(number: int, first: int, last: int, targets: Mapping[str, Sequence[memoryview]]) -> None:
                file.read_rows("layers", number, first, last, targets)

            meta, tensors = file.header.meta, file.header.tensors
            watched = guard and can_trim(meta, tokens - 1)
            held = tokens - 1 if watched else tokens
            devices = compat.layer_devices(model, len(meta.layers))
            row = fill_cache(cache, meta, tensors, held, read, devices, next_row=watched)
            served = Served(_miss(None), held, row, file.identity)

        try:
            identity = self._live.current()
            if self._live.depends_on_length():
                return Served(_miss(f"rope: {LENGTH_DEPENDENT}"))
            match = self._store.serve(identity, ids, limit=len(ids) - 1, use=use)
        except Exception as error:  # whatever is wrong with a store, the caller's work goes on
            if self._store.on_error == "raise":
                raise
            log.warning("kvkeep: the store %s failed (%s); the prompt is computed instead", self._store.path, error)
            return Served(_miss(f"error: {type(error).__name__}: {error}"))
        return replace(served, match=match) if match else Served(match)

    def arguments(self, ids: TokenIds, *, guard: bool) -> tuple[dict[str, Any], Served]:
        """A filled cache as arguments for ``generate``, where it cannot be reached from inside; none on a miss."""
        model = self._live.model()
        cache = compat.dynamic_cache(compat.text_config(model))
        served = self.fill(cache, ids, guard=guard)
        objection = None if served.row is None else prove(model, cache, ids, served.row)
        if objection is not None:
            return {}, Served(self.refuted(served, objection))
        if not served.match:
            return {}, served
        named = compat.names_cache_kind(getattr(model, "generation_config", None))
        none = {"cache_implementation": None} if named else {}
        return {compat.GENERATE_CACHE_ARGUMENT: cache, **none}, served

    def refuted(self, served: Served, why: str) -> Match:
        """Take back what was served, because the model computes otherwise: it has changed, or the entry is wrong."""
        entry, before = served.match.entry, self._live.current()
        if entry is not None and self._live.refresh() == before:
            self._store.refute(entry.key, f"guard: {why}", served.file)
            return _miss(f"guard: {why}; the entry is set aside")
        log.warning("kvkeep: the model was changed unseen (%s); it has been hashed again", why)
        return _miss(f"guard: {why}; the model was changed in a way that no check saw")


def _miss(reason: str | None) -> Match:
    return Match(tokens=0, entry=None, reason=reason)
