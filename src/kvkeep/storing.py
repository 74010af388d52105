"""What storing takes, whoever computed the cache: the key, the checks that the model is still the one, the draft."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep import compat
from kvkeep.drafting import describe, draft_entry, entry_key
from kvkeep.entry_format import EntryKey
from kvkeep.errors import CacheMismatchError, EntryNotFoundError, UnsupportedCacheError, UnsupportedRequestError
from kvkeep.grounds import WHOLE, Ground
from kvkeep.identity import LiveIdentity
from kvkeep.inputs import Inputs
from kvkeep.layouts import LayerPlan, LayerState, plans_of
from kvkeep.manner import manner_of
from kvkeep.prefill import CHUNK
from kvkeep.records import Entry
from kvkeep.served import Source
from kvkeep.storage.entries import Draft
from kvkeep.storage.entry_chain import MAX_LINKS

if TYPE_CHECKING:
    from kvkeep.store import CacheStore


@dataclass(frozen=True, slots=True)
class Shared:
    """The first tokens of what is to be stored, which are stored already.

    Attributes:
        key: the entry that has them.
        tokens: how many of its tokens they are.
    """

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Storing:
    """A store and a live model whose caches go there.

    Attributes:
        store: the store.
        live: the model.
        tokenizer: its tokenizer or processor, or ``None``.
        source: fills caches from the store.
        guard: whether what is reused is computed again and compared, where calls do not say so themselves.
    """

    store: CacheStore
    live: LiveIdentity
    tokenizer: Any
    source: Source
    guard: bool

    def key(self, inputs: Inputs, *, form: str = "exact") -> EntryKey:
        """The key under which the KV of exactly these inputs is kept."""
        return entry_key(inputs.prefix, self.live.current(), self.store.namespace_digest, form=form)

    def put(
        self,
        key: EntryKey,
        inputs: Inputs,
        states: Sequence[LayerState],
        *,
        cross: Sequence[LayerState] = (),
        continues: Shared | None = None,
        links: int = MAX_LINKS,
    ) -> Entry:
        """Store what was computed, if the model is still the one that the key names.

        Args:
            key: its key.
            inputs: what was computed.
            states: the layers, from token 0 on.
            cross: what they hold of an encoder.
            continues: what of it is stored already, to the bit.
            links: how many entries its chain may have.
        """
        self.check_unchanged(key)
        if not any(state.record.roles("rows") for state in states):
            continues = None  # state alone is whole in each entry
        ground = WHOLE if continues is None else self.store.ground(continues.key, continues.tokens, links=links)
        try:
            entry = self.store.put(self._draft(key, inputs, states, cross, ground))
        except EntryNotFoundError:  # what it was to continue was removed meanwhile
            return self.store.put(self._draft(key, inputs, states, cross, WHOLE))
        self.store.supersede(entry, ground.replaced)
        return entry

    def put_boundary(self, inputs: Inputs, states: Sequence[LayerState], behind: Entry, start: int) -> None:
        """Store the state at a boundary within an entry, which has the rows before ``start``; or nothing.

        The states hold rows from ``start`` on.
        """
        key = self.key(inputs)
        self.check_unchanged(key)
        ground = self.store.ground(behind.key, start)
        if (ground.start, ground.parent is None) == (start, start == 0):  # else rows would be needed that are not here
            with suppress(EntryNotFoundError):  # it was removed meanwhile
                self.store.put(self._draft(key, inputs, states, (), ground))

    def _draft(
        self,
        key: EntryKey,
        inputs: Inputs,
        states: Sequence[LayerState],
        cross: Sequence[LayerState],
        ground: Ground,
    ) -> Draft:
        model, fields = self.live.model(), self.live.fields()
        return draft_entry(key, inputs.ids, states, model, self.tokenizer, fields=fields, cross=cross, ground=ground)

    def check_unchanged(self, key: EntryKey) -> None:
        """Raise CacheMismatchError if the model is not the one that the key names any more."""
        if self.live.current() != key.identity:
            raise CacheMismatchError("the model was changed while its KV was computed: nothing was stored; try again")


def check_idle(model: Any) -> None:
    """Refuse a model that is being trained."""
    if model.training:
        raise UnsupportedRequestError("the model is in training mode, where caches are noisy: call model.eval()")


def describe_idle(
    model: Any, cache: Any, length: int, plans: Sequence[LayerPlan], *, paired: bool = False
) -> list[LayerState]:
    """Describe a cache of a model that is not being trained."""
    check_idle(model)
    return describe(cache, plans, length, compat.text_config(model), paired=paired)


def plans_for(live: LiveIdentity, length: int) -> tuple[LayerPlan, ...]:
    """The plans of the model's layers, if caches of so many tokens can be kept; UnsupportedCacheError if not."""
    model, rule = live.model(), live.length_rule()
    if rule is not None and rule.refuses(length):
        raise UnsupportedCacheError(
            f"{type(model).__name__} has other rotary frequencies for every length beyond {rule.switch} tokens, so "
            f"that KV of {length} tokens would serve no other prompt: store a shorter prefix"
        )
    plans = plans_of(model)
    objection = live.asked(manner_of).objection
    if objection is not None:
        raise UnsupportedCacheError(f"{type(model).__name__} {objection}")
    return plans


def chunk_for(live: LiveIdentity, length: int) -> int:
    """Tokens a forward pass: all of them where the first ones need the frequencies that the last ones switch on.

    So, too, where several tokens fed behind others would not see the state that these left.
    """
    rule = live.length_rule()
    whole = (rule is not None and length > rule.switch) or live.asked(manner_of).singly
    return length if whole else CHUNK
