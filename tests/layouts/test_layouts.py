"""Saved from any cache, loaded into any other: bit for bit, and continued like the cache in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_NAMES, VOCABULARY, WINDOW, build_tiny
from transformers import DynamicCache, StaticCache

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore
from kvkeep.errors import CacheMismatchError, InvalidRequestError, UnsupportedCacheError
from kvkeep.layouts import codec_for, describe_cache, plan_layers

LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 40)
ROOM = 64


@pytest.fixture(scope="module", params=TINY_NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return build_tiny(request.param)


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model)


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def prefilled(model: Any, ids: torch.Tensor, kind: str) -> Any:
    caches = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "complete": DynamicCache,
        "static": lambda: StaticCache(config=model.config, max_cache_len=ROOM),
    }
    cache = caches[kind]()
    forward(model, ids, cache)
    return cache


def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    seen = compat.cached_tokens(cache)
    extra = {"cache_position": torch.arange(seen, seen + ids.shape[1])} if compat.takes(model, "cache_position") else {}
    with torch.no_grad():
        return model(input_ids=ids, **{compat.forward_cache_argument(model): cache}, use_cache=True, **extra).logits


def rows_of(model: Any, cache: Any, length: int) -> list[dict[str, torch.Tensor]]:
    """For each layer the rows that continuing needs, whatever class keeps them."""
    plans = plan_layers(compat.text_config(model))
    rows = []
    for state, plan in zip(describe_cache(cache, plans, length), plans, strict=True):
        needed = max(0, length - (plan.window - 1)) if plan.kind == "sliding" else 0
        rows.append({role: tensor[:, needed - state.record.first :] for role, tensor in state.tensors.items()})
    return rows


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("saved_as", ["dynamic", "complete", "static"])
@pytest.mark.parametrize("loaded_as", ["dynamic", "static"])
def test_a_saved_cache_loads_bit_for_bit_and_continues_alike(
    model: Any, kv: BoundStore, length: int, saved_as: str, loaded_as: str
) -> None:
    ids, more = random_ids(length + 1), random_ids(6, seed=2)
    live = prefilled(model, ids[:, :length], saved_as)
    entry = kv.save(live, ids[:, :length])
    options = {"cache_implementation": "static", "max_cache_len": ROOM} if loaded_as == "static" else {}

    loaded = kv.load(ids, **options)

    assert (entry.start, entry.end) == (0, length)
    assert type(loaded) is (StaticCache if loaded_as == "static" else DynamicCache)
    assert [compat.seen_tokens(layer) for layer in loaded.layers] == [length] * len(loaded.layers)
    for ours, theirs in zip(rows_of(model, loaded, length), rows_of(model, live, length), strict=True):
        assert torch.equal(ours["keys"], theirs["keys"])
        assert torch.equal(ours["values"], theirs["values"])
    # Continued with several tokens at once, then one by one past the window, beside a cache of the same class.
    beside = prefilled(model, ids[:, :length], loaded_as)
    first, control = forward(model, more, loaded), forward(model, more, beside)
    assert torch.allclose(first, control, atol=2e-4), (first - control).abs().max()
    for token in random_ids(WINDOW + 2, seed=3)[0]:
        ours, theirs = (forward(model, token.view(1, 1), cache) for cache in (loaded, beside))
        assert torch.allclose(ours, theirs, atol=2e-4)
        assert (theirs - control[:, -1:]).abs().max() > 0.1  # the check can fail: other tokens give other logits


@pytest.mark.parametrize("tokens", range(30, 40))
def test_a_trimmed_load_equals_the_trimmed_cache_in_memory(model: Any, kv: BoundStore, tokens: int) -> None:
    ids, more = random_ids(40), random_ids(5, seed=2)
    kv.save(prefilled(model, ids, "complete"), ids)  # keeps every row, so it can be cut anywhere

    loaded = kv.load(torch.cat([ids[:, :tokens], more], dim=1))
    live = prefilled(model, ids, "complete")

    whole, trimmed = rows_of(model, live, 40), rows_of(model, loaded, tokens)
    for layer, plan in zip(range(len(whole)), plan_layers(compat.text_config(model)), strict=True):
        full = live.layers[layer].keys[0]
        needed = max(0, tokens - (plan.window - 1)) if plan.kind == "sliding" else 0
        assert torch.equal(trimmed[layer]["keys"], full[:, needed:tokens])


def test_a_loaded_static_cache_has_zeros_where_nothing_is_stored(kv: BoundStore, model: Any) -> None:
    ids = random_ids(21)
    kv.warm(ids[:, :20])
    cache = kv.load(ids, cache_implementation="static", max_cache_len=ROOM)
    for layer in cache.layers:
        if layer.max_cache_len == ROOM:
            assert layer.keys[:, :, :20].abs().sum() > 0
            assert layer.keys[:, :, 20:].abs().sum() == 0


def test_a_static_load_without_room_is_refused(kv: BoundStore) -> None:
    ids = random_ids(21)
    kv.warm(ids)
    for room in (None, 20):
        with pytest.raises(InvalidRequestError, match="max_cache_len"):
            kv.load(ids, cache_implementation="static", max_cache_len=room)
    with pytest.raises(InvalidRequestError, match="one that is offloaded grows"):
        kv.load(ids, cache_implementation="offloaded", max_cache_len=ROOM)


def test_warm_keeps_the_rows_that_a_prefill_in_one_piece_computes(model: Any, kv: BoundStore) -> None:
    ids = random_ids(600)  # more than one chunk
    kv.warm(ids)
    loaded = kv.load(torch.cat([ids, ids[:, :1]], dim=1))
    live = prefilled(model, ids, "dynamic")
    for ours, theirs in zip(rows_of(model, loaded, 600), rows_of(model, live, 600), strict=True):
        scale = theirs["keys"].abs().max()
        assert (ours["keys"] - theirs["keys"]).abs().max() < 1e-4 * scale


def test_a_layer_class_that_is_not_in_the_table_is_refused_by_name(model: Any, kv: BoundStore) -> None:
    class CleverLayer(compat.DYNAMIC_LAYER):  # type: ignore[misc, valid-type]
        pass

    ids = random_ids(20)
    cache = prefilled(model, ids, "dynamic")
    cache.layers[1].__class__ = CleverLayer
    with pytest.raises(UnsupportedCacheError, match=r"layer 1 .* CleverLayer"):
        kv.save(cache, ids)
    with pytest.raises(UnsupportedCacheError, match="CleverLayer"):
        codec_for(cache.layers[1], 1)
    assert kv.store.entries() == []


def test_a_cache_class_of_somebody_elses_is_refused_by_name(model: Any, kv: BoundStore) -> None:
    class CleverCache(DynamicCache):
        pass

    ids = random_ids(20)
    cache = prefilled(model, ids, "dynamic")
    cache.__class__ = CleverCache
    with pytest.raises(UnsupportedCacheError, match="CleverCache"):
        kv.save(cache, ids)


def test_layers_that_disagree_or_are_not_filled_are_refused_by_number(model: Any, kv: BoundStore) -> None:
    ids = random_ids(20)
    short = prefilled(model, ids, "complete")
    short.layers[2].keys = short.layers[2].keys[:, :, :19]
    short.layers[2].values = short.layers[2].values[:, :, :19]
    with pytest.raises(CacheMismatchError, match="layer 2 of the cache holds 19 tokens"):
        kv.save(short, ids)
    empty = prefilled(model, ids, "complete")
    empty.layers[1] = compat.DYNAMIC_LAYER()
    with pytest.raises(CacheMismatchError, match="layer 1 of the cache holds 0 tokens"):
        kv.save(empty, ids)
    fewer = prefilled(model, ids, "complete")
    fewer.layers.pop()
    with pytest.raises(CacheMismatchError, match="another model's"):
        kv.save(fewer, ids)
    batched = prefilled(model, ids.repeat(2, 1), "complete")
    with pytest.raises(CacheMismatchError, match="one sequence"):
        kv.save(batched, ids)


def test_a_sliding_cache_that_lost_rows_is_refused(kv: BoundStore, model: Any) -> None:
    plans = plan_layers(compat.text_config(model))
    sliding = [number for number, plan in enumerate(plans) if plan.kind == "sliding"]
    ids = random_ids(20)
    cache = prefilled(model, ids, "dynamic")
    for number in sliding[:1]:
        cache.layers[number].keys = cache.layers[number].keys[:, :, 1:]
        cache.layers[number].values = cache.layers[number].values[:, :, 1:]
        with pytest.raises(CacheMismatchError, match=f"layer {number} of the cache cannot be saved"):
            kv.save(cache, ids)
    if not sliding:
        assert kv.save(cache, ids).end == 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_number_formats_round_trip_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_tiny("gemma3").to(dtype)
    ids = random_ids(12)
    live = prefilled(model, ids, "dynamic")
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.save(live, ids)
    loaded = kv.load(torch.cat([ids, ids[:, :1]], dim=1))
    for ours, theirs in zip(loaded.layers, live.layers, strict=True):
        assert ours.keys.dtype == dtype
        assert torch.equal(ours.keys.view(torch.uint8), theirs.keys.contiguous().view(torch.uint8))
        assert torch.equal(ours.values.view(torch.uint8), theirs.values.contiguous().view(torch.uint8))
