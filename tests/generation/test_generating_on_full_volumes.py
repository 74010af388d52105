"""Generating with a store on a volume that has no byte left, or for a user whose files may not grow."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY

from kvkeep import CacheStore
from kvkeep.bound import BoundStore
from kvkeep.errors import StoreWriteError

PROMPT = 60


def prompt(seed: int, tokens: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def check(model: Any, kv: BoundStore, ids: torch.Tensor) -> int:
    """Generate as one does without a store; how many tokens were reused."""
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
    with kv.attached():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(out, control)
    assert kv.last_report is not None
    return kv.last_report.reused_tokens


def check_full(model: Any, path: Path, refuses: Any) -> None:
    """What must be so where nothing more can be written: ``refuses()`` is the context that raises it."""
    kv = CacheStore(path, min_free=0).bind(model)
    assert check(model, kv, prompt(1)) == PROMPT - 2
    assert check(model, kv, prompt(2)) == 0
    with refuses():
        kv.warm(prompt(3))
    kv.store.journal.flush()
    assert check(model, kv, prompt(3)) == 0
    fresh = CacheStore(path, min_free=0).bind(model)
    assert check(model, fresh, prompt(1)) == PROMPT - 2
    (entry,) = fresh.store.entries()
    assert fresh.store.verify(entry.key) is None
    assert fresh.store.gc(dry_run=True) is not None
    assert fresh.warm(prompt(1)).key == entry.key, "nothing to write"


@pytest.fixture
def tiny_volume(tmp_path: Path) -> Iterator[Path]:
    """A volume of 4 MiB."""
    mount = tmp_path / "volume"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:  # a container without the right to mount
        pytest.skip(done.stderr.strip())
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.root
@pytest.mark.requirement("R5", part=True)
def test_a_volume_without_a_byte(tiny_llama: Any, tiny_volume: Path) -> None:
    path = tiny_volume / "store"
    CacheStore(path, min_free=0).bind(tiny_llama).warm(prompt(1), name="kept", pin=True)
    with (tiny_volume / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    assert shutil.disk_usage(tiny_volume).free == 0
    check_full(tiny_llama, path, lambda: pytest.raises(StoreWriteError, match=r"make room|to stay free"))
    store = CacheStore(path, min_free=0)
    assert store.remove(store.entries()[0].key)
    assert shutil.disk_usage(tiny_volume).free > 0
    (tiny_volume / "filler").unlink()
    kv = store.bind(tiny_llama)
    kv.warm(prompt(3))
    assert check(tiny_llama, kv, prompt(3)) == PROMPT - 2


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """No file of this process may become longer, as with a quota."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.requirement("R5")
def test_files_that_may_not_grow(tiny_llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "store"
    CacheStore(path, min_free=0).bind(tiny_llama).warm(prompt(1))
    with files_of_at_most(512):
        check_full(tiny_llama, path, lambda: pytest.raises(StoreWriteError, match="make room"))
        done = subprocess.run([sys.executable, "-m", "kvkeep", "--store", str(path), "ls"], capture_output=True)
        assert done.returncode == 0, done.stderr
    kv = CacheStore(path).bind(tiny_llama)
    kv.warm(prompt(3))
    assert check(tiny_llama, kv, prompt(3)) == PROMPT - 2
    assert list((path / "tmp").iterdir()) == []
