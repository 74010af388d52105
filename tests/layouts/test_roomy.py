"""Layers with room: the numbers of ``DynamicLayer`` in every use, with the prefix copied only where it must be."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny
from transformers import DynamicCache

from kvkeep import CacheStore, compat
from kvkeep.layouts.roomy import RoomyLayer


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def rows(count: int, seed: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((batch, 2, count, 4), generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(held: int = 5, room: int = 6) -> tuple[RoomyLayer, Any]:
    """A layer with room and a plain one, with the same rows."""
    keys, values = rows(held, 1), rows(held, 2)
    layer = RoomyLayer(room)
    buffers = [torch.full((1, 2, held + room, 4), float("nan")) for _ in range(2)]
    for buffer, content in zip(buffers, (keys, values), strict=True):
        buffer[:, :, :held] = content
    layer.own(*buffers, held)
    plain = compat.DYNAMIC_LAYER()
    compat.fill_dynamic(plain, keys.clone(), values.clone(), held)
    return layer, plain


def assert_alike(layer: Any, plain: Any) -> None:
    assert torch.equal(layer.keys, plain.keys)
    assert torch.equal(layer.values, plain.values)
    assert layer.get_seq_length() == plain.get_seq_length()


@torch.no_grad()
def append(layer: Any, plain: Any, count: int, seed: int, **options: Any) -> None:
    new = rows(count, seed, **options), rows(count, seed + 1, **options)
    for ours, theirs in zip(layer.update(*new), plain.update(*new), strict=True):
        assert torch.equal(ours, theirs)
    assert_alike(layer, plain)


def test_rows_are_appended_in_place_until_the_room_is_used_up() -> None:
    layer, plain = filled()
    place = layer.keys.data_ptr()
    append(layer, plain, 4, 10)
    append(layer, plain, 2, 20)
    assert layer.keys.data_ptr() == place
    append(layer, plain, 1, 30)  # full: grown by concatenation
    assert layer.keys.data_ptr() != place
    append(layer, plain, 3, 40)


@pytest.mark.parametrize("moved", ["copy", "deepcopy", "pickle", "save"])
def test_copies_do_not_write_into_each_other(moved: str) -> None:
    layer, plain = filled()
    if moved == "save":
        file = io.BytesIO()
        torch.save(layer, file)
        assert len(file.getvalue()) < 6_000
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        other = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}[
            moved
        ](layer)
    twin = copy.deepcopy(plain)
    append(layer, plain, 2, 10)
    append(other, twin, 2, 50)
    assert_alike(layer, plain)
    append(layer, plain, 1, 30)
    assert_alike(other, twin)


def test_whoever_replaces_the_tensors_gets_a_plain_layer() -> None:
    for change in (
        lambda one: one.crop(-2 if compat.GENERATE_CACHE_ARGUMENT == "cache" else 3),
        lambda one: setattr(one, "keys", one.keys.clone()),
        lambda one: one.batch_repeat_interleave(2) if hasattr(one, "batch_repeat_interleave") else None,
        lambda one: one.reorder_cache(torch.tensor([0])),
    ):
        layer, plain = filled()
        place = layer.keys.data_ptr()
        change(layer)
        change(plain)
        assert_alike(layer, plain)
        append(layer, plain, 2, 10, batch=layer.keys.shape[0])
        assert layer.keys.data_ptr() != place or layer.keys.shape[-2] == plain.keys.shape[-2]


def test_gradients_and_other_batches_and_dtypes_are_not_written_in_place() -> None:
    layer, plain = filled()
    new = rows(2, 10).requires_grad_(), rows(2, 11)
    for ours, theirs in zip(layer.update(*new), plain.update(*new), strict=True):
        assert torch.equal(ours, theirs)
    assert layer.keys.requires_grad
    layer, _ = filled()
    with torch.no_grad(), pytest.raises(RuntimeError):  # as DynamicLayer does; never broadcast into the room
        layer.update(rows(1, 3, batch=4), rows(1, 4, batch=4))
    layer, plain = filled()
    append(layer, plain, 2, 10, dtype=torch.float64)


def test_buffers_of_inference_mode_are_left_alone_outside_it() -> None:
    with torch.inference_mode():
        layer, plain = filled()
        append(layer, plain, 1, 10)
    append(layer, plain, 1, 20)
    layer, plain = filled()
    with torch.inference_mode():
        append(layer, plain, 1, 10)
    append(layer, plain, 1, 20)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_gives_what_a_plain_cache_gives_bit_for_bit(tmp_path: Path, name: str) -> None:
    """And no full layer is copied: its buffers stay where they were through every token."""
    model = build_tiny(name)
    kv = CacheStore(tmp_path / "store").bind(model, guard=False)
    ids = random_ids(60)
    kv.warm(ids[:, :50])
    cache = kv.load(ids)
    assert type(cache) is DynamicCache
    assert not any(isinstance(layer, RoomyLayer) for layer in cache.layers)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), **{compat.GENERATE_CACHE_ARGUMENT: cache}, **options
    )
    ours = kv.generate(ids, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(plain.logits))
    kept = getattr(ours, "cache", None) or ours.past_key_values
    roomy = [layer for layer in kept.layers if isinstance(layer, RoomyLayer)]
    assert len(roomy) == {"llama": 3, "gemma3": 1}[name]
    for layer in roomy:
        assert layer.keys.data_ptr() == layer._buffers[0].data_ptr()
        assert layer.keys.shape[-2] == 79
    entry = kv.save(kept, ours.sequences[:, :-1], guard=True)
    assert entry.tokens == 79
    copied = copy.deepcopy(kept)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(copied.layers, kept.layers, strict=True))


def test_room_is_for_what_is_coming_and_no_more(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(60)
    kv.warm(ids[:, :50])
    for new, room in ((1, 12), (20, 31), (2000, 267)):
        out = kv.generate(
            ids, max_new_tokens=new, stopping_criteria=[lambda *_: torch.tensor([True])], return_dict_in_generate=True
        )
        kept = getattr(out, "cache", None) or out.past_key_values
        assert kept.layers[0]._buffers[0].shape[2] == 49 + room


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # 4.57 under newer torch
def test_a_graph_of_the_whole_forward_takes_layers_with_room(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(60)
    kv.warm(ids[:, :50])
    out = kv.generate(ids, max_new_tokens=3, return_dict_in_generate=True)
    kept = getattr(out, "cache", None) or out.past_key_values
    twin = copy.deepcopy(kept)
    name = compat.forward_cache_argument(model)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        whole = forward(input_ids=ids[:, :1], **{name: kept}, use_cache=True).logits
        plain = model(input_ids=ids[:, :1], **{name: twin}, use_cache=True).logits
    assert torch.equal(whole, plain)
    torch._dynamo.reset()
