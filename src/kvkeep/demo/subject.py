"""What is measured: a live model, bound to a store or without one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvkeep.demo.process import Progress, Settings
from kvkeep.errors import InvalidRequestError
from kvkeep.manifest import Manifest, load_manifest
from kvkeep.prompts import read_prompt
from kvkeep.store import CacheStore
from kvkeep.warming import load_model, warm_prefixes

QUESTION = "What should I do first?"
"""Asked after every prefix; at most 16 tokens."""

UNRELATED = "Count from one to ten and back again, in words."
"""What the untimed first call is about, after which a timed one finds everything of the process in place."""


class Subject:
    """The model of one process. Its methods are what the parent may ask for; they return what JSON can hold.

    Attributes:
        seconds: what loading the ``model`` and the ``bind`` took.
    """

    def __init__(self, settings: Settings, progress: Progress) -> None:
        torch.set_num_threads(settings.threads)
        self._progress = progress
        self._manifest = _labelled(load_manifest(settings.manifest), settings.label)
        began = time.perf_counter()
        self._model, self._tokenizer = load_model(settings.model, dtype=settings.dtype)
        loaded = time.perf_counter()
        self._kv = None
        if settings.store is not None:  # "always": every timed call reads and verifies the entry anew
            self._kv = CacheStore(settings.store, verify="always").bind(self._model, self._tokenizer)
        self.seconds = {"model": loaded - began, "bind": time.perf_counter() - loaded}

    def warm(self) -> list[dict[str, Any]]:
        """Warm every prefix that is not stored, and say what there is now, in the order of the manifest."""
        if self._kv is None:
            raise InvalidRequestError("the control has no store to warm")
        warmed = warm_prefixes(self._kv, self._manifest, progress=lambda p, n, total: self._progress(p.name, n, total))
        return [
            {
                "name": one.prefix.name,
                "tokens": one.entry.tokens,
                "bytes": one.entry.nbytes,
                "prefilled": one.prefilled_tokens,
                "seconds": one.seconds,
            }
            for one in warmed
        ]

    def settle(self) -> None:
        """Make one short call about something else."""
        self._generate(read_prompt(UNRELATED, self._tokenizer).ids.tolist(), 1)

    def first_token(self, number: int) -> dict[str, Any]:
        """Ask the question after prefix ``number``: the time from ``generate(ids)`` to the first new token."""
        ids = self._prompt(number)
        began = time.perf_counter()
        self._generate(ids, 1)
        seconds = time.perf_counter() - began
        report = None if self._kv is None else self._kv.last_report
        return {
            "seconds": seconds,
            "prompt_tokens": len(ids),
            "reused_tokens": report.reused_tokens if report else 0,
            "reason": report.reason if report else None,
        }

    def write_text(self, number: int, tokens: int, path: str) -> None:
        """Answer greedily with at most ``tokens`` tokens, and write all ids, the prompt's included, to a file."""
        ids = self._generate(self._prompt(number), tokens)
        Path(path).write_text(json.dumps(ids), encoding="utf-8")

    def _generate(self, ids: Sequence[int], tokens: int) -> list[int]:
        inputs = torch.tensor([ids])
        if self._kv is not None:
            out = self._kv.generate(inputs, max_new_tokens=tokens, do_sample=False)
        else:
            mask = torch.ones_like(inputs)
            out = self._model.generate(inputs, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        result: list[int] = out[0].tolist()
        return result

    def _prompt(self, number: int) -> list[int]:
        """The ids of prefix ``number`` with the question after it."""
        prefix = self._manifest.prefixes[number]
        if prefix.kind == "messages":
            prompt: Any = [*prefix.prompt, {"role": "user", "content": QUESTION}]
        elif prefix.kind == "text":
            prompt = f"{prefix.prompt}\n\n{QUESTION}"
        else:
            prompt = [*prefix.prompt, *self._tokenizer(QUESTION, add_special_tokens=False)["input_ids"]]
        return read_prompt(prompt, self._tokenizer).ids.tolist()


def _labelled(manifest: Manifest, label: str) -> Manifest:
    return replace(manifest, prefixes=tuple(replace(prefix, name=prefix.name + label) for prefix in manifest.prefixes))
