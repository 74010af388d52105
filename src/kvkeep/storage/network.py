"""Whether a directory lies on a network file system, where a database that several hosts share is not safe."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_KINDS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2"),
    *("orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
}
_ESCAPED = re.compile(r"\\([0-7]{3})")


def network_kind(directory: Path) -> str | None:
    """What kind of network file system a directory lies on, ``"nfs4"`` for instance; ``None``: on none that is known.

    A file system in user space (``fuse.sshfs`` and the like) counts as one: what it keeps where cannot be known.
    Where the system does not list its mounts (outside of Linux) nothing is known.
    """
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    best, kind = -1, ""
    for line in lines:
        before, _, behind = line.partition(" - ")
        fields, after = before.split(" "), behind.split(" ")
        if len(fields) < 5:
            continue
        point = Path(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[4]))
        if directory.is_relative_to(point) and len(point.parts) >= best:  # of several mounts on one point the last
            best, kind = len(point.parts), after[0]
    return kind if kind in _KINDS or kind == "fuse" or kind.startswith("fuse.") else None
