"""Every causal and every seq2seq type that transformers has does with kvkeep what the committed table says."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from conform import EXACT, NOT_BUILT, REFUSED, WRONG, Record, Table, check, first_difference, random_ids, table_path
from tiny_zoo import FAMILIES, CannotBuildError, build
from transformers import DynamicCache

from kvkeep import compat

TABLE = Table.read(table_path())
CACHE_ARGUMENT = compat.GENERATE_CACHE_ARGUMENT
SHARDS = {"causal": 16, "seq2seq": 4}
QUICK_SHARDS = 4


def shards_of(family: str) -> list[tuple[str, int]]:
    return [(family, shard) for shard in range(SHARDS[family])]


def objections(family: str, names: list[str]) -> list[str]:
    found = []
    for name in names:
        record = check(family, name)
        print(record.line())
        if (objection := TABLE.objection(record)) is not None:
            found.append(objection)
    gc.collect()
    return found


def test_the_table_is_of_this_version_and_its_counts_add_up() -> None:
    assert TABLE.transformers == transformers.__version__
    for family, types in FAMILIES.items():
        refused, not_built = TABLE.refused[family], TABLE.not_built[family]
        assert set(refused) | set(not_built) <= set(types)
        assert not set(refused) & set(not_built)
        exact = len(types) - len(refused) - len(not_built)
        assert TABLE.counts[family] == {EXACT: exact, REFUSED: len(refused), NOT_BUILT: len(not_built)}


def test_what_is_wrong_is_never_what_the_table_expects() -> None:
    name = next(iter(TABLE.refused["causal"]))
    refused = Record("causal", name, REFUSED, TABLE.refused["causal"][name] + " and so on")
    assert TABLE.objection(refused) is None
    assert "where the table says: refused" in str(TABLE.objection(replace(refused, reason="another reason")))
    assert "where the table says: refused" in str(TABLE.objection(replace(refused, outcome=EXACT)))
    assert all(TABLE.objection(replace(refused, name=one, outcome=WRONG)) for one in FAMILIES["causal"])


def filled_cache() -> Any:
    model = build("causal", "gemma3_text")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(random_ids(40), **{CACHE_ARGUMENT: cache})
    return cache


def test_every_difference_between_two_caches_is_seen() -> None:
    cache = filled_cache()
    assert first_difference(cache, copy.deepcopy(cache)) is None
    assert first_difference(DynamicCache(), DynamicCache()) == "there is not one tensor in it"
    changed = copy.deepcopy(cache)
    changed.layers[1].values[0, 1, 3, 5] += 1e-6
    assert str(first_difference(cache, changed)).startswith("layers[1].values: ")
    counted = copy.deepcopy(cache)
    counted.layers[0].cumulative_length += 1
    assert first_difference(cache, counted) == "layers[0].cumulative_length: 40 was saved, 41 came back"
    short = copy.deepcopy(cache)
    del short.layers[-1]
    assert str(first_difference(cache, short)).startswith(f"layers[{len(cache.layers) - 1}].")
    twice = copy.deepcopy(cache)
    twice.layers[0].keys = twice.layers[0].keys.double()
    assert str(first_difference(cache, twice)).startswith("layers[0].keys: ")


def test_a_tiny_model_is_the_same_each_time_and_says_why_it_cannot_be() -> None:
    one, other = (build("causal", "qwen3").state_dict() for _ in range(2))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(CannotBuildError, match="timm"):
        build("causal", "gemma3n")


@pytest.mark.parametrize("shard", range(QUICK_SHARDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_one_type_of_each_way_through_kvkeep(family: str, shard: int) -> None:
    names = list(TABLE.representatives[family])
    assert names
    assert objections(family, names[shard::QUICK_SHARDS]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shard"), [one for family in FAMILIES for one in shards_of(family)])
def test_every_type(family: str, shard: int) -> None:
    names = sorted(FAMILIES[family])
    assert objections(family, names[shard :: SHARDS[family]]) == []
