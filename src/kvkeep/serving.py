"""Serving: caches filled from a store, for the live model that they are for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvkeep import compat
from kvkeep.batches import fill_batch
from kvkeep.catalog import Obstacle
from kvkeep.drafting import differing_fields
from kvkeep.encoded import EncoderInput
from kvkeep.entry_format import EntryMeta
from kvkeep.errors import EntryError, UnsupportedCacheError, UnsupportedRequestError
from kvkeep.guard import prove
from kvkeep.identity import LiveIdentity
from kvkeep.inputs import Inputs, input_device
from kvkeep.layouts import Buffers, HeldLayers, LayerReader, fill_cache, fill_paired, plans_of, positions_of
from kvkeep.lines import Line
from kvkeep.manner import manner_of, places_by_mask
from kvkeep.matching import can_trim
from kvkeep.prefill import feed, feed_slots
from kvkeep.ranks import ranks_of
from kvkeep.records import GenerateReport, Identity, Match
from kvkeep.resident import HeldEntry
from kvkeep.served import Keeper, Served, miss
from kvkeep.storage.entries import EntryFile
from kvkeep.storage.entry_chain import EntryChain
from kvkeep.storage.index import Row
from kvkeep.storage.rows import has_snapshots, trims

if TYPE_CHECKING:
    from kvkeep.store import CacheStore

_ROOM = 256
"""New tokens that room is made for at most; beyond that a layer grows as transformers lets it."""

_STEP_COST = 8
"""Tokens of a prefill that take about as long as one token fed alone."""

_AHEAD = "ranks: nothing is computed ahead of generate where other ranks run the model, too"

_NAMED = 5
"""How many configuration fields a reason names."""

log = logging.getLogger("kvkeep")


class Serving:
    """The :class:`~kvkeep.served.Source` of one store and one live model.

    Attributes:
        guard: whether calls that do not say so themselves are guarded.
        keeper: who stores what calls have computed.
        reported: called with the report of every call.
        amended: called with it once more when something was stored of the call.
    """

    def __init__(
        self,
        store: CacheStore,
        live: LiveIdentity,
        *,
        guard: bool,
        reported: Callable[[GenerateReport], None],
        amended: Callable[[GenerateReport], None],
    ) -> None:
        self.guard = guard
        self.keeper: Keeper | None = None
        self.reported = reported
        self.amended = amended
        self._store = store
        self._live = live
        self._told: set[Any] = set()

    def lookup(self, inputs: Inputs, *, cache: Any = None) -> Match:
        """How many leading tokens could be served, at most all but the last; into ``cache``, if one is given."""
        if cache is None or not compat.is_quantized(cache):
            return self._lookup(inputs, "exact")
        return replace(max(self._quantized_first(cache, inputs), key=lambda found: found.tokens), exact=False)

    def _quantized_first(self, cache: Any, inputs: Inputs) -> list[Match]:
        """What there is for a quantized cache: what was quantized just so, and what can be."""
        try:
            form = compat.form_of(cache)
        except ValueError:
            return [self._lookup(inputs, "exact")]
        return [self._lookup(inputs, form), self._lookup(inputs, "exact")]

    def _lookup(self, inputs: Inputs, form: str) -> Match:
        total = len(inputs)
        try:
            identity = self._live.current()
            refused = self._refused(total)
            if refused is not None:
                return miss(refused)
            limit, obstacle = _limit(inputs), self._obstacle(total)
            match = self._store.find(identity, inputs.prefix, limit=limit, obstacle=obstacle, form=form)
            match = self._named(match, identity, inputs)
            if match.entry is None or inputs.encoder is None:
                return match
            return _with_encoder(match, positions_of(self._store.header(match.entry.key).meta), total)
        except UnsupportedRequestError as error:  # the model has become one that cannot be hashed
            return miss(f"identity: {error}")
        except EntryError as error:
            return miss(f"damaged: {error}")
        except Exception as error:  # noqa: BLE001  # whatever is wrong with a store, the caller's work goes on
            return miss(self.failed(error))

    def failed(self, error: Exception) -> str:
        """The reason of a miss for what a store raised, logged once; raises it where the store is told to."""
        return self._store.failed(error)

    def fill(
        self,
        cache: Any,
        inputs: Inputs,
        *,
        guard: bool,
        new_tokens: int = 0,
        form: str = "exact",
        at_most: int | None = None,
        chunked: bool = False,
    ) -> Served:
        """Fill an empty cache with the longest stored prefix of a prompt, at most all but the last token.

        For the guard, the cache gets one token fewer, and that token's stored rows come along. Of a prompt with an
        encoder, its part of the cache is filled, too, even where that is all there is. Where new tokens will
        follow, layers that grow get room for the rest of the prompt and for ``new_tokens`` more, within reason. With
        ``at_most`` it is filled with no more tokens than that, and nothing is fed to the model. With ``chunked`` the
        rest of the prompt is going to be fed in several passes.
        """
        model, total, served = self._live.model(), len(inputs), Served(miss(None))

        def use(file: EntryFile | EntryChain | HeldEntry, tokens: int) -> None:
            nonlocal served

            meta, tensors, rule = file.header.meta, file.header.tensors, self._live.length_rule()
            paired = inputs.encoder is not None
            watched = guard and (can_trim(meta, tokens - 1) or (paired and _has_first(meta, tokens)))
            if rule is not None and rule.obstacle(meta.end, tokens - 1, total) is not None:
                watched = False
            held = tokens - 1 if watched else min(tokens, total - 1)
            devices = compat.layer_devices(model, len(meta.layers))
            room = total - held + min(new_tokens, _ROOM) if new_tokens else 0
            read = partial(_layers_of, file)
            if paired:
                row = fill_paired(cache, meta, tensors, held, read, devices, next_row=watched, room=room)
            else:
                row = fill_cache(cache, meta, tensors, held, read("layers"), devices, next_row=watched, room=room)
            positions = positions_of(meta)
            served = Served(miss(None), held, held, row, file.identity, has_snapshots(meta), positions=positions)
            self._compare_attention(meta.recorded.get("attention"))

        steps = 0
        try:
            identity = self._live.current()
            refused, obstacle = self._refused(total), self._obstacle(total)
            if refused is not None:
                return Served(miss(refused))
            limit = _limit(inputs) if at_most is None else min(_limit(inputs), at_most + guard)
            match = self._store.serve(
                identity, inputs.prefix, limit=limit, use=use, lend=use, obstacle=obstacle, form=form
            )
            match = self._named(match, identity, inputs)
            match, served = self._unheard(match, served, total)
            steps = self._steps(served, total) if match and new_tokens and at_most is None else 0
        except UnsupportedRequestError as error:  # the model has become one that cannot be hashed
            compat.empty_cache(cache)
            return Served(miss(f"identity: {error}"))
        except Exception as error:  # noqa: BLE001  # whatever is wrong with a store, the caller's work goes on
            compat.empty_cache(cache)
            return Served(miss(self.failed(error)))
        if not match:
            return Served(match)
        if guard and served.row is None and match.tokens == 1 and not served.snapshots and inputs.encoder is None:
            compat.empty_cache(cache)
            return Served(miss("guard: a single token is stored, and one must be computed again"))
        if new_tokens and (why := self._unfit(cache, served, steps, chunked=chunked)) is not None:
            compat.empty_cache(cache)
            return Served(miss(f"layout: {type(model).__name__} {why}"))
        for at in range(served.held, served.held + steps):
            feed(model, cache, inputs, at, at + 1)
        return replace(served, match=match, cached=served.held + steps, reused=served.held)

    def _unheard(self, match: Match, served: Served, total: int) -> tuple[Match, Served]:
        """The same with an encoder's part counted, and with what stands in for the encoder, where it need not run."""
        if not match or not served.positions:
            return match, served
        if self._live.asked(manner_of).skips:
            served = replace(served, encoder=compat.nothing_encoded(self._live.model(), served.positions))
        return _with_encoder(match, served.positions, total), served

    def fill_lines(
        self,
        cache: Any,
        lines: Sequence[Line],
        *,
        copies: int,
        guard: bool,
        ids: torch.Tensor | None = None,
        chunked: bool = False,
    ) -> Served:
        """Fill an empty cache of several lines with what is stored of all of them, up to one slot.

        Args:
            cache: for each line as many lines as ``copies``.
            lines: the lines, each with its padding.
            copies: how many sequences come of each line.
            guard: leave the last slot out, and give the stored rows of its tokens.
            ids: what is going to be fed, for each line of the cache, [lines, slots]; none where that is the caller's.
            chunked: whether it is going to be fed in several passes.
        """
        model = self._live.model()
        try:
            plans = self._live.asked(plans_of)
        except UnsupportedCacheError as error:
            return Served(miss(f"layout: {error}"))
        if self._live.length_rule() is not None or compat.is_owned(cache) or not all(plan.copies for plan in plans):
            return Served(miss("batch: this model's layout is served one sequence at a time"))
        states = any(plan.snapshot for plan in plans)
        if states and any(line.padding for line in lines):
            return Served(miss("batch: a state stands for all tokens before it, and these lines are of other lengths"))
        if any(line.padding for line in lines) and not self._live.asked(places_by_mask):
            return Served(miss(f"batch: {type(model).__name__} places tokens by their slot, padding counted"))
        try:
            served = fill_batch(
                cache,
                lines,
                self.lookup,
                partial(self.fill, guard=guard),
                config=compat.text_config(model),
                copies=copies,
                watched=guard and not states,
            )
        except Exception as error:  # noqa: BLE001  # whatever is wrong, the caller's work goes on
            compat.empty_cache(cache)
            return Served(miss(self.failed(error)))
        if not (served.match and states) or ids is None:
            return served
        steps = self._steps(served, ids.shape[1])
        if (why := self._unfit(cache, served, steps, chunked=chunked)) is not None:
            compat.empty_cache(cache)
            return Served(miss(f"layout: {type(model).__name__} {why}"))
        for at in range(served.held, served.held + steps):
            feed_slots(model, cache, ids, None, at, at + 1)
        return replace(served, cached=served.held + steps)

    def _steps(self, served: Served, total: int) -> int:
        """How many tokens of the prompt must be fed one by one before ``generate`` feeds the last."""
        between = total - 1 - served.held
        return between if between and served.snapshots and self._live.asked(manner_of).singly else 0

    def _unfit(self, cache: Any, served: Served, steps: int, *, chunked: bool) -> str | None:
        """Why the model cannot go on from a filled cache, or not in less time than it takes to compute it."""
        if steps * _STEP_COST > served.held:
            return f"goes on from a cache one token at a time, {steps} times"
        if chunked and served.snapshots and self._live.asked(manner_of).singly:
            # Without a store, later chunks do not see the state that the first one left: no hit is to differ from that.
            return "goes on from a cache one token at a time, and prefill_chunk_size feeds several"
        return self._live.asked(manner_of).objection if compat.is_owned(cache) else None

    def _named(self, match: Match, identity: Identity, inputs: Inputs) -> Match:
        """A miss because of another configuration, with the names of what differs in it."""
        if match or match.reason is None or "another config" not in match.reason:
            return match
        recorded = self._store.recorded_by_stranger(identity, inputs.prefix).get("config")
        names = differing_fields(recorded, self._live.fields())
        if not names:
            return match
        listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        return replace(match, reason=match.reason.replace("another config", f"another config ({listed})", 1))

    def _refused(self, prompt: int) -> str | None:
        """Why no entry at all can serve a prompt of so many tokens."""
        rule = self._live.length_rule()
        return None if rule is None else rule.refuses(prompt)

    def _obstacle(self, prompt: int) -> Obstacle | None:
        """What keeps entries that were computed otherwise from a prompt of so many tokens."""
        rule = self._live.length_rule()
        kernel = compat.attention_implementation(self._live.model()) if self._store.strict_identity else None
        if rule is None and kernel is None:
            return None

        def obstacle(row: Row, tokens: int) -> str | None:
            if kernel is not None and row.attention != kernel:
                return f"attention: the entry was computed with {row.attention}, the model runs {kernel}"
            return None if rule is None else rule.obstacle(row.end, tokens, prompt)

        return obstacle

    def _compare_attention(self, recorded: Any) -> None:
        """Say once that another kernel computed what is served: right, and rounded otherwise."""
        kernel = compat.attention_implementation(self._live.model())
        if recorded != kernel and recorded not in self._told:
            self._told.add(recorded)
            log.warning(
                "kvkeep: an entry computed with %s attention serves a model that runs %s; they round differently "
                "(CacheStore(..., strict_identity=True) makes this a miss)",
                recorded,
                kernel,
            )

    def load(self, cache: Any, inputs: Inputs) -> int:
        """Fill an empty cache, and leave the model as a prefill of so many tokens would; the tokens, 0 on a miss.

        Positions of an encoder count, too.
        """
        form, model = "exact", self._live.model()
        if compat.is_quantized(cache) and (entry := self.lookup(inputs, cache=cache).entry) is not None:
            form = entry.form
        served = self.fill(cache, inputs, guard=False, form=form)
        if (served.match.reason or "").startswith("layout"):
            log.warning("kvkeep: nothing was loaded: %s", served.match.reason)
        held = served.held
        if inputs.encoder is not None:
            return held + served.positions
        if held and compat.media_tokens(model):
            inputs = inputs.on(input_device(model))
            ids = inputs.tensor(input_device(model))
            compat.place(model, ids, {**inputs.values, **inputs.types}, after=held)
        return held

    def load_lines(self, cache: Any, lines: Sequence[Line]) -> int:
        """Fill an empty cache with what is stored of several lines, up to one slot; the slots, 0 on a miss."""
        served = self.fill_lines(cache, lines, copies=1, guard=False)
        if (served.match.reason or "").startswith(("layout", "batch")):
            log.warning("kvkeep: nothing was loaded: %s", served.match.reason)
        return served.held

    def arguments(self, inputs: Inputs, *, guard: bool) -> tuple[dict[str, Any], Served]:
        """What ``generate`` takes beside the ids, with a filled cache where it cannot be reached from inside."""
        model = self._live.model()
        inputs = inputs.on(input_device(model))
        if inputs.encoder is not None:
            return self._paired_arguments(model, inputs, inputs.encoder, guard=guard)
        whole = {**inputs.values, **inputs.types}
        if ranks_of(model, None) is not None:
            return whole, Served(miss(_AHEAD))
        if compat.owned_class(compat.text_config(model)) is not None:
            return whole, Served(miss("layout: a model's own cache is handed over within generate alone"))
        cache = compat.dynamic_cache(compat.text_config(model))
        served = self.fill(cache, inputs, guard=guard)
        objection = None if served.row is None else prove(model, cache, inputs, served.row)
        if objection is not None:
            return whole, Served(self.refuted(served, objection))
        if not served.match:
            return whole, served
        if not compat.counts_tokens(cache) or self._steps(served, len(inputs)):
            return whole, Served(miss("layout: generate would feed what a given cache of this kind holds once more"))
        others: dict[str, Any] | None = {}
        if compat.media_tokens(model):
            others = compat.continued_inputs(
                model,
                inputs.tensor(input_device(model)),
                before=inputs.values,
                media=inputs.between(served.match.tokens, len(inputs)),
                types=inputs.types,
            )
        if others is None:
            return whole, Served(miss("inputs: this transformers takes no media behind a cache that it is given"))
        return {compat.GENERATE_CACHE_ARGUMENT: cache, **_kind_of(model), **others}, served

    def _paired_arguments(
        self, model: Any, inputs: Inputs, encoder: EncoderInput, *, guard: bool
    ) -> tuple[dict[str, Any], Served]:
        ids = inputs.tensor(input_device(model))
        whole = {**(encoder.values or {}), "decoder_input_ids": ids}
        if ranks_of(model, None) is not None:
            return whole, Served(miss(_AHEAD))
        cache = compat.paired(compat.dynamic_cache(compat.text_config(model)))
        served = self.fill(cache, inputs, guard=guard)
        if served.row is not None:  # asked of a copy: the token may be the last, which is left to generate
            asked = compat.with_own_part_copied(cache)
            objection = prove(model, asked, inputs.encoded(served.encoder), served.row)
            if objection is not None:
                return whole, Served(self.refuted(served, objection))
        if not served.match:
            return whole, served
        others = {} if served.encoder is None else {compat.ENCODER_OUTPUTS: served.encoder}
        counted = {"decoder_attention_mask": torch.ones_like(ids)}  # without it, all ids would be fed behind the cache
        return {**whole, compat.GENERATE_CACHE_ARGUMENT: cache, **counted, **others, **_kind_of(model)}, served

    def refuted(self, served: Served, why: str) -> Match:
        """Take back what was served, because the model computes otherwise: it has changed, or the entry is wrong."""
        entry = served.match.entry
        try:
            if entry is None or self._live.recheck() != entry.identity:
                log.warning("kvkeep: the model was changed unseen (%s); it has been hashed again", why)
                return miss(f"guard: {why}; the model was changed after it was checked, or in a way that no check saw")
            self._store.refute(entry.key, f"guard: {why}", served.file)
        except UnsupportedRequestError as error:  # the model has become one that cannot be hashed
            return miss(f"identity: {error}")
        except Exception as error:  # noqa: BLE001  # the caller's work goes on
            return miss(f"guard: {why}; the entry could not be set aside ({self.failed(error)})")
        return miss(f"guard: {why}; the entry is set aside")


