"""A tiny model with random weights of every causal and every seq2seq type that transformers has.

The type's own default configuration is shrunk by the names of its fields; ``zoo_overrides`` says what that does not
get right. Per-layer lists are cut so that every kind of layer that the default has is still there.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from zoo_overrides import CLASSES, OLD_OVERRIDES, OVERRIDES, PARTS

VOCABULARY = 320
PLAIN_IDS = range(3, 300)
"""Ids that mean nothing special to any of the models: what is not a plain token lies below or above."""
WINDOW = 8
MAX_LAYERS = 6
INITIALIZER_RANGE = 0.3

CAUSAL: Mapping[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SEQ2SEQ: Mapping[str, str] = dict(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
FAMILIES: Mapping[str, Mapping[str, str]] = {"causal": CAUSAL, "seq2seq": SEQ2SEQ}

_SIZES: dict[str, Any] = {
    # width
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim_model": 64, "emb_dim": 64, "embedding_size": 64,
    "word_embed_proj_dim": 64, "attention_hidden_size": 64, "lru_width": 64, "input_embedding_size": 64,
    "output_embedding_size": 64, "embedding_dim": 64, "dim_model_base": 64, "backbone_hidden_size": 64,
    "hidden_size_per_layer_input": 16, "ple_embed_dim": 16, "projection_dim": 32, "embed_dim": 64, "d_embed": 64,
    "out_hidden_size": 64, "output_dim": 64, "projector_hidden_size": 64, "router_hidden_size": 16,
    "hidden_size_global": 64,
    "pronunciation_embed_dim": 16,
    "shape_embed_dim": 16, "adapter_rank": 8,
    "pronunciation_vocab_size": 64, "shape_vocab_size": 64,
    # feed forward
    "intermediate_size": 96, "ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "n_inner": 96, "d_ff": 96,
    "dim_ff": 96, "dff": 96, "d_inner": 96, "ffn_hidden_size": 96, "intermediate_size_mlp": 96, "feed_forward_size": 96,
    "dense_intermediate_size": 96, "prefix_dense_intermediate_size": 96, "shared_intermediate_size": 48,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "expert_ffn_dim": 32,
    "expert_intermediate_size": 32,
    # encoders of sound
    "hidden_dim": 64, "input_dim": 16, "max_pos_emb": 32, "context_size": 16, "n_filters": 4,
    # "moe_latent_size": 32, "mlp_dim": 96, "mlp_hidden_size": 96,
    # depth
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "depth": 2,
    "speech_encoder_layers": 2, "t2u_encoder_layers": 2, "t2u_decoder_layers": 2, "num_global_layers": 2,
    "conf_num_hidden_layers": 2, "num_blocks": 2,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "attention_heads": 4, "swa_num_attention_heads": 4, "head_dim": 16, "global_head_dim": 16, "swa_head_dim": 16,
    "d_kv": 16, "kv_channels": 16, "d_head": 16, "attention_head_size": 16, "dim_head": 16, "swa_v_head_dim": 16,
    "attention_head_dim": 16,
    # latent attention and its index
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 24, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 12,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "zero_expert_num": 2,
    "topk_group": 1, "encoder_moe_layers": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    # states
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_headdim": 16, "mamba_head_dim": 16,
    "mamba_num_heads": 8, "mamba_chunk_size": 16, "mamba_dt_rank": 4, "mamba_d_ssm": 128, "n_mamba_heads": 2,
    "state_size": 8, "ssm_state_size": 8, "time_step_rank": 4, "chunk_size": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "linear_num_heads": 4, "block_multiple_of": 16,
    # positions and windows
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512, "max_target_positions": 512,
    "max_source_positions": 64, "model_max_length": 512, "context_length": 512, "seq_length": 512,
    "max_encoder_position_embeddings": 512, "max_decoder_position_embeddings": 512, "max_positions": 512,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "attention_window_size": WINDOW, "window_size": WINDOW,
    "attention_chunk_size": 16, "local_attention": 16, "keep_window_size": 16,
    # vocabularies
    "vocab_size": VOCABULARY, "n_vocab": VOCABULARY, "unpadded_vocab_size": VOCABULARY,
    "output_vocab_size": VOCABULARY, "decoder_vocab_size": VOCABULARY, "src_vocab_size": VOCABULARY,
    "tgt_vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    # pictures and sound
    "image_size": 32, "patch_size": 16, "num_mel_bins": 16,
    # how wide the weights are
    "initializer_range": INITIALIZER_RANGE, "init_std": INITIALIZER_RANGE, "embed_init_std": INITIALIZER_RANGE,
    "initializer_factor": 1.0, "embedding_initializer_range": INITIALIZER_RANGE,
}  # fmt: skip
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads")
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


class CannotBuildError(Exception):
    """No tiny model of this type: the message is what its construction said."""


def build(family: str, model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """A fresh model of the type, in float32 on the CPU in evaluation mode; the same weights for the same seed.

    Raises:
        CannotBuildError: with the type and first line of whatever was raised.
    """
    try:
        config = tiny_config(model_type)
        model_class = getattr(transformers, CLASSES.get((family, model_type), FAMILIES[family][model_type]))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class(_own_part(config, model_class)).to(torch.float32).eval()
            _widen(model)
    except Exception as error:
        raise CannotBuildError(_said(error)) from error
    _tame_generation(model)
    return model


def _own_part(config: Any, model_class: Any) -> Any:
    """The configuration itself, or the nested one that the model class is made of."""
    wanted = model_class.config_class
    if isinstance(config, wanted):
        return config
    parts = [value for value in vars(config).values() if isinstance(value, wanted)]
    return parts[0] if parts else config


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:200]}"


def tiny_config(model_type: str) -> Any:
    """The type's default configuration, shrunk."""
    config_class = CONFIG_MAPPING[model_type]
    overrides = dict(OVERRIDES.get(model_type, {}))
    if not _IS_DATACLASS:
        overrides |= OLD_OVERRIDES.get(model_type, {})
    config = _shrunk(config_class, overrides, parts=PARTS.get(model_type, {}))
    if not _IS_DATACLASS and not config.is_encoder_decoder:
        config.is_decoder = True  # 4.57 has the field in every configuration, and takes it as an attribute
    return config


