"""A full run fails when a requirement has no passing test in it, or one more than it is said to have."""

from __future__ import annotations

import os
from pathlib import Path

import make_proof_table
import pytest
from requirement_gate import Requirement, RequirementGate, kinds_of_run, read_requirements

pytest_plugins = ["pytester"]

FAST = frozenset({"fast"})
PROVED = "import pytest\n@pytest.mark.requirement('R1')\ndef test_it(): pass"
PART = "import pytest\n@pytest.mark.requirement('R1', part=True)\ndef test_it(): pass"
SKIPPED = "import pytest\n@pytest.mark.requirement('R1')\ndef test_it(): pytest.skip('no strace')"
EXPECTED = "import pytest\n@pytest.mark.requirement('R1')\n@pytest.mark.xfail\ndef test_it(): assert False"
OTHER = "def test_it(): pass"


def returncode(
    pytester: pytest.Pytester, source: str, one: Requirement, kinds: frozenset[str] | None = FAST, *options: str
) -> int:
    pytester.makepyfile(source)
    pytester.path.joinpath("pytest.ini").write_text("[pytest]\nmarkers = requirement: what a test proves\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        result = pytester.inline_run(*options, plugins=[RequirementGate({"R1": one}, kinds)])
    return int(result.ret)


@pytest.mark.parametrize(
    ("source", "one", "expected"),
    [
        (PROVED, Requirement("x"), 0),
        (PART, Requirement("x"), 1),
        (OTHER, Requirement("x"), 1),
        (EXPECTED, Requirement("x"), 1),
        (SKIPPED, Requirement("x"), 0),  # the gate for skips counts it
        (OTHER, Requirement("x", run="slow"), 0),
        (OTHER, Requirement("x", missing="all"), 0),
        (PART, Requirement("x", missing="a half"), 0),
        (PROVED, Requirement("x", missing="a half"), 1),
    ],
)
def test_what_a_full_run_must_prove(pytester: pytest.Pytester, source: str, one: Requirement, expected: int) -> None:
    assert returncode(pytester, source, one) == expected


def test_a_run_of_some_tests_is_not_judged(pytester: pytest.Pytester) -> None:
    assert returncode(pytester, OTHER, Requirement("x"), None) == 0


def test_a_requirement_that_is_not_listed_is_refused(pytester: pytest.Pytester) -> None:
    assert returncode(pytester, PROVED.replace("R1", "R99"), Requirement("x")) not in (0, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-m", "not slow"], {"fast", "root"}),
        (["-m", "not slow and not root"], {"fast"}),
        (["-m", "slow"], {"slow"}),
        ([], {"fast", "root", "slow"}),
        (["-m", "root"], None),
        (["-k", "some"], None),
        (["tests/test_some.py"], None),
        (["--deselect", "tests/test_some.py"], None),
        (["--ignore=tests/test_some.py"], None),
    ],
)
def test_which_runs_are_full(pytester: pytest.Pytester, options: list[str], expected: set[str] | None) -> None:
    pytester.path.joinpath("pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    pytester.path.joinpath("tests").mkdir()
    pytester.path.joinpath("tests", "test_some.py").write_text(OTHER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        assert kinds_of_run(pytester.parseconfig(*options)) == expected


def test_all_are_listed_in_order() -> None:
    requirements = read_requirements()
    assert list(requirements) == [f"R{number}" for number in range(1, 39)]
    assert {one.run for one in requirements.values()} <= {"fast", "slow", "root"}


def test_the_table_is_current() -> None:
    text = Path(make_proof_table.TARGET).read_text(encoding="utf-8")
    assert text == make_proof_table.table(), "run `make proofs`"
    assert os.linesep == "\n" and "](" in text
