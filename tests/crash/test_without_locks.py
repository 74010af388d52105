"""The tests of everything that locks might be needed for, once more with locks that do nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = (
    "storage/test_collection.py", "storage/test_index.py",
    "crash/test_watched_puts.py", "generation/test_bound_store.py",
)  # fmt: skip
OF_LOCKS = ("storage/test_collection.py::test_locks_of_the_dead_go_and_held_ones_stay",)


@pytest.mark.slow
@pytest.mark.requirement("R21")
def test_everything_but_locks_themselves_passes_with_locks_that_do_nothing(figures: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-cov", "-p", "no:xdist", "-m", "not slow and not root"]
    command += [str(TESTS / name) for name in FILES]
    command += [f"--deselect={Path('tests') / name}" for name in OF_LOCKS]
    environment = {**os.environ, "KVKEEP_TESTS_WITHOUT_LOCKS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100
    figures.append(f"without locks: {passed[1]} tests passed")
