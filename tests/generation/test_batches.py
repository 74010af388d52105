"""Several lines at once: padded prompts, beams, several sequences of one prompt; each line as without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_NAMES, VOCABULARY, build_tiny
from transformers import BartConfig, BartForCausalLM, DynamicCache

import kvkeep.serving
from kvkeep import BoundStore, CacheStore, compat
from kvkeep.errors import CacheMismatchError, InvalidPromptError, InvalidRequestError

STORED, NEW = 30, 4
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows [1, tokens] as a tokenizer pads them: at the left."""
    slots = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (slots - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (slots - r.shape[1], 0)) for r in rows])
    return {"input_ids": ids, "attention_mask": mask}


def build(name: str) -> Any:
    model = build_tiny(name)
    model.generation_config.eos_token_id = None  # random weights would end anywhere
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture
def kv(llama: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(llama)


def outcome(generate: Any, *args: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, and the logits of the first step."""
    torch.manual_seed(3)
    out = generate(*args, **{**OPTIONS, **inputs})
    return out.sequences, out.logits[0]


def fed_by(model: Any, work: Any) -> int:
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: counts.append(out[..., 0].numel()))
    try:
        work()
    finally:
        hook.remove()
    return sum(counts)


def assert_same(ours: tuple[torch.Tensor, torch.Tensor], control: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(ours[0], control[0])
    assert (ours[1] - control[1]).abs().max() < 5e-5 * control[1].abs().max()


def tails(prefix: torch.Tensor, *lengths: int) -> list[torch.Tensor]:
    return [torch.cat([prefix, random_ids(length, seed=length)], dim=1) for length in lengths]


MODES: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({}, 1),
    "beams": ({"num_beams": 3}, 3),
    "several of each": ({"num_return_sequences": 2, "do_sample": True}, 2),
    "beams, several of each": ({"num_beams": 3, "num_return_sequences": 2}, 3),
    "sampled beams": ({"num_beams": 2, "do_sample": True}, 2),
    "static": ({"cache_implementation": "static", "disable_compile": True}, 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(5, 9, 2), (6,), (4, 4)])
def test_lines_with_one_prefix_reuse_it(llama: Any, kv: BoundStore, mode: str, lengths: tuple[int, ...]) -> None:
    options, copies = MODES[mode]
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, *lengths))
    control = outcome(llama.generate, **batch, **options)
    kv.warm(prefix)
    outcome(kv.generate, batch, max_new_tokens=1)  # a model is asked once how it places tokens behind padding
    ours: list[Any] = []
    fed = fed_by(llama, lambda: ours.append(outcome(kv.generate, batch, **options)))
    assert_same(ours[0], control)
    report = kv.last_report
    assert report is not None
    longest = max(lengths)
    # All lines are cut where the prefix of the longest one ends, and the guard has one slot more.
    reused = sum(STORED - (longest - length) - 1 for length in lengths)
    assert (report.prompt_tokens, report.reused_tokens) == (sum(STORED + length for length in lengths), reused)
    assert report.reason in (None, f"diverged: the stored prefix goes on otherwise at token {STORED}")
    slots = longest + 1
    assert fed == len(lengths) * copies * (slots + NEW - 1)


def test_each_line_has_a_prefix_of_its_own(llama: Any, kv: BoundStore) -> None:
    long, short = random_ids(50, seed=7), random_ids(20, seed=8)
    rows = [*tails(long, 3), *tails(short, 12), *tails(long, 9)]
    batch = padded(*rows)
    control = outcome(llama.generate, **batch)
    kv.warm(long)
    assert_same(outcome(kv.generate, batch), control)
    assert kv.last_report is not None
    # Cut where the line begins of which nothing is stored, but for one slot.
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:7]) == ((27 - 6) + 27 - 2, "prefix:")
    kv.warm(short)
    assert_same(outcome(kv.generate, batch), control)
    # The lines begin at 6, 27 and 0: their prefixes end at 56, 47 and 50. All are cut at 47, but for one slot.
    assert kv.last_report.reused_tokens == (47 - 6) + (47 - 27) + 47 - 3


def test_a_line_without_anything_stored_keeps_the_others_from_reuse(llama: Any, kv: BoundStore) -> None:
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, 4), random_ids(34, seed=9))
    control = outcome(llama.generate, **batch)
    kv.warm(prefix)
    assert_same(outcome(kv.generate, batch), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (
        0,
        "prefix: no stored prefix starts like this prompt",
    )


def test_a_line_of_padding_up_to_the_cut_is_no_obstacle(llama: Any, kv: BoundStore) -> None:
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, 10), random_ids(5, seed=9))
    control = outcome(llama.generate, **batch)
    kv.warm(prefix)
    assert_same(outcome(kv.generate, batch), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == STORED - 1


@pytest.mark.parametrize("name", TINY_NAMES)
@pytest.mark.parametrize("length", [3, 20])
def test_windows_that_move_on(name: str, tmp_path: Path, length: int) -> None:
    """Also where the guard's row is out of every window before the prompt is fed: then it is fed alone, before."""
    model = build(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, length), torch.cat([prefix, random_ids(length, seed=77)], dim=1))
    control = outcome(model.generate, **batch, num_beams=2)
    kv.warm(prefix)
    assert_same(outcome(kv.generate, batch, num_beams=2), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (2 * (STORED - 1), None)


def test_windows_of_lines_of_other_lengths_run_without_the_store(tmp_path: Path) -> None:
    """A sliding layer keeps no rows for a cut that lies far before the end of the entry."""
    model = build("mistral")
    kv = CacheStore(tmp_path / "store").bind(model)
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, 2, 9))
    control = outcome(model.generate, **batch)
    kv.warm(prefix)
    assert_same(outcome(kv.generate, batch), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:5]) == (0, "trim:")


