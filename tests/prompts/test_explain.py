"""Why a prompt misses: the cause is found from the tokens and the template, and none is named that was not tested."""

from __future__ import annotations

import pytest
import torch
from test_chat_cut import DATED, DROPPING

from kvkeep import CacheStore
from kvkeep.causes import Parting, find_cause
from kvkeep.keys import common_prefix
from kvkeep.prompts import ChatTemplate, read_prompt

SYSTEM = {"role": "system", "content": "You are a kind helper who answers in one word."}
ASK = {"role": "user", "content": "Who are you, and why are you here?"}
DOCUMENTS = [f"Document {n} tells the story of the {word} city." for n, word in enumerate(("old", "new", "big"))]


def asked(documents):
    return [{"role": "user", "content": "\n".join([*documents, "What now?"])}]


STORED_AND_PROMPT = {
    "system": ([SYSTEM, ASK], [{**SYSTEM, "content": "You are a strict helper."}, ASK]),
    "question": ([SYSTEM, ASK], [SYSTEM, {"role": "user", "content": "Where is it?"}]),
    "trailing_space": ("The capital of France is ", "The capital of France is Paris, of course"),
    "merged": ("The capital of Fran", "The capital of France is Paris, of course"),
    "untemplated": ([ASK], ASK["content"]),
    "order": (asked(DOCUMENTS), asked([DOCUMENTS[2], *DOCUMENTS[:2]])),
    "white_space": (asked(DOCUMENTS), asked([DOCUMENTS[0].replace("tells", "tells "), *DOCUMENTS[1:]])),
    None: ("The cow jumped over the moon", "The dog ate all of the shoes"),
}


def cause_of(tokenizer, stored, prompt, given=None, **options):
    template = ChatTemplate(tokenizer=tokenizer, options=options) if tokenizer.chat_template else None
    return find_cause(
        Parting(
            stored=stored,
            prompt=prompt,
            at=common_prefix(stored.int32, prompt.int32),
            tokenizer=tokenizer,
            text=given if isinstance(given, str) else None,
            messages=given if isinstance(given, list) else (),
            template=template,
        )
    )


@pytest.mark.parametrize("code", STORED_AND_PROMPT)
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_the_cause_with_real_tokenizers(name, code, request):
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    stored, prompt = STORED_AND_PROMPT[code]
    cause = cause_of(tokenizer, read_prompt(stored, tokenizer).ids, read_prompt(prompt, tokenizer).ids, prompt)
    assert (None if cause is None else cause.code) == code


def test_two_tokens_that_begin_a_text(gemma_tokenizer):
    stored = read_prompt([SYSTEM, ASK], gemma_tokenizer).ids
    text = gemma_tokenizer.apply_chat_template([SYSTEM, ASK], tokenize=False, add_generation_prompt=True)
    cause = cause_of(gemma_tokenizer, stored, read_prompt(text, gemma_tokenizer).ids, text)
    assert (cause.code, cause.found) == ("double_bos", "the prompt begins with 2 <bos>, what is stored with <bos>")
    assert "add_special_tokens=False" in cause.fix


def test_a_date_of_the_template(make_tokenizer):
    tokenizer = make_tokenizer(DATED)
    stored, prompt = (
        read_prompt([ASK], tokenizer, chat_template_kwargs={"date_string": day}).ids
        for day in ("02 Dec 2026", "03 Dec 2026")
    )
    cause = cause_of(tokenizer, stored, prompt, [ASK], date_string="03 Dec 2026")
    assert cause.code == "template_date"
    assert "'02 Dec 2026' is stored, the prompt says '03 Dec 2026'" in cause.found
    assert "date_string" in cause.fix


def test_thinking_that_is_dropped(make_tokenizer):
    tokenizer = make_tokenizer(DROPPING)
    answer = {"role": "assistant", "content": "A robot.", "reasoning_content": "An easy one."}
    stored = read_prompt([ASK, answer], tokenizer, add_generation_prompt=False).ids
    later = [ASK, answer, {"role": "user", "content": "And I?"}]
    cause = cause_of(tokenizer, stored, read_prompt(later, tokenizer).ids, later)
    assert cause.code == "thinking"
    assert cause.found.startswith("what is stored has a block of thinking there")


@pytest.fixture
def kv(tmp_path, tiny_llama, toy_tokenizer):
    return CacheStore(tmp_path / "store").bind(tiny_llama, toy_tokenizer)


def test_where_it_parts_is_shown_on_both_sides(kv, toy_tokenizer):
    ids = list(range(3, 93))
    assert kv.explain(ids).reason == "empty: nothing is stored"
    kv.warm(ids, name="mine")
    found = kv.explain([*ids[:50], 99, *ids[51:]])
    assert (found.tokens, found.prompt_tokens, found.diverged_at, found.entry.names) == (50, 90, 50, ("mine",))
    assert f"«{toy_tokenizer.decode([ids[50]])}»" in found.stored
    assert f"«{toy_tokenizer.decode([99])}»" in found.prompt
    text = str(found)
    assert text.splitlines()[0] == "reusable    50 of 90 tokens"
    assert "differs at  token 50" in text
    assert kv.explain([*ids, 7]).diverged_at is None


def test_the_nearest_of_many_and_of_a_chain(kv):
    base = [7 * n % 300 + 3 for n in range(600)]
    kv.warm(base[:300])
    for last in range(5):
        kv.warm([*base[:500], 10 + last, 11, 12])
    longest = kv.warm(base)
    found = kv.explain([*base[:580], 5, 5])
    assert (found.entry.key, found.diverged_at, found.tokens) == (longest.key, 580, 580)


def test_a_key_that_differs(kv, tmp_path, tiny_llama, toy_tokenizer, build_tiny):
    ids = list(range(3, 93))
    kv.warm(ids)
    other = build_tiny("llama")
    with torch.no_grad():
        next(other.parameters()).add_(1)
    found = CacheStore(tmp_path / "store").bind(other, toy_tokenizer).explain([*ids, 5])
    assert found.differs == ("weights",)
    assert found.cause.startswith("weights: ")
    tenant = CacheStore(tmp_path / "store", namespace="tenant").bind(tiny_llama, toy_tokenizer).explain([*ids, 5])
    assert tenant.differs == ("namespace",)
    assert tenant.stored is None  # nothing of another namespace's text


@pytest.mark.parametrize("tokens", [60, 600])
def test_one_more_token_at_the_start_hides_no_entry(kv, toy_tokenizer, tokens):
    begin, ids = toy_tokenizer.bos_token_id, [7 * n % 200 + 13 for n in range(tokens)]
    for last in range(3):
        kv.warm([begin, 9, last, *ids])
    wanted = kv.warm([begin, *ids])
    found = kv.explain([begin, begin, *ids, 5])
    assert (found.entry.key, found.diverged_at) == (wanted.key, 1)
    assert found.cause.startswith("double_bos: the prompt begins with 2 ")
