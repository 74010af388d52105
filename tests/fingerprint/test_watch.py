from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_cost import assert_two_milliseconds
from torch import nn
from torch.nn.utils import parametrize

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import ModelWatch, fingerprint_model

Build = Callable[..., Any]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def numpy_write(model: Any) -> None:
    model.lm_head.weight.detach().numpy()[:] *= 1.01


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def set_twice(model: Any) -> None:
    weight = model.lm_head.weight
    for _ in range(2):
        weight.data = weight.data.clone()


def same_address(model: Any) -> None:
    """Another storage at the same address, as when memory is freed and given out again."""
    weight = model.lm_head.weight
    weight.data = torch.from_numpy(weight.detach().numpy())


def same_storage(model: Any) -> None:
    """Another place in the same storage, with the same bytes there."""
    norm = model.model.norm.weight
    norm.data = norm.data.as_strided((32,), (1,), 32)


def same_memory(model: Any, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model.lm_head.weight.data = view(model.lm_head.weight.data)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "sgd step": lambda m: step(m, torch.optim.SGD(m.parameters(), lr=0.1, foreach=False)),
    "foreach step": lambda m: step(m, torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True)),
    "fused step": lambda m: step(m, torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)),
    "add_": lambda m: m.model.layers[1].mlp.up_proj.weight.detach().add_(1),
    "copy_": lambda m: m.model.norm.weight.detach().copy_(torch.rand(32)),
    "data.add_": lambda m: m.model.layers[0].mlp.up_proj.weight.data.add_(1e-3),
    "data.copy_": lambda m: m.model.layers[0].mlp.up_proj.weight.data.copy_(torch.rand(48, 32)),
    "numpy": numpy_write,
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
    "data = new": set_twice,
    "data = new at the same address": same_address,
    "data = the same storage": same_storage,
    "parameter replaced": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.detach())),
    "bias added": lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.zeros(64))),
    "tied": lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
    "module replaced": lambda m: setattr(m.model.layers[0], "mlp", type(m.model.layers[1].mlp)(m.config)),
    "modules swapped": lambda m: m.model.layers.insert(0, m.model.layers.pop(1)),
    "module added": lambda m: setattr(m.model.layers[0], "more", nn.Identity()),
    "module removed": lambda m: m.model.layers.pop(1),
    "half": lambda m: m.half(),
    "other dtype, same bits": lambda m: same_memory(m.requires_grad_(False), lambda data: data.view(torch.int32)),
    "other shape, same bits": lambda m: same_memory(m, lambda data: data.view(32, 64)),
    "last rows cut off": lambda m: same_memory(m, lambda data: data[:32]),
    "other strides, same bits": lambda m: same_memory(m, lambda data: data.as_strided((64, 32), (1, 64))),
    "parametrized": lambda m: parametrize.register_parametrization(m.lm_head, "weight", Doubled()),
    "buffer halved": lambda m: m.model.rotary_emb.inv_freq.mul_(0.5),
    "buffer added": lambda m: m.model.register_buffer("more", torch.ones(1)),
    "rotary scaling": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 2.0),
    "setting": lambda m: setattr(m.config, "rms_norm_eps", 0.5),
    "nested setting": lambda m: m.config.nested.append(1),
    "no change": lambda m: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_way_to_change_a_model_is_seen(build: Build, name: str) -> None:
    model = build()
    model.config.nested = [0]
    model.model.norm.weight.data = model.model.norm.weight.data.repeat(2)[:32]
    watch = ModelWatch(model)
    assert watch.changed() is False
    CHANGES[name](model)
    assert watch.changed() is (name != "no change")
    assert watch.changed() is (name != "no change")


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "qwen2"])
def test_each_tensor_is_watched(build: Build, kind: str) -> None:
    model = build(kind)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: tensor for name, tensor in tensors.items() if "original_inv_freq" not in name}
    assert len(tensors) > 20
    for name, tensor in tensors.items():
        watch = ModelWatch(model)
        tensor.data.add_(0.25)
        assert watch.changed(), name


def test_the_watch_made_after_a_change_is_quiet(build: Build) -> None:
    model = build()
    CHANGES["sgd step"](model)
    assert ModelWatch(model).changed() is False


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "qwen2", "phi3", "dynamic"])
def test_use_is_no_change(build: Build, kind: str) -> None:
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16}
    model = build(**dynamic) if kind == "dynamic" else build(kind)
    watch = ModelWatch(model)
    fingerprint_model(model)
    model.generate(torch.arange(3, 43)[None], max_new_tokens=3, do_sample=False)
    model.generate(torch.arange(3, 9)[None], max_new_tokens=3, do_sample=False, cache_implementation="static")
    model.train().requires_grad_(False).eval()
    model.config.use_cache = False
    model.config.pad_token_id = 5
    model.set_attn_implementation("eager")
    assert watch.changed() is False


def test_models_of_inference_mode_are_watched_by_their_bytes(build: Build) -> None:
    with torch.inference_mode():
        model = build()
    watch = ModelWatch(model)
    assert watch.changed() is False
    with torch.inference_mode():
        model.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    assert watch.changed() is True


def test_autocast_is_a_change_while_it_is_on(build: Build) -> None:
    watch = ModelWatch(build_kept := build())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert watch.changed() is True
    assert watch.changed() is False
    del build_kept


def test_a_watch_does_not_keep_the_model_alive_and_knows_that_it_is_gone(build: Build) -> None:
    model = build()
    alive, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    watch = ModelWatch(torch.compile(model, backend="eager"))
    assert watch.changed() is False
    del model
    gc.collect()
    assert alive() is None and weight() is None
    assert watch.changed() is True


def test_without_weights_only_the_rest_is_watched(build: Build) -> None:
    model = build()
    model.lm_head.to("meta")
    watch = ModelWatch(model, weights=False)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert watch.changed() is False
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert watch.changed() is True


def test_a_parameter_without_content_is_refused(build: Build) -> None:
    model = build()
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedRequestError, match=r"^lm_head\.weight is on the meta device"):
        ModelWatch(model)


def test_the_check_takes_two_milliseconds_at_most_for_300_tensors(build: Build) -> None:
    model = build(num_hidden_layers=33)
    assert len(list(model.parameters())) == 300
    assert_two_milliseconds(ModelWatch(model), model)
