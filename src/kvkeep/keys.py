"""Canonical token ids, and the hashes that name what is stored.

Everything here is a pure function of bytes: the same digest for lists, arrays and tensors, in every process, on every
machine. The hash is xxh3-128, which is fast and not cryptographic; that is why an entry carries its ids and every hit
compares them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

import xxhash

from kvkeep.errors import InvalidPromptError

BLOCK = 256
"""Tokens a block: the step of the chained prefix hash and of the digests inside an entry."""

DIGEST_SIZE = 16
"""Bytes of an xxh3-128 digest."""

_BLOCK_BYTES = 8 * BLOCK


class TokenIds:
    """The canonical ids of one sequence: int64 little-endian, each in [0, 2**31).

    ``int64`` is what is hashed, ``int32`` what is stored and compared. Both are plain bytes.

    >>> ids = TokenIds.of([1, 2, 3])
    >>> len(ids), ids[:2].tolist()
    (3, [1, 2])
    """

    __slots__ = ("int32", "int64")

    def __init__(self, int64: bytes) -> None:
        if len(int64) % 8:
            raise InvalidPromptError("token ids must be whole 64-bit integers")
        words = array("I", int64)  # on either byte order: pairs of 32-bit halves, the low one first
        low, high = words[0::2].tobytes(), words[1::2].tobytes()
        if high != bytes(len(high)) or not low[3::4].isascii():
            raise InvalidPromptError("token ids must lie in [0, 2**31)")
        self.int64 = int64
        self.int32 = low

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """Take the ids of any iterable of integers."""
        try:
            values = array("q", list(ids) if isinstance(ids, bytes | bytearray) else ids)  # not their raw content
        except (TypeError, OverflowError) as error:
            raise InvalidPromptError(f"a prompt's token ids must be integers in [0, 2**31): {error}") from None
        if sys.byteorder == "big":
            values.byteswap()
        return cls(values.tobytes())

    @classmethod
    def from_int32(cls, data: bytes) -> TokenIds:
        """Read back the bytes that an entry stores."""
        if len(data) % 4:
            raise InvalidPromptError("stored token ids must be whole 32-bit integers")
        words = array("I", bytes(2 * len(data)))  # on either byte order: each id, then a high half of zeros
        words[0::2] = array("I", data)
        return cls(words.tobytes())

    def __len__(self) -> int:
        return len(self.int64) // 8

    def __getitem__(self, item: slice) -> TokenIds:
        start, stop, step = item.indices(len(self))
        if step != 1:
            raise ValueError("a stretch of token ids has step 1")
        return TokenIds(self.int64[8 * start : 8 * stop])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self.int64 == other.int64

    def __hash__(self) -> int:
        return hash(self.int64)

    def __repr__(self) -> str:
        return f"TokenIds({len(self)} tokens)"  # never the ids: they are the prompt

    def tolist(self) -> list[int]:
        """The ids as Python integers."""
        return int32_values(self.int32).tolist()


def int32_values(data: bytes) -> array[int]:
    """The numbers in little-endian int32 bytes."""
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def common_prefix(a: bytes, b: bytes, width: int = 4) -> int:
    """How many leading items of ``width`` bytes two byte strings share.

    >>> common_prefix(TokenIds.of([1, 2, 3]).int32, TokenIds.of([1, 2, 9, 9]).int32)
    2
    """
    low, high = 0, min(len(a), len(b)) // width
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * width : middle * width] == b[low * width : middle * width]:
            low = middle
        else:
            high = middle - 1
    return low


def digest_fields(domain: str, *fields: bytes | None) -> bytes:
    """The digest of several fields, each with its length, under a domain tag.

    No two lists of fields share an encoding: a field may not run into the next one, and ``None`` is not ``b""``.
    """
    state = xxhash.xxh3_128(_framed(domain.encode()))
    for field in fields:
        state.update(b"\xff" * 8 if field is None else _framed(field))
    return state.digest()


def _framed(field: bytes) -> bytes:
    return len(field).to_bytes(8, "little") + field


def namespace_digest(namespace: str) -> bytes:
    """The digest of a namespace; the empty string is the default one."""
    return digest_fields("kvkeep/namespace/1", namespace.encode())


def prefix_chain(ids: TokenIds, namespace: bytes) -> list[bytes]:
    """The chained digests at every full block boundary: item i covers the first ``i * BLOCK`` ids.

    Item 0 is the seed: it holds the namespace, so two tenants share no digest at all.
    """
    digest = digest_fields("kvkeep/prefix/1", namespace)
    chain = [digest]
    data = memoryview(ids.int64)
    for begin in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        digest = _link(digest, data[begin : begin + _BLOCK_BYTES])
        chain.append(digest)
    return chain


def prefix_hash(ids: TokenIds, length: int, chain: Sequence[bytes]) -> bytes:
    """The digest of the first ``length`` ids, given their chain."""
    whole, rest = divmod(length, BLOCK)
    return _link(chain[whole], ids.int64[whole * _BLOCK_BYTES : length * 8]) if rest else chain[whole]


def _link(previous: bytes, block: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128(previous)
    state.update(block)
    return state.digest()


@lru_cache(maxsize=256)  # entries share few models
def model_digest(weights: str, config: str, adapters: str | None, dtypes: str) -> str:
    """One digest of the parts of a model's identity, 32 hex digits."""
    parts = [None if part is None else bytes.fromhex(part) for part in (weights, config, adapters, dtypes)]
    return digest_fields("kvkeep/model/1", *parts).hex()
