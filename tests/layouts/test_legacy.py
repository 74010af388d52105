"""Legacy tuples: pairs in and out, layers that keep nothing, what three models once had, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCABULARY, build_tiny
from transformers import DynamicCache

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore
from kvkeep.errors import CacheMismatchError, UnsupportedCacheError
from kvkeep.layouts import LayerPlan, plan_layers
from kvkeep.legacy import describe_legacy, to_pairs, tokens_for_pairs

TOKENS, HEADS, DIM = 12, 4, 16
JIT = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # GPT-BigCode of 4.57 at its import
FULL, NOTHING = LayerPlan("full"), LayerPlan("none")


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, **{compat.forward_cache_argument(model): cache}, use_cache=True)
    return cache


def pair(tokens: int = TOKENS, seed: int = 0, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn((batch, 2, tokens, DIM), generator=random),
        torch.randn((batch, 2, tokens, DIM), generator=random),
    )


def old_model(name: str, **settings: Any) -> Any:
    sizes = {"hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = getattr(transformers, f"{name}Config")(
        **sizes, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **settings
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()


# The layouts as those who read them describe them; the models of today no longer make them.


def bloom_layout(keys: torch.Tensor, values: torch.Tensor) -> Any:
    """[batch * heads, dim, tokens] and [batch * heads, tokens, dim]."""
    return keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)


def merged_layout(keys: torch.Tensor, values: torch.Tensor) -> Any:
    """[batch * heads, tokens, dim], twice."""
    return keys.flatten(0, 1), values.flatten(0, 1)


def fused_layout(keys: torch.Tensor, values: torch.Tensor) -> Any:
    """[batch, heads, tokens, 2 * dim], without the heads where there is one."""
    fused = torch.cat([keys, values], dim=-1)
    return fused[:, 0] if fused.shape[1] == 1 else fused


OLD: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "bloom": ("Bloom", {}, bloom_layout),
    "falcon multi-query": ("Falcon", {"multi_query": True}, merged_layout),
    "falcon with all heads": ("Falcon", {"multi_query": False, "alibi": True}, merged_layout),
    "falcon of the new architecture": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, merged_layout),
    "gpt_bigcode multi-query": ("GPTBigCode", {"multi_query": True}, fused_layout),
    "gpt_bigcode with all heads": ("GPTBigCode", {"multi_query": False}, fused_layout),
}


@JIT
@pytest.mark.parametrize("name", OLD)
def test_old_layouts_are_read_as_their_configuration_says(tmp_path: Path, name: str) -> None:
    model_class, settings, layout = OLD[name]
    model = old_model(model_class, **settings)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(TOKENS + 1)
    cache = prefilled(model, ids[:, :TOKENS])
    old = [layout(layer.keys, layer.values) for layer in cache.layers]
    assert all(len(one) != 2 or one[0].dim() == 3 for one in old)

    entry = kv.save(old, ids[:, :TOKENS])  # the guard compares it with what the model computes

    assert entry.end == TOKENS
    for ours, theirs in zip(kv.load(ids).layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    pairs = kv.to_legacy(cache)
    assert all(torch.equal(one[0], layer.keys) for one, layer in zip(pairs, cache.layers, strict=True))
    new = describe_legacy(pairs, plan_layers(model.config), TOKENS, model.config)
    assert [state.record.rows for state in new] == [TOKENS] * 2


@JIT
@pytest.mark.parametrize("name", OLD)
def test_old_layouts_of_other_sizes_are_refused_by_layer(tmp_path: Path, name: str) -> None:
    model_class, settings, layout = OLD[name]
    model = old_model(model_class, **settings)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(TOKENS)
    cache = prefilled(model, ids)
    good = layout(cache.layers[0].keys, cache.layers[0].values)
    double = layout(*(one.repeat(2, 1, 1, 1) for one in (cache.layers[1].keys, cache.layers[1].values)))
    shorter = layout(*(one[:, :, :-1] for one in (cache.layers[1].keys, cache.layers[1].values)))
    for odd in (double, shorter):
        with pytest.raises(CacheMismatchError, match="layer 1 of the cache cannot be saved: the shape of its"):
            kv.save((good, odd), ids, guard=False)
    if isinstance(good, tuple):  # keys of the one layout with values of the other
        with pytest.raises(CacheMismatchError, match="layer 0 of the cache cannot be saved: the shape of its"):
            kv.save(((good[0], good[1][None]), good), ids, guard=False)
    assert kv.store.entries() == []


def test_another_models_three_dimensions_and_fused_tensors_are_refused() -> None:
    config = build_tiny("llama").config
    merged = merged_layout(*pair())
    with pytest.raises(CacheMismatchError, match="layer 1 of the cache cannot be saved: its keys have the shape"):
        describe_legacy((pair(), merged), (FULL, FULL), TOKENS, config)
    with pytest.raises(CacheMismatchError, match=r"layer 1 of the tuple is a Tensor, not \(keys, values\)"):
        describe_legacy((pair(), fused_layout(*pair())), (FULL, FULL), TOKENS, config)
    with pytest.raises(CacheMismatchError, match="layer 0 of the cache cannot be saved: its keys have the shape"):
        describe_legacy(((torch.zeros(3), torch.zeros(3)),), (FULL,), TOKENS, config)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_lists_and_tuples_are_the_same(tmp_path: Path, name: str) -> None:
    model = build_tiny(name)
    ids = random_ids(TOKENS + 1)
    pairs = CacheStore(tmp_path / "any").bind(model).to_legacy(prefilled(model, ids[:, :TOKENS]))
    for number, given in enumerate(
        (pairs, list(pairs), [list(one) for one in pairs], tuple(list(one) for one in pairs))
    ):
        kv = CacheStore(tmp_path / str(number)).bind(model)
        kv.save(given, ids[:, :TOKENS])
        for layer, (keys, values) in zip(kv.load(ids).layers, pairs, strict=True):
            held = keys.shape[2]
            assert torch.equal(layer.keys[:, :, -held:], keys)
            assert torch.equal(layer.values[:, :, -held:], values)


def test_what_is_handed_out_is_a_view_of_the_cache(tmp_path: Path) -> None:
    model = build_tiny("llama")
    cache = prefilled(model, random_ids(TOKENS))
    pairs = CacheStore(tmp_path / "store").bind(model).to_legacy(cache)
    assert [one[0].data_ptr() for one in pairs] == [layer.keys.data_ptr() for layer in cache.layers]
    assert [one[1].data_ptr() for one in pairs] == [layer.values.data_ptr() for layer in cache.layers]


def test_a_layer_that_keeps_nothing_is_none_and_no_other_is() -> None:
    plans = (FULL, NOTHING, FULL)
    for nothing in (None, (None, None), []):
        states = describe_legacy((pair(), nothing, pair()), plans, TOKENS)
        assert [state.record.kind for state in states] == ["full", "none", "full"]
        assert [state.record.rows for state in states] == [TOKENS, 0, TOKENS]
    back = to_pairs(states)
    assert back[1] is None
    assert back[0] is not None
    assert torch.equal(back[0][0], pair()[0])
    with pytest.raises(CacheMismatchError, match=r"layer 0 of the tuple is a NoneType, not \(keys, values\)"):
        describe_legacy((None, None, pair()), plans, TOKENS)
    with pytest.raises(CacheMismatchError, match="the keys of layer 2 of the tuple are a NoneType"):
        describe_legacy((pair(), None, (None, None)), plans, TOKENS)
    with pytest.raises(CacheMismatchError, match="layer 1 of this model keeps nothing"):
        describe_legacy((pair(), pair(), pair()), plans, TOKENS)


def test_a_model_whose_layers_share_keys_round_trips(tmp_path: Path) -> None:
    """Where the version has places for such layers; where it has not, the tuple is shorter."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size=64, hidden_size_per_layer_input=16,
        intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
        laurel_rank=8, activation_sparsity_pattern=[0.0] * 4, initializer_range=0.3, altup_num_inputs=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).to(torch.float32).eval()
    ids = random_ids(TOKENS + 1)
    cache = prefilled(model, ids[:, :TOKENS])
    kv = CacheStore(tmp_path / "store").bind(model)
    pairs = kv.to_legacy(cache)
    assert [one is None for one in pairs] == [False, False, True, True][: len(cache.layers)]
    assert len(pairs) == (4 if compat.DUMMY_LAYERS else 2)
    kv.save(pairs, ids[:, :TOKENS])
    for ours, theirs in zip(kv.load(ids).layers[:2], cache.layers[:2], strict=True):
        assert torch.equal(ours.keys, theirs.keys)


