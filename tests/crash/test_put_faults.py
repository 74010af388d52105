"""Every call to the system may fail once, with any error: a put then raises StoreWriteError and leaves nothing."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import pytest
from entry_drafts import full, sample

from kvkeep.errors import StoreWriteError
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.testing.faults import failing

ONE = sample([full("BF16", room=30)], end=300)


def steps(root: Path) -> list[str]:
    """The calls of a put into an empty store."""
    root.mkdir()
    files = EntryFiles(Directory(root))
    with failing(-1, 0) as made:
        assert files.put(ONE.draft)[1] is True
    return made


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, errno.EACCES])
@pytest.mark.requirement("R3")
@pytest.mark.requirement("R14", part=True)
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


@pytest.mark.requirement("R3")
def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    made = steps(tmp_path / "counted")
    files = EntryFiles(Directory(tmp_path / "counted"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for at in range(1, len(made) + 1):
        files.remove(ONE.key)
        with failing(at, errno.EIO), suppress(StoreWriteError):
            files.put(ONE.draft)
        assert len(list(Path("/proc/self/fd").iterdir())) == before, f"{made[at - 1]} {at} failed"
