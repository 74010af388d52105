"""Layers held in memory: what is lent of them is shared until somebody writes, on other devices it is copied."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore, compat
from kvkeep.layouts import HeldLayers, fill_cache
from kvkeep.layouts.lending import lent
from kvkeep.layouts.roomy import RoomyLayer

TOKENS = 30


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny("gemma3")


@pytest.fixture
def held(model: Any, tmp_path: Path) -> Any:
    """An entry of full and sliding layers that is held in memory."""
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1)))
    kv.preload([kv.store.entries()[0].key])
    (entry,) = kv.store.memory.entries()
    return entry


def filled(model: Any, held: Any, tokens: int, device: str = "cpu", *, room: int = 0) -> tuple[Any, Any]:
    meta, cache = held.header.meta, compat.dynamic_cache(compat.text_config(model))
    devices = [torch.device(device)] * len(meta.layers)
    row = fill_cache(
        cache, meta, held.header.tensors, tokens, held.layers["layers"], devices, next_row=tokens < TOKENS, room=room
    )
    return cache, row


@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS - 1, TOKENS - 3])
def test_it_holds_the_rows_and_the_row_behind_them(model: Any, held: Any, tokens: int, room: int) -> None:
    cache, row = filled(model, held, tokens, room=room)
    for number, layer in enumerate(cache.layers):
        first = held.header.meta.layers[number].first
        begin = tokens - layer.keys.shape[2] - first
        for role in ("keys", "values"):
            stored = held.layers["layers"].rows(number, 0, TOKENS)[role]
            assert torch.equal(getattr(layer, role)[0], stored[:, begin : tokens - first])
            if row is not None:
                assert torch.equal(row[number][role], stored[:, tokens - first : tokens - first + 1])
        assert compat.seen_tokens(layer) == tokens
        assert isinstance(layer, RoomyLayer) == bool(room and not hasattr(layer, "sliding_window"))


def test_on_another_device_it_is_copied_into_buffers_with_room(model: Any, held: Any) -> None:
    """On ``meta`` in the place of an accelerator."""
    cache, row = filled(model, held, TOKENS - 1, "meta", room=5)
    assert {layer.keys.device.type for layer in cache.layers} == {"meta"}
    assert {rows.device.type for one in row for rows in one.values()} == {"cpu"}
    roomy = [layer for layer in cache.layers if isinstance(layer, RoomyLayer)]
    assert [layer._buffers[0].shape[2] for layer in roomy] == [TOKENS - 1 + 5]
    assert [layer.keys.shape[2] for layer in roomy] == [TOKENS - 1]


def test_a_view_for_each_stretch_is_kept_and_not_for_all() -> None:
    rows = torch.arange(2000.0).reshape(1, 1000, 2)
    held = HeldLayers([{"keys": rows}], [{}])
    assert held.rows(0, 3, 9)["keys"] is held.rows(0, 3, 9)["keys"]
    for first in range(200):
        assert torch.equal(held.rows(0, first, 1000)["keys"], rows[:, first:])
    assert len(held._views) <= 16
    assert held.nbytes == 8000
    assert held.devices == {"cpu"}


@pytest.mark.parametrize("shared", [True, False])
def test_whoever_writes_gets_a_copy(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shared:
        monkeypatch.delattr(torch, "_lazy_clone")
    held = HeldLayers([{"keys": torch.ones((2, 9, 4))}], [{"conv.0": torch.ones(3)}])
    start = threading.Barrier(8)

    def write(number: int) -> list[torch.Tensor]:
        start.wait(60)
        loans = [lent(held.rows(0, 2, 7)["keys"]), lent(held.snapshots(0)["conv.0"])]
        for loan in loans:
            loan.mul_(number)
        return loans

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for number, loans in enumerate(pool.map(write, range(8))):
                assert all(torch.equal(loan, torch.full_like(loan, number)) for loan in loans)
    assert torch.equal(held.rows(0, 0, 9)["keys"], torch.ones((2, 9, 4)))
    assert torch.equal(held.snapshots(0)["conv.0"], torch.ones(3))


def test_nothing_at_all_and_tensors_of_inference_mode_can_be_lent() -> None:
    with torch.inference_mode():
        mine = torch.ones((1, 3, 2))
    for tensor in (mine, torch.empty((2, 0, 4)), torch.ones((1, 3, 2)).to(torch.bfloat16)):
        assert torch.equal(lent(tensor), tensor)
        assert lent(tensor[:, :2]).shape == tensor[:, :2].shape
    loan = lent(mine)
    with torch.inference_mode():
        lent(loan).zero_()
    assert torch.equal(mine, torch.ones((1, 3, 2)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # 4.57 under newer torch
def test_a_graph_of_the_whole_forward_takes_what_is_lent(tmp_path: Path) -> None:
    model, ids = build_tiny("llama"), torch.arange(3, 3 + TOKENS)[None]
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids)
    (entry,) = kv.preload([ids])
    (held,) = kv.store.memory.entries()
    before = [{role: rows.clone() for role, rows in held.layers["layers"].rows(n, 0, TOKENS).items()} for n in range(3)]
    name = compat.forward_cache_argument(model)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        whole = forward(input_ids=ids[:, :2], **{name: filled(model, held, TOKENS, room=5)[0]}, use_cache=True).logits
        plain = model(input_ids=ids[:, :2], **{name: filled(model, held, TOKENS)[0]}, use_cache=True).logits
    torch._dynamo.reset()
    assert torch.equal(whole, plain)
    after = [held.layers["layers"].rows(n, 0, TOKENS) for n in range(3)]
    assert all(torch.equal(one[role], two[role]) for one, two in zip(before, after, strict=True) for role in one)
    assert entry.tokens == TOKENS
