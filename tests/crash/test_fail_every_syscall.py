"""Every system call of an operation may fail once: the operation works or says so, and leaves nothing half done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from cut_short import FIRST, Scene, scene, temporary_files

from kvkeep.testing import syscalls
from kvkeep.testing.syscalls import Point

__all__ = ["scene"]

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EINTR")
SPARSE = 12  # of the locks that SQLite takes and of what is closed, so many pass between two that fail


def possible(points: list[Point]) -> list[Point]:
    """Without giving back a lock, which no system refuses; SQLite then believes that it is held, and waits for it."""
    return [point for point in points if "F_UNLCK" not in point.line]


def some(points: list[Point], scene: Scene) -> Iterator[Point]:
    """Those that a run of minutes has time for."""
    counts: Counter[str] = Counter()
    for point in points:
        counts[point.name] += 1
        sparse = SPARSE if point.name in ("fcntl", "close") else 2 if scene.name == "put" else 4
        if counts[point.name] % sparse == 1 % sparse:
            yield point


def wrong_after(scene: Scene, point: Point, error: str) -> tuple[bool, list[str]]:
    """Whether the operation raised, and what is not as it should be."""
    with scene.fresh() as root:
        traced = syscalls.fail_at(lambda: scene.operation.run(root), point, error)
        finished = traced.failure is None and not scene.operation.later
        may_be = [scene.operation.done] if finished else scene.operation.may_be
        # A row that could not be removed is that of the entry that is: who comes upon it finds no file, and forgets it.
        wrong = scene.wrong(root, *may_be, leftover={FIRST.key} - scene.operation.done)
        if not traced.finished:
            wrong.append("the process ended")
        if (left := temporary_files(root)) and not scene.operation.later:
            wrong.append(f"{len(left)} temporary files are left")
        allowed = "OSError" if scene.operation.reads else "StoreError"
        if traced.failure is not None and allowed not in traced.failure.kinds:
            wrong.append(f"it raised {traced.failure.kinds[0]}: {traced.failure.text}")
        wrong += scene.wrong_afterwards(root)
        if temporary_files(root):
            wrong.append("a temporary file is left for good")
        return traced.failure is not None, wrong


@pytest.mark.requirement("R3")
def test_any_call_may_fail_once(scene: Scene, figures: list[str]) -> None:
    fail_at(scene, some(possible(scene.points()), scene), figures)


@pytest.mark.requirement("R3")
@pytest.mark.slow
@pytest.mark.parametrize("scene", ["put"], indirect=True)
def test_every_call_of_a_put_may_fail_once(scene: Scene, figures: list[str]) -> None:
    fail_at(scene, possible(scene.points()), figures)


def fail_at(scene: Scene, points: Iterable[Point], figures: list[str]) -> None:
    violations: list[str] = []
    refused, tried = 0, 0
    for number, point in enumerate(points):
        error = ERRORS[number % len(ERRORS)]
        raised, wrong = wrong_after(scene, point, error)
        tried += 1
        refused += raised
        violations += [f"{point.name} {point.number} {error} ({point.line[:80]}): {one}" for one in wrong]
    figures.append(f"fault points of {scene.name}: {tried}, violations: {len(violations)}, refused: {refused}")
    assert violations == []
    assert tried >= 40
