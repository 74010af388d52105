"""The resident tier: what was preloaded is handed out from memory, and is in all else as it is on disk."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import matrix_layouts
import pytest
import torch
from tiny_media import build_seeing, seen
from tiny_models import VOCABULARY, build_tiny, build_toy_tokenizer
from tiny_pairs import build_pair, heard, spoken

from kvkeep import BoundStore, CacheStore, compat
from kvkeep.errors import EntryDamagedError, EntryNotFoundError, InvalidPromptError, InvalidRequestError
from kvkeep.inputs import Inputs
from kvkeep.layouts.roomy import RoomyLayer
from kvkeep.prompts import read_ids
from kvkeep.testing import syscalls

PREFIX, PROMPT, NEW = 40, 44, 4
TOLERANCE = 2e-4  # right is below it in float32, wrong is above 0.1
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
LAYOUTS = [name for name, layout in matrix_layouts.LAYOUTS.items() if layout.kept]
CACHE = compat.GENERATE_CACHE_ARGUMENT
is_shared: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cow_tensor")  # noqa: B009 - untyped


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def masked(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def outcome(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = generate(*args, **{**OPTIONS, **kwargs})
    return out.sequences, torch.stack(out.logits, dim=1)


def tensors_of(thing: Any) -> list[torch.Tensor]:
    """Every tensor that a cache or what it is made of holds, in one order."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [one for key in sorted(thing, key=str) for one in tensors_of(thing[key])]
    if isinstance(thing, list | tuple):
        return [one for item in thing for one in tensors_of(item)]
    if type(thing).__module__.startswith(("transformers.", "kvkeep.layouts")):
        return tensors_of({name: value for name, value in vars(thing).items() if name != "config"})
    return []


def held_by(store: CacheStore) -> list[torch.Tensor]:
    """The tensors that a store holds in memory: not to be touched."""
    return tensors_of([[held._rows, held._snapshots] for one in store.memory.entries() for held in one.layers.values()])


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def llama() -> Any:
    return build_tiny("llama")


@pytest.fixture
def kv(llama: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(llama)


@pytest.fixture
def untouched() -> Iterator[Callable[[CacheStore], None]]:
    """Watch what a store holds now: at the end its bytes must be the same."""
    watched: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def watch(store: CacheStore) -> None:
        held = held_by(store)
        assert held
        watched.append((held, [one.clone() for one in held]))

    yield watch
    for held, before in watched:
        assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))


# --- what is handed out ---


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_from_memory_as_from_disk_and_as_without_a_store(
    layout: str, implementation: str, tmp_path: Path, untouched: Callable[[CacheStore], None]
) -> None:
    model, ids = matrix_layouts.build(layout), random_ids(PROMPT)
    options: dict[str, Any] = {"cache_implementation": implementation} if implementation != "dynamic" else {}
    control = outcome(model.generate, **masked(ids), **options)
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    kv.warm(ids[:, :PREFIX])
    stored = outcome(kv.generate, ids, **options)
    from_disk = kv.last_report
    assert from_disk is not None
    assert not from_disk.resident
    (entry,) = kv.preload([ids])
    untouched(store)
    for hits in (1, 2):
        ours = outcome(kv.generate, ids, **options)
        assert torch.equal(ours[0], control[0])
        assert (ours[1] - control[1]).abs().max() < TOLERANCE
        assert torch.equal(ours[1], stored[1])
        report = kv.last_report
        assert report is not None
        assert report.reused_tokens == from_disk.reused_tokens
        assert report.reason == from_disk.reason
        assert report.key == from_disk.key
        assert report.resident == bool(report.reused_tokens)
        (resident,) = store.resident()
        assert resident.entry == entry
        if report.reused_tokens:
            assert resident.hits == hits
    assert resident.tokens == entry.tokens >= PREFIX - 1
    assert resident.device == "cpu"
    assert resident.nbytes == sum(one.untyped_storage().nbytes() for one in held_by(store))


def test_what_is_loaded_is_what_was_stored(layout: str, tmp_path: Path) -> None:
    model, ids = matrix_layouts.build(layout), random_ids(PROMPT)
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids[:, :PREFIX])
    plain = kv.load(ids)
    kv.preload([ids])
    match = kv.lookup(ids)
    assert match.resident
    resident = kv.load(ids)
    assert type(resident) is type(plain)
    assert [type(one) for one in compat.decoder_part(resident).layers] == [
        type(one) for one in compat.decoder_part(plain).layers
    ]
    ours, theirs = tensors_of(resident), tensors_of(plain)
    assert len(ours) >= 2
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def reset(cache: Any) -> None:
    cache.reset()


