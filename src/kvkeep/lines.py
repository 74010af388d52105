"""Prompts of several lines: each with padding at its left edge, all in one cache.

A cache has the same slots for every line. Where all lines are cut at one slot, what lies before it is, for each line,
padding and then the beginning of its own prompt: exactly what a prefill of the padded batch leaves there, but for the
slots of padding, which no token ever looks at. So nothing that the caller passes needs to be laid out anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvkeep import compat
from kvkeep.errors import InvalidPromptError
from kvkeep.inputs import Inputs, read_inputs
from kvkeep.layouts import has_states, lay_states
from kvkeep.prefill import check_known
from kvkeep.prompts import left_padding, read_ids


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line of a batch: its prompt without padding, and how many slots of padding lie before it."""

    inputs: Inputs
    padding: int


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """One line's cache of its own, to be laid into that of the batch: it holds the line's first ``held`` tokens."""

    cache: Any
    held: int


class Reach(Protocol):
    """Says how many of a prompt's first so many tokens a cache could be filled with."""

    def __call__(self, inputs: Inputs, tokens: int) -> int:
        """At most ``tokens``."""


def read_lines(ids: torch.Tensor, mask: torch.Tensor | None) -> list[Line]:
    """The lines of a batch of prompts.

    Args:
        ids: [lines, slots].
        mask: likewise, 0 where a slot is padding.

    Raises:
        InvalidPromptError: for a line of padding alone, or with padding elsewhere than at its left edge, and for a mask
            of other lines.
    """
    if mask is not None and mask.shape[0] != ids.shape[0]:
        raise InvalidPromptError(f"the attention mask has {mask.shape[0]} rows, the prompt {ids.shape[0]}")
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
    try:
        ids, mask = torch.as_tensor(input_ids), torch.as_tensor(attention_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidPromptError(f"a batch is ids and a mask of [lines, slots]: {error}") from error
    if ids.dim() != 2 or mask.dim() != 2 or ids.shape[0] != mask.shape[0] or mask.shape[1] > ids.shape[1]:
        raise InvalidPromptError(
            f"a batch is ids and a mask of [lines, slots]; these are {list(ids.shape)} and {list(mask.shape)}"
        )
    lines = read_lines(ids, torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1))
    for line in lines:
        check_known(model, line.inputs.ids)
        read_inputs(model, line.inputs.ids, {})
    return lines


def common_cut(lines: Sequence[Line], reach: Reach, *, at_most: int, watched: bool) -> int:
    """The last slot up to which all lines can be filled, or hold nothing but padding; 0 if there is none.

    Args:
        lines: the lines.
        reach: what is stored of each.
        at_most: the slot to begin with.
        watched: each line's last token before the slot is left out, so one such token alone is none.
    """
    slot, known = at_most, dict[bytes, int]()
    while slot > min(line.padding for line in lines):
        ends = []
        for line in lines:
            tokens = slot - line.padding
            if tokens == 1 and watched:
                ends.append(line.padding)
            elif tokens > 0:
                first = line.inputs.ids[:tokens].int64
                if first not in known:
                    known[first] = reach(line.inputs, tokens)
                ends.append(line.padding + known[first])
        if min(ends) == slot:
            return slot
        slot = min(ends)
    return 0


def lay_out(cache: Any, slots: int, filled: Sequence[Filled | None], copies: int) -> None:
    """Make the empty cache of a batch hold so many slots: the lines' caches at the end of them, each ``copies`` times.

    A line of ``None`` has only padding there, which there must not be where a layer has a state.
    """
    own = [None if one is None else one.cache.layers for one in filled]
    first = next(layers for layers in own if layers is not None)
    for number, layer in enumerate(first):
        if has_states(layer):
            lay_states(cache.layers[number], [layers[number] for layers in own if layers is not None], copies)
        if getattr(layer, "keys", None) is None:
            continue
        laid = [
            like.new_ones((len(filled) * copies, like.shape[1], slots, like.shape[3]))  # zeros count as free in 4.57
            for like in (layer.keys, layer.values)
        ]
        for place, layers in enumerate(own):
            if layers is not None:
                for target, rows in zip(laid, (layers[number].keys, layers[number].values), strict=True):
                    target[place * copies : (place + 1) * copies, :, slots - rows.shape[2] :] = rows
        compat.extend(cache, number, laid[0], laid[1])
    compat.rest(cache)
