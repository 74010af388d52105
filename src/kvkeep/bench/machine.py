"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

from kvkeep._version import __version__


def facts() -> dict[str, object]:
    """The date, the machine by its cores and CPU model, and the versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": _cores(),
        "cpu": cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "kvkeep": __version__,
    }


def _cores() -> int:
    """The cores that this process may use, where the system can say that."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model(source: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model, as the system calls it."""
    try:
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
