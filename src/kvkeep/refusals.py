"""What ``kv.generate`` refuses before anything is computed: wrong calls, and calls that no stored prefix can serve.

``model.generate`` of a model that is attached refuses nothing: there what is wrong with a call is transformers' to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvkeep import compat
from kvkeep.errors import InvalidPromptError, UnsupportedRequestError
from kvkeep.prefill import check_ids

_PROMPTS = ("inputs", "input_ids", "decoder_input_ids")
_INTEGERS = (torch.int64, torch.int32)


def refuse(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what no stored prefix can serve, where the caller explicitly asks for one.

    Raises:
        UnsupportedRequestError: saying what to do instead.
    """
    config = arguments.get("generation_config") or getattr(model, "generation_config", None)
    if arguments.get("use_cache", getattr(config, "use_cache", True)) is False:
        raise UnsupportedRequestError("use_cache=False throws stored KV away: leave it out, or call model.generate")
    if model.training:
        raise UnsupportedRequestError("the model is in training mode (dropout changes KV): call model.eval() first")
    if arguments.get("inputs_embeds") is not None and not compat.is_encoder_decoder(model):
        raise UnsupportedRequestError("inputs_embeds have no token ids to look up: pass input_ids instead")
    for name in ("cache", "past_key_values"):
        if arguments.get(name) is not None:
            raise UnsupportedRequestError(
                f"{name}= and a store exclude each other: keep it with kv.save({name}, input_ids), then leave it out"
            )


def refuse_prompt(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse ids that ``model.generate`` could not feed, in place of the error that it would run into on its way.

    Raises:
        InvalidPromptError: saying what is wrong with them.
    """
    paired = compat.is_encoder_decoder(model)
    for name in _PROMPTS:
        ids = arguments.get(name)
        if ids is None or (name == "inputs" and paired and compat.encoder_input_name(model, {}) != "input_ids"):
            continue
        _check_form(name, ids)
        if not paired:
            _check_mask(ids, arguments.get("attention_mask"))
            check_ids(model, ids)


def _check_form(name: str, ids: Any) -> None:
    if not isinstance(ids, torch.Tensor):
        raise InvalidPromptError(
            f"{name}= takes a tensor of [rows, tokens], as tokenizer(..., return_tensors='pt') returns it, not "
            f"{type(ids).__name__}; a list of ids goes in as the first argument"
        )
    if ids.dim() != 2 or not ids.numel():
        wrong = "empty" if ids.dim() == 2 else f"{ids.dim()}-dimensional"
        raise InvalidPromptError(
            f"the prompt's ids are {wrong}, of shape {list(ids.shape)}: at least one token of [rows, tokens] is needed"
        )
    if ids.is_meta or ids.layout != torch.strided:
        raise InvalidPromptError("the prompt's ids must be a dense tensor with values: to_dense() makes one")
    if ids.dtype not in _INTEGERS:
        raise InvalidPromptError(
            f"the prompt's token ids must be int64 or int32, not {ids.dtype}: ids.long() makes them"
        )


def _check_mask(ids: torch.Tensor, mask: Any) -> None:
    """A mask for fewer tokens than there are; what a longer one means is for ``generate`` to say."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] < ids.shape[1]:
        raise InvalidPromptError(
            f"the attention mask is for {mask.shape[1]} tokens a row, and the prompt has {ids.shape[1]}: it must cover "
            "all of them, those that are stored, too"
        )
