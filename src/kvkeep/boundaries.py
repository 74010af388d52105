"""Boundaries within a prefix at which a model that keeps state can go on otherwise: snapshots taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvkeep.drafting import rows_from
from kvkeep.grounds import MIN_SHARED
from kvkeep.identity import LiveIdentity
from kvkeep.inputs import Inputs
from kvkeep.layouts import LayerPlan, LayerState, describe_prefilled, plans_of
from kvkeep.manner import manner_of
from kvkeep.prefixes import uncut


def holds_state(live: LiveIdentity) -> bool:
    """Whether the model's cache holds state that is valid behind one token only."""
    return any(plan.snapshot for plan in live.asked(plans_of))


def boundaries_within(live: LiveIdentity, inputs: Inputs, cuts: Callable[[], Collection[int]]) -> list[int]:
    """Those of some cuts at which it takes something for a prompt to go on otherwise, and at which that is possible.

    Where every layer keeps all rows, one can go on anywhere. A model that does not look at its state when it is fed
    several tokens is prefilled in one pass, and has no state on the way.
    """
    plans = live.asked(plans_of)
    if not any(plan.window or plan.snapshot for plan in plans) or inputs.encoder is not None:
        return []
    if live.length_rule() is not None or live.asked(manner_of).singly:
        return []
    found = {uncut(inputs.media, cut) for cut in cuts() if cut < len(inputs)}
    return sorted(cut for cut in found if cut > MIN_SHARED)


class Boundaries:
    """Takes the state of a cache at boundaries while it is prefilled.

    Attributes:
        calls: what to call with the cache at which number of tokens.
        found: for each boundary the first row that was taken, and what was taken.
    """

    def __init__(self, plans: Sequence[LayerPlan], cuts: Collection[int]) -> None:
        self._plans = plans
        self.found: dict[int, tuple[int, list[LayerState]]] = {}
        self.calls: Mapping[int, Callable[[Any], None]] = {cut: self._taker(cut) for cut in cuts}

    def _taker(self, cut: int) -> Callable[[Any], None]:
        return lambda cache: self._take(cache, cut)

    def _take(self, cache: Any, cut: int) -> None:
        states = describe_prefilled(cache, self._plans, cut, slack=0)
        # A layer that drops rows by itself has later none of those that are needed here; others have them all.
        dropping = [
            state.record.first
            for state, plan in zip(states, self._plans, strict=True)
            if plan.window and not plan.plain and state.record.rows
        ]
        has_rows = any(state.record.rows for state in states)  # else there is nothing to share
        start = min([cut - 1, *dropping]) if has_rows else 0
        start = start if start >= MIN_SHARED else 0
        self.found[cut] = start, [_copied(rows_from(state, start)) for state in states]


def _copied(state: LayerState) -> LayerState:
    """The same in memory of its own: the cache goes on."""
    copies = {id(tensor): tensor.clone() for tensor in state.tensors.values()}
    return LayerState(state.record, {role: copies[id(tensor)] for role, tensor in state.tensors.items()})
