"""Trouble with the store never stops a program that generates: every exception, at every call to the store."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY

from kvkeep import CacheStore
from kvkeep.bound import BoundStore
from kvkeep.capacity import Capacity
from kvkeep.catalog import Catalog
from kvkeep.errors import EntryDamagedError, StoreError, StoreWriteError
from kvkeep.matching import PrefixIndex
from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.entry_reader import EntryFile
from kvkeep.storage.fs import Directory
from kvkeep.storage.index import Index
from kvkeep.storage.journal import Journal
from kvkeep.storage.listing import HeaderReader, Listing
from kvkeep.storage.locks import KeyLocks
from kvkeep.storage.refs import Refs
from kvkeep.storage.row_database import RowDatabase

PARTS: tuple[type, ...] = (
    CacheStore, Capacity, Catalog, Directory, EntryFile, EntryFiles, HeaderReader, Index, Journal, KeyLocks, Listing,
    PrefixIndex, Refs, RowDatabase,
)  # fmt: skip
"""What a store consists of."""

EXCEPTIONS: dict[str, Callable[[], Exception]] = {
    "StoreError": lambda: StoreError(errno.EIO, "injected"),
    "StoreWriteError": lambda: StoreWriteError(errno.ENOSPC, "injected"),
    "EntryDamagedError": lambda: EntryDamagedError("injected"),
    "EIO": lambda: OSError(errno.EIO, "injected"),
    "ESTALE": lambda: OSError(errno.ESTALE, "injected"),
    "ENOENT": lambda: FileNotFoundError(errno.ENOENT, "injected"),
    "MemoryError": MemoryError,
    "sqlite3": lambda: sqlite3.DatabaseError("injected"),
    "KeyError": lambda: KeyError("injected"),
    "RuntimeError": lambda: RuntimeError("injected"),
    "ValueError": lambda: ValueError("injected"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "injected"),
    "RecursionError": lambda: RecursionError("injected"),
}

SOON = ("EIO", "MemoryError", "KeyError")
"""Those of the fast run."""

PREFIX, PROMPT = 40, 48


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def control(tiny_llama: Any, ids: torch.Tensor) -> torch.Tensor:
    return generate(tiny_llama, ids)


@pytest.fixture
def stored(tiny_llama: Any, ids: torch.Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "store"
    CacheStore(path).bind(tiny_llama, model_id="tiny").warm(ids[:, :PREFIX])
    return path


def generate(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **kwargs)


def methods(part: type) -> Iterator[str]:
    for name, member in vars(part).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name


def called_during(kv: BoundStore, ids: torch.Tensor) -> list[tuple[type, str]]:
    """Every method of the store that one ``generate`` calls, and its report."""
    seen: dict[tuple[type, str], None] = {}

    def watched(part: type, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[part, name] = None
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for part in PARTS:
            for name in methods(part):
                patch.setattr(part, name, watched(part, name, getattr(part, name)))
        kv.generate(ids, max_new_tokens=3, do_sample=False)
    return list(seen)


class Spoiled:
    """Raises in the place of a method, and counts how often."""

    def __init__(self, make: Callable[[], Exception]) -> None:
        self.make, self.raised = make, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.raised += 1
        raise self.make()


@pytest.mark.requirement("R38")
@pytest.mark.parametrize(
    "name", [one if one in SOON else pytest.param(one, marks=pytest.mark.slow) for one in EXCEPTIONS]
)
def test_any_exception_at_any_call_is_a_miss(
    tiny_llama: Any, ids: torch.Tensor, control: torch.Tensor, stored: Path, caplog: Any, name: str, figures: list[str]
) -> None:
    def bind() -> BoundStore:
        kv = CacheStore(stored).bind(tiny_llama, model_id="tiny")
        kv.warm(ids[:, :PREFIX])  # what was found damaged has been set aside
        return CacheStore(stored).bind(tiny_llama, model_id="tiny")

    calls = called_during(bind(), ids)
    assert {(CacheStore, "serve"), (EntryFile, "read_rows"), (Directory, "open_read"), (Journal, "generated")} <= {
        *calls
    }
    misses = 0
    for part, method in calls:
        kv, spoiled = bind(), Spoiled(EXCEPTIONS[name])
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "kvkeep"):
            patch.setattr(part, method, spoiled)
            with kv.attached():
                out = [generate(tiny_llama, ids), generate(tiny_llama, ids)]
        where = f"{part.__name__}.{method}"
        if not spoiled.raised:  # as what makes folders, the first time alone
            continue
        assert torch.equal(out[0], control) and torch.equal(out[1], control), where
        report = kv.last_report
        assert report is not None, where
        assert report.reused_tokens == PREFIX - 1 or report.reason is not None, where
        misses += not report.reused_tokens
        told = [record.message for record in caplog.records if record.name == "kvkeep"]
        assert len(told) <= 1, (where, told)  # of two calls; what the index says of itself is beside it
        if not report.reused_tokens and report.reason is not None and report.reason.startswith("error"):
            assert len(told) == 1, where
            assert kv.store.journal.totals().misses["error"] >= 2 or part is Journal, where
    figures.append(f"fail open: {name} at {len(calls)} calls of a generate, {misses} of them misses, 0 other outputs")


@pytest.mark.requirement("R38", part=True)
def test_a_file_that_cannot_be_read_is_a_miss_whatever_the_system_says(
    tiny_llama: Any, ids: torch.Tensor, control: torch.Tensor, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Directory.open_read
    for code in sorted(errno.errorcode):

        def failing(self: Directory, *name: str, code: int = code) -> int:
            if name[0] == "entries":
                raise OSError(code, os.strerror(code))
            return read(self, *name)

        monkeypatch.setattr(Directory, "open_read", failing)
        kv = CacheStore(stored).bind(tiny_llama, model_id="tiny")
        assert torch.equal(kv.generate(ids, max_new_tokens=3, do_sample=False), control), code
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == 0
        assert kv.last_report.reason is not None


@pytest.mark.requirement("R38", part=True)
@pytest.mark.parametrize("kind", ["batch", "static", "beams"])
def test_other_kinds_of_calls_go_on_too(tiny_llama: Any, ids: torch.Tensor, stored: Path, kind: str) -> None:
    settings: dict[str, Any] = {"static": {"cache_implementation": "static"}, "beams": {"num_beams": 2}}.get(kind, {})
    prompt = ids.repeat(2, 1) if kind == "batch" else ids
    expected = generate(tiny_llama, prompt, **settings)
    for part, method in [(Catalog, "search"), (EntryFile, "read_rows"), (EntryFiles, "open"), (Journal, "generated")]:
        kv, spoiled = CacheStore(stored).bind(tiny_llama, model_id="tiny"), Spoiled(EXCEPTIONS["KeyError"])
        with pytest.MonkeyPatch.context() as patch, kv.attached():
            patch.setattr(part, method, spoiled)
            assert torch.equal(generate(tiny_llama, prompt, **settings), expected), (part, method)
        assert spoiled.raised


@pytest.mark.requirement("R38", part=True)
@pytest.mark.parametrize("name", ["EIO", "MemoryError", "KeyError", "sqlite3"])
def test_a_store_that_is_to_raise_raises(
    tiny_llama: Any, ids: torch.Tensor, control: torch.Tensor, stored: Path, name: str
) -> None:
    make = EXCEPTIONS[name]
    for part, method in [(Catalog, "search"), (EntryFiles, "open"), (EntryFile, "read_rows"), (Journal, "generated")]:
        kv = CacheStore(stored, on_error="raise").bind(tiny_llama, model_id="tiny")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, method, Spoiled(make))
            with pytest.raises(type(make())):
                kv.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(kv.generate(ids, max_new_tokens=3, do_sample=False), control), "the model is as before"
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == PREFIX - 1


@pytest.mark.requirement("R38", part=True)
def test_warm_says_what_is_wrong(tiny_llama: Any, ids: torch.Tensor, stored: Path, tmp_path: Path) -> None:
    """It returns an entry or raises: there is nothing else that it could give."""
    failing = Spoiled(lambda: OSError(errno.EIO, "injected"))
    for part, method in [(EntryFiles, "open"), (os, "posix_fallocate"), (os, "link"), (os, "fsync")]:
        store = CacheStore(tmp_path / method)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, method, failing)
            with pytest.raises(StoreError, match="injected"):
                store.bind(tiny_llama, model_id="tiny").warm(ids)
        assert store.bind(tiny_llama, model_id="tiny").warm(ids).tokens == PROMPT
