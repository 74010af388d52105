"""What a tier is: a place that keeps named, immutable objects, and the least that kvkeep asks of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvkeep.errors import InvalidRequestError

Buffer = bytes | bytearray | memoryview

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}){0,7}")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier can do beyond what all can.

    Attributes:
        ranges: reads a part of an object without the rest. Without it, :meth:`Tier.get` gives the whole object.
        exclusive: of two who put one name at once, exactly one is told that it is stored. Without it both may be, and
            the object is the whole of one of them; readers that hold on to a version get that one or nothing.
    """

    ranges: bool
    exclusive: bool


@dataclass(frozen=True, slots=True)
class Stat:
    """What is known of an object: its bytes, and a word that another content of the same name does not share."""

    size: int
    version: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an object.

    Attributes:
        begin: the first byte's place in the object; 0 where the tier has no ranges.
        stat: what is known of the object.
        chunks: the bytes, in order, as they come. Iterating raises :class:`~kvkeep.errors.TierError`.
    """

    begin: int
    stat: Stat
    chunks: Iterable[Buffer]

    def read(self) -> bytes:
        """All bytes at once."""
        return b"".join(self.chunks)


class Tier(Protocol):
    """Named objects, each whole or absent. Safe to use from several threads.

    A name is made of plain components with ``/`` between them; :func:`check_name` says which. Every method raises
    :class:`~kvkeep.errors.TierError` when the tier does not answer, or answers with an error; that something is not
    there is none.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, as far as it is known by now."""

    def get(
        self, name: str, begin: int = 0, end: int | None = None, *, version: str | None = None, bulk: bool = False
    ) -> Part | None:
        """The bytes [begin, end) of an object, fewer where it ends before; ``None`` if it is not there.

        Args:
            name: the object.
            begin: the first byte, which must be in it.
            end: the byte after the last; ``None`` is the end.
            version: only this one, as :class:`Stat` calls it. If it is another by now, it is not there.
            bulk: whether it may take long; else it must answer as soon as a lookup can wait for it.
        """

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        """Store an object, which nobody sees before it is whole; ``False`` if there is one of its name, which stays."""

    def stat(self, name: str) -> Stat | None:
        """What is known of an object; ``None`` if it is not there."""

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""

    def list(self, prefix: str) -> Iterator[str]:
        """The names below ``prefix``, which is the first components of a name, in any order."""


def check_name(name: str) -> str:
    """The name, if it is one that an object may have; raises ``InvalidRequestError``."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{name!r} is not a name that an object may have")
    return name


def check_range(begin: int, end: int | None) -> None:
    """Raise ``InvalidRequestError`` for what is no stretch of bytes."""
    if begin < 0 or (end is not None and end <= begin):
        raise InvalidRequestError(f"[{begin}, {end}) is not a stretch of bytes")