@pytest.mark.parametrize("kind", ["linear", "linear+full", "indexed", "sparse_m3", "compressed_csa"])
def test_what_a_tuple_cannot_hold_is_refused_by_layer_and_kind(kind: str) -> None:
    plans = (FULL, LayerPlan(kind, snapshot=True))
    message = f"layer 1 of this model is of the kind '{kind.replace('+', '[+]')}'"
    with pytest.raises(UnsupportedCacheError, match=message):
        describe_legacy((pair(), pair()), plans, TOKENS)
    with pytest.raises(UnsupportedCacheError, match=message):
        tokens_for_pairs(DynamicCache(), plans)


def test_a_live_model_with_states_hands_out_no_tuple(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.3
    )
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).eval()
    kv = CacheStore(tmp_path / "store").bind(model)
    with torch.no_grad():
        out = model(input_ids=random_ids(TOKENS), use_cache=True)
    cache = next(one for name, one in out.items() if name.startswith(("cache", "past")))
    with pytest.raises(UnsupportedCacheError, match="layer 0 of this model is of the kind 'linear'"):
        kv.to_legacy(cache)


def test_odd_calls_are_refused_by_type(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv: BoundStore = CacheStore(tmp_path / "store").bind(model)
    with pytest.raises(CacheMismatchError, match="the cache is empty"):
        kv.to_legacy(DynamicCache(config=model.config))
    for odd in ((pair(),) * 3, torch.zeros(3), None):
        with pytest.raises(UnsupportedCacheError, match=f"a {type(odd).__name__} is not a cache"):
            kv.to_legacy(odd)
    ids = random_ids(TOKENS)
    with pytest.raises(CacheMismatchError, match="the tuple has no layers"):
        kv.save((), ids)
    with pytest.raises(CacheMismatchError, match="the cache has 2 layers, the model 3"):
        kv.save((pair(), pair()), ids)
    with pytest.raises(UnsupportedCacheError, match="layer 1 of the tuple has four tensors"):
        kv.save((pair(), pair() + pair(), pair()), ids)
    with pytest.raises(UnsupportedCacheError, match="layer 2 of the tuple has four tensors"):
        kv.save((pair(), pair(), (*pair(), None, None)), ids)
    with pytest.raises(CacheMismatchError, match="layer 0 of the tuple has 3 tensors"):
        kv.save(((*pair(), None), pair(), pair()), ids)
    with pytest.raises(CacheMismatchError, match="layer 1 of the cache cannot be saved: its keys have the shape"):
        kv.save((pair(), pair(batch=2), pair()), ids)
    with pytest.raises(CacheMismatchError, match="layer 2 of the cache cannot be saved: it holds rows from token 1"):
        kv.save((pair(), pair(), pair(TOKENS - 1)), ids)
    assert kv.store.entries() == []


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    "spoiled",
    [
        lambda keys, values: (keys, values[..., :4]),
        lambda keys, values: (keys[:, :1], values[:, :1]),
        lambda keys, values: (keys.half(), values.half()),
        lambda keys, values: (keys.double(), values.double()),
        lambda keys, values: (keys.int(), values),
    ],
    ids=["narrow values", "a head less", "half", "double", "integers"],
)
def test_rows_of_another_shape_or_format_are_refused(
    tmp_path: Path, number: int, spoiled: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    model, ids = build_tiny("llama"), random_ids(TOKENS)
    kv: BoundStore = CacheStore(tmp_path / "store").bind(model)
    pairs = [(layer.keys, layer.values) for layer in prefilled(model, ids).layers]
    pairs[number] = spoiled(*pairs[number])
    reason = "a row is|the model does not go on from it|a row computed again differs"
    with pytest.raises(CacheMismatchError, match=f"what this model computes for these inputs: ({reason})"):
        kv.save(pairs, ids)
    assert kv.store.entries() == []
