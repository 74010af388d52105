"""Keys that entries are signed with: which one signs, which ones count, and the digests that are made with them.

A key is 32 to 64 secret bytes. Its id is a digest of it, so that keys need no names and no two share one. Nothing here
ever shows a secret: not in a ``repr``, not in a message.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvkeep.errors import InvalidRequestError

KeySource = bytes | str | os.PathLike[str]
"""A key itself, as bytes, or the path of a file that holds keys."""

STRONG_SIZE = 32
"""Bytes of a cryptographic digest, and of a signature."""

_SIZES = range(32, 65)
_HEX = re.compile(r"[0-9a-fA-F]{64,128}")
_MAX_FILE = 1 << 16


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One key."""

    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> SigningKey:
        """The key with these secret bytes; ``InvalidRequestError`` if they are too few or too many."""
        if len(secret) not in _SIZES:
            raise InvalidRequestError(
                f"a key has 32 to 64 bytes, not {len(secret)}; `openssl rand -hex 32` makes one for a key file"
            )
        return cls(blake2b(b"kvkeep/key-id/1", digest_size=8, key=secret).hexdigest(), secret)

    def sign(self, *parts: bytes) -> str:
        """The keyed digest of bytes, 64 hex digits."""
        state = blake2b(digest_size=STRONG_SIZE, key=self.secret)
        for part in parts:
            state.update(part)
        return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Keyring:
    """The keys of a store: the first signs what is stored, and what any of them has signed counts."""

    keys: tuple[SigningKey, ...]

    @property
    def signer(self) -> SigningKey:
        """The key that signs."""
        return self.keys[0]

    def get(self, key_id: str) -> SigningKey | None:
        """The key with this id."""
        return next((key for key in self.keys if key.id == key_id), None)


def same(one: str, other: str) -> bool:
    """Whether two signatures are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(one.encode(), other.encode())


def keyring(key: KeySource | None, others: Iterable[KeySource] = ()) -> Keyring | None:
    """The keys of a store, or ``None`` if it has none.

    Args:
        key: the key that signs; or a file, whose first key does. ``None`` means the file that ``$KVKEEP_KEY_FILE``
            names, if it is set.
        others: keys or files of keys that only count.

    Raises:
        InvalidRequestError: if a file cannot be read or holds something else than keys, a key has a wrong length, or
            there are others and none that signs.
    """
    others = list(others)
    if key is None:
        key = os.environ.get("KVKEEP_KEY_FILE") or None
    if key is None:
        if others:
            raise InvalidRequestError("keys= only counts beside key=, which signs what is stored")
        return None
    found = [one for source in (key, *others) for one in _keys_of(source)]
    return Keyring(tuple({one.id: one for one in found}.values()))


def _keys_of(source: KeySource) -> list[SigningKey]:
    if isinstance(source, bytes):
        return [SigningKey.of(source)]
    if not isinstance(source, str | os.PathLike):
        raise InvalidRequestError(f"a key is bytes, or the path of a file of keys, not a {type(source).__name__}")
    try:
        with Path(source).open("rb") as file:
            text = file.read(_MAX_FILE).decode("ascii")
    except (OSError, ValueError) as error:
        # Never the path: somebody may have given the key in its place.
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidRequestError(f"the key file cannot be read: {why}; keys themselves are given as bytes") from None
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines or not all(_HEX.fullmatch(line) and len(line) % 2 == 0 for line in lines):
        raise InvalidRequestError("a key file holds keys, one a line, of 64 to 128 hex digits; the first one signs")
    return [SigningKey.of(bytes.fromhex(line)) for line in lines]
