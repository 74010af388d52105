"""The digests of one unit of an entry, taken in one pass over its bytes."""

from __future__ import annotations

from hashlib import blake2b

import xxhash

from kvkeep.signing import STRONG_SIZE

Pair = tuple[bytes, bytes]
"""The digest that finds accidents, and the one that withstands intent: empty where nobody signs."""


class UnitDigest:
    """Both digests of a unit, or with ``strong=False`` the one that finds accidents."""

    __slots__ = ("_fast", "_strong")

    def __init__(self, *, strong: bool) -> None:
        self._fast = xxhash.xxh3_128()
        self._strong = blake2b(digest_size=STRONG_SIZE) if strong else None

    def update(self, data: memoryview) -> None:
        """Go on with these bytes."""
        self._fast.update(data)
        if self._strong is not None:
            self._strong.update(data)

    def digests(self) -> Pair:
        """The digests of all bytes so far."""
        return self._fast.digest(), b"" if self._strong is None else self._strong.digest()
