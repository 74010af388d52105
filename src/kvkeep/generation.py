"""One call of ``generate`` with a store: what its cache is filled with, and what came of it.

Which calls are served is ``obstacles``', how a call is reached from outside ``attachment``'s.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvkeep import compat
from kvkeep.errors import InvalidPromptError, UnsupportedRequestError
from kvkeep.guard import compare, prove
from kvkeep.inputs import Inputs, read_inputs, read_paired
from kvkeep.layouts import put_quantized, take_quantized
from kvkeep.lines import Line, read_lines
from kvkeep.obstacles import is_assisted, obstacle, paired_obstacle
from kvkeep.prefill import feed_slots
from kvkeep.prompts import read_ids
from kvkeep.ranks import Agreement, Offer, Ranks, ranks_of
from kvkeep.records import GenerateReport, Match
from kvkeep.served import Kept, Pending, Served, Source, miss
from kvkeep.settings import SaveMode

_SEE_IDS = ("logits_processor", "stopping_criteria", "streamer", "custom_generate")
"""Arguments by which code of the caller sees the ids while they are generated, and could edit them."""

_CACHE_GIVEN = "cache_given: the call brings a cache of its own"


@dataclass(slots=True)
class Call:
    """One running ``generate``: what is known of it so far, and in the end its report.

    Attributes:
        source: where KV comes from.
        guard: whether a hit is watched.
        arguments: those of ``generate`` by name.
        ids: the prompt's ids, [rows, tokens].
        inputs: the prompt with its media, once it is known that it may be served.
        expansion: how many sequences come of each row.
        tokens: tokens of the prompt without padding, over all its lines, where it has several.
        encode: runs the vision tower, or the encoder, on the model inputs it is given: put off until it is known what
            must be seen.
        heard: what the encoder of an encoder-decoder model is fed, by name.
        positions: positions of its output, over all lines.
        untold: whether the cache holds tokens that the model has not been told of, which prepares its inputs itself.
        uncounted: tokens in a cache that does not count them, which ``generate`` would feed again.
        drafts: whether tokens are drafted and checked: the first pass of that must be told what the cache holds.
        chunked: whether the prompt is fed in several passes.
        ranks: the ranks that run the model together with this one, where there are such.
        agreement: what they agree on.
        taken: whether ``generate`` has begun.
        report: what came of it.
        served: what the cache was filled with.
        seconds: how long that took.
        save: what of it is to be stored; ``None`` where it does not say so itself.
        kept: what is to be stored when it has ended, or was stored.
        cache: the cache, until the call has ended.
        quantized: the layers of a quantized cache, while others with full rows stand in for them in the first pass.
    """

    source: Source
    guard: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ids: torch.Tensor | None = None
    inputs: Inputs | None = None
    expansion: int = 1
    tokens: int | None = None
    encode: Callable[[dict[str, Any]], Any] | None = None
    heard: Mapping[str, Any] | None = None
    positions: int = 0
    untold: bool = False
    uncounted: int = 0
    drafts: bool = False
    chunked: bool = False
    ranks: Ranks | None = None
    agreement: Agreement | None = None
    taken: bool = False
    report: GenerateReport | None = None
    served: Served | None = None
    seconds: float = 0.0
    save: SaveMode | None = None
    kept: Pending | Kept | None = None
    cache: Any = None
    quantized: list[Any] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Whether ``generate`` has begun and its cache is not prepared yet."""
        return self.taken and self.report is None and self.served is None

    def hand_over(
        self, model: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, given: bool
    ) -> None:
        """Fill the cache that ``generate`` has just prepared, if this call may be served; nothing is fed twice."""
        self.ranks = ranks_of(model, self.arguments.get("synced_gpus"), self.ids)
        if compat.is_encoder_decoder(model):  # never served where there are other ranks
            self._fill_paired(model, generation_config, model_kwargs, mode, given)
            return
        if self.ranks is None:
            self._fill(model, generation_config, model_kwargs, mode, given)
        else:
            self.agreement = Agreement(self.ranks)
            try:
                self._fill(model, generation_config, model_kwargs, mode, given)
            finally:
                self.agreement.no_offer()
        if self.served is None or not self.served.match:
            self._quantize(model_kwargs.get(compat.GENERATE_CACHE_ARGUMENT))
        held = self.served.held if self.watched and self.served is not None else self._reused()
        cache = model_kwargs.get(compat.GENERATE_CACHE_ARGUMENT)  # a model's own may have another name
        if held and self.served is not None and cache is not None and not compat.counts_tokens(cache):
            self.uncounted = self.served.cached
        if held and self.inputs is not None:
            self.untold = bool(self.inputs.types) or not compat.CUTS_INPUTS
            if compat.CUTS_INPUTS:
                self._replace_media(model_kwargs, self.inputs.between(held, len(self.inputs)))
        if self.encode is not None:
            self.encode(model_kwargs)

    def cut_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the first pass, without what a cache holds that cannot say how many tokens it has seen."""
        held, self.uncounted = self.uncounted, 0
        if not held:
            return args, kwargs
        if "input_ids" in kwargs:
            return args, {**kwargs, "input_ids": kwargs["input_ids"][:, held:]}
        return (args[0][:, held:], *args[1:]), kwargs

    def cut_draft(self, ids: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments by which the first inputs of assisted decoding are prepared, without what the cache holds."""
        self.drafts = False
        held = compat.cached_tokens(arguments[compat.GENERATE_CACHE_ARGUMENT])
        return {**arguments, "next_sequence_length": ids.shape[1] - held} if held else arguments

    def take_back(self, model_kwargs: dict[str, Any]) -> None:
        """Give the model inputs all the media again, or the encoder's output, for a cache that has been emptied."""
        if self.heard is not None:
            self._encode(model_kwargs)
            return
        if self.inputs is None or not self.inputs.values:
            return
        self._replace_media(model_kwargs, self.inputs.values)
        if self.encode is not None:
            self.encode(model_kwargs)

    def _replace_media(self, model_kwargs: dict[str, Any], media: Mapping[str, Any]) -> None:
        for name in (*(self.inputs.values if self.inputs else ()), compat.ENCODED):
            model_kwargs.pop(name, None)
        model_kwargs.update(media)

    def first_inputs(
        self, model: Any, prepare: Callable[..., dict[str, Any]], ids: torch.Tensor, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """What the first forward pass takes, where the model's own preparation errs behind a filled cache."""
        self.untold, inputs = False, self.inputs or Inputs(read_ids(ids))
        if compat.CUTS_INPUTS:
            return compat.without_early_mask(prepare(ids, **arguments))
        placed = ("cache_position", "position_ids", "attention_mask", *inputs.values, *inputs.types)
        others = {name: value for name, value in arguments.items() if name not in placed}
        cache = others.pop(compat.GENERATE_CACHE_ARGUMENT)
        held = compat.cached_tokens(cache)
        rest = inputs.between(held, len(inputs))
        return compat.stretch_inputs(
            model,
            cache,
            ids,
            held,
            len(inputs),
            before=inputs.values,
            media=rest,
            types=inputs.types,
            prepare=prepare,
            others=others,
        )

    def _reused(self) -> int:
        return 0 if self.report is None else self.report.reused_tokens

    def _cache_to_fill(
        self, model: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, given: bool
    ) -> tuple[Any, str | None]:
        """The empty cache of this call, and why it must run without the store, if it must."""
        cache = model_kwargs.get(compat.GENERATE_CACHE_ARGUMENT)
        reason = _CACHE_GIVEN if given else None
        reason = reason or obstacle(model, self, generation_config, model_kwargs, mode)
        if reason is None and cache is None and not compat.CHUNKS:
            cache = compat.owned_cache(model)  # as the model itself makes it with the inputs of the first pass
        if reason is None and cache is None:
            reason = "layout: this model keeps its state in no Cache"
        if reason is None and compat.is_used(cache):
            reason = "cache_given: the cache that generate prepared is not empty"
        if reason is None and compat.is_quantized(cache) and getattr(generation_config, "prefill_chunk_size", None):
            reason = "mode: prefill_chunk_size with a quantized cache is not served yet"
        return cache, reason

    def _fill(self, model: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, given: bool) -> None:
        began = time.perf_counter()
        cache, reason = self._cache_to_fill(model, generation_config, model_kwargs, mode, given)
        mask = model_kwargs.get("attention_mask")
        if reason is not None or self.ids is None:
            self.tokens = self._counted(mask)
            self.finish(miss(reason), 0)
            return
        if not compat.cuts_ids(generation_config, mask, self.slots):
            self.finish(miss("mask: generate would feed again what is cached: give a mask as long as the prompt"), 0)
            return
        extras = compat.generation_inputs(model_kwargs)
        compat.add_repeats(cache, compat.text_config(model))
        self.quantized = take_quantized(cache)
        self.drafts, self.chunked = is_assisted(mode), bool(getattr(generation_config, "prefill_chunk_size", None))
        try:
            lines = read_lines(self.ids, None if mask is None else mask[:: self.expansion])
            if len(lines) * self.expansion > 1 or lines[0].padding:
                self._fill_lines(model, cache, lines, extras, mask)
                return
            inputs = read_inputs(model, lines[0].inputs.ids, extras)
        except (InvalidPromptError, UnsupportedRequestError) as error:
            self.finish(miss(f"inputs: {error}"), 0)
            return
        self.inputs, self.cache = inputs, cache
        if self.source.keeper is not None and self.ranks is None:
            way = str(getattr(mode, "value", mode))
            self.kept = self.source.keeper.begin(
                inputs, self.save, way, chunked=self.chunked, watched=any(map(self.arguments.get, _SEE_IDS))
            )
        new = max(1, int(getattr(generation_config, "max_length", None) or 0) - len(inputs))
        room = 0 if self.drafts else new  # drafts are cropped: no room
        served, apart = self._fill_agreed(cache, inputs, room)
        self.served = served
        self.seconds = time.perf_counter() - began
        if self.drafts and served.snapshots:
            compat.empty_cache(cache)
            self.finish(miss("mode: assisted_generation with state that cannot be cut is not served yet"), 0)
        elif served.row is None:
            if served.match and compat.is_owned(cache):
                compat.hand_owned(model, cache, model_kwargs, served.cached, self.ids)
            self.finish(served.match, served.reused)
        elif self.drafts or apart or not self._is_kept(cache, served.held):
            self._settle(cache, prove(model, cache, inputs, served.row), served)

    def _fill_agreed(self, cache: Any, inputs: Inputs, room: int) -> tuple[Served, bool]:
        """Fill the cache with what is stored, as far as other ranks have it; and whether the guard needs a pass."""
        if self.agreement is None:
            served = self.source.fill(cache, inputs, guard=self.guard, new_tokens=room, chunked=self.chunked)
            return served, False
        served, hoped = Served(miss(None)), 0
        if compat.is_owned(cache):
            return Served(miss("ranks: a model's own cache is not served to ranks that run together")), False

        def offer(at_most: int) -> Offer:
            nonlocal served, hoped
            if served.held:
                compat.empty_cache(cache)
            served = self.source.fill(cache, inputs, guard=self.guard, new_tokens=room, at_most=at_most)
            if served.snapshots:
                compat.empty_cache(cache)
                served = Served(miss("ranks: state that cannot be cut is not served to ranks that run together"))
            watched, hoped = served.row is not None, max(hoped, served.held)
            return Offer(served.held, watched, watched and not self._is_kept(cache, served.held))

        agreed = self.agreement.reach(offer, len(inputs) - 1)
        if hoped and not agreed.held:
            compat.empty_cache(cache)
            served = Served(miss("ranks: there is nothing that every rank can reuse"))
        elif served.held < hoped:
            reason = f"ranks: another rank can reuse {served.held} tokens"
            served = replace(served, match=replace(served.match, reason=reason))
        return served, agreed.apart

    def _fill_paired(
        self, model: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, given: bool
    ) -> None:
        """The same for a model with an encoder, which runs unless the cache is filled with what it would give."""
        began, served = time.perf_counter(), Served(miss(None))
        cache = model_kwargs.get(compat.GENERATE_CACHE_ARGUMENT)
        inputs, reason = self._paired_inputs(model, generation_config, model_kwargs, mode, given)
        if inputs is not None:
            new = max(0, int(getattr(generation_config, "max_length", None) or 0) - len(inputs))
            served = self.source.fill(cache, inputs, guard=self.guard, new_tokens=new)
            self.seconds = time.perf_counter() - began
        unheard = served.encoder is not None and self.encode is not None
        if unheard:
            model_kwargs[compat.ENCODER_OUTPUTS] = served.encoder
            self.positions = served.positions
        else:
            self._encode(model_kwargs)
        if inputs is None or not served.match:
            self.finish(served.match if reason is None else miss(reason), 0)
            return
        if served.held:
            compat.tell_length(generation_config, self.slots)
        self.served = replace(served, reused=served.held + (served.positions if unheard else 0))
        if served.row is None:
            self.finish(served.match, self.served.reused)
        elif not self._is_kept(cache, served.held):
            asked = inputs.encoded(model_kwargs[compat.ENCODER_OUTPUTS])
            if not self._settle(cache, prove(model, cache, asked, served.row), served):
                self._encode(model_kwargs)

    def _paired_inputs(
        self, model: Any, generation_config: Any, model_kwargs: Mapping[str, Any], mode: Any, given: bool
    ) -> tuple[Inputs | None, str | None]:
        """What the encoder and the decoder are fed, or why this call must run without the store."""
        cache = model_kwargs.get(compat.GENERATE_CACHE_ARGUMENT)
        reason = _CACHE_GIVEN if given else paired_obstacle(model, self, generation_config, mode)
        if reason is None and not compat.is_paired(cache):
            reason = "layout: this model keeps its state in no EncoderDecoderCache"
        if reason is None and compat.is_used(cache):
            reason = "cache_given: the cache that generate prepared is not empty"
        if reason is not None or self.ids is None or self.heard is None:
            return None, reason
        now = {name: value for name, value in model_kwargs.items() if name.startswith(("decoder_", "cross_attn"))}
        before = {name: value for name, value in self.heard.items() if not name.startswith("decoder_")}
        try:
            return read_paired(model, read_ids(self.ids), {**before, **now}), None
        except (InvalidPromptError, UnsupportedRequestError) as error:
            return None, f"inputs: {error}"

    def _encode(self, model_kwargs: dict[str, Any]) -> None:
        """Run the encoder, if that was put off, and count its positions."""
        if self.encode is not None:
            model_kwargs.pop(compat.ENCODER_OUTPUTS, None)
            self.encode(model_kwargs)
        hidden = getattr(model_kwargs.get(compat.ENCODER_OUTPUTS), "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.dim() > 1 and self.ids is not None:
            self.positions = hidden.shape[1] * self.ids.shape[0]

    def _fill_lines(
        self, model: Any, cache: Any, lines: Sequence[Line], extras: Mapping[str, Any], mask: torch.Tensor | None
    ) -> None:
        began, self.tokens = time.perf_counter(), sum(len(line.inputs) for line in lines)
        if self.ranks is not None:
            served = Served(miss("batch: ranks that run a model together are served one sequence at a time"))
        elif extras or compat.media_tokens(model):
            served = Served(miss("batch: pictures are served one sequence at a time"))
        elif self.quantized and any(line.padding for line in lines):
            served = Served(miss("batch: padding, which is not stored, decides the scales of a quantized cache"))
        else:
            served = self.source.fill_lines(
                cache, lines, copies=self.expansion, guard=self.guard, ids=self.all_ids, chunked=self.chunked
            )
        self.served, self.seconds = served, time.perf_counter() - began
        if not served.watched:
            self.finish(served.match, served.reused)
        elif self.drafts or not self._is_kept(cache, served.held):
            feed_slots(model, cache, self.all_ids, mask, served.held, served.held + 1)
            self._settle(cache, *self._objection(model, cache, served, served.held + 1))

    @property
    def all_ids(self) -> torch.Tensor | None:
        """The prompt's ids as they are fed: each line as often as sequences come of it."""
        return None if self.ids is None else self.ids.repeat_interleave(self.expansion, dim=0)

    def _is_kept(self, cache: Any, position: int) -> bool:
        """Whether some layer will still hold the guard's row when the whole prompt has been fed."""
        behind = self.slots - position - 1
        return any(compat.keeps_row(layer, behind) for layer in compat.decoder_part(cache).layers)

    @property
    def watched(self) -> bool:
        """Whether a hit is still to be compared with what the first forward pass computes."""
        return self.served is not None and self.report is None

    def judge(self, model: Any, cache: Any) -> bool:
        """Say whether the first forward pass agrees with the stored rows; if not, the cache is empty again."""
        if self.served is None or not self.served.watched or self.report is not None:
            self._quantize(cache)
            return True
        return self._settle(cache, *self._objection(model, cache, self.served, self.slots))

    def _objection(self, model: Any, cache: Any, served: Served, seen: int) -> tuple[str | None, Served]:
        """Why a part of what was served is not what the model computes, and which."""
        for part in served.watched:
            if part.row is not None:
                objection = compare(model, cache, served.held, seen, part.row, part.lines)
                if objection is not None:
                    return objection, part
        return None, served

    def _settle(self, cache: Any, objection: str | None, blamed: Served) -> bool:
        """Report a hit that passed the guard, or take it back."""
        if self.served is None:
            return True
        agreed = self.agreement is None or self.agreement.agrees(objection is None)
        if objection is None and agreed:
            self.finish(self.served.match, self.served.reused)
            if compat.cached_tokens(cache) == self.slots:
                self._quantize(cache)
            return True
        compat.empty_cache(cache)
        self._quantize(cache)
        elsewhere = miss("guard: another rank computes another row than the stored one")
        self.finish(elsewhere if objection is None else self.source.refuted(blamed, objection), 0)
        return False

    def _quantize(self, cache: Any) -> None:
        """Give a quantized cache its own layers back, with all that the first pass left in the others."""
        layers, self.quantized = self.quantized, []
        if layers:
            put_quantized(cache, layers)

    @property
    def slots(self) -> int:
        """Tokens of the prompt with its padding, 0 if it is not known."""
        return 0 if self.ids is None else int(self.ids.shape[-1])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt over all its lines, with the positions of an encoder; 0 if it is not known."""
        if self.positions and self.ids is not None:
            return self.ids.numel() + self.positions
        return self.slots if self.tokens is None else self.tokens

    def _counted(self, mask: torch.Tensor | None) -> int | None:
        """Tokens of the prompt without padding, where it has several lines."""
        if self.ids is None or self.ids.dim() != 2 or self.ids.shape[0] == 1:
            return None
        if mask is None or mask.dim() != 2 or mask.shape[1] != self.slots:
            return self.ids.numel()
        return int((mask[:: self.expansion] != 0).sum())

    def finish(self, match: Match, reused: int) -> None:
        """Write the report and hand it to the source."""
        self.report = GenerateReport(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=reused,
            reason=match.reason,
            load_seconds=self.seconds,
            key=match.entry.key if match.entry is not None else None,
            resident=match.resident,
        )
        self.source.reported(self.report)

    def ended(self, out: Any) -> None:
        """Store what is to be stored of the call, which has returned ``out``."""
        kept, cache, self.cache = self.kept, self.cache, None
        report, keeper = self.finished(), self.source.keeper
        begun = self.inputs is not None and self.ranks is None
        if kept is None and not begun and keeper is not None and keeper.wants(self.save):
            kept = Kept(reason=report.reason or "mode: a call of this kind is not stored by itself: warm its prompt")
        if kept is None:
            return
        if not isinstance(kept, Kept):
            kept = kept.end(cache, getattr(out, "sequences", out), report.reused_tokens)
        if kept != Kept():
            self.report = replace(report, stored=kept.key, not_stored=kept.reason)
            self.source.amended(self.report)

    def finished(self) -> GenerateReport:
        """The report; a call that never came to prepare a cache reused nothing."""
        if self.report is None:
            self.finish(miss("seam: generate prepared no cache"), 0)
        return self.report  # type: ignore[return-value]

    def pass_in(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments with a filled cache, for a ``generate`` whose steps cannot be reached; unchanged on a miss."""
        began = time.perf_counter()
        given = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        self.ids = given if isinstance(given, torch.Tensor) else None
        config = copy.deepcopy(kwargs.get("generation_config") or model.generation_config)
        model_kwargs = config.update(**{name: value for name, value in kwargs.items() if name != "generation_config"})
        self.expansion = max(config.num_beams or 1, config.num_return_sequences or 1)
        extras = {name: value for name, value in model_kwargs.items() if name not in compat.GENERATE_ARGUMENTS}
        self.ranks = ranks_of(model, kwargs.get("synced_gpus"), self.ids)
        reason = obstacle(model, self, config, extras, config.get_generation_mode())
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            reason = _CACHE_GIVEN
        if config.cache_implementation == "quantized":
            reason = "mode: a quantized cache is not served here"
        if compat.is_encoder_decoder(model):
            reason = "seam: the steps of this encoder-decoder model's generate cannot be reached"
        if self.ranks is not None:
            reason = "ranks: ranks that run a model together are not served here"
        if len(args) > 1:
            reason = "inputs: arguments by position are not looked at here"
        arguments: dict[str, Any] = {}
        inputs: Inputs | None = None
        served = Served(miss(reason))
        if reason is None and self.ids is not None:
            try:
                mask = extras.get("attention_mask")
                if self.expansion > 1 or (mask is not None and not bool((mask == 1).all())):
                    raise UnsupportedRequestError("several sequences and padding are not served here")
                inputs = read_inputs(model, read_ids(self.ids), compat.generation_inputs(extras))
                arguments, served = self.source.arguments(inputs, guard=self.guard)
            except (InvalidPromptError, UnsupportedRequestError) as error:
                served = Served(miss(f"inputs: {error}"))
        self.seconds = time.perf_counter() - began
        self.finish(served.match, served.reused)
        if served.match and compat.names_cache_kind(config):
            arguments["cache_implementation"] = None
        taken = () if inputs is None else (*inputs.values, *inputs.types)
        return {name: value for name, value in kwargs.items() if name not in taken} | arguments
