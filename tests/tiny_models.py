"""Models small enough to build in a moment, of the kinds of attention that kvkeep keeps, and a tokenizer for them.

The weights are random but wide (``initializer_range`` 0.3), so that what a model generates depends on what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

WINDOW = 8
VOCABULARY = 320
PAD, TURN_START, TURN_END = range(3)

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": TURN_START,
    "eos_token_id": TURN_END,
}


def _llama(**overrides: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_COMMON, "num_hidden_layers": 3, **overrides}))


def _mistral(**overrides: Any) -> PreTrainedModel:
    settings = {**_COMMON, "num_hidden_layers": 3, "sliding_window": WINDOW}
    return MistralForCausalLM(MistralConfig(**{**settings, **overrides}))


def _gemma3(**overrides: Any) -> PreTrainedModel:
    settings = {
        **_COMMON,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**settings, **overrides}))


def _gpt_oss(**overrides: Any) -> PreTrainedModel:
    settings = {
        **_COMMON,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return GptOssForCausalLM(GptOssConfig(**{**settings, **overrides}))


_BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
}
TINY_NAMES = tuple(_BUILDERS)


def build_tiny(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A fresh model in float32 and evaluation mode: the same weights for the same arguments.

    Args:
        name: one of ``TINY_NAMES``: ``llama`` (full attention), ``mistral`` (every layer a window of 8), ``gemma3``
            and ``gpt_oss`` (both kinds of layer).
        seed: of the weights; the random state outside is left as it was.
        overrides: fields of the model's configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _BUILDERS[name](**overrides).to(torch.float32).eval()


_MERGES = [
    "Ġ t", "h e", "i n", "Ġt he", "Ġ a", "r e", "o n", "e r", "Ġ s", "a t", "e n", "o r", "Ġ w", "o u", "i s", "Ġ c",
    "a n", "Ġa n", "e s", "i t", "Ġ f", "Ġ o", "Ġo f", "in g", "Ġ in", "a l", "Ġ p", "Ġ b", "t o", "Ġt o", "Ġan d",
    "a r", "e d", "Ġ m", "s t", "Ġ h", "Ġ d", "l l", "Ċ Ċ", "Ġ Ġ",
]  # fmt: skip
_CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_toy_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 320 ids, which fit every tiny model, with a ChatML template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|pad|>": PAD, "<|im_start|>": TURN_START, "<|im_end|>": TURN_END}
    merges: list[tuple[str, str]] = []
    for symbol in symbols:
        vocabulary[symbol] = len(vocabulary)
    for merge in _MERGES:
        left, right = merge.split(" ")
        vocabulary.setdefault(left + right, len(vocabulary))
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<|pad|>", "<|im_start|>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
