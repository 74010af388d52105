import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kvkeep import CacheStore

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "quickstart.py"


def run(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_here(folder: Path, *arguments: str) -> list[str]:
    """The same in this process, where torch is imported."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        names = runpy.run_path(str(SCRIPT), run_name="__main__")
        names["store"].journal.flush()  # as the end of a process does
    return printed.getvalue().splitlines()


def check(lines: list[str], entry) -> None:
    assert lines[0] == f"stored: {entry.tokens} tokens, {entry.nbytes / 1e6:.1f} MB"
    reused, prompt = map(int, re.match(r"reused: (\d+) of (\d+) tokens, loaded in \d\.\d{3} s$", lines[1]).groups())
    assert entry.tokens - 1 <= reused <= entry.tokens < prompt


def test_it_stores_in_the_first_run_and_reuses_in_both(tmp_path, model_folder):
    first = run_here(tmp_path, str(model_folder))
    (entry,) = CacheStore(tmp_path / "cache_store").entries()
    assert entry.names == ("quickstart",)
    check(first, entry)
    check(run(tmp_path, str(model_folder)), entry)
    assert CacheStore(tmp_path / "cache_store").journal.totals().prefills == 1


def test_it_is_short():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.slow
def test_on_the_model_that_it_takes_by_itself(tmp_path, smollm2_folder):
    lines = run(tmp_path)
    (entry,) = CacheStore(tmp_path / "cache_store").entries()
    assert entry.tokens > 1000
    check(lines, entry)
    assert lines[2:]
