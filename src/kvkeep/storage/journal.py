"""What was used and how often: counters of this process, appended to a file of its own now and then.

It serves ``kvkeep stats`` and eviction, and promises little: the last seconds before a kill are lost, a read-only store
keeps none, and trouble with the file is never an error.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvkeep.entry_format import canonical_json
from kvkeep.records import GenerateReport
from kvkeep.storage.fs import Directory

_LINE_LIMIT = 16 << 20
_KEY = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Use:
    """How often one entry was hit, and when last (Unix time in seconds)."""

    hits: int
    last: int


_NEVER = Use(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all processes, as far as they have flushed. Times are in seconds.

    Attributes:
        hits: hand-overs that reused at least one token.
        misses: hand-overs that reused none, by the code of the reason.
        reused_tokens: tokens that were not fed because of hits.
        load_seconds: time spent on hits.
        prefills: forward passes that computed a prefix's cache.
        prefilled_tokens: tokens that these were fed.
        prefill_seconds: time spent on these.
        stored: entries written.
        stored_bytes: bytes of these.
        store_seconds: time spent on writing them.
        damaged: entries found damaged.
        uses: hits by entry key.
    """

    hits: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    reused_tokens: int = 0
    load_seconds: float = 0.0
    prefills: int = 0
    prefilled_tokens: int = 0
    prefill_seconds: float = 0.0
    stored: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    damaged: int = 0
    uses: Mapping[str, Use] = field(default_factory=dict)


class Journal:
    """The counters of one store in this process. Safe to use from several threads, and after a fork."""

    def __init__(self, directory: Directory, *, interval: float = 5.0) -> None:
        self._directory = directory
        self._writer = None if directory.readonly else _Writer(directory, interval)
        self._seen = _Batch()
        self._read_to: dict[str, int] = {}
        if self._writer is not None:
            weakref.finalize(self, self._writer.flush)  # also at exit, while the directory is still open

    def generated(self, report: GenerateReport) -> None:
        """Count a hand-over: a hit of its entry, or a miss for its reason."""
        if report.reused_tokens:
            self.hit(report.key, report.reused_tokens, report.load_seconds)
        else:
            self.miss(report.reason)

    def hit(self, key: str | None, tokens: int, seconds: float) -> None:
        """Count tokens that were reused from an entry, and the time that finding and reading them took."""
        uses = {} if key is None else {key: Use(1, int(time.time()))}
        self._count(uses=uses, hits=1, reused_tokens=tokens, load_us=round(seconds * 1e6))

    def miss(self, reason: str | None) -> None:
        """Count a lookup that gave nothing. Only the code of the reason is kept: the detail may tell of a prompt."""
        self._count(misses={(reason or "unknown").partition(":")[0]: 1})

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Count a forward pass that computed a prefix's cache."""
        self._count(prefills=1, prefilled_tokens=tokens, prefill_us=round(seconds * 1e6))

    def stored(self, nbytes: int, seconds: float) -> None:
        """Count an entry that was written."""
        self._count(stored=1, stored_bytes=nbytes, store_us=round(seconds * 1e6))

    def damaged(self, key: str) -> None:
        """Count an entry that was found damaged."""
        self._count(damaged=1)

    def _count(
        self, *, misses: Mapping[str, int] | None = None, uses: Mapping[str, Use] | None = None, **numbers: int
    ) -> None:
        if self._writer is not None:
            self._writer.count(misses or {}, uses or {}, numbers)

    def flush(self) -> None:
        """Append what was counted since the last flush. What cannot be written is dropped."""
        if self._writer is not None:
            self._writer.flush()

    def uses(self) -> Mapping[str, Use]:
        """Hits by entry key, those of this process to the last one. Reads only what files have gained since last time.

        Not for several threads at once.
        """
        names: list[str] = []
        with suppress(OSError):
            names = self._directory.names("journal")
        for name in names:
            if name.endswith(".jsonl"):
                with suppress(OSError):
                    begin = self._read_to.get(name, 0)
                    if self._directory.stat("journal", name).st_size > begin:
                        for line in _lines(self._directory.open_read("journal", name), begin):
                            if line.endswith(b"\n"):
                                self._seen.add_line(line)
                                self._read_to[name] = begin = begin + len(line)
        uses = dict(self._seen.uses)
        for key, use in ({} if self._writer is None else self._writer.unwritten()).items():
            before = uses.get(key, _NEVER)
            uses[key] = Use(before.hits + use.hits, max(before.last, use.last))
        return uses

    def forget(self, keys: Collection[str]) -> None:
        """Blot out the keys of these entries in this process and in all files; sums of what happened stay.

        Lines keep their length, so that others go on reading where they were.
        """
        for key in keys:
            self._seen.uses.pop(key, None)
        if self._writer is None:
            return
        self._writer.forget(keys)
        self.flush()
        wanted = {key.encode() for key in keys}
        for name in self._directory.names("journal"):
            with suppress(OSError):
                lines = list(_lines(self._directory.open_read("journal", name)))
                blotted = [_without(line, wanted) for line in lines]
                if blotted != lines:
                    self._directory.write_atomic("journal", name, data=b"".join(blotted))

    def totals(self) -> Totals:
        """The sums over this process and the files of all others. Lines that make no sense are passed over."""
        self.flush()
        sums = _Batch()
        for name in self._directory.names("journal"):
            if name.endswith(".jsonl"):
                with suppress(OSError):
                    for line in _lines(self._directory.open_read("journal", name)):
                        sums.add_line(line)
        return sums.totals()


