"""What continues stored prefixes: any part of it is as the cache in memory was at that length, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny
from tiny_states import build_stateful

from kvkeep import CacheStore, Entry
from kvkeep.empty_caches import new_cache
from kvkeep.grounds import MIN_SHARED
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds
from kvkeep.manner import manner_of
from kvkeep.prefill import feed
from kvkeep.storage.entry_chain import MAX_LINKS

ENDS = [70, 75, 91, 100, 130, 131, 150, 171]
IDS = torch.randint(3, VOCABULARY, (2000,), generator=torch.Generator().manual_seed(3)).tolist()
TOLERANCE = 2e-4  # right is below it in float32, wrong is above 0.05

WINDOWED = {"mistral", "gemma3"}
MODELS: dict[str, Callable[[], Any]] = {
    "full": lambda: build_tiny("llama"),
    "mistral": lambda: build_tiny("mistral"),
    "gemma3": lambda: build_tiny("gemma3"),
    "window not full": lambda: build_tiny("mistral", sliding_window=256),
    **{name: (lambda name=name: build_stateful(name)) for name in ("qwen3_next", "bamba", "lfm2", "jamba", "mamba2")},
}


QUICK = ("full", "mistral", "lfm2")


def models(quick: tuple[str, ...], names: Iterable[str] = MODELS) -> list[Any]:
    """These models; all but the quick ones only where slow tests run."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=models(QUICK))
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, MODELS[request.param]()


def inputs_of(ids: list[int]) -> Inputs:
    return Inputs(TokenIds.of(ids))


def fed(model: Any, cache: Any, ids: list[int], begin: int, end: int) -> list[torch.Tensor]:
    """Feed tokens [begin, end) as this model takes them behind others; the logits of each pass."""
    step = 1 if manner_of(model).singly and begin else end - begin
    passes = [feed(model, cache, inputs_of(ids), at, at + step, logits=True) for at in range(begin, end, step)]
    return [one for one in passes if one is not None]


def grown(model: Any, ends: list[int]) -> dict[int, Any]:
    """A cache that grows in memory, as it was at each of these lengths."""
    cache, copies, begin = new_cache(model, "dynamic", None, None, ends[-1]), {}, 0
    for end in ends:
        fed(model, cache, IDS, begin, end)
        copies[end], begin = copy.deepcopy(cache), end
    return copies


def trimmed(copies: dict[int, Any], tokens: int) -> Any:
    """The cache in memory with its first ``tokens`` tokens alone."""
    if tokens in copies:
        return copy.deepcopy(copies[tokens])
    before = max((end for end in copies if end < tokens), default=0)
    after = min(end for end in copies if end > tokens)
    cache = copy.deepcopy(copies[after])
    for number, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            rows, total = getattr(layer, name), after
            if rows.shape[-2] < after:  # a window: with what it held when the last tokens came
                assert before > 0
                assert after - before <= rows.shape[-2]
                old = getattr(copies[before].layers[number], name)
                kept = old.shape[-2]
                rows, total = torch.cat([old, rows[:, :, before - after :]], -2), after
                setattr(layer, name, rows[:, :, tokens - total - kept : tokens - total])
            else:
                setattr(layer, name, rows[:, :, :tokens])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = tokens
    return cache


def goes_on_alike(model: Any, loaded: Any, reference: Any, tokens: int) -> None:
    """Both caches give the same logits to the bit, and those of no cache within rounding."""
    ids = [*IDS[:tokens], 5, 17, 80, 81, 9]
    mine = fed(model, loaded, ids, tokens, tokens + 3) + fed(model, loaded, ids, tokens + 3, tokens + 5)
    right = fed(model, reference, ids, tokens, tokens + 3) + fed(model, reference, ids, tokens + 3, tokens + 5)
    assert all(torch.equal(one, other) for one, other in zip(mine, right, strict=True)), tokens
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([ids])).logits[:, tokens:]
    assert (torch.cat(mine, 1) - plain).abs().max() / plain.abs().max() < TOLERANCE, tokens


def chain(store: CacheStore, entry: Entry) -> list[Entry]:
    links = [entry]
    while links[0].parent is not None:
        links.insert(0, store.entry(links[0].parent))
    return links


HITS = [69, 70, 72, 75, 90, 91, 100, 130, 131, 149, 160, 171]


