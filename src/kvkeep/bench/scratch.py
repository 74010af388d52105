"""The directory that a run works in: on a real disk, and gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


@contextmanager
def scratch_directory(parent: Path | None) -> Iterator[Path]:
    """A new directory in ``parent``, removed with all that is in it when the block ends, however it ends.

    Args:
        parent: an existing directory; ``None`` means kvkeep's folder in the user's cache directory, beside the default
            store and so on the same disk. The system's folder for temporary files may be memory.
    """
    if parent is None:
        parent = Path(platformdirs.user_cache_dir("kvkeep"))
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as path:
        yield Path(path)
