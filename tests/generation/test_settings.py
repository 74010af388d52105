"""Settings of ``generate`` that decide what is chosen, when it ends and what is returned: as without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import PAD, TURN_END, VOCABULARY, build_tiny, build_toy_tokenizer
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from kvkeep import CacheStore, compat

PROMPT, STORED, NEW = 30, 22, 5
IDS = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1)).repeat(1, 4)[:, :PROMPT]
ENDS = list(range(3, 150))
"""Ids that end a text: so many that some come soon."""


class NeverAgain(LogitsProcessor):
    """Forbids the id that the whole prompt begins with, and favours one by how much there is."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, input_ids[0, 0]] = -1e9
        scores[:, input_ids.shape[1] % 300] += 3
        return scores


class AtLength(StoppingCriteria):
    """Ends when there are so many tokens with the prompt."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= PROMPT + 3, dtype=torch.bool)


def allowed(_line: int, ids: torch.Tensor) -> list[int]:
    return [(int(ids[-1]) * 7 + step) % 300 + 3 for step in range(9)]


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "biased sequences": lambda: {"sequence_bias": [[[7], 3.0], [[8, 9], 5.0]]},
    "constrained": lambda: {"prefix_allowed_tokens_fn": allowed},
    "constrained beams": lambda: {"prefix_allowed_tokens_fn": allowed, "num_beams": 3},
    "max_length": lambda: {"max_length": PROMPT + 4, "max_new_tokens": None},
    "one more token": lambda: {"max_length": PROMPT + 1, "max_new_tokens": None},
    "min_length": lambda: {"min_length": PROMPT + 4, "eos_token_id": ENDS},
    "an early end": lambda: {"eos_token_id": ENDS},
    "an early end, prompt lookup": lambda: {"eos_token_id": ENDS, "prompt_lookup_num_tokens": 4},
    "stop strings": lambda: {"stop_strings": ["a", "e", "t"], "tokenizer": build_toy_tokenizer()},
    "a criterion": lambda: {"stopping_criteria": StoppingCriteriaList([AtLength()])},
    "a processor": lambda: {"logits_processor": LogitsProcessorList([NeverAgain()])},
    "penalties of the prompt": lambda: {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "beams that end": lambda: {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "eos_token_id": ENDS},
    "a configuration object": lambda: {
        "generation_config": GenerationConfig(
            max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, eos_token_id=TURN_END, num_beams=2
        )
    },
    "ranks that are not": lambda: {"synced_gpus": False},
    "states": lambda: {"output_hidden_states": True, "output_scores": True},
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_a_call_asks_for_is_as_without_a_store(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = build_tiny(name)
    kv = CacheStore(tmp_path_factory.mktemp(name) / "store").bind(model)
    kv.warm(IDS[:, :STORED])
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "return_dict_in_generate": True}
    plain = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True}
    for setting, make in SETTINGS.items():
        asked = {**inputs, **plain, **make()}
        if "generation_config" in asked:
            asked = {**inputs, **make()}
        control = model.generate(**asked)
        ours = kv.generate(**asked)
        with kv.attached():
            attached = model.generate(**asked)
        assert kv.last_report is not None
        reported = kv.last_report.reused_tokens, (kv.last_report.reason or "").partition(":")[0]
        aside = name == "gemma3" and "prompt lookup" in setting and not compat.CHUNKS  # 4.57 drafts with full layers
        assert reported == ((0, "layout") if aside else (STORED - 1, "")), setting
        for one in (ours, attached):
            assert one.keys() == control.keys(), setting
            assert torch.equal(one.sequences, control.sequences), setting
            for kind in ("logits", "scores"):
                for mine, other in zip(one.get(kind) or (), control.get(kind) or (), strict=True):
                    finite = other.isfinite()
                    assert torch.equal(mine[~finite], other[~finite]), setting
                    assert (mine[finite] - other[finite]).abs().max() < 5e-5 * other[finite].abs().max(), setting
            for mine, other in zip(one.get("hidden_states") or (), control.get("hidden_states") or (), strict=True):
                assert torch.allclose(mine[-1][:, -1], other[-1][:, -1], rtol=0, atol=5e-4), setting