def test_a_prefill_in_chunks_goes_on_behind_what_is_stored(llama: Any, kv: BoundStore) -> None:
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, 9))
    control = outcome(llama.generate, **batch, prefill_chunk_size=4)
    kv.warm(prefix)
    assert_same(outcome(kv.generate, batch, prefill_chunk_size=4), control)
    assert kv.last_report is not None
    if compat.CHUNKS:
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (STORED - 1, None)
    else:  # 4.57 feeds what a filled cache holds again
        assert kv.last_report.reason == "mode: prefill_chunk_size is not served yet"


def test_a_pipeline_of_several_texts_reuses_while_attached(llama: Any, kv: BoundStore) -> None:
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, 5, 7))
    control = outcome(llama.generate, **batch)
    kv.warm(prefix)
    with kv.attached():
        assert_same(outcome(llama.generate, **batch), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 2 * (STORED - 1) - 2


# --- the guard ---


@pytest.mark.parametrize("mode", ["greedy", "beams", "static"])
def test_the_guard_stops_a_changed_model_for_all_lines(tmp_path: Path, mode: str) -> None:
    options, _ = MODES[mode]
    model = build("llama")
    kv = CacheStore(tmp_path / "store").bind(model, model_id="one word for all")
    prefix = random_ids(STORED)
    kv.warm(prefix)
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.mul_(1.02)
    batch = padded(*tails(prefix, 5, 8))
    control = outcome(model.generate, **batch, **options)
    assert_same(outcome(kv.generate, batch, **options), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0
    assert str(kv.last_report.reason).startswith("guard: a row computed again differs")


def store_anothers(kv: BoundStore, model: Any, ids: torch.Tensor) -> str:
    """Under the key of these ids the KV of others."""
    cache = compat.dynamic_cache(model.config)
    with torch.no_grad():
        model(random_ids(ids.shape[1], seed=99), **{compat.GENERATE_CACHE_ARGUMENT: cache}, use_cache=True)
    return kv.save(cache, ids, guard=False).key


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_one_wrong_line_is_enough_and_its_entry_alone_is_set_aside(
    llama: Any, kv: BoundStore, mode: str, wrong: int
) -> None:
    prefixes = [random_ids(STORED, seed=7), random_ids(STORED, seed=8)]
    batch = padded(*(tails(prefix, 4)[0] for prefix in prefixes))
    options, copies = MODES[mode]
    control = outcome(llama.generate, **batch, **options)
    right = kv.warm(prefixes[1 - wrong]).key
    assert store_anothers(kv, llama, prefixes[wrong]) != right
    assert_same(outcome(kv.generate, batch, **options), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0
    assert str(kv.last_report.reason).startswith("guard: ")
    assert [entry.key for entry in kv.store.entries()] == [right]
    kv.warm(prefixes[wrong])
    assert_same(outcome(kv.generate, batch, **options), control)
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (2 * (STORED - 1), None)
    assert copies * 2 == control[1].shape[0]


@pytest.mark.parametrize("before_the_cut", [1, 2])
def test_a_line_of_one_token_before_the_cut_does_not_end_the_watch(
    llama: Any, kv: BoundStore, before_the_cut: int
) -> None:
    """Nothing of such a line can be computed again and compared, so the cut is one earlier for all."""
    wrong, short = random_ids(STORED, seed=7), random_ids(before_the_cut, seed=8)
    batch = padded(*tails(wrong, 4), *tails(short, 4))
    control = outcome(llama.generate, **batch)
    kv.warm(tails(short, 4)[0])
    kv.warm(wrong)
    assert_same(outcome(kv.generate, batch), control)
    assert kv.last_report is not None
    cut = STORED - (before_the_cut == 1)
    assert kv.last_report.reused_tokens == cut - 1 + before_the_cut - 1
    kv.store.remove(kv.warm(wrong).key)
    store_anothers(kv, llama, wrong)
    assert_same(outcome(kv.generate, batch), control)
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:7]) == (0, "guard: ")


def test_a_prompt_of_two_tokens_has_none_to_compare(llama: Any, kv: BoundStore) -> None:
    ids = random_ids(2)
    control = outcome(llama.generate, ids, attention_mask=torch.ones_like(ids))
    kv.warm(ids)
    assert_same(outcome(kv.generate, ids), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:7]) == (0, "guard: ")
    assert_same(outcome(kv.generate, ids, guard=False), control)
    assert kv.last_report.reused_tokens == 1


