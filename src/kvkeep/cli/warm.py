"""``kvkeep warm``: prefill what a manifest names, ahead of time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.common import (
    SHORT_KEY,
    Format,
    count,
    emit_json,
    entry_to_json,
    format_option,
    open_store,
    remote_option,
    say,
    store_option,
)
from kvkeep.cli.progress import progress_bars

if TYPE_CHECKING:
    from kvkeep.warming import Warmed


@click.command("warm")
@click.argument("manifest", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="Hub id or folder of the model, instead of the manifest's.")
@remote_option
@format_option
@store_option
def command(store: Path | None, manifest: Path | None, model: str | None, remote: str | None, format: Format) -> None:
    """Prefill and store the prefixes of MANIFEST, otherwise of the store's warm.toml, and skip what is stored.

    Several processes may warm at once: each prefix is prefilled by one of them. Under torchrun, accelerate or srun each
    rank takes its share of the manifest. With --remote, what is there is fetched and not prefilled, and the rest is
    stored there, too. Ctrl-C keeps the prefixes that are done and leaves nothing half stored.

    Example: kvkeep warm prompts.toml --model ./my-model
    """
    from kvkeep.manifest import load_manifest

    opened = open_store(store, write=True, remote=remote)
    loaded = load_manifest(manifest if manifest is not None else opened.path / "warm.toml")
    rank, size = rank_and_size(os.environ)
    mine = replace(loaded, prefixes=loaded.prefixes[rank::size])
    if size > 1:
        say(f"rank {rank} of {size}: {count(len(mine.prefixes), 'prefix', 'prefixes')}")
    source = model if model is not None else loaded.model
    say(f"loading {source}")
    from kvkeep.warming import load_model, warm_prefixes  # imports torch and transformers

    live, tokenizer = load_model(source, dtype=loaded.dtype)
    done: list[Warmed] = []
    try:
        with progress_bars("tokens") as update:
            kv = opened.bind(live, tokenizer)
            for warmed in warm_prefixes(kv, mine, progress=lambda prefix, n, total: update(prefix.name, n, total)):
                done.append(warmed)
                if remote is not None:
                    opened.push(warmed.entry.key)
    finally:  # what is stored is said even if a later prefix fails or Ctrl-C ends it
        _emit(done, format)


def rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Which process of how many this is, as torchrun, accelerate and SLURM tell it; (0, 1) where nobody does."""
    # Of SLURM what counts is the step: in a batch script without srun there is one process, whatever the job may have.
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        try:
            number, count_ = int(environment[rank]), int(environment[size])
        except (KeyError, ValueError):
            continue
        if 0 <= number < count_:
            return number, count_
    return 0, 1


def _emit(done: Sequence[Warmed], format: Format) -> None:
    if format == "json":
        emit_json([_to_json(warmed) for warmed in done])
        return
    for warmed in done:
        click.echo(_line(warmed))


def _line(warmed: Warmed) -> str:
    entry = warmed.entry
    if warmed.prefilled_tokens:
        what = f"{count(warmed.prefilled_tokens, 'token')} prefilled in {warmed.seconds:.1f} s"
    else:
        what = "already stored, 0 tokens prefilled"
    return f"{warmed.prefix.name}  {entry.key[:SHORT_KEY]}  {count(entry.tokens, 'token')}: {what}"


def _to_json(warmed: Warmed) -> dict[str, object]:
    return {
        **entry_to_json(warmed.entry),
        "name": warmed.prefix.name,
        "prefilled_tokens": warmed.prefilled_tokens,
        "seconds": round(warmed.seconds, 3),
    }
