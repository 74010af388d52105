"""What versions of transformers say otherwise is brought into one form, and nothing that decides KV is lost in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from one_side import MODELS, configured
from safetensors.torch import load_file
from torch import nn

from kvkeep.fingerprint import ModelParts, config_fields, fingerprint_model
from kvkeep.fingerprint.config import undeclared
from kvkeep.fingerprint.constants import rotary_by_role, says_nothing
from kvkeep.fingerprint.holdings import Holding, anatomy, holdings, state
from kvkeep.fingerprint.saved import _FileForm, _Group, saved_digests
from kvkeep.fingerprint.tensors import tensor_digests

NEWER = hasattr(transformers.PretrainedConfig, "__dataclass_fields__")


def make(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(configured(name, **more))
    return model.eval()


def weights(model: Any) -> dict[str, bytes]:
    parts = anatomy(model)
    tensors, passing, _ = state(model, parts, holdings(model, parts))
    return saved_digests(model, parts, tensors, passing, threads=1)


def differing(one: ModelParts, other: ModelParts) -> set[str]:
    return {part for part in ("weights", "config", "adapters", "dtypes") if getattr(one, part) != getattr(other, part)}


# --- weights ---


@pytest.mark.parametrize("name", ["gpt_neox", "gpt_oss", "granitemoe", "llama", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_weights_are_named_and_shaped_as_in_a_file(name: str, tmp_path: Path) -> None:
    model = make(name, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    assert weights(model) == tensor_digests(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["granitemoe", "mixtral", "qwen3_moe"])
def test_a_loaded_model_has_the_same_form_as_a_built_one(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert differing(fingerprint_model(model), fingerprint_model(loaded)) == set()


@pytest.mark.parametrize("name", ["granitemoe", "mixtral", "qwen3_moe"])
def test_every_element_of_fused_experts_counts(name: str) -> None:
    model = make(name, num_hidden_layers=1)
    before = fingerprint_model(model)
    seen = {before.weights}
    experts = [one for name, one in model.named_parameters() if "expert" in name or "_linear" in name]
    assert experts
    for parameter in experts:
        flat = parameter.detach().view(-1)
        for place in {0, flat.numel() // 2, flat.numel() - 1}:
            flat[place] += 1
            changed = fingerprint_model(model).weights
            assert changed not in seen
            seen.add(changed)
            flat[place] -= 1
    fused = [one for one in experts if one.dim() == 3]
    alike = [one for one in experts if one.shape == experts[0].shape]
    with torch.no_grad():  # the same experts in another order
        if fused:
            fused[0].copy_(fused[0].roll(1, 0))
        else:
            values = [one.clone() for one in alike[:2]]
            alike[0].copy_(values[1])
            alike[1].copy_(values[0])
    assert fingerprint_model(model).weights not in seen


class _Loses:
    def add_tensor(self, target: str, name: str, pattern: str, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def convert(self, name: str, *, model: Any, config: Any) -> dict[str, torch.Tensor]:
        return {name: self.tensor[:1]}


class _Fails(_Loses):
    def convert(self, name: str, *, model: Any, config: Any) -> dict[str, torch.Tensor]:
        raise ValueError(name)


@pytest.mark.parametrize("converter", [_Loses(), _Fails()], ids=["loses", "fails"])
def test_what_cannot_be_rearranged_whole_counts_as_it_is(converter: Any) -> None:
    tensors = {"fused": torch.arange(4.0)}
    group = _Group("split", ("fused",), ("fused",), converter)
    assert _FileForm(None).rearranged(group, tensors) == tensors


def test_two_weights_of_one_name_are_told_apart() -> None:
    form = _FileForm(None)
    names = ("language_model.model.a", "language_model.a", "b")
    assert form.unambiguous(names) == {
        "language_model.model.a": "language_model.a (language_model.model.a)",
        "language_model.a": "language_model.a (language_model.a)",
        "b": "b",
    }


# --- constants ---


def constant(name: str, tensor: torch.Tensor, **attributes: Any) -> Holding:
    module = nn.Module()
    key = name.rpartition(".")[2]
    module.register_buffer(key, tensor, persistent=False)
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    return Holding(name, module, "_buffers", key, "constant")


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("h.0.attn.bias", torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(), True),
        ("h.0.attn.bias", torch.ones(1, 1, 5, 5, dtype=torch.bool).tril().triu(-2), False),
        ("h.0.attn.bias", torch.ones(1, 1, 5, 5, dtype=torch.bool), False),
        ("h.0.attn.bias", torch.ones(1, 1, 5, 5).tril(), False),
        ("h.0.attn.masked_bias", torch.tensor(-1e4), True),
        ("h.0.attn.masked_bias", torch.tensor(-1e9, dtype=torch.float16), True),
        ("h.0.attn.masked_bias", torch.tensor(-1.0), False),
        ("embeddings.position_ids", torch.arange(6)[None], True),
        ("embeddings.position_ids", torch.arange(6)[None] + 1, False),
        ("h.0.attn.scale_attn", torch.tensor(4.0), True),
        ("h.0.attn.scale_attn", torch.tensor(2.0), False),
        ("h.0.attn.other", torch.tensor(-1e4), False),
    ],
)
def test_only_what_says_nothing_says_nothing(name: str, tensor: torch.Tensor, expected: bool) -> None:
    assert says_nothing(constant(name, tensor, head_dim=16)) is expected


def rotary(*named: tuple[str, float, float], depth: int = 3) -> Any:
    held = [constant(name, torch.tensor([1.0, base]), attention_scaling=factor) for name, base, factor in named]
    digests = {one.name: bytes([int(base)]) for one, (_, base, _) in zip(held, named, strict=True)}
    return rotary_by_role(held, digests, [f"model.layers.{n}" for n in range(depth)])[0]


def test_rotary_frequencies_are_one_where_all_layers_rotate_alike() -> None:
    one = {"model.rotary_emb.": (b"\x02", 1.0)}
    assert rotary(("model.rotary_emb.inv_freq", 2, 1.0)) == one
    assert rotary(*((f"model.layers.{n}.self_attn.rotary_emb.inv_freq", 2, 1.0) for n in range(3))) == one
    both = ("model.rotary_emb.inv_freq", 2, 1.0), ("model.layers.0.self_attn.rotary_emb.inv_freq", 2, 1.0)
    assert rotary(*both, depth=1) == one
    # Layers that contradict each other, or some of all, stay as they are.
    assert rotary(*both, depth=2) == {}
    assert rotary(*((f"model.layers.{n}.self_attn.rotary_emb.inv_freq", 2 + n, 1.0) for n in range(3))) == {}
    assert rotary(*((f"model.layers.{n}.self_attn.rotary_emb.inv_freq", 2, 1.0 + n) for n in range(3))) == {}


def test_rotary_frequencies_by_the_kind_of_layer() -> None:
    two = {"model.rotary_emb.full_attention": (b"\x02", 1.0), "model.rotary_emb.sliding_attention": (b"\x03", 1.0)}
    assert rotary(("model.rotary_emb.inv_freq", 2, 1.0), ("model.rotary_emb_local.inv_freq", 3, 1.0)) == two
    assert (
        rotary(
            ("model.rotary_embs.full_attention.inv_freq", 2, 1.0),
            ("model.rotary_embs.sliding_attention.inv_freq", 3, 1.0),
        )
        == two
    )
    assert rotary(("model.rotary_emb.inv_freq", 3, 1.0), ("model.rotary_emb_local.inv_freq", 2, 1.0)) != two


@pytest.mark.parametrize("name", ["gpt2", "qwen2_moe", "stablelm"])
def test_every_live_constant_still_counts(name: str) -> None:
    model = make(name)
    before = fingerprint_model(model)
    for key, buffer in model.named_buffers():
        if "original" in key:
            continue
        old = buffer.clone()
        buffer.logical_not_() if buffer.dtype is torch.bool else buffer.mul_(0.5)
        assert differing(before, fingerprint_model(model)) == {"config"}, key
        buffer.copy_(old)
    assert fingerprint_model(model) == before


# --- configuration ---


def test_a_field_that_the_class_does_not_know_is_not_the_same_as_one_that_it_knows() -> None:
    plain, knowing = make("llama"), make("llama")
    for model in (plain, knowing):
        model.config.new_setting = 3

    class Knowing(transformers.LlamaConfig):
        if NEWER:
            new_setting: int = 3
        else:

            def __init__(self, new_setting: int = 3, **others: Any) -> None:
                super().__init__(**others)
                self.new_setting = new_setting

    knowing.config.__class__ = Knowing
    assert undeclared(plain.config) == {"new_setting"}
    assert undeclared(knowing.config) == set()
    assert config_fields(plain)["new_setting"] == config_fields(knowing)["new_setting"] == 3
    assert differing(fingerprint_model(plain), fingerprint_model(knowing)) == {"config"}


def test_the_limits_of_experts_are_those_that_live_modules_have() -> None:
    model = make("gpt_oss")
    before = fingerprint_model(model)
    assert [config_fields(model)[name] for name in ("swiglu_alpha", "swiglu_limit")] == [(1.702,), (7.0,)]
    model.model.layers[1].mlp.experts.limit = 5.0
    assert differing(before, fingerprint_model(model)) == {"config"}


def test_a_listing_of_layers_that_are_all_full_says_nothing_unless_there_is_a_window() -> None:
    full = ["full_attention"] * 4
    model = make("qwen2")
    bare = fingerprint_model(model).config
    model.config.layer_types, model.config.sliding_window = full, 0
    assert fingerprint_model(model).config == bare
    model.config.sliding_window = 8
    assert fingerprint_model(model).config != bare
    model.config.layer_types, model.config.sliding_window = [*full[1:], "sliding_attention"], None
    assert fingerprint_model(model).config != bare


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "granitemoehybrid", "mamba"])
def test_a_state_that_one_version_rounds_is_another_where_there_is_rounding(name: str) -> None:
    model = make(name)
    assert "computed by" not in config_fields(model)
    assert config_fields(model.to(torch.bfloat16))["computed by"] == ("newer" if NEWER else "older")


@pytest.mark.parametrize("name", ["jamba", "lfm2", "qwen3_next"])
def test_a_state_that_no_version_rounds_is_the_same(name: str) -> None:
    assert "computed by" not in config_fields(make(name).to(torch.bfloat16))


def test_no_limit_of_steps_is_none_and_kinds_of_layers_have_one_name() -> None:
    granite = make("granitemoehybrid")
    found = config_fields(granite)
    assert "time_step_limit" not in found
    assert found["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]
    # It has no positions, so nothing obeys these.
    assert not {"rope_theta", "rope_parameters", "rope_scaling"} & found.keys()
    granite.config.time_step_limit = (0.0, 0.5)
    assert "time_step_limit" in config_fields(granite)


@pytest.mark.parametrize("name", ["jamba", "mamba"])
def test_by_which_steps_a_scan_is_computed_says_nothing(name: str) -> None:
    model = make(name)
    before = fingerprint_model(model).config
    model.config.use_associative_scan, model.config.use_mambapy = False, True
    assert fingerprint_model(model).config == before


def test_attention_that_leaves_out_the_soft_cap_is_another() -> None:
    model = make("llama")
    eager, sdpa = (fields(model, one) for one in ("eager", "sdpa"))
    assert eager == sdpa
    model.config.attn_logit_softcapping = 50.0
    eager, sdpa = (fields(model, one) for one in ("eager", "sdpa"))
    assert {name for name in eager | sdpa if eager.get(name) != sdpa.get(name)} == {"attn_implementation"}


def fields(model: Any, attention: str) -> dict[str, Any]:
    model.set_attn_implementation(attention)
    return config_fields(model)


def test_every_model_that_crosses_can_be_built_here() -> None:
    assert all(configured(name).num_hidden_layers >= 3 for name in MODELS)
