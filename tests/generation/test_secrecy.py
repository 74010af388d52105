"""What a store tells of prompts beside its entries, what is left of a namespace, what a reader writes: nothing."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny_models import build_tiny

from kvkeep import CacheStore
from kvkeep.cli import main
from kvkeep.errors import KvkeepError, StoreReadOnlyError, StoreWriteError
from kvkeep.storage.fs import Directory
from kvkeep.storage.locks import KeyLocks

SECRET = "zqx vault combination 7741 belongs to Wilhelmina Oberhauser. "
PROMPT = SECRET * 3
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
WORDS = ("zqx", "Wilhelmina", "Oberhauser", "7741", "combination")
KEPT = ("entries", "chats")


def command(path: Path, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["--store", str(path), *arguments])
    return done.output + str(done.exception or "")


def runs_of(ids: list[int]) -> set[bytes]:
    """Every stretch of four ids, as both widths write it."""
    stretches = [ids[n : n + 4] for n in range(len(ids) - 3)]
    return {b"".join(i.to_bytes(size, "little") for i in one) for one in stretches for size in (4, 8)}


def damage(store: CacheStore, key: str) -> None:
    path = store.path / "entries" / key[:2] / f"{key}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def tree(root: Path) -> dict[Path, tuple[int, ...]]:
    known = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return {path: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in known.items()}


@pytest.mark.requirement("R36")
def test_nothing_but_entries_and_conversations_holds_a_prompt(
    toy_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    model = build_tiny("llama")
    store = CacheStore(tmp_path / "store", verify="always")
    kv = store.bind(model, toy_tokenizer)
    ids = toy_tokenizer(PROMPT)["input_ids"]
    said: list[str] = []
    first = kv.warm(PROMPT, name="one")
    tokens = torch.tensor([ids])
    cache = model(tokens, use_cache=True).past_key_values
    kv.save(cache, ids)
    for prompt in (PROMPT + " and on", SECRET[::-1]):
        kv.generate(prompt, **OPTIONS)
        said.append(repr(kv.last_report))
    kv.explain(SECRET[::-1])
    kv.chat("mine").send(SECRET, **OPTIONS)
    other = build_tiny("llama", seed=1)
    for wrong in (lambda: kv.save(cache, ids[::-1]), lambda: store.bind(other).save(cache, ids)):
        with pytest.raises(KvkeepError) as refused:
            wrong()
        said.append(str(refused.value))
    damage(store, first.key)
    kv.generate(PROMPT + " and on", **OPTIONS)
    said.append(repr(kv.last_report))
    store.gc()
    store.journal.flush()
    said += [command(store.path, *one) for one in (["ls"], ["stats"], ["gc"], ["verify", "--read-data"])]
    said += [
        command(store.path, "inspect", entry.key, *more)
        for entry in store.entries()
        for more in ([], ["--format", "json"])
    ]
    assert list((store.path / "quarantine").glob("*.txt"))
    said += [
        record.getMessage() + (record.exc_text or "") for record in caplog.records if record.name.startswith("kvkeep")
    ]
    places = {"what was said": "\n".join(said).encode()}
    for path in store.path.rglob("*"):
        inside = path.relative_to(store.path)
        own = inside.parts[0] in KEPT or (inside.parts[0] == "quarantine" and path.suffix == ".safetensors")
        if path.is_file():
            places[str(inside)] = os.fsencode(inside) + (b"" if own else path.read_bytes())
    wanted = runs_of(ids) | runs_of(ids[::-1]) | {word.encode() for word in (*WORDS, *(w[::-1] for w in WORDS))}
    wanted.add(str(ids[:4])[1:-1].encode())
    assert {place for place, content in places.items() if any(one in content for one in wanted)} == set()
    assert any(name.startswith("index/cache.db") for name in places)
    assert any(name.startswith("journal/") for name in places)


@pytest.mark.requirement("R36")
def test_of_a_removed_namespace_nothing_is_left(toy_tokenizer: Any, tmp_path: Path) -> None:
    model = build_tiny("llama")
    stores = {name: CacheStore(tmp_path / "store", namespace=name) for name in ("mine", "theirs")}
    for name, store in stores.items():
        kv = store.bind(model, toy_tokenizer)
        kv.warm(PROMPT, name=name, pin=True)
        kv.warm(PROMPT + SECRET * 20)
        kv.chat("talk").send(SECRET, **OPTIONS)
        bad = kv.warm(SECRET[::-1] * 2)
        damage(store, bad.key)
        assert store.verify(bad.key) is not None
        kv.generate(PROMPT + " on", **OPTIONS)
        store.journal.flush()
    store, digest = stores["mine"], stores["mine"].namespace_digest.hex()
    rows = [row for row in store._catalog.rows() if row.namespace == digest]
    kept = {entry.key for entry in store.entries()} - {row.key for row in rows}
    traces = {digest, *(row.key for row in rows), *(row.prefix for row in rows)}
    before = tree(store.path)
    would = stores["mine"].remove_namespace(dry_run=True)
    assert "would remove" in command(store.path, "rm", "--namespace", "mine", "--dry-run")
    assert {path for path in before if "entries" in path.parts} == {p for p in tree(store.path) if "entries" in p.parts}
    row = rows[0]
    reading = store._files.open(row.key)
    assert "removed" in command(store.path, "rm", "--namespace", "mine", "--yes")
    assert {(one.kind, one.name) for one in would} >= {("entry", one.key) for one in rows} | {("name", "mine")}
    with reading:
        reading.verify_all()
    for path in store.path.rglob("*"):
        assert not any(trace in path.name for trace in traces)
        if path.is_file():
            content = path.read_bytes()
            assert not [trace for trace in traces if trace.encode() in content], path
    theirs = stores["theirs"]
    assert {entry.key for entry in theirs.entries()} == kept
    assert [entry.names for entry in theirs.entries() if entry.names] == [("theirs",)]
    assert len(list((store.path / "quarantine").glob("*.safetensors"))) == 1
    assert len(list((store.path / "chats").iterdir())) == 1
    kv = theirs.bind(model, toy_tokenizer)
    assert kv.lookup(PROMPT + " on").tokens >= len(toy_tokenizer(PROMPT)["input_ids"])
    assert kv.chat("talk").messages
    assert stores["mine"].remove_namespace() == []


def test_an_index_that_others_keep_is_said_to_be_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.storage.row_database._TIMEOUT", 0.05)
    store = CacheStore(tmp_path / "store")
    with KeyLocks(Directory(store.path)).hold("index", timeout=1), pytest.raises(StoreWriteError, match="try again"):
        store.remove_namespace()
    assert store.remove_namespace() == []
    with pytest.raises(StoreReadOnlyError):
        CacheStore(store.path, readonly=True).remove_namespace()


_events: list[tuple[str, Any]] | None = None
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.chmod", "os.truncate", "os.utime"}


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _events is None:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITING
    if writes or event in _CHANGES or event.startswith("sqlite3.") or (event == "import" and "diskcache" in args[0]):
        _events.append((event, args[:2]))


@pytest.mark.requirement("R36", part=True)
def test_a_reader_never_writes(toy_tokenizer: Any, tmp_path: Path) -> None:
    global _events
    model = build_tiny("llama")
    store = CacheStore(tmp_path / "store")
    writer = store.bind(model, toy_tokenizer)
    writer.warm(PROMPT)
    damage(store, writer.warm(SECRET[::-1] * 2).key)
    control = writer.generate(PROMPT + " on", **OPTIONS)
    store.journal.flush()
    before = tree(store.path)
    sys.addaudithook(_watch)
    _events = []
    try:
        sqlite3.connect(":memory:").close()
        assert _events, "the hook sees nothing"
        _events = []
        reader = CacheStore(store.path, readonly=True).bind(model, toy_tokenizer)
        assert torch.equal(reader.generate(PROMPT + " on", **OPTIONS), control)
        assert reader.last_report is not None
        assert reader.last_report.reused_tokens > 0
        reader.generate(SECRET[::-1] * 2 + " on", **OPTIONS)
        assert reader.last_report.reason is not None
        reader.load(PROMPT)
        reader.explain("quite another")
        reader.store.entries()
        reader.store.gc(dry_run=True)
        reader.store.remove_namespace(dry_run=True)
        reader.store.journal.flush()
        seen, _events = _events, None
    finally:
        _events = None
    assert seen == []
    assert tree(store.path) == before


@pytest.mark.root
@pytest.mark.requirement("R36", part=True)
@pytest.mark.parametrize("kind", ["mounted read-only", "of another user"])
def test_a_store_that_cannot_be_written_serves(kind: str, toy_tokenizer: Any, tmp_path: Path) -> None:
    model = build_tiny("llama")
    store = CacheStore(tmp_path / "store")
    store.bind(model, toy_tokenizer).warm(PROMPT)
    store.journal.flush()
    path = tmp_path / "mounted"
    path.mkdir()
    if kind == "mounted read-only":
        subprocess.run(["mount", "--bind", store.path, path], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
    else:
        for one in (store.path, *store.path.rglob("*")):
            os.chown(one, 20001, 20010)
        path.rmdir()
        path.symlink_to(store.path)
    before = tree(store.path)
    try:
        if kind == "mounted read-only":
            with pytest.raises(OSError, match="Read-only file system"):
                (path / "new").touch()
        reader = CacheStore(path, readonly=True).bind(model, toy_tokenizer)
        assert reader.lookup(PROMPT + " on").tokens > 0
        ids = toy_tokenizer(PROMPT + " on", return_tensors="pt")
        assert torch.equal(reader.generate(PROMPT + " on", **OPTIONS), model.generate(**ids, **OPTIONS))
        assert reader.last_report is not None
        assert reader.last_report.reused_tokens > 0
    finally:
        if kind == "mounted read-only":
            subprocess.run(["umount", "-l", path], check=True)
    assert tree(store.path) == before
