"""The only module that changes a directory: files under one root, reached without following a link.

Names are tuples of plain components. Where the system can, every component is opened relative to the one before and
never through a symbolic link; elsewhere (no ``dir_fd``: Windows) each component is looked at first. Volumes without
hard links are served with renames.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvkeep.errors import InvalidRequestError, StoreReadOnlyError
from kvkeep.storage.fileio import (
    NOT_SUPPORTED,
    Temporary,
    changing,
    close_quietly,
    mark_in_use,
    set_mode,
    sync_directory,
    sync_file,
    sync_path,
)

TMP = "tmp"

_COMPONENT = re.compile(r"[A-Za-z0-9._-]{1,128}")
_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_FILE = _COMMON | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not wait
_DIRECTORY = os.O_RDONLY | _COMMON | getattr(os, "O_DIRECTORY", 0)
_RELATIVE = {os.open, os.mkdir, os.unlink, os.rename, os.stat}

_Place = tuple[str, int | None]
"""What the functions of ``os`` need to reach a name: a path, and the descriptor that it starts from."""


class Directory:
    """A directory whose files are read and changed by relative names.

    Reading raises ``OSError`` as the system does. Every change raises :class:`StoreWriteError` when it fails and
    :class:`StoreReadOnlyError` when the directory is read-only; missing parent directories are made. Modes are set
    whatever the umask: for a private store directories 0700, entries 0400, other files 0600; for a shared one 2770,
    0440 and 0660.

    Without ``sync``, what is published is durable only after :meth:`make_durable`; what is replaced still is at once.

    Safe to use from several threads, and after a fork.
    """

    def __init__(self, root: Path, *, readonly: bool = False, shared: bool = False, sync: bool = True) -> None:
        self.root = Path(
            root
        ).resolve()  # a link that leads to the root is the user's choice; below it none is followed
        self.readonly = readonly
        self.shared = shared
        self._sync = sync
        self._directory_mode, self._entry_mode, self._file_mode = (
            (0o2770, 0o440, 0o660) if shared else (0o700, 0o400, 0o600)
        )
        self._fd: int | None = None
        if os.supports_dir_fd >= _RELATIVE:
            self._fd = os.open(self.root, _DIRECTORY)
            weakref.finalize(self, close_quietly, self._fd)
        elif not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
        self._links = hasattr(os, "link")
        self._durable: set[tuple[str, ...]] = set()

    @classmethod
    def create(cls, root: Path, *, shared: bool = False) -> Directory:
        """Make the root if it is missing, and set its mode."""
        missing = [one for one in (root, *root.parents) if not one.exists()]
        with changing(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in missing:
            sync_path(one.parent)
        directory = cls(root, shared=shared)
        with changing(root), suppress(PermissionError):
            os.chmod(directory.root, directory._directory_mode)
        return directory

    @property
    def links(self) -> bool:
        """Whether the volume has hard links, as far as it is known by now."""
        return self._links

    def space(self) -> tuple[int, int]:
        """Bytes of the volume that this user may still take, and of the whole volume."""
        usage = shutil.disk_usage(self.root)
        return usage.free, usage.total

    def path(self, *name: str) -> Path:
        """The path of a name, for libraries that open files themselves."""
        return self.root.joinpath(*_checked(name))

    # --- reading ----------------------------------------------------------------------------------------------------

    def open_read(self, *name: str) -> int:
        """A descriptor of a regular file, open for reading. ``OSError`` (``EINVAL``) if it is anything else."""
        return self._open(name, os.O_RDONLY)

    def read(self, *name: str, limit: int = 1 << 20) -> bytes:
        """The content of a small file. ``OSError`` (``EFBIG``) if it is longer than ``limit``."""
        with open(self.open_read(*name), "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self.path(*name)))
        return content

    def names(self, *name: str) -> list[str]:
        """The safe names in a directory, sorted; none if it does not exist. Without a name, those in the root."""
        try:
            with self._at((*name, "_")) as (path, at):
                found = os.listdir(os.path.dirname(path) if at is None else at)
        except FileNotFoundError:
            return []
        return sorted(one for one in found if _COMPONENT.fullmatch(one))

    def exists(self, *name: str) -> bool:
        """Whether there is something of this name, a dangling link included."""
        try:
            self.stat(*name)
        except FileNotFoundError:
            return False
        return True

    def stat(self, *name: str) -> os.stat_result:
        """What is known of a name; a link is not followed."""
        with self._at(name) as (path, at):
            return os.stat(path, dir_fd=at, follow_symlinks=False)

    # --- changing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def temporary(self, suffix: str) -> Iterator[Temporary]:
        """A new file in ``tmp/`` that is gone when the block ends, however it ends, unless it was published."""
        name = (TMP, f"{os.getpid()}-{os.urandom(8).hex()}{suffix}")
        temporary = Temporary(name)
        try:
            with self._changing(name):
                temporary.gone = False
                temporary.fd = self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                mark_in_use(temporary.fd)
            yield temporary
        finally:
            close_quietly(temporary.fd)
            self._discard(temporary)

    def publish(self, temporary: Temporary, *name: str) -> bool:
        """Make a temporary file appear under a name, whole and durable; ``False`` if the name was taken already.

        On a volume without hard links two writers of one name may both be told ``True``; the file is whole either way.
        """
        with self._changing(name):
            temporary.settle(self._entry_mode, sync=self._sync)
            with self._at(temporary.name) as source, self._at(name, create=True) as target:
                if not self._link(source, target):
                    return False
                self._discard(temporary)
                try:
                    if self._sync:
                        sync_directory(target[1])
                except OSError:
                    os.unlink(target[0], dir_fd=target[1])  # not durable, so not stored
                    raise
        return True

    def make_durable(self, names: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], OSError]:
        """Bring published files to the medium, each directory once. A failure is final: that file is removed.

        Returns those that failed, and why.
        """
        failed: dict[tuple[str, ...], OSError] = {}
        folders: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for name in names:
            for depth in range(len(name)):
                folders.setdefault(name[:depth], []).append(name)
            try:
                fd = self.open_read(*name)
                try:
                    sync_file(fd)
                finally:
                    close_quietly(fd)
            except OSError as error:
                failed[name] = error
        for folder, inside in folders.items():
            try:
                with self._at((*folder, "_")) as (_, at):
                    sync_directory(at)
            except OSError as error:
                failed.update((name, error) for name in inside)
        for name in failed:
            with suppress(OSError):
                self.remove(*name)
        return failed

    def write_atomic(self, *name: str, data: bytes) -> None:
        """Replace a small file: readers see the old content or the new one, and the new one is durable."""
        with self._changing(name), self.temporary(".new") as temporary:
            temporary.write(0, data)
            temporary.settle(self._file_mode)
            with self._at(temporary.name) as source, self._at(name, create=True) as target:
                os.replace(source[0], target[0], src_dir_fd=source[1], dst_dir_fd=target[1])
                temporary.gone = True
                sync_directory(target[1])

    def append(self, *name: str, data: bytes) -> None:
        """Add to the end of a file in one write; not made durable."""
        with self._changing(name):
            fd = self._open_or_create(name, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(fd, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)

    def open_lock(self, *name: str) -> int:
        """A descriptor of a lock file, made if missing."""
        with self._changing(name):
            return self._open_or_create(name, os.O_RDWR)

    def remove(self, *name: str) -> bool:
        """Remove a file; ``False`` if there was none."""
        with self._changing(name):
            try:
                with self._at(name) as (path, at):
                    os.unlink(path, dir_fd=at)
            except FileNotFoundError:
                return False
        return True

    def move(self, source: tuple[str, ...], target: tuple[str, ...]) -> bool:
        """Give a file another name, replacing what has it; ``False`` if there was no such file."""
        with self._changing(source):
            try:
                with self._at(source) as old, self._at(target, create=True) as new:
                    os.replace(old[0], new[0], src_dir_fd=old[1], dst_dir_fd=new[1])
            except FileNotFoundError:
                return False
        return True

    def ensure(self, *name: str) -> None:
        """Make a directory and its parents, if missing."""
        with self._changing(name), self._at((*_checked(name), "_"), create=True):
            pass

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, name: tuple[str, ...]) -> Iterator[None]:
        if self.readonly:
            raise StoreReadOnlyError(errno.EROFS, "the store was opened with readonly=True", str(self.root))
        with changing(self.root.joinpath(*_checked(name))):
            yield

    @contextmanager
    def _at(self, name: tuple[str, ...], *, create: bool = False) -> Iterator[_Place]:
        """Reach a name: its parents are opened one by one, and made where they are missing if ``create``."""
        *parents, last = _checked(name)
        with ExitStack() as opened:
            path, at = str(self.root), self._fd
            for depth, parent in enumerate(parents, 1):
                step = os.path.join(path, parent) if at is None else parent
                made = create and self._make(step, at, tuple(parents[:depth]))
                if at is not None:
                    at = os.open(step, _DIRECTORY, dir_fd=at)
                    opened.callback(close_quietly, at)
                elif os.path.islink(step):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), step)
                if made:
                    with suppress(PermissionError):  # a volume without modes
                        os.chmod(step if at is None else at, self._directory_mode)
                path = step
            yield (last if at is not None else os.path.join(path, last)), at

    def _make(self, path: str, at: int | None, name: tuple[str, ...]) -> bool:
        try:
            os.mkdir(path, 0o700, dir_fd=at)
            made = True
        except FileExistsError:
            made = False
        if self._sync and (made or name not in self._durable):  # whoever made it may not have come to this yet
            sync_directory(at)
            self._durable.add(name)
        return made

    def _open(self, name: tuple[str, ...], flags: int, *, mode: int | None = None) -> int:
        with self._at(name, create=bool(flags & os.O_CREAT)) as (path, at):
            if at is None and os.path.islink(path):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            fd = os.open(path, flags | _FILE, 0o600, dir_fd=at)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.path(*name)))
            if mode is not None:
                set_mode(fd, mode)
        except BaseException:
            close_quietly(fd)
            raise
        return fd

    def _open_or_create(self, name: tuple[str, ...], flags: int) -> int:
        for _ in range(3):  # somebody may make or remove it in between
            with suppress(FileNotFoundError):
                return self._open(name, flags)
            with suppress(FileExistsError):
                return self._open(name, flags | os.O_CREAT | os.O_EXCL, mode=self._file_mode)
        return self._open(name, flags)

    def _link(self, source: _Place, target: _Place) -> bool:
        """Put a file at a free name, atomically."""
        if self._links:
            follow = os.link not in os.supports_follow_symlinks
            try:
                os.link(source[0], target[0], src_dir_fd=source[1], dst_dir_fd=target[1], follow_symlinks=follow)
                return True
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
                self._links = False
        try:
            os.stat(target[0], dir_fd=target[1], follow_symlinks=False)
            return False
        except FileNotFoundError:
            os.rename(source[0], target[0], src_dir_fd=source[1], dst_dir_fd=target[1])
            return True

    def _discard(self, temporary: Temporary) -> None:
        """Remove a temporary file that is still there. Tries twice, and never raises: gc finds what is left."""
        for _ in range(0 if temporary.gone else 2):
            try:
                with self._at(temporary.name) as (path, at):
                    os.unlink(path, dir_fd=at)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            temporary.gone = True
            break


def _checked(name: tuple[str, ...]) -> tuple[str, ...]:
    for component in name:
        if not _COMPONENT.fullmatch(component) or component in (".", ".."):
            raise InvalidRequestError(f"{component!r} is not a file name that a store may use")
    if not name:
        raise InvalidRequestError("a file needs a name")
    return name
