"""The contract of layer codecs, on every codec that kvkeep has and on a layer class that is not kvkeep's."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvkeep import compat
from kvkeep.entry_format import LayerRecord
from kvkeep.layouts import LayerPlan, LayerState, codec_for, register_layer_codec
from kvkeep.layouts.attention import DynamicCodec
from kvkeep.layouts.keeping import KeepingLayer
from kvkeep.layouts.registry import _BY_NAME, _CODECS
from kvkeep.layouts.roomy import RoomyLayer
from kvkeep.testing import LayerCodecContract, token_rows

WINDOW, RATE, ROOM = 8, 4, 64
AROUND_THE_WINDOW = (1, WINDOW - 1, WINDOW, WINDOW + 1, 21)
# Where a static sliding layer counts in a tensor, nobody reads that count once the window is full, and what is in it
# then depends on how the layer was fed.
COUNTS_IN_A_TENSOR = isinstance(getattr(compat.STATIC_LAYER(max_cache_len=1), "cumulative_length", None), torch.Tensor)
UNREAD = ("cumulative_length",) if COUNTS_IN_A_TENSOR else ()


def feed_attention(layer: Any, first: int, last: int, batch: int) -> Any:
    keys, values = (token_rows(role, first, last, heads=2, dim=4, batch=batch) for role in ("keys", "values"))
    return layer.update(keys, values, {"cache_position": torch.arange(first, last)})


def feed_linear(layer: Any, first: int, last: int, batch: int) -> Any:
    """A convolution over the last 3 tokens, and a state that every token changes; the second pair of them is other."""
    results = []
    for number in range(layer.number_of_states):
        new = token_rows(f"conv {number}", first, last, heads=6, dim=1, batch=batch)[..., 0]
        results.append(layer.update_conv_state(new, state_idx=number, conv_kernel_size=3).clone())
        seen = layer.recurrent_states[number]
        state = torch.zeros(batch, 2, 4, 4 + number) if seen is None else seen.clone()
        for position in range(first, last):
            state = 0.5 * state + token_rows(
                f"recurrent {number}", position, position + 1, heads=2, dim=4, batch=batch
            )[:, :, 0, :, None].expand(batch, 2, 4, 4 + number)
        results.append(layer.update_recurrent_state(state, state_idx=number).clone())
    return results


class AttentionContract(LayerCodecContract):
    make: Callable[[], Any]

    @property
    def codec(self) -> Any:  # type: ignore[override]
        return codec_for(self.make_layer(), 0)

    def make_layer(self) -> Any:
        return type(self).make()

    def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
        return feed_attention(layer, first, last, batch)


class TestDynamic(AttentionContract):
    make = staticmethod(lambda: compat.DYNAMIC_LAYER())


class TestRoomy(AttentionContract):
    make = staticmethod(lambda: RoomyLayer(room=2))
    stateless = ("_buffers", "_views")  # what lies behind the rows is room

    def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
        with torch.no_grad():
            return super().fill(layer, first, last, batch)


class TestDynamicSliding(AttentionContract):
    make = staticmethod(lambda: compat.DYNAMIC_SLIDING_LAYER(sliding_window=WINDOW))
    lengths = AROUND_THE_WINDOW


class TestKeeping(AttentionContract):
    make = staticmethod(lambda: KeepingLayer(sliding_window=WINDOW))
    lengths = AROUND_THE_WINDOW
    stateless = ("kept",)  # the rows that the window has left behind, as far as the layer saw them


class TestStatic(AttentionContract):
    make = staticmethod(lambda: compat.STATIC_LAYER(max_cache_len=ROOM))


class TestStaticSliding(AttentionContract):
    make = staticmethod(lambda: compat.STATIC_SLIDING_LAYERS[0](max_cache_len=ROOM, sliding_window=WINDOW))
    lengths = (1, WINDOW - 3)
    continued = (2,)

    def plan(self) -> LayerPlan:
        return LayerPlan("sliding", WINDOW)


class TestStaticSlidingPastItsWindow(TestStaticSliding):
    lengths = AROUND_THE_WINDOW[1:]
    continued = (3, 1, 1)
    stateless = UNREAD


class TestStaticSlidingWithLittleRoom(TestStaticSliding):
    make = staticmethod(lambda: compat.STATIC_SLIDING_LAYERS[0](max_cache_len=6, sliding_window=WINDOW))
    lengths = (1, 3)
    continued = (1, 1)


if len(compat.STATIC_SLIDING_LAYERS) > 1:

    class TestOldStaticSliding(TestStaticSlidingPastItsWindow):
        make = staticmethod(lambda: compat.STATIC_SLIDING_LAYERS[1](max_cache_len=ROOM, sliding_window=WINDOW))

    class TestOldChunked(TestStaticSlidingPastItsWindow):
        make = staticmethod(lambda: compat.STATIC_SLIDING_LAYERS[2](max_cache_len=ROOM, sliding_window=WINDOW))


if compat.INDEXED_LAYERS:

    class TestIndexed(AttentionContract):
        make = staticmethod(lambda: compat.INDEXED_LAYERS[0]())

        def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
            index = token_rows("index", first, last, heads=1, dim=5, batch=batch)[:, 0]
            return super().fill(layer, first, last, batch), layer.update_indexer(index)

    class TestIndexedWithPositions(TestIndexed):
        def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
            held = layer.indexer_position_ids
            new = torch.arange(first, last).expand(3, batch, last - first) * torch.tensor([1, 2, 3]).view(3, 1, 1)
            layer.indexer_position_ids = new if held is None else torch.cat([held, new], dim=-1)
            return super().fill(layer, first, last, batch), layer.indexer_position_ids

    class TestStaticIndexed(TestIndexed):
        make = staticmethod(lambda: compat.STATIC_INDEXED_LAYERS[0](max_cache_len=ROOM))

    class TestStaticIndexedWithPositions(TestIndexedWithPositions):
        make = staticmethod(lambda: compat.STATIC_INDEXED_LAYERS[0](max_cache_len=ROOM))


if compat.LINEAR_LAYERS:

    class TestLinear(AttentionContract):
        make = staticmethod(lambda: compat.LINEAR_LAYERS[0]())

        def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
            return feed_linear(layer, first, last, batch)

    class TestLinearOfSeveralStates(TestLinear):
        make = staticmethod(lambda: compat.LINEAR_LAYERS[0](number_of_states=2))


HYBRIDS = {one.__name__: one for one in compat.HYBRID_LAYERS}


class HybridContract(AttentionContract):
    lengths = AROUND_THE_WINDOW

    def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
        attended = super().fill(layer, first, last, batch)
        return [one.clone() for one in attended], feed_linear(layer, first, last, batch)


if HYBRIDS:

    class TestLinearAndFull(HybridContract):
        make = staticmethod(lambda: HYBRIDS["LinearAttentionAndFullAttentionLayer"](number_of_states=2))

    class TestLinearAndSliding(HybridContract):
        make = staticmethod(lambda: HYBRIDS["LinearAttentionAndSlidingWindowAttentionLayer"](WINDOW))

    class TestLinearAndStatic(HybridContract):
        make = staticmethod(lambda: HYBRIDS["LinearAttentionAndStaticFullAttentionLayer"](ROOM))

    class TestLinearAndStaticSliding(HybridContract):
        make = staticmethod(lambda: HYBRIDS["LinearAttentionAndStaticSlidingWindowAttentionLayer"](ROOM, WINDOW))
        stateless = UNREAD

        def plan(self) -> LayerPlan:
            return LayerPlan("linear+sliding", WINDOW, snapshot=True)


if compat.DUMMY_LAYERS:

    class TestDummy(AttentionContract):
        make = staticmethod(lambda: compat.DUMMY_LAYERS[0]())

        def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
            return None


def compressed_layer(name: str) -> Any:
    rates = {"heavily_compressed_attention": RATE, "compressed_sparse_attention": RATE}
    module = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    return getattr(module, name)(SimpleNamespace(sliding_window=WINDOW, compress_rates=rates))


def feed_compressed(layer: Any, first: int, last: int, batch: int) -> Any:
    """As the model does: whole groups of tokens become one row each, and what is left over waits."""
    keys = token_rows("keys", first, last, heads=1, dim=4, batch=batch)
    results = [layer.update(keys, keys)]
    for name in layer.entry_count:
        kv, gate = (
            token_rows(f"{name} {part}", first, last, heads=1, dim=6, batch=batch)[:, 0] for part in ("kv", "gate")
        )
        kv, gate, at = layer.store_compression_weights(name, kv, gate)
        groups = kv.view(batch, -1, RATE, 6), gate.view(batch, -1, RATE, 6)
        if hasattr(layer, "overlap_kv") and kv.shape[1]:
            results.append(layer.update_overlap_state(name, *groups, head_dim=3))
        results += [at, layer.update_compressor_states(name, (groups[0] * groups[1]).mean(dim=2))]
    return results


if ("deepseek_v4", "DeepseekV4HCACache") in _BY_NAME and importlib.util.find_spec("transformers.models.deepseek_v4"):

    class TestHeavilyCompressed(AttentionContract):
        make = staticmethod(lambda: compressed_layer("DeepseekV4HCACache"))
        lengths = (RATE - 1, RATE, WINDOW, 22)

        def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
            return feed_compressed(layer, first, last, batch)

    class TestCompressedSparse(TestHeavilyCompressed):
        make = staticmethod(lambda: compressed_layer("DeepseekV4CSACache"))


if importlib.util.find_spec("transformers.models.minimax_m3_vl"):
    minimax_m3 = importlib.import_module("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

    class TestSparseM3(AttentionContract):
        make = staticmethod(lambda: minimax_m3.MiniMaxM3VLSparseCacheLayer())

        def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
            index = token_rows("index", first, last, heads=1, dim=5, batch=batch)
            return super().fill(layer, first, last, batch), layer.update_index(index)

    class TestStaticSparseM3(TestSparseM3):
        make = staticmethod(lambda: minimax_m3.MiniMaxM3VLSparseStaticCacheLayer(ROOM))


# --- a layer class that is not kvkeep's ---


class SummingLayer(compat.DYNAMIC_LAYER):  # type: ignore[misc, valid-type]
    """Keeps, beside its keys and values, the sum of all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.total: torch.Tensor | None = None

    def reset(self) -> None:
        super().reset()
        self.total = None

    def add(self, keys: torch.Tensor) -> torch.Tensor:
        for position in range(keys.shape[2]):
            row = keys[:, :, position]
            self.total = row.clone() if self.total is None else self.total + row
        return self.total


