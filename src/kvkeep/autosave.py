"""Storing what ``generate`` has computed anyway: the prompt, or the whole turn, where the user asked for that.

What is stored comes out of the cache of the call when it has ended. Where a prompt cannot be cut out of that any more,
because windows have moved on or there is state behind its last token, it is prefilled and stored before, and the call
itself then reuses it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import Any

import torch

from kvkeep import compat
from kvkeep.drafting import rows_until
from kvkeep.errors import KvkeepError, StoreFullError, UnsupportedCacheError
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds, common_prefix
from kvkeep.layouts import plans_of
from kvkeep.manner import manner_of
from kvkeep.prefilling import warm
from kvkeep.prefixes import uncut
from kvkeep.proving import objection_of
from kvkeep.served import Kept
from kvkeep.settings import SaveMode
from kvkeep.sharing import stored_alike
from kvkeep.storing import Storing, chunk_for, describe_idle, plans_for

_REMEMBERED = 256
"""Prompts of earlier calls that a new one is compared with."""

_FROM_CACHE = ("greedy_search", "sample")
"""Ways to generate whose cache holds one sequence, token by token, when they end."""


class AutoSave:
    """Decides what is stored of the calls of one bound store, and stores it. Safe to use from several threads.

    Attributes:
        mode: what is stored of calls that do not say it themselves.
    """

    def __init__(self, storing: Storing, mode: SaveMode, min_tokens: int) -> None:
        self.mode: SaveMode = mode
        self._storing = storing
        self._min_tokens = min_tokens
        self._seen: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def wants(self, mode: SaveMode | None) -> bool:
        """Whether anything is to be stored of calls in this mode; the bind's own where it is ``None``."""
        return (mode or self.mode) != "never"

    def begin(
        self, inputs: Inputs, mode: SaveMode | None, way: str, *, chunked: bool = False, watched: bool = False
    ) -> Saving | Kept | None:
        """Before a call of one sequence is served: what is to be stored when it has ended, or what was stored now."""
        mode = mode or self.mode
        if mode == "never":
            return None
        try:
            return self._begin(inputs, mode, way, chunked, watched)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a store, the caller's work goes on
            return self.failed(error)

    def _begin(self, inputs: Inputs, mode: SaveMode, way: str, chunked: bool, watched: bool) -> Saving | Kept | None:
        live = self._storing.live
        if inputs.encoder is not None:
            return Kept(reason="layout: what an encoder has part in is not stored by itself: warm it")
        tokens = self._seen_before(inputs.ids) if mode == "seen_twice" else len(inputs)
        tokens = uncut(inputs.media, tokens)
        if mode == "seen_twice" and tokens == 0:
            return None
        if mode != "turn" and tokens < self._min_tokens:
            return Kept(
                reason=f"short: {tokens} tokens, and fewer than {self._min_tokens} are not stored by themselves"
            )
        plans = plans_for(live, len(inputs))
        cuttable = all(plan.plain and not plan.window for plan in plans)
        if mode == "turn":
            if way not in _FROM_CACHE:
                return Kept(reason=f"mode: the cache that {way} leaves is not stored")
            if chunked and live.asked(manner_of).singly:  # later chunks do not see the state of those before
                return Kept(reason="mode: the state that prefill_chunk_size leaves in this model is not stored")
            if watched and not cuttable:
                return Kept(reason="mode: code of the call may have edited ids, which is not checked for this layout")
            return Saving(self, inputs, live.state(), None, checked=watched)
        if cuttable and way in _FROM_CACHE:
            return Saving(self, inputs, live.state(), tokens)
        self._storing.store.check_writable()
        return Kept(key=warm(self._storing, inputs.first(tokens), None).key)

    def _seen_before(self, ids: TokenIds) -> int:
        """How many leading tokens of a prompt an earlier call had, too; it is remembered itself."""
        with self._lock:
            earlier = list(self._seen)
            self._seen.append(ids.int32)
        return max((common_prefix(ids.int32, one) for one in earlier), default=0)

    def end(self, saving: Saving, cache: Any, sequences: Any, reused: int) -> Kept:
        """Store what a call has left in its cache."""
        try:
            return self._end(saving, cache, sequences, reused)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a store, the caller's work goes on
            return self.failed(error)

    def _end(self, saving: Saving, cache: Any, sequences: Any, reused: int) -> Kept:
        storing, inputs = self._storing, saving.inputs
        given = inputs.ids.tolist()
        if not isinstance(sequences, torch.Tensor) or sequences.dim() != 2 or sequences.shape[0] != 1:
            return Kept(reason="mode: generate returned no single sequence")
        ids = sequences[0].tolist()
        if ids[: len(given)] != given or cache is None or compat.is_quantized(cache) or compat.is_owned(cache):
            return Kept(reason="layout: the cache of this call is not stored by itself: warm the prompt")
        cached = compat.cached_tokens(cache) if compat.counts_tokens(cache) else len(ids) - 1
        tokens = cached if saving.tokens is None else saving.tokens
        if not len(given) <= cached <= len(ids) or tokens < self._min_tokens:
            return Kept(reason=f"short: {tokens} tokens of a cache of {cached} are not stored by themselves")
        if tokens <= reused + 1:
            return Kept()  # it came from there
        rule = storing.live.length_rule()
        if rule is not None and len(ids) > rule.switch:  # one cache may then hold rows of several frequencies
            return Kept(reason=f"rope: the rotary frequencies change beyond {rule.switch} tokens: warm the prompt")
        storing.store.check_writable()
        longer = tokens > len(inputs)  # what was generated has no media
        whole = replace(inputs, ids=TokenIds.of(ids[:tokens])) if longer else inputs.first(tokens)
        states = describe_idle(storing.live.model(), cache, cached, storing.live.asked(plans_of))
        states = [rows_until(state, tokens) for state in states] if tokens < cached else states
        key = storing.key(whole)
        if storing.live.state() is not saving.model:
            return Kept(reason="identity: the model was changed while it generated")
        if saving.checked:
            plans, chunk = plans_for(storing.live, tokens), chunk_for(storing.live, tokens)
            objection = objection_of(storing.live.model(), whole, states, plans, (), chunk=chunk)
            if objection is not None:
                return Kept(reason=f"refused: ids were edited while it generated: {objection}")
        entry = storing.store.get(key.hash)
        if entry is None:
            entry = storing.put(key, whole, states, continues=stored_alike(storing, key, whole, states))
        return Kept(key=entry.key)

    def failed(self, error: Exception) -> Kept:
        """What to say of a call of which nothing could be stored; with ``on_error="raise"`` this raises."""
        if isinstance(error, UnsupportedCacheError):
            return Kept(reason=f"layout: {error}")
        if isinstance(error, StoreFullError):
            return Kept(reason=f"full: {error}")
        if isinstance(error, KvkeepError) and not isinstance(error, OSError):
            return Kept(reason=f"refused: {error}")
        return Kept(reason=self._storing.store.failed(error))


class Saving:
    """What is to be stored of one call when it has ended.

    Attributes:
        inputs: its prompt.
        model: what the model was when it began.
        tokens: how many tokens of the prompt; ``None`` for all that its cache holds.
        checked: whether code of the call could have edited ids that were fed before: then the model is asked.
    """

    def __init__(
        self, keeper: AutoSave, inputs: Inputs, model: object, tokens: int | None, *, checked: bool = False
    ) -> None:
        self._keeper = keeper
        self.inputs, self.model, self.tokens, self.checked = inputs, model, tokens, checked

    def end(self, cache: Any, sequences: Any, reused: int) -> Kept:
        """Store it, now that ``generate`` has returned these sequences with this cache."""
        return self._keeper.end(self, cache, sequences, reused)
