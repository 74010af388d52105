"""Arenas are used again once nothing lies in them, and never before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from kvkeep.layouts import arena
from kvkeep.layouts.arena import Arena

LIKE = torch.empty((3, 100, 64), dtype=torch.float32, device="meta")
ODD = torch.empty((1, 7, 3), dtype=torch.bfloat16, device="meta")


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    gc.collect()
    arena._idle.clear()
    yield
    arena._idle.clear()


def test_tensors_are_apart_aligned_and_of_the_right_kind() -> None:
    room = Arena([ODD, LIKE, LIKE])
    tensors = [room.empty(like) for like in (ODD, LIKE, LIKE)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [(t.shape, t.dtype, t.data_ptr() % 64) for t in tensors] == [
        (ODD.shape, torch.bfloat16, 0),
        (LIKE.shape, torch.float32, 0),
        (LIKE.shape, torch.float32, 0),
    ]
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, number + 1))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_memory_is_used_again_when_the_last_view_is_gone_and_not_before() -> None:
    room = Arena([LIKE, LIKE])
    first, second = room.empty(LIKE), room.empty(LIKE)
    address, view = first.data_ptr(), second[0, :5]
    second[0, 0, 0] = 7
    del room, first, second
    assert len(arena._idle) == 0  # the view still lies in it
    other = Arena([LIKE, LIKE])
    assert other.empty(LIKE).data_ptr() != address
    assert view[0, 0] == 7
    del view
    assert len(arena._idle) == 1
    assert Arena([LIKE, LIKE]).empty(LIKE).data_ptr() == address


def test_an_arena_that_is_much_too_large_or_too_small_is_not_taken() -> None:
    for likes in ([LIKE] * 8, [LIKE]):
        room = Arena(likes)
        room.empty(LIKE)
        del room
    assert len(arena._idle) == 2
    Arena([LIKE] * 3)
    assert len(arena._idle) == 3


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "KEPT", 5 * LIKE.nbytes)
    rooms = [Arena([LIKE] * 2) for _ in range(4)]
    del rooms
    assert sum(map(len, arena._idle)) == 4 * LIKE.nbytes
