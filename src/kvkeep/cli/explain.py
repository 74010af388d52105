"""``kvkeep explain``: why a prompt would miss."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.common import Format, emit_json, entry_to_json, format_option, open_store, say, store_option

if TYPE_CHECKING:
    from kvkeep.records import Explanation


@click.command("explain")
@click.argument("prompt", required=False)
@click.option("--file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Read the text from a file.")
@click.option("--messages", help="Chat messages as JSON, or @FILE with them.")
@click.option("--model", help="Hub id or folder of the model, instead of that of the store's warm.toml.")
@format_option
@store_option
def command(
    store: Path | None, prompt: str | None, file: Path | None, messages: str | None, model: str | None, format: Format
) -> None:
    """Say why PROMPT can reuse no more: the nearest entry, the first token that differs, the cause, and what to do.

    It loads the model, because entries belong to exactly its weights.

    Example: kvkeep explain --messages '[{"role": "user", "content": "Who are you?"}]'
    """
    if sum(given is not None for given in (prompt, file, messages)) != 1:
        raise click.UsageError("give one of PROMPT, --file and --messages")
    wanted: Any = prompt if file is None else file.read_text(encoding="utf-8")
    if messages is not None:
        wanted = _read_messages(messages)
    from kvkeep.manifest import load_manifest

    opened = open_store(store)
    path = opened.path / "warm.toml"
    loaded = load_manifest(path) if model is None or path.exists() else None
    source = model if model is not None or loaded is None else loaded.model
    say(f"loading {source}")
    from kvkeep.warming import load_model  # imports torch and transformers

    live, tokenizer = load_model(str(source), dtype=None if loaded is None else loaded.dtype)
    explanation = opened.bind(live, tokenizer).explain(wanted)
    if format == "json":
        emit_json(_to_json(explanation))
    else:
        click.echo(str(explanation))


def _read_messages(given: str) -> Any:
    try:
        text = Path(given[1:]).read_text(encoding="utf-8") if given.startswith("@") else given
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--messages is no JSON: {error}") from None


def _to_json(explanation: Explanation) -> dict[str, object]:
    entry = explanation.entry
    return {**asdict(explanation), "entry": None if entry is None else entry_to_json(entry)}
