"""Where a store lies when nobody says, and what the settings may be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import platformdirs

OnError = Literal["miss", "raise"]
Verify = Literal["first", "always", "never"]


def default_store_path() -> Path:
    """``$KVKEEP_STORE`` if it is set, else a folder in the user's cache directory."""
    named = os.environ.get("KVKEEP_STORE")
    return Path(named) if named else Path(platformdirs.user_cache_dir("kvkeep")) / "store"
