"""Trouble with a store while a program generates: a reason for its report, and one line in the log."""

from __future__ import annotations

import logging
import threading
import time

from kvkeep.forks import renew_after_fork

log = logging.getLogger("kvkeep")

AGAIN = 600.0
"""Seconds until trouble of a kind is news again: a program may go on without its store for days."""


class Trouble:
    """Turns whatever a store raises into the reason of a miss, and logs each kind of it once in :data:`AGAIN` seconds.

    Safe to use from several threads, and after a fork.
    """

    def __init__(self, what: str, *, raises: bool) -> None:
        self._what = what
        self._raises = raises
        self._told: dict[tuple[type[Exception], int | None], float] = {}
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    def reason(self, error: Exception) -> str:
        """The reason of a miss for an error; raises it where that is asked for."""
        if self._raises:
            raise error
        kind, now = (type(error), getattr(error, "errno", None)), time.monotonic()
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        with self._lock:
            news = kind not in self._told or now - self._told[kind] >= AGAIN
            if news:
                self._told[kind] = now
        if news:
            log.warning("kvkeep: %s failed (%s); what is stored there is computed instead", self._what, text)
        return f"error: {text}"
