"""A tier in memory: for tests, and to see what a remote would do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kvkeep.errors import TierError
from kvkeep.forks import renew_after_fork
from kvkeep.tiers.base import Buffer, Capabilities, Part, Stat, check_name, check_range


class MemoryTier:
    """A :class:`~kvkeep.tiers.Tier` that ends with the process. A forked child has a copy of its own."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._puts = 0
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "MemoryTier()"

    @property
    def capabilities(self) -> Capabilities:
        """All there is."""
        return Capabilities(ranges=True, exclusive=True)

    def get(
        self, name: str, begin: int = 0, end: int | None = None, *, version: str | None = None, bulk: bool = False
    ) -> Part | None:
        """See :meth:`Tier.get`."""
        check_range(begin, end)
        found = self._objects.get(check_name(name))
        if found is None or version not in (None, str(found[1])):
            return None
        data, number = found
        if begin > len(data) or (begin == len(data) and begin):
            raise TierError(f"{name} ends before byte {begin}")
        return Part(begin, Stat(len(data), str(number)), [data[begin:end]])

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        """See :meth:`Tier.put_if_absent`."""
        check_name(name)
        content = bytes(data)
        with self._lock:
            if name in self._objects:
                return False
            self._puts += 1
            self._objects[name] = content, self._puts
        return True

    def stat(self, name: str) -> Stat | None:
        """See :meth:`Tier.stat`."""
        found = self._objects.get(check_name(name))
        return None if found is None else Stat(len(found[0]), str(found[1]))

    def delete(self, name: str) -> None:
        """See :meth:`Tier.delete`."""
        with self._lock:
            self._objects.pop(check_name(name), None)

    def list(self, prefix: str) -> Iterator[str]:
        """See :meth:`Tier.list`."""
        below = check_name(prefix) + "/"
        with self._lock:
            names = [name for name in self._objects if name.startswith(below)]
        return iter(names)
