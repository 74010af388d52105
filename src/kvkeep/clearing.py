"""Removing all of one namespace, so that no file of the store tells what was in it.

Files are asked for their namespace themselves, whatever the index says. Safe beside readers, who read to the end what
they have open; what others store in the namespace meanwhile may stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvkeep.catalog import Catalog
from kvkeep.collection import Kind, Removal
from kvkeep.errors import EntryUnknownError
from kvkeep.storage.chats import FOLDER as CHATS
from kvkeep.storage.chats import Chats
from kvkeep.storage.entries import ENTRIES, QUARANTINE, SUFFIX, EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.journal import Journal
from kvkeep.storage.owners import Owner, owner_of
from kvkeep.storage.refs import Refs

_NOTE = ".txt"
_KEY_DIGITS = 32


@dataclass(kw_only=True)
class Clearing:
    """One namespace that is being removed from one store.

    Attributes:
        directory: the store.
        files: its entries.
        catalog: the rows of these.
        refs: their names.
        journal: their counters.
        chats: the conversations of the namespace.
        namespace: the namespace's digest, 32 digits.
        dry_run: remove nothing, and say what would go.
        removed: what was removed, or would be.
        failed: what could not be, with the reason in the place of its own.
    """

    directory: Directory
    files: EntryFiles
    catalog: Catalog
    refs: Refs
    journal: Journal
    chats: Chats
    namespace: str
    dry_run: bool = False
    removed: list[Removal] = field(default_factory=list)
    failed: list[Removal] = field(default_factory=list)

    def clear(self, *, drop: Callable[[str], None]) -> None:
        """Do it: names first, then rows, then files, children before parents; then the index anew.

        What cannot be removed is noted in ``failed`` and does not stop the rest.

        Args:
            drop: called with the key of every entry that is about to go.
        """
        entries = self._entries()
        aside, keys = self._set_aside()
        keys |= {key for key, owner in entries.items() if owner.namespace == self.namespace}
        self._remove_names(keys)
        if not self.dry_run:
            for key in entries:
                drop(key)
            self.catalog.exchange(
                None, lambda rows: [k for k, row in rows.items() if k in entries or row.namespace == self.namespace]
            )
        for key in sorted(entries, key=lambda key: -entries[key].start):
            why = self._why(entries[key])
            self._try("entry", key, (ENTRIES, key[:2], key + SUFFIX), why, partial(self.files.remove, key))
        for name, why in aside.items():
            self._try("quarantine", name, (QUARANTINE, name), why)
        for name in self._conversations():
            self._try("chat", name, (CHATS, name), "it is of the namespace")
        if not self.dry_run:
            self.journal.forget(keys | entries.keys())
            try:
                self.catalog.renew()
            except OSError as error:
                self._note("index", "index", 0, error)

    # --- what there is ---

    def _entries(self) -> dict[str, Owner]:
        """Whose the entries are that have to go, by key: those of the namespace, and those that nobody can tell of."""
        found = dict[str, Owner]()
        for key in list(self.files.keys()):
            owner = self._owner("entry", key, ENTRIES, key[:2], key + SUFFIX)
            if owner is not None:
                found[key] = owner
        return found

    def _set_aside(self) -> tuple[dict[str, str], set[str]]:
        """The files in quarantine that have to go, each with why, and the keys of those that are of the namespace."""
        found, keys = dict[str, str](), set[str]()
        names = self.directory.names(QUARANTINE)
        for name in names:
            if name.endswith(SUFFIX):
                owner = self._owner("quarantine", name, QUARANTINE, name)
                if owner is not None:
                    found[name] = self._why(owner)
                    if owner.namespace is not None:
                        keys.add(name[:_KEY_DIGITS])
        left = {name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and name not in found}
        for name in names:
            if name.endswith(_NOTE) and name.removesuffix(_NOTE) not in left:
                found[name] = found.get(name.removesuffix(_NOTE) + SUFFIX, "what it tells of is gone")
        return found, keys

    def _conversations(self) -> list[str]:
        found = []
        for name in self.directory.names(CHATS):
            try:
                if self.chats.owns(name):
                    found.append(name)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                self._note("chat", name, 0, error)
        return found

    def _owner(self, kind: Kind, name: str, *path: str) -> Owner | None:
        """Whose a file is; ``None`` if it has not to go: it is another namespace's, gone, or cannot be read."""
        try:
            owner = owner_of(self.directory, *path)
        except FileNotFoundError:
            return None
        except (OSError, EntryUnknownError) as error:
            self._note(kind, name, 0, error)
            return None
        return owner if owner.namespace in (self.namespace, None) else None

    def _why(self, owner: Owner) -> str:
        return "it is damaged, and nobody can tell whose it is" if owner.namespace is None else "it is of the namespace"

    # --- removing ---

    def _remove_names(self, keys: set[str]) -> None:
        for ref in self.refs.all():
            if ref.key in keys:
                place = ("refs", f"{ref.name}.json")
                self._try("name", ref.name, place, "its entry is of the namespace", partial(self.refs.remove, ref.name))

    def _try(
        self, kind: Kind, name: str, path: tuple[str, ...], why: str, remove: Callable[[], bool] | None = None
    ) -> None:
        try:
            nbytes = self.directory.stat(*path).st_size
            if self.dry_run or (remove() if remove is not None else self.directory.remove(*path)):
                self.removed.append(Removal(kind, name, nbytes, why))
        except FileNotFoundError:
            return
        except OSError as error:
            self._note(kind, name, 0, error)

    def _note(self, kind: Kind, name: str, nbytes: int, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.failed.append(Removal(kind, name, nbytes, why))
