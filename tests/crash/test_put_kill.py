"""kill -9 at any moment of a put leaves every entry whole or absent, and the next put works.

The writers are forked from this process, which holds no model, so that the kills land in puts and not in start-up. Half
of them stop at a chosen step of a put, say so over a pipe, and are killed there; the others are killed after a random
time.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from entry_drafts import full, sample, sliding

from kvkeep.storage import fileio
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fileio import Temporary
from kvkeep.storage.fs import Directory

LAYERS = [full("BF16", heads=2, dim=64, room=50), sliding(first=300, window=200), full(heads=4, dim=64)]
SAMPLES = [sample(LAYERS, end=700, seed=seed) for seed in range(8)]
STOPS = [
    *[("temporary", n) for n in (1, 2, 3)],
    *[("write", n) for n in (*range(1, 20), 25, 40)],
    *[("publish", n) for n in (1, 2, 3)],
    *[("link", n) for n in (1, 2, 3)],
    *[("unlink", n) for n in (1, 2, 3)],
    *[("fsync", n) for n in range(1, 8)],
]
RANDOM_KILLS = 20


class Writer(Directory):
    """A directory that waits for its death at one step of a put: before the n-th time that it does a certain thing."""

    def __init__(self, root: Path, pipe: int, stop: tuple[str, int] | None) -> None:
        super().__init__(root)
        self.pipe = pipe
        self.stop = stop
        self.steps: Counter[str] = Counter()

    def reached(self, step: str) -> None:
        self.steps[step] += 1
        if (step, self.steps[step]) == self.stop:
            os.write(self.pipe, b"!")
            signal.pause()

    def before(self, module: Any, function: str, step: str) -> None:
        real: Callable[..., Any] = getattr(module, function)

        def stepped(*args: Any, **options: Any) -> Any:
            self.reached(step)
            return real(*args, **options)

        setattr(module, function, stepped)

    @contextmanager
    def temporary(self, suffix: str) -> Iterator[Temporary]:
        with super().temporary(suffix) as temporary:
            self.reached("temporary")
            yield temporary

    def publish(self, temporary: Temporary, *name: str) -> bool:
        self.reached("publish")
        return super().publish(temporary, *name)


def write_for_ever(root: Path, pipe: int, stop: tuple[str, int] | None, seed: int) -> NoReturn:
    try:
        directory = Writer(root, pipe, stop)
        for module, function, step in (
            (fileio, "write_at", "write"),
            (os, "link", "link"),
            (os, "unlink", "unlink"),
            (os, "fsync", "fsync"),
        ):
            directory.before(module, function, step)
        files, dice = EntryFiles(directory), random.Random(seed)
        os.write(pipe, b".")
        while True:
            one = dice.choice(SAMPLES)
            if not files.put(one.draft)[1]:
                files.remove(one.key)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)


def run_and_kill(root: Path, stop: tuple[str, int] | None, seed: int) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        write_for_ever(root, writing, stop, seed)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"."
        if stop is None:
            time.sleep(random.Random(seed).uniform(0, 0.03))
        else:
            assert os.read(reading, 1) == b"!", "the writer ended before it came to its step"
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(reading)
    assert os.WTERMSIG(status) == signal.SIGKILL


def whole_or_absent(root: Path) -> int:
    """Check every entry there is, and return how many there are."""
    files = EntryFiles(Directory(root))
    keys = list(files.keys())
    assert set(keys) <= {one.key for one in SAMPLES}
    assert len([path for path in (root / "entries").rglob("*") if not path.is_dir()]) == len(keys)
    for key in keys:
        with files.open(key) as file:
            file.verify_all()
    return len(keys)


def put_works(root: Path, seed: int) -> None:
    one = random.Random(-seed).choice(SAMPLES)
    files = EntryFiles(Directory(root))
    files.remove(one.key)
    assert files.put(one.draft)[1] is True
    with files.open(one.key) as file:
        file.verify_all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("by_chance", [RANDOM_KILLS, pytest.param(5 * RANDOM_KILLS, marks=pytest.mark.slow)])
@pytest.mark.requirement("R1")
def test_a_killed_put_leaves_entries_whole_or_absent(tmp_path: Path, by_chance: int) -> None:
    (tmp_path / "entries").mkdir()
    kills = [*STOPS, *[None] * by_chance]
    random.Random(0).shuffle(kills)
    amid_a_put = 0
    counts = set()
    for seed, stop in enumerate(kills):
        run_and_kill(tmp_path, stop, seed)
        counts.add(whole_or_absent(tmp_path))
        left = list((tmp_path / "tmp").iterdir()) if (tmp_path / "tmp").exists() else []
        assert len(left) <= 1
        amid_a_put += len(left)
        for path in left:  # as gc does when they are old
            path.unlink()
        put_works(tmp_path, seed)
    assert len(kills) >= 60
    assert amid_a_put >= 30, "too few kills between creating the temporary file and removing it"
    assert len(counts) > 2, "the store never changed"
