"""One worker of test_stress.py: does random things to a shared store until it is killed.

What it is about to do and what is done goes to its own file of expected state, which the next worker of its number
reads: a key that was stored, and whose removal was not begun, must be there. It alone stores and removes its keys;
everybody reads all. A wrong value ends it with a line that says so.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from entry_drafts import IDENTITY, Sample, full, read_everything, sample, sliding

from kvkeep.prefixes import Prefix
from kvkeep.storage.entries import EntryFile
from kvkeep.store import CacheStore

WORKERS = 4
LAYERS = [full("BF16", heads=2, dim=32, room=20), sliding(first=300, window=200), full(heads=1, dim=16)]
SAMPLES = [[sample(LAYERS, end=500, seed=100 * worker + n) for n in range(6)] for worker in range(WORKERS)]


class WrongValueError(Exception):
    """What was read is not what was stored, or what was stored is gone."""


def expected(path: Path) -> tuple[set[str], set[str]]:
    """The keys that must be there, and those that may be."""
    state: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if len(line) == 34:  # the last one may be cut short
            state[line[2:]] = line[0]
    return {key for key, what in state.items() if what == "+"}, {key for key, what in state.items() if what in "?-"}


def settings(dice: random.Random) -> dict[str, object]:
    """Those under which nothing that was stored may go."""
    return {
        "verify": dice.choice(["first", "always"]),
        "durability": dice.choice(["full", "batch", "none"]),
        "on_error": dice.choice(["miss", "raise"]),
        "lock_timeout": dice.choice([0.1, 600.0]),
        "min_free": 0,
    }


def read(store: CacheStore, one: Sample) -> bool:
    """Whether an entry is found; raises if what it holds is not what was stored."""

    def use(file: EntryFile, tokens: int) -> None:
        found = read_everything(file, one)
        if found != {name: data.tobytes() for name, data in one.content.items()}:
            raise WrongValueError(f"another content under {one.key}")

    match = store.serve(IDENTITY, Prefix(one.draft.ids), limit=len(one.draft.ids), use=use)
    if match.entry is not None and match.entry.key != one.key:
        raise WrongValueError(f"{match.entry.key} was served for {one.key}")
    return match.entry is not None


class Worker:
    """Does one random thing after another."""

    def __init__(self, root: Path, number: int, seed: int) -> None:
        logging.disable(logging.CRITICAL)
        self.root = root
        self.dice = random.Random(seed)
        self.mine = SAMPLES[number]
        diary = root.parent / f"expected-{number}"
        self.must, _ = expected(diary)
        self.state = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.counts = os.open(root.parent / f"counts-{number}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self.state, b"\n")  # ends a line that was cut short
        self.open()

    def open(self) -> None:
        self.store = CacheStore(self.root, **settings(self.dice))  # type: ignore[arg-type]

    def note(self, what: str, one: Sample) -> None:
        os.write(self.state, f"{what} {one.key}\n".encode())

    def put(self, one: Sample) -> None:
        if one.key not in self.must:
            self.note("?", one)
            self.store.put(one.draft)
            self.note("+", one)
            self.must.add(one.key)

    def remove(self, one: Sample) -> None:
        self.note("-", one)
        self.must.discard(one.key)
        self.store.remove(one.key)
        self.note("0", one)

    def read_any(self, one: Sample) -> None:
        read(self.store, self.dice.choice([one for several in SAMPLES for one in several]))

    def verify(self, one: Sample) -> None:
        reason = self.store.verify(one.key)
        if one.key in self.must and reason is not None:
            raise WrongValueError(f"{one.key} is not whole: {reason}")

    def collect(self, one: Sample) -> None:
        self.store.gc(grace=self.dice.choice([60.0, 3600.0]))

    def flush(self, one: Sample) -> None:
        self.store.flush()

    def reopen(self, one: Sample) -> None:
        self.open()

    def work(self) -> None:
        ways = (self.put, self.remove, self.read_any, self.verify, self.collect, self.flush, self.reopen)
        while True:
            began = time.monotonic()
            for one in self.mine:
                if one.key in self.must and not read(self.store, one):
                    raise WrongValueError(f"{one.key} was stored and is not found")
            way = self.dice.choices(ways, (40, 15, 25, 8, 6, 3, 3))[0]
            way(self.dice.choice(self.mine))
            if time.monotonic() - began > 5:
                raise WrongValueError(f"{way.__name__} took more than 5 seconds")
            os.write(self.counts, b".")


if __name__ == "__main__":
    Worker(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).work()