@pytest.mark.parametrize("guard", [True, False])
def test_models_that_count_padding_are_not_served_padded(tmp_path: Path, guard: bool) -> None:
    """GPT-2's kin take positions from the mask; a Bart decoder counts slots."""
    torch.manual_seed(0)
    size = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
    }
    config = BartConfig(**size, decoder_ffn_dim=48, max_position_embeddings=128, init_std=0.3, pad_token_id=0)
    model = BartForCausalLM(config).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    kv = CacheStore(tmp_path / "store").bind(model, guard=guard)
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, 5, 9))
    control = outcome(model.generate, **batch)
    kv.warm(prefix)
    assert_same(outcome(kv.generate, batch), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0
    assert "padding counted" in str(kv.last_report.reason)
    assert len(kv.store.entries()) == 1
    even = padded(*tails(prefix, 5), *tails(prefix, 5))
    assert_same(outcome(kv.generate, even), outcome(model.generate, **even))
    assert kv.last_report.reused_tokens == 2 * (STORED - guard)


ODD_MASKS = {
    "twos": lambda mask: mask * 2,
    "a two": lambda mask: torch.cat([mask[:, :-1], mask[:, -1:] * 2], dim=1),
    "halves": lambda mask: mask.float() * 0.5,
}


@pytest.mark.parametrize("odd", ODD_MASKS)
@pytest.mark.parametrize("guard", [True, False])
def test_masks_of_other_values_are_not_served(llama: Any, kv: BoundStore, odd: str, guard: bool) -> None:
    prefix = random_ids(STORED)
    batch = padded(*tails(prefix, 5, 7))
    batch["attention_mask"] = ODD_MASKS[odd](batch["attention_mask"])
    control = outcome(llama.generate, **batch)
    kv.warm(prefix)
    assert_same(outcome(kv.generate, **batch, guard=guard), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:7]) == (0, "inputs:")
    assert len(kv.store.entries()) == 1


