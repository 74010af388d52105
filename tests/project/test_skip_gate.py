"""In CI a skip is a failure unless the committed list allows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from skip_gate import SkipGate, read_allowed

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]
PLAIN = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"  # no plugin but the gate: a tenth of the time
SKIPPING = """
import pytest

def test_passes(): pass

@pytest.mark.parametrize("n", [1, 2])
def test_skips(n):
    pytest.skip("not today")
"""


@pytest.mark.parametrize(
    ("ci", "returncode", "shown"),
    [("true", 1, ["test_it.py::test_skips[1]", "test_it.py::test_skips[2]"]), ("", 0, [])],
)
def test_the_tests_of_this_project_run_behind_the_gate(
    tmp_path: Path, ci: str, returncode: int, shown: list[str]
) -> None:
    (tmp_path / "test_it.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "conftest", "-c", os.devnull]
    result = subprocess.run(
        [*command, "--rootdir", ".", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, PLAIN: "1", "CI": ci, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == returncode, result.stdout + result.stderr
    assert "1 passed, 2 skipped" in result.stdout
    assert ("skips that tests/allowed_skips.txt does not allow" in result.stdout) == (ci == "true")
    lines = [line for line in result.stdout.splitlines() if line.startswith("test_it.py::")]
    assert lines == [f"{name}: Skipped: not today" for name in shown]


def returncode(pytester: pytest.Pytester, source: str, allowed: str = "") -> int:
    listed = pytester.path / "allowed.txt"
    listed.write_text(allowed)
    pytester.makepyfile(source)
    options = ["-c", os.devnull, "--rootdir", str(pytester.path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAIN, "1")
        result = pytester.inline_run(*options, plugins=[SkipGate(read_allowed(listed))])
    return int(result.ret)


def test_a_run_without_skips_passes(pytester: pytest.Pytester) -> None:
    assert returncode(pytester, "def test_passes(): pass") == 0


def test_an_expected_failure_is_no_skip(pytester: pytest.Pytester) -> None:
    assert returncode(pytester, "import pytest\n@pytest.mark.xfail\ndef test_fails(): assert False") == 0


def test_a_whole_file_that_skips_itself_fails_the_run(pytester: pytest.Pytester) -> None:
    assert returncode(pytester, "import pytest\npytest.importorskip('no_such_module')") == 1


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ("{file}::test_skips  # all of them", 0),
        ("{file}::test_skips[1]\n{file}::test_skips[2]", 0),
        ("{file}::test_skips[1]", 1),
        ("# {file}::test_skips", 1),
        ("{file}::test_ski", 1),
        ("", 1),
    ],
)
def test_the_list_allows_by_name(pytester: pytest.Pytester, allowed: str, expected: int) -> None:
    file = "test_the_list_allows_by_name.py"  # as pytester names it, after the test
    assert returncode(pytester, SKIPPING, allowed.format(file=file)) == expected


def test_every_allowed_skip_is_of_a_file_that_is_there() -> None:
    allowed = read_allowed(TESTS / "allowed_skips.txt")
    assert [name for name in allowed if not (TESTS.parent / name.partition("::")[0]).is_file()] == []
