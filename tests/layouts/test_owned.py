"""Caches that models bring themselves: kept bit for bit, handed over to ``generate``, and what steps aside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from tiny_states import MODELS, build_stateful
from transformers import DynamicCache

from kvkeep import BoundStore, CacheStore, compat
from kvkeep.errors import CacheMismatchError, InvalidRequestError, UnsupportedCacheError
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds
from kvkeep.prefill import feed, prefill
from kvkeep.testing.state import HeldState, difference, same_bits

PREFIX, PROMPT, NEW = 40, 44, 5
TOLERANCE = 2e-4  # right is below it in float32, wrong is above 0.05
WRONG = 0.05
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
NOT_SERVED = "zamba2"
SERVED = sorted(MODELS.keys() - {NOT_SERVED})
WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2")


@pytest.fixture(scope="module", params=SERVED)
def model(request: pytest.FixtureRequest) -> Any:
    return build_stateful(request.param)


@pytest.fixture(scope="module")
def jamba() -> Any:
    return build_stateful("jamba")


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model)


@pytest.fixture
def jamba_kv(jamba: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(jamba)


def random_ids(length: int = PROMPT, seed: int = 1, lines: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (lines, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(ids: torch.Tensor) -> Inputs:
    return Inputs(TokenIds.of(ids[0].tolist()))


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    return prefill(model, inputs_of(ids))


def one_by_one(model: Any, cache: Any, ids: torch.Tensor, begin: int) -> torch.Tensor:
    steps = [feed(model, cache, inputs_of(ids), at, at + 1, logits=True) for at in range(begin, ids.shape[1])]
    return torch.cat([one for one in steps if one is not None], dim=1)


def off(mine: torch.Tensor, right: torch.Tensor) -> float:
    return ((mine - right).abs().max() / right.abs().max()).item()


def logits_of(out: Any) -> torch.Tensor:
    return torch.cat(out.logits)


# --- saved and loaded ---


def test_what_is_loaded_is_what_was_saved_and_goes_on_in_the_same_way(model: Any, kv: BoundStore) -> None:
    ids = random_ids()
    cache = prefilled(model, ids[:, :PREFIX])
    kept = copy.deepcopy(cache)
    entry = kv.save(cache, ids[:, :PREFIX])
    assert entry.end == PREFIX
    assert difference(HeldState.of(cache), HeldState.of(kept)) is None  # it was only read
    loaded = kv.load(ids)
    assert type(loaded) is type(kept)
    assert difference(HeldState.of(loaded), HeldState.of(kept)) is None
    assert difference(HeldState.of(kept), HeldState.of(loaded)) is None
    assert not HeldState.of(loaded).places() & HeldState.of(cache).places()
    again = kv.load(ids, into=copy.deepcopy(loaded))
    control = one_by_one(model, kept, ids, PREFIX)
    assert same_bits(one_by_one(model, loaded, ids, PREFIX), control)
    assert same_bits(one_by_one(model, again, ids, PREFIX), control)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, PREFIX:]
    assert off(control, whole) < TOLERANCE


def test_without_the_state_it_goes_on_otherwise(model: Any, kv: BoundStore) -> None:
    ids = random_ids()
    kv.save(prefilled(model, ids[:, :PREFIX]), ids[:, :PREFIX])
    right, wrong = kv.load(ids), kv.load(ids)
    for layer in compat.decoder_part(wrong).layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            if states.get(0) is not None:
                states[0].zero_()
    assert off(one_by_one(model, wrong, ids, PREFIX), one_by_one(model, right, ids, PREFIX)) > WRONG


def test_a_cache_that_generate_left_can_be_saved(jamba: Any, jamba_kv: BoundStore) -> None:
    out = jamba.generate(random_ids(), **OPTIONS)
    held = out.sequences[:, :-1]
    jamba_kv.save(out.past_key_values, held)
    loaded = jamba_kv.load(out.sequences)
    assert difference(HeldState.of(loaded), HeldState.of(out.past_key_values)) is None


@pytest.mark.parametrize(("name", "tokens"), [("qwen3_next", 150), ("zamba", 60)])
def test_a_state_that_came_by_single_steps_is_saved_and_that_of_other_ids_is_not(
    name: str, tokens: int, tmp_path: Path
) -> None:
    """It differs from one that is computed at once by more than rows without a state do."""
    model = build_stateful(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(tokens)
    cache = compat.owned_cache(model) or compat.dynamic_cache(model.config)
    one_by_one(model, cache, ids, 0)
    for place in (0, tokens // 2, tokens - 1):
        other = ids.clone()
        other[0, place] = 3 + (int(ids[0, place]) - 2) % (VOCABULARY - 3)
        with pytest.raises(CacheMismatchError, match=r"differs from the stored one by [1-9]\.\de[+-]0[01] of its size"):
            kv.save(cache, other)
    assert kv.save(cache, ids).end == tokens


def test_an_emptied_cache_is_as_a_new_one(model: Any) -> None:
    cache = prefilled(model, random_ids(PREFIX))
    assert compat.is_used(cache)
    compat.empty_cache(cache)
    assert not compat.is_used(cache)
    assert difference(HeldState.of(cache), HeldState.of(compat.owned_cache(model))) is None


def test_a_cache_of_other_ids_or_of_none_is_not_saved(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    with pytest.raises(CacheMismatchError):
        kv.save(prefilled(model, ids), random_ids(PREFIX, seed=2))
    with pytest.raises(CacheMismatchError):
        kv.save(compat.owned_cache(model), ids)
    assert kv.store.entries() == []


def test_a_subclass_may_hold_more_and_is_refused(jamba: Any, jamba_kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    cache = prefilled(jamba, ids)
    cache.__class__ = type("More", (type(cache),), {"__module__": type(cache).__module__})
    with pytest.raises(UnsupportedCacheError, match="a More is not a cache that kvkeep can keep"):
        jamba_kv.save(cache, ids)


def test_there_is_one_kind_of_such_a_cache(jamba: Any, jamba_kv: BoundStore) -> None:
    ids = random_ids()
    jamba_kv.warm(ids[:, :PREFIX])
    for kind in ("static", "offloaded", "quantized"):
        room = {"max_cache_len": 80} if kind == "static" else {}
        with pytest.raises(InvalidRequestError, match="HybridMambaAttentionDynamicCache, of which there is no"):
            jamba_kv.load(ids, cache_implementation=kind, **room)
    foreign = DynamicCache()
    assert jamba_kv.load(ids, into=foreign) is None
    assert foreign.get_seq_length() == 0


def test_a_state_of_another_shape_is_not_taken(jamba: Any) -> None:
    layer = compat.decoder_part(compat.owned_cache(jamba)).layers[0]
    kept = layer.conv_states[0]
    with pytest.raises(ValueError, match=r"its conv state is \[1, 128, 4\], the entry's \[1, 128, 5\]"):
        layer.lazy_initialization(conv_states=torch.zeros(1, 128, 5))
    assert layer.conv_states[0] is kept
    layer.lazy_initialization(conv_states=torch.zeros(1, 128, 4))
    assert layer.conv_states[0] is kept  # it is filled in place
    layer.lazy_initialization(conv_states=torch.zeros(1, 128, 4, dtype=torch.float64))
    assert layer.conv_states[0].dtype is torch.float64


def test_states_that_are_one_tensor_keep_their_format() -> None:
    mamba2 = build_stateful("mamba2")
    layer = compat.decoder_part(compat.owned_cache(mamba2)).layers[1]
    like = torch.zeros_like(layer.recurrent_states[0], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"its recurrent state is torch\.float32 on cpu, not torch\.bfloat16 on cpu"):
        layer.lazy_initialization(recurrent_states=like)


@pytest.mark.parametrize("name", ["jamba", "mamba", "qwen3_next"])
def test_states_in_a_coarser_format_are_kept_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = build_stateful(name).to(torch.bfloat16)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids()
    cache = prefilled(model, ids[:, :PREFIX])
    kv.save(cache, ids[:, :PREFIX])
    loaded = kv.load(ids)
    assert difference(HeldState.of(loaded), HeldState.of(cache)) is None
    assert same_bits(one_by_one(model, loaded, ids, PREFIX), one_by_one(model, cache, ids, PREFIX))


# --- generate ---


def test_generate_reuses_what_was_warmed(model: Any, kv: BoundStore) -> None:
    ids = random_ids()
    plain = model.generate(ids, **OPTIONS)
    assert kv.warm(ids[:, :PREFIX]).end == PREFIX - 1
    ours = kv.generate(ids, **OPTIONS)
    report = kv.last_report
    assert report is not None and (report.reused_tokens, report.reason) == (PREFIX - 1, None)
    assert torch.equal(ours.sequences, plain.sequences)
    assert off(logits_of(ours), logits_of(plain)) < TOLERANCE
    other = model.generate(random_ids(seed=3), **OPTIONS)
    assert off(logits_of(other), logits_of(plain)) > WRONG  # and it matters what the model has seen


def test_attached_is_the_same_and_leaves_nothing_behind(model: Any, kv: BoundStore) -> None:
    ids = random_ids()
    kv.warm(ids)
    before = dict(model.__dict__)
    ours = kv.generate(ids, **OPTIONS)
    with kv.attached():
        attached = model.generate(ids, **OPTIONS)
        assert kv.last_report is not None and kv.last_report.reused_tokens == PROMPT - 1
    assert torch.equal(ours.sequences, attached.sequences)
    assert same_bits(logits_of(ours), logits_of(attached))
    assert model.__dict__ == before


def test_a_rest_that_takes_longer_one_by_one_is_computed(model: Any, kv: BoundStore) -> None:
    ids = random_ids()
    plain = model.generate(ids, **OPTIONS)
    kv.warm(ids[:, :25])
    ours = kv.generate(ids, **OPTIONS)
    assert kv.last_report is not None and kv.last_report.reused_tokens == 0
    assert str(kv.last_report.reason).endswith("goes on from a cache one token at a time, 19 times")
    assert same_bits(logits_of(ours), logits_of(plain))


@pytest.mark.parametrize(
    ("options", "lines", "reason"),
    [
        ({"num_beams": 2}, 1, "batch: this model's layout is served one sequence at a time"),
        ({"num_return_sequences": 2, "do_sample": True}, 1, "batch: this model's layout is served one sequence"),
        ({}, 2, "batch: this model's layout is served one sequence at a time"),
        ({"prefill_chunk_size": 16}, 1, "mode: prefill_chunk_size is not served yet"),
    ],
)
def test_what_is_not_served_runs_without_the_store(
    jamba: Any, jamba_kv: BoundStore, options: dict[str, Any], lines: int, reason: str
) -> None:
    ids = random_ids(lines=lines)
    jamba_kv.warm(ids[0, :PREFIX])
    outs = []
    for generate in (jamba.generate, jamba_kv.generate):
        torch.manual_seed(0)
        try:
            outs.append(generate(ids, **{**OPTIONS, **options}))
        except Exception as error:  # noqa: BLE001 - what transformers cannot do, it cannot do with a store
            outs.append(type(error))
    assert jamba_kv.last_report is not None and str(jamba_kv.last_report.reason).startswith(reason)
    plain, ours = outs
    assert ours is plain or same_bits(logits_of(ours), logits_of(plain))


@pytest.mark.parametrize("name", ["jamba", "mamba"])
def test_a_cache_of_the_callers_own_is_left_alone(name: str, tmp_path: Path) -> None:
    model = build_stateful(name)
    kv, ids = CacheStore(tmp_path / "store").bind(model), random_ids()
    kv.warm(ids[:, :PREFIX])
    given = "cache_params" if name in WITHOUT_ATTENTION else "past_key_values"
    held: list[Any] = [prefilled(model, ids[:, :-1]) for _ in range(2)]
    more = {"cache_position": torch.tensor([PROMPT - 1]), **OPTIONS}
    plain = model.generate(ids, **{given: held[0]}, **more)
    with kv.attached():
        ours = model.generate(ids, **{given: held[1]}, **more)
    assert kv.last_report is not None and kv.last_report.reused_tokens == 0
    assert str(kv.last_report.reason).startswith(("cache_given: ", "inputs: "))
    assert same_bits(logits_of(ours), logits_of(plain))


def test_prepare_gives_no_such_cache(jamba: Any, jamba_kv: BoundStore) -> None:
    ids = random_ids()
    jamba_kv.warm(ids[:, :PREFIX])
    prepared = jamba_kv.prepare(ids)
    assert prepared.keys() == {"input_ids", "attention_mask"}
    assert same_bits(logits_of(jamba.generate(**prepared, **OPTIONS)), logits_of(jamba.generate(ids, **OPTIONS)))


def test_a_model_whose_tokens_see_those_behind_them_is_refused(tmp_path: Path) -> None:
    """Beyond its first chunk, Zamba2 of 4.57 computes a token by those behind it, too."""
    model = build_stateful(NOT_SERVED)
    ids = random_ids()
    with torch.no_grad():
        short, long = (model(ids[:, :length], use_cache=False).logits[:, :19] for length in (19, 20))
    assert off(short, long) > WRONG
    kv = CacheStore(tmp_path / "store").bind(model)
    with pytest.raises(UnsupportedCacheError, match="its tokens see those behind them"):
        kv.warm(ids)
    with pytest.raises(UnsupportedCacheError, match="its tokens see those behind them"):
        kv.save(prefilled(model, ids), ids)
    plain, ours = model.generate(ids, **OPTIONS), kv.generate(ids, **OPTIONS)
    assert same_bits(logits_of(ours), logits_of(plain))
    assert kv.store.entries() == []
