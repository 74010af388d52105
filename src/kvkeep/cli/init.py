"""``kvkeep init``: make a store."""

from __future__ import annotations

from pathlib import Path

import click

from kvkeep.cli.common import say, store_option


@click.command("init")
@click.option("--shared", is_flag=True, help="Let the directory's group read and write, instead of you alone.")
@store_option
def command(store: Path | None, shared: bool) -> None:
    """Make a store: an empty directory with its format's description and a manifest to edit.

    A store that is there already stays as it is.

    Example: kvkeep --store cache_store init
    """
    from kvkeep.settings import default_store_path
    from kvkeep.storage import skeleton

    where = store if store is not None else default_store_path()
    there = (where / "store.json").is_file()
    skeleton.init(where, shared=shared)
    skeleton.check(where)
    say(f"{where} is a store already" if there else f"made a store at {where}; `kvkeep warm` warms its warm.toml")
