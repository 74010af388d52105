"""Each single ingredient of identity, changed alone, is a miss that names it; each thing beside it stays a hit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_NAMES, VOCABULARY, build_tiny

from kvkeep import CacheStore, Match
from kvkeep.bound import BoundStore

STORED = 30


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))


IDS = random_ids(STORED + 6)


@pytest.fixture(scope="module", params=TINY_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kv(name: str, tmp_path_factory: pytest.TempPathFactory) -> BoundStore:
    """A store with one entry of the model as it was built, which is kept alive."""
    model = build_tiny(name)
    kv = CacheStore(tmp_path_factory.mktemp(name) / "store").bind(model)
    kv.warm(IDS[:, :STORED])
    kv.keep = model  # type: ignore[attr-defined]
    return kv


def looked_up(kv: BoundStore, model: Any) -> Match:
    return CacheStore(kv.store.path, readonly=True).bind(model).lookup(IDS)


# --- ingredients ---


@pytest.mark.requirement("R18")
def test_every_parameter_and_buffer(kv: BoundStore, name: str) -> None:
    """One element of each in turn, in the open and behind every counter."""
    model = build_tiny(name)
    live = CacheStore(kv.store.path, readonly=True).bind(model)
    assert live.lookup(IDS).tokens == STORED
    weights = {key for key, _ in model.named_parameters()}
    holders = [(key, tensor) for key, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.numel()]
    counted = 0
    for key, tensor in holders:
        if key.endswith("original_inv_freq"):
            continue  # what the static kinds of rope start from and never read again
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[tensor.numel() // 2] += 0.25
        part, others = ("weights", "other weights") if key in weights else ("config", f"another config ({key})")
        assert (live.lookup(IDS).tokens, live.lookup(IDS).reason) == (
            0,
            f"{part}: this prefix is stored, but for {others}",
        ), key
        tensor.data = before
        assert live.lookup(IDS).tokens == STORED, key
        counted += 1
    assert counted > 20


CONFIG_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-3, "hidden_act": "relu", "rope_theta": 5e3},
    "mistral": {"rms_norm_eps": 1e-3, "hidden_act": "relu", "rope_theta": 5e3, "sliding_window": 9},
    "gemma3": {
        "rms_norm_eps": 1e-3,
        "hidden_activation": "relu",
        "sliding_window": 9,
        "query_pre_attn_scalar": 64,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
    },
    "gpt_oss": {"rms_norm_eps": 1e-3, "sliding_window": 9, "num_experts_per_tok": 1, "rope_theta": 5e3},
}


@pytest.mark.requirement("R18")
def test_every_config_field_that_changes_kv(kv: BoundStore, name: str) -> None:
    original = build_tiny(name)
    for field, value in CONFIG_FIELDS[name].items():
        if field == "rope_theta" and hasattr(original.config, "rope_parameters"):
            field, value = "rope_parameters", {**original.config.rope_parameters, "rope_theta": value}
        other = build_tiny(name, **{field: value})
        other.load_state_dict(original.state_dict())
        match = looked_up(kv, other)
        assert match.tokens == 0, field
        named = "rotary_emb" if field.startswith("rope") else field
        assert str(match.reason).startswith("config: this prefix is stored, but for another config ("), field
        assert named in str(match.reason), (field, match.reason)


@pytest.mark.requirement("R18")
def test_dtype_rope_autocast_namespace_and_salt(kv: BoundStore, name: str) -> None:
    assert str(looked_up(kv, build_tiny(name).to(torch.float64)).reason).startswith("dtypes: ")
    with torch.autocast("cpu", torch.bfloat16):
        assert looked_up(kv, build_tiny(name)).reason == "dtypes: this prefix is stored, but for other dtypes"
    model = build_tiny(name)
    elsewhere = CacheStore(kv.store.path, readonly=True, namespace="tenant 2").bind(model)
    assert (elsewhere.lookup(IDS).tokens, elsewhere.lookup(IDS).reason) == (
        0,
        "namespace: nothing is stored in this namespace",
    )
    assert str(kv.store.bind(model, salt="policy 2").lookup(IDS).reason).startswith("weights: ")
    assert str(kv.store.bind(model, model_id="mine").lookup(IDS).reason).startswith("weights: ")


def test_a_registered_attention_of_the_users_own(kv: BoundStore, name: str) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("of_my_own", sdpa_attention_forward)
    model = build_tiny(name)
    model.set_attn_implementation("of_my_own")
    assert looked_up(kv, model).reason == (
        "config: this prefix is stored, but for another config (attn_implementation)"
    )


# --- what is none ---


def reloaded(model: Any, tmp_path: Path) -> Any:
    """In several files, under another name."""
    model.save_pretrained(tmp_path / "some other name", max_shard_size="40KB")
    assert len(list((tmp_path / "some other name").glob("*.safetensors"))) > 1
    return type(model).from_pretrained(tmp_path / "some other name").eval()


def shuffled_memory(model: Any, _tmp_path: Path) -> Any:
    """The same values in other memory, transposed and shared."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
        else:
            parameter.data = torch.cat([parameter.data.flatten(), torch.zeros(3)])[:-3].view(parameter.shape)
    return model


def configured(**fields: Any) -> Callable[[Any, Path], Any]:
    def change(model: Any, _tmp_path: Path) -> Any:
        for name, value in fields.items():
            setattr(model.config, name, value)
        return model

    return change


def generation_defaults(model: Any, _tmp_path: Path) -> Any:
    model.generation_config.update(temperature=0.3, max_length=77, do_sample=True, cache_implementation="static")
    return model


def compiled(model: Any, _tmp_path: Path) -> Any:
    return torch.compile(model, backend="eager")


def trained_before(model: Any, _tmp_path: Path) -> Any:
    """Gradients and modes are no content."""
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return model.eval().requires_grad_(False)


def ran_before(model: Any, _tmp_path: Path) -> Any:
    model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=40, do_sample=False)
    return model


@pytest.mark.parametrize(
    "change",
    [
        reloaded,
        shuffled_memory,
        configured(_name_or_path="/elsewhere/model", transformers_version="9.9.9", architectures=["Other"]),
        configured(max_position_embeddings=8192, use_cache=False, attention_dropout=0.4, initializer_range=0.7),
        configured(eos_token_id=5, pad_token_id=6, bos_token_id=7, output_hidden_states=True),
        generation_defaults,
        compiled,
        trained_before,
        ran_before,
        lambda model, _tmp_path: copy.deepcopy(model),
        lambda model, _tmp_path: model.set_attn_implementation("eager") or model,
    ],
    ids=["reloaded", "memory", "names", "limits", "ids", "generation", "compiled", "trained", "ran", "copied", "eager"],
)
@pytest.mark.requirement("R18")
def test_what_changes_no_kv_stays_a_hit(
    kv: BoundStore, name: str, tmp_path: Path, change: Callable[[Any, Path], Any]
) -> None:
    model = change(build_tiny(name), tmp_path)
    assert looked_up(kv, model).tokens == STORED
