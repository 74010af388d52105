"""Whole caches: every layer described, or every layer filled. All layers or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from kvkeep import compat
from kvkeep.entry_format import EntryMeta, LayerRecord, TensorSpec
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.layouts.arena import Arena
from kvkeep.layouts.attention import attention_state
from kvkeep.layouts.base import Empty, LayerCodec, LayerPlan, LayerState
from kvkeep.layouts.buffers import LayerReader, head_buffers, row_likes, snapshot_likes, whole_buffer
from kvkeep.layouts.lending import HeldLayers, lent
from kvkeep.layouts.registry import codec_for
from kvkeep.layouts.roomy import RoomyLayer, with_room

_WORTH_AN_ARENA = 1 << 20


def plan_layers(config: Any) -> tuple[LayerPlan, ...]:
    """The plan of every layer of a model.

    Raises:
        UnsupportedCacheError: naming the first layer whose kind is not known.
    """
    try:
        layers = compat.planned_layers(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedCacheError(f"transformers makes no cache for a {type(config).__name__}: {error}") from error
    plans = []
    for number, layer in enumerate(layers):
        try:
            plans.append(codec_for(layer, number).plan(layer))
        except UnsupportedCacheError:
            raise UnsupportedCacheError(
                f"layer {number} of this model keeps its state in a {type(layer).__name__}, which kvkeep cannot"
            ) from None
        except ValueError as error:
            raise UnsupportedCacheError(
                f"layer {number} of this model keeps its state in a {type(layer).__name__}: {error}"
            ) from None
    return tuple(plans)


def plans_of(model: Any) -> tuple[LayerPlan, ...]:
    """The plan of every layer of a model; raises as :func:`plan_layers`."""
    return plan_layers(compat.text_config(model))


def describe_cache(cache: Any, plans: Sequence[LayerPlan], length: int) -> list[LayerState]:
    """Describe every layer of a cache that holds ``length`` tokens of one sequence.

    Raises:
        UnsupportedCacheError: for a layer class without a codec, naming both.
        CacheMismatchError: for a layer that is not filled as the model would fill it, saying how.
    """
    cache = compat.decoder_part(cache)
    compat.wait_for_moves(cache)
    _check_count(len(cache.layers), plans)
    codecs = [codec_for(layer, number) for number, layer in enumerate(cache.layers)]
    states = []
    for number, (layer, codec, plan) in enumerate(zip(cache.layers, codecs, plans, strict=True)):
        seen = compat.seen_tokens(layer)
        if seen != length and hasattr(layer, "get_seq_length"):
            raise CacheMismatchError(f"layer {number} of the cache holds {seen} tokens where {length} were expected")
        try:
            states.append(codec.describe(layer, plan, length))
        except ValueError as error:
            raise CacheMismatchError(f"layer {number} of the cache cannot be saved: {error}") from None
    return states


def batch_pairs(cache: Any, slots: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values of every layer of a cache of several lines, [lines, heads, rows, dim]: the last of its slots.

    Raises:
        UnsupportedCacheError: for a layer that is not plain attention, naming it.
        CacheMismatchError: for a layer that has seen another number of slots.
    """
    pairs = []
    compat.wait_for_moves(cache)
    for number, layer in enumerate(cache.layers):
        plan = codec_for(layer, number).plan(layer)
        if not plan.plain:
            raise UnsupportedCacheError(
                f"layer {number} of the cache is of the kind {plan.kind}: save such caches one sequence at a time"
            )
        seen = compat.seen_tokens(layer)
        if seen != slots:
            raise CacheMismatchError(f"layer {number} of the cache holds {seen} slots where {slots} were expected")
        held = min(slots, layer.keys.shape[2])
        pairs.append((layer.keys[:, :, :held], layer.values[:, :, :held]))
    return pairs


def takes_lines(cache: Any) -> bool:
    """Whether what every layer of a cache holds of one sequence can be laid into it line by line."""
    try:
        return all(codec_for(layer, number).plan(layer).copies for number, layer in enumerate(cache.layers))
    except (ValueError, UnsupportedCacheError):
        return False


def describe_prefilled(cache: Any, plans: Sequence[LayerPlan], length: int, *, slack: int) -> list[LayerState]:
    """Describe a cache that holds every row of ``length`` tokens, but with ``slack`` more than needed of windows.

    Raises:
        UnsupportedCacheError, CacheMismatchError: as :func:`describe_cache`.
    """
    cache = compat.decoder_part(cache)
    if all(plan.plain for plan in plans):
        return describe_layers([(layer.keys, layer.values) for layer in cache.layers], plans, length, slack=slack)
    states = describe_cache(cache, plans, length)
    return [
        attention_state(layer.keys, layer.values, plan, state.record.first, length, slack) if plan.plain else state
        for layer, plan, state in zip(cache.layers, plans, states, strict=True)
    ]


