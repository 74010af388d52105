"""Starting: what is imported, and how soon ``kvkeep ls`` is done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvkeep.bench.population import made_up_identity, populate
from kvkeep.bench.rows import Row
from kvkeep.bench.sizes import Sizes
from kvkeep.bench.timing import Progress, medians
from kvkeep.errors import KvkeepError
from kvkeep.store import CacheStore

_ENTRIES = 10
_HEAVY = ("numpy", "torch", "transformers")
_LS = """
import sys
import kvkeep
from kvkeep.cli import main
main(["--store", sys.argv[1], "ls"], standalone_mode=False)
print(*sorted(set(sys.argv[2:]) & set(sys.modules)))
"""


def measure_startup(directory: Path, sizes: Sizes, progress: Progress) -> Iterator[Row]:
    """Measure imports and ``kvkeep ls``, with a store in an empty directory."""
    populate(directory, made_up_identity(), CacheStore(directory).namespace_digest, entries=_ENTRIES)
    found = _run("-c", _LS, str(directory), *_HEAVY).splitlines()[-1].split()
    yield Row(
        name="import",
        figure=len(found),
        unit="modules",
        bar=0,
        at="most",
        compared=f"how many of {', '.join(_HEAVY)} are loaded after import kvkeep and kvkeep ls"
        + (f": {', '.join(found)}" if found else ""),
    )
    click, ls = medians(
        "start",
        lambda: _run("-c", "import click"),
        lambda: _run("-m", "kvkeep", "--store", str(directory), "ls"),
        times=sizes.starts,
        progress=progress,
    )
    yield Row(
        name="start",
        figure=ls / click,
        unit="ratio",
        bar=6.0,
        at="most",
        compared=f"time of kvkeep ls on {_ENTRIES} entries ({ls * 1e3:.0f} ms) to python -c 'import click' "
        f"({click * 1e3:.0f} ms), each a process of its own",
    )


def _run(*arguments: str) -> str:
    """What a fresh process of this interpreter prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603  # ours
    if done.returncode:
        raise KvkeepError(f"a process of the bench ended with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
