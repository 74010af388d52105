"""The contract of a layer codec, as tests that run on a layer class of your own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvkeep.entry_format import LayerRecord
from kvkeep.layouts import LayerCodec, LayerPlan, LayerState, register_layer_codec
from kvkeep.storage.entries import EntryFile
from kvkeep.testing.state import HeldState, difference, memory_of, same_bits, same_outputs
from kvkeep.testing.stored import Shelf, emptied, loaded

_CPU = torch.device("cpu")


def token_rows(
    role: str, first: int, last: int, *, heads: int, dim: int, batch: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random numbers for the tokens [first, last), [batch, heads, tokens, dim]: a token has the same ones each time.

    >>> whole = token_rows("keys", 0, 5, heads=2, dim=4)
    >>> torch.equal(whole[:, :, 3:], token_rows("keys", 3, 5, heads=2, dim=4))
    True
    """
    return torch.cat([_row(role, position, batch, heads, dim) for position in range(first, last)], dim=2).to(dtype)


@lru_cache(maxsize=4096)
def _row(role: str, position: int, batch: int, heads: int, dim: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(zlib.crc32(f"{role} {position}".encode()))
    return torch.randn((batch, heads, 1, dim), generator=random)


class LayerCodecContract:
    """Proves that a codec takes layers apart and puts them together again without a bit being lost.

    Subclass it in a test module of yours, give ``codec``, ``make_layer`` and ``fill``, and pytest runs its tests: on
    layers that were fed at once and in pieces, written to a real entry file and loaded into fresh layers. It registers
    the codec for the class of your layers, as your program does.

    ::

        >>> from transformers.cache_utils import DynamicLayer
        >>> from kvkeep.layouts import codec_for
        >>> class MyLayer(DynamicLayer):
        ...     '''Holds what a DynamicLayer holds, so that layer's codec does.'''
        >>> class TestMyLayer(LayerCodecContract):
        ...     codec = codec_for(DynamicLayer(), 0)
        ...     def make_layer(self):
        ...         return MyLayer()
        ...     def fill(self, layer, first, last, batch):
        ...         keys, values = (token_rows(r, first, last, heads=2, dim=4, batch=batch) for r in ("keys", "values"))
        ...         return layer.update(keys, values)
        >>> TestMyLayer().test_a_loaded_layer_holds_the_same_bits()

    Attributes:
        codec: the codec.
        lengths: how many tokens a layer has seen when it is stored. Choose them around what changes in your layer: one
            less and one more than a window, or than the tokens that are compressed into one.
        continued: how many tokens are fed at a time to go on from there.
        stateless: names of attributes that hold nothing of the tokens, such as buffers that are written over.
    """

    codec: LayerCodec
    lengths: Sequence[int] = (1, 7, 24)
    continued: Sequence[int] = (3, 1, 1)
    stateless: Collection[str] = ()

    def make_layer(self) -> Any:
        """A fresh layer, as the model makes it, with room for all tokens that are fed."""
        raise NotImplementedError

    def fill(self, layer: Any, first: int, last: int, batch: int) -> Any:
        """Feed the tokens [first, last) of ``batch`` sequences, and return what the layer gives to attention.

        What is fed depends on the position alone, as it does in :func:`token_rows`, however it is cut into calls.
        """
        raise NotImplementedError

    def plan(self) -> LayerPlan:
        """What the model's own cache says of such a layer, which is what it is described by: ``codec.plan``, as given.

        Override it for a class that stands for another, such as a static layer, which does not know its window.
        """
        return self.codec.plan(self.make_layer())

    # --- taking apart ---

    def test_describing_gives_views_and_changes_nothing(self) -> None:
        """Fails where a described tensor is a copy, or a layer is not what it was before."""
        for layer, length in self._filled():
            before, held = self._held(layer).copy(), self._held(layer)
            state = self._describe(layer, length)
            after = self._held(layer)
            _no_difference(after, before, f"describing changed a layer of {length} tokens")
            if moved := [path for path, tensor in held.tensors.items() if tensor is not after.tensors[path]]:
                raise AssertionError(f"describing replaced the layer's {', '.join(moved)}")
            for role, tensor in state.tensors.items():
                _check(
                    not tensor.numel() or memory_of(tensor) in held.places(), f"the {role} are a copy, not a view of it"
                )
                _check(not tensor.requires_grad, f"the {role} require a gradient: detach them")

    def test_the_record_says_what_the_tensors_are(self) -> None:
        """Fails where the record, the plan and the tensors contradict each other."""
        for layer, length in self._filled():
            plan, state = self.plan(), self._describe(layer, length)
            record = state.record
            _check(record.kind == plan.kind, f"the record is of kind {record.kind!r}, the plan of {plan.kind!r}")
            own = {role for role, how in record.tensors.items() if not how.startswith("=")}
            _check(own == state.tensors.keys(), f"the record lists {sorted(own)}, given are {sorted(state.tensors)}")
            _check(
                plan.snapshot or not record.roles("snapshot"), "it has snapshots, so its plan must say snapshot=True"
            )
            for role in record.roles("rows"):
                shape = tuple(state.tensors[role].shape)
                _check(
                    len(shape) == 3 and shape[1] == record.rows,
                    f"the {role} are {list(shape)}, not [heads, {record.rows}, dim]",
                )
                _check(record.first + record.rows == length, f"the rows do not end at token {length}")

    def test_a_layer_that_was_never_filled_is_refused(self) -> None:
        """Fails where an empty layer is described as if it held something."""
        for _, length in self._that_keep_something():
            _refused("an empty layer is described", self._describe, self.make_layer(), length)

    def test_two_sequences_at_once_are_refused(self) -> None:
        """Fails where a layer with a batch of 2 is described."""
        for _, length in self._that_keep_something():
            layer = self.make_layer()
            self.fill(layer, 0, length, 2)
            _refused("a layer of two sequences is described", self._describe, layer, length)

    def test_another_number_of_tokens_is_refused(self) -> None:
        """Fails where a layer that counts its tokens is described as one of more, or of fewer."""
        for layer, length in self._that_keep_something():
            for other in (length - 1, length + 1) if hasattr(layer, "get_seq_length") else ():
                what = f"a layer that has seen {length} tokens is described as one of {other}"
                _refused(what, self._describe, layer, other)

    def test_rows_of_one_token_are_those_described(self) -> None:
        """Fails where ``row`` gives something else than what is stored of that token; it may give ``None``."""
        for layer, length in self._filled():
            state = self._describe(layer, length)
            for position in range(-1, length + 1):
                rows = self.codec.row(layer, position, length)
                if rows is None:
                    continue
                at = position - state.record.first
                _check(0 <= at < state.record.rows, f"there are rows of token {position}, where none is stored")
                _check(sorted(rows) == state.record.roles("rows"), f"the rows of a token are those of {sorted(rows)}")
                for role, row in rows.items():
                    stored_row = state.tensors[role][None, :, at]
                    _check(same_bits(row, stored_row), f"the {role} of token {position} are not those that are stored")

    # --- putting together ---

    def test_what_is_stored_comes_back(self) -> None:
        """Fails where a tensor that was described is another one when the loaded layer is described."""
        for layer, length, file in self._stored():
            state, again = self._describe(layer, length), self._describe(self._load(file, length), length)
            _check(again.record == state.record, f"a loaded layer is described as {again.record}, not {state.record}")
            for role, tensor in state.tensors.items():
                _check(same_bits(again.tensors[role], tensor), f"the {role} did not come back")

    def test_a_loaded_layer_holds_the_same_bits(self) -> None:
        """Fails where any attribute of a loaded layer is not that of the layer that was stored."""
        for layer, length, file in self._stored():
            fresh = self._load(file, length)
            _no_difference(self._held(fresh), self._held(layer), f"a layer loaded after {length} tokens is another one")

    def test_a_loaded_layer_goes_on_alike(self) -> None:
        """Fails where more tokens give another result than in the layer that was stored."""
        for layer, length, file in self._stored():
            fresh = self._load(file, length)
            self._go_on_alike(fresh, layer, length)
            _no_difference(self._held(fresh), self._held(layer), f"a layer that went on from {length} tokens differs")

    def test_a_shorter_load_goes_on_alike_or_is_refused(self) -> None:
        """Fails where fewer tokens than are stored can be loaded, and do not go on as so many do."""
        for _, length, file in self._stored():
            for tokens in sorted({length - 1, length // 2} - {0}):
                try:
                    fresh = self._load(file, tokens)
                except ValueError:
                    continue
                short = self.make_layer()
                self.fill(short, 0, tokens, 1)
                self._go_on_alike(fresh, short, tokens)

    def test_two_loads_share_nothing(self) -> None:
        """Fails where two layers loaded from one entry, or a loaded and a stored one, have memory in common."""
        for layer, length, file in self._stored():
            one, other = self._load(file, length), self._load(file, length)
            _check(
                self._held(one).places().isdisjoint(self._held(other).places() | self._held(layer).places()),
                "two layers lie in the same memory",
            )
            before = self._held(other).copy()
            self._feed(one, length, self.continued)
            _no_difference(self._held(other), before, "feeding one loaded layer changed another")

    def test_a_record_of_another_kind_is_refused(self) -> None:
        """Fails where ``wanted`` takes what the layers of another class have stored."""
        for layer, length in self._filled():
            record = replace(self._describe(layer, length).record, kind="another kind")
            _refused("a record of another kind is taken", self.codec.wanted, self.make_layer(), record, length)

    def test_more_tokens_than_are_stored_are_refused(self) -> None:
        """Fails where ``wanted`` asks for rows that the entry does not have."""
        for layer, length in self._filled():
            record = self._describe(layer, length).record
            if record.roles("rows"):
                what = f"{length + 1} tokens are loaded from an entry of {length}"
                _refused(what, self.codec.wanted, self.make_layer(), record, length + 1)

    def test_destinations_are_as_asked_for(self) -> None:
        """Fails where ``wanted`` and ``allocate`` do not give places that the entry's tensors fit into."""
        for layer, length in self._filled():
            state = self._describe(layer, length)
            fresh = self.make_layer()
            before = self._held(fresh).copy()
            first, last = self.codec.wanted(fresh, state.record, length)
            _no_difference(self._held(fresh), before, "asking which rows are wanted changed a layer")
            _check_wanted(state.record, first, last, length)
            likes = _likes(state, last - first)
            targets = self.codec.allocate(fresh, likes, length, _CPU, lambda like: torch.empty_like(like, device=_CPU))
            _check(targets.keys() == likes.keys(), f"there are places for {sorted(targets)}, not {sorted(likes)}")
            for role, like in likes.items():
                _check_target(role, targets[role], like, rows=state.record.tensors[role] == "rows")

    # --- in place of something else ---

    def test_a_used_layer_is_filled_as_a_fresh_one(self) -> None:
        """Fails where a layer that held other tokens, as in ``load(into=)``, still shows it when it was filled anew."""
        for layer, length, file in self._stored():
            used = self.make_layer()
            self._feed(used, 0, [self._most()])
            used = self._load(file, length, emptied(used))
            what = f"a layer that held {self._most()} tokens is filled with {length}, and differs"
            _no_difference(self._held(used), self._held(layer), what)
            self._go_on_alike(used, layer, length)

    def test_an_emptied_layer_goes_on_as_a_fresh_one(self) -> None:
        """Fails where ``reset`` leaves something behind, which a load that misses or breaks off would give back."""
        for before in (*self.lengths, self._most()):
            used, fresh = self.make_layer(), self.make_layer()
            self._feed(used, 0, [before])
            self._go_on_alike(emptied(used), fresh, 0)
            _no_difference(self._held(used), self._held(fresh), f"a layer was emptied of {before} tokens, and differs")

    # --- inside ---

    def _describe(self, layer: Any, length: int) -> LayerState:
        return self.codec.describe(layer, self.plan(), length)

    def _held(self, layer: Any) -> HeldState:
        return HeldState.of(layer, self.stateless)

    def _filled(self) -> Iterator[tuple[Any, int]]:
        """Layers that have seen each of the lengths: fed at once, and in pieces."""
        for length in self.lengths:
            half = length // 2
            for pieces in [[length], [half, *[1] * (length - half)]] if half else [[length]]:
                layer = self.make_layer()
                self._feed(layer, 0, pieces)
                yield layer, length

    def _stored(self) -> Iterator[tuple[Any, int, EntryFile]]:
        """The same, each with an entry that it was written to."""
        with TemporaryDirectory(prefix="kvkeep-testing-") as folder:
            shelf = Shelf(Path(folder))
            for layer, length in self._filled():
                with shelf.entry(self._describe(layer, length), length) as file:
                    yield layer, length, file

    def _that_keep_something(self) -> Iterator[tuple[Any, int]]:
        for layer, length in self._filled():
            if self._describe(layer, length).record.tensors:
                yield layer, length

    def _feed(self, layer: Any, first: int, pieces: Sequence[int]) -> None:
        for count in pieces:
            self.fill(layer, first, first + count, 1)
            first += count

    def _most(self) -> int:
        """As many tokens as are ever fed."""
        return max(self.lengths) + sum(self.continued)

    def _load(self, file: EntryFile, tokens: int, layer: Any = None) -> Any:
        layer = self.make_layer() if layer is None else layer
        register_layer_codec(type(layer), self.codec)
        return loaded(file, layer, tokens)

    def _go_on_alike(self, one: Any, other: Any, length: int) -> None:
        first = length
        for count in self.continued:
            results = [self.fill(layer, first, first + count, 1) for layer in (one, other)]
            first += count
            _check(same_outputs(*results), f"loaded after {length} tokens, it gives something else after {first}")


def _likes(state: LayerState, rows: int) -> dict[str, torch.Tensor]:
    likes = {}
    for role, tensor in state.tensors.items():
        shape = (tensor.shape[0], rows, tensor.shape[2]) if state.record.tensors[role] == "rows" else tensor.shape
        likes[role] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return likes


def _check_wanted(record: LayerRecord, first: int, last: int, tokens: int) -> None:
    if record.roles("rows"):
        _check(
            record.first <= first <= last == tokens,
            f"rows [{first}, {last}) are wanted for {tokens} tokens, of [{record.first}, {tokens})",
        )
    else:
        _check(first == last, f"rows [{first}, {last}) are wanted where none are stored")


def _check_target(role: str, target: torch.Tensor, like: torch.Tensor, *, rows: bool) -> None:
    _check(
        (target.shape, target.dtype, target.device) == (like.shape, like.dtype, _CPU),
        f"the place for {role} is {list(target.shape)} {target.dtype}, not {list(like.shape)} {like.dtype} on the CPU",
    )
    if rows:
        _check(all(head.is_contiguous() for head in target), f"a head of the place for {role} is not contiguous")
    else:
        _check(target.is_contiguous(), f"the place for {role} is not contiguous")


def _no_difference(mine: HeldState, other: HeldState, what: str) -> None:
    found = difference(mine, other)
    _check(found is None, f"{what}: {found}")


def _refused(what: str, call: Callable[..., Any], *arguments: Any) -> None:
    try:
        call(*arguments)
    except ValueError:
        return
    raise AssertionError(f"{what}, where a ValueError should be raised")


def _check(right: bool, wrong: str) -> None:
    if not right:
        raise AssertionError(wrong)
