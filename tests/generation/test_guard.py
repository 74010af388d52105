"""The guard: with hashing blind, a live model that computes otherwise is still noticed before anything is sampled."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_NAMES, VOCABULARY, build_tiny
from transformers import (
    DynamicCache,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    StaticCache,
)

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore
from kvkeep.drafting import draft_entry, entry_key
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.guard import LIMITS, limit_for, row_errors
from kvkeep.identity import LiveIdentity
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds
from kvkeep.layouts import LayerState, describe_layers, plan_layers
from kvkeep.prefill import prefill
from kvkeep.prefilling import SLACK
from kvkeep.prefixes import Prefix

STORED, PROMPT = 40, 52
TOLERANCE = 2e-4  # right is below it in float32, wrong is above 0.1


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def outcome(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = generate(*args, **{**options, **kwargs})
    return out.sequences, torch.stack(out.logits, dim=1)


def control_of(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return outcome(model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def assert_same(ours: tuple[torch.Tensor, torch.Tensor], control: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(ours[0], control[0])
    assert (ours[1] - control[1]).abs().max() < TOLERANCE


def states_of(model: Any, ids: torch.Tensor) -> list[LayerState]:
    cache = prefill(model, Inputs(TokenIds.of(ids[0].tolist())))
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    return describe_layers(pairs, plan_layers(compat.text_config(model)), ids.shape[1], slack=SLACK)


def put(kv: BoundStore, model: Any, ids: torch.Tensor, states: list[LayerState]) -> None:
    """Store these states as if they were those of the ids, as a store full of lies would have them."""
    known = TokenIds.of(ids[0].tolist())
    key = entry_key(Prefix(known), kv.identity(), kv.store.namespace_digest)
    kv.store.put(draft_entry(key, known, states, model, None))


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing sees nothing: one identity for every model."""
    hashed = LiveIdentity.current
    first: list[Any] = []

    def constant(self: LiveIdentity) -> Any:
        if not first:
            first.append(hashed(self))
        return first[0]

    monkeypatch.setattr(LiveIdentity, "current", constant)
    monkeypatch.setattr(LiveIdentity, "refresh", constant)
    monkeypatch.setattr(LiveIdentity, "recheck", constant)


# --- what the guard alone stops ---


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(input_ids=random_ids(12), labels=random_ids(12)).loss.backward()
    optimizer.step()
    model.zero_grad()


