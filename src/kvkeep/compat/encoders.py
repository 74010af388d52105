"""Models with an encoder before the decoder: what the one is fed, and what the other takes of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

_STEPS = ("_maybe_prepare_encoder_kwargs_for_generation", "_prepare_encoder_decoder_kwargs_for_generation")
ENCODER_STEP = next(name for name in _STEPS if hasattr(GenerationMixin, name))
"""The method of ``GenerationMixin`` that runs the encoder."""

ENCODER_OUTPUTS = "encoder_outputs"
"""The model input that ``ENCODER_STEP`` leaves, and the decoder takes."""


def is_encoder_decoder(model: Any) -> bool:
    """Whether prompts have a part for an encoder beside the decoder's ids."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def encoder_input_name(model: Any, given: Mapping[str, Any]) -> str:
    """The name of the input that the encoder is about, as ``generate`` tells it."""
    encoder = getattr(model, "encoder", None)
    name = str(getattr(encoder, "main_input_name", None) or model.main_input_name)
    return "inputs_embeds" if name == "input_ids" and given.get("inputs_embeds") is not None else name


def encode(model: Any, name: str, values: Mapping[str, torch.Tensor]) -> Any:
    """What the encoder makes of its inputs, run as ``generate`` runs it.

    Args:
        model: the model.
        name: the name of the main one.
        values: all of them, on the model's device.
    """
    config = copy.deepcopy(model.generation_config)
    config.output_attentions = config.output_hidden_states = False
    others = {other: value for other, value in values.items() if other != name}
    step = getattr(type(model), ENCODER_STEP)  # not the instance's, which an attachment may have shadowed
    return step(model, values[name], others, name, config)[ENCODER_OUTPUTS]


def encoder_width(model: Any) -> int:
    """How wide the encoder's output is."""
    config = getattr(model.get_encoder(), "config", model.config)
    return int(config.get_text_config().hidden_size)


def nothing_encoded(model: Any, positions: int) -> Any:
    """What stands in for an encoder's output whose projections the cache holds: NaN, should anybody look at it."""
    hidden = torch.full((1, 1, 1), torch.nan, dtype=model.dtype, device=model.device)
    return BaseModelOutput(last_hidden_state=hidden.expand(1, positions, encoder_width(model)))


def encoded_as(hidden: torch.Tensor) -> Any:
    """Hidden states [1, positions, width] as an encoder returns them."""
    return BaseModelOutput(last_hidden_state=hidden)


def decoder_ids(model: Any, name: str, ids: torch.Tensor | None) -> torch.Tensor | None:
    """The ids that ``generate`` feeds to the decoder for these ids of the caller's, [1, tokens].

    It begins with the model's start token where there are none, or another one first. ``None`` if it has no such token.
    """
    config = model.generation_config
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if not isinstance(start, int):
        return ids
    given = {} if ids is None else {"decoder_input_ids": ids}
    token = torch.tensor(start, device=model.device)
    prepare = type(model)._prepare_decoder_input_ids_for_generation
    found: torch.Tensor = prepare(model, 1, name, given, token, device=model.device)[0]
    return found


def tell_length(generation_config: Any, tokens: int) -> None:
    """Let the first pass feed what is behind a filled cache, of so many decoder ids, where no mask says how many."""
    generation_config._mask_length = tokens


def encoder_can_wait(model: Any, generation_config: Any) -> bool:
    """Whether ``generate`` looks at the encoder's output no sooner than in its first pass, and returns none of it."""
    own = getattr(type(model), ENCODER_STEP) is not getattr(GenerationMixin, ENCODER_STEP)  # may leave more than it
    expanded = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1) > 1
    returned = generation_config.output_attentions or generation_config.output_hidden_states
    kind = str(generation_config.cache_implementation)
    return not (own or expanded or returned or "static" in kind or "hybrid" in kind)
