"""Sparse attention keeps an index beside its keys: in a cache of fixed size too, and from one class into the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conform import random_ids
from tiny_zoo import build
from transformers import DynamicCache

from kvkeep import CacheStore, compat
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds
from kvkeep.layouts import describe_cache, plans_of
from kvkeep.manner import manner_of
from kvkeep.prefill import empty_cache, feed, prefill
from kvkeep.testing.state import same_bits

TYPES = {
    "deepseek_v32": "StaticIndexedLayer",
    "dots3_note_text": "StaticIndexedLayer",  # beside sliding layers
    "minimax_m3_vl_text": "MiniMaxM3VLSparseStaticCacheLayer",
    "qwen4_exp_text": "StaticIndexedLayer",  # with positions, beside linear attention
}
PROMPT, PREFIX, ROOM, TOLERANCE = 48, 47, 64, 1e-4
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "disable_compile": True,
}

if compat.STATIC_INDEXED_LAYERS:  # 4.57 has no sparse attention

    @pytest.mark.parametrize("name", [*TYPES, "deepseek_v4"])
    def test_a_prefill_in_pieces_goes_on_as_in_one_pass(name: str) -> None:
        """Longer than every window: the mask of a layer must be as long as what that layer keeps."""
        model, inputs = build("causal", name), Inputs(TokenIds.of(random_ids(PROMPT)[0].tolist()))
        whole = feed(model, empty_cache(model, inputs), inputs, 0, PROMPT, logits=True)
        cache = prefill(model, inputs, tokens=PREFIX - 3, chunk=16)
        parts = feed(model, cache, inputs, PREFIX - 3, PROMPT, logits=True)
        assert whole is not None and parts is not None
        assert (parts - whole[:, PREFIX - 3 :]).abs().max() <= TOLERANCE * whole.abs().max()

    def test_a_model_that_errs_once_its_windows_have_moved_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
        """A state cannot be cut back and computed again when it is stored, so the model is asked beforehand."""

        def with_every_row(config: Any) -> Any:
            cache = DynamicCache(config=config)
            cache.layers[2] = compat.DYNAMIC_LAYER()
            return cache

        model = build("causal", "deepseek_v4")
        assert type(compat.complete_cache(model.config).layers[2]) is compat.DYNAMIC_SLIDING_LAYER
        assert manner_of(model).objection is None
        monkeypatch.setattr(compat, "complete_cache", with_every_row)
        assert "computes a prompt otherwise when it is fed in two parts" in str(manner_of(model).objection)

    @pytest.mark.parametrize("name", TYPES)
    def test_a_static_cache_with_an_index_is_kept_and_restored(tmp_path: Path, name: str) -> None:
        model, ids = build("causal", name), random_ids(PROMPT)
        kv = CacheStore(tmp_path / "store").bind(model)
        kv.warm(ids[:, :PREFIX])
        for kind in ("static", None):
            control = model.generate(ids, cache_implementation=kind, **OPTIONS)
            out = kv.generate(ids, cache_implementation=kind, **OPTIONS)
            assert kv.last_report is not None
            assert kv.last_report.reused_tokens == PREFIX - 1
            assert torch.equal(out.sequences, control.sequences)
            largest = float(control.logits[0].abs().max())
            assert float((out.logits[0] - control.logits[0]).abs().max()) <= TOLERANCE * largest
            layers = {type(layer).__name__ for layer in compat.decoder_part(out.past_key_values).layers}
            assert (TYPES[name] in layers) is (kind == "static")

    @pytest.mark.parametrize("name", TYPES)
    def test_a_static_cache_and_a_dynamic_one_hold_the_same(tmp_path: Path, name: str) -> None:
        model, ids = build("causal", name), random_ids(PROMPT)
        kv = CacheStore(tmp_path / "store").bind(model)
        kv.warm(ids)
        plans = plans_of(model)
        static = kv.load(ids[:, :PROMPT], cache_implementation="static", max_cache_len=ROOM)
        dynamic = kv.load(ids[:, :PROMPT])
        assert static is not None
        assert dynamic is not None
        length = compat.cached_tokens(dynamic)
        assert length == compat.cached_tokens(static) == PROMPT - 1
        rows = [describe_cache(cache, plans, length) for cache in (static, dynamic)]
        for one, other in zip(*rows, strict=True):
            shared = one.tensors.keys() & other.tensors.keys()
            assert shared == other.tensors.keys() == one.tensors.keys()
            for role in shared:
                held = min(one.tensors[role].shape[1], other.tensors[role].shape[1])  # a window may hold a row more
                assert same_bits(one.tensors[role][:, -held:], other.tensors[role][:, -held:])
        saved = CacheStore(tmp_path / "other").bind(model)
        saved.save(static, ids[:, :length])
        again = saved.load(torch.cat([ids[:, :length], ids[:, :1]], dim=1))
        assert again is not None
        for one, other in zip(describe_cache(again, plans, length), rows[1], strict=True):
            assert all(same_bits(one.tensors[role], other.tensors[role]) for role in other.tensors)
