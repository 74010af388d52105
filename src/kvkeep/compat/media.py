"""Models that see and hear: the ids that stand for media, and what the model is fed for a stretch of such a prompt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationMixin

from kvkeep.compat.versions import GENERATE_CACHE_ARGUMENT

MEDIA_INPUTS: dict[str, tuple[str, ...]] = {
    "image": ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask"),
    "video": ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    "audio": ("input_features", "input_features_mask", "feature_attention_mask"),
}
"""For each kind of media the model inputs that hold it."""

MEDIA_CONTENT = frozenset({"pixel_values", "pixel_values_videos", "input_features"})
"""Those of them that are the media themselves; the others say how they are to be read."""

MEDIA_TYPES = "mm_token_type_ids"
"""The model input that says of each token which kind of media it stands for; 4.57 goes by the token's id instead."""

TOKEN_TYPES = ("token_type_ids", MEDIA_TYPES)
"""Model inputs that say of each token what kind it is."""

# Newer versions place every token of the prompt before there is a cache, and cut positions where the cache ends. 4.57
# asks the model to place what it is fed, and takes media away from whatever does not begin at token 0.
_PLACES = hasattr(GenerationMixin, "_prepare_position_ids_for_generation")
_ENCODES = "_maybe_prepare_encoder_kwargs_for_generation"

ENCODE_STEP: str | None = _ENCODES if hasattr(GenerationMixin, _ENCODES) else None
"""The method of ``GenerationMixin`` that runs the vision tower ahead of the prefill, where there is one."""

INPUTS_STEP = "prepare_inputs_for_generation"
"""The method of ``GenerationMixin`` that errs, with media, in what to feed behind a filled cache."""

CUTS_INPUTS = _PLACES
"""Whether ``generate`` itself feeds what is behind a filled cache, if the media before are taken from its inputs."""

ENCODED = "mm_encoder_outputs"
"""The model input that ``ENCODE_STEP`` leaves."""


def media_tokens(model: Any) -> dict[str, frozenset[int]]:
    """For each kind of media the ids that stand for it in this model's prompts; empty for a model of text alone."""
    found: dict[str, frozenset[int]] = {}
    for kind in MEDIA_INPUTS:
        ids = (getattr(model.config, f"{kind}_token_{end}", None) for end in ("id", "index"))
        new = frozenset(one for one in ids if isinstance(one, int)).difference(*found.values())
        if new:
            found[kind] = new
    return found


def takes_media_types(model: Any) -> bool:
    """Whether a model, or one inside of it, places or masks tokens by ``MEDIA_TYPES``."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    return any(_takes_media_types(kind) for kind in kinds)


@functools.lru_cache(maxsize=1024)
def _takes_media_types(kind: Any) -> bool:
    return MEDIA_TYPES in inspect.signature(kind.forward).parameters


def _owner(model: Any) -> Any:
    """The module that counts positions in several axes and keeps what they lag behind the tokens, if there is one."""
    return next((module for module in model.modules() if hasattr(type(module), "get_rope_index")), None)


def _placed(model: Any, ids: torch.Tensor, media: Mapping[str, Any]) -> torch.Tensor:
    inputs = {**media, "attention_mask": torch.ones_like(ids)}  # some models look at it
    positions: torch.Tensor = model._prepare_position_ids_for_generation(ids, inputs)
    return positions


@contextmanager
def positions_kept(model: Any) -> Iterator[None]:
    """Leave the model's own count of positions as it was: it may be in the middle of another prompt."""
    owner = _owner(model)
    before = getattr(owner, "rope_deltas", None)
    try:
        yield
    finally:
        if owner is not None:
            owner.rope_deltas = before


def place(model: Any, ids: torch.Tensor, media: Mapping[str, Any], *, after: int | None = None) -> torch.Tensor | None:
    """The positions of all these tokens, and the model left as it is after them, or after the first so many.

    A model that counts a picture as fewer positions than tokens keeps the difference for the tokens that follow.

    Args:
        model: a model with media tokens.
        ids: [1, tokens].
        media: the media inputs and token types of exactly these tokens.
        after: a number of tokens that does not end within a picture.

    Returns:
        [axes, 1, tokens], or ``None`` where tokens are simply counted.
    """
    owner = _owner(model)
    if _PLACES:
        positions = _placed(model, ids, media)
    elif owner is not None:
        known = inspect.signature(owner.get_rope_index).parameters
        given = {name: value for name, value in media.items() if name in known}
        positions, owner.rope_deltas = owner.get_rope_index(ids, attention_mask=torch.ones_like(ids), **given)
        positions = torch.cat([torch.arange(ids.shape[1], device=ids.device).expand(1, 1, -1), positions])
    else:
        return None
    if positions.dim() != 3:
        return None
    if after is not None and owner is not None:
        owner.rope_deltas = positions[1:, :, :after].amax().view(1, 1) + 1 - after
    return positions


