"""A pytest plugin for CI: a test that skips itself fails the run, unless ``allowed_skips.txt`` names it.

A skip that nobody counts is a test that nobody runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest


class SkipGate:
    """Collects the skips of a run that are not in ``allowed``, shows them, and fails the run if there are any."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._refused: list[str] = []

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if not self._allowed & {report.nodeid, report.nodeid.partition("[")[0]}:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self._refused.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._refused:
            terminalreporter.section("skips that tests/allowed_skips.txt does not allow", red=True)
            for line in self._refused:
                terminalreporter.line(line)


def read_allowed(path: Path) -> frozenset[str]:
    """The node ids in ``path``, one a line; what follows ``#`` and a space is a comment."""
    lines = (line.partition("# ")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return frozenset(line for line in lines if line and line != "#")
