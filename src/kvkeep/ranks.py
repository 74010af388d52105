"""Processes that run one model together: all of them must feed it as many times, or some wait for the others forever.

So they reuse what every one of them can, and whatever goes wrong on one of them is said to all before the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from kvkeep import compat
from kvkeep.placement import device_of, meshes_of


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank can reuse of a prompt.

    Attributes:
        held: tokens that its cache holds; 0 is nothing.
        watched: whether the token behind them is to be compared with what is stored.
        apart: whether that takes a pass of its own.
    """

    held: int = 0
    watched: bool = False
    apart: bool = False


class Ranks:
    """The ranks whose passes wait for each other. Each method must be called by all of them.

    Args:
        groups: each tells its own members; all of them one after the other tell every rank.
        device: where the groups take their tensors from.
    """

    def __init__(self, groups: Sequence[Any], device: torch.device) -> None:
        self._groups = groups
        self._device = device

    def least(self, numbers: Sequence[int]) -> list[int]:
        """For each place the least number that any rank has there."""
        told = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        for group in self._groups:
            distributed.all_reduce(told, op=distributed.ReduceOp.MIN, group=group)
        return [int(one) for one in told.tolist()]

    def all(self, mine: bool) -> bool:
        """Whether it is so on every rank."""
        return bool(self.least([mine])[0])

    @property
    def place(self) -> int:
        """Where this rank is in what :meth:`digests` returns."""
        place, size = 0, 1
        for group in self._groups:
            place += distributed.get_rank(group) * size
            size *= distributed.get_world_size(group)
        return place

    def digests(self, mine: bytes) -> list[bytes]:
        """The digests of all ranks, in one order everywhere; all are as long as this one."""
        told = torch.tensor(list(mine), dtype=torch.uint8, device=self._device)[None]
        for group in self._groups:
            parts = [torch.empty_like(told) for _ in range(distributed.get_world_size(group))]
            distributed.all_gather(parts, told, group=group)
            told = torch.cat(parts)
        return [bytes(row) for row in told.tolist()]


class Agreement:
    """What the ranks of one call agree on: how much all of them reuse, and then whether it is what they compute.

    Args:
        ranks: those of the call.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._open, self._due = True, False

    def reach(self, offer: Callable[[int], Offer], at_most: int) -> Offer:
        """Have ``offer`` say what can be reused of at most so many tokens, until every rank says the same.

        What cannot be made the same is nothing.
        """
        while True:
            mine = offer(at_most)
            answer = self._exchange(mine if mine.held <= at_most else Offer())
            if not self._open:
                return answer
            at_most = answer.held

    def agrees(self, mine: bool) -> bool:
        """Whether every rank's stored rows are what it computes: asked once, of all, where something is watched."""
        if not self._due:
            return mine
        self._due = False
        return self._ranks.all(mine)

    def no_offer(self) -> None:
        """Keep no other rank waiting for what this one offers: nothing, if it has not been said before."""
        if self._open:
            self._exchange(Offer())

    def no_answer(self) -> None:
        """Keep no other rank waiting for whether this one computes what is stored: it does not, if it never came to."""
        self.agrees(False)

    def _exchange(self, mine: Offer) -> Offer:
        """What every rank can have, if that ends the matter, else how much is to be offered next at most."""
        held, most, watched, unwatched, together = self._ranks.least(
            [mine.held, -mine.held, mine.watched, not mine.watched, not mine.apart]
        )
        if held and held != -most:
            return Offer(held)
        self._open = False
        if not held or not (watched or unwatched):
            return Offer()
        self._due = bool(watched)
        return Offer(held, bool(watched), not together)


def ranks_of(model: Any, synced: bool | None = False, ids: Any = None) -> Ranks | None:
    """The ranks that run the model together with this one, or ``None`` if it computes alone.

    Args:
        model: the model. The tensors that it shares with others tell which these are.
        synced: the argument of ``generate`` that makes all ranks go on until the last has finished; ``None`` leaves
            that to the model.
        ids: the prompt's ids, which lie where the ranks talk.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    device = (ids.device if isinstance(ids, torch.Tensor) else device_of(model)) or torch.device("cpu")
    if compat.goes_in_step(model) if synced is None else synced:
        return Ranks([None], device)
    groups = [
        group for mesh in meshes_of(model) for group in mesh.get_all_groups() if distributed.get_world_size(group) > 1
    ]
    return Ranks(list(dict.fromkeys(groups)), device) if groups else None
