"""Adapters of the real peft library in the fingerprint, part by part, and in the check before each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from check_cost import assert_two_milliseconds
from torch import nn

from kvkeep import CacheStore
from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import ModelParts, ModelWatch, fingerprint_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # peft warns of merging, of second adapters, of tied weights
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TARGETS = ["q_proj", "v_proj"]
PROMPT = list(range(5, 45))
Build = Callable[..., Any]


@pytest.fixture
def llama(build_tiny: Build) -> Any:
    return build_tiny("llama")


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **options})


def fill(model: nn.Module, name: str, seed: int) -> None:
    """Give the tensors of one adapter values that do something (peft starts with a delta of zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in sorted(model.named_parameters()):
            if name in path.split("."):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def adapted(model: Any, config: Any = None, *, name: str = "a", seed: int = 1) -> Any:
    wrapped = peft.get_peft_model(model, config or lora(), adapter_name=name).eval()
    fill(wrapped, name, seed)
    return wrapped


def add(wrapped: Any, name: str, seed: int, config: Any = None) -> None:
    wrapped.add_adapter(name, config or lora())
    fill(wrapped, name, seed)
    wrapped.eval()


PARTS = ("weights", "config", "adapters", "dtypes")


def differing(one: ModelParts, other: ModelParts) -> set[str]:
    return {name for name in PARTS if getattr(one, name) != getattr(other, name)}


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "Linear" and hasattr(module, "scaling")]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


# the bare model


def test_adapters_that_do_not_act_are_the_bare_model(llama: Any) -> None:
    bare, bare_logits = fingerprint_model(llama), logits(llama)
    assert bare.adapters is None
    model = adapted(llama)
    active = fingerprint_model(model)
    assert differing(active, bare) == {"adapters"}
    with model.disable_adapter():
        assert fingerprint_model(model) == bare
        assert torch.equal(logits(model), bare_logits)
    assert fingerprint_model(model) == active
    model.base_model.disable_adapter_layers()
    assert fingerprint_model(model) == bare
    model.base_model.enable_adapter_layers()
    for layer in layers(model):
        layer.set_adapter([])
    assert fingerprint_model(model) == bare
    assert torch.equal(logits(model), bare_logits)
    model.set_adapter("a")
    assert fingerprint_model(model) == active
    assert fingerprint_model(model.unload()) == bare


def test_the_wrapper_and_what_it_wraps_are_the_same(llama: Any) -> None:
    model = adapted(llama)
    parts = fingerprint_model(model)
    for inner in (model.base_model, model.base_model.model, model.get_base_model(), torch.compile(model)):
        assert fingerprint_model(inner) == parts
    assert fingerprint_model(model, model_id="m").adapters == parts.adapters