def _layers_of(file: EntryFile | EntryChain | HeldEntry, stem: str) -> LayerReader | HeldLayers:
    """What an entry stores of its layers, as :func:`~kvkeep.layouts.fill_cache` takes it."""
    return file.layers[stem] if isinstance(file, HeldEntry) else StoredLayers(file, stem)


class StoredLayers:
    """The layers of an open entry, as :func:`~kvkeep.layouts.fill_cache` reads them."""

    def __init__(self, file: EntryFile | EntryChain, stem: str) -> None:
        self._file = file
        self._stem = stem

    def rows(self, layer: int, first: int, last: int, targets: Buffers, behind: Buffers | None) -> None:
        """Read rows of one layer, and the row behind them."""
        self._file.read_rows(self._stem, layer, first, last, targets, behind)

    def snapshots(self, layer: int, targets: Mapping[str, memoryview]) -> None:
        """Read the snapshots of one layer."""
        self._file.read_snapshots(self._stem, layer, targets)


def _limit(inputs: Inputs) -> int:
    """How many of a prompt's ids may be matched: all but the last, which must be fed.

    Behind an encoder all of them: what was computed of the last one is compared, and the encoder's part serves even
    where there is no other.
    """
    return len(inputs) if inputs.encoder is not None else len(inputs) - 1


def _with_encoder(match: Match, positions: int, total: int) -> Match:
    """A match of so many of ``total`` ids with the positions of the encoder counted; the last id is to be fed."""
    return replace(match, tokens=positions + min(match.tokens, total - 1))


def _has_first(meta: EntryMeta, tokens: int) -> bool:
    """Whether the one token that is matched is the first, and its rows are there."""
    return tokens == 1 and not has_snapshots(meta) and all(not first for first, _ in trims(meta))


def _kind_of(model: Any) -> dict[str, Any]:
    """What keeps a model's own generation config from asking for another kind of cache than it is given."""
    named = compat.names_cache_kind(getattr(model, "generation_config", None))
    return {"cache_implementation": None} if named else {}
