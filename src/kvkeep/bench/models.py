"""Models with random weights, built from a configuration: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, HEAD_DIM = 30, 3, 64
"""The shape of SmolLM2-135M's cache: in float32, 46,080 bytes a token."""

VOCABULARY = 256


def cache_model() -> Any:
    """A model whose cache has SmolLM2-135M's shape, narrow in all else."""
    return _build(layers=LAYERS, head_dim=HEAD_DIM)


def call_model() -> Any:
    """A model of 300 tensors that computes as little as can be, so that what is added to a call is seen."""
    return _build(layers=33, head_dim=16)


def _build(*, layers: int, head_dim: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=48,
        intermediate_size=48,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=head_dim,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        bos_token_id=0,
        pad_token_id=0,
        eos_token_id=None,  # nothing ends a text before its length
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.float32).eval()
