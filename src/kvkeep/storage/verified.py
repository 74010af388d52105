"""What this process has found right about files. Never kept on disk: disks forget, and others write."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvkeep.entry_format import Header
from kvkeep.forks import renew_after_fork

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one state of one file from another, as far as the system knows."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, known: os.stat_result) -> FileIdentity:
        """The identity of the file that a ``stat`` describes."""
        return cls(known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns)


class Recent(Generic[T]):
    """The values of the keys that were used last. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._mutex = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key; ``make`` is called where there is none, and what it raises is not remembered."""
        with self._mutex:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._mutex:
            value = self._values.setdefault(key, value)
            if len(self._values) > self._limit:
                self._values.popitem(last=False)
            return value

    def clear(self) -> None:
        """Forget everything."""
        with self._mutex:
            self._values.clear()


@dataclass(frozen=True, slots=True)
class Checked:
    """A header that was found right.

    Attributes:
        header: the header.
        strong: the digest of the tensor of strong digests that was signed with it, where there are keys.
    """

    header: Header
    strong: bytes | None = None


HEADERS: Recent[Checked] = Recent(128)
"""Checked headers by :class:`FileIdentity` and the keys that they were checked with."""

UNITS: Recent[bytearray] = Recent(4096)
"""By identity, digest of the digests and keys: one byte a digest unit, set when it was found right."""