def reorder(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([0]))


def crop(cache: Any) -> None:
    cache.crop(-2 if CACHE == "cache" else 30)


def append(cache: Any) -> None:
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            new = torch.ones_like(layer.keys[:, :, :1])
            for _ in range(3):
                layer.update(new, new)


def scribble(cache: Any) -> None:
    for one in tensors_of(cache):
        one.fill_(7)


def move(cache: Any) -> None:
    copy.deepcopy(cache)
    for one in tensors_of(cache):
        if one.is_floating_point():
            one.detach().numpy()[...] = 5


CHANGES = [reset, reorder, crop, append, scribble, move]


def test_nobody_writes_into_it_through_what_was_handed_out(
    layout: str, tmp_path: Path, untouched: Callable[[CacheStore], None]
) -> None:
    model, ids = matrix_layouts.build(layout), random_ids(PROMPT)
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    kv.warm(ids[:, :PREFIX])
    kv.preload([ids])
    untouched(store)
    beside = kv.load(ids)
    before = [one.clone() for one in tensors_of(beside)]

    def with_room() -> Any:
        cache = compat.dynamic_cache(compat.text_config(model))
        assert kv._serving.fill(cache, Inputs(read_ids(ids)), guard=False, new_tokens=5).match.resident
        return cache

    def generated() -> Any:
        out = kv.generate(ids, **OPTIONS)
        return getattr(out, "cache", None) or getattr(out, "past_key_values", None)

    makers: list[Callable[[], Any]] = [lambda: kv.load(ids), generated]
    makers += [with_room] if compat.owned_cache(model) is None else []
    done = set()
    for make, change in itertools.product(makers, CHANGES):
        cache = make()
        if cache is not None:  # 4.57 returns none where it is a model's own
            with torch.no_grad(), suppress(AttributeError, ValueError, NotImplementedError, RuntimeError, TypeError):
                change(cache)
                done.add(change)
            scribble(cache)
    assert done >= {scribble, move}
    assert done == set(CHANGES) or layout != "full"
    again = kv.load(ids)
    for cache in (beside, again):
        assert all(torch.equal(one, other) for one, other in zip(tensors_of(cache), before, strict=True))


def test_it_is_shared_until_the_first_token_and_then_goes_on_in_place(llama: Any, kv: BoundStore) -> None:
    ids = random_ids(60)
    kv.warm(ids[:, :50])
    kv.preload([ids])
    cache: Any = compat.dynamic_cache(llama.config)
    assert kv._serving.fill(cache, Inputs(read_ids(ids)), guard=True, new_tokens=5).held == 49
    assert all(isinstance(layer, RoomyLayer) for layer in cache.layers)
    assert all(is_shared(rows) for layer in cache.layers for rows in (layer.keys, layer.values))
    layer, new = cache.layers[0], torch.ones((1, 2, 1, 16))
    with torch.no_grad():
        layer.update(new, new)
        place = layer.keys.data_ptr()
        layer.update(new, new)
    assert layer.keys.data_ptr() == place
    assert layer.keys.shape[2] == 51
    assert is_shared(cache.layers[1].keys)  # each is copied when it is reached
    assert all(is_shared(one) for one in held_by(kv.store))