class _Writer:
    """Counts, and the file that they go to."""

    def __init__(self, directory: Directory, interval: float) -> None:
        self._directory = directory
        self._interval = interval
        self.start()
        _writers.add(self)

    def start(self) -> None:
        self._lock = threading.Lock()
        self._name = f"{os.getpid()}-{os.urandom(8).hex()}.jsonl"
        self._batch = _Batch()
        self._flushed = time.monotonic()

    def count(self, misses: Mapping[str, int], uses: Mapping[str, Use], numbers: Mapping[str, int]) -> None:
        with self._lock:
            self._batch.add(misses, uses, numbers)
        if time.monotonic() - self._flushed >= self._interval:
            self.flush()

    def unwritten(self) -> dict[str, Use]:
        with self._lock:
            return dict(self._batch.uses)

    def forget(self, keys: Collection[str]) -> None:
        with self._lock:
            for key in keys:
                self._batch.uses.pop(key, None)

    def flush(self) -> None:
        with self._lock:
            batch, self._batch = self._batch, _Batch()
            self._flushed = time.monotonic()
        if batch.numbers or batch.misses:
            with suppress(OSError):  # the store's own errors are OSErrors
                self._directory.append("journal", self._name, data=batch.to_line())


class _Batch:
    """Sums of events; a line of a journal file holds one. Times are whole microseconds: JSON of ours has no floats."""

    NUMBERS = (
        "hits",
        "reused_tokens",
        "load_us",
        "prefills",
        "prefilled_tokens",
        "prefill_us",
        "stored",
        "stored_bytes",
        "store_us",
        "damaged",
    )

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.uses: dict[str, Use] = {}

    def add(self, misses: Mapping[str, int], uses: Mapping[str, Use], numbers: Mapping[str, int]) -> None:
        self.numbers.update(numbers)
        self.misses.update(misses)
        for key, use in uses.items():
            before = self.uses.get(key, _NEVER)
            self.uses[key] = Use(before.hits + use.hits, max(before.last, use.last))

    def to_line(self) -> bytes:
        uses = {key: [use.hits, use.last] for key, use in self.uses.items()}
        return (canonical_json({**self.numbers, "misses": self.misses, "uses": uses}) + "\n").encode()

    def add_line(self, line: bytes) -> None:
        """Add what a line holds, if all of it makes sense."""
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            source = json.loads(line)
            self.add(
                {code: _natural(count) for code, count in source["misses"].items()},
                {key: Use(_natural(hits), _natural(last)) for key, (hits, last) in source["uses"].items()},
                {name: _natural(source[name]) for name in self.NUMBERS if name in source},
            )

    def totals(self) -> Totals:
        numbers = self.numbers
        return Totals(
            hits=numbers["hits"],
            misses=dict(self.misses),
            reused_tokens=numbers["reused_tokens"],
            load_seconds=numbers["load_us"] / 1e6,
            prefills=numbers["prefills"],
            prefilled_tokens=numbers["prefilled_tokens"],
            prefill_seconds=numbers["prefill_us"] / 1e6,
            stored=numbers["stored"],
            stored_bytes=numbers["stored_bytes"],
            store_seconds=numbers["store_us"] / 1e6,
            damaged=numbers["damaged"],
            uses=dict(self.uses),
        )


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("not a natural number")
    return value


def _without(line: bytes, keys: Collection[bytes]) -> bytes:
    """A line without the uses of some entries, of the same length; blank if it makes no sense."""
    if not any(key in keys for key in _KEY.findall(line)):
        return line
    content, end = line.removesuffix(b"\n"), b"\n" if line.endswith(b"\n") else b""
    try:
        source = json.loads(content)
        source["uses"] = {key: use for key, use in source["uses"].items() if key.encode() not in keys}
        left = canonical_json(source).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        left = b""
    if len(left) > len(content) or any(key in keys for key in _KEY.findall(left)):
        left = b""
    return left.ljust(len(content)) + end


def _lines(fd: int, begin: int = 0) -> Iterator[bytes]:
    with open(fd, "rb") as file:
        file.seek(begin)
        while line := file.readline(_LINE_LIMIT):
            yield line


_writers: weakref.WeakSet[_Writer] = weakref.WeakSet()


def _start_anew() -> None:
    """In a forked child: the counts so far are the parent's to write."""
    for writer in list(_writers):
        writer.start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
