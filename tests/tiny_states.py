"""Tiny models with state that is valid behind one token alone: Mamba and its kin, alone and beside attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_models import VOCABULARY

_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # random weights would end anywhere
}
_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPS = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
_LINEAR = "linear_attention" if hasattr(transformers.PretrainedConfig, "__dataclass_fields__") else "mamba"
_ZAMBA = {"num_hidden_layers": 6, "mamba_d_state": 8, "attention_hidden_size": 128, "attention_head_dim": 32}
_ONE_IN_TWO = {"attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {**_HEADS, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**_HEADS, "mamba_d_ssm": 128}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**_HEADS, "num_local_experts": 0, "layer_types": [_LINEAR, "attention", _LINEAR]},
    ),
    "jamba": ("Jamba", {**_EXPERTS, **_ONE_IN_TWO, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba2", {"state_size": 8, **_GROUPS}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "zamba": ("Zamba", {**_ZAMBA, **_ONE_IN_TWO}),
    "zamba2": (
        "Zamba2",
        {
            "num_hidden_layers": 4,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
        },
    ),
}
"""For each the start of its classes' names, and its settings beside the sizes."""


def build_stateful(name: str, **overrides: Any) -> Any:
    """A model with wide random weights, in float32 on the CPU in evaluation mode."""
    kind, own = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZE, **own, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model
