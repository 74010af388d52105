"""A restored static cache under a compiled decoding step: nothing is compiled that a prefilled one does not need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny

from kvkeep import BoundStore, CacheStore, compat
from kvkeep.errors import InvalidRequestError

LENGTH, ROOM, STEPS = 21, 40, 4


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


class Decoder:
    """The model's forward, compiled whole, and how many graphs that took."""

    def __init__(self, model: Any) -> None:
        torch._dynamo.reset()
        self.graphs = 0
        self._model = model
        self._step = torch.compile(model.forward, backend=self._compile, fullgraph=True, dynamic=False)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward

    def decode(self, cache: Any, begin: int) -> torch.Tensor:
        """The logits of some tokens fed one by one."""
        logits = []
        for at, token in enumerate(random_ids(STEPS, seed=3)[0], start=begin):
            extra = {"cache_position": torch.tensor([at])} if compat.takes(self._model, "cache_position") else {}
            extra |= {compat.forward_cache_argument(self._model): cache, "position_ids": torch.tensor([[at]])}
            with torch.no_grad():
                logits.append(self._step(input_ids=token.view(1, 1), use_cache=True, **extra).logits[0])
        return torch.cat(logits)


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    cache = compat.static_cache(compat.text_config(model), ROOM)
    extra = {"cache_position": torch.arange(ids.shape[1])} if compat.takes(model, "cache_position") else {}
    with torch.no_grad():
        model(input_ids=ids, **{compat.forward_cache_argument(model): cache}, use_cache=True, **extra)
    return cache


def addresses(cache: Any) -> list[int]:
    return [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.slow), "llama"])
def test_a_restored_static_cache_decodes_in_the_graphs_of_a_prefilled_one(name: str, tmp_path: Path) -> None:
    model = build_tiny(name)
    kv: BoundStore = CacheStore(tmp_path / "store").bind(model)
    ids, other = random_ids(LENGTH + 1), random_ids(LENGTH + 1, seed=9)
    kv.warm(ids[:, :LENGTH])
    kv.warm(other[:, :LENGTH])

    decoder = Decoder(model)
    control = decoder.decode(prefilled(model, ids[:, :LENGTH]), LENGTH)
    graphs = decoder.graphs
    assert graphs > 0

    decoder = Decoder(model)
    cache = kv.load(ids, cache_implementation="static", max_cache_len=ROOM)
    assert torch.allclose(decoder.decode(cache, LENGTH), control, atol=2e-4)
    assert decoder.graphs == graphs

    before = addresses(cache)
    assert kv.load(other, into=cache) is cache
    control = Decoder(model).decode(prefilled(model, other[:, :LENGTH]), LENGTH)
    assert addresses(cache) == before
    decoder = Decoder(model)
    decoder.decode(kv.load(ids, into=cache), LENGTH)
    first = decoder.graphs
    kv.load(other, into=cache)
    assert torch.allclose(decoder.decode(cache, LENGTH), control, atol=2e-4)
    assert decoder.graphs == first  # nothing was compiled anew for another prefix in the same buffers
    assert addresses(cache) == before


def test_a_cache_is_filled_in_place_whatever_it_held(tmp_path: Path) -> None:
    model = build_tiny("mistral")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(LENGTH + 1)
    kv.warm(ids[:, :LENGTH])
    for cache in (
        kv.load(ids),
        prefilled(model, random_ids(33, seed=5)),
        kv.load(ids, cache_implementation="static", max_cache_len=ROOM),
    ):
        assert kv.load(ids, into=cache) is cache
        beside = kv.load(ids)
        assert compat.cached_tokens(cache) == compat.cached_tokens(beside) == LENGTH
        for layer, other in zip(cache.layers, beside.layers, strict=True):
            rows = other.keys.shape[2]
            held = slice(min(layer.keys.shape[2], LENGTH) - rows, min(layer.keys.shape[2], LENGTH))
            assert torch.equal(layer.keys[:, :, held], other.keys)
            assert torch.equal(layer.values[:, :, held], other.values)
    used = kv.load(ids)
    assert kv.load(random_ids(9, seed=6), into=used) is None
    assert compat.cached_tokens(used) == 0
    with pytest.raises(InvalidRequestError, match="into= takes a DynamicCache or StaticCache, not a tuple"):
        kv.load(ids, into=())


def test_a_cache_to_be_filled_has_room_and_is_of_a_kind(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(LENGTH + 1)
    kv.warm(ids[:, :LENGTH])
    small = kv.load(ids[:, :9], cache_implementation="static", max_cache_len=20)
    with pytest.raises(InvalidRequestError, match=f"into= has room for 20 tokens, and the prompt has {LENGTH + 1}"):
        kv.load(ids, into=small)
    assert compat.cached_tokens(small) == 8
    for options in ({"cache_implementation": "static"}, {"max_cache_len": 90}, {"cache_config": {}}):
        with pytest.raises(InvalidRequestError, match="into= is a cache already"):
            kv.load(ids, into=kv.load(ids), **options)
