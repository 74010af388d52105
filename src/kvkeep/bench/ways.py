"""The ways to start from a prefix that was computed before: kvkeep's, and those that people use instead.

Each gives the tokens of a whole prompt, and begins with nothing but what it keeps in memory or on disk.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from kvkeep import compat
from kvkeep.bench.forgetting import CAN_FORGET, forget
from kvkeep.bench.subjects import ANSWER, Opened
from kvkeep.bound import BoundStore
from kvkeep.errors import KvkeepError
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds
from kvkeep.prefill import prefill
from kvkeep.store import CacheStore

Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [1, heads, rows, dim]."""


@dataclass(slots=True, kw_only=True)
class Situation:
    """One prefix of one model, which all ways start from.

    Attributes:
        model: the model.
        prompt: ids of the prefix and the question, [1, tokens].
        tokens: of the prefix.
        directory: where the ways keep their files. A second process finds those of the first there.
        rows: what a prefill of the prefix gave; ``None`` where the first process's file has it.
    """

    model: Any
    prompt: torch.Tensor
    tokens: int
    directory: Path
    rows: Rows | None = None
    _kv: BoundStore | None = field(default=None, init=False)

    @classmethod
    def computed(cls, opened: Opened, tokens: int, directory: Path, progress: Callable[[int], None]) -> Situation:
        """Prefill a prefix of so many tokens, and store it."""
        prompt, config = opened.prompt(tokens), compat.text_config(opened.model)
        inputs = Inputs(TokenIds.of(prompt[0, :tokens].tolist()))
        cache = prefill(opened.model, inputs, cache=compat.dynamic_cache(config), progress=progress)
        rows = [(layer.keys, layer.values) for layer in cache.layers]
        made = cls(model=opened.model, prompt=prompt, tokens=tokens, directory=directory, rows=rows)
        made.kv.save(cache, prompt[:, :tokens], guard=False)
        return made

    @property
    def kv(self) -> BoundStore:
        """The store, which verifies every time it reads."""
        if self._kv is None:
            self._kv = CacheStore(self.directory / "store", verify="always").bind(self.model)
        return self._kv

    def entries(self) -> list[Path]:
        """The files of the store's entries."""
        return sorted((self.directory / "store" / "entries").glob("*/*.safetensors"))

    def cache_of(self, rows: Rows) -> Any:
        """A dynamic cache around these rows, without a copy: it makes its own when it grows."""
        cache = compat.dynamic_cache(compat.text_config(self.model))
        for layer, (keys, values) in zip(cache.layers, rows, strict=True):
            compat.fill_dynamic(layer, keys, values, self.tokens)
        return cache


class Way(ABC):
    """A way to start. ``prepare`` once, then ``before`` and ``generate`` for each start.

    Attributes:
        name: how the output calls it.
        recomputes: whether it computes the prefix each time, and so takes very long.
    """

    name: ClassVar[str]
    recomputes: ClassVar[bool] = False

    def __init__(self, situation: Situation) -> None:
        self.situation = situation

    def prepare(self) -> None:  # noqa: B027  # not everything needs preparation
        """Compute, load or write what a start needs."""

    def before(self) -> None:  # noqa: B027
        """Bring the machine into the state that the name promises; nobody's time."""

    @abstractmethod
    def generate(self, **options: Any) -> torch.Tensor:
        """The whole prompt and greedy new tokens after it, [1, tokens]; ``options`` are those of ``generate``."""

    def files(self) -> Sequence[Path]:
        """What it keeps on disk."""
        return ()

    def _generate(self, cache: Any, **options: Any) -> torch.Tensor:
        prompt = self.situation.prompt
        given = {} if cache is None else {compat.GENERATE_CACHE_ARGUMENT: cache}
        out: torch.Tensor = self.situation.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **given, **options
        )
        return out


class Cold(Way):
    """No cache at all."""

    name = "cold prefill"
    recomputes = True

    def generate(self, **options: Any) -> torch.Tensor:
        """Compute the whole prompt."""
        return self._generate(None, **options)


class Shared(Way):
    """A cache in memory whose rows every call sees without a copy: the reference. It dies with its process."""

    name = "in memory, shared"

    def prepare(self) -> None:
        """Keep the rows."""
        self._rows = self.situation.rows or _load_rows(self.situation)

    def generate(self, **options: Any) -> torch.Tensor:
        """Go on from new layers around the same rows."""
        return self._generate(self.situation.cache_of(self._rows), **options)


