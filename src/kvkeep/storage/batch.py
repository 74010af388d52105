"""Entries that are made durable together: one flush for many, and a row only for what is on the medium.

Until then their files are in place, this process finds them, and a power cut may take or tear them; a torn one is found
by its digests. An index that another process makes anew meanwhile may have rows of them already.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from kvkeep.errors import StoreError
from kvkeep.forks import renew_after_fork
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.rows import Row

_log = logging.getLogger(__name__)

ENTRIES = 64
BYTES = 1 << 30
SECONDS = 5.0
"""With so many entries, bytes, or seconds since the first, the next put flushes."""


class Batch:
    """What waits to be made durable. Safe to use from several threads; a forked child leaves it to its parent.

    Args:
        files: the entries.
        add: adds the row of a durable entry; may raise ``OSError`` if it cannot stay.
        forget: drops what is known of an entry that could not be made durable, whose file is gone.
        supersede: removes what a durable entry, given by its key, makes superfluous of other entries.
    """

    def __init__(
        self,
        files: EntryFiles,
        *,
        add: Callable[[Row], None],
        forget: Callable[[str], None],
        supersede: Callable[[str, Sequence[str]], None],
    ) -> None:
        self._files = files
        self._add = add
        self._forget = forget
        self._supersede = supersede
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Begin empty."""
        self._lock = threading.RLock()
        self._rows: dict[str, Row] = {}
        self._replaced: dict[str, Sequence[str]] = {}
        self._since = 0.0
        self._owner = os.getpid()

    def put(self, row: Row) -> None:
        """Take note of a published entry. What goes wrong with the others of a full batch is told in the log."""
        with self._lock:
            if not self._rows:
                self._since = time.monotonic()
            self._rows[row.key] = row
            full = len(self._rows) >= ENTRIES or sum(one.nbytes for one in self._rows.values()) >= BYTES
            if full or time.monotonic() - self._since >= SECONDS:
                self.flush_quietly()

    def replaces(self, key: str, others: Sequence[str]) -> bool:
        """Have other entries superseded once a waiting one is durable; ``False`` if it does not wait."""
        with self._lock:
            if key not in self._rows:
                return False
            self._replaced[key] = others
            return True

    def drop(self, key: str) -> None:
        """Leave out an entry that is removed."""
        with self._lock:
            self._rows.pop(key, None)
            self._replaced.pop(key, None)

    def flush(self) -> None:
        """Make all of it durable, then add the rows. Raises the first ``OSError`` when it has done what it could."""
        trouble: OSError | None = None
        with self._lock:
            rows, self._rows = self._rows, {}
            replaced, self._replaced = self._replaced, {}
            failed = self._files.make_durable(rows) if rows else {}
            for key, row in rows.items():
                error = failed.get(key)
                gone = isinstance(error, FileNotFoundError)  # removed meanwhile, which is no trouble
                try:
                    if error is None:
                        self._add(row)
                        if row.parent is not None and not self._files.is_there(row.parent):
                            error, gone = FileNotFoundError("what it continues is gone"), True
                            self._files.remove(key)
                    if error is not None:
                        self._forget(key)
                        replaced.pop(key, None)
                except OSError as raised:
                    error = raised
                    replaced.pop(key, None)
                if error is not None and not gone:
                    _log.warning("entry %s was not kept: %s", key, error)
                    trouble = trouble or error
            for key, others in replaced.items():
                try:
                    self._supersede(key, others)
                except (OSError, StoreError) as error:  # nothing is lost by it
                    _log.warning("what entry %s replaces was not removed: %s", key, error)
        if trouble is not None:
            raise trouble

    def flush_quietly(self) -> None:
        """The same without raising."""
        try:
            self.flush()
        except (OSError, StoreError) as error:
            _log.debug("told above: %s", error)
