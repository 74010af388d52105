"""Let one call of ``os`` fail: a disk that is full or broken at a chosen moment, on any system, without privileges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

CALLS = (
    *("open", "close", "mkdir", "link", "unlink", "rename", "replace", "stat", "fstat", "chmod", "fchmod", "fsync"),
    *("pwrite", "write", "preadv", "ftruncate", "posix_fallocate"),
)
"""The calls by which a store comes to its files and changes them, as far as the system has them."""


@contextmanager
def failing(at: int, number: int) -> Iterator[list[str]]:
    """Let the call number ``at``, from 1, raise ``OSError(number)`` instead of being made; all others are made.

    Yields the names of the calls so far. With ``at`` below 1 they are only counted. Not for several threads.

    >>> import errno
    >>> with failing(-1, 0) as made:
    ...     os.close(os.open(os.devnull, os.O_RDONLY))
    >>> made
    ['open', 'close']
    """
    made: list[str] = []

    def stand_in(name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == at:
                if name == "close":
                    real(*arguments)  # the descriptor is gone all the same
                raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        return call

    with mock.patch.multiple(os, **{name: stand_in(name) for name in CALLS if hasattr(os, name)}):
        yield made
