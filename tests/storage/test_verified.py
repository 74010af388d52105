"""What a process remembers of the files that it has checked."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvkeep.storage.verified import FileIdentity, Recent


def test_the_values_used_last_are_kept() -> None:
    recent: Recent[int] = Recent(2)
    made: list[int] = []

    def get(key: int) -> int:
        return recent.get(key, lambda: made.append(key) or key * 10)

    assert [get(key) for key in (1, 2, 1, 3, 1, 2)] == [10, 20, 10, 30, 10, 20]
    assert made == [1, 2, 3, 2]
    recent.clear()
    assert get(1) == 10
    assert made == [1, 2, 3, 2, 1]


def test_a_failure_is_not_kept() -> None:
    recent: Recent[int] = Recent(2)
    with pytest.raises(ZeroDivisionError):
        recent.get("a", lambda: 1 // 0)
    assert recent.get("a", lambda: 5) == 5


def test_threads_that_make_a_value_at_once_get_the_same_one() -> None:
    recent: Recent[object] = Recent(2)
    together = threading.Barrier(4)
    found: list[object] = []

    def make() -> object:
        together.wait()
        return object()

    threads = [threading.Thread(target=lambda: found.append(recent.get("a", make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


def test_an_identity_changes_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_bytes(b"x")
    seen = [FileIdentity.of(file.stat())]
    assert FileIdentity.of(file.stat()) == seen[0]
    for change in (
        lambda: os.utime(file, ns=(0, 12345)),
        lambda: os.utime(file, ns=(0, 12346)),
        lambda: file.write_bytes(b"yy"),
        lambda: (file.rename(tmp_path / "old"), file.write_bytes(b"x")),
    ):
        change()
        seen.append(FileIdentity.of(file.stat()))
    assert len(set(seen)) == 5
