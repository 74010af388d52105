"""Where a store lies when nobody says, and what the settings may be."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, get_args

import platformdirs

from kvkeep.errors import InvalidRequestError

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

OnError = Literal["miss", "raise"]
Verify = Literal["first", "always", "never"]
Durability = Literal["full", "batch", "none"]
SaveMode = Literal["never", "seen_twice", "prompt", "turn"]


def default_store_path() -> Path:
    """``$KVKEEP_STORE`` if it is set, else a folder in the user's cache directory."""
    named = os.environ.get("KVKEEP_STORE")
    return Path(named) if named else Path(platformdirs.user_cache_dir("kvkeep")) / "store"


def check_save(mode: object) -> None:
    """Raise InvalidRequestError for what is no :data:`SaveMode`."""
    if mode not in get_args(SaveMode):
        raise InvalidRequestError(f"save must be 'never', 'seen_twice', 'prompt' or 'turn', not {mode!r}")


def parse_size(value: int | str, name: str) -> int:
    """Bytes, given as a number or as text: ``"10GiB"`` are 10 times 2**30, ``"500MB"`` 500 times 10**6.

    Raises:
        InvalidRequestError: it is neither, or below zero. ``name`` is what the message calls it.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise InvalidRequestError(f"{name} is a number of bytes or a text such as '10GiB' or '500MB', not {value!r}")
    number, unit, binary = found.groups(default="")
    factor = (1024 if binary else 1000) ** _POWERS[unit.lower()]
    return int(float(number) * factor) if "." in number else int(number) * factor
