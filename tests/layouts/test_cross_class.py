"""Saved from one class of cache, loaded into another: what is exact bit for bit, what is quantized, what is refused."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCABULARY, WINDOW, build_tiny
from transformers import DynamicCache, StaticCache

from kvkeep import BoundStore, CacheStore, compat
from kvkeep.errors import CacheMismatchError, InvalidRequestError, UnsupportedCacheError
from kvkeep.layouts import describe_cache, plan_layers, quantize
from kvkeep.testing.state import HeldState, difference, same_bits

ROOM = 80
PREFIX = 40
TOLERANCE = 2e-4  # right is below it in float32, wrong is above 0.1

KINDS = ("dynamic", "complete", "static", "offloaded", "offloaded_static")
CLASSES = {"static": StaticCache, "offloaded_static": StaticCache}


class FakeStream:
    """What an offloaded cache needs of a stream, which torch has for accelerators alone."""

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, FakeStream)

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches offload from the CPU to the CPU: all their steps, without a device to move anything to."""
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: FakeStream())


@pytest.fixture(autouse=True, scope="module")
def _no_compiler() -> None:
    """Let quanto unpack in Python: at its first use it would have C++ compiled for that."""

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([(packed >> bits * place) & (2**bits - 1) for place in range(8 // bits)])

    if importlib.util.find_spec("optimum") is not None:
        extension = importlib.import_module("optimum.quanto.library.extensions.cpp").ext
        extension._lib = SimpleNamespace(unpack=unpack)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    return build_tiny(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_tiny("llama")


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model)


@pytest.fixture
def llama_kv(llama: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(llama)


def random_ids(length: int, seed: int = 1, lines: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (lines, length), generator=torch.Generator().manual_seed(seed))


def empty(model: Any, kind: str) -> Any:
    config = model.config
    caches = {
        "dynamic": lambda: DynamicCache(config=config),
        "complete": DynamicCache,
        "static": lambda: StaticCache(config=config, max_cache_len=ROOM),
        "offloaded": lambda: DynamicCache(config=config, offloading=True),
        "offloaded_static": lambda: StaticCache(config=config, max_cache_len=ROOM, offloading=True),
    }
    return caches[kind]()


def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    seen = compat.cached_tokens(cache)
    extra = {"cache_position": torch.arange(seen, seen + ids.shape[1])} if compat.takes(model, "cache_position") else {}
    with torch.no_grad():
        return model(input_ids=ids, **{compat.forward_cache_argument(model): cache}, use_cache=True, **extra).logits


def prefilled(model: Any, ids: torch.Tensor, kind: str) -> Any:
    cache = empty(model, kind)
    forward(model, ids, cache)
    return cache


def rows_of(model: Any, cache: Any, length: int) -> list[dict[str, torch.Tensor]]:
    """For each layer the rows that continuing needs, whatever class keeps them."""
    plans = plan_layers(compat.text_config(model))
    rows = []
    for state, plan in zip(describe_cache(cache, plans, length), plans, strict=True):
        needed = max(0, length - (plan.window - 1)) if plan.kind == "sliding" else 0
        rows.append({role: tensor[:, needed - state.record.first :] for role, tensor in state.tensors.items()})
    return rows


# --- full rows, whatever keeps them ---


@pytest.mark.parametrize("length", [3, PREFIX])
@pytest.mark.parametrize("saved_as", KINDS)
def test_what_one_class_holds_every_other_continues(model: Any, kv: BoundStore, saved_as: str, length: int) -> None:
    ids, more = random_ids(length + 1), random_ids(6, seed=2)
    live = prefilled(model, ids[:, :length], saved_as)
    kv.save(live, ids[:, :length])
    stored = rows_of(model, live, length)
    slides = any(plan.kind == "sliding" for plan in plan_layers(compat.text_config(model)))
    for loaded_as in KINDS:
        into = DynamicCache()
        sized = {"max_cache_len": ROOM} if loaded_as.endswith("static") else {}
        options = {"into": into} if loaded_as == "complete" else {"cache_implementation": loaded_as, **sized}

        loaded = kv.load(ids, **options)

        if loaded_as == "complete" and saved_as != "complete" and slides and length > WINDOW:
            assert loaded is None  # rows that windows have dropped: not there, so not made up
            assert compat.cached_tokens(into) == 0
            continue
        assert type(loaded) is CLASSES.get(loaded_as, DynamicCache)
        assert compat.is_offloaded(loaded) == loaded_as.startswith("offloaded")
        assert [compat.seen_tokens(layer) for layer in loaded.layers] == [length] * len(loaded.layers)
        for ours, theirs in zip(rows_of(model, loaded, length), stored, strict=True):
            assert same_bits(ours["keys"], theirs["keys"])
            assert same_bits(ours["values"], theirs["values"])
        beside = prefilled(model, ids[:, :length], loaded_as)
        first, control = forward(model, more, loaded), forward(model, more, beside)
        assert torch.allclose(first, control, atol=TOLERANCE), (loaded_as, (first - control).abs().max())
        for token in random_ids(3, seed=3)[0]:
            one, other = (forward(model, token.view(1, 1), cache) for cache in (loaded, beside))
            assert torch.allclose(one, other, atol=TOLERANCE), loaded_as
        assert (other - control[:, -1:]).abs().max() > 0.1  # the check can fail: other tokens give other logits


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_is_filled_in_place_whatever_it_held(model: Any, kv: BoundStore, kind: str) -> None:
    ids = random_ids(PREFIX + 1)
    kv.save(prefilled(model, ids[:, :PREFIX], "complete"), ids[:, :PREFIX])
    used = prefilled(model, random_ids(23, seed=5), kind)
    assert kv.load(ids, into=used) is used
    beside = prefilled(model, ids[:, :PREFIX], kind)
    for ours, theirs in zip(rows_of(model, used, PREFIX), rows_of(model, beside, PREFIX), strict=True):
        assert torch.allclose(ours["keys"], theirs["keys"], atol=TOLERANCE)
    more = random_ids(3, seed=2)
    assert torch.allclose(forward(model, more, used), forward(model, more, beside), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
def test_generate_with_an_offloaded_cache_gives_the_control(model: Any, kv: BoundStore, name: str) -> None:
    ids = random_ids(PREFIX + 9)
    kv.warm(ids[:, :PREFIX])
    control = outcome(model.generate, ids, cache_implementation=name)
    ours = outcome(kv.generate, ids, cache_implementation=name)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == PREFIX - 1
    assert_same(ours, control)
    pair = random_ids(PREFIX + 9).repeat(2, 1)
    assert_same(
        outcome(kv.generate, masked(pair), cache_implementation=name), (ours[0].repeat(2, 1), ours[1].repeat(2, 1, 1))
    )
    assert kv.last_report.reused_tokens == 2 * (PREFIX - 1)


def test_an_offloaded_cache_lies_where_the_next_pass_looks_for_it(llama: Any, llama_kv: BoundStore) -> None:
    """On ``meta`` in the place of an accelerator: the first layer is there, the others wait on the CPU."""
    ids = random_ids(PREFIX + 1)
    llama_kv.warm(ids[:, :PREFIX])
    for kind, options in (("offloaded", {}), ("offloaded_static", {"max_cache_len": ROOM})):
        cache = llama_kv.load(ids, cache_implementation=kind, **options)
        kept = [layer.keys for layer in cache.layers]
        places = [torch.device("meta")] * 3
        assert compat.resting_devices(cache, places) == [places[0], torch.device("cpu"), torch.device("cpu")]
        compat.rest(cache, places)
        assert [layer.keys.device.type for layer in cache.layers] == ["meta", "cpu", "cpu"]
        assert [layer.device.type for layer in cache.layers] == ["meta"] * 3
        assert all(layer.keys is keys for layer, keys in zip(cache.layers[1:], kept[1:], strict=True))
    resident = llama_kv.load(ids)
    assert compat.resting_devices(resident, places) == places


def test_sliding_layers_that_are_not_offloaded_stay_where_they_are(tmp_path: Path) -> None:
    model = build_tiny("gemma3")  # three of its four layers slide
    cache = StaticCache(config=model.config, max_cache_len=ROOM, offloading=True)  # by default only the others move
    places = [torch.device("meta")] * 4
    assert compat.resting_devices(cache, places) == places  # the only one that moves is also the next one needed
    cache = DynamicCache(config=model.config, offloading=True)
    assert [place.type for place in compat.resting_devices(cache, places)] == ["meta", "cpu", "cpu", "cpu"]


# --- quantized ---

BACKENDS: dict[str, dict[str, Any]] = {
    "quanto": {"backend": "quanto"},
    "quanto-2": {
        "backend": "quanto",
        "nbits": 2,
        "axis_key": -1,
        "axis_value": -1,
        "q_group_size": 4,
        "residual_length": 16,
    },
    "hqq": {"backend": "hqq", "axis_key": 1, "axis_value": 1, "q_group_size": 16},
    "hqq-3": {"backend": "hqq", "nbits": 3, "q_group_size": 16, "residual_length": 16},
    "fp8": {"backend": "fp8"},
}
_MODULES = {"quanto": "optimum", "hqq": "hqq"}


def is_there(settings: dict[str, Any]) -> bool:
    backend = settings["backend"]
    if backend not in compat.QUANTIZED_LAYERS.values():
        return False
    return backend not in _MODULES or importlib.util.find_spec(_MODULES[backend]) is not None


needs_backend = pytest.mark.skipif(
    not any(map(is_there, BACKENDS.values())), reason="this transformers has no backend here that quantizes"
)


@pytest.fixture(params=[name for name, settings in BACKENDS.items() if is_there(settings)])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(BACKENDS[request.param])


def masked(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def outcome(generate: Any, prompt: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    asked = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    out = generate(**prompt, **asked) if isinstance(prompt, dict) else generate(prompt, **asked)
    return out.sequences, torch.stack(out.logits, dim=1)


def assert_same(ours: tuple[torch.Tensor, torch.Tensor], control: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(ours[0], control[0])
    assert (ours[1] - control[1]).abs().max() < TOLERANCE


def quantized(model: Any, settings: dict[str, Any], ids: torch.Tensor, singly: int = 0) -> Any:
    """A quantized cache after one pass over the ids, and ``singly`` tokens of them one by one."""
    cache = compat.quantized_cache(model.config, settings)
    begin = ids.shape[1] - singly
    forward(model, ids[:, :begin], cache)
    for at in range(begin, ids.shape[1]):
        forward(model, ids[:, at : at + 1], cache)
    return cache


def assert_same_state(one: Any, other: Any) -> None:
    """The same in every attribute, and in every packed tensor."""
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert difference(HeldState.of(mine, PACKED), HeldState.of(theirs, PACKED)) is None
        for side in ("keys", "values"):
            parts = [parts_of(getattr(layer, f"_quantized_{side}")) for layer in (mine, theirs)]
            assert difference(*(HeldState.of(part) for part in parts)) is None


PACKED = ("_quantized_keys", "_quantized_values", "qtype", "optimizer", "quantizer")


class _Parts:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def parts_of(packed: Any) -> _Parts:
    if not isinstance(packed, torch.Tensor):
        return _Parts(data=packed[0], rest=packed[1])
    names, meta = packed.__tensor_flatten__()
    inner = packed._data.__tensor_flatten__()[1]
    return _Parts(
        data=packed._data._data, **{name: getattr(packed, name) for name in names[1:]}, meta=meta, inner=inner
    )


@needs_backend
@pytest.mark.parametrize("saved_as", KINDS)
def test_full_rows_fill_a_quantized_cache_as_a_prefill_does(
    llama: Any, llama_kv: BoundStore, settings: dict[str, Any], saved_as: str
) -> None:
    ids, more = random_ids(PREFIX + 1), random_ids(20, seed=2)
    live = prefilled(llama, ids[:, :PREFIX], saved_as)
    llama_kv.save(live, ids[:, :PREFIX])
    options = {"cache_implementation": "quantized", "cache_config": settings}

    match, loaded = llama_kv.lookup(ids, **options), llama_kv.load(ids, **options)

    assert (match.tokens, match.exact) == (PREFIX, False)
    assert llama_kv.lookup(ids).exact
    assert type(loaded) is transformers.QuantizedCache
    control = compat.quantized_cache(llama.config, settings)
    for layer, rows in zip(control.layers, live.layers, strict=True):
        quantize(layer, rows.keys[:, :, :PREFIX], rows.values[:, :, :PREFIX])
    assert_same_state(loaded, control)  # quantized once, of exactly the stored rows
    beside = quantized(llama, settings, ids[:, :PREFIX])
    exact = prefilled(llama, ids[:, :PREFIX], "dynamic")
    for token in more[0]:  # past the residual length
        ours, theirs, full = (forward(llama, token.view(1, 1), cache) for cache in (loaded, beside, exact))
        assert torch.allclose(ours, theirs, atol=TOLERANCE)
    assert (full - theirs).abs().max() > 0.01  # the check can fail: quantized rows give other logits
    into = quantized(llama, settings, random_ids(24, seed=7), 2)
    assert llama_kv.load(ids, into=into) is into
    assert_same_state(into, control)


@needs_backend
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"num_return_sequences": 2, "do_sample": True},
        # 4.57 itself fails to reorder the beams of such a cache.
        *([{"num_beams": 3}] if "fp8" in compat.QUANTIZED_LAYERS.values() else []),
        {"max_new_tokens": 30},
    ],
)
@pytest.mark.parametrize("prompt", [PREFIX + 8, PREFIX + 2, PREFIX])
def test_generate_with_a_quantized_cache_gives_the_control(
    llama: Any, llama_kv: BoundStore, settings: dict[str, Any], prompt: int, options: dict[str, Any]
) -> None:
    ids = random_ids(prompt)
    llama_kv.warm(ids[:, :PREFIX])
    fed: list[int] = []
    hook = llama.get_input_embeddings().register_forward_hook(lambda _, inputs, __: fed.append(inputs[0].shape[-1]))
    runs = []
    for generate in (llama.generate, llama_kv.generate):
        transformers.set_seed(3)
        runs.append(outcome(generate, ids, cache_implementation="quantized", cache_config=dict(settings), **options))
    hook.remove()
    assert llama_kv.last_report is not None
    reused = min(PREFIX, prompt - 1) - 1
    assert (llama_kv.last_report.reused_tokens, llama_kv.last_report.reason) == (reused, None)
    assert [tokens for tokens in fed if tokens > 1] == [prompt, prompt - reused]
    assert_same(runs[1], runs[0])


@needs_backend
def test_the_cache_that_generate_returns_is_quantized_like_the_controls(
    llama: Any, llama_kv: BoundStore, settings: dict[str, Any]
) -> None:
    ids = random_ids(PREFIX + 8)
    llama_kv.warm(ids[:, :PREFIX])
    caches = []
    for generate in (llama.generate, llama_kv.generate):
        out = generate(
            ids,
            max_new_tokens=5,
            do_sample=False,
            return_dict_in_generate=True,
            cache_implementation="quantized",
            cache_config=dict(settings),
        )
        caches.append(out[compat.GENERATE_CACHE_ARGUMENT])
    control, ours = caches
    assert [type(layer) for layer in ours.layers] == [type(layer) for layer in control.layers]
    for mine, theirs in zip(ours.layers, control.layers, strict=True):
        for one, other in zip(compat.full_rows(mine), compat.full_rows(theirs), strict=True):
            assert torch.allclose(one, other, atol=TOLERANCE)


@needs_backend
def test_a_model_whose_config_asks_for_it_is_served_while_attached(
    llama_kv: BoundStore, llama: Any, settings: dict[str, Any]
) -> None:
    model = copy.deepcopy(llama)
    model.generation_config.cache_implementation = "quantized"
    kv = llama_kv.store.bind(model)
    ids = random_ids(PREFIX + 8)
    kv.warm(ids[:, :PREFIX])

    def config() -> Any:  # 4.57 takes the backend out of the dictionary that it is given
        model.generation_config.cache_config = dict(settings)
        return model.generate

    control = outcome(config(), masked(ids))
    with kv.attached():
        ours = outcome(config(), masked(ids))
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == PREFIX - 1
    assert_same(ours, control)


@needs_backend
def test_several_lines_are_served_and_padded_ones_step_aside(
    llama: Any, llama_kv: BoundStore, settings: dict[str, Any]
) -> None:
    ids = torch.cat([random_ids(PREFIX).repeat(2, 1), random_ids(8, seed=4, lines=2)], dim=1)
    llama_kv.warm(ids[:1, :PREFIX])

    def ask(generate: Any, inputs: dict[str, torch.Tensor]) -> Any:
        return outcome(generate, inputs, cache_implementation="quantized", cache_config=dict(settings))

    control, ours = ask(llama.generate, masked(ids)), ask(llama_kv.generate, masked(ids))
    assert llama_kv.last_report is not None
    assert llama_kv.last_report.reused_tokens == 2 * (PREFIX - 1)
    assert_same(ours, control)
    padded = masked(torch.nn.functional.pad(ids, (8, 0)))
    padded["attention_mask"][:, :8] = 0
    padded["attention_mask"][1, :8] = 1
    padded["input_ids"][1, :8] = 5
    control, ours = ask(llama.generate, padded), ask(llama_kv.generate, padded)
    assert llama_kv.last_report.reused_tokens == 0
    assert str(llama_kv.last_report.reason).startswith("batch: padding")
    assert_same(ours, control)


@needs_backend
def test_the_guard_refutes_a_wrong_entry_before_it_is_quantized(
    llama: Any, llama_kv: BoundStore, settings: dict[str, Any]
) -> None:
    ids = random_ids(PREFIX + 8)
    wrong = prefilled(llama, random_ids(PREFIX, seed=9), "dynamic")
    llama_kv.save(wrong, ids[:, :PREFIX], guard=False)
    asked = {"cache_implementation": "quantized"}
    control = outcome(llama.generate, ids, **asked, cache_config=dict(settings))
    ours = outcome(llama_kv.generate, ids, **asked, cache_config=dict(settings))
    assert llama_kv.last_report is not None
    assert llama_kv.last_report.reused_tokens == 0
    assert str(llama_kv.last_report.reason).startswith("guard")
    assert_same(ours, control)


@needs_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("singly", [0, 6])
def test_a_quantized_cache_is_stored_and_loaded_bit_for_bit(
    tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype, singly: int
) -> None:
    model = build_tiny("llama").to(dtype)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids, more = random_ids(PREFIX + 1), random_ids(18, seed=2)
    live = quantized(model, settings, ids[:, :PREFIX], singly)

    entry = kv.save(live, ids[:, :PREFIX])

    assert not entry.exact
    assert entry.form.startswith(f"quantized:{settings['backend']}:")
    options = {"cache_implementation": "quantized", "cache_config": settings}
    match = kv.lookup(ids, **options)
    assert (match.tokens, match.exact) == (PREFIX, False)
    # Nothing else is ever filled from it, and it stands in nobody's way.
    assert kv.lookup(ids).tokens == 0
    assert kv.load(ids) is None
    assert kv.load(ids, cache_implementation="static", max_cache_len=ROOM) is None
    assert kv.load(ids[:, :-3], **options) is None  # what was scaled together is not cut
    kv.warm(ids[:, :PREFIX])
    assert len(kv.store.entries()) == 2
    assert kv.lookup(ids).exact
    loaded = kv.load(ids, **options)
    assert_same_state(loaded, live)
    for token in more[0]:  # past the residual length
        ours, theirs = (forward(model, token.view(1, 1), cache) for cache in (loaded, live))
        assert same_bits(ours, theirs)


@needs_backend
def test_a_quantized_cache_is_checked_before_it_is_stored(
    llama: Any, llama_kv: BoundStore, settings: dict[str, Any]
) -> None:
    ids = random_ids(PREFIX)
    for at in (3, PREFIX - 1):
        other = ids.clone()
        other[0, at] += 1 if other[0, at] < VOCABULARY - 1 else -1
        with pytest.raises(CacheMismatchError, match="a row computed again differs"):
            llama_kv.save(quantized(llama, settings, other, 2), ids)
    reordered = quantized(llama, settings, ids)
    if hasattr(reordered.layers[0], "_pending_beam_idx"):
        reordered.reorder_cache(torch.tensor([0]))
        with pytest.raises(CacheMismatchError, match="beams are still to be reordered"):
            llama_kv.save(reordered, ids)
    with pytest.raises(CacheMismatchError, match="not one sequence"):
        llama_kv.save(quantized(llama, settings, ids.repeat(2, 1)), ids)
    with pytest.raises(UnsupportedCacheError, match="quantized"):
        llama_kv.save(
            quantized(llama, settings, ids.repeat(2, 1)), ids.repeat(2, 1), attention_mask=torch.ones(2, PREFIX)
        )
    with pytest.raises(UnsupportedCacheError, match="packed"):
        llama_kv.to_legacy(quantized(llama, settings, ids))
    assert llama_kv.store.entries() == []
    if "residual_length" in settings:  # some rows are quantized for the second time
        long = quantized(llama, settings, ids, 24)
        with pytest.raises(CacheMismatchError, match="guard=False"):
            llama_kv.save(long, ids)
        assert llama_kv.save(long, ids, guard=False).end == PREFIX


@needs_backend
def test_what_was_quantized_otherwise_is_not_found(
    llama: Any, llama_kv: BoundStore, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(PREFIX + 1)
    live = quantized(llama, settings, ids[:, :PREFIX], 2)
    llama_kv.save(live, ids[:, :PREFIX])
    options = {"cache_implementation": "quantized", "cache_config": settings}
    assert llama_kv.load(ids, **options) is not None
    if settings["backend"] == "fp8":
        return
    others = {"nbits": 8 if settings["backend"] == "hqq" else 6 - settings.get("nbits", 4), "residual_length": 64}
    for name, value in others.items():
        found = llama_kv.lookup(ids, cache_implementation="quantized", cache_config={**settings, name: value})
        assert found.tokens == 0
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.0")
    assert llama_kv.lookup(ids, **options).tokens == 0


@needs_backend
def test_layers_that_slide_are_not_quantized(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = build_tiny("gemma3")
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(PREFIX + 2)
    kv.warm(ids[:, :PREFIX])
    options = {"cache_implementation": "quantized", "cache_config": settings}
    try:
        cache = compat.quantized_cache(model.config, settings)
    except ValueError:  # 5.24
        with pytest.raises(InvalidRequestError, match="full attention"):
            kv.load(ids, **options)
        return
    assert kv.load(ids, **options) is None  # 4.57 quantizes every row, and the windows have dropped most
    control = outcome(model.generate, ids, cache_implementation="quantized", cache_config=dict(settings))
    ours = outcome(kv.generate, ids, cache_implementation="quantized", cache_config=dict(settings))
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("layout: layer 0")
    assert_same(ours, control)
    forward(model, ids[:, :PREFIX], cache)
    with pytest.raises(CacheMismatchError, match="kind sliding"):
        kv.save(cache, ids[:, :PREFIX])


def test_what_transformers_does_not_quantize_by_is_refused(llama_kv: BoundStore) -> None:
    ids = random_ids(PREFIX)
    llama_kv.warm(ids)
    for settings in ({"backend": "abacus"}, {"backend": "quanto", "nbits": 7}, {"bits": 4}):
        with pytest.raises(InvalidRequestError, match="no such quantized cache"):
            llama_kv.load(ids, cache_implementation="quantized", cache_config=settings)
    with pytest.raises(InvalidRequestError, match="cache_config is for"):
        llama_kv.load(ids, cache_config={"nbits": 4})
    with pytest.raises(InvalidRequestError, match="must be one of dynamic, static, offloaded, offloaded_static, quant"):
        llama_kv.load(ids, cache_implementation="paged")


def test_numbers_that_do_not_come_out_even_are_a_miss(llama_kv: BoundStore, caplog: pytest.LogCaptureFixture) -> None:
    if not is_there(BACKENDS["quanto"]):
        pytest.skip("optimum-quanto is not installed")
    ids = random_ids(PREFIX + 2)
    llama_kv.warm(ids[:, : PREFIX + 1])  # 41 rows of 32 numbers are no groups of 64
    assert llama_kv.load(ids, cache_implementation="quantized") is None
    assert "cannot be quantized so" in caplog.text


# --- what stays refused ---


@pytest.mark.parametrize("name", ["DynamicCache", "StaticCache", "QuantizedCache", "MtpCache", "DFlashCache"])
def test_a_container_class_that_may_hold_more_is_refused_by_name(llama: Any, llama_kv: BoundStore, name: str) -> None:
    base = getattr(transformers.cache_utils, name, None)
    if base is None:
        assert compat.GENERATE_CACHE_ARGUMENT == "past_key_values"  # 4.57 has no such class
        return
    kind = base if name in ("MtpCache", "DFlashCache") else type(f"Clever{name}", (base,), {})
    ids = random_ids(PREFIX)
    cache = prefilled(llama, ids, "dynamic")
    cache.__class__ = kind
    with pytest.raises(UnsupportedCacheError, match=f"a {kind.__name__} is not a cache"):
        llama_kv.save(cache, ids)
    with pytest.raises(InvalidRequestError, match=f"not a {kind.__name__}"):
        llama_kv.load(ids, into=cache)


def test_a_quantized_layer_class_of_somebody_elses_is_refused_by_name(llama: Any, llama_kv: BoundStore) -> None:
    if not compat.QUANTIZED_LAYERS:
        pytest.fail("every version has some")
    base = next(iter(compat.QUANTIZED_LAYERS))
    ids = random_ids(PREFIX)
    cache = prefilled(llama, ids, "dynamic")
    cache.layers[1].__class__ = type("CleverQuantizedLayer", (base,), {"get_seq_length": lambda _: PREFIX})
    with pytest.raises(UnsupportedCacheError, match=r"layer 1 .* CleverQuantizedLayer"):
        llama_kv.save(cache, ids)
