"""Prefixes that grow, under what once made them wrong or lost them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore

IDS = torch.randint(3, VOCABULARY, (1, 150), generator=torch.Generator().manual_seed(1))
LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 128}


def logits(generate: Any, prompt: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(prompt)
    out = generate(prompt, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.cat(out.logits)


@pytest.mark.parametrize("mode", ["turn", "prompt"])
def test_an_answer_across_the_switch_of_rotary_frequencies_is_not_stored(mode: Any, tmp_path: Path) -> None:
    def build() -> Any:
        scaling = {"type": "longrope", "rope_type": "longrope", "factor": 4.0, **LONG}
        settings = {"original_max_position_embeddings": 128}  # where 4.57 looks
        return build_tiny("llama", rope_scaling=scaling, max_position_embeddings=512, **settings)

    model = build()
    kv = CacheStore(tmp_path / "store", durability="none").bind(model)
    said = turn(kv, mode)
    plain = logits(build().generate, said, 4)[1]
    assert (logits(kv.generate, said, 4)[1] - plain).abs().max() < 2e-4 * plain.abs().max()


def turn(kv: Any, mode: str) -> torch.Tensor:
    ones = torch.ones_like(IDS[:, :100])
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    said: torch.Tensor = kv.generate(IDS[:, :100], save=mode, attention_mask=ones, **options)
    assert kv.last_report.stored is None
    assert kv.last_report.not_stored.startswith("rope: ")
    return said


def test_an_entry_that_was_stored_anew_with_another_stretch_is_found_by_others(tmp_path: Path) -> None:
    model, ids = build_tiny("llama"), IDS[0].tolist()
    one, other = (CacheStore(tmp_path / "store", durability="none").bind(model) for _ in range(2))
    entry = one.warm(ids)
    assert one.lookup([*ids, 5]).tokens == 150
    other.store.remove(entry.key)
    other.warm(ids[:80])
    assert other.warm(ids).start == 80
    assert one.lookup([*ids, 5]).tokens == 150
