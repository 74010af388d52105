"""A power cut amid the puts of several processes: what was acknowledged is there, and what is there is right."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from entry_drafts import Sample, full, read_everything, sample, sliding

import kvkeep.storage.json_disk  # noqa: F401 - or every child imports it anew
from kvkeep.store import CacheStore
from kvkeep.testing.power import PowerDisk, power_disk, why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

WRITERS = 8
LAYERS = [full("BF16", heads=2, dim=64, room=50), sliding(first=300, window=200), full(heads=4, dim=64)]
SAMPLES = [[sample(LAYERS, end=600, seed=100 * writer + n) for n in range(4)] for writer in range(WRITERS)]


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PowerDisk]:
    if reason := why_not(request.param):
        pytest.skip(reason)
    with power_disk(tmp_path, request.param) as made:
        yield made


def write_for_ever(root: Path, pipe: int, mine: list[Sample], durability: str) -> NoReturn:
    """Store, and tell each entry that is acknowledged; then remove one, so that there is always one to store."""
    try:
        logging.disable(logging.CRITICAL)
        store = CacheStore(root, durability=durability, min_free=0)
        kept = [one for one in mine if store.get(one.key)]
        while True:
            for one in mine:
                if one in kept:
                    os.write(pipe, f"-{one.key}\n".encode())
                    store.remove(one.key)
                store.put(one.draft)
                os.write(pipe, f"+{one.key}\n".encode())
            kept = mine
    finally:
        os._exit(1)


def run_and_cut(disk: PowerDisk, durability: str, seconds: float, *, journal: bool) -> set[str]:
    """The keys that were acknowledged, and not about to be removed, when the power went."""
    reading, writing = os.pipe()
    os.set_blocking(writing, True)
    children = []
    for mine in SAMPLES:
        child = os.fork()
        if child == 0:
            os.close(reading)
            write_for_ever(disk.root / "store", writing, mine, durability)
        children.append(child)
    os.close(writing)
    said, end = b"", time.monotonic() + seconds
    os.set_blocking(reading, False)
    while time.monotonic() < end:
        time.sleep(0.01)
        said += read(reading)
    for child in children:
        os.kill(child, signal.SIGSTOP)  # what is acknowledged by now is what counts
    time.sleep(0.01)
    said += read(reading)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said += read(reading)
    os.close(reading)
    disk.cut(journal=journal)
    acknowledged: dict[str, bool] = {}
    for line in said.decode().splitlines():
        acknowledged[line[1:]] = line[0] == "+"
    return {key for key, there in acknowledged.items() if there}


def read(pipe: int) -> bytes:
    said = b""
    try:
        while more := os.read(pipe, 1 << 16):
            said += more
    except BlockingIOError:
        pass
    return said


def look(root: Path) -> tuple[set[str], int, int]:
    """The whole entries of a store; how many of its files are torn; and how many of its answers are wrong."""
    store = CacheStore(root)
    files = list(root.glob("entries/*/*.safetensors"))
    whole, wrong = set(), 0
    drafts = {one.key: one for mine in SAMPLES for one in mine}
    for entry in store.entries():
        if store.verify(entry.key) is not None:
            continue
        with store._files.open(entry.key) as file:
            one = drafts[entry.key]
            found = read_everything(file, one)
            wrong += found != {name: data.tobytes() for name, data in one.content.items()}
        whole.add(entry.key)
    return whole, len(files) - len(whole), wrong


@pytest.mark.requirement("R2")
@pytest.mark.parametrize("cuts", [4, pytest.param(34, marks=pytest.mark.slow)])
@pytest.mark.parametrize("durability", ["full", "batch", "none"])
def test_a_power_cut(
    disk: PowerDisk, durability: str, cuts: int, figures: list[str], request: pytest.FixtureRequest
) -> None:
    dice = random.Random(cuts)
    lost = torn = wrong = kept = 0
    for _ in range(cuts):
        CacheStore(disk.root / "store")
        os.sync()
        acknowledged = run_and_cut(disk, durability, dice.uniform(0.05, 0.4), journal=dice.random() < 0.5)
        whole, damaged, answers = look(disk.root / "store")
        lost += len(acknowledged - whole)
        kept += len(acknowledged & whole)
        torn, wrong = torn + damaged, wrong + answers
        if dice.random() < 0.3:
            shutil.rmtree(disk.root / "store")
    kind = request.node.callspec.params["disk"]
    figures.append(
        f"power cuts on {kind}, durability {durability}: {cuts}, lost: {lost} of {kept + lost}, torn: {torn}, "
        f"served wrongly: {wrong}"
    )
    assert wrong == 0
    if durability == "none":
        assert lost > 0, "the power was not really cut"
    if durability == "full":
        assert (lost, torn) == (0, 0)
        assert kept >= 4 * cuts