class SummingCodec(DynamicCodec):
    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan("summing", snapshot=True)

    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        state = super().describe(layer, LayerPlan("full"), length)
        tensors = {**state.tensors, "total": layer.total[0]}
        record = replace(state.record, kind="summing", tensors={**state.record.tensors, "total": "snapshot"})
        return LayerState(record, tensors)

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        if record.kind != "summing":
            raise ValueError(f"the entry has a layer of kind {record.kind!r} there")
        rows = {"keys": "rows", "values": "rows"}
        return super().wanted(layer, replace(record, kind="full", tensors=rows), tokens)

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        super().finish(layer, filled, record, tokens)
        layer.total = filled["total"][None]

    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return None


class TestSumming(LayerCodecContract):
    codec = SummingCodec()

    def make_layer(self) -> Any:
        return SummingLayer()

    def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
        keys = token_rows("keys", first, last, heads=2, dim=4, batch=batch)
        return feed_attention(layer, first, last, batch), layer.add(keys)


# --- the contract itself ---


def test_every_codec_is_under_the_contract() -> None:
    """A class that is new in the table needs its contract above."""
    contracts = [one for one in globals().values() if isinstance(one, type) and issubclass(one, LayerCodecContract)]
    proven = {type(one().make_layer()) for one in contracts if one.__name__.startswith("Test")}
    known = {one for one in _CODECS if one.__module__.startswith(("kvkeep.layouts.", "transformers."))}
    assert known - proven == set(compat.QUANTIZED_LAYERS)  # their rows come back quantized: see test_cross_class
    named = {name for name in _BY_NAME if importlib.util.find_spec(f"transformers.models.{name[0]}")}
    assert named == {
        (one.__module__.split(".")[2], one.__name__)
        for one in proven
        if one.__module__.startswith("transformers.models.")
    }


