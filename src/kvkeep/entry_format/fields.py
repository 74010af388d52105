"""Taking typed members out of JSON objects that nobody vouches for."""

from __future__ import annotations

import re
from typing import Any, NoReturn, TypeVar

from kvkeep.errors import EntryDamagedError

_HEX32 = re.compile(r"[0-9a-f]{32}")
_T = TypeVar("_T")


def damaged(reason: str) -> NoReturn:
    """Refuse the header."""
    raise EntryDamagedError(reason)


def object_of(value: object) -> dict[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        damaged("the header holds something else where an object must be")
    return value


def take(source: dict[str, Any], name: str, kind: type[_T]) -> _T:
    """Take out a member of this type; an ``int`` must be a natural number."""
    value = source.pop(name, None)
    if not isinstance(value, kind) or (kind is int and not natural(value)):
        damaged(f"the header's {name!r} is not a valid {kind.__name__}")
    return value


def take_hex(source: dict[str, Any], name: str) -> str:
    """Take out a digest, 32 hex digits."""
    value = take(source, name, str)
    if not _HEX32.fullmatch(value):
        damaged(f"the header's {name!r} is not 32 hex digits")
    return value


def take_optional_hex(source: dict[str, Any], name: str) -> str | None:
    """Take out a digest or null."""
    return take_hex(source, name) if source.get(name) is not None else source.pop(name, None)


def require(source: dict[str, Any], *names: str) -> None:
    """Refuse an object without these members."""
    for name in names:
        if name not in source:
            damaged(f"the header lacks {name!r}, which may be null but not absent")


def nothing_left(source: dict[str, Any], where: str) -> None:
    """Refuse an object of which a member was not taken."""
    if source:
        damaged(f"the header's {where} holds the unknown member {min(source)!r}")


def natural(value: object) -> bool:
    """Whether the value is an integer in [0, 2**63), and not a truth value."""
    return type(value) is int and 0 <= value < 1 << 63


def naturals(value: object) -> bool:
    """Whether the value is a list of natural numbers."""
    return isinstance(value, list) and all(map(natural, value))
