"""Warming by manifest: load the model that it names, and prefill what is not stored yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.errors import InvalidRequestError
from kvkeep.manifest import Manifest, Prefix
from kvkeep.records import Entry

if TYPE_CHECKING:
    from kvkeep.bound import BoundStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What became of one prefix of a manifest.

    Attributes:
        prefix: the prefix.
        entry: its entry.
        prefilled_tokens: tokens that this process fed to the model for it; 0 if it was stored.
        seconds: how long it took.
    """

    prefix: Prefix
    entry: Entry
    prefilled_tokens: int
    seconds: float


def load_model(source: str, *, dtype: str | None = None) -> tuple[Any, Any]:
    """Load a causal language model, ready to generate, and its tokenizer.

    Args:
        source: a hub id or a folder, as ``from_pretrained`` takes it.
        dtype: ``"float32"`` and the like; ``None`` for the checkpoint's own.

    Raises:
        InvalidRequestError: it is not there, or transformers cannot load it.
    """
    if source.startswith(("/", ".", "~")) and not Path(source).is_dir():
        raise InvalidRequestError(f"there is no model folder {source}: give a folder or a hub id with --model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto")
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidRequestError(
            f"the model {source} cannot be loaded ({reason}): give another with --model"
        ) from error
    return model, tokenizer  # from_pretrained leaves it in evaluation mode


def warm_prefixes(
    kv: BoundStore, manifest: Manifest, *, progress: Callable[[Prefix, int, int], None] | None = None
) -> Iterator[Warmed]:
    """Warm one prefix after the other, in the order of the manifest, and yield each when it is stored.

    Args:
        kv: the bound store.
        manifest: what to warm.
        progress: called with the prefix, the tokens done and the tokens in all; not for what is stored.
    """
    for prefix in manifest.prefixes:
        began = time.perf_counter()
        prefilled = 0

        def note(done: int, total: int, prefix: Prefix = prefix) -> None:
            nonlocal prefilled
            prefilled = done
            if progress is not None:
                progress(prefix, done, total)

        entry = kv.warm(prefix.prompt, name=prefix.name, pin=prefix.pin, ttl=prefix.ttl, progress=note)
        yield Warmed(prefix=prefix, entry=entry, prefilled_tokens=prefilled, seconds=time.perf_counter() - began)
