"""Prompts of several lines: each with padding at its left edge, all in one cache.

A cache has the same slots for every line. Where all lines are cut at one slot, what lies before it is, for each line,
padding and then the beginning of its own prompt: exactly what a prefill of the padded batch leaves there, but for the
slots of padding, which no token ever looks at. So nothing that the caller passes needs to be laid out anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvkeep import compat
from kvkeep.errors import InvalidPromptError
from kvkeep.inputs import Inputs, read_inputs
from kvkeep.prompts import left_padding, read_ids

Rows = Sequence[Mapping[str, torch.Tensor]]
"""For each layer rows of one token by role, each [heads, lines, dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line of a batch: its prompt without padding, and how many slots of padding lie before it."""

    inputs: Inputs
    padding: int


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """One line's cache of its own, to be laid into that of the batch.

    Attributes:
        cache: holds the line's first ``held`` tokens; ``None`` where the line has only padding before the cut.
        held: the tokens.
        row: the stored rows of the token behind them, if it is to be watched.
    """

    cache: Any
    held: int
    row: Rows | None


class Fill(Protocol):
    """Fills a cache of one line with the first so many tokens of a prompt, or fewer."""

    def __call__(self, inputs: Inputs, tokens: int, *, guard: bool) -> Filled:
        """The filled cache; it holds nothing on a miss."""


def read_lines(ids: torch.Tensor, mask: torch.Tensor | None) -> list[Line]:
    """The lines of a batch of prompts.

    Args:
        ids: [lines, slots].
        mask: likewise, 0 where a slot is padding.

    Raises:
        InvalidPromptError: for a line of padding alone, or with padding elsewhere than at its left edge.
    """
    lines = []
    for number in range(ids.shape[0]):
        row = read_ids(ids[number])
        padding = 0 if mask is None else left_padding(mask[number], len(row))
        if padding == len(row):
            raise InvalidPromptError(f"line {number} of the batch is padding alone")
        lines.append(Line(Inputs(row[padding:]), padding))
    return lines


def batch_lines(model: Any, input_ids: Any, attention_mask: Any) -> list[Line]:
    """The lines of a batch that a cache holds; ones that the mask lacks at the right are taken as there.

    Raises:
        InvalidPromptError: if these are not ids and a mask of several lines, or a line has padding within.
        UnsupportedRequestError: for ids that stand for pictures.
    """
    ids, mask = torch.as_tensor(input_ids), torch.as_tensor(attention_mask)
    if ids.dim() != 2 or mask.dim() != 2 or ids.shape[0] != mask.shape[0] or mask.shape[1] > ids.shape[1]:
        raise InvalidPromptError(
            f"a batch is ids and a mask of [lines, slots]; these are {list(ids.shape)} and {list(mask.shape)}"
        )
    lines = read_lines(ids, torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1))
    for line in lines:
        read_inputs(model, line.inputs.ids, {})
    return lines


def common_cut(lines: Sequence[Line], fill: Fill, *, guard: bool) -> list[Filled]:
    """Fill a cache for each line, all up to the same slot, the last one that they all can be filled to.

    Returns:
        One for each line; the same object for lines that are the same. Empty if no slot will do.
    """
    slot = max(line.padding + len(line.inputs) for line in lines) - 1  # at least one slot must be left to feed
    while True:
        known: dict[tuple[bytes, int], Filled] = {}
        filled: list[Filled] = []
        for line in lines:
            tokens = slot - line.padding
            if tokens <= 0:
                filled.append(Filled(None, 0, None))
                continue
            key = (line.inputs.ids[:tokens].int64, tokens)
            if key not in known:
                known[key] = fill(line.inputs, tokens, guard=guard)
            filled.append(known[key])
        ends = [line.padding + _behind(one) for line, one in zip(lines, filled, strict=True) if line.padding < slot]
        if not ends or min(ends) <= min(line.padding for line in lines):
            return []
        if min(ends) == slot:
            break
        slot = min(ends)
    watched = [one for one in filled if one.cache is not None]
    if guard and any(one.row is None for one in watched):  # they would end at different slots
        return common_cut(lines, fill, guard=False)
    return filled


def _behind(one: Filled) -> int:
    """The tokens that a cache holds, with the one that is watched."""
    return one.held + (one.row is not None)


def lay_out(cache: Any, lines: Sequence[Line], filled: Sequence[Filled], copies: int) -> int:
    """Put the lines' caches into the empty cache of a batch, each ``copies`` times in a row.

    Returns:
        The slots that the cache now holds.
    """
    slots = next(line.padding + one.held for line, one in zip(lines, filled, strict=True) if one.cache is not None)
    first = next(one.cache for one in filled if one.cache is not None)
    for number, layer in enumerate(first.layers):
        laid = [
            like.new_ones((len(lines) * copies, like.shape[1], slots, like.shape[3]))  # zeros count as free in 4.57
            for like in (layer.keys, layer.values)
        ]
        for place, one in enumerate(filled):
            if one.cache is not None:
                own = one.cache.layers[number]
                for target, rows in zip(laid, (own.keys, own.values), strict=True):
                    target[place * copies : (place + 1) * copies, :, slots - rows.shape[2] :] = rows
        compat.extend(cache, number, laid[0], laid[1])
    return slots


def watched_rows(filled: Sequence[Filled], copies: int) -> tuple[list[dict[str, torch.Tensor]], list[int]] | None:
    """The stored rows of every line at the slot that is watched, and which lines of the cache they belong to."""
    there = [(number, one.row) for number, one in enumerate(filled) if one.row is not None]
    if not there:
        return None
    layers = range(len(there[0][1]))
    rows = [
        {
            role: torch.cat([row[layer][role] for _, row in there for _ in range(copies)], dim=1)
            for role in there[0][1][layer]
        }
        for layer in layers
    ]
    return rows, [number * copies + copy for number, _ in there for copy in range(copies)]
