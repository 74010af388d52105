"""Which parts of which files this process has found right. Never kept on disk: a disk forgets, and others write."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass

_LIMIT = 4096  # files


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


class Memory:
    """The digest units that were found right, one byte a unit, for the files that were used last."""

    def __init__(self) -> None:
        self._marks: OrderedDict[tuple[FileIdentity, str], bytearray] = OrderedDict()
        self._mutex = threading.Lock()

    def marks(self, identity: FileIdentity, digests: str, units: int) -> bytearray:
        """The marks of a file with these digests, which the caller sets."""
        key = identity, digests
        with self._mutex:
            marks = self._marks.setdefault(key, bytearray(units))
            self._marks.move_to_end(key)
            if len(self._marks) > _LIMIT:
                self._marks.popitem(last=False)
            return marks


MEMORY = Memory()
"""The one of this process."""
