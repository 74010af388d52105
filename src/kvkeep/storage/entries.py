"""The entries of a store: one immutable file each, at a path made of its key's digits alone."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from kvkeep.entry_format import Header
from kvkeep.errors import EntryDamagedError, EntryUnknownError, InvalidRequestError, StoreError
from kvkeep.settings import Verify
from kvkeep.signing import Keyring
from kvkeep.storage import entry_writer
from kvkeep.storage.entry_reader import EntryFile
from kvkeep.storage.entry_writer import Draft, TensorSource
from kvkeep.storage.fileio import Temporary, read_at
from kvkeep.storage.fs import TMP, Directory
from kvkeep.storage.verified import FileIdentity

__all__ = ["Draft", "EntryFile", "EntryFiles", "FileIdentity", "TensorSource"]

ENTRIES = "entries"
QUARANTINE = "quarantine"
SUFFIX = ".safetensors"

_KEY = re.compile(r"[0-9a-f]{32}")
_NOT_A_FILE = {errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO}


class EntryFiles:
    """The files under ``entries/``.

    Args:
        directory: the store.
        verify: ``"first"`` checks what is read against its digests once a process, ``"always"`` each time, ``"never"``
            not at all. Headers are checked once a process, or with ``"always"`` each time.
        keys: what is stored is signed, and what is read must have been signed, with these; ``None`` asks for nothing.
    """

    def __init__(self, directory: Directory, *, verify: Verify = "first", keys: Keyring | None = None) -> None:
        self._directory = directory
        self._verify: Verify = verify
        self._keys = keys
        self._signer = None if keys is None else keys.signer

    def put(self, draft: Draft, *, admit: Callable[[Header], None] | None = None) -> tuple[Header, bool]:
        """Store an entry in one pass over its data, as durable as the directory makes it; nothing if this raises.

        Args:
            draft: the entry.
            admit: called with the header that it will have, but for digests, before anything is written; it may
                raise.

        Returns:
            The header of the stored entry, and whether it is this one: ``False`` if its key was stored before. The
            first one stays, and its header may then describe another stretch.

        Raises:
            InvalidRequestError: if the draft does not fit together.
            StoreReadOnlyError, StoreWriteError: if it cannot be stored.
        """
        planned = entry_writer.plan(draft, self._signer)
        key = planned.meta.key.hash
        stored = self._stored(key)
        if stored is not None:
            return stored, False
        if admit is not None:
            admit(planned)
        with self._directory.temporary(SUFFIX) as temporary:
            header = entry_writer.write(temporary, draft, planned, self._signer)
            if self._directory.publish(temporary, *_name(key)):
                return header, True
        return self._stored(key) or header, False

    @contextmanager
    def arriving(self) -> Iterator[Temporary]:
        """A file for an entry that comes from elsewhere, to be written, examined and published; else it is gone."""
        with self._directory.temporary(SUFFIX) as temporary:
            yield temporary

    def examine(self, temporary: Temporary, key: str) -> EntryFile:
        """Open what has arrived as the entry of a key. Nothing of it was checked but its header.

        Raises:
            EntryDamagedError: if it is not a sound entry of this key, or not signed where it must be.
        """
        return EntryFile(os.dup(temporary.fd), key, "always", self._keys)

    def publish(self, temporary: Temporary, key: str) -> bool:
        """Make what has arrived the entry of a key, as durable as :meth:`put` does; ``False`` if there is one."""
        return self._stored(key) is None and self._directory.publish(temporary, *_name(key))

    def read_whole(self, key: str) -> memoryview:
        """All bytes of an entry's file. Raises ``OSError``."""
        fd = self._directory.open_read(*_name(key))
        try:
            content = memoryview(bytearray(os.fstat(fd).st_size))
            return content[: read_at(fd, 0, [content])]
        finally:
            os.close(fd)

    def _stored(self, key: str) -> Header | None:
        """The header that is stored under a key, if it can be read; one that is damaged makes way."""
        try:
            with self.open(key) as file:
                return file.header
        except OSError:
            return None
        except EntryUnknownError:  # a newer version's: it stays
            return None
        except EntryDamagedError as error:  # one without our signature, too
            self.quarantine(key, error.reason)
            return None

    def open(self, key: str) -> EntryFile:
        """Open an entry and check its header.

        Raises:
            FileNotFoundError: if there is none.
            EntryDamagedError: if what is there is not a sound entry of this key.
            OSError: if it cannot be read.
        """
        name = _name(key)
        try:
            fd = self._directory.open_read(*name)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise EntryDamagedError(f"what lies at the entry's path is not a file ({error.strerror})") from None
            raise
        return EntryFile(fd, key, self._verify, self._keys)

    def keys(self) -> Iterator[str]:
        """The keys that are on disk, in order."""
        for part in self._directory.names(ENTRIES):
            with suppress(NotADirectoryError):
                for name in self._directory.names(ENTRIES, part):
                    key = name.removesuffix(SUFFIX)
                    if _KEY.fullmatch(key) and (part, name) == (key[:2], key + SUFFIX):
                        yield key

    def size(self, key: str) -> int:
        """Bytes of an entry's file, its room included. ``FileNotFoundError`` if there is none."""
        return self._directory.stat(*_name(key)).st_size

    def size_of(self, draft: Draft) -> int:
        """Bytes of the file that a draft would become. Raises ``InvalidRequestError`` as :meth:`put` does."""
        return entry_writer.plan(draft, self._signer).size

    def is_there(self, key: str) -> bool:
        """Whether an entry's file is there."""
        try:
            self.size(key)
        except OSError:
            return False
        return True

    def make_durable(self, keys: Iterable[str]) -> dict[str, OSError]:
        """Bring entries to the medium that a directory without ``sync`` has published.

        Returns those that could not be, which are gone then, and why.
        """
        names: dict[tuple[str, ...], str] = {_name(key): key for key in keys}
        return {names[name]: error for name, error in self._directory.make_durable(names).items()}

    def remove(self, key: str) -> bool:
        """Remove an entry; ``False`` if there was none. Whoever has it open reads it to the end."""
        return self._directory.remove(*_name(key))

    def take_away(self, key: str) -> str | None:
        """Move an entry to where nobody finds it; what to call it from then on, or ``None`` if there was none.

        Who removes what nobody holds has to look for holders once more when nobody new can come upon the entry.
        """
        name = f"{os.getpid()}-{os.urandom(8).hex()}{SUFFIX}"
        return name if self._directory.move(_name(key), (TMP, name)) else None

    def put_back(self, taken: str, key: str) -> None:
        """Make an entry that was taken away be there again."""
        self._directory.move((TMP, taken), _name(key))

    def discard(self, taken: str) -> None:
        """Remove an entry that was taken away. Whoever has it open reads it to the end."""
        self._directory.remove(TMP, taken)

    def identity(self, key: str) -> FileIdentity:
        """Which state of which file an entry is now. Raises ``OSError`` if it is gone."""
        return FileIdentity.of(self._directory.stat(*_name(key)))

    def quarantine(self, key: str, reason: str, *, identity: FileIdentity | None = None) -> None:
        """Set a bad entry aside, with a note that says why. Never raises; a read-only store leaves it where it is.

        With ``identity`` only that very file is set aside: not the good one that another process may have put in its
        place meanwhile.
        """
        with suppress(StoreError, OSError):
            taken = set(self._directory.names(QUARANTINE))
            number = next(n for n in range(len(taken) + 1) if f"{key}-{n}{SUFFIX}" not in taken)
            if identity is not None and self.identity(key) != identity:
                return
            if self._directory.move(_name(key), (QUARANTINE, f"{key}-{number}{SUFFIX}")):
                self._directory.write_atomic(QUARANTINE, f"{key}-{number}.txt", data=f"{reason}\n".encode())


def _name(key: str) -> tuple[str, str, str]:
    if not _KEY.fullmatch(key):
        raise InvalidRequestError(f"{key!r} is not an entry's key: it has 32 hex digits")
    return ENTRIES, key[:2], key + SUFFIX
