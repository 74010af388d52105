"""From a live cache to the draft of an entry."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvkeep import compat
from kvkeep._version import __version__
from kvkeep.entry_format import EntryKey, EntryMeta, tensor_name
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.fingerprint import chat_template_digest
from kvkeep.grounds import WHOLE, Ground
from kvkeep.keys import BLOCK, TokenIds, prefix_chain, prefix_hash
from kvkeep.layouts import (
    DTYPE_NAMES,
    LayerPlan,
    LayerState,
    describe_cache,
    describe_cross,
    head_buffers,
    whole_buffer,
)
from kvkeep.legacy import describe_legacy, describe_legacy_cross, is_legacy, own_pairs
from kvkeep.prefixes import Prefix
from kvkeep.records import Identity
from kvkeep.storage.entries import Draft, TensorSource
from kvkeep.storage.entry_chain import PARENT_DIGESTS


def describe(
    cache: Any, plans: Sequence[LayerPlan], length: int, config: Any, *, paired: bool = False
) -> list[LayerState]:
    """Describe a cache that holds ``length`` tokens of one sequence: a ``Cache``, or a legacy tuple.

    ``config`` is that of the text model, which says how old tuples are laid out. A ``paired`` cache is one of an
    encoder-decoder model, of which the decoder's own layers are described.

    Raises:
        UnsupportedCacheError: naming the class, for a cache or layer that kvkeep does not know.
        CacheMismatchError: if it holds another number of tokens, or a layer is not as the model would fill it.
    """
    if is_legacy(cache):
        return describe_legacy(own_pairs(cache) if paired else cache, plans, length, config)
    check_kept(cache, length, paired=paired)
    own = compat.decoder_part(cache)
    return describe_cache(compat.first_layers(own, len(plans)) if paired else own, plans, length)


def describe_encoder(cache: Any, count: int) -> list[LayerState]:
    """Describe what a cache holds of an encoder, for a decoder of so many layers.

    Raises:
        UnsupportedCacheError, CacheMismatchError: if it is not as the model would fill it.
    """
    return describe_legacy_cross(cache) if is_legacy(cache) else describe_cross(cache, count)


def check_kept(cache: Any, length: int, *, paired: bool = False) -> None:
    """Refuse what is no cache that kvkeep keeps, or holds another number of tokens.

    A ``paired`` one is that of an encoder-decoder model.

    Raises:
        UnsupportedCacheError, CacheMismatchError: if so.
    """
    if not compat.is_known_cache(cache):
        raise UnsupportedCacheError(f"a {type(cache).__name__} is not a cache that kvkeep can keep")
    if compat.is_paired(cache) != paired:
        fits = "an EncoderDecoderCache" if paired else "one without cross-attention layers"
        raise UnsupportedCacheError(f"a {type(cache).__name__} is not a cache of this model, which fills {fits}")
    cached = compat.cached_tokens(cache)
    if cached != length and compat.counts_tokens(cache):
        raise CacheMismatchError(
            f"the cache holds {cached} tokens and {length} ids were given. The last generated token is never in the "
            f"cache: if the first {cached} ids are its tokens, save it with input_ids[:, :{cached}]"
        )


def entry_key(prefix: Prefix, identity: Identity, namespace: bytes, *, form: str = "exact") -> EntryKey:
    """The key under which the KV of exactly this prefix is kept."""
    digest = prefix_hash(prefix.ids, len(prefix), prefix.chain(namespace))
    return EntryKey(identity=identity, namespace=namespace.hex(), prefix=digest.hex(), media=prefix.media, form=form)


def draft_entry(
    key: EntryKey,
    ids: TokenIds,
    states: Sequence[LayerState],
    model: Any,
    tokenizer: Any,
    *,
    fields: Mapping[str, str] | None = None,
    cross: Sequence[LayerState] = (),
    ground: Ground = WHOLE,
) -> Draft:
    """The draft of an entry, of ids and states from token 0 on, of which it holds what its ground does not.

    Tensors on the CPU are not copied: they must stay as they are.
    """
    states = [rows_from(state, ground.start) for state in states]
    tensors = {
        tensor_name(stem, number, role): _source(tensor, number, state.record.tensors[role])
        for stem, group in (("layers", states), ("cross", cross))
        for number, state in enumerate(group)
        for role, tensor in state.tensors.items()
    }
    meta = EntryMeta(
        key=key,
        start=ground.start,
        end=len(ids),
        parent=ground.parent,
        layers=tuple(state.record for state in states),
        cross=tuple(state.record for state in cross) or None,
        created=int(time.time()),
        creator={"kvkeep": __version__, "transformers": compat.TRANSFORMERS, "torch": torch.__version__},
        recorded={
            "attention": compat.attention_implementation(model),
            "config": dump_fields(fields or {}),
            "chat_template": chat_template_digest(tokenizer),
            "model_type": str(getattr(model.config, "model_type", "")),
            **({} if ground.digests is None else {PARENT_DIGESTS: ground.digests}),
        },
    )
    chain = prefix_chain(ids, bytes.fromhex(key.namespace))[ground.start // BLOCK + 1 :]
    return Draft(meta=meta, ids=ids[ground.start :], chain=chain, tensors=tensors)


def rows_from(state: LayerState, first: int) -> LayerState:
    """The same layer without the rows before position ``first``."""
    record = state.record
    if not record.rows or record.first >= first:
        return state
    tensors = {
        role: tensor[:, first - record.first :] if record.tensors[role] == "rows" else tensor
        for role, tensor in state.tensors.items()
    }
    return LayerState(replace(record, first=first, rows=record.first + record.rows - first), tensors)


def rows_until(state: LayerState, tokens: int) -> LayerState:
    """The same layer, which has only rows, without those from position ``tokens`` on."""
    record = state.record
    if not record.rows:
        return state
    tensors = {role: tensor[:, : tokens - record.first] for role, tensor in state.tensors.items()}
    return LayerState(replace(record, rows=tokens - record.first), tensors)


def dump_fields(fields: Mapping[str, str]) -> str:
    """Named digests as one text, which costs a reader of headers nothing."""
    return "\n".join(f"{digest} {name}" for name, digest in sorted(fields.items()))


def differing_fields(recorded: object, fields: Mapping[str, str]) -> list[str]:
    """The names whose digests differ from those in a text of :func:`dump_fields`, or are in one of them only."""
    if not isinstance(recorded, str) or not recorded:
        return []
    stored = {name: digest for digest, _, name in (line.partition(" ") for line in recorded.split("\n"))}
    return sorted(name for name in stored.keys() | fields.keys() if stored.get(name) != fields.get(name))


def _source(tensor: torch.Tensor, number: int, storage: str) -> TensorSource:
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedCacheError(f"layer {number} of the cache is {tensor.dtype}, which the format does not hold")
    rows = tensor.to("cpu")
    if storage == "snapshot":
        return TensorSource(dtype=dtype, shape=tuple(rows.shape), parts=[whole_buffer(rows.contiguous())])
    if rows.stride(-1) != 1 or rows.stride(-2) != rows.shape[-1]:
        rows = rows.contiguous()
    return TensorSource(dtype=dtype, shape=tuple(rows.shape), parts=head_buffers(rows))
