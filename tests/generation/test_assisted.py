"""Tokens that are drafted and then checked, by an assistant or by prompt lookup: a prefix is reused for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, WINDOW, build_tiny

from kvkeep import BoundStore, CacheStore, compat

LENGTH, NEW = 40, 12
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
END = 2
NAMES = ("llama", "mistral", "gemma3")
FULL_ONLY = not compat.DRAFTS_WHOLE
"""Whether assisted decoding keeps sliding layers in full, as no entry does: 4.57."""
COVERED = (0, 1, 2, 17, LENGTH - 1, LENGTH)


def build(name: str, *, seed: int = 0) -> Any:
    model = build_tiny(name, seed=seed)
    model.generation_config.eos_token_id = END  # random weights would end anywhere
    model.generation_config.suppress_tokens = [END]
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture(scope="module")
def assistant() -> Any:
    return build("llama", seed=5)


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model)


def slides(model: Any) -> bool:
    return bool(getattr(model.config, "sliding_window", None))


def repeating(length: int) -> torch.Tensor:
    """Ids that repeat, so that prompt lookup finds something."""
    once = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    return once.repeat(1, length // 9 + 1)[:, :length]


def drafts(kind: str, model: Any, assistant: Any) -> dict[str, Any]:
    if kind == "prompt lookup":
        return {"prompt_lookup_num_tokens": 3}
    return {"assistant_model": model if kind == "itself" else assistant}


def outcome(generate: Any, ids: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(3)
    return generate(ids, attention_mask=torch.ones_like(ids), **{**OPTIONS, **options})


def fed_by(model: Any, work: Any) -> tuple[int, Any]:
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: counts.append(out[..., 0].numel()))
    try:
        result = work()
    finally:
        hook.remove()
    return sum(counts), result


def assert_same(ours: Any, control: Any) -> None:
    assert torch.equal(ours.sequences, control.sequences)
    assert len(ours.logits) == len(control.logits)
    for mine, other in zip(ours.logits, control.logits, strict=True):
        assert (mine - other).abs().max() < 5e-5 * other.abs().max()


@pytest.mark.parametrize("covered", COVERED)
@pytest.mark.parametrize("kind", ["prompt lookup", "another", "itself"])
def test_a_prefix_is_reused_whoever_drafts(model: Any, assistant: Any, kv: BoundStore, kind: str, covered: int) -> None:
    ids, how = repeating(LENGTH), drafts(kind, model, assistant)
    control_fed, control = fed_by(model, lambda: outcome(model.generate, ids, **how))
    if covered:
        kv.warm(ids[:, :covered])
    kv.lookup(ids)  # a model is asked once how it goes on from a cache
    fed, ours = fed_by(model, lambda: outcome(kv.generate, ids, **how))
    assert_same(ours, control)
    report = kv.last_report
    assert report is not None
    matched = min(covered, LENGTH - 1)
    kept = covered <= WINDOW or not (FULL_ONLY and slides(model))
    assert report.reused_tokens == (matched - 1 if matched > 1 and kept else 0), report.reason
    assert kept or str(report.reason).startswith("layout: ")
    assert fed == control_fed - report.reused_tokens
    assert compat.cached_tokens(ours[compat.GENERATE_CACHE_ARGUMENT]) == compat.cached_tokens(
        control[compat.GENERATE_CACHE_ARGUMENT]
    )


@pytest.mark.parametrize("kind", ["prompt lookup", "another"])
def test_padding_before_the_prompt_is_no_obstacle(model: Any, assistant: Any, kv: BoundStore, kind: str) -> None:
    ids, mask = (
        torch.nn.functional.pad(one, (3, 0)) for one in (repeating(LENGTH), torch.ones_like(repeating(LENGTH)))
    )
    inputs = {"input_ids": ids, "attention_mask": mask, **OPTIONS, **drafts(kind, model, assistant)}
    control_fed, control = fed_by(model, lambda: model.generate(**inputs))
    kv.warm(ids[:, 3:30])
    kv.generate(**{**inputs, "max_new_tokens": 1})  # a model is asked once how it places what is padded
    fed, ours = fed_by(model, lambda: kv.generate(**inputs))
    assert_same(ours, control)
    kept, report = not (FULL_ONLY and slides(model)), kv.last_report
    assert report is not None
    assert (report.reused_tokens, report.prompt_tokens) == (26 if kept else 0, LENGTH)
    assert report.reason is None if kept else str(report.reason).startswith("layout: ")
    assert fed == control_fed - (26 + 3 if kept else 0)  # the padding is not fed either


@pytest.mark.parametrize("kind", ["prompt lookup", "another"])
def test_a_wrong_entry_behind_padding_is_refuted_before_anything_is_drafted(
    model: Any, assistant: Any, kv: BoundStore, kind: str
) -> None:
    ids, mask = (
        torch.nn.functional.pad(one, (3, 0)) for one in (repeating(LENGTH), torch.ones_like(repeating(LENGTH)))
    )
    inputs = {"input_ids": ids, "attention_mask": mask, **OPTIONS, **drafts(kind, model, assistant)}
    control, cache = model.generate(**inputs), compat.complete_cache(model.config)
    with torch.no_grad():
        model(
            input_ids=repeating(LENGTH)[:, :6].flip(-1), use_cache=True, **{compat.forward_cache_argument(model): cache}
        )
    kv.save(cache, ids[:, 3:9], guard=False)
    assert_same(kv.generate(**inputs), control)
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("guard: ")


@pytest.mark.parametrize("kind", ["prompt lookup", "another"])
def test_samples_are_those_without_a_store(model: Any, assistant: Any, kv: BoundStore, kind: str) -> None:
    ids, how = repeating(LENGTH), {**drafts(kind, model, assistant), "do_sample": True, "temperature": 0.9}
    control = outcome(model.generate, ids, **how)
    kv.warm(ids[:, :30])
    assert_same(outcome(kv.generate, ids, **how), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == (0 if FULL_ONLY and slides(model) else 29)


def test_a_wrong_entry_is_refuted_before_anything_is_drafted(model: Any, kv: BoundStore) -> None:
    ids, how = repeating(LENGTH), {"prompt_lookup_num_tokens": 3}
    control = outcome(model.generate, ids, **how)
    cache = compat.complete_cache(model.config)
    with torch.no_grad():
        model(ids.flip(1)[:, :30], **{compat.GENERATE_CACHE_ARGUMENT: cache}, use_cache=True)
    kv.save(cache, ids[:, :30], guard=False)
    assert_same(outcome(kv.generate, ids, **how), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:7]) == (0, "guard: ")
    assert kv.store.entries() == []


def test_an_assistant_keeps_its_own_cache(model: Any, assistant: Any, tmp_path: Path) -> None:
    """Both have a store that holds the prompt; the assistant's calls run as if it had none."""
    ids = repeating(LENGTH)
    control = outcome(model.generate, ids, assistant_model=assistant)
    mine = CacheStore(tmp_path / "store").bind(model)
    its = CacheStore(tmp_path / "store").bind(assistant)
    mine.warm(ids[:, :30])
    its.warm(ids[:, :30])
    with mine.attached(), its.attached():
        assert_same(outcome(model.generate, ids, assistant_model=assistant), control)
    assert mine.last_report is not None
    assert its.last_report is not None
    assert mine.last_report.reused_tokens == (0 if FULL_ONLY and slides(model) else 29)
    assert its.last_report.reused_tokens == 0
    assert {entry.end for entry in mine.store.entries()} == {30}


@pytest.mark.parametrize("states", ["output_attentions", "output_hidden_states"])
def test_states_of_every_token_are_not_served(model: Any, kv: BoundStore, states: str) -> None:
    model.set_attn_implementation("eager")
    ids, how = repeating(LENGTH), {"prompt_lookup_num_tokens": 3, states: True}
    control = outcome(model.generate, ids, **how)
    kv.warm(ids[:, :30])
    ours = outcome(kv.generate, ids, **how)
    assert_same(ours, control)
    name = states.removeprefix("output_")
    assert [[one.shape for one in step] for step in ours[name]] == [
        [one.shape for one in step] for step in control[name]
    ]
    assert kv.last_report is not None
    assert kv.last_report.reason == "mode: assisted_generation is not served yet"
