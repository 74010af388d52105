"""One index in many processes at once: what is left is sound, and nobody was told anything wrong."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from entry_drafts import sample

from kvkeep import CacheStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

PROCESSES = 8


def _work(path: str, number: int, operations: int, barrier: Any, queue: Any) -> None:
    dice, store = random.Random(number), CacheStore(path, durability="none")
    drafts = [sample([], end=4, seed=100 * number + seed).draft for seed in range(20)]
    here: set[str] = set()
    barrier.wait(120)
    wrong = None
    for _ in range(operations):
        draft = dice.choice(drafts)
        key = draft.meta.key.hash
        if dice.random() < 0.97:  # what most processes do most of the time
            if (store._catalog.row(key) is not None) != (key in here):
                wrong = f"{key} is not as this process left it"
        elif key in here:
            store.remove(key)
            here.discard(key)
        else:
            store.put(draft)
            here.add(key)
    queue.put((number, wrong or sorted(here)))


@pytest.mark.requirement("R23", part=True)
@pytest.mark.parametrize("operations", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_index_is_sound_after_thousands_of_operations_in_each_of_eight_processes(
    tmp_path: Path, operations: int, figures: list[str]
) -> None:
    path, context, began = tmp_path / "store", multiprocessing.get_context("fork"), time.monotonic()
    store = CacheStore(path)
    store.entries()  # open when it is forked
    barrier, queue = context.Barrier(PROCESSES), context.Queue()
    children = [
        context.Process(target=_work, args=(str(path), number, operations, barrier, queue))
        for number in range(PROCESSES)
    ]
    for child in children:
        child.start()
    left = dict(queue.get(timeout=500) for _ in children)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    with sqlite3.connect(path / "index" / "cache.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        keys = {key for (key,) in database.execute("SELECT key FROM Cache")}
    database.close()
    assert all(isinstance(rows, list) for rows in left.values()), left
    assert keys == {key for rows in left.values() for key in rows}
    figures.append(
        f"index: {PROCESSES} processes, {operations:,} operations each, {time.monotonic() - began:.1f} s, integrity ok"
    )