def test_eight_threads_generate_what_eight_runs_give(tmp_path: Path, untouched: Callable[[CacheStore], None]) -> None:
    model, prefix = build_tiny("gemma3"), random_ids(PREFIX)
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    kv.warm(prefix)
    prompts = [torch.cat([prefix, random_ids(4 + number, number + 2)], dim=1) for number in range(8)]
    kv.preload([prefix])
    untouched(store)
    alone = [outcome(kv.generate, ids) for ids in prompts]
    start = threading.Barrier(8)

    def work(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        start.wait(60)
        return [outcome(kv.generate, prompts[number]) for _ in range(3)]

    with ThreadPoolExecutor(8) as pool:
        for given, right in zip(pool.map(work, range(8)), alone, strict=True):
            for sequences, logits in given:
                assert torch.equal(sequences, right[0])
                assert torch.equal(logits, right[1])
    (resident,) = store.resident()
    assert resident.hits == 8 * 4


# --- what of a prompt ---


def test_it_is_trimmed_as_on_disk_and_a_longer_prefix_on_disk_is_preferred(kv: BoundStore) -> None:
    ids, other = random_ids(PROMPT), random_ids(PROMPT, 9)
    short, long = kv.warm(ids[:, :20]), kv.warm(ids[:, :PREFIX])
    parting = torch.cat([ids[:, :12], other], dim=1)
    kv.preload([short.key])
    (held,) = kv.store.resident()
    assert held.entry == short
    for prompt, tokens, key, resident, reason in (
        (ids, PREFIX, long.key, False, None),
        (ids[:, :21], 20, short.key, True, None),
        (ids[:, :10], 9, short.key, True, None),
        (parting, 12, short.key, True, "diverged: the stored prefix goes on otherwise at token 12"),
        (other, 0, None, False, "prefix: no stored prefix starts like this prompt"),
    ):
        match = kv.lookup(prompt)
        assert (match.tokens, match.entry and match.entry.key, match.resident) == (tokens, key, resident)
        assert match.reason == reason
        control = kv._live.model().generate(**masked(prompt), **OPTIONS)
        assert torch.equal(kv.generate(prompt, **OPTIONS).sequences, control.sequences)
        assert kv.last_report is not None
        assert kv.last_report.resident == resident
        assert kv.last_report.reused_tokens == max(0, tokens - 1)
    kv.preload([long.key])
    assert [one.tokens for one in kv.store.resident()] == [20, PREFIX]
    assert kv.lookup(ids).resident


def test_a_window_that_has_moved_on_is_no_shorter_prompts(tmp_path: Path) -> None:
    model, ids = build_tiny("mistral"), random_ids(PROMPT)
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids[:, :PREFIX])
    shorter = torch.cat([ids[:, :15], random_ids(10, 3)], dim=1)
    on_disk = kv.lookup(shorter)
    kv.preload([ids])
    assert kv.lookup(shorter) == on_disk
    assert on_disk.tokens == 0
    assert "trim" in str(on_disk.reason)
    assert kv.lookup(ids).resident


def test_lines_of_a_batch_come_from_it(llama: Any, kv: BoundStore) -> None:
    rows = [random_ids(PROMPT), random_ids(PROMPT, 2)]
    for row in rows:
        kv.warm(row[:, :PREFIX])
    batch = masked(torch.cat(rows))
    control = outcome(llama.generate, **batch)
    kv.preload(rows[:1])
    for resident in (False, True):
        ours = outcome(kv.generate, batch)
        assert torch.equal(ours[0], control[0])
        assert (ours[1] - control[1]).abs().max() < TOLERANCE
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == 2 * (PREFIX - 1)
        assert kv.last_report.resident == resident
        kv.preload(rows)
    beams = {"num_beams": 2, "num_return_sequences": 2}
    assert torch.equal(
        outcome(kv.generate, rows[0], **beams)[0], outcome(llama.generate, **masked(rows[0]), **beams)[0]
    )


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static", "quantized"])
def test_caches_of_other_kinds_are_filled_from_it(llama: Any, kv: BoundStore, kind: str) -> None:
    ids = random_ids(PROMPT)
    kv.warm(ids[:, :PREFIX])
    options: dict[str, Any] = {"cache_implementation": kind}
    if kind == "offloaded_static":
        options["max_cache_len"] = 64
    if kind == "quantized" and "fp8" not in compat.QUANTIZED_LAYERS.values():
        options["cache_config"] = {"backend": "hqq", "axis_key": 1, "axis_value": 1, "q_group_size": 16}
    elif kind == "quantized":
        options["cache_config"] = {"backend": "fp8"}
    try:
        plain = kv.load(ids, **options)
    except InvalidRequestError:
        options["cache_config"] = {"backend": "quanto"}
        plain = kv.load(ids, **options)
    kv.preload([ids])
    ours, theirs = tensors_of(kv.load(ids, **options)), tensors_of(plain)
    assert ours
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert kv.store.resident()[0].hits == 1


