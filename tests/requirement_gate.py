"""A pytest plugin: a full run fails when a requirement of ``requirements.toml`` has no passing test in it.

A test says what it proves with ``@pytest.mark.requirement("R1")``, or with ``part=True`` that it proves a part. What is
not proved yet is listed with what is missing; such a requirement has parts alone, and the run fails when it has more.
A run of some tests only (a path, ``-k``, ``--ignore``, ``--lf``) is not judged.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LISTED = Path(__file__).with_name("requirements.toml")
_KINDS = {
    "not slow": frozenset({"fast", "root"}),
    "not slow and not root": frozenset({"fast"}),
    "slow": frozenset({"slow"}),
    "slow and not root": frozenset({"slow"}),
    "": frozenset({"fast", "root", "slow"}),
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """What the store must do.

    Attributes:
        what: in one line.
        run: which run proves it: ``"fast"``, ``"slow"``, or ``"root"`` for a fast one that needs root.
        missing: what is not proved yet; empty if nothing is missing.
    """

    what: str
    run: str = "fast"
    missing: str = ""


def read_requirements(path: Path = LISTED) -> dict[str, Requirement]:
    """The requirements by name, in order."""
    return {name: Requirement(**fields) for name, fields in tomllib.loads(path.read_text(encoding="utf-8")).items()}


class RequirementGate:
    """Sees which marked tests pass, shows what is wrong, and fails the run if anything is."""

    def __init__(self, requirements: Mapping[str, Requirement], kinds: frozenset[str] | None) -> None:
        self._requirements = requirements
        self._kinds = kinds
        self._outcomes: dict[str, set[str]] = {}
        self._wrong: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:  # in the process that runs the test; its report carries them to the one that judges
            for mark in item.iter_markers("requirement"):
                kind = "a part of" if mark.kwargs.get("part") else "all of"
                for name in mark.args:
                    if name not in self._requirements:
                        raise pytest.UsageError(f"{item.nodeid}: {LISTED.name} lists no requirement {name!r}")
                    item.user_properties.append(("requirement", f"{kind} {name}"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped:
            outcome = "failed as expected" if hasattr(report, "wasxfail") else report.outcome
            for name, value in report.user_properties:
                if name == "requirement":
                    self._outcomes.setdefault(str(value), set()).add(outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._kinds is None or hasattr(session.config, "workerinput") or session.exitstatus != pytest.ExitCode.OK:
            return
        self._wrong = [line for name, one in self._requirements.items() if (line := self._judge(name, one))]
        if self._wrong:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _judge(self, name: str, one: Requirement) -> str | None:
        outcomes = self._outcomes.get(f"all of {name}", set())
        if one.missing:
            return f"{name} is proved now: take `missing` off its entry" if "passed" in outcomes else None
        if one.run not in self._kinds or "passed" in outcomes:
            return None
        if outcomes == {"skipped"}:  # as where strace is missing; in CI the skip itself fails the run
            return None
        return f"{name} has no passing test: {one.what}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._wrong:
            terminalreporter.section(f"requirements that this run does not prove ({LISTED.name})", red=True)
            for line in self._wrong:
                terminalreporter.line(line)


def kinds_of_run(config: pytest.Config) -> frozenset[str] | None:
    """What kinds of tests a run consists of, all of them; ``None`` for a run of some tests only."""
    option = config.option
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return None
    if option.keyword or option.deselect or option.ignore:
        return None
    if getattr(option, "lf", False) or getattr(option, "stepwise", False):
        return None
    return _KINDS.get(option.markexpr)
