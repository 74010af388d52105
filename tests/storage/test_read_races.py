"""Files that change under a reader, and rows that lie: a miss, never a wrong answer or the end of the process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import entry_drafts
import pytest
from entry_drafts import IDENTITY, full, read_everything, sample

from kvkeep.prefixes import Prefix
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index
from kvkeep.store import CacheStore

READER = """
import logging, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from entry_drafts import IDENTITY, full, read_everything, sample
from kvkeep.prefixes import Prefix
from kvkeep.store import CacheStore
logging.disable(logging.CRITICAL)
one = sample([full("F32", heads=4, dim=64)], end=1000)
expected = {name: data.tobytes() for name, data in one.content.items()}
store, hits, misses, began = CacheStore(sys.argv[1], verify="always", min_free=0), 0, 0, time.monotonic()
def use(file, tokens):
    assert read_everything(file, one) == expected
while (spent := time.monotonic() - began) < 4 or (min(hits, misses) <= 20 and spent < 60):
    if store.serve(IDENTITY, Prefix(one.draft.ids), limit=1000, use=use).entry is None:
        misses += 1
        store.put(one.draft)
    else:
        hits += 1
print(hits, misses)
"""


@pytest.mark.requirement("R10")
def test_files_that_change_while_they_are_read(tmp_path: Path, figures: list[str]) -> None:
    root = tmp_path / "store"
    command = [sys.executable, "-c", READER, str(root), str(Path(entry_drafts.__file__).parent)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    dice, changes = random.Random(3), 0
    while reader.poll() is None:
        time.sleep(dice.uniform(0.001, 0.02))
        for path in root.glob("entries/*/*.safetensors"):
            try:
                path.chmod(0o600)
                how = dice.randrange(4)
                if how == 0:
                    path.unlink()
                elif how == 1:
                    os.truncate(path, dice.randrange(path.stat().st_size))
                else:
                    with path.open("r+b") as file:
                        file.seek(dice.randrange(path.stat().st_size))
                        file.write(dice.randbytes(4096 if how == 2 else 1))
                changes += 1
            except FileNotFoundError:
                continue
    said = reader.communicate()[0]
    assert reader.returncode == 0
    hits, misses = map(int, said.split())
    figures.append(f"files changed under a reader: {changes}, hits: {hits}, misses: {misses}, served wrongly: 0")
    assert min(changes, hits, misses) > 20


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("lie", ["chain", "key", "end"])
def test_a_row_that_lies_serves_nothing_wrong(tmp_path: Path, lie: str) -> None:
    """It has a checksum that fits, as the row of somebody who knows how rows are written."""
    one, other = (sample([full("BF16")], end=300, seed=seed) for seed in range(2))
    store = CacheStore(tmp_path / "store")
    for sampled in (one, other):
        store.put(sampled.draft)
    directory = Directory(tmp_path / "store")
    index = Index(directory, EntryFiles(directory))
    rows = {row.key: row for row in index.rows()}
    mine, others = rows[one.key], rows[other.key]
    if lie == "chain":
        index.discard(other.key)
        index.add(replace(mine, chain=others.chain))
    elif lie == "key":
        index.discard(one.key)
        index.add(replace(mine, key=other.key))
    else:
        index.add(replace(mine, end=mine.end + 5))
    index.close()
    for sampled in (one, other):
        seen: list[dict[str, bytes]] = []
        match = CacheStore(tmp_path / "store").serve(
            IDENTITY,
            Prefix(sampled.draft.ids),
            limit=300,
            use=lambda file, tokens, sampled=sampled, seen=seen: seen.append(read_everything(file, sampled)),
        )
        expected = {name: data.tobytes() for name, data in sampled.content.items()}
        assert seen == ([] if match.entry is None else [expected])
        assert match.entry is None or match.entry.key == sampled.key