def test_saved_as_it_grew_any_part_of_it_is_as_it_was_in_memory(named: tuple[str, Any], tmp_path: Path) -> None:
    name, model = named
    store = CacheStore(tmp_path / "store", min_free=0, durability="none")
    kv = store.bind(model)
    copies = grown(model, ENDS)
    states = name in ("qwen3_next", "bamba", "lfm2", "jamba", "mamba2")
    for number, end in enumerate(ENDS):
        entry = kv.save(copies[end], IDS[:end], guard=False)
        links = chain(store, entry)
        assert [link.end for link in links] == ([end] if name == "mamba2" else ENDS[: number + 1])
        assert entry.start == (0 if name == "mamba2" or not number else ENDS[number - 1])
        assert store.verify(entry.key) is None
    for wanted in HITS:
        prompt = [*IDS[:wanted], 1]
        tokens = kv.lookup(prompt).tokens
        boundary = max((end for end in ENDS if end <= wanted), default=0)
        if states:
            assert tokens == boundary
        elif name in WINDOWED:
            assert tokens in (wanted, boundary)
            assert not 70 <= wanted <= 75 or tokens == wanted, "two links have its window together"
        else:
            assert tokens == wanted
        loaded = kv.load(prompt)
        assert (loaded is None) == (tokens == 0)
        if loaded is not None:
            goes_on_alike(model, loaded, trimmed(copies, tokens), tokens)


def test_warmed_bit_by_bit_it_is_as_it_was_in_memory(named: tuple[str, Any], tmp_path: Path) -> None:
    name, model = named
    states = name in ("qwen3_next", "bamba", "lfm2", "jamba", "mamba2")
    singly = manner_of(model).singly
    store = CacheStore(tmp_path / "store", min_free=0, durability="none")
    kv = store.bind(model)
    stored = [end - 1 if states else end for end in ENDS]  # state is kept before the last token
    for number, end in enumerate(ENDS):
        entry = kv.warm(IDS[:end])
        assert entry.end == stored[number]
        links = [link.end for link in chain(store, entry)]
        assert links == ([entry.end] if singly or name == "mamba2" else stored[: number + 1])
    if singly:
        return  # each was computed in one pass
    copies = grown(model, stored)
    for tokens in stored:
        prompt = [*IDS[:tokens], 1]
        assert kv.lookup(prompt).tokens == tokens
        goes_on_alike(model, kv.load(prompt), copies[tokens], tokens)


# --- what a conversation takes ---

TURN, TURNS = 61, 20


@pytest.mark.parametrize("how", ["save", "warm"])
@pytest.mark.parametrize("name", models(("full",), ["full", "gemma3", "qwen3_next", "mamba2"]))
def test_a_conversation_saved_after_each_turn_takes_what_its_tokens_take(
    name: str, how: str, tmp_path: Path, figures: list[str]
) -> None:
    model = MODELS[name]()
    if manner_of(model).singly:
        return  # what 4.57 feeds one by one is computed anew each time
    store = CacheStore(tmp_path / "store", min_free=0, durability="none")
    kv = store.bind(model)
    cache, begin, ends = new_cache(model, "dynamic", None, None, TURN * TURNS), 0, list[int]()
    for turn in range(1, TURNS + 1):
        end = turn * TURN
        if how == "save":
            fed(model, cache, IDS, begin, end)
            begin = end
            entry = kv.save(cache, IDS[:end], guard=False)
        else:
            entry = kv.warm(IDS[:end])
        ends.append(entry.end)
        assert len(chain(store, entry)) <= MAX_LINKS
        hits = [kv.lookup([*IDS[:earlier], 1]).tokens for earlier in ends]
        assert hits == ends, "each turn is a hit still"
    total = sum(entry.nbytes for entry in store.entries())
    whole = CacheStore(tmp_path / "whole", min_free=0, durability="none").bind(model)
    if how == "save":
        one = whole.save(cache, IDS[: ends[-1]], guard=False).nbytes
    else:
        one = whole.warm(IDS[: TURN * TURNS]).nbytes
    figures.append(f"{TURNS} turns, {how}, {name}: {total / one:.2f} times one whole entry in {len(store.entries())}")
    # Whole entries would take ten times. A state is of one size whatever the tokens, and each turn has one.
    assert total <= {"full": 1.3, "mamba2": TURNS}.get(name, 3) * one


def test_less_than_is_worth_a_file_is_stored_whole(tmp_path: Path, tiny_llama: Any) -> None:
    kv = CacheStore(tmp_path / "store").bind(tiny_llama)
    kv.warm(IDS[: MIN_SHARED - 1])
    assert kv.warm(IDS[:100]).parent is None
    assert kv.warm(IDS[:120]).start == 100
