from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elsewhere import run_elsewhere
from tiny_media import MEDIA_NAMES, build_seeing
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import ModelParts, ModelWatch, config_fields, fingerprint_model
from kvkeep.keys import model_digest

Build = Callable[..., Any]
PLAIN = ["llama", "mistral", "gemma3", "qwen2"]


PARTS = ("weights", "config", "adapters", "dtypes")


def differing(a: ModelParts, b: ModelParts) -> set[str]:
    return {name for name in PARTS if getattr(a, name) != getattr(b, name)}


def changed_parts(model: nn.Module, other: nn.Module) -> set[str]:
    return differing(fingerprint_model(model), fingerprint_model(other))


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True))


# weights


@pytest.mark.parametrize("kind", PLAIN)
def test_each_parameter_and_persistent_buffer_is_in_weights_alone(build: Build, kind: str) -> None:
    model = build(kind)
    model.model.register_buffer("statistics", torch.arange(3.0))
    parts = fingerprint_model(model)
    seen = {parts.weights}
    tensors = persistent_tensors(model)
    assert "model.statistics" in tensors and len(tensors) > 20
    for name, tensor in tensors.items():
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[-1] += 1e-3
        mutated = fingerprint_model(model)
        assert differing(parts, mutated) == {"weights"}, name
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            assert mutated.weights not in seen, name
        seen.add(mutated.weights)
        with torch.no_grad():
            tensor.copy_(before)
    assert fingerprint_model(model) == parts


def test_two_equally_shaped_weights_swapped_are_other_weights(build: Build) -> None:
    model, swapped = build(), build()
    first, second = (layer.mlp.up_proj for layer in swapped.model.layers)
    first.weight, second.weight = second.weight, first.weight
    assert changed_parts(model, swapped) == {"weights"}


def test_a_tensor_renamed_or_reshaped_is_another(build: Build) -> None:
    model, renamed, reshaped = build(), build(), build()
    model.model.register_buffer("a", torch.arange(6.0))
    renamed.model.register_buffer("b", torch.arange(6.0))
    reshaped.model.register_buffer("a", torch.arange(6.0).view(2, 3))
    assert changed_parts(model, renamed) == {"weights"}
    assert changed_parts(model, reshaped) == {"weights"}


def test_same_bits_in_another_dtype_are_other_weights(build: Build) -> None:
    model, other = build(), build()
    model.model.register_buffer("a", torch.tensor([1, 2], dtype=torch.int16))
    other.model.register_buffer("a", torch.tensor([1, 2], dtype=torch.int16).view(torch.bfloat16))
    assert changed_parts(model, other) == {"weights"}


