"""What one process knows of a store's entries, kept up to date with what others do, and the search in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from kvkeep.entry_format import Media
from kvkeep.errors import EntryDamagedError, EntryUnknownError, EntryUntrustedError
from kvkeep.forks import renew_after_fork
from kvkeep.keys import BLOCK, common_prefix
from kvkeep.matching import PrefixIndex, best_of
from kvkeep.prefixes import Prefix, shared_with_media
from kvkeep.records import Identity
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Choose, Index, Row
from kvkeep.storage.verified import FileIdentity

Obstacle = Callable[[Row, int], str | None]
"""``obstacle(row, tokens)``: why the first ``tokens`` tokens of an entry cannot be used, or ``None``."""

log = logging.getLogger("kvkeep")

_IDS_KEPT = 1024
_PARTS = {
    "dtypes": "other dtypes",  # before weights, which differ with them
    "adapters": "other adapters",
    "config": "another config",
    "tokenizer": "another tokenizer",
    "weights": "other weights",
}
"""The parts of an identity, the most telling first, as a reason calls them when they differ."""


class Catalog:
    """The rows of a store, in memory and in its index. Safe to use from several threads."""

    def __init__(
        self,
        directory: Directory,
        files: EntryFiles,
        *,
        on_damage: Callable[[str], None],
        on_trouble: Callable[[OSError], str],
    ) -> None:
        self._files = files
        self._readonly = directory.readonly
        self._index = Index(directory, files)
        self._on_damage = on_damage
        self._on_trouble = on_trouble
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Begin with nothing known, as a forked child must: another thread may have been changing it."""
        self._mutex = threading.RLock()
        self._prefixes = PrefixIndex()
        self._ids: dict[str, bytes] = {}
        self._bad: dict[str, tuple[FileIdentity | None, str]] = {}
        self._loaded = False

    # --- rows ---

    def rows(self) -> list[Row]:
        """The row of every entry."""
        with self._mutex:
            self._refresh()
            return self._prefixes.rows()

    def row(self, key: str) -> Row | None:
        """The row of one entry, as far as it is known."""
        with self._mutex:
            self._refresh()
            return self._prefixes.get(key)

    def lineage(self, key: str) -> list[Row]:
        """The row of an entry, and behind it those of what it continues; none if one of them is gone."""
        with self._mutex:
            self._refresh()
            row = self._prefixes.get(key)
            return [] if row is None else self._prefixes.lineage(row)

    def is_current(self, lineage: Sequence[Row]) -> bool:
        """Whether an entry and what it continues are still as these rows say, and none of them was found bad."""
        with self._mutex:
            return self.lineage(lineage[0].key) == [*lineage] and self._why_bad(lineage) is None

    def add(self, row: Row) -> None:
        """Add the row of an entry whose file was just published."""
        with self._mutex:
            self._index.add(row)
            self._prefixes.add(row)

    def exchange(self, row: Row | None, choose: Choose) -> list[Row]:
        """Add a row, if there is one, and drop those that ``choose(all rows)`` names, while nobody else can write.

        Returns the dropped ones, whose files are the caller's to remove.
        """
        with self._mutex:
            dropped = self._index.exchange(row, choose)
            if row is not None:
                self._prefixes.add(row)
            self._drop(dropped)
        return dropped

    def mend(self, ripe: Callable[[str], bool]) -> tuple[list[str], list[Row]]:
        """Make rows and files agree: ``ripe(key)`` says of a file without a row whether nobody is adding that any more.

        Returns the keys that got a row, and the rows that were dropped because their file is gone. Damaged files
        without a row are set aside.
        """
        with self._mutex:
            added = self._index.adopt(ripe)
            on_disk = set(self._files.keys())
            gone = self.exchange(
                None, lambda rows: [key for key in rows.keys() - on_disk if not self._files.is_there(key)]
            )
            damaged = self._index.damaged.keys() & on_disk
        for key in sorted(damaged):
            try:
                with self._files.open(key):
                    pass
            except OSError:
                continue
            except EntryDamagedError as error:
                self.damaged(key, error)
        return added, gone

    def _drop(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._prefixes.discard(row.key)
            self._ids.pop(row.key, None)

    def hold(self, row: Row) -> None:
        """Find an entry here whose row is not to be written yet."""
        with self._mutex:
            self._index.hold(row)
            self._prefixes.add(row)

    def found(self, row: Row) -> Row | None:
        """Add the row of an entry that was found on disk without one; ``None`` if its file has gone meanwhile."""
        with self._mutex:
            self._index.found(row)
            self._refresh()
            return self._prefixes.get(row.key)

    def forget(self, key: str) -> None:
        """Drop the row of an entry whose file is gone or about to go."""
        with self._mutex:
            self._prefixes.discard(key)
            self._ids.pop(key, None)
            if not self._readonly:
                self._index.discard(key)

    def lost(self, key: str) -> None:
        """Drop the row of an entry whose file was not there, unless it is again: who evicts may put it back."""
        if self._readonly:
            if not self._files.is_there(key):
                self.forget(key)
            return
        with self._mutex:
            self.exchange(None, lambda rows: [key] if key in rows and not self._files.is_there(key) else [])
            if not self._files.is_there(key):
                self._prefixes.discard(key)

    def removed(self, key: str) -> None:
        """After an entry's file was removed: drop the row that somebody may just have made of it."""
        if self.row(key) is not None:
            self.lost(key)

    def renew(self) -> None:
        """Make the index anew, so that no file of it holds rows that were removed.

        Raises:
            StoreWriteError: that cannot be done now, and they may still be there.
        """
        with self._mutex:
            self._index.erase()
            self._refresh()

    def damaged(self, key: str, error: EntryDamagedError, file: FileIdentity | None = None) -> None:
        """Drop a damaged entry and set its file aside; with ``file``, only if that very file still lies there."""
        if isinstance(error, EntryUntrustedError):  # others may trust it, so its row and its file stay
            with suppress(OSError):
                file = file or self._files.identity(key)
            with self._mutex:
                self._bad[key] = file, f"untrusted: {error.reason}"
            log.warning("kvkeep: entry %s is passed over: %s", key, error.reason)
            return
        if self._readonly and not isinstance(error, EntryUnknownError):
            with self._mutex:
                self._bad[key] = file, "damaged: the entry was found wrong, and this process passes it over"
            log.warning("kvkeep: entry %s is not as it should be (%s); this process passes it over", key, error.reason)
            return
        self.forget(key)
        if isinstance(error, EntryUnknownError):
            log.warning("kvkeep: entry %s is left alone: %s", key, error.reason)
            return
        log.warning("kvkeep: entry %s is damaged (%s); it is set aside and will be computed again", key, error.reason)
        self._files.quarantine(key, error.reason, identity=file)
        self._on_damage(key)

    def _why_bad(self, lineage: Sequence[Row]) -> str | None:
        """Why an entry cannot be used that was found bad, but not set aside, or continues such a one; else ``None``."""
        for key in (row.key for row in lineage if row.key in self._bad):
            file, why = self._bad[key]
            with suppress(OSError):
                if file in (None, self._files.identity(key)):
                    return why
            del self._bad[key]
        return None

    def _refresh(self) -> None:
        if self._loaded and not self._index.changed():
            return
        rows = self._index.rows()
        self._prefixes.sync(rows)
        for key in self._ids.keys() - {row.key for row in rows}:
            del self._ids[key]
        self._loaded = True

    # --- search ---

    def search(
        self,
        identity: Identity,
        namespace: bytes,
        prefix: Prefix,
        limit: int,
        *,
        obstacle: Obstacle | None = None,
        form: str = "exact",
        above: int = 0,
    ) -> tuple[int, Row | None, str | None]:
        """The most leading tokens of a prompt that one entry has and can be trimmed to, at most ``limit``.

        Args:
            identity: what the entry must have been computed with.
            namespace: the namespace's digest.
            prefix: the prompt.
            limit: how many tokens it can use at most.
            obstacle: says why so many tokens of an entry cannot be used all the same, or ``None`` if they can.
            form: how the entry must be stored.
            above: how many tokens are there already: an entry that gives no more is none.

        Returns:
            The tokens, the entry's row, and why it is not more; (0, None, reason) on a miss.
        """
        if limit < 1:
            return 0, None, "short: a prompt of one token has nothing to reuse"
        chain = prefix.chain(namespace)
        tokens, best, trouble = above, None, None
        with self._mutex:
            self._refresh()
            for shared, rows in self._prefixes.candidates(identity, namespace.hex(), prefix, chain, form=form):
                for row in rows:
                    if min(shared + BLOCK - 1, limit, row.end) <= tokens and (tokens or trouble):
                        continue  # it cannot give more
                    lineage = self._prefixes.lineage(row)
                    if not lineage:
                        continue
                    possible, _, _ = best_of(lineage, shared + BLOCK - 1, limit)
                    if possible <= tokens and (possible or trouble):
                        continue  # its ids need no reading
                    fits, link, why = self._fit(lineage, prefix, limit, obstacle)
                    trouble = trouble or why
                    if fits > tokens:
                        tokens, best = fits, link
                if tokens >= shared:  # rows that share fewer blocks cannot share more tokens than this
                    break
            if best is None and above:
                return 0, None, None
            if best is None:
                return 0, None, trouble or self._explain_miss(identity, namespace, prefix, chain)
        return tokens, best, why_no_more(best, prefix, tokens, min(best.end, limit))

    def _fit(
        self, lineage: Sequence[Row], prefix: Prefix, limit: int, obstacle: Obstacle | None
    ) -> tuple[int, Row, str | None]:
        """How many leading tokens a prompt can use of an entry or what it continues, of which; and if none, why."""
        row = lineage[0]
        if (bad := self._why_bad(lineage)) is not None:
            return 0, row, bad
        try:
            shared = self._common(lineage, prefix)
        except OSError as error:
            return 0, row, self._on_trouble(error)
        common, other = shared_with_media(row.media, prefix.media, min(shared, limit))
        fits, link, why = best_of(lineage, common, limit)
        if fits and obstacle is not None:
            why = obstacle(link, fits)
        if fits and why is None:
            return fits, link, None
        why = why or self._why_bad(lineage)
        return 0, row, why or (None if other is None else _other_media(other))

    def stranger(self, identity: Identity, namespace: bytes, prefix: Prefix) -> Row | None:
        """The entry that shares the most tokens with a prompt, of those computed with something else."""
        with self._mutex:
            self._refresh()
            return next(iter(self._prefixes.strangers(identity, prefix, prefix.chain(namespace))), None)

    def nearby(self, identity: Identity, namespace: bytes, prefix: Prefix, count: int) -> tuple[list[Row], list[Row]]:
        """The entries that may share the most tokens with a prompt: ``count`` that serve it, and others that do not.

        Those others share a block, or are wholly a prefix of it, and were computed with something else or stored in
        another namespace.
        """
        with self._mutex:
            self._refresh()
            chain, own = prefix.chain(namespace), namespace.hex()
            found = self._prefixes.candidates(identity, own, prefix, chain, near=count)
            rows = list(islice((row for _, some in found for row in some), count))
            others = self._prefixes.strangers(identity, prefix, chain)
            anybody = replace(identity, model="")  # those of this identity are strangers, too, in another namespace
            for other in islice(sorted({row.namespace for row in self._prefixes.rows()} - {own}), count):
                others += self._prefixes.strangers(anybody, prefix, prefix.chain(bytes.fromhex(other)))
            return rows, others

    def _common(self, lineage: Sequence[Row], prefix: Prefix) -> int:
        """How many leading ids an entry shares with the prompt; 0 if it is gone or damaged. ``OSError`` as the disk."""
        common, wanted = 0, prefix.ids.int32
        stops = [*(row.start for row in lineage[-2::-1]), lineage[0].end]
        for row, stop in zip(reversed(lineage), stops, strict=True):
            ids = self._ids_of(row)
            if ids is None:
                return 0
            common += common_prefix(ids[: 4 * (stop - row.start)], wanted[4 * row.start :])
            if common < stop:
                break
        return common

    def _ids_of(self, row: Row) -> bytes | None:
        """The ids that an entry's own file holds, int32; ``None`` if it is gone or damaged. ``OSError`` as the disk."""
        stored = self._ids.get(row.key)
        if stored is None or len(stored) != 4 * (row.end - row.start):  # stored anew, with another stretch
            try:
                with self._files.open(row.key) as file:
                    stored = file.read_ids().int32
            except FileNotFoundError:
                self.lost(row.key)
                return None
            except EntryDamagedError as error:
                self.damaged(row.key, error)
                return None
            if len(self._ids) >= _IDS_KEPT:
                self._ids.clear()
            self._ids[row.key] = stored
        return stored

    def _explain_miss(self, identity: Identity, namespace: bytes, prefix: Prefix, chain: list[bytes]) -> str:
        if not len(self._prefixes):
            return "empty: nothing is stored"
        for row in self._prefixes.strangers(identity, prefix, chain):
            parts = [part for part in _PARTS if getattr(row.identity, part) != getattr(identity, part)]
            if parts:
                others = ", ".join(_PARTS[part] for part in parts)
                return f"{parts[0]}: this prefix is stored, but for {others}"
        if prefix.before and self._prefixes.has_other_start(identity, namespace.hex(), prefix.before):
            return "encoder: nothing is stored for this encoder input, only for others"
        if not self._prefixes.has_namespace(namespace.hex()):
            return "namespace: nothing is stored in this namespace"
        return "prefix: no stored prefix starts like this prompt"


def why_no_more(row: Row, prefix: Prefix, tokens: int, hoped: int) -> str | None:
    """Why a prompt can use fewer tokens of an entry than both have, or ``None`` if it uses them all."""
    if tokens == hoped:
        return None
    _, other = shared_with_media(row.media, prefix.media, hoped)
    if other is not None and other.start <= tokens:
        return _other_media(other)
    return f"diverged: the stored prefix goes on otherwise at token {tokens}"


def _other_media(one: Media) -> str:
    return f"media: what is stored has something else at token {one.start} than this {one.kind}"
