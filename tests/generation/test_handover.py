"""generate with a store against generate without one: the same logits, and only the new tokens fed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_NAMES, VOCABULARY, WINDOW, build_tiny
from transformers import GenerationConfig, pipeline

from kvkeep import CacheStore, GenerateReport, compat
from kvkeep.attachment import attachment_of
from kvkeep.bound import BoundStore
from kvkeep.errors import InvalidRequestError, UnsupportedRequestError

PREFIX = 40
REUSED = PREFIX - 1  # the guard feeds one of the tokens that are stored
TOLERANCE = 2e-4  # right is below it in float32, wrong is above 0.1


@pytest.fixture(scope="module", params=TINY_NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return build_tiny(request.param)


@pytest.fixture
def llama() -> Any:
    return build_tiny("llama")


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model)


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


class Fed:
    """Counts the tokens that pass through the embedding layer."""

    def __init__(self, model: Any) -> None:
        self.tokens: list[int] = []
        self._handle = model.get_input_embeddings().register_forward_hook(
            lambda _module, inputs, _output: self.tokens.append(inputs[0].shape[-1])
        )

    def close(self) -> list[int]:
        self._handle.remove()
        return self.tokens


def outcome(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = generate(*args, **{**options, **kwargs})
    return out.sequences, torch.stack(out.logits, dim=1)


def assert_same(ours: tuple[torch.Tensor, torch.Tensor], control: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(ours[0], control[0])
    assert (ours[1] - control[1]).abs().max() < TOLERANCE


def masked(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("cache_implementation", [None, "dynamic", "static"])
@pytest.mark.parametrize(
    ("prompt", "reused"),
    [(PREFIX + 9, REUSED), (PREFIX + 1, REUSED), (PREFIX, REUSED - 1), (PREFIX - 1, REUSED - 2), (1, 0)],
)
def test_every_length_of_prompt_gives_the_control_and_feeds_only_what_is_new(
    model: Any, kv: BoundStore, prompt: int, reused: int, cache_implementation: str | None
) -> None:
    ids = random_ids(PREFIX + 9)
    kv.warm(ids[:, :PREFIX])
    options = {"cache_implementation": cache_implementation}
    control = outcome(model.generate, **masked(ids[:, :prompt]), **options)

    fed = Fed(model)
    ours = outcome(kv.generate, ids[:, :prompt], **options)

    first = [prompt - reused]
    if model.config.model_type == "mistral" and first[0] >= WINDOW:
        first = [1, first[0] - 1]  # no layer keeps the guard's row so long: it has a pass of its own
    assert fed.close() == [*first, 1, 1, 1, 1, 1]
    assert_same(ours, control)
    report = kv.last_report
    assert report is not None
    assert (report.prompt_tokens, report.reused_tokens, report.reason) == (
        prompt,
        reused,
        None if reused else report.reason,
    )


def test_a_diverging_prompt_reuses_what_is_common_or_says_why_not(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX + 9)
    kv.warm(ids[:, :PREFIX])
    other = ids.clone()
    other[0, 30:] = (other[0, 30:] + 1) % VOCABULARY
    control = outcome(model.generate, **masked(other))
    ours = outcome(kv.generate, other)
    assert_same(ours, control)
    report = kv.last_report
    assert report is not None
    if model.config.model_type == "llama":
        assert (report.reused_tokens, report.reason) == (
            29,
            "diverged: the stored prefix goes on otherwise at token 30",
        )
    else:
        assert report.reused_tokens == 0
        assert report.reason is not None
        assert report.reason.startswith("trim: the prompt can use 30 of the entry's 40 tokens")


def test_one_stored_prefix_serves_several_requests_unchanged(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    kv.warm(ids)
    for seed in range(3):
        prompt = torch.cat([ids, random_ids(5, seed=seed)], dim=1)
        assert_same(outcome(kv.generate, prompt), outcome(model.generate, **masked(prompt)))
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == REUSED


def test_sampling_with_one_seed_gives_one_text(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    options = {"do_sample": True, "temperature": 1.3, "top_k": 20, "max_new_tokens": 12}
    torch.manual_seed(7)
    control = outcome(model.generate, **masked(ids), **options)
    torch.manual_seed(7)
    ours = outcome(kv.generate, ids, **options)
    assert_same(ours, control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == REUSED
    torch.manual_seed(8)
    assert not torch.equal(outcome(kv.generate, ids, **options)[0], ours[0])


@pytest.mark.parametrize("named", ["dynamic", "static", "hybrid"])
def test_a_config_that_names_a_cache_kind_is_served_and_left_alone(tmp_path: Path, named: str) -> None:
    model = build_tiny("gemma3")
    model.generation_config.cache_implementation = named
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    control = outcome(model.generate, **masked(ids))
    before = model.generation_config.to_dict()  # 4.57 itself drops "hybrid" from it
    assert_same(outcome(kv.generate, ids), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (REUSED, None)
    assert_same(outcome(model.generate, **kv.prepare(ids)), control)
    assert model.generation_config.to_dict() == before


def test_prepare_gives_arguments_for_the_callers_own_generate(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX + 5)
    control = outcome(model.generate, **masked(ids))
    assert sorted(kv.prepare(ids)) == ["attention_mask", "input_ids"]
    kv.warm(ids[:, :PREFIX])
    fed = Fed(model)
    inputs = kv.prepare(ids)
    assert sorted(inputs) == sorted(["attention_mask", "input_ids", compat.GENERATE_CACHE_ARGUMENT])
    assert_same(outcome(model.generate, **inputs), control)
    assert fed.close()[:2] == [1, 5]  # the guard's token has a pass of its own here


def greedy_of_ones_own(model: Any, input_ids: torch.Tensor, **_others: Any) -> torch.Tensor:
    """What ``custom_generate`` may be: it does with the cache what it likes."""
    for _ in range(3):
        input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], dim=1)
    return input_ids


NEGATIVES: dict[str, dict[str, Any]] = {
    "a negative prompt": {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[5, 9, 11, 4, 8]])},
    "none": {"guidance_scale": 1.7},
}


@pytest.mark.parametrize("negative", NEGATIVES)
def test_guidance_reuses_the_prompt_and_keeps_its_own_cache(model: Any, kv: BoundStore, negative: str) -> None:
    ids = random_ids(PREFIX + 5)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    options |= NEGATIVES[negative]
    control = model.generate(**masked(ids), **options)
    kv.warm(ids[:, :PREFIX])
    ours = kv.generate(ids, **options)
    assert torch.equal(ours.sequences, control.sequences)
    for mine, other in zip(ours.scores, control.scores, strict=True):
        assert (mine - other).abs().max() < 5e-5 * other.abs().max()
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (PREFIX - 1, None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt_lookup_num_tokens": 2, "output_hidden_states": True}, "mode: assisted_generation is not served yet"),
        ({"custom_generate": greedy_of_ones_own}, "mode: custom_generate is not served yet"),
    ],
)
def test_a_mode_that_is_not_proven_runs_without_the_store(
    model: Any, kv: BoundStore, options: dict[str, Any], reason: str
) -> None:
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    options = {"max_new_tokens": 6, "eos_token_id": 2, **options}
    torch.manual_seed(3)
    control = model.generate(**masked(ids), **options)
    torch.manual_seed(3)
    assert torch.equal(kv.generate(ids, **options), control)
    report = kv.last_report
    assert report is not None
    assert (report.reused_tokens, report.reason) == (0, reason)


def test_a_mask_with_a_hole_runs_without_the_store(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    hole = masked(ids)
    hole["attention_mask"][0, 4] = 0
    assert_same(outcome(kv.generate, **hole), outcome(model.generate, **hole))
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("inputs: the attention mask hides tokens that are not padding")


def test_positions_of_the_callers_own_run_without_the_store(llama: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(llama)
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    moved = {**masked(ids), "position_ids": torch.arange(3, PREFIX + 8)[None]}
    control = llama.generate(**moved, max_new_tokens=1, do_sample=False)
    assert torch.equal(kv.generate(**moved, max_new_tokens=1, do_sample=False), control)
    assert kv.last_report is not None
    assert kv.last_report.reason == "positions: position_ids are not 0, 1, 2, ..."


def test_wrong_ways_are_refused_with_what_to_do(llama: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(llama)
    ids = random_ids(PREFIX)
    with pytest.raises(UnsupportedRequestError, match="use_cache=False"):
        kv.generate(ids, use_cache=False)
    with pytest.raises(UnsupportedRequestError, match="use_cache=False"):
        kv.generate(ids, generation_config=GenerationConfig(use_cache=False))
    with pytest.raises(UnsupportedRequestError, match="inputs_embeds"):
        kv.generate(inputs_embeds=llama.get_input_embeddings()(ids))
    with pytest.raises(UnsupportedRequestError, match=r"kv\.save"):
        kv.generate(ids, past_key_values=((torch.zeros(1), torch.zeros(1)),))
    with pytest.raises(InvalidRequestError, match="twice"):
        kv.generate(ids, input_ids=ids)
    llama.train()
    try:
        with pytest.raises(UnsupportedRequestError, match=r"model\.eval\(\)"):
            kv.generate(ids)
        with pytest.raises(UnsupportedRequestError, match="training"):
            kv.save(((torch.zeros(1), torch.zeros(1)),), ids)
    finally:
        llama.eval()


def test_attached_never_raises_for_them_but_steps_aside(llama: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(llama)
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    embeds = llama.get_input_embeddings()(ids).detach()
    cases: list[tuple[dict[str, Any], str]] = [
        ({**masked(ids), "use_cache": False}, "use_cache: the call runs without a cache"),
        ({"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids)}, "inputs: inputs_embeds are not served"),
        (kv.prepare(ids), "cache_given: the call brings a cache of its own"),
    ]
    for inputs, reason in cases:
        control = llama.generate(**masked(ids), max_new_tokens=4, do_sample=False)[:, -4:]
        with kv.attached():
            ours = llama.generate(**inputs, max_new_tokens=4, do_sample=False)[:, -4:]
        assert torch.equal(ours, control)
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (0, reason)


def test_attached_serves_a_pipeline_and_puts_the_model_back_exactly(
    tmp_path: Path, toy_tokenizer: Any, build_tiny: Callable[..., Any]
) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model, toy_tokenizer)
    messages = [{"role": "system", "content": "You answer in the tone of a harbour master, briefly and in order."}]
    kv.warm(messages)
    chat = [*messages, {"role": "user", "content": "Which boat?"}]
    pipe = pipeline("text-generation", model=model, tokenizer=toy_tokenizer)
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    control = pipe(chat, **options)
    marker = model.__dict__["generate"] = model.generate  # somebody's own instance attribute
    before = dict(model.__dict__)

    fed = Fed(model)
    with kv.attached(), kv.attached():
        assert pipe(chat, **options) == control
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == kv.lookup(chat).tokens - 1 > 40
        kv.detach()  # one of two: still attached
        assert pipe(chat, **options) == control
        kv.attach()
    assert fed.close()[0] == kv.last_report.prompt_tokens - kv.last_report.reused_tokens
    assert model.__dict__ == before
    assert model.__dict__["generate"] is marker
    kv.detach()  # too often is harmless
    assert model.__dict__ == before


def test_an_exception_inside_generate_puts_the_model_back(llama: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(llama)
    before = dict(llama.__dict__)

    class StopError(Exception):
        pass

    def criterion(*_: Any, **__: Any) -> Any:
        raise StopError

    with pytest.raises(StopError):
        kv.generate(random_ids(PREFIX), stopping_criteria=[criterion], max_new_tokens=3)
    assert llama.__dict__ == before


def test_threads_on_one_model_do_not_mix_their_calls(llama: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(llama)
    other = CacheStore(tmp_path / "other").bind(llama)
    prompts = [random_ids(PREFIX + 3 + seed, seed=seed) for seed in range(6)]
    for number, prompt in enumerate(prompts):
        (kv if number % 2 else other).warm(prompt[:, : PREFIX - number])
    controls = [outcome(llama.generate, **masked(prompt)) for prompt in prompts]
    failures: list[str] = []

    def work(number: int) -> None:
        bound, reports = (kv if number % 2 else other), list[GenerateReport]()
        for _ in range(4):
            ours = outcome(bound.generate, prompts[number], on_report=reports.append)
            if not torch.equal(ours[0], controls[number][0]) or (ours[1] - controls[number][1]).abs().max() > TOLERANCE:
                failures.append(f"thread {number} got another text")
        if [report.reused_tokens for report in reports] != [REUSED - number] * 4:
            failures.append(f"thread {number} reused {reports}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not {"generate", *compat.SEAM} & set(llama.__dict__)


@pytest.mark.parametrize("named", [None, "static"])
def test_without_the_seam_a_cache_is_passed_in(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    kv = CacheStore(tmp_path / "store").bind(llama)
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    llama.generation_config.cache_implementation = named
    control = outcome(llama.generate, **masked(ids))
    monkeypatch.setattr(compat, "has_seam", lambda _model: False)
    for generate in (
        lambda **options: kv.generate(ids, **options),
        lambda **options: attached(kv, llama, ids, options),
    ):
        fed = Fed(llama)
        assert_same(outcome(generate), control)
        assert fed.close()[:2] == [1, 5]  # the guard's token has a pass of its own here
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (REUSED, None)
    assert torch.equal(
        kv.generate(ids, num_beams=2, max_new_tokens=4), llama.generate(**masked(ids), num_beams=2, max_new_tokens=4)
    )
    assert kv.last_report.reason == "inputs: several sequences and padding are not served here"


def attached(kv: BoundStore, model: Any, ids: torch.Tensor, options: dict[str, Any]) -> Any:
    with kv.attached():
        return model.generate(**masked(ids), **options)


def test_a_model_that_is_let_go_is_not_kept_alive(tmp_path: Path) -> None:
    import gc
    import weakref

    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.generate(random_ids(12), max_new_tokens=2)
    assert attachment_of(model) is attachment_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(InvalidRequestError, match="gone"):
        kv.lookup([1, 2, 3])


def test_without_the_seam_a_cache_of_the_callers_own_stays_theirs(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = CacheStore(tmp_path / "store").bind(llama)
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    control = outcome(llama.generate, **masked(ids))
    monkeypatch.setattr(compat, "has_seam", lambda _model: False)
    mine = kv.load(ids)
    with kv.attached():
        ours = outcome(llama.generate, **masked(ids), **{compat.GENERATE_CACHE_ARGUMENT: mine})
    assert_same(ours, control)
    assert kv.last_report is not None
    assert kv.last_report.reason == "cache_given: the call brings a cache of its own"
    assert compat.cached_tokens(mine) == PREFIX + 10