def test_an_encoder_decoder_model_hears_what_it_did(tmp_path: Path, untouched: Callable[[CacheStore], None]) -> None:
    model = build_pair("bart")
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    prompt = {**heard("bart"), "decoder_input_ids": spoken(7)}
    kv.warm({**heard("bart"), "decoder_input_ids": spoken(5)})
    control = outcome(model.generate, **prompt)
    disk = outcome(kv.generate, dict(prompt))
    from_disk = kv.last_report
    kv.preload([dict(prompt)])
    untouched(store)
    ours = outcome(kv.generate, dict(prompt))
    assert torch.equal(ours[0], control[0])
    assert torch.equal(ours[1], disk[1])
    report = kv.last_report
    assert report is not None
    assert from_disk is not None
    assert (report.reused_tokens, report.resident) == (from_disk.reused_tokens, True)
    assert report.reused_tokens > 20
    loaded = kv.load(dict(prompt))
    assert loaded is not None
    loaded.reset()
    other = {**heard("bart", 2), "decoder_input_ids": spoken(7)}
    assert not kv.lookup(other).resident


def test_pictures_are_compared_as_ids_are(tmp_path: Path) -> None:
    model = build_seeing("gemma3")
    kv = CacheStore(tmp_path / "store").bind(model)
    prompt, other = seen("gemma3", [1, 2]), seen("gemma3", [1, 4])
    controls = [outcome(model.generate, **one) for one in (prompt, other)]
    kv.warm(prompt)
    matches = [kv.lookup(one) for one in (prompt, other)]
    assert matches[0].tokens > matches[1].tokens > 0
    kv.preload([prompt])
    for one, control, match in zip((prompt, other), controls, matches, strict=True):
        assert kv.lookup(one) == replace(match, resident=True)
        ours = outcome(kv.generate, dict(one))
        assert torch.equal(ours[0], control[0])
        assert (ours[1] - control[1]).abs().max() < 5e-5 * control[1].abs().max()
        assert kv.last_report is not None
        assert kv.last_report.resident


def test_prepare_and_an_attached_generate_take_it(llama: Any, kv: BoundStore) -> None:
    ids = random_ids(PROMPT)
    kv.warm(ids[:, :PREFIX])
    kv.preload([ids])
    control = outcome(llama.generate, **masked(ids))
    ours = outcome(llama.generate, **kv.prepare(ids))
    with kv.attached():
        attached = outcome(llama.generate, **masked(ids))
    for sequences, logits in (ours, attached):
        assert torch.equal(sequences, control[0])
        assert (logits - control[1]).abs().max() < TOLERANCE
    assert kv.store.resident()[0].hits == 2


# --- no I/O ---


def test_a_hit_needs_no_file(kv: BoundStore) -> None:
    ids = random_ids(PROMPT)
    entry = kv.warm(ids[:, :PREFIX])
    kv.preload([entry.key])
    right = outcome(kv.generate, ids)
    (path,) = kv.store.path.glob(f"entries/*/{entry.key}*")
    path.unlink()  # without a word to the index
    ours = outcome(kv.generate, ids)
    assert torch.equal(ours[1], right[1])
    assert kv.last_report is not None
    assert kv.last_report.resident


@pytest.mark.skipif(not syscalls.is_possible(), reason="needs strace, and leave to trace a child process")
def test_a_hit_makes_no_call_for_an_entry(kv: BoundStore) -> None:
    """In a forked child, which has what its parent held; beside it the same hit from disk, which is seen."""
    ids = random_ids(PROMPT)
    entry = kv.warm(ids[:, :PREFIX])
    names = ["open", "openat", "stat", "newfstatat", "statx", "lstat", "access", "faccessat", "faccessat2", "readlink"]
    reads = ["read", "pread64", "preadv", "preadv2", "readv", "mmap"]

    def hits() -> None:
        for _ in range(2):
            assert kv.load(ids) is not None

    from_disk = syscalls.trace(hits, names=[*names, *reads])
    assert from_disk.failure is None, from_disk.failure
    assert any(entry.key in line for line in from_disk.lines)
    kv.preload([entry.key])
    from_memory = syscalls.trace(hits, names=[*names, *reads])
    assert from_memory.failure is None, from_memory.failure
    assert not [line for line in from_memory.lines if entry.key in line or "entries" in line]
    assert from_memory.count("preadv", "preadv2") == 0 < from_disk.count("preadv", "preadv2")


# --- who gets it, and how long ---


