"""Entries brought from a tier into a store's own directory: all links of a chain that are missing, or none.

Every link is written to a temporary file and checked to the last byte before the first one gets its name, so that
nobody ever finds what was not checked. Names are given from token 0 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from kvkeep.entry_format import Header, decode_header, header_length
from kvkeep.errors import EntryDamagedError, EntryNotFoundError
from kvkeep.marks import entry_name
from kvkeep.records import Identity
from kvkeep.storage.entries import EntryFile, EntryFiles
from kvkeep.storage.entry_chain import MAX_LINKS, EntryChain, Place
from kvkeep.storage.entry_data import extents
from kvkeep.storage.fileio import Temporary
from kvkeep.storage.rows import Row
from kvkeep.tiers import Buffer, Stat, Tier

PART = 8 << 20
"""Bytes that are asked for at once."""

AT_ONCE = 4
"""How many parts of an entry are asked for at once."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an entry must have been stored for."""

    identity: Identity
    namespace: str
    form: str

    def check(self, header: Header, key: str) -> None:
        """Raise EntryDamagedError if it was not."""
        found = header.meta.key
        if found.hash != key:
            raise EntryDamagedError("it is the entry of another key")
        if (found.identity, found.namespace, found.form) != (self.identity, self.namespace, self.form) or found.tp:
            raise EntryDamagedError("it was stored for something else than its mark says")


@dataclass(frozen=True, slots=True)
class _Link:
    file: EntryFile
    arrived: Temporary | None


class Downloads:
    """Brings entries from one tier into one store.

    Args:
        tier: where from.
        files: where to.
        admit: called with a header before its entry is fetched; raises if it must not be stored.
        add: adds the row of a published entry.
        learn: takes note of an entry that is here, perhaps before its row.
        remove: takes back an entry whose parent is gone.
    """

    def __init__(
        self,
        tier: Tier,
        files: EntryFiles,
        *,
        admit: Callable[[Header], None],
        add: Callable[[Row], None],
        learn: Callable[[Row], None],
        remove: Callable[[str], object],
    ) -> None:
        self._tier = tier
        self._files = files
        self._admit = admit
        self._add = add
        self._learn = learn
        self._remove = remove

    def bring(self, key: str, wanted: Wanted) -> int:
        """Fetch an entry, with those that it continues as far as they are not here; the bytes that were fetched.

        Raises:
            EntryNotFoundError: one of them is not there.
            EntryDamagedError: one of them is not what it should be, or is here as another one.
            TierError: the tier failed.
            StoreError: they cannot be stored.
        """
        with ExitStack() as opened:
            links: list[_Link] = []
            following: str | None = key
            while following is not None:
                if len(links) == MAX_LINKS:
                    raise EntryDamagedError(f"it continues more than {MAX_LINKS - 1} others")
                link = self._here(opened, following) or self._fetch(opened, following, wanted)
                links.insert(0, link)
                following = link.file.header.meta.parent
            self._check(links)
            for link in links:
                if link.arrived is None or not self._publish(link.arrived, link.file):
                    self._learn(_row(link.file))
            return sum(link.file.header.size for link in links if link.arrived is not None)

    def _here(self, opened: ExitStack, key: str) -> _Link | None:
        try:
            return _Link(opened.enter_context(self._files.open(key)), None)
        except (FileNotFoundError, EntryDamagedError):  # a damaged one makes way when another gets its name
            return None

    def _fetch(self, opened: ExitStack, key: str, wanted: Wanted) -> _Link:
        arrived = opened.enter_context(self._files.arriving())
        self._download(key, wanted, arrived)
        return _Link(opened.enter_context(self._files.examine(arrived, key)), arrived)

    def _check(self, links: Sequence[_Link]) -> None:
        """Every byte of what has arrived, and that all of it belongs together."""
        for number, link in enumerate(links):
            files = [one.file for one in links[: number + 1]]
            if link.arrived is not None:
                (EntryChain(files, Place(link.file.key)) if number else link.file).verify_all()

    def _publish(self, arrived: Temporary, file: EntryFile) -> bool:
        """Make an entry that has arrived be here; ``False`` if another process has just done it."""
        key, parent = file.key, file.header.meta.parent
        if not self._files.publish(arrived, key):
            with self._files.open(key) as first:
                if first.header.meta.digests != file.header.meta.digests:
                    raise EntryDamagedError("another entry of its key was stored here meanwhile")
            return False
        self._add(_row(file))
        if parent is not None and not self._files.is_there(parent):  # asked when the row is there, as in a put
            self._remove(key)
            raise EntryNotFoundError(f"the entry {parent} that it continues was removed here meanwhile")
        return True

    # --- bytes ---

    def _download(self, key: str, wanted: Wanted, target: Temporary) -> None:
        name = entry_name(key)
        first = self._tier.get(name, 0, PART, bulk=True)
        if first is None:
            raise EntryNotFoundError(f"{name} is not there")
        size, at = first.stat.size, 0
        for head, header in _with_header(first.chunks, size):
            if header is not None:
                wanted.check(header, key)
                self._admit(header)
                target.allocate(size, extents(header))
            at = _write(target, at, head, size)
        rest = range(at, size, PART) if self._tier.capabilities.ranges else range(0)
        if len(rest) > 1:
            with ThreadPoolExecutor(min(AT_ONCE, len(rest))) as pool:
                parts = [pool.submit(self._part, name, begin, first.stat, target) for begin in rest]
                try:
                    for part in parts:
                        part.result()
                finally:
                    for part in parts:
                        part.cancel()
        elif rest:
            self._part(name, at, first.stat, target)
        elif at != size:
            raise EntryDamagedError(f"it ends after {at} of its {size} bytes")

    def _part(self, name: str, begin: int, stat: Stat, target: Temporary) -> None:
        end = min(begin + PART, stat.size)
        part = self._tier.get(name, begin, end, version=stat.version, bulk=True)
        if part is None or part.begin != begin or part.stat.size != stat.size:
            raise EntryDamagedError("it was replaced while it was fetched")
        at = begin
        for chunk in part.chunks:
            at = _write(target, at, chunk, end)
        if at != end:
            raise EntryDamagedError(f"it ends after {at} of its {stat.size} bytes")


def _row(file: EntryFile) -> Row:
    return Row.from_header(file.header, b"".join(file.read_chain()))


def _with_header(chunks: Iterable[Buffer], size: int) -> Iterator[tuple[Buffer, Header | None]]:
    """The chunks, the first of them with all of the header, and that header."""
    head, header = bytearray(), None
    for chunk in chunks:
        if header is not None:
            yield chunk, None
            continue
        head += chunk
        length = 8 + (header_length(bytes(head[:8]), size) if len(head) >= 8 else size)
        if len(head) >= length:
            header = decode_header(bytes(head[8:length]), size)
            yield head, header
    if header is None:
        raise EntryDamagedError("it ends within its header")


def _write(target: Temporary, at: int, chunk: Buffer, end: int) -> int:
    if at + len(chunk) > end:
        raise EntryDamagedError("it is longer than was said")
    target.write(at, chunk)
    return at + len(chunk)
