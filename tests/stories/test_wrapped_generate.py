"""Libraries that put a generate of their own in front of the model's, in the manner of Unsloth, and what is around it.

Their wrapper calls the one it found, with settings changed on the way: a cache kind for its compiled kernels, autocast,
inference mode. Whoever comes first, the wrapper or kvkeep, each call gives the control's tokens and reuses the prefix.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_models import VOCABULARY, build_tiny
from transformers import GenerationConfig

from kvkeep import CacheStore
from kvkeep.bound import BoundStore

PREFIX = 40
IDS = torch.randint(3, VOCABULARY, (1, PREFIX + 6), generator=torch.Generator().manual_seed(1))
KINDS = ["dynamic", "static"]


def set_in_arguments(_model: Any, kwargs: dict[str, Any], kind: str) -> None:
    kwargs["cache_implementation"] = kind


def set_in_the_config_it_is_given(_model: Any, kwargs: dict[str, Any], kind: str) -> None:
    if "generation_config" in kwargs:
        kwargs["generation_config"].cache_implementation = kind
    else:
        kwargs["cache_implementation"] = kind


def set_in_a_copy_of_the_config(model: Any, kwargs: dict[str, Any], kind: str) -> None:
    kwargs["generation_config"] = copy.deepcopy(kwargs.pop("generation_config", model.generation_config))
    kwargs["generation_config"].cache_implementation = kind


def set_in_the_models_own_config(model: Any, _kwargs: dict[str, Any], kind: str) -> None:
    model.generation_config.cache_implementation = kind


WAYS = [set_in_arguments, set_in_the_config_it_is_given, set_in_a_copy_of_the_config, set_in_the_models_own_config]
Install = Callable[[Any, Callable[..., Any], str], None]


def fast_generate(way: Callable[..., None], kind: str) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and "input_ids" not in kwargs:
            raise TypeError("give input_ids")
        kwargs["pad_token_id"] = kwargs.pop("pad_token_id", None) or self.config.eos_token_id
        kwargs.setdefault("use_cache", True)
        kwargs.pop("token_type_ids", None)
        own = self.generation_config.cache_implementation
        way(self, kwargs, kind)
        self.calls.append(kind)
        try:
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                return self._old_generate(*args, **kwargs)
        finally:
            self.generation_config.cache_implementation = own

    return generate


def on_the_instance(model: Any, generate: Callable[..., Any]) -> None:
    model.calls = []
    model._old_generate = model.generate
    model.generate = types.MethodType(generate, model)


def on_the_class(model: Any, generate: Callable[..., Any]) -> None:
    model.calls = []
    type(model)._old_generate = type(model).generate
    type(model).generate = generate


PLACES = [on_the_instance, on_the_class]


@pytest.fixture
def model() -> Iterator[Any]:
    """A model of a class of its own, which a wrapper may patch."""
    built = build_tiny("gemma3")
    built.__class__ = type("Gemma3ForCausalLM", (type(built),), {"__module__": type(built).__module__})
    return built


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(IDS[:, :PREFIX])
    return kv


def outcome(generate: Callable[..., Any], *args: Any, config: bool, **kwargs: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    if config:  # the caller's own object, of which a wrapper may think what it likes
        settings = {"generation_config": GenerationConfig(**settings, eos_token_id=2)}
    out: torch.Tensor = generate(*args, **settings, **kwargs)
    return out


def assert_hit(kv: BoundStore) -> None:
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (PREFIX - 1, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", [False, True], ids=["settings", "config object"])
def test_a_wrapper_and_kvkeep_in_either_order(
    model: Any, kv: BoundStore, place: Callable[..., None], way: Callable[..., None], kind: str, config: bool
) -> None:
    masked = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    control = outcome(model.generate, config=config, **masked)
    before = model.generation_config.to_dict()

    kv.attach()
    place(model, fast_generate(way, kind))  # while kvkeep is attached
    assert torch.equal(outcome(model.generate, config=config, **masked), control)
    assert_hit(kv)
    assert torch.equal(outcome(kv.generate, IDS, config=config), control)
    assert_hit(kv)
    kv.detach()
    model.calls.clear()
    assert torch.equal(outcome(model.generate, config=config, **masked), control)  # the wrapper is still there
    assert model.calls == [kind]

    with kv.attached():  # and now kvkeep comes after it
        assert torch.equal(outcome(model.generate, config=config, **masked), control)
        assert_hit(kv)
        with kv.attached():
            assert torch.equal(outcome(kv.generate, IDS, config=config), control)
            assert_hit(kv)
    assert torch.equal(outcome(kv.generate, IDS, config=config), control)
    assert_hit(kv)
    assert model.calls == [kind] * 4
    assert model.generation_config.to_dict() == before
    assert ("generate" in vars(model)) == (place is on_the_instance)  # the wrapper's, and nothing of ours


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bound", ["the adapter's", "the inner"])
def test_adapters_around_a_wrapped_model(
    model: Any, tmp_path: Path, place: Callable[..., None], kind: str, bound: str
) -> None:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    place(model, fast_generate(set_in_arguments, kind))
    outer = peft.get_peft_model(model, adapter).eval()
    masked = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    control = outcome(outer.generate, config=False, **masked)
    before = model.generation_config.to_dict()
    kv = CacheStore(tmp_path / "adapted").bind(outer if bound == "the adapter's" else model)
    kv.warm(IDS[:, :PREFIX])
    with kv.attached():
        assert torch.equal(outcome(outer.generate, config=False, **masked), control)
        assert_hit(kv)
    assert torch.equal(outcome(kv.generate, IDS, config=False), control)
    assert_hit(kv)
    assert torch.equal(outcome(outer.generate, config=False, **masked), control)
    assert model.generation_config.to_dict() == before

    chosen = {**masked, "adapter_names": ["__base__"]}  # for one call: the model without its adapter
    other = outcome(outer.generate, config=False, **chosen)
    assert not torch.equal(other, control)
    with kv.attached():
        assert torch.equal(outcome(outer.generate, config=False, **chosen), other)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0
    assert "are chosen by the request" in str(kv.last_report.reason)
