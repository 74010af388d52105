"""Which calls of ``generate`` a stored prefix may serve: what is not proven to be right steps aside, with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from kvkeep import compat
from kvkeep.inputs import unknown_inputs
from kvkeep.placement import shard_of
from kvkeep.ranks import Ranks

_ASSISTED = "assisted_generation"
_PROVEN_MODES = ("greedy_search", "sample", "beam_search", "beam_sample", _ASSISTED)
_UNPROVEN_ARGUMENTS = ("custom_generate", "assistant_tokenizer")
# An assistant's own calls go on from a cache of its own; the others let the drafts be made of the model's states.
_UNPROVEN_SETTINGS = (
    *("token_healing", "is_assistant", "assistant_early_exit", "use_mtp", "speculation_type"),
    *(() if compat.CHUNKS else ("prefill_chunk_size",)),
)
_STATES_AS_RESULTS = ("output_attentions", "output_hidden_states")


class Asked(Protocol):
    """What is known of a running call: see :class:`~kvkeep.generation.Call`."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Those of ``generate`` by name."""

    @property
    def ids(self) -> torch.Tensor | None:
        """The prompt's ids, [rows, tokens]."""

    @property
    def slots(self) -> int:
        """Tokens of the prompt with its padding."""

    @property
    def expansion(self) -> int:
        """How many sequences come of each row."""

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that run the model together with this one."""

    @property
    def heard(self) -> Mapping[str, Any] | None:
        """What an encoder is fed."""


def paired_obstacle(model: Any, call: Asked, generation_config: Any, mode: Any) -> str | None:
    """Why this call of an encoder-decoder model must run without the store, or ``None``."""
    if model.training:
        return "training: the model is in training mode"
    if getattr(generation_config, "use_cache", True) is False:
        return "use_cache: the call runs without a cache"
    if call.ranks is not None:
        return "ranks: an encoder is not put off for ranks that run a model together"
    unproven = _unproven(model, call, generation_config, str(getattr(mode, "value", mode)))
    if unproven is None and getattr(generation_config, "prefill_chunk_size", None):
        unproven = "prefill_chunk_size of an encoder-decoder model"
    if unproven is not None:
        return f"mode: {unproven} is not served yet"
    if call.ids is None or call.ids.dim() != 2 or call.ids.dtype not in (torch.int64, torch.int32):
        return "inputs: the prompt is not token ids"
    if call.ids.shape[0] * call.expansion > 1:
        return "batch: prompts of an encoder-decoder model are served one sequence at a time"
    if call.heard is None:
        return "inputs: encoder_outputs came without what they were computed from: give the encoder's input instead"
    return None


def obstacle(model: Any, call: Asked, generation_config: Any, model_kwargs: Mapping[str, Any], mode: Any) -> str | None:
    """Why this call must run without the store, or ``None``: whatever is not proven to be right steps aside."""
    if model.training:
        return "training: the model is in training mode"
    if getattr(generation_config, "use_cache", True) is False:
        return "use_cache: the call runs without a cache"
    unproven = _unproven(model, call, generation_config, str(getattr(mode, "value", mode)))
    if unproven is not None:
        return f"mode: {unproven} is not served yet"
    if call.ranks is not None and compat.media_tokens(model):
        return "ranks: a model that sees is not served to ranks that run it together"
    if unknown := unknown_inputs(model, compat.generation_inputs(model_kwargs)):
        return f"inputs: {', '.join(unknown)} are not served"
    if call.ids is None or call.ids.dim() != 2 or call.ids.dtype not in (torch.int64, torch.int32):
        return "inputs: the prompt is not token ids"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or mask.shape[-1] != call.ids.shape[1]):
        return "mask: the attention mask has another shape than the prompt"
    return _odd_positions(model, call.arguments, model_kwargs, call.slots)


def _unproven(model: Any, call: Asked, generation_config: Any, mode: str) -> str | None:
    """The name of what this call asks for that is not proven to be right with a stored prefix."""
    if call.ranks is None and shard_of(model) is not None:
        return "a group of ranks that cannot be told"
    if call.ranks is not None and (mode == _ASSISTED or getattr(generation_config, "prefill_chunk_size", None)):
        return "a number of passes that ranks that run a model together may count otherwise"
    if mode not in _PROVEN_MODES or (mode == _ASSISTED and not _drafts_alone(model, call, generation_config)):
        return mode
    for argument in _UNPROVEN_ARGUMENTS:
        if call.arguments.get(argument) is not None:
            return argument
    return next((setting for setting in _UNPROVEN_SETTINGS if getattr(generation_config, setting, None)), None)


def is_assisted(mode: Any) -> bool:
    """Whether tokens are drafted and then checked, several in one pass."""
    return str(getattr(mode, "value", mode)) == _ASSISTED


def _drafts_alone(model: Any, call: Asked, generation_config: Any) -> bool:
    """Whether drafts are made of tokens alone, for a model of text alone, and nothing is returned of each token."""
    assistant = type(call.arguments.get("assistant_model")).__name__
    return not (
        "Assistant" in assistant  # reads the model's states
        or compat.is_encoder_decoder(model)
        or compat.media_tokens(model)
        or any(getattr(generation_config, setting, None) for setting in _STATES_AS_RESULTS)
    )


def _odd_positions(model: Any, given: Mapping[str, Any], model_kwargs: Mapping[str, Any], slots: int) -> str | None:
    """Why tokens are not placed as they are counted in each line, or by their pictures."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if compat.media_tokens(model) and given.get("position_ids") is not None:
        return "positions: position_ids were given to a model that places tokens by their pictures"
    own = compat.media_tokens(model) and positions is not None and positions.dim() == 3
    if positions is None or own:  # a model's own for media follow from its inputs
        return None
    if positions.dim() != 2 or positions.shape[-1] != slots or (mask is not None and mask.shape != positions.shape):
        return "positions: position_ids have another shape than the prompt or its attention mask"
    seen = torch.ones_like(positions) if mask is None else mask.to(positions.device)
    counted = seen.long().cumsum(-1) - 1
    if not torch.equal(torch.where(seen != 0, positions, 0), torch.where(seen != 0, counted, 0)):
        return "positions: position_ids are not 0, 1, 2, ..."
    return None