def test_adapters_of_transformers_itself_are_the_same(
    llama: Any, build_tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers 5.24 asks for a peft that is not published yet; with the one that is, it does what is needed here.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21.0")
    wrapped = adapted(llama)
    parts = fingerprint_model(wrapped)
    model = build_tiny("llama")
    bare = fingerprint_model(model)
    model.add_adapter(lora(), adapter_name="mine")
    model.eval()
    fill(model, "mine", 1)
    assert fingerprint_model(model) == parts
    model.disable_adapters()
    assert fingerprint_model(model) == bare
    model.enable_adapters()
    model.add_adapter(lora(), adapter_name="other")
    fill(model, "other", 2)
    model.set_adapter("mine")
    assert fingerprint_model(model) == parts


def test_an_adapter_loaded_from_disk_is_the_same_under_any_name(llama: Any, build_tiny: Build, tmp_path: Path) -> None:
    model = adapted(llama, lora(lora_dropout=0.1))
    parts = fingerprint_model(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build_tiny("llama"), tmp_path / "a", adapter_name="b").eval()
    assert fingerprint_model(loaded) == parts
    inside = build_tiny("llama")
    inside.load_adapter(str(tmp_path / "a"))
    assert fingerprint_model(inside.eval()) == parts


# what acts


def test_each_tensor_of_an_adapter_is_in_adapters_alone(llama: Any) -> None:
    model = adapted(llama, lora(use_dora=True, bias="none"))
    parts = fingerprint_model(model)
    seen = {parts.adapters}
    mine = {name: tensor for name, tensor in model.named_parameters() if ".a." in name}
    assert len(mine) == 3 * 2 * 3  # layers, targets; A, B and the magnitude
    for name, tensor in mine.items():
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[-1] += 1e-3
        changed = fingerprint_model(model)
        assert differing(changed, parts) == {"adapters"}, name
        assert changed.adapters not in seen, name
        seen.add(changed.adapters)
        with torch.no_grad():
            tensor.copy_(before)
    assert fingerprint_model(model) == parts


def test_each_weight_of_the_bare_model_is_in_weights_alone(llama: Any) -> None:
    model = adapted(llama)
    parts = fingerprint_model(model)
    weights = [tensor for name, tensor in model.named_parameters() if ".a." not in name]
    assert len(weights) == len(list(llama.parameters())) - 3 * 2 * 2 == 3 * 9 + 3
    for tensor in weights:
        with torch.no_grad():
            tensor.view(-1)[0] += 1
        assert differing(fingerprint_model(model), parts) == {"weights"}
        parts = fingerprint_model(model)


EFFECTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "scaling": (lambda m: layers(m)[3].scaling.update(a=2.5), True),
    "set_scale": (lambda m: layers(m)[3].set_scale("a", 0.5), True),
    "scale_layer": (lambda m: layers(m)[3].scale_layer(0.5), True),
    "one layer disabled": (lambda m: layers(m)[3].enable_adapters(False), True),
    "a setting of the layer": (lambda m: setattr(layers(m)[3], "fan_in_fan_out", True), True),
    "idle scaling": (lambda m: layers(m)[3].set_scale("idle", 0.5), False),
    "idle weights": (lambda m: fill(m, "idle", 7), False),
    "idle deleted": (lambda m: m.delete_adapter("idle"), False),
    "another loaded": (lambda m: add(m, "more", 8), False),
    "training mode": (lambda m: m.train().eval().requires_grad_(False), False),
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.requirement("R18")
def test_scales_count_and_idle_adapters_do_not(llama: Any, name: str) -> None:
    model = adapted(llama)
    alone = fingerprint_model(model)
    add(model, "idle", 2)
    assert fingerprint_model(model) == alone
    change, counts = EFFECTS[name]
    change(model)
    assert differing(fingerprint_model(model.eval()), alone) == ({"adapters"} if counts else set())


def test_content_order_and_number_of_active_adapters_count_and_names_do_not(llama: Any) -> None:
    model = adapted(llama)
    add(model, "b", 2)
    add(model, "twin", 1)
    digests: dict[tuple[str, ...], str | None] = {}
    for names in [("a",), ("b",), ("twin",), ("a", "b"), ("b", "a"), ("twin", "b"), ("a", "twin"), ("a", "a")]:
        model.base_model.set_adapter(list(names))
        digests[names] = fingerprint_model(model).adapters
    assert digests["a",] == digests["twin",]
    assert digests["a", "b"] == digests["twin", "b"]
    assert digests["a", "twin"] == digests["a", "a"]
    assert len(set(digests.values())) == 5 and None not in digests.values()


def test_rslora_and_alpha_count(build_tiny: Build) -> None:
    digests = {
        fingerprint_model(adapted(build_tiny("llama"), lora(**options))).adapters
        for options in ({}, {"use_rslora": True}, {"lora_alpha": 9}, {"r": 3}, {"use_dora": True}, {"lora_bias": True})
    }
    assert len(digests) == 6


def test_the_place_of_an_adapter_counts(build_tiny: Build) -> None:
    one, other = (adapted(build_tiny("llama"), lora(target_modules=[f"layers.{i}.self_attn.q_proj"])) for i in (0, 1))
    assert differing(fingerprint_model(one), fingerprint_model(other)) == {"adapters"}


@pytest.mark.requirement("R18")
def test_hot_swap_under_one_name(llama: Any) -> None:
    model = adapted(llama)
    one, watch = fingerprint_model(model), ModelWatch(model)
    model.add_adapter("spare", lora())
    model.delete_adapter("a")
    model.add_adapter("a", lora())
    model.set_adapter("a")
    fill(model, "a", 2)
    assert watch.changed() is True
    two, watch = fingerprint_model(model.eval()), ModelWatch(model)
    assert differing(one, two) == {"adapters"}
    model.delete_adapter("a")
    model.add_adapter("a", lora())
    model.set_adapter("a")
    fill(model, "a", 1)
    assert watch.changed() is True
    assert fingerprint_model(model) == one


def test_weighted_adapters_are_their_content(llama: Any) -> None:
    model = adapted(llama)
    add(model, "b", 2)
    for name, weights in (("even", [0.5, 0.5]), ("odd", [0.3, 0.7]), ("again", [0.5, 0.5])):
        model.add_weighted_adapter(["a", "b"], weights, name, combination_type="linear")
    digests = {}
    for name in ("a", "even", "odd", "again"):
        model.set_adapter(name)
        digests[name] = fingerprint_model(model).adapters
    assert digests["even"] == digests["again"]
    assert len(set(digests.values())) == 3


def test_without_any_adapter_left_it_is_the_bare_model(llama: Any) -> None:
    bare = fingerprint_model(llama)
    model = adapted(llama)
    model.delete_adapter("a")
    assert fingerprint_model(model) == fingerprint_model(model.base_model.model) == bare


def test_two_adapters_around_the_same_experts(build_tiny: Build) -> None:
    bare = fingerprint_model(build_tiny("gpt_oss"))
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    digests = set()
    for names in (experts, experts[:1], experts[1:]):
        model = adapted(build_tiny("gpt_oss"), lora(target_modules=[], target_parameters=names))
        parts = fingerprint_model(model)
        assert differing(parts, bare) == {"adapters"}
        digests.add(parts.adapters)
        logits(model)
        assert fingerprint_model(model) == parts
        with model.disable_adapter():
            assert fingerprint_model(model) == bare
    assert len(digests) == 3


# merged


def test_merged_is_the_model_that_unloading_gives(llama: Any, build_tiny: Build) -> None:
    model = adapted(llama)
    add(model, "b", 2)
    model.set_adapter("a")
    bare = fingerprint_model(build_tiny("llama"))
    watch = ModelWatch(model)
    model.merge_adapter()
    assert watch.changed() is True
    merged = fingerprint_model(model)
    assert differing(merged, bare) == {"weights"}
    assert merged == fingerprint_model(adapted(build_tiny("llama")).merge_and_unload())
    for layer in layers(model):
        layer.set_adapter("b")  # whatever is set, a merged layer computes with the bare weights alone
    assert fingerprint_model(model) == merged


def test_unmerged_weights_are_what_they_are(llama: Any) -> None:
    model = adapted(llama)
    before = fingerprint_model(model)
    copies = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    model.merge_adapter()
    watch = ModelWatch(model)
    model.unmerge_adapter()
    assert watch.changed() is True
    equal = all(torch.equal(tensor, copies[name]) for name, tensor in model.named_parameters())
    assert equal is False  # w + d - d is not w in floating point
    assert differing(fingerprint_model(model), before) == {"weights"}
    for name, tensor in model.named_parameters():
        tensor.data.copy_(copies[name])
    assert fingerprint_model(model) == before


def test_disabled_while_merged_is_a_model_of_its_own(llama: Any) -> None:
    model = adapted(llama)
    model.merge_adapter()
    merged = fingerprint_model(model)
    model.base_model.disable_adapter_layers()  # some versions unmerge here, all do at the next call
    waiting = fingerprint_model(model)
    assert differing(waiting, merged) == {"adapters"}
    logits(model)
    after = fingerprint_model(model)
    assert after.adapters is None and after.weights != merged.weights


# parts that are trained whole


def test_modules_to_save_are_adapters(llama: Any, build_tiny: Build) -> None:
    bare = fingerprint_model(llama)
    model = adapted(llama, lora(modules_to_save=["embed_tokens", "lm_head"]))
    parts = fingerprint_model(model)
    assert differing(parts, bare) == {"adapters"}
    embeddings = model.get_base_model().model.embed_tokens
    for module, part in ((embeddings.modules_to_save["a"], "adapters"), (embeddings.original_module, "weights")):
        kept = module.weight.detach().clone()
        module.weight.data[3, 0] += 1
        assert differing(fingerprint_model(model), parts) == {part}
        module.weight.data.copy_(kept)
    assert fingerprint_model(model) == parts
    with model.disable_adapter():
        assert fingerprint_model(model) == bare
    merged = fingerprint_model(model.merge_and_unload())
    assert differing(merged, bare) == {"weights"}


@pytest.mark.parametrize("tied", [False, True])
def test_trained_tokens_are_adapters(build_tiny: Build, tied: bool) -> None:
    bare = fingerprint_model(build_tiny("llama", tie_word_embeddings=tied))
    model = adapted(build_tiny("llama", tie_word_embeddings=tied), lora(trainable_token_indices=[3, 7]))
    parts = fingerprint_model(model)
    assert differing(parts, bare) == {"adapters"}
    adapter = model.get_base_model().model.embed_tokens.token_adapter
    adapter.trainable_tokens_delta["a"].data[1, 0] += 1
    moved = fingerprint_model(model)
    assert differing(moved, parts) == {"adapters"}
    watch = ModelWatch(model)
    adapter.token_indices["a"][1] = 8
    assert watch.changed() is True
    assert differing(fingerprint_model(model), moved) == {"adapters"}
    with model.disable_adapter():
        assert fingerprint_model(model) == bare


def test_trained_biases_are_weights(build_tiny: Build) -> None:
    bare = fingerprint_model(build_tiny("llama", attention_bias=True))
    model = adapted(build_tiny("llama", attention_bias=True), lora(bias="all"))
    assert differing(fingerprint_model(model), bare) == {"adapters"}
    model.get_base_model().model.layers[0].self_attn.k_proj.bias.data += 1
    with model.disable_adapter():
        assert differing(fingerprint_model(model), bare) == {"weights"}


# other kinds of adapters

KINDS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "lora of embeddings": lambda: lora(target_modules=["embed_tokens", "lm_head"]),
    "lora of a parameter": lambda: lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
    "lora of two parameters": lambda: lora(target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=TARGETS, init_r=3, target_r=2, total_step=10),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(target_modules=TARGETS, r=2),
    "lokr": lambda: peft.LoKrConfig(target_modules=TARGETS, r=2),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=2),
    "oft": lambda: peft.OFTConfig(target_modules=TARGETS, oft_block_size=4),
    "boft": lambda: peft.BOFTConfig(target_modules=TARGETS, boft_block_size=4),
    "ln_tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "fourierft": lambda: peft.FourierFTConfig(target_modules=TARGETS, n_frequency=10),
    "vblora": lambda: peft.VBLoRAConfig(target_modules=["q_proj"], r=2, num_vectors=8, vector_length=16),
    "randlora": lambda: peft.RandLoraConfig(target_modules=["q_proj"], r=2),
    "miss": lambda: peft.MissConfig(target_modules=TARGETS, r=2),
    "shira": lambda: peft.ShiraConfig(target_modules=TARGETS, r=2),
    "c3a": lambda: peft.C3AConfig(target_modules=TARGETS, block_size=4),
    "hra": lambda: peft.HRAConfig(target_modules=TARGETS, r=2),
    "trainable_tokens": lambda: peft.TrainableTokensConfig(token_indices=[5, 6]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters_are_known_by_all_that_they_compute_with(build_tiny: Build, kind: str) -> None:
    plain = build_tiny("llama")
    bare, bare_logits = fingerprint_model(plain), logits(plain)
    model = adapted(build_tiny("llama"), KINDS[kind]())
    parts, before = fingerprint_model(model), logits(model)
    assert not torch.equal(before, bare_logits)
    assert differing(parts, bare) == {"adapters"}
    assert fingerprint_model(copy.deepcopy(model)) == parts
    names = {name for name, _ in plain.named_parameters()}
    tensors = [(name, one) for name, one in model.named_parameters() if name.endswith((".a", ".a.weight"))]
    assert tensors and not names & {name for name, _ in tensors}
    for name, tensor in tensors:
        watch = ModelWatch(model)
        with torch.no_grad():
            tensor.add_(0.25)
        assert watch.changed() is True and watch.weights_changed() is False, name
        changed = fingerprint_model(model)
        assert differing(changed, parts) == {"adapters"}, name
        parts = changed
    with model.disable_adapter():
        assert fingerprint_model(model) == bare
        assert torch.equal(logits(model), bare_logits)


@pytest.mark.parametrize(
    "config",
    [
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_that_lengthen_the_prompt_are_refused_by_name(llama: Any, config: Any, tmp_path: Path) -> None:
    bare = fingerprint_model(llama)
    model = peft.get_peft_model(llama, config).eval()
    with pytest.raises(UnsupportedRequestError, match=rf"^the model has a {config.peft_type.value} adapter"):
        CacheStore(tmp_path).bind(model)
    assert fingerprint_model(model.get_base_model()) == bare


def test_unknown_kinds_are_refused_by_name_or_salted(build_tiny: Build) -> None:
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)
    model = peft.get_peft_model(build_tiny("llama"), config).eval()
    with pytest.raises(UnsupportedRequestError, match=r"\(AdaptionPromptModel\) is a module of peft .*salt="):
        fingerprint_model(model)
    with pytest.raises(UnsupportedRequestError, match=r"^model\.layers\.2\.self_attn \(AdaptedAttention\) .*salt="):
        fingerprint_model(model.get_base_model())
    poly = peft.get_peft_model(build_tiny("llama"), peft.PolyConfig(target_modules=["q_proj"], r=2)).eval()
    with pytest.raises(UnsupportedRequestError, match=r"^model\.layers\.0\.self_attn\.q_proj \(Linear\) .*salt="):
        ModelWatch(poly)
    assert fingerprint_model(poly, salted=True).weights == fingerprint_model(build_tiny("llama")).weights
    assert ModelWatch(poly, salted=True).changed() is False


def test_tensors_hidden_in_an_adapter_are_refused(llama: Any) -> None:
    model = adapted(llama)
    watch = ModelWatch(model)
    layers(model)[0].lora_A["a"].more = [torch.ones(2)]
    with pytest.raises(UnsupportedRequestError, match=r"q_proj \(Linear\) holds tensors in its attribute 'more'"):
        fingerprint_model(model)
    del layers(model)[0].lora_A["a"].more
    layers(model)[0].more = [torch.ones(2)]
    assert watch.changed() is True
    with pytest.raises(UnsupportedRequestError, match=r"q_proj \(Linear\) computes with more, a list; .*salt="):
        fingerprint_model(model)


def test_hooks_that_move_tensors_do_not_count(llama: Any) -> None:
    model = adapted(llama)
    parts = fingerprint_model(model)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(io_same_device=True))
    assert fingerprint_model(model) == parts


def test_an_adapter_that_waits_for_the_prompt_to_invoke_it_is_refused(llama: Any) -> None:
    model = adapted(llama, lora(alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedRequestError, match=r"q_proj has an activated LoRA"):
        fingerprint_model(model, salted=True)


def test_adapters_chosen_by_request_are_refused(llama: Any) -> None:
    model = adapted(llama)
    watch = ModelWatch(model)
    with model._enable_peft_forward_hooks(adapter_names=["__base__"]):
        assert watch.changed() is True
        for options in ({}, {"salted": True}):
            with pytest.raises(UnsupportedRequestError, match=r"q_proj \(Linear\) are chosen by the request"):
                fingerprint_model(model, **options)
    assert watch.changed() is False


class Scaled(nn.Module):
    """A layer of one's own that answers as PEFT's do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.delta = nn.Parameter(torch.ones(base.out_features))
        self.scaling = {"default": 2.0}
        self.active_adapters, self.merged_adapters, self.disable_adapters = ["default"], [], False


def test_a_layer_of_ones_own_is_refused_or_salted(llama: Any) -> None:
    bare = fingerprint_model(llama)
    attention = llama.model.layers[0].self_attn
    attention.q_proj = Scaled(attention.q_proj)
    with pytest.raises(UnsupportedRequestError, match=r"q_proj \(Scaled\) is an adapter layer .* know; .*salt="):
        fingerprint_model(llama)
    parts = fingerprint_model(llama, salted=True)
    assert differing(parts, bare) == {"adapters"}
    attention.q_proj.scaling["default"] = 3.0
    scaled = fingerprint_model(llama, salted=True)
    attention.q_proj.delta.data += 1
    moved = fingerprint_model(llama, salted=True)
    assert differing(parts, scaled) == differing(scaled, moved) == {"adapters"}
    attention.q_proj.disable_adapters = True
    assert fingerprint_model(llama) == bare


# the check before each call


def switch_back(model: Any) -> None:
    model.set_adapter("b")
    model.set_adapter("a")


def by_copy(held: dict[str, Any], key: str) -> None:
    held[key] = copy.deepcopy(held[key])


CHANGES: dict[str, tuple[Callable[[Any], Any], bool, bool]] = {  # whether anything, and whether weights are seen
    "no change": (lambda m: None, False, False),
    "used": (lambda m: m.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=2), False, False),
    "set_adapter": (lambda m: m.set_adapter("b"), True, False),
    "set_adapter and back": (switch_back, False, False),
    "disabled": (lambda m: m.base_model.disable_adapter_layers(), True, False),
    "merged": (lambda m: m.merge_adapter(), True, True),
    "scaling": (lambda m: layers(m)[-1].scaling.update(a=3.0), True, False),
    "scaling replaced": (lambda m: setattr(layers(m)[-1], "scaling", {"a": 3.0, "b": 2.0}), True, False),
    "set_scale": (lambda m: layers(m)[-1].set_scale("a", 3.0), True, False),
    "scale_layer": (lambda m: layers(m)[-1].scale_layer(3.0), True, False),
    "weight": (lambda m: layers(m)[-1].lora_B["a"].weight.data.add_(1e-3), True, False),
    "weight replaced": (lambda m: by_copy(layers(m)[-1].lora_B["a"]._parameters, "weight"), True, False),
    "module replaced": (lambda m: by_copy(layers(m)[-1].lora_B._modules, "a"), True, False),
    "container replaced": (lambda m: by_copy(layers(m)[-1]._modules, "lora_B"), True, False),
    "bare layer replaced": (lambda m: by_copy(layers(m)[-1]._modules, "base_layer"), True, True),
    "bare weight": (lambda m: layers(m)[-1].base_layer.weight.data.add_(1e-3), True, True),
    "deleted": (lambda m: m.delete_adapter("a"), True, False),
    "idle weight": (lambda m: layers(m)[-1].lora_B["b"].weight.data.add_(1e-3), False, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_an_adapter_is_seen(llama: Any, name: str) -> None:
    model = adapted(llama)
    add(model, "b", 2)
    model.set_adapter("a")
    change, seen, weights = CHANGES[name]
    keep = dict(model.named_modules())
    for bound in (model, model.get_base_model()):
        watch = ModelWatch(bound)
        before = fingerprint_model(bound)
        assert watch.changed() is False
    change(model)
    assert (watch.changed(), watch.weights_changed()) == (seen, weights)
    after = fingerprint_model(model)
    assert (after != before) is (seen and (name == "scaling replaced" or "replaced" not in name))
    if not weights:
        assert fingerprint_model(model, weights=before.weights) == after
    del keep


def test_merge_and_unmerge_and_enable_are_seen(llama: Any) -> None:
    model = adapted(llama)
    for change in (
        model.merge_adapter,
        model.unmerge_adapter,
        model.base_model.disable_adapter_layers,
        model.base_model.enable_adapter_layers,
    ):
        watch = ModelWatch(model)
        assert watch.changed() is False
        change()
        assert watch.changed() is True


def test_the_check_takes_two_milliseconds_at_most_for_300_tensors_of_an_adapted_model(build_tiny: Build) -> None:
    model = adapted(build_tiny("llama", num_hidden_layers=23))
    add(model, "b", 2)
    model.set_adapter("a")
    assert len([name for name, _ in model.named_parameters() if ".b." not in name]) == 302
    assert_two_milliseconds(ModelWatch(model), model)


# end to end


@pytest.mark.parametrize("bind_wrapper", [False, True])
def test_a_prefix_is_reused_under_its_own_adapter_alone(build_tiny: Build, tmp_path: Path, bind_wrapper: bool) -> None:
    model = adapted(build_tiny("llama"), lora(task_type="CAUSAL_LM"))
    add(model, "b", 2, lora(task_type="CAUSAL_LM"))
    model.set_adapter("a")
    inner = model.get_base_model()
    kv = CacheStore(tmp_path).bind(model if bind_wrapper else inner)
    prompt = torch.tensor([[*PROMPT, 50, 51, 52]])
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def run() -> tuple[int, str | None, torch.Tensor, torch.Tensor]:
        out = kv.generate(prompt, **options)
        report = kv.last_report
        control = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(out.sequences, control.sequences)
        return report.reused_tokens, report.reason, torch.stack(out.logits), torch.stack(control.logits)

    kv.warm(PROMPT)
    reused, reason, got, control_a = run()
    assert reused >= len(PROMPT) - 1
    torch.testing.assert_close(got, control_a, rtol=1e-4, atol=1e-4)

    model.set_adapter("b")
    reused, reason, got, control_b = run()
    assert (reused, str(reason).split(":")[0]) == (0, "adapters")
    assert torch.equal(got, control_b) and not torch.allclose(control_a, control_b, atol=1e-2)

    with model.disable_adapter():
        reused, reason, got, control = run()
        assert (reused, str(reason).split(":")[0]) == (0, "adapters")
        assert torch.equal(got, control)
        assert kv.identity() == CacheStore(tmp_path).bind(build_tiny("llama")).identity()

    model.set_adapter("a")
    reused, _, got, control = run()
    assert reused >= len(PROMPT) - 1
    assert torch.equal(control, control_a)
    torch.testing.assert_close(got, control_a, rtol=1e-4, atol=1e-4)
