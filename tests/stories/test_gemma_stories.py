"""What people hit with the real Gemma 3 270M, and must not need to know: each story as it happened, then with kvkeep.

The first: a system prompt prefilled into a StaticCache, copied for each request, and refused by generate because the
model's generation config names a cache kind of its own; and then useless, because the raw system prompt is not a
prefix of the chat-templated prompt. The second: a tuple of past_key_values from code of years ago.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StaticCache

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore

SYSTEM = (
    "You are the ticket desk of a small night ferry. Answer in one short sentence. Name the pier and the hour when "
    "asked for a departure. Never promise a cabin. If a traveller is late, tell them to wait at the green lamp."
)
QUESTIONS = ("Which pier?", "I am late, where do I wait?")
TOLERANCE = 5e-3  # logits of this model reach 30; another prefix moves them by far more than 0.1


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def outcome(generate: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = generate(*args, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True, **kwargs)
    return out.sequences, torch.stack(out.logits, dim=1)


def assert_same(ours: tuple[torch.Tensor, torch.Tensor], control: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(ours[0], control[0])
    assert (ours[1] - control[1]).abs().max() < TOLERANCE


def control_inputs(tokenizer: Any, question: str) -> dict[str, torch.Tensor]:
    return dict(
        tokenizer.apply_chat_template(chat(question), add_generation_prompt=True, return_tensors="pt", return_dict=True)
    )


@pytest.fixture
def gemma_naming(gemma: Any, request: pytest.FixtureRequest) -> Any:
    """The model with a generation config that names a cache kind, put back afterwards."""
    before = gemma.generation_config.cache_implementation
    gemma.generation_config.cache_implementation = request.param
    yield gemma
    gemma.generation_config.cache_implementation = before


@pytest.fixture
def kv(gemma: Any, gemma_tokenizer: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(gemma, gemma_tokenizer)


@pytest.mark.parametrize(
    "gemma_naming",
    ["hybrid", pytest.param("static", marks=pytest.mark.slow), pytest.param("dynamic", marks=pytest.mark.slow)],
    indirect=True,
)
def test_one_system_prompt_serves_chat_requests_whatever_the_config_names(
    gemma_naming: Any, gemma_tokenizer: Any, kv: BoundStore
) -> None:
    named = gemma_naming.generation_config.cache_implementation
    entry = kv.warm(chat("")[:1], name="system")
    assert entry.tokens > 40
    for question in QUESTIONS:
        control = outcome(gemma_naming.generate, **control_inputs(gemma_tokenizer, question))
        gemma_naming.generation_config.cache_implementation = named  # 4.57 itself drops "hybrid"
        assert_same(outcome(kv.generate, chat(question)), control)
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (entry.tokens - 1, None)
        gemma_naming.generation_config.cache_implementation = named
        with kv.attached():
            assert_same(outcome(gemma_naming.generate, **control_inputs(gemma_tokenizer, question)), control)
        assert kv.last_report.reused_tokens == entry.tokens - 1


def test_the_raw_system_prompt_is_no_prefix_of_the_chat_and_the_lookup_says_so(
    gemma_tokenizer: Any, kv: BoundStore
) -> None:
    kv.warm(SYSTEM)
    match = kv.lookup(chat(QUESTIONS[0]))
    assert match.tokens <= 1  # <bos> at most
    assert match.reason is not None


@pytest.mark.parametrize("gemma_naming", ["static"], indirect=True)
def test_a_static_cache_prefilled_by_the_user_is_saved_and_serves_several_requests(
    gemma_naming: Any, gemma_tokenizer: Any, kv: BoundStore
) -> None:
    prompts = [control_inputs(gemma_tokenizer, question) for question in QUESTIONS]
    shared = 40
    assert all(torch.equal(p["input_ids"][0, :shared], prompts[0]["input_ids"][0, :shared]) for p in prompts)
    ids = prompts[0]["input_ids"][:, :shared]
    cache = StaticCache(config=gemma_naming.config, max_cache_len=256)
    with torch.no_grad():
        extra = {"cache_position": torch.arange(shared)} if compat.takes(gemma_naming, "cache_position") else {}
        gemma_naming(ids, **{compat.forward_cache_argument(gemma_naming): cache}, use_cache=True, **extra)
    with pytest.raises(ValueError, match="cache_implementation"):  # what happened to them
        gemma_naming.generate(**prompts[0], **{compat.GENERATE_CACHE_ARGUMENT: cache}, max_new_tokens=2)

    kv.save(cache, ids)

    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        control = outcome(gemma_naming.generate, **prompt)
        assert_same(outcome(kv.generate, chat(question)), control)
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == shared - 1
        loaded = kv.load(chat(question), cache_implementation="static", max_cache_len=256)
        assert type(loaded) is StaticCache
        assert [compat.seen_tokens(layer) for layer in loaded.layers] == [shared] * len(loaded.layers)


def test_a_tuple_from_old_code_is_saved_and_generated_from(gemma: Any, gemma_tokenizer: Any, kv: BoundStore) -> None:
    prompt = control_inputs(gemma_tokenizer, QUESTIONS[1])
    ids = prompt["input_ids"]
    with torch.no_grad():
        out = gemma(ids[:, :40], use_cache=True)
    layers = getattr(out, compat.forward_cache_argument(gemma)).layers
    old = tuple((layer.keys, layer.values) for layer in layers)

    assert kv.save(old, ids[:, :40]).tokens == 40

    assert_same(outcome(kv.generate, ids), outcome(gemma.generate, **prompt))
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 39


@pytest.mark.slow
def test_a_prefix_past_the_window_of_512_continues_alike(gemma: Any, gemma_tokenizer: Any, kv: BoundStore) -> None:
    import pydoc_data.topics

    text = pydoc_data.topics.topics["assignment"]
    ids = gemma_tokenizer(text, return_tensors="pt")["input_ids"][:, :720]
    entry = kv.warm(ids[:, :700])
    assert entry.nbytes < 18 * 700 * 2 * 256 * 4  # sliding layers keep their window alone
    control = outcome(gemma.generate, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert_same(outcome(kv.generate, ids), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 699
