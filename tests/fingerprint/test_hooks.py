"""Forward hooks inside the decoder are refused without a salt, at bind and later; others are left alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore
from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import HookWatch


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))


def double(_module: Any, _inputs: Any, output: Any) -> Any:
    return output * 1.5


def test_a_hook_that_moves_kv_is_refused_at_bind_without_a_salt(tmp_path: Path) -> None:
    model = build_tiny("llama")
    store = CacheStore(tmp_path / "store")
    plain = store.bind(model)
    ids = random_ids(40)
    plain.warm(ids[:, :30])
    handle = model.model.layers[1].mlp.register_forward_hook(double)
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    with pytest.raises(UnsupportedRequestError, match=r"forward hook on layers\.1\.mlp \(test_hooks\.double\).*salt="):
        store.bind(model)
    with pytest.raises(UnsupportedRequestError, match="forward hook"):
        plain.warm(ids)
    assert str(plain.lookup(ids).reason).startswith("identity: a forward hook on layers.1.mlp")
    assert plain.load(ids) is None
    assert torch.equal(plain.generate(ids, max_new_tokens=3, do_sample=False), control)
    assert str(plain.last_report.reason).startswith("identity: a forward hook on layers.1.mlp")  # type: ignore[union-attr]
    salted = store.bind(model, salt="the second mlp, times 1.5")
    assert salted.lookup(ids).tokens == 0
    salted.warm(ids[:, :30])
    assert torch.equal(salted.generate(ids, max_new_tokens=3, do_sample=False), control)
    assert salted.last_report.reused_tokens == 29  # type: ignore[union-attr]
    handle.remove()
    assert plain.lookup(ids).tokens == 30


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("place", ["layers.0", "layers.2.self_attn.k_proj", "rotary_emb"])
def test_every_inner_module_counts(place: str, kind: str) -> None:
    model = build_tiny("llama")
    watch = HookWatch(model)
    assert watch.changed() is False
    handle = getattr(model.model.get_submodule(place), kind)(lambda *_args: None)
    assert watch.changed() is True
    fresh = HookWatch(model)
    assert fresh.changed() is False
    with pytest.raises(UnsupportedRequestError, match=f"a forward hook on {place} "):
        fresh.refuse_unknown()
    handle.remove()
    getattr(model.model.get_submodule(place), kind)(lambda *_args: None)  # as many as before, and another
    assert fresh.changed() is True


def test_hooks_on_the_model_its_head_and_its_embeddings_are_left_alone() -> None:
    model = build_tiny("gemma3")
    watch = HookWatch(model)
    for module in (model, model.model, model.lm_head, model.get_input_embeddings()):
        module.register_forward_hook(lambda *_args: None)
    assert watch.changed() is False
    HookWatch(model).refuse_unknown()


def test_hooks_of_libraries_that_move_tensors_are_left_alone() -> None:
    model = build_tiny("llama")

    def place(*_args: Any) -> None: ...

    place.__module__ = "accelerate.hooks"
    model.model.layers[0].register_forward_pre_hook(place)
    HookWatch(model).refuse_unknown()


def test_the_check_takes_microseconds() -> None:
    model = build_tiny("llama", num_hidden_layers=33)
    watch = HookWatch(model)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        watch.changed()
        times.append(time.perf_counter() - began)
    assert sorted(times)[25] < 1e-3
