"""Files whose pages are not in memory, so that reading them asks the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CAN_FORGET = hasattr(os, "posix_fadvise")
"""Whether this system can be asked."""


def forget(files: Iterable[Path]) -> None:
    """Ask the system to drop the pages of files that are on the disk. A hypervisor below it may still hold them."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
