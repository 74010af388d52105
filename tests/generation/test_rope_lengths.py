"""Rotary frequencies that depend on the length: a prompt is served by KV of its own side of the switch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

from kvkeep import CacheStore, compat
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.fingerprint import LengthRule, length_rule

SWITCH, LONGEST = 32, 128
TOLERANCE = 2e-4
NEW = compat.GENERATE_CACHE_ARGUMENT == "cache"

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [2.0 + 0.5 * n for n in range(8)],
}


def phi3() -> Any:
    torch.manual_seed(11)
    rope = {**LONGROPE, "rope_theta": 1e4, "original_max_position_embeddings": SWITCH} if NEW else None
    settings: dict[str, Any] = {"rope_parameters": rope} if NEW else {"rope_scaling": {**LONGROPE, "type": "longrope"}}
    if not NEW:
        settings["rope_scaling"].pop("rope_type")
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=SWITCH,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    return Phi3ForCausalLM(config).eval()


def dynamic() -> Any:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    settings = {"rope_parameters": {**rope, "rope_theta": 1e4}} if NEW else {"rope_scaling": rope}
    return build_tiny("llama", max_position_embeddings=SWITCH + 1, **settings)


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def first_logits(generate: Any, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return generate(ids, attention_mask=mask, max_new_tokens=2, **options).logits[0]


def test_the_rules_are_read_from_the_live_model() -> None:
    assert length_rule(phi3()) == LengthRule(SWITCH, beyond=True)
    assert length_rule(dynamic()) == LengthRule(SWITCH, beyond=False)
    assert length_rule(build_tiny("llama")) is None
    assert length_rule(build_tiny("gemma3")) is None


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stored", [20, pytest.param(31, marks=SLOW), 32, 33, pytest.param(34, marks=SLOW), 50])
@pytest.mark.parametrize("prompt", [25, 32, 33, 34, pytest.param(36, marks=SLOW), 60])
def test_longrope_serves_each_side_of_the_switch_with_its_own(tmp_path: Path, stored: int, prompt: int) -> None:
    ids = random_ids(60)
    model = phi3()
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids[:, :stored])
    identity = kv.identity()
    ours = first_logits(kv.generate, ids[:, :prompt])
    control = first_logits(phi3().generate, ids[:, :prompt])
    assert (ours - control).abs().max() < TOLERANCE
    report = kv.last_report
    assert report is not None
    usable = min(stored, prompt - 1)
    if (stored > SWITCH) != (prompt > SWITCH):
        assert report.reused_tokens == 0
        needs, has = ("beyond", "up to") if prompt > SWITCH else ("up to", "beyond")
        assert report.reason == (
            f"rope: the prompt needs the frequencies {needs} 32 tokens, the entry has those {has} them"
        )
    elif prompt > SWITCH >= usable:  # nothing that reaches behind the switch is left of it
        assert (report.reused_tokens, str(report.reason)[:6]) == (0, "rope: ")
    elif prompt > SWITCH >= usable - 1:  # room for the entry, none for the guard
        assert (report.reused_tokens, report.reason) == (usable, None)
    else:
        assert (report.reused_tokens, report.reason) == (usable - 1, None)
    assert kv.lookup(ids[:, :prompt]).tokens == (usable if report.reused_tokens else 0)
    assert kv.identity() == identity


def test_a_long_prefix_is_prefilled_with_the_frequencies_that_its_end_switches_on(tmp_path: Path) -> None:
    ids = random_ids(600)
    model = phi3()
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids[:, :590])  # more than one chunk
    ours = first_logits(kv.generate, ids)
    assert (ours - first_logits(phi3().generate, ids)).abs().max() < TOLERANCE
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (589, None)  # type: ignore[union-attr]


def test_a_cache_that_crossed_the_switch_is_not_saved(tmp_path: Path) -> None:
    ids = random_ids(50)
    model = phi3()
    kv = CacheStore(tmp_path / "store").bind(model)
    name = compat.forward_cache_argument(model)
    mixed, whole = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :20], **{name: mixed}, use_cache=True)
        model(input_ids=ids[:, 20:], **{name: mixed}, use_cache=True)
        model(input_ids=ids, **{name: whole}, use_cache=True)
    with pytest.raises(CacheMismatchError, match="not hold what this model computes"):
        kv.save(mixed, ids)
    assert kv.save(whole, ids).tokens == 50


@pytest.mark.parametrize("stored", [20, 32])
@pytest.mark.parametrize("prompt", [25, 32, 33, 60])
def test_dynamic_frequencies_serve_up_to_the_switch(tmp_path: Path, stored: int, prompt: int) -> None:
    ids = random_ids(60)
    model = dynamic()
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids[:, :stored])
    control = first_logits(dynamic().generate, ids[:, :prompt])
    first_logits(model.generate, ids)  # a long call leaves its frequencies behind
    ours = first_logits(kv.generate, ids[:, :prompt])
    report = kv.last_report
    assert report is not None
    if prompt <= SWITCH:
        assert (ours - control).abs().max() < TOLERANCE
        assert (report.reused_tokens, report.reason) == (min(stored, prompt - 1) - 1, None)
    else:
        assert (report.reused_tokens, report.reason) == (
            0,
            "rope: beyond 32 tokens every length has its own rotary frequencies",
        )


def test_dynamic_frequencies_beyond_the_switch_are_not_stored(tmp_path: Path) -> None:
    model = dynamic()
    kv = CacheStore(tmp_path / "store").bind(model)
    with pytest.raises(UnsupportedCacheError, match="other rotary frequencies for every length beyond 32 tokens"):
        kv.warm(random_ids(33))
    with pytest.raises(UnsupportedCacheError, match="rotary"):
        kv.save(((torch.zeros(1, 2, 33, 16),) * 2,) * 3, random_ids(33))
    assert kv.store.entries() == []
