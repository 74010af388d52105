"""Putting and loading one entry, beside writing and reading the same bytes with nothing around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvkeep import compat
from kvkeep.bench.forgetting import CAN_FORGET, forget
from kvkeep.bench.models import VOCABULARY, cache_model
from kvkeep.bench.rows import Row
from kvkeep.bench.sizes import Sizes
from kvkeep.bench.timing import Progress, medians
from kvkeep.drafting import draft_entry, entry_key
from kvkeep.errors import KvkeepError
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds
from kvkeep.layouts import describe_layers, plan_layers
from kvkeep.layouts.arena import Arena
from kvkeep.prefill import prefill
from kvkeep.records import Entry, Identity
from kvkeep.settings import Verify
from kvkeep.storage.fileio import read_at, sync_file, sync_path, write_at
from kvkeep.store import CacheStore

_VERIFY: tuple[Verify, ...] = ("first", "always", "never")
_SHAPE = "cache of SmolLM2-135M's shape (30 layers, 3 heads of 64, float32), random weights"


def measure_disk(directory: Path, sizes: Sizes, progress: Progress) -> Iterator[Row]:
    """Measure put, load and verification in a store in an empty directory."""
    model = cache_model()
    prompt = TokenIds.of(number % VOCABULARY for number in range(sizes.tokens + 1))
    store = CacheStore(directory)
    bound = {verify: CacheStore(directory, verify=verify).bind(model) for verify in _VERIFY}
    save = _saver(store, bound["first"].identity(), model, prompt[:-1])
    yield _put(store, save, sizes, progress)

    entry = save()
    del save  # and the cache in it
    ids = torch.tensor([prompt.tolist()])
    path = _file(directory, entry.key)
    shape = f"{entry.nbytes / 1e6:.0f} MB, {_SHAPE}"
    size = f"page cache warm, {shape}"

    def load(verify: Verify) -> Callable[[], Any]:
        def run() -> Any:
            loaded = bound[verify].load(ids)
            if loaded is None or compat.cached_tokens(loaded) != sizes.tokens:
                raise KvkeepError(f"the bench did not load the {sizes.tokens} tokens that it stored")
            return loaded

        return run

    raw, again, lookup = medians(
        "load",
        _reader(path),
        load("first"),
        lambda: bound["first"].lookup(ids),
        times=sizes.loads,
        progress=progress,
    )
    yield Row(
        name="load",
        figure=raw / again,
        unit="ratio",
        bar=0.8,
        at="least",
        compared=f"rate of kv.load into a DynamicCache, verified before ({_ms(again)}, {_ms(lookup)} of it "
        "for lookup and identity check) to preadv of the same bytes into memory of the same kind, "
        f"used before ({_ms(raw)}): {size}",
    )
    yield _cold(path, load("first"), shape, sizes, progress)
    never, always = medians("verification", load("never"), load("always"), times=sizes.loads, progress=progress)
    yield Row(
        name="verification",
        figure=always / never,
        unit="ratio",
        bar=1.25,
        at="most",
        compared=f"time of kv.load with verify='always' ({_ms(always)}) to verify='never' ({_ms(never)}): {size}",
    )


def _cold(path: Path, load: Callable[[], Any], size: str, sizes: Sizes, progress: Progress) -> Row:
    """The same with none of the file's pages in memory, on either side."""

    def clear() -> None:
        forget([path])

    if not CAN_FORGET:
        figure, words = None, "not measured: this system cannot be asked to drop the pages of a file"
    else:
        clear()
        raw, ours = medians("load, cold", _reader(path), load, times=sizes.cold_loads, progress=progress, between=clear)
        figure = raw / ours
        words = f"({_ms(ours)}) to preadv of the same bytes from its beginning to its end ({_ms(raw)})"
    return Row(
        name="load, disk cold",
        figure=figure,
        unit="ratio",
        bar=0.9,
        at="least",
        compared=f"rate of kv.load with the entry's pages dropped before {words}: {size}; below this system a "
        "hypervisor may still hold them",
    )


def _saver(store: CacheStore, identity: Identity, model: Any, ids: TokenIds) -> Callable[[], Entry]:
    """Prefills, and returns what stores the result, each time it is called."""
    plans = plan_layers(compat.text_config(model))
    inputs = Inputs(ids)
    cache = prefill(model, inputs)
    states = describe_layers([(layer.keys, layer.values) for layer in cache.layers], plans, len(ids))
    key = entry_key(inputs.prefix, identity, store.namespace_digest)
    return lambda: store.put(draft_entry(key, ids, states, model, None))


def _put(store: CacheStore, save: Callable[[], Entry], sizes: Sizes, progress: Progress) -> Row:
    key = save().key
    content = _file(store.path, key).read_bytes()
    raw_path = _file(store.path, key).with_name("raw")

    def clear() -> None:
        raw_path.unlink(missing_ok=True)
        store.remove(key)

    clear()
    raw, put = medians(
        "put", lambda: _write(raw_path, content), save, times=sizes.puts, progress=progress, between=clear
    )
    return Row(
        name="put",
        figure=raw / put,
        unit="ratio",
        bar=0.7,
        at="least",
        compared=f"rate of drafting and storing an entry ({_ms(put)}) to write and fsync of the same bytes in the same "
        f"directory ({_ms(raw)}): {len(content) / 1e6:.0f} MB, {_SHAPE}",
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file and its name durably, and do nothing else."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_at(fd, 0, content)
        sync_file(fd)
    finally:
        os.close(fd)
    sync_path(path.parent)


def _reader(path: Path) -> Callable[[], None]:
    """Reads a file whole, always into the same memory."""
    size = path.stat().st_size
    like = torch.empty(size, dtype=torch.uint8, device="meta")
    memory: Any = Arena([like]).empty(like).numpy()
    view = memoryview(memory)

    def read() -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            if read_at(fd, 0, [view]) != size:
                raise KvkeepError(f"{path} became shorter while the bench was reading it")
        finally:
            os.close(fd)

    return read


def _file(directory: Path, key: str) -> Path:
    return directory / "entries" / key[:2] / f"{key}.safetensors"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
