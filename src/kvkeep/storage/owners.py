"""Whose an entry's file is: the namespace that its header names, read without trust in the index."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from kvkeep.entry_format import decode_listing, header_length
from kvkeep.errors import EntryDamagedError, EntryUnknownError
from kvkeep.storage.fileio import read_at
from kvkeep.storage.fs import Directory

_NAMESPACE = re.compile(rb'\\"namespace\\":\\"([0-9a-f]{32})\\"')


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose an entry's file is.

    Attributes:
        namespace: digest of the namespace, 32 digits; ``None`` if the header is not sound, so that nobody can tell.
        start: first token that the file holds; 0 where that cannot be told.
    """

    namespace: str | None
    start: int = 0


def owner_of(directory: Directory, *name: str) -> Owner:
    """Whose the entry's file of this name is.

    Raises:
        OSError: it cannot be read, or is no file.
        EntryUnknownError: it is of a newer format, and does not say.
    """
    fd = directory.open_read(*name)
    try:
        size = os.fstat(fd).st_size
        header = b""
        try:
            length = header_length(_read(fd, 0, min(8, size)), size)
            header = _read(fd, 8, length)
            meta, _ = decode_listing(header)
        except EntryUnknownError:
            found = _NAMESPACE.findall(header)
            if len(found) != 1:
                raise
            return Owner(found[0].decode())
        except EntryDamagedError:
            return Owner(None)
        return Owner(meta.key.namespace, meta.start)
    finally:
        os.close(fd)


def _read(fd: int, offset: int, length: int) -> bytes:
    content = bytearray(length)
    return bytes(content[: read_at(fd, offset, [memoryview(content)])])