def merged_adapter(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        low, high = (torch.randn(size, 4, generator=generator) * 0.1 for size in weight.shape)
        weight.data += low @ high.T


def halved_frequencies(model: Any) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                buffer.mul_(0.5)


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("change", [fused_step, merged_adapter, halved_frequencies])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_model_that_changed_unseen_is_stopped(
    blind: None, tmp_path: Path, name: str, change: Callable[[Any], None], cache_implementation: str | None
) -> None:
    model = build_tiny(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    entry = kv.warm(ids[:, :STORED])
    before = control_of(model, ids)
    change(model)
    control = control_of(model, ids, cache_implementation=cache_implementation)
    assert (control[1][:, 0] - before[1][:, 0]).abs().max() > 10 * TOLERANCE  # the change matters
    assert_same(outcome(kv.generate, ids, cache_implementation=cache_implementation), control)
    report = kv.last_report
    assert report is not None
    assert (report.reused_tokens, report.key) == (0, None)
    assert report.reason is not None
    assert report.reason.startswith("guard: a row computed again differs from the stored one by ")
    assert kv.lookup(ids).tokens == 0
    assert [path.name for path in (tmp_path / "store" / "quarantine").glob("*.safetensors")] == [
        f"{entry.key}-0.safetensors"
    ]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_kv_of_another_prompt_is_stopped(tmp_path: Path, name: str) -> None:
    model = build_tiny(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    put(kv, model, ids[:, :STORED], states_of(model, random_ids(STORED, seed=9)))
    assert kv.lookup(ids).tokens == STORED
    assert_same(outcome(kv.generate, ids), control_of(model, ids))
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("guard: ")
    assert kv.lookup(ids).tokens == 0


@pytest.mark.parametrize("role", ["keys", "values"])
def test_one_wrong_row_that_the_model_looks_at_is_stopped(tmp_path: Path, role: str) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    states = states_of(model, ids[:, :STORED])
    states[0].tensors[role][:, STORED - 2] *= -1
    put(kv, model, ids[:, :STORED], states)
    assert_same(outcome(kv.generate, ids), control_of(model, ids))
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("guard: ")


def test_not_a_number_is_no_agreement(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    states = states_of(model, ids[:, :STORED])
    states[1].tensors["keys"][0, STORED - 1, 3] = float("nan")
    put(kv, model, ids[:, :STORED], states)
    assert_same(outcome(kv.generate, ids), control_of(model, ids))
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("guard: a row computed again differs from the stored one by nan")


def test_sampling_and_hidden_states_after_a_stop_are_the_control(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    options = {"do_sample": True, "temperature": 1.2, "output_hidden_states": True, "return_dict_in_generate": True}
    torch.manual_seed(5)
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, **options)
    put(kv, model, ids[:, :STORED], states_of(model, random_ids(STORED, seed=9)))
    torch.manual_seed(5)
    ours = kv.generate(ids, max_new_tokens=9, **options)
    assert str(kv.last_report.reason).startswith("guard: ")  # type: ignore[union-attr]
    assert torch.equal(ours.sequences, control.sequences)
    for mine, theirs in zip(ours.hidden_states, control.hidden_states, strict=True):
        assert [one.shape for one in mine] == [one.shape for one in theirs]
        assert max((a - b).abs().max() for a, b in zip(mine, theirs, strict=True)) < TOLERANCE


def test_where_the_cache_is_passed_in_the_guard_stands_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    monkeypatch.setattr(compat, "has_seam", lambda _model: False)
    for number, generate in enumerate((kv.generate, lambda ids, **kw: model.generate(**kv.prepare(ids), **kw))):
        put(kv, model, ids[:, :STORED], states_of(model, random_ids(STORED, seed=9)))
        assert_same(outcome(generate, ids), control_of(model, ids))
        assert len(list((tmp_path / "store" / "quarantine").glob("*.safetensors"))) == number + 1


# --- who is to blame ---


def test_a_write_that_no_check_sees_costs_the_entry_nothing(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    entry = kv.warm(ids[:, :STORED])
    before = kv.identity()
    weight = model.model.layers[0].self_attn.k_proj.weight
    was = weight[1, 11].item()
    weight.data[1, 11] += 3.0  # between the lines that are sampled
    assert kv.identity() == before
    assert_same(outcome(kv.generate, ids), control_of(model, ids))
    assert kv.last_report is not None
    assert str(kv.last_report.reason).endswith(
        "the model was changed after it was checked, or in a way that no check saw"
    )
    assert kv.identity().weights != before.weights
    assert not list((tmp_path / "store" / "quarantine").glob("*"))
    assert [one.key for one in kv.store.entries()] == [entry.key]
    weight.data[1, 11] = was
    kv.refresh()
    assert_same(outcome(kv.generate, ids), control_of(model, ids))
    assert kv.last_report.reason is None


def test_a_model_that_changes_between_lookup_and_pass_costs_the_entry_nothing(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    entry = kv.warm(ids[:, :STORED])

    def grow(*_args: Any) -> None:
        handle.remove()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)

    handle = model.register_forward_pre_hook(grow)
    ours = outcome(kv.generate, ids)
    assert_same(ours, control_of(model, ids))
    assert str(kv.last_report.reason).endswith("or in a way that no check saw")  # type: ignore[union-attr]
    assert [one.key for one in kv.store.entries()] == [entry.key]


def test_a_model_that_can_no_longer_be_hashed_raises_nothing(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    kv.warm(ids[:, :STORED])
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        mlp.kept = forward(hidden) * 1.5  # a tensor in a plain attribute
        return mlp.kept

    mlp.forward = keep
    control = control_of(model, ids)
    del mlp.kept
    assert_same(outcome(kv.generate, ids), control)
    assert str(kv.last_report.reason).startswith("identity: model.layers.1.mlp ")  # type: ignore[union-attr]


def test_what_a_read_only_store_found_wrong_stays_passed_over(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    put(kv, model, ids[:, :STORED], states_of(model, random_ids(STORED, seed=9)))
    reader = CacheStore(tmp_path / "store", readonly=True).bind(model)
    assert reader.lookup(ids).tokens == STORED
    for seed in range(3):
        assert_same(outcome(reader.generate, ids), control_of(model, ids))
        reason = str(reader.last_report.reason)  # type: ignore[union-attr]
        assert reason.startswith("damaged: the entry was found wrong" if seed else "guard: ")
        kv.warm(random_ids(20, seed=seed + 50))  # the store changes
        reader.store._catalog._index.rebuild()
    assert kv.lookup(ids).tokens == STORED  # nobody else is told
    kv.store.remove(kv.lookup(ids).entry.key)  # type: ignore[union-attr]
    kv.warm(ids[:, :STORED])
    reader.store._catalog._index.rebuild()
    assert reader.lookup(ids).tokens == STORED  # another file under that key


@pytest.mark.parametrize("count", [15, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_that_goes_to_another_expert_refutes_nothing(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=1,
        initializer_range=0.3,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(config).to(dtype).eval()
    kv = CacheStore(tmp_path / "store").bind(model)
    for seed in range(count):
        ids = random_ids(50, seed=seed)
        kv.warm(ids[:, :40])
        kv.generate(ids, max_new_tokens=1)
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (39, None), seed  # type: ignore[union-attr]


def test_a_model_that_changes_while_it_is_prefilled_stores_nothing(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(600)

    def change(_done: int, _total: int) -> None:
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2)

    with pytest.raises(CacheMismatchError, match="changed while its KV was computed: nothing was stored"):
        kv.warm(ids, progress=change)
    assert kv.store.entries() == []


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def test_models_whose_prefixes_serve_no_other_prompt_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(2)
    roberta = RobertaForCausalLM(
        RobertaConfig(**SMALL, num_hidden_layers=2, max_position_embeddings=80, is_decoder=True, pad_token_id=1)
    ).eval()
    text = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3}
    vision = {**SMALL, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8, "vision_use_head": False}
    both_ways = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(text_config={**text, "model_type": "gemma"}, vision_config=vision, image_token_index=2)
    ).eval()
    for model, reason in (
        (roberta, "counts the places of tokens from its padding id in a plain forward pass"),
        (both_ways, "computes a prompt otherwise when it is fed in two parts"),
    ):
        kv = CacheStore(tmp_path / type(model).__name__).bind(model)
        with pytest.raises(UnsupportedCacheError, match=reason):
            kv.warm(random_ids(30))
        assert kv.store.entries() == []


def test_the_guard_can_be_left_out(tmp_path: Path) -> None:
    model = build_tiny("llama")
    ids = random_ids(PROMPT)
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    put(kv, model, ids[:, :STORED], states_of(model, random_ids(STORED, seed=9)))
    wrong = outcome(kv.generate, ids, guard=False)
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (STORED, None)  # type: ignore[union-attr]
    assert (wrong[1] - control_of(model, ids)[1]).abs().max() > 0.1
    without = store.bind(model, guard=False)
    assert torch.equal(outcome(without.generate, ids)[1], wrong[1])
    with without.attached():
        assert torch.equal(control_of(model, ids)[1], wrong[1])
    assert_same(outcome(without.generate, ids, guard=True), control_of(model, ids))


# --- honest hits ---


def honest_hits(name: str, count: int, tmp_path: Path) -> None:
    model = build_tiny(name)
    kv = CacheStore(tmp_path / name).bind(model)
    for seed in range(count):
        choice = random.Random(seed)
        ids = random_ids(choice.randint(6, 160), seed=seed)
        kv.warm(ids[:, : choice.randint(2, ids.shape[1] - 1)])
        kind = choice.choice([None, "static"])
        kv.generate(ids, max_new_tokens=1, do_sample=False, cache_implementation=kind)
        assert kv.last_report is not None
        assert kv.last_report.reason is None, (seed, kv.last_report)
        assert kv.last_report.reused_tokens > 0


@pytest.mark.parametrize("name", TINY_NAMES)
def test_honest_hits_pass(tmp_path: Path, name: str) -> None:
    honest_hits(name, 25, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_thousand_honest_hits_pass(tmp_path: Path, name: str) -> None:
    honest_hits(name, 1000, tmp_path)


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_honest_hits_in_half_precision_pass(tmp_path: Path, name: str, dtype: torch.dtype, count: int) -> None:
    model = build_tiny(name).to(dtype)
    kv = CacheStore(tmp_path / "store").bind(model)
    for seed in range(count):
        ids = random_ids(60, seed=seed)
        kv.warm(ids[:, : 40 + seed // 2])
        kv.generate(ids, max_new_tokens=1)
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (39 + seed // 2, None)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gross_faults_are_stopped_in_half_precision(blind: None, tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_tiny("llama").to(dtype)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    kv.warm(ids[:, :STORED])
    halved_frequencies(model)
    kv.generate(ids, max_new_tokens=1)
    assert str(kv.last_report.reason).startswith("guard: ")  # type: ignore[union-attr]


SUFFIXES = [
    *[(None, suffix) for suffix in (6, 7, 30)],  # the last that fits, the first that does not, and far beyond
    *[("static", suffix) for suffix in (6, 7)],
    *[pytest.param(None, suffix, marks=pytest.mark.slow) for suffix in (1, 8, 9)],
    *[pytest.param("static", suffix, marks=pytest.mark.slow) for suffix in (1, 8, 9, 30)],
]


@pytest.mark.parametrize(("cache_implementation", "suffix"), SUFFIXES)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_row_that_leaves_every_window_is_compared_before(
    blind: None, tmp_path: Path, name: str, suffix: int, cache_implementation: str | None
) -> None:
    """With a window of 8, a suffix of 7 and more pushes the guard's row out of sliding layers."""
    model = build_tiny(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(STORED + suffix)
    kv.warm(ids[:, :STORED])
    control = control_of(model, ids, cache_implementation=cache_implementation)
    assert_same(outcome(kv.generate, ids, cache_implementation=cache_implementation), control)
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (STORED - 1, None)  # type: ignore[union-attr]
    halved_frequencies(model)
    changed = control_of(model, ids, cache_implementation=cache_implementation)
    ours = outcome(kv.generate, ids, cache_implementation=cache_implementation)
    assert str(kv.last_report.reason).startswith("guard: ")  # type: ignore[union-attr]
    assert_same(ours, changed)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # 4.57 under newer torch
def test_a_compiled_forward_is_guarded_and_not_compiled_anew_for_it(blind: None, tmp_path: Path) -> None:
    model = build_tiny("llama", num_hidden_layers=1)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PROMPT)
    kv.warm(ids[:, :STORED])
    graphs: list[int] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=count, dynamic=False)
    control = control_of(model, ids)
    assert_same(outcome(kv.generate, ids), control)
    first = len(graphs)
    for _ in range(3):
        assert_same(outcome(kv.generate, ids), control)
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (STORED - 1, None)  # type: ignore[union-attr]
    assert len(graphs) == first > 0
    cache = user_cache(model, ids[:, :20], "dynamic")
    assert kv.save(cache, ids[:, :20]).tokens == 20
    fused_step(model)
    assert_same(outcome(kv.generate, ids), control_of(model, ids))
    assert str(kv.last_report.reason).startswith("guard: ")  # type: ignore[union-attr]
    torch._dynamo.reset()


# --- saving ---


def user_cache(model: Any, ids: torch.Tensor, kind: str) -> Any:
    config = compat.text_config(model)
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=64)
    with torch.no_grad():
        model(input_ids=ids, **{compat.forward_cache_argument(model): cache}, use_cache=True)
    return cache


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_cache_is_saved_with_its_own_ids_and_model_alone(tmp_path: Path, name: str, kind: str) -> None:
    model = build_tiny(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(30)
    cache = user_cache(model, ids, kind)
    for position in (0, 3, 14, 27, 29, None):  # None: every id is another
        wrong = random_ids(30, seed=2) if position is None else ids.clone()
        if position is not None:
            wrong[0, position] = (wrong[0, position] + 5) % VOCABULARY
        if name == "mistral" and position in (0, 3):
            continue  # nothing that is still cached has seen these tokens
        with pytest.raises(CacheMismatchError, match="not hold what this model computes for these inputs"):
            kv.save(cache, wrong)
    changed = build_tiny(name)
    merged_adapter(changed)
    with pytest.raises(CacheMismatchError, match="not hold what this model computes"):
        kv.store.bind(changed).save(cache, ids)
    assert kv.store.entries() == []
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    assert kv.save(cache, ids).tokens == 30
    for (keys, values), layer in zip(kept, cache.layers, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    assert kv.save(cache, wrong, guard=False).tokens == 30


def test_a_cache_of_one_token_is_checked_too(tmp_path: Path) -> None:
    model = build_tiny("gemma3")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(1)
    cache = user_cache(model, ids, "dynamic")
    with pytest.raises(CacheMismatchError, match="not hold"):
        kv.save(cache, (ids + 1) % VOCABULARY)
    assert kv.save(cache, ids).tokens == 1


# --- limits ---


def test_errors_are_relative_to_each_row() -> None:
    old = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[0.0, 0.0], [60.0, 80.0]]])  # 2 rows, 2 heads
    assert row_errors([(old.clone(), old)]).tolist() == [0.0, 0.0]
    assert row_errors([(old.bfloat16(), old.bfloat16())]).max() == 0.0
    new = old.clone()
    new[0, 1, 1] = 0.5
    new[1, 0, 0] = 1.0
    assert row_errors([(old.clone(), old), (new, old)]).tolist() == pytest.approx([0, 0, 0.1, 0.01])
    assert row_errors([(new[:1], old[:1]), (old[1:], old[1:])]).tolist() == pytest.approx([0.1, 0])
    assert row_errors([(old, old[:1])]).tolist() == pytest.approx([0, (100**2 + 5**2) ** 0.5 / 5])  # one against many


def test_the_limit_is_that_of_the_coarsest_format(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny("llama")
    assert limit_for(model, torch.float32) == LIMITS[torch.float32]
    assert limit_for(model, torch.bfloat16) == LIMITS[torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        assert limit_for(model, torch.float32) == LIMITS[torch.bfloat16]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert limit_for(model, torch.float32) == LIMITS[torch.float16]
    assert limit_for(model.half(), torch.float16) == LIMITS[torch.float16]
