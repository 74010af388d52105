"""What can be done with one open file: read and write at a position, take room, make durable.

Together with :mod:`kvkeep.storage.fs` this is all that touches the disk. Each function does the same with fewer means
where the system lacks some (no preadv, pwrite, fallocate, fchmod or directory fsync).
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.errors import StoreError, StoreWriteError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Buffer = bytes | bytearray | memoryview

NOT_SUPPORTED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""How file systems say that they cannot do a thing at all."""

_VECTOR = 512  # buffers a call; systems take at least this many
_seek = threading.Lock()


class Temporary:
    """A file that is being written. Every method raises :class:`StoreWriteError` when it fails.

    Attributes:
        fd: its descriptor, open for reading and writing; -1 once it is closed.
        name: its name in the directory.
        gone: whether no file has the name: it was not made yet, was removed, or was published.
    """

    __slots__ = ("fd", "gone", "name")

    def __init__(self, name: tuple[str, ...]) -> None:
        self.fd = -1
        self.name = name
        self.gone = True

    def allocate(self, size: int, extents: Iterable[tuple[int, int]]) -> None:
        """Set the size, and take space on the disk for the extents [begin, end); the rest stays a hole."""
        with changing(self.name[-1]):
            os.ftruncate(self.fd, size)
            if not hasattr(os, "posix_fallocate"):
                return
            for begin, end in extents:
                try:
                    os.posix_fallocate(self.fd, begin, end - begin)
                except OSError as error:
                    if error.errno not in NOT_SUPPORTED:
                        raise
                    return  # a full disk will be noticed while writing

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at a position."""
        with changing(self.name[-1]):
            write_at(self.fd, offset, data)

    def settle(self, mode: int, *, sync: bool = True) -> None:
        """Set the mode, make content and mode durable, and close. A failure is final: it is not tried again."""
        with changing(self.name[-1]):
            set_mode(self.fd, mode)
            if sync:
                sync_file(self.fd)
            fd, self.fd = self.fd, -1
            os.close(fd)  # some network file systems tell of a failed write only here


@contextmanager
def changing(what: str | Path) -> Iterator[None]:
    """Turn an ``OSError`` of a change into a :class:`StoreWriteError` that keeps its ``errno`` and says what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "make room, or remove entries with `kvkeep rm`"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "see who may write there, or open the store with readonly=True"
        else:
            advice = "see whether the disk and the store's directory are in order"
        raise StoreWriteError(error.errno, f"{error.strerror}: {advice}", str(what)) from error


def read_at(fd: int, offset: int, views: Sequence[memoryview]) -> int:
    """Fill byte buffers from a position on, in few calls, and return how many bytes: fewer only where the file ends."""
    done = 0
    for first in range(0, len(views), _VECTOR):
        batch = [view for view in views[first : first + _VECTOR] if len(view)]
        while batch:
            count = _read_some(fd, offset + done, batch)
            if count == 0:
                return done
            done += count
            while batch and count >= len(batch[0]):
                count -= len(batch.pop(0))
            if batch:
                batch[0] = batch[0][count:]
    return done


def _read_some(fd: int, offset: int, views: list[memoryview]) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, views, offset)
    with _seek, open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(offset)
        return file.readinto(views[0]) or 0


def write_at(fd: int, offset: int, data: Buffer) -> None:
    """Write all of ``data`` at a position."""
    rest = memoryview(data)
    while len(rest):
        if hasattr(os, "pwrite"):
            count = os.pwrite(fd, rest, offset)
        else:
            with _seek:
                os.lseek(fd, offset, os.SEEK_SET)
                count = os.write(fd, rest)
        rest, offset = rest[count:], offset + count


def close_quietly(fd: int) -> None:
    """Close a descriptor through which nothing was written that matters; -1 is none."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


def mark_in_use(fd: int) -> None:
    """Let other processes, where the system has locks, see with :func:`in_use` that this one has the file open."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def in_use(fd: int) -> bool:
    """Whether a process that lives has marked this file; also where that cannot be known."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
            return False
    return True


def set_mode(fd: int, mode: int) -> None:
    """Set a file's mode, where there are modes."""
    if hasattr(os, "fchmod"):
        with suppress(PermissionError):  # a volume without modes; the file was made for its owner alone
            os.fchmod(fd, mode)


def sync_file(fd: int) -> None:
    """Return when the file is on the medium itself."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync alone leaves the data in the drive's cache there
    else:
        os.fsync(fd)


def sync_directory(fd: int | None) -> None:
    """Return when a directory's names are on the medium, where the system and the volume can say so."""
    if fd is None:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise


def sync_path(directory: Path) -> None:
    """The same for a directory outside the store, as far as this user may."""
    with suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
