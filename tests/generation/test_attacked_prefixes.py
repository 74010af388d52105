"""Prefixes that grow, under what once made them wrong or lost them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matrix_layouts import build
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore, compat

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


@pytest.mark.parametrize("mode", ["turn", "prompt"])
def test_state_that_a_model_leaves_which_does_not_see_its_earlier_chunks_is_not_stored(
    mode: Any, tmp_path: Path
) -> None:
    model = build("full, recurrent, singly")
    kv = CacheStore(tmp_path / "store", durability="none").bind(model)
    ones, chunks = torch.ones_like(IDS), {"prefill_chunk_size": 16} if compat.CHUNKS else {}
    said = kv.generate(IDS, save=mode, attention_mask=ones, max_new_tokens=4, do_sample=False, **chunks)
    assert kv.last_report is not None
    assert (kv.last_report.stored is None) == (mode == "turn")
    longer = torch.cat([said, IDS[:, :4]], dim=1)
    plain = logits(model.generate, longer, 4)[1]
    assert (logits(kv.generate, longer, 4)[1] - plain).abs().max() < 2e-4 * plain.abs().max()


def test_an_answer_during_which_weights_were_changed_and_changed_back_is_not_stored(tmp_path: Path) -> None:
    model, seen = build("full"), []
    kv = CacheStore(tmp_path / "store", durability="none").bind(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()

    def change(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(0)
        with torch.no_grad():
            weight.copy_(before * 3 if len(seen) in (2, 3) else before)
        return torch.zeros(len(ids), dtype=torch.bool)

    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    kv.generate(IDS, save="turn", stopping_criteria=[change], **options)
    assert kv.last_report is not None
    assert (kv.last_report.not_stored or "").startswith("identity: ")
    kv.generate(IDS, save="turn", **options)
    assert kv.last_report.stored is not None


class Edits:
    """A logits processor that edits an id that was fed already."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 104:
            ids[0, 102] = (ids[0, 102] + 1) % VOCABULARY
        return scores


class Looks:
    """One that leaves them alone."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(("processor", "stored"), [(Edits(), False), (Looks(), True)])
def test_ids_that_were_edited_while_they_were_generated_are_not_stored(
    processor: Any, stored: bool, tmp_path: Path
) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store", durability="none").bind(model)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    prompt = IDS[:, :100]
    kv.generate(prompt, save="turn", attention_mask=torch.ones_like(prompt), logits_processor=[processor], **options)
    assert (kv.last_report.stored is not None) == stored
    assert stored or kv.last_report.not_stored.startswith("refused: ids were edited")


@pytest.mark.parametrize("kind", ["windowed", "full, windowed"])
def test_boundaries_that_are_asked_for_later_are_kept(kind: str, tmp_path: Path) -> None:
    model, ids = build(kind), IDS[0].tolist()
    kv = CacheStore(tmp_path / "store", durability="none").bind(model)
    others = [[*ids[:cut], 7, 8, 9] for cut in (70, 140)]
    entry = kv.warm(ids)
    assert [kv.lookup(other).tokens for other in others] == [0, 0]
    assert kv.warm(ids, checkpoint_every=70).key == entry.key
    assert [kv.lookup(other).tokens for other in others] == [70, 140]
    fed: list[tuple[int, int]] = []
    kv.warm(ids, checkpoint_every=70, progress=lambda done, total: fed.append((done, total)))
    assert fed == []
    said = torch.tensor([others[1]])
    plain = logits(model.generate, said, 4)[1]
    assert (logits(kv.generate, said, 4)[1] - plain).abs().max() < 2e-4 * plain.abs().max()
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens >= 139


@pytest.mark.parametrize("kind", ["windowed", "full, windowed"])
def test_a_prompt_that_was_saved_is_warmed_for_itself(kind: str, tmp_path: Path) -> None:
    model, ids = build(kind), IDS[0].tolist()
    kv = CacheStore(tmp_path / "store", durability="none").bind(model)
    cache = transformers.DynamicCache(config=model.config)  # its windows have moved on, and keep no row more
    with torch.no_grad():
        model(IDS, use_cache=True, **{compat.forward_cache_argument(model): cache})
    saved = kv.save(cache, ids)
    assert kv.lookup(ids).tokens == 0
    assert kv.warm(ids).key == saved.key
    assert kv.lookup(ids).tokens == 149
    plain = logits(model.generate, IDS, 4)[1]
    assert (logits(kv.generate, IDS, 4)[1] - plain).abs().max() < 2e-4 * plain.abs().max()
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens >= 148