def _shrunk(config_class: type, overrides: dict[str, Any], parts: Mapping[str, str] | None = None) -> Any:
    accepted = _accepted(config_class)
    missing = {
        name: _nested(_shrunk(getattr(transformers, kind), dict(overrides.pop(name, {}))))
        for name, kind in (parts or {}).items()
    }
    # Some defaults contradict each other: the overrides are tried with them.
    default = _default(config_class, {**overrides, **missing})
    fields = _fields(default, accepted)
    depth_name = next((name for name in _DEPTHS if name in fields), None)
    settings: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            inner = overrides.pop(name, None)
            settings[name] = _nested(_shrunk(type(value), dict(inner or {})))
            continue
        if name == "is_decoder" and getattr(default, "is_encoder_decoder", False):
            continue
        small = _key_value_heads(fields, value) if name in _KEY_VALUE_HEADS else _small(name, value)
        if small is not None:
            settings[name] = small
    settings.update(_rope(fields))
    if depth_name is not None:
        settings.update(_cut_layers(fields, depth_name, overrides))
    settings.update(_special_ids(fields))
    settings.update(missing)
    settings.update({name: value for name, value in overrides.items() if _IS_DATACLASS or name in accepted})
    return config_class(**settings)


_IS_DATACLASS = hasattr(PretrainedConfig, "__dataclass_fields__")
"""Whether configurations take nested ones as they are; the older ones take mappings."""


def _nested(config: Any) -> Any:
    """A nested configuration as the one around it takes it: older ones take mappings."""
    if _IS_DATACLASS:
        return config
    own = _accepted(type(config)) | {"model_type"}
    strict = type(config).__name__ in ("DbrxAttentionConfig", "DbrxFFNConfig")
    return {name: value for name, value in config.to_dict().items() if not strict or name in own}


def _default(config_class: type, arguments: dict[str, Any]) -> Any:
    for given in ({}, arguments):
        try:
            return config_class(**copy.deepcopy(given))  # some take keys out of what they are given
        except Exception as error:  # noqa: BLE001
            failure = error
    raise failure


