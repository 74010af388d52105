"""One text for one value: the canonical JSON that settings are hashed in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

import torch

from kvkeep.errors import UnsupportedRequestError


def canonical_json(value: Any, *, where: str) -> bytes:
    """Encode a tree of plain values so that equal trees, and only they, give equal bytes.

    Keys are sorted, floats are written exactly (in base 16), tuples are lists, sets are sorted lists. Objects that
    describe themselves with ``to_dict()`` are encoded by what they say.

    Args:
        value: the tree.
        where: what it is, for the error message.

    Raises:
        UnsupportedRequestError: for an object that has no canonical text.
    """
    return _dump(_plain(value, where))


def _dump(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, AbstractSet):
        return sorted((_plain(item, where) for item in value), key=_dump)
    if callable(getattr(value, "to_dict", None)):
        return _plain(value.to_dict(), where)
    raise UnsupportedRequestError(
        f"{where} holds a {type(value).__qualname__}, which has no canonical text to fingerprint; use plain "
        "values there, or an object with to_dict()"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A number format's name without the module: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
