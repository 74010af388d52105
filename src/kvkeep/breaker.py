"""What is remembered of a remote: that it failed, so that it is left alone for a while, and what it had or had not."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from kvkeep.forks import renew_after_fork

T = TypeVar("T")

PAUSE = 30.0
"""Seconds that a remote is left alone when it has failed; twice as long each time it fails again, up to LONGEST."""
LONGEST = 600.0


class Breaker:
    """Says whether a remote may be asked. Safe to use from several threads.

    After a failure nobody may for a while, and then one at a time, until it has worked.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._closed_until = 0.0
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Whether the remote may be asked now; whoever does must then say how it went."""
        with self._lock:
            if self._failures == 0:
                return True
            now = self._clock()
            if now < self._closed_until:
                return False
            self._closed_until = now + self._pause()  # the others wait for how it goes
            return True

    def failed(self) -> None:
        """The remote did not answer, or not as it should."""
        with self._lock:
            self._failures += 1
            self._closed_until = self._clock() + self._pause()

    def worked(self) -> None:
        """The remote answered."""
        self._failures = 0

    def _pause(self) -> float:
        return min(PAUSE * 2.0 ** (min(self._failures, 16) - 1), LONGEST)


class Remembered(Generic[T]):
    """Values that count for some seconds, those that were set last. Safe to use from several threads."""

    def __init__(self, seconds: float, *, limit: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._limit = limit
        self._clock = clock
        self._values: OrderedDict[str, tuple[float, T]] = OrderedDict()
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    def get(self, name: str) -> T | None:
        """The value of a name, if it counts still."""
        with self._lock:
            until, value = self._values.get(name, (0.0, None))
            return value if self._clock() < until else None

    def set(self, name: str, value: T) -> None:
        """Remember a value from now on."""
        with self._lock:
            self._values[name] = self._clock() + self._seconds, value
            self._values.move_to_end(name)
            if len(self._values) > self._limit:
                self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        """Drop the value of a name."""
        with self._lock:
            self._values.pop(name, None)
