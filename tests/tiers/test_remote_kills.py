"""kill -9 at every change that a push or a fetch makes: what is there is whole, and doing it again completes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from remote_stores import ask, keys_of_chain, open_store, put_chain

from kvkeep import CacheStore
from kvkeep.marks import decode_mark, entry_name
from kvkeep.testing import syscalls
from kvkeep.tiers import LocalTier

ENDS = [64, 128]

pytestmark = pytest.mark.slow


class Inline:
    """Stands for a pool of threads: strace counts the calls of one thread alone."""

    def __init__(self, size: int) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [call(item) for item in items]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A store with a chain, and the key of its last link."""
    monkeypatch.setattr("kvkeep.remote.ThreadPoolExecutor", Inline)
    return tmp_path / "one", put_chain(CacheStore(tmp_path / "one", min_free=0), ENDS)[-1].key


def whole_objects(remote: Path, source: Path) -> list[str]:
    """The names of what lies in a remote; fails where something is not whole, or a mark names what is not there."""
    if not (remote / "objects").exists():
        return []
    tier = LocalTier(remote)
    names = list(tier.list("v1"))
    for name in names:
        part = tier.get(name)
        assert part is not None
        if name.endswith(".safetensors"):
            assert part.read() == (source / name.removeprefix("v1/")).read_bytes(), name
        else:
            assert all(entry_name(one.key) in names for one in decode_mark(part.read())), name
    return names


@pytest.mark.requirement("R14", part=True)
@pytest.mark.requirement("R35", part=True)
def test_a_push_may_be_killed_at_any_change(tmp_path, source, figures):
    path, key = source
    remote = tmp_path / "remote"

    def push() -> None:
        open_store(path, remote, durability="full").push(key)

    points = [point for point in syscalls.trace(push).calls() if point.changes]
    complete, killed = set(whole_objects(remote, path)), 0
    for number, point in enumerate(points):
        shutil.rmtree(remote)
        killed += not syscalls.kill_at(push, point).finished
        names = whole_objects(remote, path)
        match, found = ask(open_store(tmp_path / f"two {number}", remote), ENDS[-1])
        assert found == (keys_of_chain(ENDS[: ENDS.index(match.tokens) + 1]) if match.tokens else ""), point
        assert match.tokens or not any("/marks/" in name for name in names), point
        open_store(path, remote).push(key)
        assert set(whole_objects(remote, path)) == complete, point
        assert ask(open_store(tmp_path / f"three {number}", remote), ENDS[-1])[1] == keys_of_chain(ENDS)
        for used in ("two", "three"):
            shutil.rmtree(tmp_path / f"{used} {number}")
    figures.append(f"kill points of a push: {killed}")
    assert killed >= 40


@pytest.mark.requirement("R14", part=True)
@pytest.mark.requirement("R35", part=True)
def test_a_fetch_may_be_killed_at_any_change(tmp_path, source, figures):
    path, key = source
    open_store(path, tmp_path / "remote").push(key)
    fresh = tmp_path / "fresh"
    put_chain(open_store(fresh, None), [70], seed=9)  # its index is there

    def fetch(store: Path) -> None:
        ask(open_store(store, tmp_path / "remote", durability="full"), ENDS[-1])

    shutil.copytree(fresh, tmp_path / "counted")
    points = [point for point in syscalls.trace(lambda: fetch(tmp_path / "counted")).calls() if point.changes]
    killed = 0
    for number, point in enumerate(points):
        two = tmp_path / f"two {number}"
        shutil.copytree(fresh, two)
        killed += not syscalls.kill_at(lambda two=two: fetch(two), point).finished
        store = open_store(two, tmp_path / "remote")
        for entry in store.entries():
            assert store.verify(entry.key) is None, point
        assert ask(store, ENDS[-1])[1] == keys_of_chain(ENDS), point
        store.gc(grace=0)
        assert not list((two / "tmp").iterdir()), point
        assert not list((two / "locks").iterdir()), point
        shutil.rmtree(two)
    figures.append(f"kill points of a fetch: {killed}")
    assert killed >= 20
