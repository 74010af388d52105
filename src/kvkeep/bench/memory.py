"""How much memory a start takes: by how much this process grew at its largest, as Linux tells it."""

from __future__ import annotations

import gc
from pathlib import Path

from kvkeep.bench.subjects import QUESTION, Opened
from kvkeep.bench.ways import Kvkeep, KvkeepResident, Situation, ways_of

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"

RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""The environment in which glibc gives back what was freed, so that no start lives on what another one left."""


def measure_memory(opened: Opened, tokens: int, directory: Path) -> dict[str, int]:
    """By how many bytes the process grew for one start in each way, what the way keeps in memory included.

    The beginning is a model that has answered something short. Nothing where the system does not tell the peak.

    Args:
        opened: the model.
        tokens: of the prefix.
        directory: the files of whoever measured the times.
    """
    if not _CLEAR.exists():
        return {}
    short = opened.prompt(0)
    opened.model.generate(short, attention_mask=short.new_ones(1, QUESTION), max_new_tokens=2, do_sample=False)
    situation = Situation(model=opened.model, prompt=opened.prompt(tokens), tokens=tokens, directory=directory)
    situation.kv.identity()
    peaks: dict[str, int] = {}
    # kvkeep first, and once: it keeps memory for the next load, which must not count as somebody's beginning. What it
    # takes does not depend on where the pages of the file are.
    for way in reversed(ways_of(situation)):
        if isinstance(way, KvkeepResident):  # it would live on what the ways before it left
            continue
        if isinstance(way, Kvkeep) and (known := [peaks[name] for name in peaks]):
            peaks[way.name] = known[0]
            continue
        gc.collect()
        before = _status("VmRSS")
        way.prepare()
        way.before()
        gc.collect()
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        way.generate(max_new_tokens=2)
        peaks[way.name] = max(0, _status("VmHWM") - before)
    return peaks


def _status(name: str) -> int:
    """A size that Linux tells of this process, in bytes."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found) * 1024