class CopyingCodec(SummingCodec):
    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        state = super().describe(layer, plan, length)
        return replace(state, tensors={role: tensor.clone() for role, tensor in state.tensors.items()})


class ChangingCodec(SummingCodec):
    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        layer.values = None if layer.values is None else layer.values + 0
        return super().describe(layer, plan, length)


class LenientCodec(SummingCodec):
    def describe(self, layer: Any, plan: LayerPlan, length: int) -> LayerState:
        empty = torch.zeros(1, 2, 0, 4)
        keys, values = (empty if one is None else one for one in (layer.keys, layer.values))
        total = torch.zeros(2, 4) if layer.total is None else layer.total[0]
        rows = keys.shape[2]
        how = {"keys": "rows", "values": "rows", "total": "snapshot"}
        record = LayerRecord(kind="summing", first=0, rows=rows, tensors=how, scalars={})
        return LayerState(record, {"keys": keys[0], "values": values[0], "total": total})

    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        return 0, tokens


class ForgetfulCodec(SummingCodec):
    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        DynamicCodec.finish(self, layer, filled, record, tokens)


class RoundingCodec(SummingCodec):
    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        super().finish(layer, filled, record, tokens)
        layer.total = layer.total.half().float()


class SharingCodec(SummingCodec):
    kept: torch.Tensor | None = None

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        super().finish(layer, filled, record, tokens)
        kept = type(self).kept
        type(self).kept = layer.total = layer.total if kept is None or not torch.equal(kept, layer.total) else kept


class SecretiveCodec(SummingCodec):
    def plan(self, layer: Any) -> LayerPlan:
        return LayerPlan("summing")


class WrongRowCodec(SummingCodec):
    def row(self, layer: Any, position: int, seen: int) -> Mapping[str, torch.Tensor] | None:
        return DynamicCodec.row(self, layer, max(0, position - 1), seen)


