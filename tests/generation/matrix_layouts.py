"""A small model of each way of keeping state, and rules that say beforehand how much of a prompt it need not be fed.

The rules are written down once more here: they know nothing of what kvkeep finds or reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tiny_models import PAD, TURN_END, VOCABULARY, WINDOW, build_tiny

from kvkeep import compat

SLACK = 4
"""Rows that a warmed entry keeps of a sliding layer beyond its window."""

STEP_COST = 8
"""Tokens that must be reused for each token that is fed alone."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
}


@dataclass(frozen=True)
class Layout:
    """A model whose cache is of one kind.

    Attributes:
        build: makes the model.
        slides: whether some layers keep a window alone.
        states: whether some layers keep a state that is valid behind one token only.
        singly: whether what follows a state must be fed one token at a time.
        kept: whether any state is in a cache.
    """

    build: Callable[[], Any]
    slides: bool = False
    states: bool = False
    singly: bool = False
    kept: bool = True

    def stored(self, warmed: int) -> int:
        """Tokens of the entry that ``warm`` makes of so many: a state is kept before the last one."""
        return warmed - 1 if self.states and warmed > 1 else warmed

    def usable(self, stored: int, wanted: int) -> int:
        """How many tokens of an entry can be used where so many are wanted."""
        if stored <= wanted:
            return stored
        wrapped = stored > WINDOW - 1 + SLACK
        return 0 if self.states or (self.slides and wrapped and stored - wanted > SLACK) else wanted


def _mamba2() -> Any:
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16, "num_hidden_layers": 2}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**_SIZES, **sizes}))


def _qwen3_next() -> Any:
    sizes = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "max_position_embeddings": 512,
    }
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**_SIZES, **sizes}))


def _jamba() -> Any:
    sizes = {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "use_mamba_kernels": False,
    }
    return transformers.JambaForCausalLM(transformers.JambaConfig(**{**_SIZES, **sizes}))


def _rwkv() -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes))


_OLD = not compat.LINEAR_LAYERS
"""Whether models keep states themselves, and look at them only where one token is fed: 4.57."""

LAYOUTS: dict[str, Layout] = {
    "full": Layout(lambda: build_tiny("llama")),
    "windowed": Layout(lambda: build_tiny("mistral"), slides=True),
    "full, windowed": Layout(lambda: build_tiny("gemma3"), slides=True),
    "full, recurrent": Layout(_qwen3_next, states=True, singly=_OLD),
    "full, recurrent, singly": Layout(_jamba, states=True, singly=True),
    "recurrent": Layout(_mamba2, states=True, singly=_OLD),
    "in no cache": Layout(_rwkv, states=True, kept=False),
}


def build(name: str) -> Any:
    """The model of a layout, in float32 and evaluation mode: the same weights each time; what it writes never ends."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LAYOUTS[name].build().to(torch.float32).eval()
    model.generation_config.eos_token_id = TURN_END  # 4.57 drafts for models that have one alone
    model.generation_config.suppress_tokens = [TURN_END]
    model.generation_config.pad_token_id = PAD
    return model