class StaticCopy(Way):
    """The recipe of transformers' documentation: a prefilled ``StaticCache``, deep-copied for each call."""

    name = "StaticCache, deepcopy"

    def prepare(self) -> None:
        """Fill a static cache with room for the whole answer."""
        room = self.situation.prompt.shape[1] + ANSWER
        self._cache = self.situation.kv.load(self.situation.prompt, cache_implementation="static", max_cache_len=room)
        if self._cache is None or compat.cached_tokens(self._cache) != self.situation.tokens:
            raise KvkeepError(f"the bench did not load the {self.situation.tokens} tokens that it stored")

    def generate(self, **options: Any) -> torch.Tensor:
        """Go on from a copy."""
        return self._generate(copy.deepcopy(self._cache), **options)


class Pickled(Way):
    """``torch.save`` once, ``torch.load`` for each call."""

    name = "torch.load"

    def prepare(self) -> None:
        """Write the file, if it is not there."""
        if not _pickled(self.situation).exists():
            torch.save(self.situation.rows, _pickled(self.situation))

    def generate(self, **options: Any) -> torch.Tensor:
        """Go on from the loaded rows."""
        return self._generate(self.situation.cache_of(_load_rows(self.situation)), **options)

    def files(self) -> Sequence[Path]:
        """The one file."""
        return [_pickled(self.situation)]


class ByHand(Way):
    """``safetensors`` by hand: ``save_file`` once, ``load_file`` for each call."""

    name = "safetensors load_file"

    def prepare(self) -> None:
        """Write the file, if it is not there."""
        if not self._path.exists():
            rows = self.situation.rows or _load_rows(self.situation)
            keys = {f"k.{number}": keys.contiguous() for number, (keys, _) in enumerate(rows)}
            values = {f"v.{number}": values.contiguous() for number, (_, values) in enumerate(rows)}
            save_file({**keys, **values}, self._path)

    def generate(self, **options: Any) -> torch.Tensor:
        """Go on from the loaded rows."""
        found = load_file(self._path)
        rows = [(found[f"k.{number}"], found[f"v.{number}"]) for number in range(len(found) // 2)]
        return self._generate(self.situation.cache_of(rows), **options)

    def files(self) -> Sequence[Path]:
        """The one file."""
        return [self._path]

    @property
    def _path(self) -> Path:
        return self.situation.directory / "rows.safetensors"


class Kvkeep(Way):
    """``kv.generate`` with the entry's pages in memory: it finds, reads and verifies the entry each time."""

    name = "kvkeep, page cache warm"

    def before(self) -> None:
        """Read the entry once, so that its pages are in memory."""
        for path in self.files():
            path.read_bytes()

    @property
    def kv(self) -> BoundStore:
        """The store."""
        return self.situation.kv

    def generate(self, **options: Any) -> torch.Tensor:
        """Generate with the store."""
        kv = self.kv
        out: torch.Tensor = kv.generate(self.situation.prompt, do_sample=False, **options)
        report = kv.last_report
        if report is None or report.reused_tokens < self.situation.tokens - 1:  # the guard feeds one of them
            raise KvkeepError(f"kvkeep did not reuse the {self.situation.tokens} tokens that it stored: {report}")
        return out

    def files(self) -> Sequence[Path]:
        """The entries."""
        return self.situation.entries()


class KvkeepFromDisk(Kvkeep):
    """The same with none of the entry's pages in memory."""

    name = "kvkeep, disk cold"

    def before(self) -> None:
        """Ask the system to forget the pages."""
        forget(self.files())


class KvkeepResident(Kvkeep):
    """The same with the prefix preloaded into memory."""

    name = "kvkeep, resident"

    def prepare(self) -> None:
        """Bind a store of its own, for the others must not find anything in memory, and preload the prefix."""
        self._resident = CacheStore(self.situation.directory / "store").bind(self.situation.model)
        self._resident.preload([self.situation.prompt])

    def before(self) -> None:
        """Nothing is read."""

    @property
    def kv(self) -> BoundStore:
        """The store that holds the prefix."""
        return self._resident


def ways_of(situation: Situation) -> list[Way]:
    """Every way that works on this system, the reference first."""
    kinds: list[type[Way]] = [Shared, Cold, StaticCopy, Pickled, ByHand, KvkeepResident, Kvkeep]
    if CAN_FORGET:
        kinds.append(KvkeepFromDisk)
    return [kind(situation) for kind in kinds]


REFERENCE = Shared.name
"""What every other way is compared to."""


def _pickled(situation: Situation) -> Path:
    return situation.directory / "rows.pt"


def _load_rows(situation: Situation) -> Rows:
    rows: Rows = torch.load(_pickled(situation), weights_only=True)
    return rows