@pytest.mark.parametrize("extra", [1, 3])
@pytest.mark.parametrize("given", ["attention_mask", "position_ids"])
def test_what_is_longer_than_the_prompt_is_not_served(llama: Any, kv: BoundStore, given: str, extra: int) -> None:
    prefix = random_ids(STORED)
    ids = tails(prefix, 5)[0]
    values = torch.ones(1, ids.shape[1] + extra, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs[given] = values if given == "attention_mask" else values.cumsum(-1) - 1
    kv.warm(prefix)
    try:
        control = outcome(llama.generate, **inputs)
    except (RuntimeError, IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            outcome(kv.generate, **inputs)
        return
    assert_same(outcome(kv.generate, **inputs), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0
    assert str(kv.last_report.reason).partition(":")[0] in ("mask", "positions", "inputs")
    assert len(kv.store.entries()) == 1


def test_lines_that_end_far_apart_are_read_once_each(llama: Any, kv: BoundStore, monkeypatch: Any) -> None:
    prefixes = [random_ids(20 + 10 * number, seed=number) for number in range(4)]
    batch = padded(*(tails(prefix, 4)[0] for prefix in prefixes))
    control = outcome(llama.generate, **batch)
    for prefix in prefixes:
        kv.warm(prefix)
    filled = []
    original = kvkeep.serving.fill_cache
    monkeypatch.setattr(kvkeep.serving, "fill_cache", lambda *a, **k: filled.append(1) or original(*a, **k))
    assert_same(outcome(kv.generate, batch), control)
    assert len(filled) == len(prefixes)


@pytest.mark.parametrize("options", [{}, {"max_length": STORED + 12, "max_new_tokens": None}, {"num_beams": 2}])
def test_a_mapping_with_padding_comes_back_with_it(llama: Any, kv: BoundStore, options: dict[str, Any]) -> None:
    prefix = random_ids(STORED)
    padding = torch.nn.functional.pad(tails(prefix, 5)[0], (4, 0))
    prompt = {"input_ids": padding, "attention_mask": (torch.arange(padding.shape[1]) >= 4).long()[None]}
    control = outcome(llama.generate, **prompt, **options)
    kv.warm(prefix)
    ours = outcome(kv.generate, prompt, **options)
    assert_same(ours, control)
    assert torch.equal(ours[0][:, : padding.shape[1]], padding)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == STORED - 1


# --- not served ---


def test_padding_within_a_line_is_not_served(llama: Any, kv: BoundStore) -> None:
    prefix = random_ids(STORED)
    kv.warm(prefix)
    batch = padded(*tails(prefix, 5, 7))
    batch["attention_mask"][1, 4] = 0
    control = outcome(llama.generate, **batch)
    assert_same(outcome(kv.generate, batch), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:7]) == (0, "inputs:")


def test_other_positions_are_not_served(llama: Any, kv: BoundStore) -> None:
    prefix = random_ids(STORED)
    kv.warm(prefix)
    batch = padded(*tails(prefix, 5, 7))
    slots = torch.arange(batch["input_ids"].shape[1]).expand(2, -1)  # as if padding counted
    control = outcome(llama.generate, **batch, position_ids=slots)
    assert_same(outcome(kv.generate, batch, position_ids=slots), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:10]) == (0, "positions:")


# --- saving ---


@pytest.mark.parametrize("name", TINY_NAMES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_each_line_of_a_saved_batch_is_an_entry(name: str, kind: str, tmp_path: Path) -> None:
    model = build(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    rows = [random_ids(length, seed=length) for length in (20, 13)]
    batch = padded(*rows, rows[0])
    options = {"cache_implementation": "static", "disable_compile": True} if kind == "static" else {}
    out = model.generate(**batch, **{**OPTIONS, **options})
    cache = getattr(out, compat.GENERATE_CACHE_ARGUMENT)
    entries = kv.save(cache, out.sequences[:, :-1], attention_mask=batch["attention_mask"])
    assert [entry.end for entry in entries] == [20 + NEW - 1, 13 + NEW - 1, 20 + NEW - 1]
    assert len({entry.key for entry in entries}) == 2 == len(kv.store.entries())
    for number in (0, 1):
        whole = out.sequences[number : number + 1][:, batch["attention_mask"][number].argmax() :]
        control = outcome(model.generate, input_ids=whole, attention_mask=torch.ones_like(whole))
        assert_same(outcome(kv.generate, whole), control)
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens >= whole.shape[1] - 2
        assert kv.last_report.reason is None


def test_a_batch_is_saved_with_its_own_lines_alone(llama: Any, kv: BoundStore) -> None:
    batch = padded(random_ids(20), random_ids(13, seed=2))
    out = llama.generate(**batch, **OPTIONS)
    cache = getattr(out, compat.GENERATE_CACHE_ARGUMENT)
    ids, mask = out.sequences[:, :-1], batch["attention_mask"]
    with pytest.raises(CacheMismatchError, match="not hold what this model computes"):
        kv.save(cache, ids.flip(0), attention_mask=mask.flip(0))
    with pytest.raises(CacheMismatchError, match="23 tokens and 24 ids were given"):
        kv.save(cache, out.sequences, attention_mask=mask)
    with pytest.raises(CacheMismatchError, match="holds 2 lines and 1 were given"):
        kv.save(cache, ids[:1], attention_mask=mask[:1])
    with pytest.raises(InvalidPromptError, match="a batch is ids and a mask of"):
        kv.save(cache, ids, attention_mask=mask[:1])
    hole = mask.clone()
    hole[0, 5] = 0
    with pytest.raises(InvalidPromptError, match="hides tokens that are not padding"):
        kv.save(cache, ids, attention_mask=hole)
    with pytest.raises(InvalidRequestError, match="name= is for one entry"):
        kv.save(cache, ids, attention_mask=mask, name="both")  # type: ignore[call-overload]
    with pytest.raises(InvalidPromptError, match="several rows"):
        kv.save(cache, ids)
    assert kv.store.entries() == []


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9)])
def test_a_batch_is_loaded_up_to_one_slot(llama: Any, kv: BoundStore, kind: str, lengths: tuple[int, int]) -> None:
    lines = [*tails(random_ids(STORED), *lengths)]
    for line in lines:
        kv.warm(line[:, :STORED])
    batch = padded(*lines)
    slots = batch["input_ids"].shape[1]
    room = {"max_cache_len": slots + NEW} if kind == "static" else {}
    cache = kv.load(batch["input_ids"], attention_mask=batch["attention_mask"], cache_implementation=kind, **room)
    cut = min(slots - line.shape[1] for line in lines) + STORED
    assert compat.cached_tokens(cache) == cut
    if kind == "static":
        assert all(layer.keys.shape[0] == len(lines) for layer in cache.layers)
    out = outcome(llama.generate, **batch, **{compat.GENERATE_CACHE_ARGUMENT: cache})
    assert_same(out, outcome(llama.generate, **batch))


def test_a_batch_of_which_a_line_is_not_stored_is_not_loaded(llama: Any, kv: BoundStore) -> None:
    lines = [random_ids(STORED + 3, seed=seed) for seed in (1, 2)]
    kv.warm(lines[0][:, :STORED])
    batch = padded(*lines)
    cache = DynamicCache(config=llama.config)
    llama(input_ids=lines[0], **{compat.forward_cache_argument(llama): cache})
    assert kv.load(batch["input_ids"], attention_mask=batch["attention_mask"], into=cache) is None
    assert compat.cached_tokens(cache) == 0
    with pytest.raises(InvalidPromptError, match="a batch is ids and a mask"):
        kv.load(batch["input_ids"], attention_mask=batch["attention_mask"][:1])
