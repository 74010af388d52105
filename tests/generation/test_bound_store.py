"""warm, lookup, load and save: what is stored, for whom, and what becomes of odd requests and damaged entries."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import forking, run_elsewhere
from tiny_models import VOCABULARY, build_tiny
from transformers import DynamicCache, StaticCache

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore
from kvkeep.errors import (
    CacheMismatchError,
    EntryNotFoundError,
    InvalidPromptError,
    InvalidRequestError,
    StoreNotFoundError,
    StoreReadOnlyError,
    UnsupportedCacheError,
    UnsupportedRequestError,
)

PREFIX = 300
ASKED = 20 + 1
"""Tokens by which a model is asked, once, whether it goes on from a cache as it should, and then from this one."""


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny("llama")


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model)


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def entry_files(store: CacheStore) -> list[Path]:
    return sorted((store.path / "entries").glob("*/*.safetensors"))


def forwards(model: Any, work: Any) -> int:
    """How many tokens a piece of work feeds to the model."""
    fed: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _m, inputs, _o: fed.append(inputs[0].numel()))
    try:
        work()
    finally:
        handle.remove()
    return sum(fed)


# --- warm ---


def test_warm_prefills_once_ever(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    steps: list[tuple[int, int]] = []
    fed = forwards(model, lambda: kv.warm(ids, progress=lambda done, total: steps.append((done, total))))
    assert fed == PREFIX + ASKED
    assert steps == [(PREFIX, PREFIX)]
    first = kv.warm(ids)
    assert (first.tokens, first.start, first.end, first.parent) == (PREFIX, 0, PREFIX, None)
    assert first.nbytes == entry_files(kv.store)[0].stat().st_size
    again = CacheStore(kv.store.path).bind(model)
    assert forwards(model, lambda: again.warm(ids.tolist()[0], progress=lambda *_: pytest.fail("prefilled"))) == 0
    assert again.warm(ids) == first
    assert len(entry_files(kv.store)) == 1
    assert (kv.store.journal.totals().prefills, kv.store.journal.totals().prefilled_tokens) == (1, PREFIX)


def test_warm_restores_the_training_mode_and_prefills_without_dropout(tmp_path: Path) -> None:
    model = build_tiny("llama", attention_dropout=0.5)
    kv = CacheStore(tmp_path / "store").bind(model)
    model.train()
    model.lm_head.eval()
    kv.warm(random_ids(40))
    assert model.training
    assert model.model.layers[0].self_attn.training
    assert not model.lm_head.training
    model.eval()
    ids = random_ids(44)
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 39


def test_names_pins_and_their_rules(kv: BoundStore) -> None:
    entry = kv.warm(random_ids(20), name="greeting", pin=True, ttl=3600)
    assert entry.names == ("greeting",)
    assert kv.store.entry("greeting").key == entry.key
    assert kv.store.entry(entry.key[:8]).names == ("greeting",)
    other = kv.warm(random_ids(21), name="greeting")  # a name points at the latest
    assert kv.store.entry("greeting").key == other.key
    with pytest.raises(InvalidRequestError, match="name="):
        kv.warm(random_ids(20), pin=True)
    with pytest.raises(EntryNotFoundError, match="'nothing'"):
        kv.store.entry("nothing")


def test_removing_an_entry_removes_its_names(kv: BoundStore) -> None:
    entry = kv.warm(random_ids(20), name="greeting")
    assert kv.store.remove(entry.key)
    assert not kv.store.remove(entry.key)
    assert kv.store.entries() == []
    assert kv.lookup(random_ids(30)).reason == "empty: nothing is stored"
    with pytest.raises(EntryNotFoundError):
        kv.store.entry("greeting")


def _warm_in_child(path: str, barrier: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    model = build_tiny("llama")
    kv = CacheStore(path).bind(model)
    barrier.wait(120)
    fed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _m, inputs, _o: fed.append(inputs[0].numel()))
    entry = kv.warm(random_ids(1500))
    queue.put((sum(fed), entry.key, kv.lookup(random_ids(1500)).tokens))


@pytest.mark.requirement("R20", part=True)
def test_several_processes_prefill_one_prefix_once(tmp_path: Path) -> None:
    context = forking()
    barrier, queue = context.Barrier(4), context.Queue()
    arguments = (str(tmp_path / "store"), barrier, queue)
    children = [context.Process(target=_warm_in_child, args=arguments) for _ in range(4)]
    for child in children:
        child.start()
    results = [queue.get(timeout=180) for _ in children]
    for child in children:
        child.join(60)
    assert sorted(fed for fed, _, _ in results) == [0, 0, 0, 1500 + ASKED]
    assert len({key for _, key, _ in results}) == 1
    assert {tokens for _, _, tokens in results} == {1499}


def _load_in_child(path: str, barrier: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    model = build_tiny("llama")
    kv = CacheStore(path, readonly=os.getpid() % 2 == 0).bind(model)
    barrier.wait(180)
    cache = kv.load(random_ids(PREFIX + 1))
    queue.put([float(layer.keys.double().sum()) for layer in cache.layers])


def test_eight_processes_load_one_entry_at_once(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    kv.warm(ids)
    sums = [float(layer.keys.double().sum()) for layer in kv.load(random_ids(PREFIX + 1)).layers]
    context = forking()
    barrier, queue = context.Barrier(8), context.Queue()
    children = [context.Process(target=_load_in_child, args=(str(kv.store.path), barrier, queue)) for _ in range(8)]
    for child in children:
        child.start()
    results = [queue.get(timeout=240) for _ in children]
    for child in children:
        child.join(60)
    assert results == [sums] * 8


# --- who may have it ---


ROPE = "another config (model.rotary_emb.inv_freq)"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.model.layers[1].mlp.up_proj.weight.data.mul_(1.01), "weights: other weights"),
        (lambda model: model.to(torch.bfloat16), f"dtypes: other dtypes, {ROPE}, other weights"),
        (lambda model: model.model.rotary_emb.inv_freq.mul_(0.5), f"config: {ROPE}"),
        (lambda model: setattr(model.config, "rms_norm_eps", 1e-3), "config: another config (rms_norm_eps)"),
    ],
    ids=["one weight", "dtype", "rope", "config field"],
)
def test_another_model_is_a_miss_that_names_the_part(kv: BoundStore, change: Any, reason: str) -> None:
    ids = random_ids(PREFIX)
    kv.warm(ids)
    other = build_tiny("llama")
    assert CacheStore(kv.store.path).bind(other).lookup(ids).tokens == PREFIX - 1  # the same content is a hit
    change(other)
    match = CacheStore(kv.store.path).bind(other).lookup(ids)
    assert match.tokens == 0
    assert match.reason == reason.replace(": ", ": this prefix is stored, but for ")


def test_a_model_that_changes_after_the_bind_is_a_miss(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PREFIX)
    kv.warm(ids)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(0.01)
    assert kv.lookup(ids).reason == "weights: this prefix is stored, but for other weights"
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=3, do_sample=False), control)


def test_another_tokenizer_salt_or_model_id_is_a_miss(model: Any, kv: BoundStore, toy_tokenizer: Any) -> None:
    ids = random_ids(PREFIX)
    kv.warm(ids)
    store = kv.store
    assert store.bind(model, toy_tokenizer).lookup(ids).reason == (
        "tokenizer: this prefix is stored, but for another tokenizer"
    )
    assert store.bind(model, salt="policy 2").lookup(ids).tokens == 0
    assert store.bind(model, model_id="mine").lookup(ids).tokens == 0
    mine = store.bind(model, model_id="mine")
    mine.warm(ids)
    other = build_tiny("llama", seed=9)
    assert store.bind(other, model_id="mine").lookup(ids).tokens == PREFIX - 1  # the caller's own word


@pytest.mark.requirement("R19")
def test_namespaces_share_nothing(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    kv.warm(ids)
    other = CacheStore(kv.store.path, namespace="tenant 2").bind(model)
    assert other.lookup(ids).tokens == 0
    other.warm(ids)
    assert other.lookup(ids).tokens == kv.lookup(ids).tokens == PREFIX - 1
    assert len(entry_files(kv.store)) == 2


def test_a_process_with_another_hash_seed_agrees(kv: BoundStore) -> None:
    key = kv.warm(random_ids(PREFIX)).key
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); from tiny_models import build_tiny, VOCABULARY;"
        "from kvkeep import CacheStore;"
        "ids = torch.randint(3, VOCABULARY, (1, 300), generator=torch.Generator().manual_seed(1));"
        "model = build_tiny('llama'); print(CacheStore(sys.argv[2]).bind(model).lookup(ids).entry.key)"
    )
    here = str(Path(__file__).parent.parent)
    (printed,) = run_elsewhere(code, [here, kv.store.path])
    assert printed.strip() == key


# --- read-only ---


def test_a_read_only_store_serves_and_never_writes(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    kv.warm(ids)
    kv.store.journal.flush()

    def files() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in kv.store.path.rglob("*")}

    before = files()
    readonly = CacheStore(kv.store.path, readonly=True).bind(model)
    assert readonly.lookup(ids).tokens == PREFIX - 1
    assert readonly.warm(ids).tokens == PREFIX  # stored: nothing to write
    readonly.generate(ids, max_new_tokens=2)
    assert readonly.last_report is not None
    assert readonly.last_report.reused_tokens == PREFIX - 2
    with pytest.raises(StoreReadOnlyError):
        readonly.warm(random_ids(20, seed=5))
    with pytest.raises(StoreReadOnlyError):
        readonly.save(DynamicCache(), ids)
    with pytest.raises(StoreReadOnlyError):
        readonly.store.remove(readonly.lookup(ids).entry.key)
    readonly.store.journal.flush()
    assert files() == before
    with pytest.raises(StoreNotFoundError):
        CacheStore(kv.store.path / "nothing", readonly=True)


def test_a_read_only_store_sees_what_others_add_and_remove(model: Any, kv: BoundStore) -> None:
    readonly = CacheStore(kv.store.path, readonly=True).bind(model)
    ids = random_ids(PREFIX)
    assert readonly.lookup(ids).tokens == 0
    key = kv.warm(ids).key
    time.sleep(1.2)  # it looks at the directory once a second
    assert readonly.lookup(ids).tokens == PREFIX - 1
    kv.store.remove(key)
    assert readonly.load(ids) is None


# --- save ---


def test_saving_what_generate_returned_is_one_token_short_and_says_so(model: Any, kv: BoundStore) -> None:
    ids = random_ids(20)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )
    cache = getattr(out, compat.GENERATE_CACHE_ARGUMENT)
    with pytest.raises(CacheMismatchError, match=r"holds 27 tokens and 28 ids .* input_ids\[:, :27\]"):
        kv.save(cache, out.sequences)
    entry = kv.save(cache, out.sequences[:, :27], name="turn 1".replace(" ", "-"))
    assert (entry.tokens, entry.names) == (27, ("turn-1",))
    longer = torch.cat([out.sequences, random_ids(4)], dim=1)
    control = model.generate(longer, attention_mask=torch.ones_like(longer), max_new_tokens=4, do_sample=False)
    assert torch.equal(kv.generate(longer, max_new_tokens=4, do_sample=False), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 26


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_legacy_tuple_is_saved_and_generated_from(tmp_path: Path, name: str) -> None:
    model = build_tiny(name)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(34)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :30], **{compat.forward_cache_argument(model): cache}, use_cache=True)
    legacy = kv.to_legacy(cache)
    assert [tuple(t.dim() for t in pair) for pair in legacy] == [(4, 4)] * len(cache.layers)
    kv.save(legacy, ids[:, :30])
    loaded = kv.load(ids)
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert compat.seen_tokens(ours) == 30
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
    assert kv.last_report is not None
    guarded = name != "gemma3"  # a window that has moved on cannot be
    assert kv.last_report.reused_tokens == (29 if guarded else 30)


def test_odd_tuples_are_refused_by_layer(model: Any, kv: BoundStore) -> None:
    ids = random_ids(4)
    good = (torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16))
    with pytest.raises(CacheMismatchError, match="layer 1 of the tuple is a NoneType"):
        kv.save((good, None, good), ids)
    with pytest.raises(UnsupportedCacheError, match="layer 0 of the tuple has four tensors"):
        kv.save((good + good,) * 3, ids)
    with pytest.raises(CacheMismatchError, match="layer 2 of the tuple has 3 tensors"):
        kv.save((good, good, good + good[:1]), ids)
    with pytest.raises(CacheMismatchError, match="layer 1 of the cache cannot be saved"):
        kv.save((good, (good[0][0], good[1][0]), good), ids)
    with pytest.raises(CacheMismatchError, match="layer 0 of the cache cannot be saved"):
        kv.save((good,) * 3, random_ids(5))
    with pytest.raises(CacheMismatchError, match="2 layers"):
        kv.save((good, good), ids)
    with pytest.raises(CacheMismatchError, match="no layers"):
        kv.save((), ids)
    assert kv.store.entries() == []


def test_a_static_cache_of_the_users_is_saved_and_only_read(model: Any, kv: BoundStore) -> None:
    ids = random_ids(20)
    cache = StaticCache(config=model.config, max_cache_len=50)
    with torch.no_grad():
        extra = {"cache_position": torch.arange(20)} if compat.takes(model, "cache_position") else {}
        model(ids, **{compat.forward_cache_argument(model): cache}, use_cache=True, **extra)
    before = [layer.keys.clone() for layer in cache.layers]
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    kv.save(cache, ids)
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    assert all(torch.equal(layer.keys, was) for layer, was in zip(cache.layers, before, strict=True))
    assert kv.lookup(ids).tokens == 19


def test_a_cache_with_gradients_is_saved_and_loads_without(model: Any, kv: BoundStore) -> None:
    ids = random_ids(20)
    out = model(ids, use_cache=True)
    cache = getattr(out, compat.forward_cache_argument(model))
    assert cache.layers[0].keys.requires_grad
    kv.save(cache, ids)
    loaded = kv.load(random_ids(20))
    assert not loaded.layers[0].keys.requires_grad
    assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys[:, :, :19])


# --- prompts ---


def test_odd_prompts_are_refused(model: Any, kv: BoundStore) -> None:
    for wrong in ([], torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1, 3), [1, -2], None, [2**31]):
        with pytest.raises(InvalidPromptError):
            kv.lookup(wrong)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        kv.warm("text without a tokenizer")
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        kv.warm([{"role": "user", "content": "hello"}])
    with pytest.raises(InvalidRequestError, match="prompt"):
        kv.generate()
    pictured = {"input_ids": random_ids(5), "pixel_values": torch.zeros(1)}
    with pytest.raises(UnsupportedRequestError, match="pixel_values"):
        kv.warm(pictured)


def test_a_model_with_state_of_its_own_is_served_by_generate_and_refused_by_warm(tmp_path: Path) -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    rwkv = RwkvForCausalLM(config).eval()
    kv = CacheStore(tmp_path / "store").bind(rwkv)
    with pytest.raises(UnsupportedCacheError, match="RwkvForCausalLM keeps its state in no cache that it is given"):
        kv.warm([3, 4, 5])
    ids = torch.tensor([[3, 4, 5, 6]])
    control = rwkv.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=3, do_sample=False), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0


# --- damage ---


def damage(path: Path, how: str) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    if how == "payload":
        data[6000] ^= 1
    elif how == "header":
        data[200] ^= 1
    elif how == "truncated":
        del data[-5000:]
    elif how == "empty":
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["payload", "header", "truncated", "empty"])
@pytest.mark.requirement("R16")
@pytest.mark.requirement("R38", part=True)
def test_a_damaged_entry_is_a_miss_with_a_reason_and_one_log_line(
    model: Any, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = random_ids(PREFIX + 5)
    store = CacheStore(tmp_path / "store")
    store.bind(model).warm(ids[:, :PREFIX])
    damage(entry_files(store)[0], how)
    kv = CacheStore(tmp_path / "store").bind(model)
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    with caplog.at_level(logging.INFO, logger="kvkeep"):
        assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
        assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
    lines = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert len(lines) == 1
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0
    assert entry_files(store) == []
    assert len(list((store.path / "quarantine").glob("*.safetensors"))) == 1
    kv.warm(ids[:, :PREFIX])  # computed again
    assert kv.lookup(ids).tokens == PREFIX


@pytest.mark.requirement("R11")
def test_a_file_that_another_removed_is_a_miss(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX + 5)
    kv.warm(ids[:, :PREFIX])
    assert kv.lookup(ids).tokens == PREFIX
    entry_files(kv.store)[0].unlink()
    assert kv.load(ids) is None
    assert kv.lookup(ids).tokens == 0


@pytest.mark.requirement("R13")
def test_an_entry_under_another_key_is_never_served(model: Any, kv: BoundStore) -> None:
    ids, other = random_ids(PREFIX + 5), random_ids(PREFIX + 5, seed=2)
    kv.warm(ids[:, :PREFIX])
    kv.warm(other[:, :PREFIX])
    first, second = entry_files(kv.store)
    swap = first.with_suffix(".swap")
    first.rename(swap)
    second.rename(first)
    swap.rename(second)
    for prompt in (ids, other):
        control = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        assert torch.equal(kv.generate(prompt, max_new_tokens=4, do_sample=False), control)
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == 0


def test_a_longer_damaged_entry_makes_way_for_a_shorter_whole_one(model: Any, kv: BoundStore) -> None:
    ids = random_ids(PREFIX + 20)
    kv.warm(ids[:, :280])
    long = kv.warm(ids[:, :PREFIX])
    path = next(path for path in entry_files(kv.store) if path.stem == long.key)
    damage(path, "payload")
    again = CacheStore(kv.store.path).bind(model)
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(again.generate(ids, max_new_tokens=4, do_sample=False), control)
    assert again.last_report is not None
    assert again.last_report.reused_tokens == 279
    assert again.last_report.reason is not None
    assert again.last_report.reason.startswith("damaged: ")


@pytest.mark.requirement("R18")
def test_another_attention_kernel_is_told_once_and_is_a_miss_where_identity_is_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = random_ids(50)
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(ids[:, :40])
    model.set_attn_implementation("eager")
    control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    for _ in range(2):
        assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (39, None)  # type: ignore[union-attr]
    told = [record.message for record in caplog.records if "attention" in record.message]
    assert len(told) == 1
    assert told[0].startswith("kvkeep: an entry computed with sdpa attention serves a model that runs eager")
    strict = CacheStore(tmp_path / "store", strict_identity=True).bind(model)
    reason = "attention: the entry was computed with sdpa, the model runs eager"
    assert (strict.lookup(ids).tokens, strict.lookup(ids).reason) == (0, reason)
    assert strict.load(ids) is None
    assert torch.equal(strict.generate(ids, max_new_tokens=4, do_sample=False), control)
    assert strict.last_report.reason == reason  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa")
    assert strict.lookup(ids).tokens == 40


def test_a_training_loop_between_calls_is_always_seen(tmp_path: Path) -> None:
    """Fused optimizer steps move no counter, and every text is that of the weights as they are now."""
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seen = set()
    for _ in range(3):
        kv.warm(ids[:, :40])
        control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (39, None)
        seen.add(kv.identity().weights)
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        control = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False), control)
        assert kv.last_report.reason == "weights: this prefix is stored, but for other weights"
    assert len(seen) == len(kv.store.entries()) == 3
