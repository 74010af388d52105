"""Somebody who looks all the time, beside puts that fail and writers that are killed, never sees what is not whole."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from entry_drafts import full, sample

from kvkeep import CacheStore
from kvkeep.errors import StoreError
from kvkeep.testing.faults import failing

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

DRAFTS = [sample([full("BF16", room=30)], end=300, seed=seed).draft for seed in range(12)]


def put_and_remove(path: str, seed: int) -> None:
    dice, store = random.Random(seed), CacheStore(path, durability=random.Random(seed).choice(["full", "none"]))
    while True:
        draft = dice.choice(DRAFTS)
        with suppress(StoreError):
            store.put(draft)
        if dice.random() < 0.5:
            with suppress(StoreError):
                store.remove(draft.meta.key.hash)


class Watcher:
    """Looks at every key over and over, by the index and by name; what it finds must be whole."""

    def __init__(self, path: Path) -> None:
        self.looks = self.found = 0
        self.wrong: list[str] = []
        self._path, self._over = path, threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(readonly,)) for readonly in (False, True)]

    def __enter__(self) -> Any:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, readonly: bool) -> None:
        store = CacheStore(self._path, readonly=readonly, verify="always")
        while not self._over.wait(0.005):
            listed = {entry.key for entry in store.entries()}
            for draft in DRAFTS:
                key = draft.meta.key.hash
                self.looks += 1
                try:
                    with store._files.open(key) as file:
                        file.verify_all()
                    self.found += 1
                except FileNotFoundError:
                    continue
                except Exception as error:  # noqa: BLE001  # anything else is what must not be
                    self.wrong.append(f"{key} {key in listed}: {error!r}")


@pytest.mark.requirement("R14", part=True)
def test_a_reader_beside_writers_that_are_killed_sees_no_unfinished_put(tmp_path: Path, figures: list[str]) -> None:
    path, dice, context = tmp_path / "store", random.Random(0), multiprocessing.get_context("fork")
    CacheStore(path)
    kills, until = 0, time.monotonic() + 4
    writers: list[Any] = []
    with Watcher(path) as watcher:
        while time.monotonic() < until:
            while len(writers) < 2:
                writers.append(context.Process(target=put_and_remove, args=(str(path), dice.randrange(1 << 30))))
                writers[-1].start()
            time.sleep(dice.uniform(0.02, 0.25))
            victim = writers.pop(dice.randrange(2))
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            kills += 1
        for writer in writers:
            writer.kill()
            writer.join()
    assert watcher.wrong == []
    assert watcher.found > 20
    assert not (path / "quarantine").exists()
    figures.append(
        f"watched puts: {kills} writers killed, {watcher.looks:,} looks, {watcher.found:,} found, 0 unfinished"
    )


def fail_everywhere(path: str, queue: Any) -> None:
    store, key = CacheStore(path), DRAFTS[0].meta.key.hash
    with failing(-1, 0) as made:
        store.put(DRAFTS[0])
    refused = 0
    for at in range(1, len(made) + 1):
        store.remove(key)
        try:
            with failing(at, errno.ENOSPC):
                store.put(DRAFTS[0])
        except StoreError:
            refused += 1
            assert not store._files.is_there(key), made[at - 1]
    queue.put(refused)


@pytest.mark.requirement("R14", part=True)
def test_a_reader_beside_puts_that_fail_sees_no_unfinished_put(tmp_path: Path) -> None:
    path, context = tmp_path / "store", multiprocessing.get_context("fork")
    CacheStore(path)
    queue = context.Queue()
    child = context.Process(target=fail_everywhere, args=(str(path), queue))
    child.start()
    with Watcher(path) as watcher:
        refused = queue.get(timeout=120)
        child.join()
    assert watcher.wrong == []
    assert refused > 10
