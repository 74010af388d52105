"""Of many processes that want the same prefixes, one computes each; and what becomes of them when locks do nothing."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import forking
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore
from kvkeep.storage.fs import Directory
from kvkeep.storage.locks import KeyLocks

WORKERS, PREFIXES, TOKENS = 16, 8, 300


def prefix(number: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(100 + number))


def _warm_all(path: str, barrier: Any, locked: bool) -> tuple[list[int], list[tuple[int, float]]]:
    torch.set_num_threads(1)
    if not locked:
        KeyLocks._acquire = lambda *_: (None, True)  # type: ignore[method-assign]
    model = build_tiny("llama")
    kv = CacheStore(path).bind(model)
    barrier.wait(240)
    prefilled: list[int] = []
    tokens = []
    for number in range(PREFIXES):
        kv.warm(prefix(number), progress=lambda done, total, n=number: prefilled.append(n) if done == total else None)
        cache = kv.load(torch.cat([prefix(number), prefix(number)[:, :1]], dim=1))
        tokens.append((number, float(cache.layers[0].keys.double().sum())))
    return prefilled, tokens


def _answer(queue: Any, *arguments: Any) -> None:
    try:
        queue.put(_warm_all(*arguments))
    except BaseException:
        queue.put(traceback.format_exc())
        raise


def race(path: Path, workers: int, *, locked: bool) -> tuple[list[int], list[Any]]:
    """How often each prefix was prefilled when so many processes begin at once, and what each of them then had."""
    context = forking()
    barrier, queue = context.Barrier(workers), context.Queue()
    children = [context.Process(target=_answer, args=(queue, str(path), barrier, locked)) for _ in range(workers)]
    for child in children:
        child.start()
    results = [queue.get(timeout=240) for _ in children]
    for child in children:
        child.join(60)
    assert not [result for result in results if isinstance(result, str)]
    everything = [number for prefilled, _ in results for number in prefilled]
    return [everything.count(number) for number in range(PREFIXES)], [tokens for _, tokens in results]


@pytest.mark.slow
@pytest.mark.requirement("R20")
def test_sixteen_processes_on_an_empty_store_prefill_each_of_eight_prefixes_once(
    tmp_path: Path, figures: list[str]
) -> None:
    began = time.perf_counter()
    counts, loaded = race(tmp_path / "store", WORKERS, locked=True)
    assert counts == [1] * PREFIXES
    assert loaded == [loaded[0]] * WORKERS
    seconds = time.perf_counter() - began
    figures.append(f"single flight: {WORKERS} processes, {PREFIXES} prefixes, {sum(counts)} prefills, {seconds:.1f} s")


@pytest.mark.slow
@pytest.mark.requirement("R21", part=True)
def test_without_locks_work_is_done_twice_and_nothing_is_wrong(tmp_path: Path, figures: list[str]) -> None:
    counts, loaded = race(tmp_path / "store", 6, locked=False)
    assert all(1 <= count <= 6 for count in counts)
    assert loaded == [loaded[0]] * 6
    store = CacheStore(tmp_path / "store")
    assert len(store.entries()) == PREFIXES
    assert all(store.verify(entry.key) is None for entry in store.entries())
    figures.append(f"without locks: 6 processes, {PREFIXES} prefixes, {sum(counts)} prefills, 0 wrong")


@pytest.mark.requirement("R21", part=True)
def test_behind_a_holder_that_hangs_the_prompt_is_computed(tiny_llama: Any, tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store", lock_timeout=0.3)
    kv, ids = store.bind(tiny_llama), prefix(0)
    key = CacheStore(tmp_path / "other").bind(tiny_llama).warm(ids).key
    with KeyLocks(Directory(tmp_path / "store")).hold(key, timeout=0) as held:
        assert held
        began = time.monotonic()
        assert kv.warm(ids).key == key
        assert 0.3 <= time.monotonic() - began < 60
        assert kv.lookup(ids).tokens == TOKENS - 1
