"""A disk whose power can be cut: what was not brought to the medium by then is lost, as on a machine.

It is a file system in a file (Linux, root, ``losetup`` and ``mkfs``). Cutting the power shuts it down without writing
back what it holds in memory; mounting it again replays its journal, as after a real cut.
"""

from __future__ import annotations

import array
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), of ext4 and xfs alike
_WITH_JOURNAL, _WITHOUT = 1, 2
_SIZES = {"ext4": 128 << 20, "xfs": 320 << 20}  # xfs is made of no less than 300 MiB


class PowerDisk:
    """A mounted file system.

    Attributes:
        root: where it is mounted.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        """Make and mount one; it takes a file and a directory in ``folder``."""
        self.root = folder / f"{kind}-disk"
        self.root.mkdir()
        self._image = folder / f"{kind}.image"
        with self._image.open("wb") as file:
            file.truncate(_SIZES[kind])
        _run(f"mkfs.{kind}", "-q", str(self._image))
        self._mount()

    def cut(self, *, journal: bool = False) -> None:
        """Cut the power, and switch it on again. Whoever writes meanwhile gets an error; end such processes first.

        With ``journal``, the file system's journal was written just before: it then knows of files whose content is not
        there, as happens when it writes in that order.
        """
        fd = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, array.array("I", [_WITH_JOURNAL if journal else _WITHOUT]))
        finally:
            os.close(fd)
        self.close()
        self._mount()

    def close(self) -> None:
        """Unmount it."""
        for _ in range(100):  # a process that was killed may hold it for a moment
            with suppress(subprocess.CalledProcessError):
                _run("umount", str(self.root))
                return
            time.sleep(0.05)
        _run("umount", "--lazy", str(self.root))

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.root))


@contextmanager
def power_disk(folder: Path, kind: str) -> Iterator[PowerDisk]:
    """A disk of this kind, ``"ext4"`` or ``"xfs"``, while the block runs. ``OSError`` where there can be none."""
    try:
        disk = PowerDisk(folder, kind)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
    try:
        yield disk
    finally:
        disk.close()


def why_not(kind: str) -> str | None:
    """Why there can be no such disk here, or ``None`` if nothing speaks against it."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root"
    missing = [name for name in (f"mkfs.{kind}", "mount", "umount") if shutil.which(name) is None]
    return f"needs {missing[0]}" if missing else None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - programs of the system