def describe_layers(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plans: Sequence[LayerPlan],
    length: int,
    *,
    slack: int | None = None,
) -> list[LayerState]:
    """Describe keys and values ([1, heads, rows, dim] each) whose rows end at ``length``, one pair a layer.

    Raises:
        CacheMismatchError: for a layer whose tensors are not that, naming it.
    """
    _check_count(len(layers), plans)
    states = []
    for number, ((keys, values), plan) in enumerate(zip(layers, plans, strict=True)):
        try:
            first = length - keys.shape[-2]
            states.append(attention_state(keys, values, plan, first, length, slack))
        except (ValueError, IndexError) as error:
            raise CacheMismatchError(f"layer {number} of the cache cannot be saved: {error}") from None
    return states


def _check_count(count: int, plans: Sequence[LayerPlan]) -> None:
    if count != len(plans):
        raise CacheMismatchError(f"the cache has {count} layers, the model {len(plans)}: it is another model's")


def fill_cache(
    cache: Any,
    meta: EntryMeta,
    tensors: Mapping[str, TensorSpec],
    tokens: int,
    read: LayerReader | HeldLayers,
    devices: Sequence[torch.device],
    *,
    next_row: bool = False,
    room: int = 0,
) -> list[dict[str, torch.Tensor]] | None:
    """Make an empty cache hold the first ``tokens`` tokens of an entry, bit for bit.

    With ``room``, layers that grow are replaced by layers with room for so many tokens more. What is held in memory
    already is lent to layers that take any tensor, and copied into those that have their own.

    Returns:
        With ``next_row`` the rows of the token behind these: for each layer by role, each [heads, 1, dim],
        and nothing for a layer without rows.

    Raises:
        ValueError: where the entry does not fit this cache; nothing was read then.
        EntryDamagedError, OSError: from ``read``; the cache is empty again then.
    """
    cache = compat.decoder_part(cache)
    jobs = []
    for number, (layer, codec) in enumerate(zip(cache.layers, _targets(cache, len(meta.layers), room), strict=True)):
        try:
            first, last = codec.wanted(layer, meta.layers[number], tokens)
            likes, snapshots = _likes(read, meta.layers[number], number, first, last, tensors)
            if snapshots and tokens != meta.end:
                raise ValueError(f"its state is valid behind token {meta.end} alone")
        except ValueError as error:
            raise ValueError(f"layer {number} ({type(layer).__name__}) does not fit: {error}") from None
        jobs.append(_Job(number, layer, codec, meta.layers[number], first, last, likes, snapshots))
    places = compat.resting_devices(cache, devices)
    memory = _Memory(jobs)
    behind: list[dict[str, torch.Tensor]] | None = [{} for _ in jobs] if next_row else None
    try:
        filled = []
        for job in jobs:
            row, empty = None if behind is None else behind[job.number], memory.empty_on(places[job.number])
            if isinstance(read, HeldLayers):
                filled.append(_lend(job, tokens, read, places[job.number], empty, row))
            else:
                filled.append(_fill(job, tokens, read, places[job.number], empty, row))
        for job, held in zip(jobs, filled, strict=True):
            job.codec.finish(job.layer, held, job.record, tokens)
        compat.rest(cache, devices)
        return behind
    except BaseException:
        compat.empty_cache(cache)
        raise


