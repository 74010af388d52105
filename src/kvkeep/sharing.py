"""What of a cache is stored already, to the bit, so that it need not be stored again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvkeep.entry_format import EntryKey, LayerRecord
from kvkeep.grounds import MIN_SHARED
from kvkeep.inputs import Inputs
from kvkeep.layouts import LayerState, head_buffers
from kvkeep.storage.entries import EntryFile
from kvkeep.storage.entry_chain import EntryChain
from kvkeep.storing import Shared, Storing


def stored_alike(storing: Storing, key: EntryKey, inputs: Inputs, states: Sequence[LayerState]) -> Shared | None:
    """The first tokens of a cache whose rows are stored already, bit for bit; ``None`` if they are too few."""
    if len(inputs) <= MIN_SHARED or not any(state.record.roles("rows") for state in states):
        return None
    alike = 0

    def compare(file: EntryFile | EntryChain, tokens: int) -> None:
        nonlocal alike
        alike = _alike(file, tokens, states)

    match = storing.store.serve(key.identity, inputs.prefix, limit=len(inputs) - 1, use=compare)
    return None if match.entry is None or alike < MIN_SHARED else Shared(match.entry.key, alike)


def _alike(file: EntryFile | EntryChain, tokens: int, states: Sequence[LayerState]) -> int:
    """How many of an entry's first tokens have the same rows in it and in the states, as far as both have them."""
    for number, (record, state) in enumerate(zip(file.header.meta.layers, states, strict=True)):
        if not _comparable(record, state):
            return 0
        first = max(record.first, state.record.first)
        if not record.rows or first >= tokens:
            continue
        rows = {
            role: state.tensors[role][:, first - state.record.first : tokens - state.record.first]
            for role in record.roles("rows")
        }
        read = {role: torch.empty(one.shape, dtype=one.dtype) for role, one in rows.items()}
        buffers = {role: head_buffers(one) for role, one in read.items()}
        file.read_rows("layers", number, first - record.first, tokens - record.first, buffers)
        tokens = min(first + _same_rows(read[role], rows[role].to("cpu")) for role in rows)
    return tokens


def _comparable(record: LayerRecord, state: LayerState) -> bool:
    one, two = record, state.record
    return (
        one.kind == two.kind and one.tensors == two.tensors and one.scalars.get("window") == two.scalars.get("window")
    )


def _same_rows(one: torch.Tensor, two: torch.Tensor) -> int:
    """How many leading rows of two tensors [heads, rows, dim] are the same bytes."""
    other = (one.view(torch.uint8) != two.contiguous().view(torch.uint8)).flatten(2).any(-1).any(0)
    return int(other.int().argmax()) if bool(other.any()) else one.shape[1]
