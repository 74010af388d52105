"""What a hit and a miss cost, in counts that no other work on the machine changes: bytes, calls, queries, copies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeep import CacheStore
from kvkeep.bound import BoundStore

LAYERS, HEADS, DIM, ITEM = 3, 2, 16, 4  # of the tiny Llama
STORED, NEW = 600, 4
COPIES = {"cat", "clone", "copy_", "_to_copy", "index_select", "repeat"}


def random_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


class PrefixCopies(TorchDispatchMode):
    """Counts the operations that write keys or values of a whole prefix anew, by name."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in COPIES and isinstance(result, torch.Tensor) and result.dim() == 4:
            self.found[name] += result.shape[1] == HEADS and result.shape[2] >= self.tokens
        return result


@contextmanager
def counted(kv: BoundStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What the system and the index are asked for meanwhile."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            counts[name] += 1
            if name == "preadv":
                counts["bytes"] += result
            return result

        return call

    reader = kv.store._catalog._index._source._reader  # type: ignore[union-attr]
    assert reader is not None
    reader.set_trace_callback(lambda statement: counts.update({"query": 1}))
    with monkeypatch.context() as patch:
        for name in (
            "open",
            "preadv",
            "pread",
            "read",
            "write",
            "pwrite",
            "stat",
            "fstat",
            "scandir",
            "listdir",
            "fsync",
        ):
            patch.setattr(os, name, counting(name))
        yield counts
    reader.set_trace_callback(None)


@pytest.fixture
def kv(tiny_llama: Any, tmp_path: Path) -> BoundStore:
    kv = CacheStore(tmp_path / "store").bind(tiny_llama)
    kv.warm(random_ids(STORED, 1))
    kv.generate(torch.cat([random_ids(STORED, 1), random_ids(5, 2)], dim=1), max_new_tokens=1)  # verifies what it reads
    return kv


def test_a_hit_reads_its_rows_once_and_copies_them_never(
    kv: BoundStore, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = torch.cat([random_ids(STORED, 1), random_ids(7, 3)], dim=1)
    with counted(kv, monkeypatch) as counts, PrefixCopies(STORED - 1) as copies:
        served = kv.generate(prompt, max_new_tokens=NEW, do_sample=False)
    assert kv.last_report.reused_tokens == STORED - 1
    rows = LAYERS * 2 * HEADS * STORED * DIM * ITEM  # of the tokens that are not fed, and of the one that is compared
    ids_and_digests = ITEM * STORED + 16 * (STORED // 256)
    assert counts == {
        "bytes": rows + ids_and_digests,
        "preadv": LAYERS + 1,
        "open": 4,  # the folder of the index, and the three parts of the entry's path
        "fstat": 2,
        "stat": 1,
        "query": 1,  # whether the index was changed
    }
    assert not copies.found.total()
    with PrefixCopies(STORED - 1) as control:
        expected = tiny_llama.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
        )
    assert control.found["cat"] >= LAYERS * 2 * NEW  # what transformers' own layers do
    assert torch.equal(served, expected)


def test_a_miss_reads_nothing(kv: BoundStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(kv, monkeypatch) as counts:
        kv.generate(random_ids(STORED, 4), max_new_tokens=NEW, do_sample=False)
    assert counts == {"open": 1, "stat": 1, "query": 1}
    assert kv.last_report.reused_tokens == 0
