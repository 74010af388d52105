"""The part of a configuration that can change a KV cache.

A field stays unless it is known to change nothing: a field too many costs a miss, a field too few a wrong hit.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import rope
from kvkeep.fingerprint.holdings import unwrap

_PROVENANCE = {
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"),
    *("custom_pipelines", "tokenizer_class", "processor_class", "finetuning_task", "task_specific_params", "prefix"),
}
_DTYPES = {"dtype", "torch_dtype", "use_bfloat16"}  # the tensors themselves say it
_TOKEN_IDS = {  # what ends or pads a text; ids that stand for pictures and the like stay
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "eod_token_id"),
}
_GENERATION = {
    *(
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
    ),
    *("temperature", "top_k", "top_p", "typical_p", "diversity_penalty", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values", "return_dict_in_generate"),
}
_OUTPUTS = {
    *("return_dict", "output_attentions", "output_hidden_states", "output_scores", "output_router_logits"),
    *(
        "num_logits_to_keep",
        "reference_compile",
        "scale_decoder_outputs",
        "use_cache",
        "verbose",
        "torchscript",
        "tf_legacy_loss",
        "num_labels",
        "id2label",
        "label2id",
        "problem_type",
    ),
}
_TRAINING = {  # besides every dropout probability: a stored cache comes from evaluation mode
    *("initializer_range", "initializer_factor", "gradient_checkpointing", "layerdrop", "router_aux_loss_coef"),
}
_ATTENTION = {
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
}
_LIMITS = {"max_position_embeddings"}  # only allocates: tables of positions and live frequencies are hashed themselves
_SCANS = {"use_associative_scan", "use_mambapy"}  # by which steps the same scan is computed
_FURTHER_AHEAD = {"num_nextn_predict_layers"}  # layers that some versions leave out; where they are, their weights are
DROPPED = frozenset().union(
    _LIMITS, _SCANS, _FURTHER_AHEAD, _PROVENANCE, _DTYPES, _TOKEN_IDS, _GENERATION, _OUTPUTS, _TRAINING, _ATTENTION
)
"""Names of the fields that cannot change a KV cache."""

_INERT = {  # shown for every class by some versions only, at values that mean nothing
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "position_embedding_type": "absolute",
    "tie_encoder_decoder": False,
}

_BUILT_IN = ("swiglu_alpha", "swiglu_limit")
_SEEN_OTHERWISE = frozenset({"attention_bias", "head_dim", "is_decoder", "mlp_bias", *_BUILT_IN})
"""Fields that mean the same whether or not a configuration's class knows them: the weights' names and shapes say so,
or live modules do, or every type that obeys them knows them."""

_RENAMED_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers by names that some versions have for them."""

_NO_LIMIT_OF_STEPS = {"bamba", "falcon_h1", "granitemoehybrid"}
"""Types whose ``time_step_limit`` some versions do not know, and then is that from 0 without an end."""

_ROTATE_BY_BUFFERS = {"granitemoehybrid"}
"""Types that obey their rope settings with live frequencies alone, and may have none."""

_MADE_INTO_LAYER_TYPES = ("_sliding_window_pattern", "global_attn_every_n_layers")

_COMPUTED_OTHERWISE = frozenset({"deepseek_v2", "deepseek_v3", "doge", "longcat_flash", "mamba2"})
"""Types whose KV of the same weights and settings is another since configurations are dataclasses.

The deepseek kinds keep what keys and values are made of instead of them; doge and mamba2 compute otherwise.
"""

_ROUNDED_STATE = frozenset(
    {"bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "zamba2"},
)
"""Types whose recurrent state has the model's number format where they bring their own cache, and 32 bits since."""

_UNSAID_INSIDE = frozenset({"is_encoder_decoder", "model_type"})
"""What versions say otherwise of the configuration of a vision tower; its modules are what they are."""

_INTERCHANGEABLE_ATTENTION = frozenset(
    {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"}
)


def text_config(model: nn.Module) -> Any:
    """The configuration that the model's decoder obeys.

    Raises:
        UnsupportedRequestError: if the model has none.
    """
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "get_text_config", None)):
        raise UnsupportedRequestError(
            f"{type(model).__qualname__} has no transformers configuration in its attribute 'config', and without one "
            "nothing says how its tensors are used; give bind() the transformers model itself"
        )
    text = config.get_text_config(decoder=True)
    # Of a flat one for encoder and decoder versions make a copy with other names, each in its own way.
    return text if any(value is text for value in vars(config).values()) else config


def config_fields(model: nn.Module, *, keep_rope: bool = False) -> dict[str, Any]:
    """The fields of a model's configuration that can change KV, as a tree of plain values: also those of how it sees.

    Args:
        model: a transformers model.
        keep_rope: keep the rope settings as found; for models without live frequencies.
    """
    config = text_config(unwrap(model))
    whole: Any = unwrap(model).config
    fields = _kept(config.to_dict()) if config is whole else _inside(config.to_dict())
    keep_rope = keep_rope and fields.get("model_type") not in _ROTATE_BY_BUFFERS
    if not keep_rope:
        fields = {name: value for name, value in fields.items() if name not in rope.SETTINGS}
    _say_once(fields, rotates=not keep_rope)
    fields |= _built_in(model, fields)
    rounded = fields.get("model_type") in _ROUNDED_STATE and unwrap(model).dtype != torch.float32
    if rounded or fields.get("model_type") in _COMPUTED_OTHERWISE:
        fields["computed by"] = "newer" if hasattr(config, "__dataclass_fields__") else "older"
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    if "head_dim" not in fields and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        fields["head_dim"] = width // heads  # some versions write the number, some leave it out
    attention = attention_name(config)
    if attention is not None:
        fields["attn_implementation"] = attention
    unsaid = _UNSAID_INSIDE if keep_rope else _UNSAID_INSIDE | rope.SETTINGS
    return fields | _outer_fields(whole, config, unsaid)