def test_tied_and_equal_weights_are_the_same_content(build: Build) -> None:
    model = build(tie_word_embeddings=True)
    parts = fingerprint_model(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert fingerprint_model(model) == parts
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert differing(fingerprint_model(model), parts) == {"weights"}


# dtypes


def test_another_dtype_shows_in_weights_and_dtypes(build: Build) -> None:
    model = build()
    half = copy.deepcopy(model).half()
    half.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()  # as from_pretrained keeps it
    assert changed_parts(model, half) == {"weights", "dtypes"}


def test_autocast_is_in_dtypes_alone(build: Build) -> None:
    model = build()
    parts = fingerprint_model(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fingerprint_model(model)
    with torch.autocast("cpu", dtype=torch.float16):
        other = fingerprint_model(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        off = fingerprint_model(model)
    assert differing(parts, cast) == differing(parts, other) == differing(cast, other) == {"dtypes"}
    assert off == parts


# config


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", {"rms_norm_eps": 1e-5}),
        ("llama", {"rms_norm_eps": 1e-6 * (1 + 2**-40)}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
        ("llama", {"rope_theta": 5e5}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("mistral", {"sliding_window": 9}),
        ("mistral", {"sliding_window": None}),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma3", {"query_pre_attn_scalar": 16}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("gemma3", {"hidden_activation": "silu"}),
        ("gemma3", {"rope_theta": 5e5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("phi3", {"original_max_position_embeddings": 8}),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 3 + [2.5]}},
        ),
    ],
)
def test_a_setting_that_changes_kv_is_in_config_alone(build: Build, kind: str, change: dict[str, Any]) -> None:
    assert changed_parts(build(kind), build(kind, **change)) == {"config"}


def test_the_factor_of_dynamic_rope_counts_before_it_acts(build: Build) -> None:
    two, four = (build(rope_scaling={"rope_type": "dynamic", "factor": factor}) for factor in (2.0, 4.0))
    assert torch.equal(two.model.rotary_emb.inv_freq, four.model.rotary_emb.inv_freq)
    assert changed_parts(two, four) == {"config"}


@pytest.mark.parametrize("kind", PLAIN)
def test_each_live_frequency_buffer_is_in_config_alone(build: Build, kind: str) -> None:
    model = build(kind)
    parts = fingerprint_model(model)
    buffers = {n: b for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n}
    assert len(buffers) == (2 if kind == "gemma3" else 1)
    for buffer in buffers.values():
        buffer.mul_(0.5)
        assert differing(parts, fingerprint_model(model)) == {"config"}
        buffer.mul_(2)
    assert fingerprint_model(model) == parts


def test_other_non_persistent_buffers_and_the_rotary_scaling_are_in_config(build: Build) -> None:
    model, scale, scaling = build("gemma3"), build("gemma3"), build()
    scale.model.embed_tokens.embed_scale.mul_(2)
    assert changed_parts(model, scale) == {"config"}
    scaling.model.rotary_emb.attention_scaling = 1.5
    assert changed_parts(build(), scaling) == {"config"}


@pytest.mark.parametrize("kind", ["phi3", "dynamic"])
def test_what_a_long_prompt_does_to_dynamic_rope_is_no_change(build: Build, kind: str) -> None:
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16}
    model = build(kind) if kind == "phi3" else build(**dynamic)
    parts = fingerprint_model(model)
    before = model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(torch.arange(40)[None] % 60 + 3)
    assert not torch.equal(before, model.model.rotary_emb.inv_freq)
    assert fingerprint_model(model) == parts


def test_fields_that_cannot_change_kv_do_not_count(build: Build) -> None:
    model = build()
    parts = fingerprint_model(model)
    changes = {
        "name_or_path": "somewhere/else",
        "_commit_hash": "0" * 40,
        "architectures": ["Renamed"],
        "transformers_version": "9.9",
        "use_cache": False,
        "eos_token_id": [7, 8],
        "pad_token_id": 3,
        "initializer_range": 0.02,
        "attention_dropout": 0.1,
        "output_attentions": False,
        "id2label": {0: "yes", 1: "no"},
        "dtype": torch.float16,
    }
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.generation_config.max_new_tokens = 7
    model.generation_config.cache_implementation = "static"
    assert fingerprint_model(model) == parts
    model.config.rms_norm_eps = 0.5
    assert differing(fingerprint_model(model), parts) == {"config"}


def test_config_fields_can_be_compared_by_name(build: Build) -> None:
    a, b = config_fields(build("mistral")), config_fields(build("mistral", sliding_window=9))
    assert {name for name in a if a[name] != b[name]} == {"sliding_window"}
    assert "rope_theta" not in a and "rope_parameters" not in a
    assert a["head_dim"] == 8


def test_a_head_dimension_left_out_is_the_one_computed(build: Build) -> None:
    assert fingerprint_model(build("mistral", head_dim=None)) == fingerprint_model(build("mistral", head_dim=8))


# attention implementation


def test_implementations_of_the_same_attention_do_not_count(build: Build) -> None:
    sdpa, eager = build(attn_implementation="sdpa"), build(attn_implementation="eager")
    assert (sdpa.config._attn_implementation, eager.config._attn_implementation) == ("sdpa", "eager")
    assert changed_parts(sdpa, eager) == set()


def test_a_users_own_attention_is_in_config(build: Build) -> None:
    AttentionInterface.register("of_my_own", sdpa_attention_forward)
    assert changed_parts(build(), build(attn_implementation="of_my_own")) == {"config"}


# what a model is called and where it lies


@pytest.mark.requirement("R18")
def test_saved_in_shards_and_loaded_again_is_the_same(build: Build, tmp_path: Any) -> None:
    model = build("gemma3")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.name_or_path == str(tmp_path)
    assert changed_parts(model, loaded) == set()


def test_memory_layout_does_not_count(build: Build) -> None:
    model, other = build(), build()
    for parameter in other.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert not other.lm_head.weight.is_contiguous()
    flat = torch.cat([torch.zeros(5), other.model.norm.weight.detach()])
    other.model.norm.weight.data = flat[5:]  # inside a larger storage
    assert changed_parts(model, other) == set()


def test_wrappers_do_not_count(build: Build) -> None:
    model = build()
    parts = fingerprint_model(model)
    assert fingerprint_model(torch.compile(model, backend="eager")) == parts
    assert fingerprint_model(nn.DataParallel(model)) == parts
    assert fingerprint_model(nn.DataParallel(torch.compile(model, backend="eager"))) == parts
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    assert any("_orig_mod" in name for name in model.state_dict())
    assert fingerprint_model(model) == parts


def test_training_mode_gradients_and_threads_do_not_count(build: Build) -> None:
    model = build()
    parts = fingerprint_model(model, threads=1)
    assert fingerprint_model(model, threads=3) == parts
    model.train()
    model(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    assert fingerprint_model(model.requires_grad_(False)) == parts


def test_a_model_made_in_inference_mode_is_the_same(build: Build) -> None:
    with torch.inference_mode():
        born_there = build()
        inside = fingerprint_model(born_there)
    assert inside == fingerprint_model(born_there) == fingerprint_model(build())


def test_use_leaves_the_fingerprint_alone(build: Build) -> None:
    for kind in (*PLAIN, "phi3"):
        model = build(kind)
        parts = fingerprint_model(model)
        model.generate(torch.arange(3, 23)[None], max_new_tokens=4, do_sample=False)
        assert fingerprint_model(model) == parts, kind


def test_the_parts_are_hex_and_make_one_digest(build: Build) -> None:
    parts = fingerprint_model(build())
    assert [len(bytes.fromhex(value)) for value in (parts.weights, parts.config, parts.dtypes)] == [16, 16, 16]
    assert len({parts.weights, parts.config, parts.dtypes}) == 3
    assert parts.adapters is None
    assert len(model_digest(parts.weights, parts.config, parts.adapters, parts.dtypes)) == 32


GOLDEN = (
    "import torch\n"
    "from transformers import LlamaConfig, LlamaForCausalLM\n"
    "from kvkeep.fingerprint import fingerprint_model\n"
    "size = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)\n"
    "model = LlamaForCausalLM(LlamaConfig(**size))\n"
    "with torch.no_grad():\n"
    "    for tensor in (*model.parameters(), model.model.rotary_emb.inv_freq):\n"
    "        tensor.copy_((torch.arange(tensor.numel()) % 64 / 64).view_as(tensor))\n"
    "parts = fingerprint_model(model)\n"
)


def test_every_process_and_both_versions_of_transformers_agree() -> None:
    golden = (
        "e7ac015f87a039684d22923e9ae2d86b",
        "30b39df2f94aff7941c99ae2631328cd",
        None,
        "7e4e82f3a0e920841ee43ef920b6a511",
    )
    here: dict[str, Any] = {}
    exec(GOLDEN, here)
    assert tuple(getattr(here["parts"], name) for name in PARTS) == golden
    (printed,) = run_elsewhere(f"{GOLDEN}print(parts.weights, parts.config, parts.adapters, parts.dtypes)", [])
    assert printed.strip().splitlines()[-1] == " ".join(map(str, golden))


# a name of the caller's own


def test_a_model_id_stands_for_the_weights_alone(build: Build) -> None:
    model, other = build(), build(rms_norm_eps=0.5)
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    mine, theirs = (fingerprint_model(m, model_id="release 7") for m in (model, other))
    assert differing(mine, theirs) == {"config"}
    assert differing(mine, fingerprint_model(model)) == {"weights"}
    assert differing(mine, fingerprint_model(model, model_id="release 8")) == {"weights"}


def test_with_a_model_id_the_weights_may_lie_anywhere(build: Build) -> None:
    model = build()
    parts = fingerprint_model(model, model_id="release 7")
    model.model.layers[1].mlp.up_proj.to("meta")
    model.model.layers[0].mlp.hidden = torch.ones(3)
    assert fingerprint_model(model, model_id="release 7") == parts


# what cannot be fingerprinted


def test_a_parameter_without_content_is_named(build: Build) -> None:
    model = build()
    model.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(UnsupportedRequestError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight is on the meta device"):
        fingerprint_model(model)


@pytest.mark.parametrize(
    "hidden",
    [torch.ones(3), [torch.ones(3)], {"x": torch.ones(3)}, (nn.Linear(1, 1),)],
    ids=["tensor", "list", "dict", "module"],
)
def test_a_module_that_hides_tensors_is_named(build: Build, hidden: Any) -> None:
    model = build()
    model.model.layers[1].mlp.delta = hidden
    with pytest.raises(UnsupportedRequestError, match=r"^model\.layers\.1\.mlp \(\w+MLP\) holds .* 'delta'"):
        fingerprint_model(model)


def test_a_tensor_made_of_tensors_and_a_sparse_one_are_named(build: Build) -> None:
    model = build()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedRequestError, match=r"^mask has the layout torch\.sparse_coo"):
        fingerprint_model(model)
    model.register_buffer("mask", torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
    with pytest.raises(UnsupportedRequestError, match=r"^state_dict\(\)\.mask\."):
        fingerprint_model(model)


def test_a_module_without_a_configuration_is_refused() -> None:
    with pytest.raises(UnsupportedRequestError, match=r"^Linear has no transformers configuration"):
        fingerprint_model(nn.Linear(2, 2))


def test_a_setting_without_canonical_text_is_named(build: Build) -> None:
    model = build()
    model.config.my_extra = {"a": object()}
    with pytest.raises(UnsupportedRequestError, match=r"config\.my_extra\.a holds a object"):
        fingerprint_model(model)


def test_extra_state_counts_and_is_refused_without_canonical_text(build: Build) -> None:
    class Counting(nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

    one, two, odd = build(), build(), build()
    one.model.more, two.model.more, odd.model.more = Counting({"n": 1}), Counting({"n": 2}), Counting(object())
    assert changed_parts(one, two) == {"weights"}
    with pytest.raises(UnsupportedRequestError, match=r"model\.more\._extra_state holds a object"):
        fingerprint_model(odd)


# --- models that see ---


@pytest.mark.parametrize(
    ("name", "inside", "field", "value"),
    [
        ("llava", None, "vision_feature_layer", -2),
        ("llava", None, "projector_hidden_act", "relu"),
        ("llava", "vision_config", "hidden_act", "relu"),
        ("gemma3", None, "mm_tokens_per_image", 1),
        ("gemma3", "vision_config", "layer_norm_eps", 0.5),
        ("qwen2_vl", "vision_config", "spatial_merge_size", 1),
        ("qwen2_5_vl", "vision_config", "fullatt_block_indexes", []),
        ("qwen2_5_vl", "vision_config", "tokens_per_second", 7),
        ("qwen2_5_vl", "text_config", "rms_norm_eps", 0.5),
    ],
)
def test_what_decides_how_a_model_sees_is_in_config_alone_and_watched(
    name: str, inside: str | None, field: str, value: Any
) -> None:
    model = build_seeing(name)
    before, watch = fingerprint_model(model), ModelWatch(model)
    setattr(model.config if inside is None else getattr(model.config, inside), field, value)
    after = fingerprint_model(model)
    assert differing(before, after) == {"config"}
    shown = {"text_config": field, None: f"model.{field}"}.get(inside, f"{inside}.{field}")
    assert {key for key in after.fields if before.fields.get(key) != after.fields[key]} == {shown}
    assert watch.changed() is True


@pytest.mark.parametrize("name", MEDIA_NAMES)
def test_names_and_defaults_of_a_model_that_sees_do_not_count(name: str) -> None:
    model = build_seeing(name)
    before, watch = fingerprint_model(model), ModelWatch(model)
    model.config.vision_config.initializer_range = 0.9
    model.config._name_or_path = model.config.vision_config._name_or_path = "another"
    model.config.vision_config._attn_implementation = "eager"
    assert fingerprint_model(model) == before
    assert watch.changed() is False
    model.config.vision_config._attn_implementation = "the user's own"
    assert differing(before, fingerprint_model(model)) == {"config"}
    assert watch.changed() is True
