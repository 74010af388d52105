"""``kvkeep warm``: prefill what a manifest names, ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
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
    say,
    store_option,
)
from kvkeep.cli.progress import progress_bars

if TYPE_CHECKING:
    from kvkeep.warming import Warmed


@click.command("warm")
@click.argument("manifest", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="Hub id or folder of the model, instead of the manifest's.")
@format_option
@store_option
def command(store: Path | None, manifest: Path | None, model: str | None, format: Format) -> None:
    """Prefill and store the prefixes of MANIFEST, otherwise of the store's warm.toml, and skip what is stored.

    Several processes may warm at once: each prefix is prefilled by one of them. Ctrl-C keeps the prefixes that are
    done and leaves nothing half stored.

    Example: kvkeep warm prompts.toml --model ./my-model
    """
    from kvkeep.manifest import load_manifest

    opened = open_store(store, write=True)
    loaded = load_manifest(manifest if manifest is not None else opened.path / "warm.toml")
    source = model if model is not None else loaded.model
    say(f"loading {source}")
    from kvkeep.warming import load_model, warm_prefixes  # imports torch and transformers

    live, tokenizer = load_model(source, dtype=loaded.dtype)
    done: list[Warmed] = []
    try:
        with progress_bars("tokens") as update:
            kv = opened.bind(live, tokenizer)
            done.extend(warm_prefixes(kv, loaded, progress=lambda prefix, n, total: update(prefix.name, n, total)))
    finally:  # what is stored is said even if a later prefix fails or Ctrl-C ends it
        _emit(done, format)


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
