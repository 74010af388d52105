"""A tier in a directory: a disk, or whatever is mounted there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvkeep.errors import TierError
from kvkeep.storage.fileio import read_at
from kvkeep.storage.fs import Directory
from kvkeep.tiers.base import Buffer, Capabilities, Part, Stat, check_name, check_range

_OBJECTS = "objects"
_PIECE = 8 << 20


class LocalTier:
    """A :class:`~kvkeep.tiers.Tier` of files below a directory, which is made when it does not exist.

    Objects are durable when they are stored, and nobody can change them: they have mode 0400, or 0440 with
    ``shared``. Hosts that share the directory need no locks.
    """

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False) -> None:
        with _failing(path):
            self._directory = Directory.create(Path(path), shared=shared)

    def __repr__(self) -> str:
        return f"LocalTier({str(self._directory.root)!r})"

    @property
    def capabilities(self) -> Capabilities:
        """All there is, where the volume has hard links."""
        return Capabilities(ranges=True, exclusive=self._directory.links)

    def get(
        self, name: str, begin: int = 0, end: int | None = None, *, version: str | None = None, bulk: bool = False
    ) -> Part | None:
        """See :meth:`Tier.get`."""
        check_range(begin, end)
        found = self.stat(name)
        if found is None or version not in (None, found.version):
            return None
        stop = found.size if end is None else min(end, found.size)
        if begin > stop or (begin == stop and begin):
            raise TierError(f"{name} ends before byte {begin}")
        return Part(begin, found, _Pieces(self._directory, name, found, begin, stop))

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        """See :meth:`Tier.put_if_absent`."""
        path = _path(name)
        with _failing(name):
            if self._directory.exists(*path):
                return False
            with self._directory.temporary(".object") as temporary:
                temporary.write(0, data)
                return self._directory.publish(temporary, *path)

    def stat(self, name: str) -> Stat | None:
        """See :meth:`Tier.stat`."""
        with _failing(name):
            try:
                return _stat(self._directory.stat(*_path(name)))
            except FileNotFoundError:
                return None

    def delete(self, name: str) -> None:
        """See :meth:`Tier.delete`."""
        with _failing(name):
            self._directory.remove(*_path(name))

    def list(self, prefix: str) -> Iterator[str]:
        """See :meth:`Tier.list`."""
        waiting = [_path(prefix)]
        while waiting:
            path = waiting.pop()
            with _failing(prefix):
                names = self._directory.names(*path)
            for name in names:
                below = (*path, name)
                with _failing(prefix):
                    is_folder = stat.S_ISDIR(self._directory.stat(*below).st_mode)
                if is_folder:
                    waiting.append(below)
                else:
                    yield "/".join(below[1:])


class _Pieces:
    """A stretch of a file, which is opened when it is read."""

    def __init__(self, directory: Directory, name: str, stat: Stat, begin: int, end: int) -> None:
        self._directory = directory
        self._name = name
        self._stat = stat
        self._begin = begin
        self._end = end

    def __iter__(self) -> Iterator[Buffer]:
        with _failing(self._name):
            fd = self._directory.open_read(*_path(self._name))
        try:
            if _stat(os.fstat(fd)) != self._stat:
                raise TierError(f"{self._name} was replaced before it was read")
            for at in range(self._begin, self._end, _PIECE):
                piece = bytearray(min(_PIECE, self._end - at))
                with _failing(self._name):
                    if read_at(fd, at, [memoryview(piece)]) != len(piece):
                        raise TierError(f"{self._name} was cut while it was read")
                yield piece
        finally:
            os.close(fd)


def _path(name: str) -> tuple[str, ...]:
    return _OBJECTS, *check_name(name).split("/")


def _stat(known: os.stat_result) -> Stat:
    return Stat(known.st_size, f"{known.st_ino}-{known.st_mtime_ns}-{known.st_size}")


@contextmanager
def _failing(what: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except TierError:
        raise
    except OSError as error:
        raise TierError(f"{what}: {error.strerror or error}") from error
