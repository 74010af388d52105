"""Tiny real models, and a tokenizer trained in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 16,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        },
    ),
}


@pytest.fixture
def build() -> Callable[..., Any]:
    """Build a model with the same random weights each time, in evaluation mode."""

    def _build(kind: str = "llama", **overrides: Any) -> Any:
        config_class, model_class, own = KINDS[kind]
        config = getattr(transformers, config_class)(**(SIZE | own | overrides))
        torch.manual_seed(0)
        return getattr(transformers, model_class)(config).eval()

    return _build
