"""A hundred hostile stores run no code, and make nothing outside of them be opened: an audit hook watches."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvkeep


@pytest.mark.requirement("R29")
@pytest.mark.requirement("R31")
def test_hostile_stores_run_nothing_and_reach_nothing_outside(tmp_path: Path, figures: list[str]) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("precious")
    (tmp_path / "base").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            Path(__file__).with_name("hostile_stores.py"),
            str(tmp_path / "base"),
            str(secret),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    figures.append(f"hostile stores: {told['stores']} opened and used, {told['wrong']} accepted wrongly")
    assert told["events"] == []
    assert {"exec", "import", "open", "pickle.find_class"} <= set(told["control"])
    assert told["wrong"] == 0
    assert told["pwned"] is False
    assert told["stores"] >= 100
    assert (secret / "file").read_text() == "precious"


BANNED = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "runpy"}
CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.requirement("R29")
def test_the_sources_hold_nothing_that_runs_data() -> None:
    found = []
    for path in sorted(Path(kvkeep.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.partition(".")[0] in BANNED]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module] if node.module and node.module.partition(".")[0] in BANNED else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id] if node.func.id in CALLS else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                names = [called] if called in ("os.system", "os.popen", "marshal.load", "marshal.loads") else []
            found += [f"{path.name}:{node.lineno}: {name}" for name in names]
    assert found == []
