"""Fixtures of the storage tests: the two kinds of system that a store may run on."""

from __future__ import annotations

import os

import pytest

from kvkeep.storage import fs

_LACKING = ("link", "preadv", "pwrite", "posix_fallocate", "fchmod")


@pytest.fixture(params=["posix", "portable"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test as it is, and once more without what Windows and some volumes lack."""
    if request.param == "portable":
        monkeypatch.setattr(os, "supports_dir_fd", set())
        for function in _LACKING:
            monkeypatch.delattr(os, function)
        monkeypatch.setattr(fs, "_FILE", fs._FILE & ~os.O_NOFOLLOW)
    return request.param
