"""Tiers beyond a store's own directory: places that keep immutable objects under plain names.

:func:`open_tier` makes one of a URL or a path. A tier of your own is any object with the methods of :class:`Tier`;
:class:`kvkeep.testing.TierContract` proves that it does what kvkeep relies on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from kvkeep.errors import InvalidRequestError
from kvkeep.tiers.base import Buffer, Capabilities, Part, Stat, Tier, check_name, check_range
from kvkeep.tiers.local import LocalTier
from kvkeep.tiers.memory import MemoryTier
from kvkeep.tiers.object_store import ObjectTier

__all__ = [
    "Buffer",
    "Capabilities",
    "LocalTier",
    "MemoryTier",
    "ObjectTier",
    "Part",
    "Stat",
    "Tier",
    "check_name",
    "check_range",
    "open_tier",
]

_URL = re.compile(r"[a-z][a-z0-9+]*://.*", re.IGNORECASE | re.DOTALL)


def open_tier(where: str | os.PathLike[str] | Tier, options: Mapping[str, Any] | None = None) -> Tier:
    """The tier at a URL, in a directory, or the one that is given.

    Args:
        where: a URL, as :class:`ObjectTier` takes it; the path of a directory; or a tier.
        options: for a URL, see :class:`ObjectTier`.

    Raises:
        InvalidRequestError: if the URL or the options cannot be used.
        MissingDependencyError: if a package is not installed that this kind of tier needs.
        TierError: if a directory cannot be used.
    """
    if isinstance(where, str) and _URL.fullmatch(where):
        return ObjectTier(where, options)
    if options:
        raise InvalidRequestError("options of a remote are for URLs such as s3://bucket/prefix")
    return LocalTier(where) if isinstance(where, str | os.PathLike) else where