class TransposedCodec(SummingCodec):
    def allocate(self, layer: Any, likes: Any, tokens: int, device: torch.device, empty: Any) -> Any:
        return {role: empty(like.mT.contiguous()).mT for role, like in likes.items()}


@pytest.mark.parametrize(
    ("codec", "tests"),
    [
        (CopyingCodec, {"describing_gives_views_and_changes_nothing"}),
        (ChangingCodec, {"describing_gives_views_and_changes_nothing"}),
        (
            LenientCodec,
            {
                "a_layer_that_was_never_filled_is_refused",
                "two_sequences_at_once_are_refused",
                "another_number_of_tokens_is_refused",
                "a_record_of_another_kind_is_refused",
                "more_tokens_than_are_stored_are_refused",
            },
        ),
        (RoundingCodec, {"what_is_stored_comes_back", "a_loaded_layer_holds_the_same_bits"}),
        (SharingCodec, {"two_loads_share_nothing"}),
        (SecretiveCodec, {"the_record_says_what_the_tensors_are"}),
        (WrongRowCodec, {"rows_of_one_token_are_those_described"}),
        (TransposedCodec, {"destinations_are_as_asked_for"}),
    ],
)
def test_a_codec_with_a_fault_is_found(codec: type[SummingCodec], tests: set[str]) -> None:
    assert tests <= failing(codec(), SummingLayer)


def failing(codec: SummingCodec, layer: type[SummingLayer]) -> set[str]:
    """The tests of the contract that fail for a codec with layers of this class."""

    class Faulty(TestSumming):
        def make_layer(self) -> Any:
            return layer()

    Faulty.codec = codec
    failed = set()
    for name in vars(LayerCodecContract):
        if name.startswith("test_"):
            try:
                getattr(Faulty(), name)()
            except AssertionError:
                failed.add(name.removeprefix("test_"))
    return failed


class LeakingLayer(SummingLayer):
    def reset(self) -> None:
        compat.DYNAMIC_LAYER.reset(self)


class RelyingCodec(SummingCodec):
    """Adds to what it finds, which is nothing in a fresh layer, and in one whose ``reset`` is right."""

    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        found = layer.total
        super().finish(layer, filled, record, tokens)
        layer.total = layer.total if found is None else layer.total + found


@pytest.mark.parametrize(
    ("codec", "layer", "tests"),
    [
        (RelyingCodec(), SummingLayer, set()),
        (SummingCodec(), LeakingLayer, {"an_emptied_layer_goes_on_as_a_fresh_one"}),
        (
            RelyingCodec(),
            LeakingLayer,
            {"a_used_layer_is_filled_as_a_fresh_one", "an_emptied_layer_goes_on_as_a_fresh_one"},
        ),
    ],
)
def test_what_reset_leaves_behind_is_found(codec: SummingCodec, layer: type[SummingLayer], tests: set[str]) -> None:
    """A cache of one's own that is loaded into keeps nothing of what was in it."""
    assert failing(codec, layer) == tests


class FlippingCodec(DynamicCodec):
    def finish(self, layer: Any, filled: Mapping[str, torch.Tensor], record: LayerRecord, tokens: int) -> None:
        whole = tokens == record.first + record.rows
        super().finish(layer, filled if whole else {r: t.flip(1) for r, t in filled.items()}, record, tokens)


class HalfCodec(DynamicCodec):
    def wanted(self, layer: Any, record: LayerRecord, tokens: int) -> tuple[int, int]:
        first, last = super().wanted(layer, record, tokens)
        return (first + last) // 2, last


@pytest.mark.parametrize(
    ("codec", "test"),
    [(FlippingCodec, "a_shorter_load_goes_on_alike_or_is_refused"), (HalfCodec, "a_loaded_layer_goes_on_alike")],
)
def test_a_layer_that_goes_on_otherwise_is_found(codec: type[DynamicCodec], test: str) -> None:
    class Faulty(TestDynamicSliding):
        pass

    sound = codec_for(Faulty().make_layer(), 0)
    Faulty.codec = codec()  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(AssertionError, match=r"loaded after \d+ tokens, it gives something else"):
            getattr(Faulty(), f"test_{test}")()
    finally:
        register_layer_codec(compat.DYNAMIC_SLIDING_LAYER, sound)


def test_what_is_forgotten_is_named() -> None:
    class Forgetful(TestSumming):
        codec = ForgetfulCodec()

    with pytest.raises(
        AssertionError, match="a layer loaded after 1 tokens is another one: the tensor total is missing"
    ):
        Forgetful().test_a_loaded_layer_holds_the_same_bits()


def test_the_examples_run() -> None:
    assert doctest.testmod(importlib.import_module("kvkeep.testing.layer_codec")) == (0, 7)


def test_kvkeep_does_not_import_it() -> None:
    code = "import sys, kvkeep; kvkeep.CacheStore; print('kvkeep.testing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
