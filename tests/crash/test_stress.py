"""Workers that store, read, remove, check and collect, and are killed all the time, never see a wrong value."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stress_worker import SAMPLES, WORKERS, expected

from kvkeep.store import CacheStore


def start(root: Path, worker: int, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("stress_worker.py")), str(root), str(worker), str(seed)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.requirement("R7")
@pytest.mark.requirement("R24", part=True)
@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.requirement("R11")
def test_no_wrong_value_and_nothing_lost(tmp_path: Path, seconds: float, figures: list[str]) -> None:
    root, dice = tmp_path / "store", random.Random(7)
    CacheStore(root)
    running = {worker: start(root, worker, worker) for worker in range(WORKERS)}
    wrong: list[str] = []
    kills, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(dice.uniform(0.2, 2) / WORKERS)
        worker = dice.randrange(WORKERS)
        running[worker].kill()
        kills += 1
        said = running[worker].communicate()[1]
        if running[worker].returncode != -9:
            wrong.append(said)
        running[worker] = start(root, worker, 1000 * kills)
    for process in running.values():
        process.kill()
        said = process.communicate()[1]
        if process.returncode != -9:
            wrong.append(said)
    done = sum(path.stat().st_size for path in tmp_path.glob("counts-*"))
    figures.append(f"stress: {seconds} s, {WORKERS} workers, {done} operations, {kills} kills, wrong: {len(wrong)}")
    assert wrong == []
    assert done > 3 * seconds  # on a busy machine, too
    store = CacheStore(root)
    keys = {entry.key for entry in store.entries()}
    for worker, samples in enumerate(SAMPLES):
        must, may = expected(tmp_path / f"expected-{worker}")
        assert must <= keys, "an entry that was acknowledged is lost"
        assert keys & {one.key for one in samples} <= must | may
    assert [store.verify(key) for key in keys] == [None] * len(keys)
    connection = sqlite3.connect(root / "index" / "cache.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
