"""kill -9 at every system call of an operation leaves each entry whole or absent, and a store that works."""

from __future__ import annotations

import pytest
from cut_short import Scene, scene, temporary_files

from kvkeep.testing import syscalls
from kvkeep.testing.syscalls import Point

__all__ = ["scene"]


@pytest.mark.requirement("R1")
def test_a_kill_at_any_call_that_changes_something(scene: Scene, figures: list[str]) -> None:
    """In between, a kill leaves the same."""
    kill(scene, [point for point in scene.points() if point.changes], figures)


@pytest.mark.requirement("R1")
@pytest.mark.slow
@pytest.mark.parametrize("scene", ["put"], indirect=True)
def test_a_kill_at_any_call(scene: Scene, figures: list[str]) -> None:
    kill(scene, scene.points(), figures)


def kill(scene: Scene, points: list[Point], figures: list[str]) -> None:
    violations: list[str] = []
    killed, kinds = 0, set()
    for point in points:
        with scene.fresh() as root:
            traced = syscalls.kill_at(lambda root=root: scene.operation.run(root), point)
            killed += not traced.finished
            kinds.add(point.name)
            wrong = scene.wrong(root, *scene.operation.may_be)
            if len(temporary_files(root)) > 1:
                wrong.append("more than one temporary file is left")
            wrong += scene.wrong_afterwards(root)
        violations += [f"{point.name} {point.number} ({point.line[:80]}): {one}" for one in wrong]
    figures.append(f"kill points of {scene.name}: {killed}, violations: {len(violations)}")
    assert violations == []
    assert killed >= 40
    assert kinds >= {"pwrite64", "unlinkat", "openat"}
