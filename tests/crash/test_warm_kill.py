"""kill -9 at any moment of warm leaves a store in which every entry is whole or absent, and the next run completes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("rounds", [25, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.requirement("R1")
def test_a_killed_warm_leaves_entries_whole_or_absent(tmp_path: Path, rounds: int) -> None:
    parent = Path(__file__).with_name("warming_parent.py")
    command = [sys.executable, str(parent), str(tmp_path / "store"), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == rounds >= 25
    assert found["amid"] >= rounds * 25 / 60, "too few kills between creating the temporary file and the index row"
    assert found["entries"][-1] > rounds, "the children stored nothing"
