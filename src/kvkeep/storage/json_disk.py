"""How diskcache is used: text values inside its database, and nothing else.

diskcache by default unpickles what a row holds, opens the file that a row names, and evicts rows by its own policy. A
database that anybody could have written must not make it do any of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import diskcache  # type: ignore[import-untyped]

Timeout: type[Exception] = diskcache.Timeout
"""What a write raises when other writers keep the database busy for too long."""

_RAW = 1  # the mode of a value that is stored as it is


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys and values are text. Anything else is refused, when it is stored and when it is found."""

    def put(self, key: object) -> tuple[str, bool]:
        return _text(key), True

    def get(self, key: object, raw: object) -> str:
        if not raw:
            _refuse("a pickled key")
        return _text(key)

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, str]:
        if read:
            _refuse("a file")
        return 0, _RAW, None, _text(value)

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> str:
        if mode != _RAW or filename is not None or read:
            _refuse(f"a value of mode {mode!r}")
        return _text(value)

    def filename(self, key: object = None, value: object = None) -> NoReturn:
        _refuse("a file")

    def remove(self, file_path: object) -> None:
        """Does nothing: no row of ours has a file, so this name is somebody's mischief."""


def open_cache(path: Path, settings: Mapping[str, int | str], timeout: float) -> diskcache.Cache:
    """Open the database in an existing directory, without a connection left open in this thread."""
    cache = diskcache.Cache(str(path), timeout=timeout, disk=TextDisk, **settings)
    cache.close()
    return cache


def _text(value: object) -> str:
    if not isinstance(value, str):
        _refuse(f"a {type(value).__name__}")
    return value


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the index holds text only, not {what}")
