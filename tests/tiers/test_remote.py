"""Stores with one remote: what one has stored the other finds, checked, in few requests, whole or not at all."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from math import log2
from pathlib import Path
from typing import Any

import pytest
from remote_stores import (
    CountingTier,
    ask,
    bytes_of,
    digest,
    keys_of_chain,
    link,
    one_sample,
    open_store,
    put_chain,
    served_bytes,
)

from kvkeep import CacheStore
from kvkeep.errors import (
    EntryDamagedError,
    EntryNotFoundError,
    InvalidRequestError,
    MissingDependencyError,
)
from kvkeep.marks import entry_name
from kvkeep.remote import Pushed
from kvkeep.storage.entry_reader import EntryFile
from kvkeep.storage.locks import KeyLocks
from kvkeep.tiers import Part

LONG = 8000


@pytest.fixture
def tier() -> CountingTier:
    return CountingTier()


def tmp_is_empty(store: CacheStore) -> bool:
    return not list((store.path / "tmp").iterdir())


# --- what one has, the other finds ---


def test_what_one_store_pushed_another_is_served(tmp_path, tier, figures):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    made = one_sample(LONG)
    entry = one.put(made.draft)
    pushed = one.push(entry.key)
    assert (pushed.entries, pushed.nbytes) == (1, entry.nbytes)
    assert pushed.marks == sum(name.startswith("v1/marks/") for name in tier._objects)
    tier.asked.clear()
    assert served_bytes(two, made) == bytes_of(made)
    marks, entries = tier.count("marks"), tier.count("entries")
    figures.append(f"remote: {LONG} tokens found in {marks} requests, fetched in {entries}")
    assert marks <= 2 + log2(LONG / 256)
    assert entries == 1
    assert two.verify(entry.key) is None
    stored = [store.path / "entries" / entry.key[:2] / f"{entry.key}.safetensors" for store in (one, two)]
    assert stored[0].read_bytes() == stored[1].read_bytes()
    assert stored[1].stat().st_mode & 0o777 == 0o400


def test_from_then_on_it_is_an_ordinary_local_hit(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    made = one_sample()
    one.push(one.put(made.draft).key)
    assert served_bytes(two, made) == bytes_of(made)
    tier.asked.clear()
    assert served_bytes(two, made) == bytes_of(made)
    assert tier.asked == []
    assert served_bytes(CacheStore(tmp_path / "two", min_free=0), made) == bytes_of(made)


def test_what_nobody_has_takes_few_requests_and_then_none(tmp_path, tier):
    store = open_store(tmp_path / "one", tier)
    assert "empty" in served_bytes(store, one_sample(LONG))
    assert len(tier.asked) <= 3
    tier.asked.clear()
    assert "empty" in served_bytes(store, one_sample(LONG))
    assert tier.asked == []


def test_a_second_push_uploads_nothing(tmp_path, tier):
    one = open_store(tmp_path / "one", tier)
    key = one.put(one_sample().draft).key
    assert one.push(key) != Pushed()
    held = dict(tier._objects)
    assert one.push(key) == Pushed()
    assert tier._objects == held


def test_a_prompt_that_goes_on_otherwise_is_served_the_part_they_share(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    one.push(put_chain(one, [5000])[0].key)
    match, found = ask(two, 1300)
    assert match.tokens == 1300
    whole = link(0, 5000).content["layers.0.keys"]
    assert found == digest(whole[:, :1300].tobytes())


def test_more_of_what_is_here_in_part_is_fetched(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    put_chain(two, [600])
    one.push(put_chain(one, [3000])[0].key)
    assert ask(two, 3000)[0].tokens == 3000
    tier.asked.clear()
    assert ask(two, 3000, more=40)[0].tokens == 3000  # what could be more is not worth asking
    assert tier.asked == []


def test_fetching_by_key(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    made = one_sample()
    key = made.draft.meta.key
    assert two.fetch(key) is None
    one.push(one.put(made.draft).key)
    assert two.fetch(key) is None  # what was not there is not asked for again, for a while
    three = open_store(tmp_path / "three", tier)
    entry = three.fetch(key)
    assert entry is not None and entry.key == key.hash
    assert served_bytes(three, made) == bytes_of(made)


def test_other_models_and_namespaces_have_other_names(tmp_path, tier):
    one = open_store(tmp_path / "one", tier)
    other = open_store(tmp_path / "other", tier, namespace="other")
    made = one_sample()
    one.push(one.put(made.draft).key)
    names = set(tier._objects)
    assert isinstance(served_bytes(other, made), str)
    assert not names & {name for _, name in tier.asked if "marks" in name and name not in names}
    words = b"".join(name.encode() + content for name, (content, _) in tier._objects.items() if "marks" in name)
    assert str(made.draft.ids.tolist()[:3])[1:-1].encode() not in words


# --- chains ---


@pytest.mark.parametrize("asked", [700, 1500, 2600])
def test_all_links_of_a_chain_are_fetched(tmp_path, tier, asked):
    ends = [700, 1500, 2600]
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    entries = put_chain(one, ends)
    assert one.push(entries[-1].key).entries == 3
    match, found = ask(two, asked)
    assert match.tokens == asked
    assert found == keys_of_chain(ends[: ends.index(asked) + 1])


def test_links_that_are_here_are_not_fetched_again(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    entries = put_chain(one, [700, 1500])
    one.push(entries[0].key)
    assert ask(two, 700)[0].tokens == 700
    one.push(entries[1].key)
    two._remote._absent.__init__(30.0)
    tier.asked.clear()
    match, found = ask(two, 1500)
    assert (match.tokens, found) == (1500, keys_of_chain([700, 1500]))
    assert [name for _, name in tier.asked if "entries" in name] == [entry_name(entries[1].key)]


@pytest.mark.requirement("R14", part=True)
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_chain_with_a_link_that_is_gone_is_not_taken_over(tmp_path, tier, missing):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    entries = put_chain(one, [700, 1500, 2600])
    one.push(entries[-1].key)
    tier.delete(entry_name(entries[missing].key))
    match, found = ask(two, 2600)
    kept = [entry.end for entry in entries[:missing]]
    assert match.tokens == [0, *kept][-1]
    assert found == (keys_of_chain(kept) if match.tokens else "")
    assert [entry.end for entry in two.entries()] == kept
    assert tmp_is_empty(two)


def test_links_that_were_computed_otherwise_are_not_mixed(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    entries = put_chain(one, [700, 1500])
    one.push(entries[-1].key)
    mine = link(0, 700).draft
    sources = {name: _shifted(source) for name, source in mine.tensors.items()}
    two.put(type(mine)(mine.meta, mine.ids, mine.chain, sources))
    match, _ = ask(two, 1500)
    assert match.tokens == 700
    assert [entry.end for entry in two.entries()] == [700]
    # And the other way round: what continues another host's entry is not pushed as if it continued this one's.
    longer = put_chain(two, [700, 1700])[-1]
    with pytest.raises(EntryDamagedError, match="as another host has computed it"):
        two.push(longer.key)
    assert entry_name(longer.key) not in tier._objects


def _shifted(source: Any) -> Any:
    parts = [memoryview(bytes(byte ^ 1 for byte in part.cast("B"))) for part in source.parts]
    return type(source)(source.dtype, source.shape, parts)


# --- marks that are stale or lie ---


def test_an_entry_that_is_gone_is_a_miss_and_a_push_puts_its_marks_right(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    gone = put_chain(one, [2000])[0].key
    one.push(gone)
    tier.delete(entry_name(gone))
    assert ask(two, 2000)[0].tokens == 0
    three = open_store(tmp_path / "three", tier)
    shorter = put_chain(three, [1500])[0]
    assert three.push(shorter.key).marks > 1500 // 256
    assert ask(open_store(tmp_path / "four", tier), 1500)[0].tokens == 1500


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[" * 4000, b"x" * 100_000, b'{"links":[]}'])
def test_a_mark_that_is_none_is_passed_over(tmp_path, tier, content, caplog):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    made = one_sample()
    one.push(one.put(made.draft).key)
    marks = [name for name in tier._objects if "/marks/" in name]
    for name in marks:
        tier._objects[name] = content, 0
    assert isinstance(served_bytes(two, made), str)
    assert "is passed over" in caplog.text


def test_a_mark_that_names_another_entry_brings_nothing_wrong(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    first, second = one_sample(1000, 0), one_sample(1000, 1)
    for made in (first, second):
        one.push(one.put(made.draft).key)
    marks = {
        seed: [content for name, content in tier._objects.items() if "/marks/" in name and made.key in str(content)]
        for seed, made in ((0, first), (1, second))
    }
    for name, content in tier._objects.items():
        if content in marks[0]:
            tier._objects[name] = marks[1][0]
    reason = served_bytes(two, first)  # the other entry is fetched, and found to share nothing
    assert isinstance(reason, str)
    assert [entry.key for entry in two.entries()] == [second.key]


# --- bodies that are wrong ---


def _corrupt(tier: CountingTier, key: str, content: bytes) -> None:
    tier._objects[entry_name(key)] = content, -1


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(at: float) -> Any:
    def flip(data: bytes) -> bytes:
        place = int(len(data) * at)
        return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]

    return flip


@pytest.mark.requirement("R14", part=True)
@pytest.mark.requirement("R35", part=True)
@pytest.mark.parametrize(
    "spoil",
    [_half, _flipped(0.001), _flipped(0.01), _flipped(0.5), _flipped(0.99), lambda data: data + b"0", lambda data: b""],
    ids=["half", "header", "padding", "middle", "end", "longer", "empty"],
)
def test_a_wrong_body_is_a_miss_with_a_reason_and_is_never_here(tmp_path, tier, spoil, caplog):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    made = one_sample()
    key = one.put(made.draft).key
    one.push(key)
    _corrupt(tier, key, spoil(tier._objects[entry_name(key)][0]))
    reason = served_bytes(two, made)
    assert isinstance(reason, str) and reason.startswith(f"remote: the entry {key} there is damaged"), reason
    assert two.entries() == []
    assert not (two.path / "entries" / key[:2]).exists()
    assert tmp_is_empty(two)
    tier.asked.clear()
    assert served_bytes(two, made) == reason
    assert tier.count("entries") == 0  # it is not fetched again, for a while
    assert len([one for one in caplog.records if "was not taken over" in one.message]) == 1


def test_the_body_of_another_key(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    made, other = one_sample(1000, 0), one_sample(1000, 1)
    for each in (made, other):
        one.push(one.put(each.draft).key)
    _corrupt(tier, made.key, tier._objects[entry_name(other.key)][0])
    assert "the entry of another key" in served_bytes(two, made)
    assert two.entries() == []


def test_with_a_key_only_what_is_signed_is_taken_over(tmp_path, tier):
    key, other = bytes(range(32)), bytes(range(1, 33))
    plain, signed = open_store(tmp_path / "plain", tier), open_store(tmp_path / "signed", tier, key=key)
    made, own = one_sample(1000, 0), one_sample(1000, 1)
    plain.push(plain.put(made.draft).key)
    signed.push(signed.put(own.draft).key)
    reader = open_store(tmp_path / "reader", tier, key=key)
    assert "not trusted" in served_bytes(reader, made)
    assert served_bytes(reader, own) == bytes_of(own)
    stranger = open_store(tmp_path / "stranger", tier, key=other)
    assert "not trusted" in served_bytes(stranger, own)
    assert [entry.key for entry in reader.entries()] == [own.key]
    assert stranger.entries() == []


# --- a whole store around it ---


def test_what_does_not_fit_is_not_taken_over(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier, max_bytes=20_000)
    made = one_sample(LONG)
    one.push(one.put(made.draft).key)
    tier.asked.clear()
    assert "could not be stored here" in served_bytes(two, made)
    assert two.entries() == []
    assert tmp_is_empty(two)


def test_what_is_here_without_its_row_is_served(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    entries = put_chain(one, [700, 1500])
    one.push(entries[-1].key)
    two.put(one_sample(100, seed=1).draft)  # its index is there
    for entry in entries:  # as a process leaves it that was killed before it wrote the row
        name = f"entries/{entry.key[:2]}/{entry.key}.safetensors"
        (two.path / name).parent.mkdir(mode=0o700, exist_ok=True)
        (two.path / name).write_bytes((one.path / name).read_bytes())
    tier.asked.clear()
    match, found = ask(two, 1500)
    assert (match.tokens, found) == (1500, keys_of_chain([700, 1500]))
    assert tier.count("entries") == 0


def test_what_is_damaged_here_makes_way(tmp_path, tier):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    made = one_sample()
    key = one.put(made.draft).key
    one.push(key)
    path = two.path / "entries" / key[:2] / f"{key}.safetensors"
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"damaged")
    assert served_bytes(two, made) == bytes_of(made)


@pytest.mark.parametrize("durability", ["full", "batch", "none"])
def test_what_was_fetched_is_as_durable_as_what_is_put(tmp_path, tier, durability):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier, durability=durability)
    one.push(put_chain(one, [700, 1500])[-1].key)
    assert ask(two, 1500)[0].tokens == 1500
    two.flush()
    assert ask(CacheStore(tmp_path / "two", min_free=0), 1500)[1] == keys_of_chain([700, 1500])


def test_one_download_a_host_at_a_time(tmp_path):
    class Slow(CountingTier):
        def get(self, name: str, *args: Any, **settings: Any) -> Part | None:
            part = super().get(name, *args, **settings)
            if "entries" in name:
                time.sleep(0.3)
            return part

    tier = Slow()
    one = open_store(tmp_path / "one", tier)
    made = one_sample()
    one.push(one.put(made.draft).key)
    tier.asked.clear()
    stores = [open_store(tmp_path / "two", tier) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(lambda store: served_bytes(store, made), stores):
            assert found == bytes_of(made)
    assert tier.count("entries") == 1


def test_locks_are_an_optimisation(tmp_path, tier, monkeypatch):
    one, stores = open_store(tmp_path / "one", tier), [open_store(tmp_path / "two", tier) for _ in range(4)]
    made = one_sample()
    one.push(one.put(made.draft).key)
    stores[0].put(one_sample(100, seed=1).draft)
    monkeypatch.setattr(KeyLocks, "_acquire", lambda *_: (None, True))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda store: served_bytes(store, made), stores):
            assert found == bytes_of(made)
    assert [entry.tokens for entry in stores[0].entries()].count(made.draft.meta.end) == 1
    assert not list((tmp_path / "two").glob("quarantine/*"))


@pytest.mark.requirement("R14")
def test_nothing_is_visible_before_it_was_checked(tmp_path, tier, monkeypatch):
    one, two = open_store(tmp_path / "one", tier), open_store(tmp_path / "two", tier)
    entries = put_chain(one, [700, 1500])
    one.push(entries[-1].key)
    seen: list[list[str]] = []
    verify = EntryFile.verify_all

    def watched(file: EntryFile) -> None:
        seen.append([one.name for one in (two.path / "entries").rglob("*.safetensors")])
        verify(file)

    monkeypatch.setattr(EntryFile, "verify_all", watched)
    assert ask(two, 1500)[0].tokens == 1500
    assert seen == [[], []]


def test_a_directory_that_hosts_share(tmp_path):
    one, two = (open_store(tmp_path / name, tmp_path / "shared") for name in ("one", "two"))
    made = one_sample()
    one.push(one.put(made.draft).key)
    assert served_bytes(two, made) == bytes_of(made)


def _child(path: str, remote: str, queue: Any) -> None:
    made = one_sample()
    queue.put(served_bytes(open_store(Path(path), remote), made) == bytes_of(made))


def test_processes_share_one(tmp_path):
    one = open_store(tmp_path / "one", tmp_path / "shared")
    one.push(one.put(one_sample().draft).key)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_child, args=(tmp_path / "two", tmp_path / "shared", queue)) for _ in range(3)]
    for child in children:
        child.start()
    assert [queue.get(timeout=60) for _ in children] == [True] * 3
    for child in children:
        child.join()


# --- what is refused ---


def test_a_store_without_a_remote_pushes_nothing(tmp_path):
    store = CacheStore(tmp_path / "one", min_free=0)
    with pytest.raises(InvalidRequestError, match="remote="):
        store.push(store.put(one_sample().draft).key)


def test_a_readonly_store_has_no_remote(tmp_path, tier):
    open_store(tmp_path / "one", tier)
    with pytest.raises(InvalidRequestError, match="readonly"):
        open_store(tmp_path / "one", tier, readonly=True)


def test_what_is_not_here_is_not_pushed(tmp_path, tier):
    with pytest.raises(EntryNotFoundError):
        open_store(tmp_path / "one", tier).push("0" * 32)


def test_what_is_damaged_is_not_pushed(tmp_path, tier):
    one = open_store(tmp_path / "one", tier)
    key = one.put(one_sample().draft).key
    path = one.path / "entries" / key[:2] / f"{key}.safetensors"
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(EntryDamagedError):
        one.push(key)
    assert tier._objects == {}


def test_options_are_for_urls(tmp_path):
    with pytest.raises(InvalidRequestError, match="URL"):
        open_store(tmp_path / "one", tmp_path / "shared", remote_options={"region": "x"})


def test_without_obstore_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvkeep\[remote\]'"):
        open_store(tmp_path / "one", "s3://bucket/prefix")


def test_importing_and_opening_a_store_imports_no_obstore(tmp_path):
    code = f"import sys, kvkeep; kvkeep.CacheStore({str(tmp_path / 'one')!r}); print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
