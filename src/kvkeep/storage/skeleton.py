"""The files that make a directory a store: made by ``init``, looked at by ``check``."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.entry_format import FORMAT_VERSION
from kvkeep.errors import InvalidRequestError, StoreError, StoreFormatError, StoreNotFoundError
from kvkeep.settings import parse_size
from kvkeep.storage.fs import TMP, Directory

STORE_FILE = "store.json"
SKELETON = (STORE_FILE, "CACHEDIR.TAG", ".gitignore", "FORMAT.md", "warm.toml")
"""Every file of an empty store. ``store.json`` is the first to be written: with it, the directory is a store."""

LIMITS = ("max_bytes", "quota")
"""The members of ``store.json`` that limit what the store may take: all who open it should keep to the same."""

_DATA = Path(__file__).parents[1] / "data"
_TEMPORARY = re.compile(r"[0-9]+-[0-9a-f]{16}\.new")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What ``store.json`` says.

    Attributes:
        format: the number of the format that the store is in.
        shared: whether it belongs to a group of users rather than to one.
        max_bytes: what its entries may take together, for whoever opens it without a word of his own; or ``None``.
        quota: the same for the entries of each namespace.
    """

    format: int
    shared: bool
    max_bytes: int | None = None
    quota: int | None = None


@contextmanager
def opening(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an ``OSError`` that comes of opening a store into a :class:`StoreError` that says what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        advice = "see whether the disk and the store's directory are in order"
        raise StoreError(error.errno, f"{error.strerror}: {advice}", str(path)) from error


def init(path: str | os.PathLike[str], *, shared: bool = False) -> None:
    """Make a directory a store; what is there already stays as it is, so doing it twice is harmless.

    Args:
        path: absent, empty, or a store.
        shared: let the directory's group read and write (modes 2770, 0440 and 0660) instead of this user alone.

    Raises:
        StoreFormatError: if the directory is ``/``, a home directory, or holds something that is not a store.
        InvalidRequestError: if it is a private store, and ``shared`` is wanted.
        StoreWriteError: if it cannot be written.
    """
    root = _allowed(path)
    if _occupied(root):
        info = check(root)
        if shared and not info.shared:
            raise InvalidRequestError(f"{root} is a private store; make a shared one in another directory")
        directory = Directory(root, shared=info.shared)
    else:
        _check_owner(root, shared=shared)
        directory = Directory.create(root, shared=shared)
    for name in SKELETON:
        if not directory.exists(name):
            directory.write_atomic(name, data=_content(name, directory.shared))


def check(path: str | os.PathLike[str], *, readonly: bool = False) -> StoreInfo:
    """Say what store a directory is, before anything in it is touched.

    Args:
        path: the store.
        readonly: also accept the private store of another user, which this one can then only read.

    Raises:
        StoreNotFoundError: if the directory is absent or empty.
        StoreFormatError: if it is not a store, one of a newer format, or one that others could have tampered with.
    """
    root = _allowed(path)
    if not _occupied(root):
        raise StoreNotFoundError(f"there is no store at {root}; `kvkeep init` makes one")
    raw = _read(root)
    number = raw.get("format") if isinstance(raw, dict) else None
    if type(number) is not int or number < 1 or not isinstance(raw.get("shared", False), bool):
        raise StoreFormatError(f"{root / STORE_FILE} does not say which format the store is in")
    if number > FORMAT_VERSION:
        raise StoreFormatError(f"the store {root} is in format {number}, which a newer kvkeep reads; upgrade kvkeep")
    try:
        limits = [None if raw.get(name) is None else parse_size(raw[name], name) for name in LIMITS]
    except InvalidRequestError as error:
        raise StoreFormatError(f"{root / STORE_FILE}: {error}") from None
    info = StoreInfo(number, raw.get("shared", False), *limits)
    _check_owner(root, shared=info.shared, readonly=readonly)
    return info


def set_limits(path: str | os.PathLike[str], limits: Mapping[str, int]) -> None:
    """Write limits into ``store.json``, for every process that opens the store from then on.

    Args:
        path: the store.
        limits: ``max_bytes`` and ``quota``, as far as they are to change.

    Raises:
        StoreNotFoundError, StoreFormatError: as :func:`check` does.
        StoreWriteError: if it cannot be written.
    """
    info = check(path)
    root = _allowed(path)
    raw = {**_read(root), **{name: limits[name] for name in LIMITS if name in limits}}
    Directory(root, shared=info.shared).write_atomic(STORE_FILE, data=(json.dumps(raw) + "\n").encode())


def _read(root: Path) -> Any:
    try:
        return json.loads(Directory(root, readonly=True).read(STORE_FILE, limit=1 << 16))
    except FileNotFoundError:
        raise StoreFormatError(f"{root} has no {STORE_FILE}, so it is not a store; choose another directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreFormatError(f"{root / STORE_FILE} cannot be read: {error}") from None


def _allowed(path: str | os.PathLike[str]) -> Path:
    root = Path(path).resolve()
    try:
        home: Path | None = Path.home().resolve()
    except RuntimeError:  # a user without one
        home = None
    if root in (root.parent, home):
        raise StoreFormatError(f"{root} cannot be a store; choose a directory of its own")
    return root


def _occupied(root: Path) -> bool:
    """Whether there is anything but what an ``init`` that was cut short leaves."""
    try:
        directory = Directory(root, readonly=True)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreFormatError(f"{root} cannot be used as a directory ({error.strerror}); choose another") from None
    names = [path.name for path in root.iterdir()]
    if names != [TMP]:
        return bool(names)
    return not all(map(_TEMPORARY.fullmatch, directory.names(TMP)))


def _check_owner(root: Path, *, shared: bool, readonly: bool = False) -> None:
    """A private store must be out of the reach of other users, because what it holds is fed to a model."""
    if shared or not hasattr(os, "geteuid") or not root.exists():
        return
    known = root.stat()
    if known.st_uid != os.geteuid() and not readonly:
        raise StoreFormatError(f"the store {root} is another user's; open it with readonly=True, or make a shared one")
    if known.st_mode & stat.S_IWOTH and not known.st_mode & stat.S_ISVTX:
        raise StoreFormatError(f"anybody may write to the store {root}; take that right away with `chmod o-w`")


def _content(name: str, shared: bool) -> bytes:
    template = (_DATA / name.lstrip(".")).read_bytes()
    if name != STORE_FILE:
        return template
    return (json.dumps({**json.loads(template), "shared": shared}) + "\n").encode()
