"""Every call to the system may fail once, with any error: a put then raises StoreWriteError and leaves nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from entry_drafts import full, sample

from kvkeep.errors import StoreWriteError
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory

CALLS = ("open", "mkdir", "link", "unlink", "fsync", "pwrite", "preadv", "ftruncate", "posix_fallocate", "fchmod")
CALLS += ("close", "stat", "fstat", "chmod", "replace")
ONE = sample([full("BF16", room=30)], end=300)


@contextmanager
def failing(at: int, number: int) -> Iterator[list[str]]:
    """Let the call number ``at`` fail; yields the names of the calls so far."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            real = getattr(os, name)

            def call(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
                made.append(_name)
                if len(made) == at:
                    if _name == "close":
                        _real(*args)  # the descriptor is gone all the same
                    raise OSError(number, os.strerror(number))
                return _real(*args, **options)

            patch.setattr(os, name, call)
        yield made


def steps(root: Path) -> list[str]:
    """The calls of a put into an empty store."""
    root.mkdir()
    files = EntryFiles(Directory(root))
    with failing(-1, 0) as made:
        assert files.put(ONE.draft)[1] is True
    return made


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, errno.EACCES])
def test_any_call_of_a_put_may_fail_once(tmp_path: Path, number: int) -> None:
    made = steps(tmp_path / "counted")
    assert {"link", "fsync", "pwrite", "ftruncate", "posix_fallocate", "fchmod", "mkdir", "unlink"} <= set(made)
    refused = 0
    for at, name in enumerate(made, 1):
        root = tmp_path / str(at)
        root.mkdir()
        directory = Directory(root)
        files = EntryFiles(directory)
        error: StoreWriteError | None = None
        with failing(at, number):
            try:
                files.put(ONE.draft)
            except StoreWriteError as caught:
                error = caught
        assert directory.names("tmp") == [], f"a temporary file is left after {name} {at} failed"
        assert list(files.keys()) == ([] if error else [ONE.key]), f"{name} {at} failed"
        if error:
            assert error.errno == number
            refused += 1
            assert files.put(ONE.draft)[1] is True
        with files.open(ONE.key) as file:
            file.verify_all()
    assert refused > len(made) / 3, "too many failures made no difference"


def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    made = steps(tmp_path / "counted")
    files = EntryFiles(Directory(tmp_path / "counted"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for at in range(1, len(made) + 1):
        files.remove(ONE.key)
        with failing(at, errno.EIO), suppress(StoreWriteError):
            files.put(ONE.draft)
        assert len(list(Path("/proc/self/fd").iterdir())) == before, f"{made[at - 1]} {at} failed"