def _outer_fields(whole: Any, text: Any, dropped: Container[str]) -> dict[str, Any]:
    """What decides how a model sees and hears, of a configuration that has its decoder's as one of several inside."""
    inside = {name: value for name, value in vars(whole).items() if hasattr(value, "get_text_config")}
    if all(value is not text for value in inside.values()):
        return {}
    fields: dict[str, Any] = {}
    for name, value in _inside(whole.to_dict()).items():
        if name not in inside:
            fields[f"model.{name}"] = value
        elif inside[name] is not text:
            fields |= {f"{name}.{key}": one for key, one in value.items() if key not in dropped}
            fields[f"{name}.attn_implementation"] = attention_name(inside[name])
    return {name: value for name, value in fields.items() if value is not None}


def _say_once(fields: dict[str, Any], *, rotates: bool) -> None:
    """Give fields the names and values that all versions can say, and leave out what others say already."""
    if rotates and fields.get("position_embedding_type") == "rope":
        del fields["position_embedding_type"]
    if "num_experts" in fields and "num_local_experts" not in fields:  # renamed
        fields["num_local_experts"] = fields.pop("num_experts")
    if "encoder_layers" in fields and fields.get("num_hidden_layers") == fields["encoder_layers"]:
        del fields["num_hidden_layers"]  # another name for it, which some versions list
    if "no_rope_layers" in fields:  # made of the interval
        fields.pop("no_rope_layer_interval", None)
    if fields.get("model_type") in _NO_LIMIT_OF_STEPS and tuple(fields.get("time_step_limit", ())) == (0.0, math.inf):
        del fields["time_step_limit"]
    for name in ("layer_types", "layers_block_type"):
        if isinstance(fields.get(name), list):
            fields[name] = [_RENAMED_KINDS.get(kind, kind) for kind in fields[name]]
    kinds = fields.get("layer_types")
    for name in _MADE_INTO_LAYER_TYPES if kinds else ():
        fields.pop(name, None)
    if isinstance(kinds, list) and set(kinds) == {"full_attention"} and not fields.get("sliding_window"):
        # Some versions do not list the layers of a type whose layers are all the same, and a window of 0 is none.
        del fields["layer_types"]
        fields.pop("sliding_window", None)


def _built_in(model: nn.Module, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that are settings in one version and part of the program in another, as the live modules have them."""
    if fields.get("model_type") != "gpt_oss":
        return {}
    experts = sorted({(m.alpha, m.limit) for m in model.modules() if hasattr(m, "alpha") and hasattr(m, "limit")})
    return dict(zip(_BUILT_IN, zip(*experts, strict=True), strict=True)) if experts else {}


def undeclared(config: Any) -> frozenset[str]:
    """The fields of a configuration that its class does not know.

    A newer version may obey one of these, so the same value does not mean the same there.
    """
    kind: Any = type(config)
    known = _declared(kind)
    return frozenset(name for name in vars(config) if name not in known and name not in _SEEN_OTHERWISE)


@functools.lru_cache(maxsize=256)
def _declared(kind: Any) -> frozenset[str]:
    names = {*getattr(kind, "attribute_map", {}), *getattr(kind, "__dataclass_fields__", {})}
    for one in kind.__mro__[:-1]:
        if "__init__" in vars(one):
            names |= set(inspect.signature(one.__init__).parameters)
    try:
        default = kind()
    except Exception:  # noqa: BLE001 - some cannot be made of nothing
        return frozenset(names)
    return frozenset(names | set(vars(default)) | set(default.to_dict()))


def live_fields(config: Any) -> dict[str, Any]:
    """The same fields as they stand in the configuration object now; cheap, for comparing with an earlier state."""
    fields = {
        name: live_fields(value) if hasattr(value, "get_text_config") else value
        for name, value in vars(config).items()
        if name[0] != "_" and _matters(name, value)
    }
    return fields | {"attn_implementation": attention_name(config)}


def attention_name(config: Any) -> str | None:
    """The attention implementation, if it is one that transformers does not ship as an equal of the others."""
    name = getattr(config, "_attn_implementation", None)
    if name is None:
        return None
    return None if name in _INTERCHANGEABLE_ATTENTION and not _differs(config, name) else str(name)


def _differs(config: Any, name: str) -> bool:
    """Whether an implementation leaves out what others do for this model."""
    return name == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None


def _kept(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what cannot matter, here and in the configurations inside."""
    return {
        name: _inside(value) if isinstance(value, Mapping) and "model_type" in value else value
        for name, value in fields.items()
        if _matters(name, value)
    }


def _inside(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same of one that has no head of its own, which some versions say is tied."""
    return {name: value for name, value in _kept(fields).items() if name != "tie_word_embeddings"}


def _matters(name: str, value: Any) -> bool:
    if value is None or name in DROPPED or "dropout" in name or name.endswith("_pdrop"):
        return False
    return not (name in _INERT and value == _INERT[name])