def test_another_model_does_not_get_it_and_another_bind_does(llama: Any, kv: BoundStore, tmp_path: Path) -> None:
    ids = random_ids(PROMPT)
    kv.warm(ids[:, :PREFIX])
    kv.preload([ids])
    others = build_tiny("llama", seed=1), build_tiny("llama")
    other, same = (kv.store.bind(model) for model in others)
    assert other.lookup(ids).tokens == 0
    assert same.lookup(ids).resident
    assert not CacheStore(kv.store.path).bind(llama).lookup(ids).resident
    assert CacheStore(kv.store.path, namespace="other").bind(llama).lookup(ids).tokens == 0
    with torch.no_grad():
        llama.lm_head.weight.mul_(1.5)
    control = outcome(llama.generate, **masked(ids))
    assert torch.equal(outcome(kv.generate, ids)[0], control[0])
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.resident) == (0, False)
    assert same.lookup(ids).resident
    strict = CacheStore(tmp_path / "strict", strict_identity=True).bind(others[1])
    strict.warm(ids[:, :PREFIX])
    strict.preload([ids])
    assert strict.lookup(ids).resident
    others[1].set_attn_implementation("eager")
    assert "attention" in str(strict.lookup(ids).reason)


@pytest.mark.parametrize("who", ["this", "another", "namespace", "quarantine"])
def test_what_is_removed_is_let_go(llama: Any, kv: BoundStore, who: str) -> None:
    ids = random_ids(PROMPT)
    entry = kv.warm(ids[:, :PREFIX])
    kv.preload([ids])
    if who == "this":
        kv.store.remove(entry.key)
        assert not kv.store.memory._entries  # at once
    elif who == "namespace":
        kv.store.remove_namespace()
        assert not kv.store.memory._entries
    elif who == "another":
        CacheStore(kv.store.path).remove(entry.key)
    else:
        (path,) = kv.store.path.glob(f"entries/*/{entry.key}*")
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        assert CacheStore(kv.store.path).verify(entry.key) is not None
    assert kv.lookup(ids).tokens == 0
    assert kv.load(ids) is None
    assert kv.store.resident() == []
    assert not kv.store.memory._entries
    kv.warm(ids[:, :PREFIX])
    assert not kv.lookup(ids).resident


@pytest.mark.parametrize("readonly", [False, True])
def test_what_the_model_refutes_is_let_go(tmp_path: Path, readonly: bool) -> None:
    model, ids = build_tiny("llama"), random_ids(PROMPT)
    kv = CacheStore(tmp_path / "store").bind(model)
    control = outcome(model.generate, **masked(ids))
    wrong = compat.dynamic_cache(model.config)
    with torch.no_grad():
        model(ids[:, :PREFIX].flip(1), **{compat.forward_cache_argument(model): wrong})
    kv.save(wrong, ids[:, :PREFIX], guard=False)
    if readonly:
        kv = CacheStore(kv.store.path, readonly=True).bind(model)
    kv.preload([ids])
    ours = outcome(kv.generate, ids)
    assert torch.equal(ours[0], control[0])
    assert (ours[1] - control[1]).abs().max() < TOLERANCE
    assert kv.last_report is not None
    assert "guard" in str(kv.last_report.reason)
    assert not kv.last_report.resident
    assert kv.store.resident() == []
    assert kv.lookup(ids).tokens == 0


# --- the budget ---


def test_the_budget_is_kept_to_the_byte_and_the_unused_goes_first(kv: BoundStore) -> None:
    prompts = [random_ids(PROMPT, seed) for seed in range(1, 5)]
    entries = [kv.warm(ids[:, :PREFIX], name=f"number-{n}") for n, ids in enumerate(prompts)]
    size = 3 * 2 * 2 * PREFIX * 16 * 4  # layers, keys and values, heads, tokens, dim, bytes
    assert kv.preload([f"number-{n}" for n in range(3)], max_bytes=3 * size) == entries[:3]
    assert [one.nbytes for one in kv.store.resident()] == [size] * 3
    kv.load(prompts[0])
    assert kv.preload([prompts[3]]) == [entries[3]]  # the budget stays
    assert [one.entry.key for one in kv.store.resident()] == [entries[n].key for n in (2, 0, 3)]
    assert [one.hits for one in kv.store.resident()] == [0, 1, 0]
    assert not kv.lookup(prompts[1]).resident
    kv.preload([prompts[2]], max_bytes=str(3 * size - 1))
    assert [one.entry.key for one in kv.store.resident()] == [entries[n].key for n in (3, 2)]
    with pytest.raises(InvalidRequestError, match="max_bytes"):
        kv.preload([prompts[1]], max_bytes=size - 1)
    assert kv.store.resident() == []
    assert kv.preload([entries[0].key, entries[1].key], max_bytes=size) == [entries[1]]
    with pytest.raises(InvalidRequestError, match="max_bytes"):
        kv.preload([prompts[1]], max_bytes=-1)
    bytes_held = sum(one.untyped_storage().nbytes() for one in held_by(kv.store))
    assert bytes_held == size == sum(one.nbytes for one in kv.store.resident())


