"""Memory for loaded rows that is used again: touching fresh pages costs several times as much as reading into them.

An arena is one stretch of memory for all layers of one hand-out. It goes back to the pool when the last tensor in it is
gone, which for a dynamic cache is after the first forward pass, and the next load finds its pages in place.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

KEPT = 256 << 20
"""Bytes that a process keeps for the next load, at most."""

_ALIGNMENT = 64

# Finalizers use it, at any moment and in any thread: so no lock, only operations that are atomic.
_idle: deque[mmap.mmap] = deque()

# Pages shared with a child after a fork would let one process write into the other's cache.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Arena:
    """Room for tensors like these on the CPU, one after the other."""

    def __init__(self, likes: Iterable[torch.Tensor]) -> None:
        self._memory = _take(sum(_aligned(like.nbytes) for like in likes))
        self._used = 0
        # One item for the arena and each tensor. Whoever goes takes the last; who gets the first was the last to go.
        self._alive: list[mmap.mmap | None] = [self._memory]
        self._watch(self)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype of ``like``, with whatever content."""
        begin, self._used = self._used, self._used + _aligned(like.nbytes)
        content = np.frombuffer(self._memory, dtype=np.uint8, count=like.nbytes, offset=begin)
        self._alive.append(None)
        self._watch(content)  # the tensor's storage keeps it
        return torch.from_numpy(content).view(like.dtype).view(like.shape)

    def _watch(self, one: object) -> None:
        weakref.finalize(one, _gone, self._alive).atexit = False


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _gone(alive: list[mmap.mmap | None]) -> None:
    memory = alive.pop()
    if memory is not None:
        _idle.append(memory)
        while sum(map(len, tuple(_idle))) > KEPT:
            _idle.popleft()


def _take(size: int) -> mmap.mmap:
    for _ in range(len(_idle)):
        try:
            memory = _idle.popleft()
        except IndexError:  # another thread was quicker
            break
        if size <= len(memory) <= 2 * size:
            return memory
        _idle.append(memory)
    return mmap.mmap(-1, max(size, 1), **_PRIVATE)
