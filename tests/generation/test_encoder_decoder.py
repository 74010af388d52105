"""Encoder-decoder models: what the encoder gave is kept with the decoder's prefix, for exactly this encoder input."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny
from tiny_pairs import FRAMES, PAIR_NAMES, START, build_pair, heard, spoken, watching
from transformers import DynamicCache, EncoderDecoderCache, M2M100Config, M2M100ForConditionalGeneration

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore
from kvkeep.errors import (
    CacheMismatchError,
    InvalidPromptError,
    InvalidRequestError,
    UnsupportedCacheError,
    UnsupportedRequestError,
)

SERVED = tuple(name for name in PAIR_NAMES if name != "t5gemma" or compat.CHUNKS)
"""4.57's generate cuts what T5Gemma sees of its encoder to a window, and is left alone."""

POSITIONS = {"whisper": FRAMES // 2}
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
NEW = OPTIONS["max_new_tokens"]
CACHE = compat.GENERATE_CACHE_ARGUMENT


def prompt(name: str, tokens: int, *, sound: int = 1, ids: int = 5) -> dict[str, torch.Tensor]:
    return {**heard(name, sound), "decoder_input_ids": spoken(tokens, ids)}


def positions(name: str) -> int:
    return POSITIONS.get(name, 20)


@pytest.fixture
def bound(tmp_path: Path) -> Callable[..., tuple[Any, BoundStore]]:
    numbers = itertools.count()

    def bind(name: str, **options: Any) -> tuple[Any, BoundStore]:
        model = build_pair(name)
        return model, CacheStore(tmp_path / str(next(numbers))).bind(model, **options)

    return bind


def assert_same(ours: Any, plain: Any) -> None:
    assert torch.equal(ours.sequences, plain.sequences)
    for one, other in zip(ours.logits, plain.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def prefilled(model: Any, name: str, tokens: int, sound: int = 1) -> Any:
    """A cache that a user filled, with what the model gives first behind it."""
    own = DynamicCache(config=compat.text_config(model))
    cache = EncoderDecoderCache(own, DynamicCache())
    with torch.no_grad():
        model(**prompt(name, tokens, sound=sound), **{compat.forward_cache_argument(model): cache}, use_cache=True)
    return cache


def tensors(cache: Any) -> list[torch.Tensor]:
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    return [rows for part in parts for layer in part.layers for rows in (layer.keys, layer.values)]


# --- generate ---


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("stored", "asked"), [(1, 1), (4, 4), (4, 7), (7, 4), (12, 14)])
def test_neither_the_encoder_nor_a_stored_decoder_token_is_computed_again(
    name: str, stored: int, asked: int, bound: Callable[..., Any]
) -> None:
    model, kv = bound(name)
    entry = kv.warm(prompt(name, stored))
    assert entry.end == stored
    plain = model.generate(**prompt(name, asked), **OPTIONS)
    with watching(model) as fed:
        ours = kv.generate(**prompt(name, asked), **OPTIONS)
    assert_same(ours, plain)
    common = min(stored, asked)
    assert fed.encoder == 0
    assert fed.tokens == [asked - common + 1, *[1] * (NEW - 1)]  # the guard's one is the last common token
    report = kv.last_report
    assert report is not None
    assert report.prompt_tokens == positions(name) + asked
    assert report.reused_tokens == positions(name) + common - 1
    assert (report.reason, report.key) == (None, entry.key)
    match = kv.lookup(prompt(name, asked))
    assert match.tokens == positions(name) + min(common, asked - 1)


@pytest.mark.parametrize("name", SERVED)
def test_without_a_guard_only_new_tokens_are_fed(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name, guard=False)
    kv.warm(prompt(name, 5))
    plain = model.generate(**prompt(name, 8), **OPTIONS)
    with watching(model) as fed:
        ours = kv.generate(prompt(name, 8), **OPTIONS)
    assert_same(ours, plain)
    assert (fed.encoder, fed.tokens[0]) == (0, 3)
    with watching(model) as fed:
        assert_same(kv.generate(prompt(name, 5), **OPTIONS), model.generate(**prompt(name, 5), **OPTIONS))
    assert fed.tokens[0] == 1


@pytest.mark.parametrize("name", SERVED)
def test_what_another_encoder_input_gave_is_never_used(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    kv.warm(prompt(name, 4))
    other = prompt(name, 4, sound=2)
    assert str(kv.lookup(other).reason).startswith("encoder: ")
    assert kv.load(other) is None
    plain = model.generate(**other, **OPTIONS)
    with watching(model) as fed:
        assert_same(kv.generate(**other, **OPTIONS), plain)
    assert (fed.encoder, fed.tokens[0]) == (1, 4)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.prompt_tokens) == (0, positions(name) + 4)
    assert str(kv.last_report.reason).startswith("encoder: ")
    entry = kv.warm(other)
    assert kv.lookup(other).entry.key == entry.key
    assert kv.lookup(prompt(name, 4)).entry.key != entry.key


def test_padding_of_the_encoder_is_part_of_what_it_is_fed(bound: Callable[..., Any]) -> None:
    _, kv = bound("t5")
    ids = heard("t5")["input_ids"]
    kv.warm({"input_ids": ids})
    assert kv.lookup({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert kv.lookup({"input_ids": ids.int().tolist()})
    padded = torch.nn.functional.pad(ids, (0, 3))
    mask = (padded != 0).long()
    assert str(kv.lookup({"input_ids": padded, "attention_mask": mask}).reason).startswith("encoder: ")
    kv.warm({"input_ids": padded, "attention_mask": mask})
    assert kv.lookup({"input_ids": padded, "attention_mask": mask}).tokens == 23
    assert str(kv.lookup({"input_ids": padded}).reason).startswith("encoder: ")
    mask[0, 1] = 0
    assert not kv.lookup({"input_ids": padded, "attention_mask": mask})


@pytest.mark.parametrize("name", SERVED)
def test_warm_without_decoder_ids_keeps_what_the_start_token_needs(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    entry = kv.warm(heard(name))
    assert entry.end == 1
    assert kv.store.read_ids(entry.key).tolist() == [START]
    plain = model.generate(**heard(name), **OPTIONS)
    with watching(model) as fed:
        assert_same(kv.generate(heard(name), **OPTIONS), plain)
    assert fed.encoder == 0
    assert kv.warm(heard(name)) == entry
    no_start = {**heard(name), "decoder_input_ids": spoken(5)[:, 1:]}
    if name != "whisper":  # the only one of them of which generate takes other ids as they are
        longer = kv.warm(no_start)
        assert kv.store.read_ids(longer.key).tolist()[0] == START
        with watching(model) as fed:
            assert_same(kv.generate(no_start, **OPTIONS), model.generate(**no_start, **OPTIONS))
        assert fed.tokens[0] == 1


def test_ids_and_text_are_what_the_encoder_reads(bound: Callable[..., Any]) -> None:
    _, kv = bound("bart")
    ids = heard("bart")["input_ids"]
    entry = kv.warm(ids)
    assert kv.warm(ids[0].tolist()).key == entry.key
    assert kv.lookup({"input_ids": ids}).entry.key == entry.key
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        kv.warm("some text")
    with pytest.raises(InvalidPromptError, match="not chat messages"):
        kv.warm([{"role": "user", "content": "hello"}])


def test_text_is_given_to_the_encoder_with_the_end_that_its_tokenizer_appends(tmp_path: Path) -> None:
    class Appending:
        """A tokenizer that ends every text, as T5's does."""

        def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.tensor([[*(ord(one) % 80 + 3 for one in text), 2]])}

    model = build_pair("t5")
    kv = CacheStore(tmp_path).bind(model)
    kv._reader.tokenizer = Appending()
    entry = kv.warm("four")
    with watching(model) as fed:
        kv.generate("four", max_new_tokens=2)
    assert kv.last_report is not None
    assert (fed.encoder, kv.last_report.key, kv.last_report.reused_tokens) == (0, entry.key, 5)


@pytest.mark.parametrize("name", SERVED)
def test_attached_generate_reuses_the_store_and_is_restored(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    kv.warm(prompt(name, 4))
    plain = model.generate(**prompt(name, 6), **OPTIONS)
    before = dict(vars(model))
    with kv.attached(), watching(model) as fed:
        ours = model.generate(**prompt(name, 6), **OPTIONS)
        again = model.generate(**prompt(name, 6), **OPTIONS)
    assert_same(ours, plain)
    assert_same(again, plain)
    assert fed.encoder == 0
    assert vars(model).keys() == before.keys()


def test_sampling_gives_the_samples_of_a_call_without_a_store(bound: Callable[..., Any]) -> None:
    model, kv = bound("bart")
    kv.warm(prompt("bart", 1))
    options = {**OPTIONS, "do_sample": True, "temperature": 4.0, "max_new_tokens": 8}
    torch.manual_seed(3)
    plain = model.generate(**prompt("bart", 1), **options)
    torch.manual_seed(3)
    ours = kv.generate(**prompt("bart", 1), **options)
    assert_same(ours, plain)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 20


@pytest.mark.parametrize("name", ["bart", "whisper", *(["t5"] if compat.CHUNKS else [])])  # 4.57's own one fails
def test_a_static_cache_is_filled_and_the_encoder_runs_to_size_it(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    kv.warm(prompt(name, 4))
    options = {**OPTIONS, "cache_implementation": "static", "disable_compile": True}
    plain = model.generate(**prompt(name, 6), **options)
    with watching(model) as fed:
        ours = kv.generate(**prompt(name, 6), **options)
    assert_same(ours, plain)
    assert (fed.encoder, fed.tokens[0]) == (1, 3)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 3


def test_hidden_states_of_the_encoder_are_returned_when_they_are_asked_for(bound: Callable[..., Any]) -> None:
    model, kv = bound("t5")
    kv.warm(prompt("t5", 4))
    options = {**OPTIONS, "output_hidden_states": True}
    plain = model.generate(**prompt("t5", 4), **options)
    assert_same(kv.generate(**prompt("t5", 4), **options), plain)  # what returns them was hooked in: asked once more
    with watching(model) as fed:
        ours = kv.generate(**prompt("t5", 4), **options)
    assert (fed.encoder, fed.tokens[0]) == (1, 1)
    for one, other in zip(ours.encoder_hidden_states, plain.encoder_hidden_states, strict=True):
        assert torch.equal(one, other)


ASIDE: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "batch: "),
    "several sequences": ({"num_return_sequences": 2, "do_sample": True}, "batch: "),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2, "eos_token_id": 95}, "mode: "),
    "no cache": ({"use_cache": False}, "use_cache: "),
}


@pytest.mark.parametrize("case", ASIDE)
def test_what_is_not_served_runs_as_without_the_store(case: str, bound: Callable[..., Any]) -> None:
    extra, reason = ASIDE[case]
    model, kv = bound("t5")
    kv.warm(prompt("t5", 4))
    options = {"max_new_tokens": 4, "do_sample": False, **extra}
    torch.manual_seed(1)
    plain = model.generate(**prompt("t5", 4), **options)
    torch.manual_seed(1)
    with kv.attached(), watching(model) as fed:
        ours = model.generate(**prompt("t5", 4), **options)
    assert torch.equal(ours, plain)
    assert fed.encoder >= 1
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith(reason)
    assert kv.last_report.reused_tokens == 0


def test_several_prompts_and_ready_encoder_outputs_step_aside(bound: Callable[..., Any]) -> None:
    model, kv = bound("t5")
    kv.warm(prompt("t5", 4))
    two = {name: torch.cat([value, value]) for name, value in prompt("t5", 4).items()}
    plain = model.generate(**two, **OPTIONS)
    assert_same(kv.generate(**two, **OPTIONS), plain)
    assert kv.last_report is not None
    assert (kv.last_report.prompt_tokens, kv.last_report.reused_tokens) == (48, 0)
    assert str(kv.last_report.reason).startswith("batch: ")
    with torch.no_grad():
        output = model.get_encoder()(**heard("t5"))
    given = {"encoder_outputs": output, "decoder_input_ids": spoken(4)}
    plain = model.generate(**given, **OPTIONS)
    assert_same(kv.generate(**given, **OPTIONS), plain)
    assert str(kv.last_report.reason).startswith("inputs: encoder_outputs came without")
    hidden = {**prompt("t5", 4), "decoder_attention_mask": torch.tensor([[1, 0, 1, 1]])}
    assert_same(kv.generate(**hidden, **OPTIONS), model.generate(**hidden, **OPTIONS))
    assert str(kv.last_report.reason).startswith("inputs: the decoder_attention_mask hides")


def test_embeddings_may_be_what_the_encoder_is_fed(bound: Callable[..., Any]) -> None:
    model, kv = bound("bart")
    embeds = torch.randn((1, 9, 32), generator=torch.Generator().manual_seed(1))
    given = {"inputs_embeds": embeds, "decoder_input_ids": spoken(3)}
    kv.warm(given)
    plain = model.generate(**given, **OPTIONS)
    with watching(model) as fed:
        assert_same(kv.generate(**given, **OPTIONS), plain)
    assert (fed.encoder, fed.tokens[0]) == (0, 1)
    assert not kv.lookup({**given, "inputs_embeds": embeds + 1e-6})


# --- the guard ---


@pytest.mark.parametrize("name", SERVED)
def test_a_row_that_the_model_computes_otherwise_takes_the_encoder_and_all_tokens(
    name: str, bound: Callable[..., Any]
) -> None:
    model, kv = bound(name)
    cache = prefilled(model, name, 6)
    cache.self_attention_cache.layers[1].keys[0, 0, 4] += 1.0
    kv.save(cache, prompt(name, 6), guard=False)
    plain = model.generate(**prompt(name, 6), **OPTIONS)
    with watching(model) as fed:
        ours = kv.generate(**prompt(name, 5), **OPTIONS)
    assert_same(ours, model.generate(**prompt(name, 5), **OPTIONS))
    assert (fed.encoder, fed.tokens[:2]) == (1, [1, 5])
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("guard: ")
    assert kv.last_report.reused_tokens == 0
    assert not kv.lookup(prompt(name, 6))
    assert_same(kv.generate(**prompt(name, 6), **OPTIONS), plain)


@pytest.mark.parametrize("name", SERVED)
def test_cross_rows_of_another_input_are_not_saved(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    cache = prefilled(model, name, 6)
    cache.cross_attention_cache = prefilled(model, name, 6, sound=2).cross_attention_cache
    with pytest.raises(CacheMismatchError, match="does not hold what this model computes"):
        kv.save(cache, prompt(name, 6))
    with pytest.raises(CacheMismatchError, match="does not hold what this model computes"):
        kv.save(prefilled(model, name, 6, sound=2), prompt(name, 6))


# --- save and load ---


@pytest.mark.parametrize("name", PAIR_NAMES)
def test_a_cache_comes_back_bit_for_bit_and_goes_on_as_in_memory(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    cache = prefilled(model, name, 14)
    kept = [rows.clone() for rows in tensors(cache)]
    kv.save(cache, prompt(name, 14))
    assert all(torch.equal(one, other) for one, other in zip(tensors(cache), kept, strict=True))
    again = CacheStore(kv.store.path).bind(model)
    loaded = again.load(prompt(name, 16))
    assert type(loaded) is EncoderDecoderCache
    assert all(torch.equal(one, other) for one, other in zip(tensors(loaded), kept, strict=True))
    assert loaded.get_seq_length() == 14
    assert loaded.is_updated == dict.fromkeys(range(len(loaded.cross_attention_cache.layers)), True)
    new = spoken(16)[:, 14:]
    given = {**heard(name), "decoder_input_ids": new, "use_cache": True}
    with torch.no_grad():
        control = model(**given, **{compat.forward_cache_argument(model): cache}).logits
        logits = model(**given, **{compat.forward_cache_argument(model): loaded}).logits
    assert torch.equal(logits, control)
    assert loaded.cross_attention_cache.get_seq_length() == positions(name)  # not projected and appended once more
    assert loaded.get_seq_length() == 16


def test_a_cache_that_generate_returned_can_be_saved(bound: Callable[..., Any]) -> None:
    model, kv = bound("t5")
    out = model.generate(**prompt("t5", 4), **OPTIONS)
    made = out.sequences[:, :-1]
    entry = kv.save(out[CACHE], {**heard("t5"), "decoder_input_ids": made})
    assert entry.end == made.shape[1]
    with watching(model) as fed:
        kv.generate(**heard("t5"), decoder_input_ids=out.sequences, **OPTIONS)
    assert (fed.encoder, fed.tokens[0]) == (0, 2)


def test_a_static_cache_is_loaded_and_filled_in_place(bound: Callable[..., Any]) -> None:
    model, kv = bound("bart")
    kv.warm(prompt("bart", 5))
    loaded = kv.load(prompt("bart", 6), cache_implementation="static", max_cache_len=32)
    addresses = [layer.keys.data_ptr() for layer in loaded.self_attention_cache.layers]
    with torch.no_grad():
        model(
            **{**heard("bart"), "decoder_input_ids": spoken(6)[:, 5:]},
            **{compat.forward_cache_argument(model): loaded},
        )
    assert loaded.get_seq_length() == 6
    again = kv.load(prompt("bart", 6), into=loaded)
    assert again is loaded
    assert again.get_seq_length() == 5
    assert [layer.keys.data_ptr() for layer in again.self_attention_cache.layers] == addresses
    assert kv.load(prompt("bart", 6, sound=2), into=loaded) is None
    assert loaded.get_seq_length() == 0
    assert not any(loaded.is_updated.values())
    with pytest.raises(InvalidRequestError, match="into="):
        kv.load(prompt("bart", 6), into=DynamicCache())
    with pytest.raises(InvalidRequestError, match="no quantized cache"):
        kv.load(prompt("bart", 6), cache_implementation="quantized")


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("asked", [4, 6])
def test_prepare_gives_the_arguments_of_your_own_generate(name: str, asked: int, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    kv.warm(prompt(name, 4))
    plain = model.generate(**prompt(name, asked), **OPTIONS)
    inputs = kv.prepare(prompt(name, asked))
    with watching(model) as fed:
        ours = model.generate(**inputs, **OPTIONS)
    assert_same(ours, plain)
    assert fed.encoder == 0
    assert fed.tokens[0] == asked - 3
    missed = kv.prepare(prompt(name, asked, sound=2))
    assert CACHE not in missed
    assert_same(model.generate(**missed, **OPTIONS), model.generate(**prompt(name, asked, sound=2), **OPTIONS))


# --- legacy tuples ---


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_legacy_quadruples_go_both_ways(name: str, bound: Callable[..., Any]) -> None:
    model, kv = bound(name)
    cache = prefilled(model, name, 6)
    legacy = kv.to_legacy(cache)
    assert [len(layer) for layer in legacy] == [4] * len(cache.self_attention_cache.layers)
    for number, layer in enumerate(legacy):
        own, cross = (part.layers[number] for part in (cache.self_attention_cache, cache.cross_attention_cache))
        wanted = (own.keys, own.values, cross.keys, cross.values)
        assert all(torch.equal(one, other) for one, other in zip(layer, wanted, strict=True))
    kv.save([list(layer) for layer in legacy], prompt(name, 6))
    loaded = kv.load(prompt(name, 7))
    assert all(torch.equal(one, other) for one, other in zip(tensors(loaded), tensors(cache), strict=True))
    with pytest.raises(CacheMismatchError, match="layer 0 of the tuple is not"):
        kv.save([layer[:2] for layer in legacy], prompt(name, 6))
    short = [(*layer[:2], layer[2][:, :, 1:], layer[3]) for layer in legacy]
    with pytest.raises(CacheMismatchError, match="cross layer 0"):
        kv.save(short, prompt(name, 6))


# --- what is refused ---


def test_a_cache_is_saved_with_what_its_encoder_was_fed(bound: Callable[..., Any]) -> None:
    model, kv = bound("t5")
    cache = prefilled(model, "t5", 6)
    with pytest.raises(InvalidPromptError, match="belongs to what its encoder was fed"):
        kv.save(cache, spoken(6))
    with pytest.raises(InvalidPromptError, match="belongs to what its encoder was fed"):
        kv.save(cache, heard("t5"))
    with pytest.raises(InvalidPromptError, match="input_ids is missing"):
        kv.save(cache, {"decoder_input_ids": spoken(6)})
    with pytest.raises(CacheMismatchError, match="holds 6 tokens and 5 ids"):
        kv.save(cache, prompt("t5", 5))
    with pytest.raises(CacheMismatchError):
        kv.save(cache, prompt("t5", 6, ids=6))
    with pytest.raises(CacheMismatchError, match="positions of an encoder"):
        kv.save(cache, {**prompt("t5", 6), **heard("t5", length=21)})
    with pytest.raises(UnsupportedCacheError, match="fills an EncoderDecoderCache"):
        kv.save(cache.self_attention_cache, prompt("t5", 6))
    with pytest.raises(UnsupportedRequestError, match="save one at a time"):
        kv.save(cache, prompt("t5", 6), attention_mask=torch.ones((1, 6)))
    unheard = copy.deepcopy(cache)
    unheard.cross_attention_cache = DynamicCache()
    with pytest.raises(CacheMismatchError, match="cross-attention layers of the cache are empty"):
        kv.save(unheard, prompt("t5", 6))
    assert kv.store.entries() == []


def test_a_decoder_alone_takes_no_cache_of_two(bound: Callable[..., Any], tmp_path: Path) -> None:
    model, _ = bound("t5")
    cache = prefilled(model, "t5", 6)
    llama = build_tiny("llama")
    kv = CacheStore(tmp_path / "llama").bind(llama)
    with pytest.raises(UnsupportedCacheError, match="fills one without cross-attention layers"):
        kv.save(cache, spoken(6))
    with pytest.raises(UnsupportedCacheError):
        kv.save(cache, spoken(6).repeat(2, 1), attention_mask=torch.ones((2, 6)))
    with pytest.raises(InvalidRequestError, match="into="):
        kv.load(spoken(6), into=cache)


def test_prompts_that_are_none_say_what_to_do(bound: Callable[..., Any]) -> None:
    _, kv = bound("whisper")
    with pytest.raises(InvalidPromptError, match="input_features is missing"):
        kv.warm({"decoder_input_ids": spoken(3)})
    with pytest.raises(InvalidPromptError, match="has 2 rows"):
        kv.warm({"input_features": heard("whisper")["input_features"].repeat(2, 1, 1)})
    with pytest.raises(UnsupportedRequestError, match="comes with decoder_inputs_embeds"):
        kv.warm({**heard("whisper"), "decoder_inputs_embeds": torch.zeros((1, 1, 32))})
    with pytest.raises(UnsupportedRequestError, match="that is no tensor"):
        kv.warm({**heard("whisper"), "something": object()})
    with pytest.raises(InvalidPromptError, match="the encoder does not take this prompt"):
        kv.warm({"input_features": torch.zeros((1, 8, FRAMES - 2))})
    _, kv = bound("t5")
    with pytest.raises(InvalidPromptError, match="the id 96"):
        kv.warm({**heard("t5"), "decoder_input_ids": torch.tensor([[START, 96]])})


def test_without_a_start_token_decoder_ids_are_asked_for(bound: Callable[..., Any]) -> None:
    model, kv = bound("t5")
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = None
    with pytest.raises(InvalidPromptError, match="names no decoder_start_token_id"):
        kv.warm(heard("t5"))
    assert kv.warm(prompt("t5", 3)).end == 3


def test_a_changed_weight_of_the_encoder_is_another_model(bound: Callable[..., Any]) -> None:
    model, kv = bound("bart")
    kv.warm(prompt("bart", 4))
    with torch.no_grad():
        model.get_encoder().layers[0].fc1.weight[0, 0] += 1.0
    reason = kv.lookup(prompt("bart", 4)).reason
    assert str(reason).startswith("weights: ")


def test_whisper_s_own_generate_is_served_in_its_first_pass(bound: Callable[..., Any]) -> None:
    model, kv = bound("whisper")
    config = model.generation_config
    config.is_multilingual = True
    config.lang_to_id, config.task_to_id = {"<|en|>": 90, "<|de|>": 91}, {"transcribe": 92, "translate": 93}
    config.no_timestamps_token_id, config.eos_token_id, config.max_length = 94, 95, 40
    kv.warm(heard("whisper"))
    for extra in ({"language": "en", "task": "transcribe"}, {"language": "de", "return_timestamps": True}):
        options = {"max_new_tokens": 4, **extra}
        plain = model.generate(**heard("whisper"), **options)
        with watching(model) as fed:
            ours = kv.generate(**heard("whisper"), **options)
        assert torch.equal(ours, plain)
        assert fed.encoder == 0
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == FRAMES // 2
    noise = torch.Generator().manual_seed(1)
    whole = {
        "input_features": torch.randn((1, 8, 2 * FRAMES + 20), generator=noise),
        "attention_mask": torch.ones((1, 2 * FRAMES + 20), dtype=torch.long),
    }
    options = {"max_new_tokens": 4, "return_timestamps": True, "language": "en"}
    assert torch.equal(kv.generate(**whole, **options), model.generate(**whole, **options))


def test_a_decoder_that_places_tokens_by_padding_takes_none(tmp_path: Path) -> None:
    sizes = {f"{half}_{what}": 2 for half in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    torch.manual_seed(0)
    config = M2M100Config(
        vocab_size=96, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, init_std=0.3, pad_token_id=0, **sizes
    )
    model = M2M100ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.decoder_start_token_id = START
    kv = CacheStore(tmp_path).bind(model)
    kv.warm(prompt("t5", 4))
    plain = model.generate(**prompt("t5", 6), **OPTIONS)
    with watching(model) as fed:
        assert_same(kv.generate(**prompt("t5", 6), **OPTIONS), plain)
    assert (fed.encoder, fed.tokens[0]) == (0, 3)
    padded = {**heard("t5"), "decoder_input_ids": torch.tensor([[START, 0, 7]])}
    with pytest.raises(UnsupportedRequestError, match="hold 0, which is padding"):
        kv.warm(padded)
    assert_same(kv.generate(**padded, **OPTIONS), model.generate(**padded, **OPTIONS))
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("inputs: ")
