"""A store with two entries of a tiny model, and the command to run on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvkeep import CacheStore, Entry
from kvkeep.cli import main

ONE = list(range(3, 93))
TWO = [7 * n % 300 + 3 for n in range(300)]


@pytest.fixture
def store(tmp_path: Path, tiny_llama) -> CacheStore:
    """Entries ``one`` (90 tokens) and ``two`` (300 tokens)."""
    store = CacheStore(tmp_path / "store")
    kv = store.bind(tiny_llama)
    kv.warm(ONE, name="one")
    kv.warm(TWO, name="two")
    return store


@pytest.fixture
def both(store: CacheStore) -> tuple[Entry, Entry]:
    """Entries ``one`` and ``two``; made in the same second, they are listed in the order of their keys."""
    return store.entry("one"), store.entry("two")


@pytest.fixture
def kvkeep(tmp_path: Path) -> Callable[..., Result]:
    """Runs the command in this process on ``tmp_path / "store"``."""

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(main, ["--store", str(tmp_path / "store"), *arguments], input=stdin)

    return run


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the command in a process of its own on ``tmp_path / "store"``."""

    def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvkeep", "--store", str(tmp_path / "store"), *arguments]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            command, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}, **{**streams, **options}
        )

    return start