def test_the_size_is_known_before_anything_is_read(layout: str, tmp_path: Path) -> None:
    model, ids = matrix_layouts.build(layout), random_ids(PROMPT)
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids[:, :20])
    kv.warm(ids[:, :PREFIX])
    kv.preload([ids])
    exact = kv.store.resident()[0].nbytes
    assert kv.preload([ids], max_bytes=exact) != []
    with pytest.raises(InvalidRequestError, match=f"takes {exact:,} bytes"):
        kv.preload([ids], max_bytes=exact - 1)


# --- what is asked for ---


def test_names_keys_texts_and_messages(tmp_path: Path) -> None:
    tokenizer = build_toy_tokenizer()
    models = build_tiny("llama"), build_tiny("llama", seed=1)
    kv = CacheStore(tmp_path / "store").bind(models[0], tokenizer)
    messages = [{"role": "system", "content": "You are terse, and you answer in one word at a time."}]
    text = "It was a dark and stormy night; the rain fell in torrents."
    chat, story = kv.warm(messages, name="chat"), kv.warm(text)
    assert kv.preload("chat") == [kv.store.entry("chat")]
    kv.store.memory.drop(chat.key)
    assert [one.key for one in kv.preload([messages, text, story.key])] == [chat.key, story.key]
    assert {one.entry.key for one in kv.store.resident()} == {chat.key, story.key}
    with pytest.raises(EntryNotFoundError, match="'chats' is no name or key"):
        kv.preload(["chats"])
    with pytest.raises(InvalidPromptError, match="in a list"):
        kv.preload(messages)
    with pytest.raises(InvalidPromptError, match="in a list"):
        kv.preload([1, 2, 3])
    with pytest.raises(InvalidRequestError, match="device"):
        kv.preload([text], device="warp")
    with pytest.raises(InvalidRequestError, match="device"):
        kv.preload([text], device="meta")
    assert kv.preload([]) == []
    other = kv.store.bind(models[1], tokenizer)
    with pytest.raises(EntryNotFoundError, match="not stored for this model"):
        other.preload(["chat"])
    with pytest.raises(EntryNotFoundError, match="warm it first"):
        other.preload([text])
    with pytest.raises(EntryNotFoundError, match=r"'chats' is no name or key of an entry, .* needs a tokenizer"):
        kv.store.bind(models[0]).preload(["chats"])


def test_a_damaged_entry_is_set_aside_and_not_held(kv: BoundStore) -> None:
    ids = random_ids(PROMPT)
    entry = kv.warm(ids[:, :PREFIX])
    (path,) = kv.store.path.glob(f"entries/*/{entry.key}*")
    content = bytearray(path.read_bytes())
    content[-5000] ^= 0x40
    path.chmod(0o600)
    path.write_bytes(content)
    with pytest.raises(EntryDamagedError):
        kv.preload([entry.key])
    assert kv.store.resident() == []
    with pytest.raises(EntryNotFoundError):
        kv.preload([entry.key])
    with pytest.raises(InvalidPromptError):
        kv.preload([[-1]])
    gone = kv.warm(ids[:, :PREFIX])
    next(kv.store.path.glob(f"entries/*/{gone.key}*")).unlink()
    for _ in range(2):
        with pytest.raises(EntryNotFoundError):
            kv.preload([gone.key])
    with pytest.raises(EntryNotFoundError, match="gone"):
        kv.store.memory.load(gone.key, lambda file: {})


def test_entries_that_continue_others_are_held_whole(llama: Any, kv: BoundStore) -> None:
    ids = random_ids(600)
    kv.warm(ids[:, :300])
    entry = kv.warm(ids[:, :590])
    assert entry.parent is not None
    plain = kv.load(ids)
    kv.preload([ids])
    (resident,) = kv.store.resident()
    assert (resident.entry.key, resident.nbytes) == (entry.key, 3 * 2 * 2 * 590 * 16 * 4)
    for path in kv.store.path.glob("entries/*/*.safetensors"):
        path.unlink()
    ours = kv.load(ids)
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(ours), tensors_of(plain), strict=True))
    assert torch.equal(outcome(kv.generate, ids)[0], outcome(llama.generate, **masked(ids))[0])
    kv.store.memory.drop(entry.parent)  # with what continues it
    assert kv.store.resident() == []
