"""One lock a key, so that several processes do not prefill the same prefix. An optimisation: nothing relies on it.

A lock is an ``flock`` on ``locks/<key>.lock``; the system frees it when its holder dies. The holder removes the file
while it still holds the lock, so a waiter that gets the lock of a removed file starts again with the new one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvkeep.errors import StoreError
from kvkeep.storage.fs import Directory

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SHORTEST_SLEEP = 0.001
_LONGEST_SLEEP = 0.05
_ATTEMPTS = 1000  # to find the file that was locked still there: each holder before removes his
_SUFFIX = ".lock"
_held: set[int] = set()


class KeyLocks:
    """The locks of one store. Safe to use from several threads."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    @contextmanager
    def hold(self, key: str, *, timeout: float) -> Iterator[bool]:
        """Hold the lock of a key while the block runs; wait at most ``timeout`` seconds for it.

        Yields ``True`` if no other holder is left to wait for: the lock is held, or the system, the volume or a
        read-only store has none. ``False``: the time is up and another holder is still there. Trouble with a lock is
        never an error.
        """
        name = ("locks", f"{key}{_SUFFIX}")
        fd: int | None = None
        free = True
        if fcntl is not None:
            # The store's own errors are OSErrors, so this covers a volume without locks and a read-only store alike.
            with suppress(OSError):
                fd, free = self._acquire(name, time.monotonic() + timeout)
        if fd is None:
            yield free
            return
        owner = os.getpid()
        _held.add(fd)
        try:
            yield True
        finally:
            if os.getpid() == owner:  # a child forked inside the block leaves the lock to its parent
                _held.discard(fd)
                self._release(name, fd)

    def orphans(self) -> list[str]:
        """The keys of locks that nobody holds, though their files are there: their holders were killed."""
        found = []
        for name in self._directory.names("locks"):
            with suppress(OSError):
                fd = self._directory.open_read("locks", name)
                try:
                    if name.endswith(_SUFFIX) and fcntl is not None and _try_lock(fd):
                        found.append(name.removesuffix(_SUFFIX))
                finally:
                    os.close(fd)
        return found

    def clear(self, key: str) -> bool:
        """Remove the file of a lock, unless somebody holds it."""
        with self.hold(key, timeout=0) as free:
            pass  # whoever releases a lock removes its file
        return free

    def _acquire(self, name: tuple[str, ...], deadline: float) -> tuple[int | None, bool]:
        """The descriptor that holds the lock; or ``None`` and whether that is for want of locks."""
        sleep = _SHORTEST_SLEEP
        for _ in range(_ATTEMPTS):
            fd = self._directory.open_lock(*name)
            try:
                while not _try_lock(fd):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        os.close(fd)
                        return None, False
                    time.sleep(min(sleep, left))
                    sleep = min(2 * sleep, _LONGEST_SLEEP)
                if self._is_current(name, fd):
                    return fd, True
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        return None, True  # a volume that forgets what it was just told

    def _is_current(self, name: tuple[str, ...], fd: int) -> bool:
        """Whether the name still leads to the file that is open: its last holder may have removed it."""
        with suppress(FileNotFoundError):
            return os.path.samestat(self._directory.stat(*name), os.fstat(fd))
        return False

    def _release(self, name: tuple[str, ...], fd: int) -> None:
        try:
            with suppress(OSError, StoreError):
                if self._is_current(name, fd):
                    self._directory.remove(*name)
        finally:  # whatever was raised: a lock that is left behind stops others
            with suppress(OSError):
                # Closing alone would leave the lock with a process that was forked without running Python's hooks.
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leave_to_parent() -> None:
    """In a forked child: let go of the parent's locks, or they would outlive a parent that is killed."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
