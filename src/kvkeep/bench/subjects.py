"""The models that ways to start are compared on: real ones that are on this machine, and real shapes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvkeep.demo.models import is_converted, model_folder, models_directory

QUESTION = 12
"""Tokens that follow the prefix in every prompt."""

ANSWER = 33
"""New tokens at most: the first one, and 32 more that tell how fast further ones come."""

_TEXT = 150_000
"""Characters of text that real models are fed from: more than 16k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model that can be opened in any process.

    Attributes:
        name: how the output calls it.
        weights: real or random, and how many layers it was cut to, in words.
        folder: of a real model, as ``from_pretrained`` reads it.
        gguf: the file that the folder was converted from, if that is there.
        shape: the configuration of a model with random weights, its ``model_type`` included.
    """

    name: str
    weights: str
    folder: str | None = None
    gguf: str | None = None
    shape: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """What ``Subject(**...)`` makes it from again."""
        return asdict(self)


class Opened:
    """A subject in memory: its model, and prompts of any length.

    Attributes:
        model: in float32, on the CPU; no token ends a text early.
        longest: the longest prefix that its positions allow.
    """

    def __init__(self, subject: Subject) -> None:
        if subject.folder is not None:
            loader: Any = AutoModelForCausalLM
            self.model: Any = loader.from_pretrained(subject.folder, dtype=torch.float32).eval()
            tokenizer = AutoTokenizer.from_pretrained(subject.folder)
            self._ids = torch.tensor([tokenizer(_text(), verbose=False)["input_ids"]])
        else:
            self.model = _build(dict(subject.shape or {}))
            self._ids = torch.randint(
                10, self.model.config.vocab_size, (1, 20_000), generator=torch.Generator().manual_seed(0)
            )
        settings = self.model.generation_config
        settings.eos_token_id, settings.pad_token_id = None, 0
        room: int = self.model.config.get_text_config(decoder=True).max_position_embeddings
        self.longest = min(room - ANSWER, self._ids.shape[1]) - QUESTION

    def prompt(self, tokens: int) -> torch.Tensor:
        """The ids of a prefix of so many tokens, and of the question after it: [1, tokens + QUESTION]."""
        return self._ids[:, : tokens + QUESTION]


def real_subjects() -> list[Subject]:
    """The models of the demo, if they have been converted on this machine."""
    sources = {
        "smollm2": ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        "gemma": ("gemma-3-270m", "gemma-3-270m-q4_k_m.gguf"),
    }
    found = []
    for short, (name, file) in sources.items():
        folder, gguf = model_folder(short), models_directory().parent / "gguf" / file
        if is_converted(folder):
            found.append(
                Subject(
                    name=name,
                    weights="real weights",
                    folder=str(folder),
                    gguf=str(gguf) if gguf.is_file() else None,
                )
            )
    return found


QWEN = Subject(
    name="Qwen2.5-0.5B's shape",
    weights="random weights",
    shape={
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
)
LLAMA = Subject(
    name="Llama-3.2-1B's shape",
    weights="random weights",
    shape={
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
)
SMOLLM2 = Subject(
    name="SmolLM2-135M's shape",
    weights="random weights",
    shape={
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)
"""Stands for the real one where that is not there."""


def with_layers(subject: Subject, layers: int) -> Subject:
    """A shape cut to so many layers, which its words say."""
    shape = dict(subject.shape or {})
    weights = f"{subject.weights}, {layers} of {shape['num_hidden_layers']} layers"
    return replace(subject, weights=weights, shape={**shape, "num_hidden_layers": layers})


def _build(shape: dict[str, Any]) -> Any:
    wide = {"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}  # the answer depends on the prompt
    config = AutoConfig.for_model(**{**wide, **shape})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        maker: Any = AutoModelForCausalLM
        return maker.from_config(config).to(torch.float32).eval()


def _text() -> str:
    """A long English text that comes with Python."""
    from pydoc_data.topics import topics

    pieces = itertools.chain.from_iterable(sorted(topics.items()))
    return "\n".join(pieces)[:_TEXT]


def words_of(folder: Path | str, ids: torch.Tensor) -> str:
    """The text of ids [tokens]."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
