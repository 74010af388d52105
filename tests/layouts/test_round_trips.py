"""Kinds of cache by number formats: what is loaded is what was stored, bit for bit, and goes on to the same logits.

Every class of layer that either version of transformers has goes through the same in the sweep and in the codecs'
contract, in float32; here are the number formats, with the classes that most models use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_NAMES, VOCABULARY, build_tiny
from transformers import DynamicCache, StaticCache

from kvkeep import CacheStore, compat

STORED, CAPACITY = 30, 48
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

# torch multiplies the experts of gpt_oss in no float64
CASES = [(name, dtype) for name in TINY_NAMES for dtype in DTYPES if (name, dtype) != ("gpt_oss", torch.float64)]


def feed(model: Any, cache: Any, ids: torch.Tensor, seen: int) -> torch.Tensor:
    """The logits behind these ids."""
    places = (
        {"cache_position": torch.arange(seen, seen + ids.shape[1])} if compat.takes(model, "cache_position") else {}
    )
    with torch.no_grad():
        return model(ids, **{compat.forward_cache_argument(model): cache}, use_cache=True, **places).logits[:, -1]


def tensors(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.requirement("R15")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_what_is_loaded_is_what_was_stored(
    tmp_path: Path, name: str, kind: str, dtype: torch.dtype, cell: Callable[..., None]
) -> None:
    model = build_tiny(name).to(dtype)
    ids = torch.randint(3, VOCABULARY, (1, STORED + 2), generator=torch.Generator().manual_seed(3))
    if kind == "dynamic":
        cache, settings = DynamicCache(config=model.config), {}
    else:
        cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
        settings = {"cache_implementation": "static", "max_cache_len": CAPACITY}
    feed(model, cache, ids[:, :STORED], 0)
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.save(cache, ids[:, :STORED], guard=False)
    loaded = kv.load(ids[:, : STORED + 1], **settings)
    assert [type(layer).__name__.removeprefix("Roomy") for layer in loaded.layers] == [
        type(layer).__name__ for layer in cache.layers
    ]
    for mine, theirs in zip(tensors(loaded), tensors(cache), strict=True):
        assert mine.dtype == theirs.dtype == dtype
        assert torch.equal(mine, theirs)
    kept = copy.deepcopy(cache)
    for at in range(STORED, STORED + 2):
        one = ids[:, at : at + 1]
        assert torch.equal(feed(model, loaded, one, at), feed(model, kept, one, at))
    place = 2 * TINY_NAMES.index(name) + (kind == "static"), f"{name}, {kind}"
    cell("round trips, bit for bit", place, (DTYPES.index(dtype), str(dtype).removeprefix("torch.")), "equal")