def _accepted(config_class: type) -> set[str]:
    names: set[str] = set()
    for one in config_class.__mro__:
        if one in (object, PretrainedConfig) or "__init__" not in vars(one):
            continue
        names |= set(inspect.signature(one.__init__).parameters)
    names |= set(getattr(config_class, "__dataclass_fields__", ()))
    return names - {"self", "kwargs", "args"}


def _fields(default: Any, accepted: set[str]) -> dict[str, Any]:
    fields = {}
    for name in sorted(accepted):
        if name.startswith("_") or name in ("per_layer_config", "dtype"):
            continue
        try:
            fields[name] = getattr(default, name)
        except (AttributeError, ValueError, RuntimeError):  # also what has no one value for all layers
            continue
    return fields


def _small(name: str, value: Any) -> Any:
    if name == "n_group":
        return 2 if isinstance(value, int) and value > 1 else None
    if name == "is_decoder":
        return True
    if name == "use_cache":
        return True
    if name == "use_mamba_kernels":
        return False
    if name not in _SIZES or value is None or isinstance(value, bool):
        return None
    small = _SIZES[name]
    if isinstance(value, list | tuple):
        return [small] * len(value) if value and all(isinstance(one, int) for one in value) else None
    if isinstance(small, float):
        return small
    return min(small, value) if isinstance(value, int | float) and value > 0 else None


def _key_value_heads(fields: Mapping[str, Any], value: Any) -> int | None:
    """One, half as many as query heads, or as many: as in the default."""
    if value is None or value == 1:
        return value
    queries = next((fields[name] for name in ("num_attention_heads", "num_heads") if fields.get(name)), None)
    return 4 if value == queries else 2


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings that name a length: beyond it frequencies change, which is another test's business."""
    settings = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, Mapping) and "original_max_position_embeddings" in rope:
            settings[name] = {**rope, "original_max_position_embeddings": 256}
    return settings


def _cut_layers(fields: Mapping[str, Any], depth_name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer layers: the first of every kind, where lists with one item a layer say what the kinds are."""
    depth = fields[depth_name]
    if depth_name in overrides or not isinstance(depth, int):
        return {}
    lists = {
        name: list(value)
        for name, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == depth and depth > 1 and name not in overrides
    }
    if not lists:
        return {depth_name: min(depth, 3)}
    kinds = list(zip(*(map(repr, value) for value in lists.values()), strict=True))
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:MAX_LAYERS]
    later = [number for number in range(depth) if number not in first]
    chosen = sorted(first + later[: max(0, min(3, depth) - len(first))])
    return {depth_name: len(chosen), **{name: [value[number] for number in chosen] for name, value in lists.items()}}


def _special_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Ids within the vocabulary, none of them one that the prompts are made of."""
    ids: dict[str, Any] = {}
    free = iter(range(PLAIN_IDS.stop, VOCABULARY))
    plain = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for name, value in fields.items():
        if name in plain:
            if name in ("pad_token_id", "decoder_start_token_id") and value is None:
                continue
            ids[name] = plain[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and not isinstance(value, bool):
            ids[name] = next(free, VOCABULARY - 1)
    return ids


def _widen(model: PreTrainedModel) -> None:
    """Give weights that were initialised small the spread of the others, so that all of the input counts."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.is_floating_point() and parameter.numel() > 1:
            if parameter.detach().std().item() == 0:  # nothing may be a tie that training would have broken
                with torch.no_grad():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            continue
        if parameter.dim() < 2 or not parameter.is_floating_point() or not parameter.numel():
            continue
        spread = parameter.detach().std().item() if parameter.numel() > 1 else INITIALIZER_RANGE
        if not math.isfinite(spread) or spread < 0.1:
            torch.nn.init.normal_(parameter, 0.0, min(INITIALIZER_RANGE, 2.4 / math.sqrt(parameter.shape[-1])))
            padding = getattr(_owner(model, name), "padding_idx", None)
            if padding is not None:
                with torch.no_grad():
                    parameter[padding].zero_()


def _owner(model: PreTrainedModel, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def _tame_generation(model: PreTrainedModel) -> None:
    """Greedy and plain: no tokens suppressed or forced by what the type's defaults say."""
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"):
        if getattr(generation, name, None) is not None:
            setattr(generation, name, None)
    if model.config.is_encoder_decoder and generation.decoder_start_token_id is None:
        generation.decoder_start_token_id = 1
