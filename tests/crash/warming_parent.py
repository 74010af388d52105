"""Holds a model and forks children that warm prefixes and die: run by test_warm_kill.py, in an interpreter of its own.

A child writes ``T`` to a pipe when a put has created its temporary file, and ``R`` when the index row is written. The
parent kills it at a random moment after the first ``T`` of a round, or at any moment at all, and then looks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore
from kvkeep.storage.fileio import Temporary
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index

TOKENS = 400


def prompt(number: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(number)).tolist()


def tell(pipe: int) -> None:
    """Make every put of this process say how far it is."""
    make, add = Directory.temporary, Index.add

    @contextmanager
    def temporary(self: Directory, suffix: str) -> Iterator[Temporary]:
        with make(self, suffix) as made:
            if suffix.endswith(".safetensors"):
                os.write(pipe, b"T")
            yield made

    def added(self: Index, row: Any) -> None:
        add(self, row)
        os.write(pipe, b"R")

    Directory.temporary = temporary  # type: ignore[method-assign]
    Index.add = added  # type: ignore[method-assign]


def warm_for_ever(model: Any, path: Path, pipe: int, first: int) -> NoReturn:
    try:
        tell(pipe)
        kv = CacheStore(path).bind(model)
        for number in range(first, first + 1000):
            kv.warm(prompt(number), name=f"prompt-{number}")
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)


def round_of(model: Any, path: Path, first: int, dice: random.Random) -> str:
    """One child and its end. Returns what it had said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        warm_for_ever(model, path, writing, first)
    os.close(writing)
    said = b""
    if dice.random() < 0.7:
        while not said.endswith(b"T"):
            said += os.read(reading, 1) or sys.exit("the child ended by itself")
        time.sleep(dice.uniform(0, 0.003))
    else:
        time.sleep(dice.uniform(0, 0.4))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    while more := os.read(reading, 4096):
        said += more
    os.close(reading)
    return said.decode()


def look(model: Any, path: Path, first: int) -> int:
    """Every entry whole or absent; the next run completes. Returns how many entries there are."""
    store = CacheStore(path)
    kv = store.bind(model)
    entries = store.entries()
    on_disk = {file.stem for file in path.glob("entries/*/*.safetensors")}
    assert {entry.key for entry in entries} == on_disk
    for entry in entries:
        assert store.verify(entry.key) is None
    began = time.perf_counter()
    entry = kv.warm(prompt(first))
    assert time.perf_counter() - began < 5, "a dead holder's lock was waited for"
    assert store.verify(entry.key) is None
    assert kv.lookup(prompt(first)).tokens == TOKENS - 1
    return len(on_disk)


def main() -> None:
    path, rounds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    model, dice = build_tiny("gemma3"), random.Random(5)
    CacheStore(path).bind(model)
    amid, counts = 0, []
    for number in range(rounds):
        said = round_of(model, path, 1000 * number, dice)
        amid += said.endswith("T")
        counts.append(look(model, path, 1000 * number))
    print(json.dumps({"kills": rounds, "amid": amid, "entries": counts}))


if __name__ == "__main__":
    main()
