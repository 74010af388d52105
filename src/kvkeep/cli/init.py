"""``kvkeep init``: make a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from kvkeep.cli.common import say, store_option


@click.command("init")
@click.option("--shared", is_flag=True, help="Let the directory's group read and write, instead of you alone.")
@click.option("--max-bytes", metavar="SIZE", help="What all entries may take, such as 10GiB or 500MB.")
@click.option("--quota", metavar="SIZE", help="What the entries of each namespace may take.")
@store_option
def command(store: Path | None, shared: bool, max_bytes: str | None, quota: str | None) -> None:
    """Make a store: an empty directory with its format's description and a manifest to edit.

    A store that is there already stays as it is, but for limits that are given: they are written into its store.json,
    and every process that opens the store from then on keeps to them, unless it is told others. Where a new store gets
    no --max-bytes, half of what the volume has free is proposed; it is not written.

    Example: kvkeep --store cache_store init --max-bytes 20GiB
    """
    from kvkeep.settings import default_store_path, parse_size
    from kvkeep.storage import skeleton

    given = {"max_bytes": max_bytes, "quota": quota}
    limits = {name: parse_size(text, name) for name, text in given.items() if text is not None}
    where = store if store is not None else default_store_path()
    there = (where / "store.json").is_file()
    skeleton.init(where, shared=shared)
    skeleton.check(where)
    if limits:
        skeleton.set_limits(where, limits)
    say(f"{where} is a store already" if there else f"made a store at {where}; `kvkeep warm` warms its warm.toml")
    if not there and "max_bytes" not in limits and (budget := _half_of_what_is_free(where)):
        say(f"no budget: kvkeep init --max-bytes {budget} would use half of what is free")


def _half_of_what_is_free(store: Path) -> str | None:
    """Half of what this user may still take of the volume, rounded down to a size that ``--max-bytes`` takes."""
    half = shutil.disk_usage(store).free // 2
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if half >= size:
            return f"{half // size}{unit}"
    return None
