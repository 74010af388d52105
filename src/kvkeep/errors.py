"""Every error that kvkeep raises, as one tree.

::

    KvkeepError                        exit code 1
    ├── InvalidRequestError            2   the call itself is wrong           (ValueError)
    │   ├── InvalidPromptError         2   a prompt that is not one           (ValueError)
    │   └── UnsupportedRequestError    2   a right call that cannot be served (ValueError)
    ├── CacheMismatchError             3   a cache that is not of these ids   (ValueError)
    ├── UnsupportedCacheError          3   a cache layout kvkeep cannot keep  (TypeError)
    ├── StoreError                     4   the directory                      (OSError)
    │   ├── StoreNotFoundError         4   no store there                     (FileNotFoundError)
    │   ├── StoreFormatError           4   not a store, or a newer format     (OSError)
    │   ├── StoreReadOnlyError         4   a write to a read-only store       (PermissionError)
    │   ├── StoreWriteError            4   full disk, quota, I/O error        (OSError)
    │   │   └── StoreFullError         4   over the budget, or the disk's floor
    │   └── TierError                  4   a tier beyond the directory        (ConnectionError)
    ├── EntryError                     5   one entry                          (ValueError)
    │   ├── EntryNotFoundError         5   no such entry or name              (KeyError)
    │   ├── EntryInUseError            5   others continue it                 (ValueError)
    │   └── EntryDamagedError          5   its bytes are not what was stored  (ValueError)
    │       ├── EntryUnknownError      5   it is of a kind that a newer kvkeep writes
    │       └── EntryUntrustedError    5   none of the store's keys has signed it
    └── MissingDependencyError         6   an extra is not installed          (ImportError)

Each leaf is also the builtin that it specialises, so that code which knows nothing of kvkeep can catch it. A lookup
that finds nothing is not an error: it is a :class:`~kvkeep.Match` of zero tokens with a reason.
"""

from __future__ import annotations


class KvkeepError(Exception):
    """The root of all errors that kvkeep raises.

    ``exit_code`` is what the ``kvkeep`` command ends with when the error reaches it.
    """

    exit_code = 1


class InvalidRequestError(KvkeepError, ValueError):
    """The arguments of a call contradict each other or lie outside what they may be."""

    exit_code = 2


class InvalidPromptError(InvalidRequestError):
    """The prompt is empty, has several rows where one is needed, or holds something that is no token id."""


class UnsupportedRequestError(InvalidRequestError):
    """The request is one that a KV cache cannot serve; the message says what to change."""


class CacheMismatchError(KvkeepError, ValueError):
    """The cache given to ``save`` does not hold exactly the given ids."""

    exit_code = 3


class UnsupportedCacheError(KvkeepError, TypeError):
    """The cache holds a layer whose layout kvkeep does not know; the message names the class and the layer."""

    exit_code = 3


class StoreError(KvkeepError, OSError):
    """The store's directory cannot be used."""

    exit_code = 4


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no store at this path, and this call does not create one."""


class StoreFormatError(StoreError):
    """The directory is not a store, or a store of a format that this version does not read."""


class StoreReadOnlyError(StoreError, PermissionError):
    """The store was opened with ``readonly=True``."""


class StoreWriteError(StoreError):
    """Nothing was stored: the disk is full, a quota is reached, or the write failed."""


class StoreFullError(StoreWriteError):
    """Nothing was stored: an entry does not fit beside what must stay; the message says which limit, and what to do."""


class TierError(StoreError, ConnectionError):
    """A tier, such as an object store, cannot be reached or does not do what it was asked."""


class EntryError(KvkeepError, ValueError):
    """One entry cannot be used."""

    exit_code = 5


class EntryNotFoundError(EntryError, KeyError):
    """No entry has this key, key prefix or name."""

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0]) if self.args else ""


class EntryInUseError(EntryError):
    """The entry cannot be removed alone, because others continue it."""


class EntryDamagedError(EntryError):
    """The bytes of an entry are not the bytes that were stored. ``reason`` says which check failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EntryUnknownError(EntryDamagedError):
    """The entry uses something of the format that this version does not know. It is a miss, and stays where it is."""


class EntryUntrustedError(EntryDamagedError):
    """The entry was not signed with any of the store's keys. It is a miss, and stays until a signed one replaces it."""


class MissingDependencyError(KvkeepError, ImportError):
    """The call needs a package that is not installed; the message names it."""

    exit_code = 6
