"""A remote that fails in every way it can: no error for callers, nothing wrong served, and an outage costs one wait."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from remote_stores import ask, bytes_of, keys_of_chain, one_sample, open_store, put_chain, served_bytes
from s3_server import BUCKET, S3Server, within

from kvkeep import CacheStore
from kvkeep.breaker import LONGEST, PAUSE, Breaker, Remembered
from kvkeep.errors import InvalidRequestError, TierError
from kvkeep.marks import entry_name
from kvkeep.tiers import open_tier

pytest.importorskip("obstore")

URL = f"s3://{BUCKET}/prefix"
FAULTS = ("hang", "reset", "503", "cut", "short", "flip", "other")
FAILS = ("hang", "reset", "503", "cut")


def stores(tmp_path: Path, s3: S3Server) -> tuple[CacheStore, CacheStore]:
    one, two = (open_store(tmp_path / name, URL, remote_options=s3.options) for name in ("one", "two"))
    return one, two


def unbroken(store: CacheStore) -> CacheStore:
    """The store as it would be in another process."""
    assert store._remote is not None
    return open_store(store.path, store._remote.tier)


@pytest.mark.requirement("R35")
@pytest.mark.parametrize("where", ["marks", "entries"])
@pytest.mark.parametrize("kind", FAULTS)
def test_whatever_goes_wrong_is_a_miss_or_the_right_answer(tmp_path, s3, kind, where):
    one, two = stores(tmp_path, s3)
    made, other = one_sample(1000, 0), one_sample(1000, 1)
    for each in (made, other):
        one.push(one.put(each.draft).key)
    s3.fault = lambda method, name: kind if f"/{where}/" in name else None
    s3.requests.clear()
    _, found = within(4, lambda: served_bytes(two, made))
    if found != bytes_of(made):
        assert isinstance(found, str)
        assert found.startswith("remote: ") or where == "marks"
        assert made.key not in [entry.key for entry in two.entries()]
        assert not (two.path / "entries" / made.key[:2] / f"{made.key}.safetensors").exists()
    assert not list((two.path / "tmp").iterdir())
    asked = len(s3.requests)
    if kind in FAILS:
        assert found != bytes_of(made)
        assert asked == (1 if where == "marks" else asked)
        within(0.2, lambda: served_bytes(two, made))
        assert len(s3.requests) == asked  # it is left alone for a while
    s3.fault = lambda method, name: None
    assert served_bytes(unbroken(two), made) == bytes_of(made)


@pytest.mark.requirement("R35")
@pytest.mark.parametrize("kind", ["hang", "nobody"])
def test_an_outage_costs_one_short_wait_and_then_nothing(tmp_path, s3, kind, figures):
    one, two = stores(tmp_path, s3)
    made = one_sample()
    two.put(made.draft)
    assert served_bytes(two, made) == bytes_of(made)
    if kind == "hang":
        s3.fault = lambda method, name: "hang"
    else:
        s3.server_close()
    took, reason = within(2, lambda: served_bytes(two, one_sample(2000, 1)))
    assert isinstance(reason, str) and reason.startswith("remote: ")
    after, reason = within(0.2, lambda: served_bytes(two, one_sample(2000, 2)))
    assert isinstance(reason, str) and "left alone" in reason
    assert served_bytes(two, made) == bytes_of(made)  # what is here is served all the same
    figures.append(f"remote: an outage ({kind}) costs {1e3 * took:.0f} ms, then {1e3 * after:.1f} ms")
    with pytest.raises(TierError):
        one.push(one.put(made.draft).key)


def test_a_chain_that_breaks_off_leaves_nothing(tmp_path, s3):
    one, two = stores(tmp_path, s3)
    entries = put_chain(one, [700, 1500, 2600])
    one.push(entries[-1].key)
    root = entry_name(entries[0].key)
    s3.fault = lambda method, name: "cut" if name.endswith(root) else None
    assert ask(two, 2600)[0].tokens == 0
    assert two.entries() == []
    s3.fault = lambda method, name: None
    match, found = ask(unbroken(two), 2600)
    assert (match.tokens, found) == (2600, keys_of_chain([700, 1500, 2600]))


def test_parts_of_two_versions_are_not_mixed(tmp_path, s3, monkeypatch):
    monkeypatch.setattr("kvkeep.downloads.PART", 16_384)
    one, two = stores(tmp_path, s3)
    made = one_sample(8000)
    one.push(one.put(made.draft).key)
    name = next(name for name in s3.objects if name.endswith(".safetensors"))
    other = bytearray(s3.objects[name])
    other[-5000] ^= 1  # what another host may have stored there, where a server replaces objects
    asked = 0

    def replace_midway(method: str, asked_name: str) -> None:
        nonlocal asked
        asked += asked_name == name
        if asked == 3:
            s3.objects[name] = bytes(other)

    s3.fault = replace_midway
    reason = served_bytes(two, made)
    assert isinstance(reason, str) and "replaced while it was fetched" in reason
    assert two.entries() == []


@pytest.mark.parametrize("conditions", [True, False])
def test_entries_come_in_parts(tmp_path, s3, monkeypatch, conditions):
    monkeypatch.setattr("kvkeep.downloads.PART", 16_384)
    s3.conditions = conditions
    one, two = stores(tmp_path, s3)
    made = one_sample(8000)
    entry = one.put(made.draft)
    one.push(entry.key)
    s3.requests.clear()
    assert served_bytes(two, made) == bytes_of(made)
    assert sum("/entries/" in name for _, name in s3.requests) == -(-entry.nbytes // 16_384)


def test_a_server_without_conditions_keeps_objects_whole(tmp_path, s3):
    s3.conditions = False
    one, two = stores(tmp_path, s3)
    made = one_sample()
    entry = one.put(made.draft)
    pushed = one.push(entry.key)
    assert pushed.entries == 1
    assert one.push(entry.key).entries == 0
    assert served_bytes(two, made) == bytes_of(made)


def _child(store: CacheStore, queue: Any) -> None:
    began = time.monotonic()
    queue.put((served_bytes(store, one_sample(1000, 1)), time.monotonic() - began))


def test_a_forked_child_does_without(tmp_path, s3):
    one, two = stores(tmp_path, s3)
    made = one_sample()
    one.push(one.put(made.draft).key)
    assert served_bytes(two, made) == bytes_of(made)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(two, queue))
    child.start()
    reason, took = queue.get(timeout=60)
    child.join()
    assert "forked" in reason
    assert took < 1


def test_what_obstore_does_not_take_is_refused(tmp_path):
    for url, options in (("foo://bucket/x", {}), ("s3://bucket/x", {"nonsense": 1}), ("s3://bucket", {"config": 3})):
        with pytest.raises(InvalidRequestError, match="obstore does not take"):
            open_store(tmp_path / "one", url, remote_options=options)


def test_secrets_are_in_no_message(tmp_path, s3, caplog):
    s3.fault = lambda method, name: "503"
    _, two = stores(tmp_path, s3)
    reason = served_bytes(two, one_sample())
    with pytest.raises(TierError) as raised:
        open_tier(URL, s3.options).put_if_absent("a", b"1")
    for text in (reason, str(raised.value), caplog.text, repr(open_tier(URL, s3.options))):
        assert "secret" not in text


# --- the breaker and the memory ---


def test_a_breaker_lets_one_try_at_a_time():
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    assert breaker.allows() and breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    now = PAUSE - 0.1
    assert not breaker.allows()
    now = PAUSE + 0.1
    assert breaker.allows()
    assert not breaker.allows()  # another one is trying
    breaker.failed()
    now += PAUSE + 1
    assert not breaker.allows()  # twice as long now
    now += PAUSE
    assert breaker.allows()
    breaker.worked()
    assert breaker.allows() and breaker.allows()
    for _ in range(50):
        breaker.failed()
    now += LONGEST - 1
    assert not breaker.allows()
    now += 2
    assert breaker.allows()


def test_what_is_remembered_ends():
    now = 0.0
    memory: Remembered[int] = Remembered(10, limit=2, clock=lambda: now)
    memory.set("a", 1)
    assert memory.get("a") == 1 and memory.get("b") is None
    now = 11
    assert memory.get("a") is None
    for number, name in enumerate("xyz"):
        memory.set(name, number)
    assert [memory.get(name) for name in "xyz"] == [None, 1, 2]
    memory.forget("y")
    assert memory.get("y") is None
