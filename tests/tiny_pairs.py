"""Encoder-decoder models small enough to build in a moment, and what their encoders are fed.

Weights are random and wide, so that another text or sound gives another answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

START, END = 1, 2
WORDS = range(3, 90)
WINDOW = 8
FRAMES = 60
"""Frames of sound that the tiny Whisper hears at once; it makes half as many positions of them."""

_IDS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": START, "eos_token_id": END}
_HALVES = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_model": 32,
    "init_std": 0.3,
    "decoder_start_token_id": START,
}


def _t5(**overrides: Any) -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 2}
    settings = {**_IDS, **sizes, "decoder_start_token_id": START, "initializer_factor": 1.0, **overrides}
    return T5ForConditionalGeneration(T5Config(**settings))


def _bart(**overrides: Any) -> Any:
    settings = {**_IDS, **_HALVES, "max_position_embeddings": 256, "forced_eos_token_id": None, **overrides}
    return BartForConditionalGeneration(BartConfig(**settings))


def _whisper(**overrides: Any) -> Any:
    sizes = {"num_mel_bins": 8, "max_source_positions": FRAMES // 2, "max_target_positions": 96}
    return WhisperForConditionalGeneration(WhisperConfig(**{**_IDS, **_HALVES, **sizes, **overrides}))


def _t5gemma(**overrides: Any) -> Any:
    part = {
        **_IDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "initializer_range": 0.3,
    }
    halves = (T5GemmaModuleConfig(**part) for _ in range(2))
    encoder, decoder = (half.to_dict() for half in halves)
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=encoder, decoder=decoder, **_IDS, **overrides))


_BUILDERS = {"t5": _t5, "bart": _bart, "whisper": _whisper, "t5gemma": _t5gemma}
PAIR_NAMES = tuple(_BUILDERS)


def build_pair(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A fresh encoder-decoder model in float32 and evaluation mode: the same weights for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[name](**overrides).eval()
        with torch.no_grad():  # what is made small
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.std() < 0.2:
                    parameter.normal_(std=0.3)
    config = model.generation_config
    config.eos_token_id = config.forced_eos_token_id = None  # random weights would end anywhere
    config.decoder_start_token_id = START
    config.max_length = None
    return model


def heard(name: str, seed: int = 1, *, length: int = 20) -> dict[str, torch.Tensor]:
    """What the encoder is fed, as a tokenizer or feature extractor returns it."""
    noise = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn((1, 8, FRAMES), generator=noise)}
    ids = torch.randint(WORDS.start, WORDS.stop, (1, length), generator=noise)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def spoken(tokens: int, seed: int = 5) -> torch.Tensor:
    """Ids of a decoder, [1, tokens], that begin with the start token."""
    noise = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS.start, WORDS.stop, (1, tokens), generator=noise)
    return torch.cat([torch.tensor([[START]]), words], dim=1)[:, :tokens]


@dataclass
class Fed:
    """What a model was fed: decoder tokens, pass by pass, and how often its encoder ran."""

    tokens: list[int]
    encoder: int = 0


@contextmanager
def watching(model: Any) -> Iterator[Fed]:
    """Count what the encoder and the decoder are fed within the block."""
    fed = Fed([])

    def decoded(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fed.tokens.append(int((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[-1]))

    def encoded(*_: Any) -> None:
        fed.encoder += 1

    hooks = [
        model.get_decoder().register_forward_pre_hook(decoded, with_kwargs=True),
        model.get_encoder().register_forward_pre_hook(encoded),
    ]
    try:
        yield fed
    finally:
        for hook in hooks:
            hook.remove()
