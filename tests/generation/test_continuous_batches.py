"""Batches that change all the time keep their KV in pages of their own: no store has a part in them, and it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TURN_END, build_tiny
from transformers import GenerationConfig

from kvkeep import BoundStore, CacheStore, compat

IDS = torch.arange(3, 24)[None]
STORED, NEW = 17, 3
REASON = "mode: batches that are run continuously keep their own KV"


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_tiny("llama")


@pytest.fixture
def kv(llama: Any, tmp_path: Path) -> BoundStore:
    kv = CacheStore(tmp_path / "store").bind(llama)
    kv.warm(IDS[:, :STORED])
    return kv


def config() -> GenerationConfig:
    sizes = {"num_blocks": 16, "max_batch_tokens": 32}  # without them a GPU is asked for its memory
    return GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=TURN_END, pad_token_id=0, **sizes)


def test_a_manager_of_them_is_reported_as_not_served(llama: Any, kv: BoundStore) -> None:
    before = dict(vars(llama))
    with kv.attached():
        llama.init_continuous_batching(generation_config=config())
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (0, REASON)
        llama.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False)
        assert kv.last_report.reused_tokens == STORED - 1
    assert {name for name in before if not name.startswith("_")} == {
        name for name in vars(llama) if not name.startswith("_")
    }
    assert set(compat.BATCHING).isdisjoint(vars(llama))


@pytest.fixture
def few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``generate`` makes the settings of pages itself, they take most of the memory that is free."""
    if not compat.CHUNKS:
        return
    from transformers.generation.continuous_batching import continuous_api

    resolve = continuous_api.resolve_continuous_batching_config

    def few(*args: Any, cb_config: Any, **kwargs: Any) -> Any:
        cb_config.num_blocks, cb_config.max_batch_tokens = 16, 32
        return resolve(*args, cb_config=cb_config, **kwargs)

    monkeypatch.setattr(continuous_api, "resolve_continuous_batching_config", few)


@pytest.mark.slow
@pytest.mark.usefixtures("few_pages")
def test_a_paged_cache_generates_as_without_a_store(llama: Any, kv: BoundStore) -> None:
    paged: dict[str, Any] = {"generation_config": config(), "cache_implementation": "paged"}
    if not compat.CHUNKS:  # 4.57 knows such caches in batches alone, which it runs on accelerators
        with pytest.raises(ValueError, match="Invalid `cache_implementation`"):
            kv.generate(IDS, **paged)
        return
    control = llama.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=NEW, do_sample=False)
    with kv.attached():
        out = llama.generate(IDS, **paged)
    assert torch.equal(out[0], control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (0, REASON)
