"""The steps of ``generate`` that a hand-over needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from transformers import GenerationMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from kvkeep.compat.versions import GENERATE_CACHE_ARGUMENT

_PREFILLS = hasattr(GenerationMixin, "_prefill")
SEAM = (
    "_expand_inputs_for_generation",
    "_prepare_cache_for_generation",
    "_prefill" if _PREFILLS else "_update_model_kwargs_for_generation",
)
"""The methods of ``GenerationMixin`` that ``attachment`` wraps: the inputs, the cache, and the first forward pass."""

BATCHING = ("generate_batch", "init_continuous_batching")
"""The methods that run many requests in batches that change all the time: their KV lies in pages of their own."""

CHUNKS = _PREFILLS
"""Whether ``prefill_chunk_size`` goes on from a filled cache, and does not feed what it holds again."""


DRAFTS_WHOLE = _PREFILLS
"""Whether the first pass of assisted decoding is fed the whole prompt, whatever the cache holds."""


def has_seam(model: torch.nn.Module) -> bool:
    """Whether ``generate`` of this model goes through the two methods that the hand-over wraps, as it knows them."""
    return _class_has_seam(cast(Any, type(model)))


@functools.lru_cache(maxsize=64)
def _class_has_seam(model_class: Any) -> bool:
    if not all(hasattr(model_class, name) for name in SEAM):
        return False
    wanted = ["generation_config", "model_kwargs", "generation_mode"]
    return list(inspect.signature(getattr(model_class, SEAM[1])).parameters)[1:4] == wanted


def goes_in_step(model: torch.nn.Module) -> bool:
    """Whether ``generate`` by itself goes on until the last of all ranks has finished, as each waits for the others."""
    zero3: Callable[[], bool] = is_deepspeed_zero3_enabled
    return zero3() or bool(is_fsdp_managed_module(model))


def run_guarded(
    model: Any,
    original: Callable[..., Any],
    ids: Any,
    agrees: Callable[[Any], bool],
    take_back: Callable[[dict[str, Any]], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the last method of ``SEAM`` with the guard in it.

    Args:
        model: the model.
        original: the method.
        ids: the prompt's ids as they are fed, [lines, slots].
        agrees: called with the cache once the first forward pass is over; when it says no, the cache is empty and the
            pass runs again over the whole prompt.
        take_back: called before that with the model inputs, to give them back what the cache had made needless.
        args: the arguments of the method by position.
        kwargs: those by name.
    """
    if _PREFILLS:
        outputs = original(*args, **kwargs)
        if agrees(outputs[GENERATE_CACHE_ARGUMENT]):
            return outputs
        del outputs
        take_back(kwargs["model_kwargs"] if "model_kwargs" in kwargs else args[2])
        return original(*args, **kwargs)
    # 4.57: the method is called with what the pass returned, and before anything is sampled from it.
    outputs = kwargs["outputs"] if "outputs" in kwargs else args[0]
    model_kwargs = kwargs["model_kwargs"] if "model_kwargs" in kwargs else args[1]
    if not agrees(model_kwargs[GENERATE_CACHE_ARGUMENT]):
        take_back(model_kwargs)
        model_kwargs["cache_position"] = torch.arange(ids.shape[1], device=ids.device)
        wanted = {f"output_{name}": True for name in ("attentions", "hidden_states") if outputs.get(name) is not None}
        inputs = model.prepare_inputs_for_generation(ids, **model_kwargs) | wanted
        for name, value in model(**inputs, return_dict=True).items():
            outputs[name] = value
    return original(*args, **kwargs)


def cuts_ids(generation_config: Any, mask: torch.Tensor | None, slots: int) -> bool:
    """Whether ``generate`` leaves out of a prompt of so many slots what its cache holds.

    5.24 does so for ids that are as long as the mask; of a mask of ones it keeps the length alone.
    """
    if not _PREFILLS:
        return True
    length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    return bool(length == slots)


def names_cache_kind(generation_config: Any) -> bool:
    """Whether a generation config asks for a cache kind, beside which ``generate`` refuses a cache object.

    ``cache_implementation=None`` as an argument of the call overrules it; a copy of the config without it does not:
    what it leaves open is filled in again from the model's own.
    """
    return getattr(generation_config, "cache_implementation", None) is not None


def generation_inputs(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``generate``'s model inputs decides KV: all but masks, positions, the cache and bookkeeping."""
    ignored = {
        "attention_mask",
        "position_ids",
        "cache",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
    given = {name: value for name, value in model_kwargs.items() if name not in ignored and value is not None}
    if given.get("mm_encoder_outputs") == {}:  # 5.24 sets it for prompts without pictures, too
        del given["mm_encoder_outputs"]
    return given