def continued_inputs(
    model: Any,
    ids: torch.Tensor,
    *,
    before: Mapping[str, Any],
    media: Mapping[str, Any],
    types: Mapping[str, torch.Tensor],
) -> dict[str, Any] | None:
    """The arguments that ``generate`` needs beside a whole prompt and a filled cache, or ``None`` if it errs with any.

    Args:
        model: a model with media tokens.
        ids: [1, tokens], all of them.
        before: the media inputs of all the tokens.
        media: those of the tokens that are not in the cache.
        types: the token types of all the tokens, each [1, tokens].
    """
    if not _PLACES:  # drops media behind a given cache, and counts positions by what the latest call left on the model
        return None if media or _owner(model) is not None else {}
    positions = place(model, ids, {**before, **types})
    return {**media, **types, **({} if positions is None else {"position_ids": positions})}


def without_early_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """The model inputs of a first pass without a mask that was made of them: the model makes its own.

    For caches of a fixed size ``generate`` makes it, of the token types of those tokens alone that are fed: behind a
    filled cache they are then taken for others.
    """
    mask = inputs.get("attention_mask")
    made = isinstance(mask, Mapping) or (isinstance(mask, torch.Tensor) and mask.dim() == 4)
    return {**inputs, "attention_mask": None} if made else inputs


def stretch_inputs(
    model: Any,
    cache: Any,
    ids: torch.Tensor,
    begin: int,
    end: int,
    *,
    before: Mapping[str, Any],
    media: Mapping[str, Any],
    types: Mapping[str, torch.Tensor],
    prepare: Callable[..., dict[str, Any]] | None = None,
    others: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the forward pass takes for tokens [begin, end) of a prompt whose tokens before them are in the cache.

    Args:
        model: a model with media tokens.
        cache: holds ``begin`` tokens.
        ids: [1, tokens], all of them.
        begin: the first token to feed.
        end: the token behind the last one to feed.
        before: the media inputs of all the tokens.
        media: those of the tokens to feed.
        types: the token types of all the tokens, each [1, tokens].
        prepare: the model's own ``prepare_inputs_for_generation``, where something lies in front of it.
        others: further arguments for it.
    """
    prepare = prepare or model.prepare_inputs_for_generation
    others = {"use_cache": True, **(others or {})}
    if _PLACES:
        positions = _placed(model, ids, {**before, **types})[..., :end]
        steps = {"next_sequence_length": end - begin, "is_first_iteration": True, "position_ids": positions}
        short = {name: values[:, :end] for name, values in types.items()}
        return prepare(ids[:, :end], **{GENERATE_CACHE_ARGUMENT: cache}, **steps, **short, **media, **others)
    counted = torch.arange(ids.shape[1], device=ids.device)
    mask = torch.ones_like(ids)
    inputs = prepare(ids, cache_position=counted, attention_mask=mask, **types, **before, **others)
    if inputs.get("logits_to_keep", 0) is None:  # which some models take for one more axis
        del inputs["logits_to_keep"]
    # That was as for a prompt without a cache: nothing is taken away or counted from the wrong place.
    inputs |= {name: media.get(name) for name in before} | {name: values[:, :end] for name, values in types.items()}
    inputs |= {"input_ids": ids[:, begin:end], "cache_position": counted[begin:end], "attention_mask": mask[:, :end]}
    if inputs.get("position_ids") is None and (counted_apart := place(model, ids, {**before, **types})) is not None:
        inputs["position_ids"] = counted_apart[1:]  # else the forward pass would count on from whatever came before
    if inputs.get("position_ids") is not None:
        inputs["position_ids"] = inputs["position_ids"][..., begin:end]
    return inputs | {GENERATE_CACHE_ARGUMENT: cache}
