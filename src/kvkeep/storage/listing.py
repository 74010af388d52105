"""Rows made from the headers of the entries' files: to build the index from, or to do without it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import xxhash

from kvkeep.entry_format import CHAIN, DIGESTS, IDS, chain_length, decode_listing, header_length, table_digest
from kvkeep.errors import EntryDamagedError
from kvkeep.keys import DIGEST_SIZE
from kvkeep.storage.entries import ENTRIES, SUFFIX, EntryFiles
from kvkeep.storage.fileio import read_at
from kvkeep.storage.fs import Directory
from kvkeep.storage.rows import Row

_log = logging.getLogger(__name__)

_FIRST_READ = 16 << 10
_POLL = 1.0
_SETTLED = 100_000_000  # nanoseconds after which the next change to a directory surely has a later time


class HeaderReader:
    """Makes rows from headers.

    Attributes:
        damaged: for entries that could not be read because they are damaged, the reason by key.
    """

    def __init__(self, directory: Directory, entries: EntryFiles) -> None:
        self.damaged: dict[str, str] = {}
        self._directory = directory
        self._entries = entries

    def keys(self) -> set[str]:
        """The keys whose files are there."""
        return set(self._entries.keys())

    def is_there(self, key: str) -> bool:
        """Whether a key's file is there."""
        return self._entries.is_there(key)

    def rows(self, keys: Iterable[str]) -> Iterator[Row]:
        """The rows of these entries, without those that are damaged or gone."""
        for key in keys:
            try:
                row = self._row(key)
            except EntryDamagedError as error:
                if self.damaged.get(key) != error.reason:
                    _log.warning("entry %s is left out of the index: %s", key, error.reason)
                self.damaged[key] = error.reason
            except OSError:  # removed since it was listed, or not to be read by this user
                continue
            else:
                self.damaged.pop(key, None)
                yield row

    def _row(self, key: str) -> Row:
        fd = self._directory.open_read(ENTRIES, key[:2], key + SUFFIX)
        try:
            return _read_row(fd, key)
        finally:
            os.close(fd)


def _read_row(fd: int, key: str) -> Row:
    """The row of an open entry. Its tensor table is not checked in full, which whoever reads its tensors does."""
    size = os.fstat(fd).st_size
    head = _read(fd, 0, min(_FIRST_READ, size), size)
    length = header_length(head, size)
    header = head[8 : 8 + length]
    if len(header) < length:
        header += _read(fd, len(head), length - len(header), size)
    meta, places = decode_listing(header)
    if meta.key.hash != key:
        raise EntryDamagedError("the file is the entry of another key")
    links = chain_length(meta.start, meta.end) * DIGEST_SIZE
    ids, chain, digests = (_read_tensor(fd, 8 + length, places[name], size) for name in (IDS, CHAIN, DIGESTS))
    if (len(ids), len(chain)) != (4 * (meta.end - meta.start), links) or table_digest(digests) != meta.digests:
        raise EntryDamagedError("its ids, chain or digests are not what was stored")
    if xxhash.xxh3_128_digest(ids + chain) != digests[:DIGEST_SIZE]:  # the first digest unit
        raise EntryDamagedError("the token ids are not what was stored")
    return Row.from_meta(meta, size, chain)


def _read_tensor(fd: int, data: int, place: tuple[int, int], size: int) -> bytes:
    begin, end = place
    if begin > end:
        raise EntryDamagedError("a tensor ends before it begins")
    return _read(fd, data + begin, end - begin, size)


def _read(fd: int, offset: int, length: int, size: int) -> bytes:
    content = bytearray(length if offset + length <= size else 0)  # no room for what the file cannot hold
    if len(content) != length or (length and read_at(fd, offset, [memoryview(content)]) != length):
        raise EntryDamagedError("the file ends early")
    return bytes(content)


class Listing:
    """Rows in memory only. Other processes' changes are noticed within a second or so, by directory times.

    Attributes:
        rows: the rows by key, as of the last refresh.
    """

    def __init__(self, directory: Directory, headers: HeaderReader) -> None:
        self.rows: dict[str, Row] = {}
        self._directory = directory
        self._headers = headers
        self._times: dict[str, int] | None = None
        self._checked = 0.0

    def changed(self) -> bool:
        """Whether the rows may differ from those of the last refresh."""
        if time.monotonic() - self._checked < _POLL:
            return False
        self._checked = time.monotonic()
        return self._times is None or self._look() != self._times

    def refresh(self) -> None:
        """Bring ``rows`` up to date, opening only files that are new."""
        self._checked = time.monotonic()
        now, times = time.time_ns(), self._look()
        keys = self._headers.keys()
        for key in self.rows.keys() - keys:
            del self.rows[key]
        self.rows.update((row.key, row) for row in self._headers.rows(keys - self.rows.keys()))
        # A directory that has just changed may change again without a later time: look again then.
        self._times = times if all(changed < now - _SETTLED for changed in times.values()) else None

    def write(
        self,
        add: Iterable[Row],
        discard: Iterable[str],
        choose: Callable[[Mapping[str, Row]], Collection[str]] | None = None,
    ) -> list[Row]:
        """Put rows in or take rows out before the next refresh finds out by itself; those that ``choose`` names, too.

        Returns those.
        """
        self.rows.update((row.key, row) for row in add)
        for key in discard:
            self.rows.pop(key, None)
        return [self.rows.pop(key) for key in (choose(dict(self.rows)) if choose is not None else ())]

    def _look(self) -> dict[str, int]:
        """When each directory of entries changed last."""
        times = {}
        for name in self._directory.names("entries"):
            try:
                times[name] = self._directory.stat("entries", name).st_mtime_ns
            except OSError:
                continue
        return times