def cached_row(cache: Any, position: int, seen: int) -> list[Mapping[str, torch.Tensor] | None]:
    """One token's rows of every layer of a cache that has seen ``seen`` tokens, by role, each [batch, heads, dim].

    ``None`` for a layer that does not hold them: its window has moved on, or it was not filled.
    """
    cache = compat.decoder_part(cache)
    compat.wait_for_moves(cache)
    codecs = (codec_for(layer, number) for number, layer in enumerate(cache.layers))
    return [
        codec.row(layer, position, seen) if compat.seen_tokens(layer) == seen else None
        for layer, codec in zip(cache.layers, codecs, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Job:
    """One layer to be filled with rows [first, last) and snapshots.

    By role, there is a tensor like each destination: what is held of it in memory, or a meta tensor.
    """

    number: int
    layer: Any
    codec: LayerCodec
    record: LayerRecord
    first: int
    last: int
    likes: Mapping[str, torch.Tensor]
    snapshots: Mapping[str, torch.Tensor]

    @property
    def stretch(self) -> tuple[int, int]:
        """The rows, counted from the first that is stored."""
        return self.first - self.record.first, self.last - self.record.first


class _Memory:
    """Where new tensors for one cache come from: on the CPU from one arena, where that is worth it."""

    def __init__(self, jobs: Sequence[_Job]) -> None:
        grown = [job for job in jobs if isinstance(job.layer, compat.DYNAMIC_LAYER)]
        self._wanted = [(like, getattr(job.layer, "room", 0)) for job in grown for like in job.likes.values()]

    @cached_property
    def _arena(self) -> Arena | None:
        """One arena for all layers that grow, made when the first of them asks for it."""
        likes = [with_room(like, room) for like, room in self._wanted]
        return Arena(likes) if sum(like.nbytes for like in likes) >= _WORTH_AN_ARENA else None

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device="cpu") if self._arena is None else self._arena.empty(like)

    def empty_on(self, device: torch.device) -> Empty:
        """Makes new tensors on a device."""
        return self._empty if device.type == "cpu" else partial(torch.empty_like, device=device)


def _likes(
    read: LayerReader | HeldLayers,
    record: LayerRecord,
    number: int,
    first: int,
    last: int,
    tensors: Mapping[str, TensorSpec],
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Of rows [first, last) and of snapshots, a tensor like each: what is held of it, or a meta tensor."""
    if not isinstance(read, HeldLayers):
        return row_likes(record, number, last - first, tensors), snapshot_likes(record, number, tensors)
    return read.rows(number, first - record.first, last - record.first), read.snapshots(number)


def _targets(cache: Any, count: int, room: int) -> list[LayerCodec]:
    replicate = getattr(cache, "layer_class_to_replicate", None)
    while replicate is not None and len(cache.layers) < count:
        cache.layers.append(replicate())
    if len(cache.layers) != count:
        raise ValueError(f"the entry has {count} layers, the cache {len(cache.layers)}")
    if room and not compat.is_offloaded(cache):  # room stays where it is, and such a cache moves its rows
        cache.layers[:] = [RoomyLayer(room) if type(one) is compat.DYNAMIC_LAYER else one for one in cache.layers]
    try:
        return [codec_for(layer, number) for number, layer in enumerate(cache.layers)]
    except UnsupportedCacheError as error:
        raise ValueError(str(error)) from None


def _fill(
    job: _Job,
    tokens: int,
    read: LayerReader,
    device: torch.device,
    empty: Empty,
    behind: dict[str, torch.Tensor] | None,
) -> Mapping[str, torch.Tensor]:
    """Read what is wanted of a layer into its destinations, and the row behind it into ``behind``."""
    targets = job.codec.allocate(job.layer, {**job.likes, **job.snapshots}, tokens, device, empty)
    staged = {role: t if t.device.type == "cpu" else torch.empty_like(t, device="cpu") for role, t in targets.items()}
    if job.likes:
        buffers = {role: head_buffers(staged[role]) for role in job.likes}
        if behind is not None:
            shapes = {role: (like.shape[0], 1, like.shape[2]) for role, like in job.likes.items()}
            behind.update({role: torch.empty(shapes[role], dtype=like.dtype) for role, like in job.likes.items()})
        after = None if behind is None else {role: head_buffers(rows) for role, rows in behind.items()}
        read.rows(job.number, *job.stretch, buffers, after)
    if job.snapshots:
        read.snapshots(job.number, {role: whole_buffer(staged[role]) for role in job.snapshots})
    for role, target in targets.items():
        if target is not staged[role]:
            target.copy_(staged[role])
    return targets


def _lend(
    job: _Job,
    tokens: int,
    held: HeldLayers,
    device: torch.device,
    empty: Empty,
    behind: dict[str, torch.Tensor] | None,
) -> Mapping[str, torch.Tensor]:
    """Give a layer what is held in memory: a loan for each new tensor that it takes, a copy for what it has."""
    parts, loans = {**job.likes, **job.snapshots}, dict[int, torch.Tensor]()
    near = {id(part): part for part in parts.values() if part.device == device}

    def take(like: torch.Tensor) -> torch.Tensor:
        if id(like) not in near:
            return empty(like)
        return loans.setdefault(id(like), lent(like))

    if isinstance(job.layer, RoomyLayer) and len(near) == len(parts):
        job.layer.later = empty
    targets = job.codec.allocate(job.layer, parts, tokens, device, take)
    for role, target in targets.items():
        if target is not loans.get(id(parts[role])):
            target.copy_(parts[role])
    if behind is not None:
        last = job.stretch[1]
        behind.update({role: row.cpu() for role, row in held.rows(job.number, last, last + 1).items()})
    return targets
