"""The hand-over: ``model.generate`` fills the cache that it prepared itself from the store.

``generate`` expands its inputs, prepares an empty cache of whatever kind was asked for, and then feeds what that cache
does not hold yet. Between the last two steps :class:`Attachment` fills the cache. Nothing is passed in, so nothing can
contradict a configuration, and every kind of cache that has a codec is served where it lies. Where a model's
``generate`` does not take these steps, a filled dynamic cache is passed in instead.

While attached, three methods are shadowed on the instance: ``generate`` (to see its arguments), and the two of
``compat.SEAM``. Detaching puts back exactly what was there.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from kvkeep import compat
from kvkeep.errors import InvalidPromptError, UnsupportedRequestError
from kvkeep.forks import renew_after_fork
from kvkeep.keys import TokenIds
from kvkeep.prompts import read_ids
from kvkeep.records import GenerateReport, Match

_PROVEN_MODES = ("greedy_search", "sample")
_UNPROVEN_ARGUMENTS = ("custom_generate", "assistant_model", "negative_prompt_ids", "prompt_lookup_num_tokens")
_UNPROVEN_SETTINGS = ("prefill_chunk_size", "token_healing")


class Source(Protocol):
    """Where the KV of a prompt comes from: a ``BoundStore``."""

    def fill(self, cache: Any, ids: TokenIds) -> Match:
        """Fill an empty cache with as much as is stored of ``ids``."""

    def arguments(self, ids: TokenIds) -> tuple[dict[str, Any], Match]:
        """The same as arguments for ``generate``: a filled cache, and what keeps the config from contradicting it."""

    def reported(self, report: GenerateReport) -> None:
        """Take note of what one call reused."""


@dataclass(slots=True)
class Call:
    """One running ``generate``: what is known of it so far, and in the end its report."""

    source: Source
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ids: torch.Tensor | None = None
    expansion: int = 1
    taken: bool = False
    report: GenerateReport | None = None

    def finish(self, match: Match, seconds: float) -> None:
        """Write the report and hand it to the source."""
        self.report = GenerateReport(
            prompt_tokens=0 if self.ids is None else int(self.ids.shape[-1]),
            reused_tokens=match.tokens,
            reason=match.reason,
            load_seconds=seconds,
            key=match.entry.key if match.entry is not None else None,
        )
        self.source.reported(self.report)

    def finished(self) -> GenerateReport:
        """The report; a call that never came to prepare a cache reused nothing."""
        if self.report is None:
            self.finish(Match(tokens=0, entry=None, reason="seam: generate prepared no cache"), 0.0)
        return self.report  # type: ignore[return-value]


def refuse(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what no stored prefix can serve, where the caller explicitly asks for one.

    Raises:
        UnsupportedRequestError: saying what to do instead.
    """
    config = arguments.get("generation_config") or getattr(model, "generation_config", None)
    if arguments.get("use_cache", getattr(config, "use_cache", True)) is False:
        raise UnsupportedRequestError("use_cache=False throws stored KV away: leave it out, or call model.generate")
    if model.training:
        raise UnsupportedRequestError("the model is in training mode (dropout changes KV): call model.eval() first")
    if arguments.get("inputs_embeds") is not None:
        raise UnsupportedRequestError("inputs_embeds have no token ids to look up: pass input_ids instead")
    for name in ("cache", "past_key_values"):
        if arguments.get(name) is not None:
            raise UnsupportedRequestError(
                f"{name}= and a store exclude each other: keep it with kv.save({name}, input_ids), then leave it out"
            )


class _Shadow:
    """A method of one model's instance, in front of the one that was there. A copy of the model gets its own method."""

    def __init__(self, model: Any, name: str, call: Callable[..., Any]) -> None:
        self._model = weakref.ref(model)
        self._name = name
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._model()))  # still without attributes of its own: the class answers
        return self if copied is None else getattr(copied, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model(), self._name)


class Attachment:
    """The shadowed methods of one model, shared by everybody who is attached to it.

    Sources attached by :meth:`attach` serve every call in every thread, the latest first. A call that runs inside
    :meth:`running` is served by its own source.
    """

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._users = 0
        self._replaced: dict[str, tuple[Any, _Shadow]] = {}
        self._local = threading.local()
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    # --- who is attached ---

    def attach(self, model: Any, source: Source) -> None:
        """Serve every ``generate`` of the model from ``source``, until :meth:`detach`."""
        self._shadow(model)
        with self._lock:
            self._sources.append(source)

    def detach(self, model: Any, source: Source) -> None:
        """End the latest :meth:`attach` of this source; does nothing if there is none."""
        with self._lock:
            attached = [number for number, one in enumerate(self._sources) if one is source]
            if not attached:
                return
            del self._sources[attached[-1]]
        self._unshadow(model)

    @contextmanager
    def running(self, model: Any, source: Source) -> Iterator[Call]:
        """Serve the first ``generate`` of this thread, within the block, from ``source``."""
        outer = self._call
        call = self._local.call = Call(source)
        self._shadow(model)
        try:
            yield call
        finally:
            self._unshadow(model)
            self._local.call = outer

    @property
    def _call(self) -> Call | None:
        """The call of this thread that still waits for its cache or has just had it."""
        return getattr(self._local, "call", None)

    def _waiting(self, *, taken: bool = True) -> Call | None:
        """This thread's call, if it has no report yet; not ``taken``: and no ``generate`` has begun it."""
        call = self._call
        return call if call is not None and call.report is None and call.taken == taken else None

    # --- the shadowed methods ---

    def _shadow(self, model: Any) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            wraps = {"generate": self._generate}
            if compat.has_seam(model):
                wraps |= dict(zip(compat.SEAM, (self._expand, self._prepare), strict=True))
            for name, wrap in wraps.items():
                shadow = _Shadow(model, name, wrap(model, getattr(model, name)))
                self._replaced[name] = model.__dict__.get(name), shadow
                model.__dict__[name] = shadow

    def _unshadow(self, model: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for name, (before, shadow) in self._replaced.items():
                if model.__dict__.get(name) is not shadow:
                    continue  # somebody else has put theirs in front meanwhile
                if before is None:
                    del model.__dict__[name]
                else:
                    model.__dict__[name] = before
            self._replaced.clear()

    def _generate(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            outer = self._call
            call = self._waiting(taken=False)
            if call is None and self._sources:  # nobody's own call: whoever is attached serves it
                call = Call(self._sources[-1])
            self._local.call = call  # none, too: one generate within another is not the other's
            try:
                if call is None:
                    return original(*args, **kwargs)
                call.arguments, call.taken = kwargs, True
                if not compat.has_seam(model):
                    kwargs = _pass_in(model, call, args, kwargs)
                return original(*args, **kwargs)
            finally:
                self._local.call = outer

        return generate

    def _expand(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def expand(*args: Any, **kwargs: Any) -> Any:
            call = self._waiting()
            if call is not None:
                call.ids = kwargs.get("input_ids")
                call.expansion = int(kwargs.get("expand_size", 1))
            return original(*args, **kwargs)

        return expand

    def _prepare(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(
            generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
        ) -> Any:
            given = any(model_kwargs.get(name) is not None for name in ("cache", "past_key_values"))
            result = original(generation_config, model_kwargs, generation_mode, *args, **kwargs)
            call = self._waiting()
            if call is not None:
                began = time.perf_counter()
                match = _hand_over(model, call, generation_config, model_kwargs, generation_mode, given)
                call.finish(match, time.perf_counter() - began)
            return result

        return prepare


def _hand_over(
    model: Any, call: Call, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, given: bool
) -> Match:
    cache = model_kwargs.get(compat.GENERATE_CACHE_ARGUMENT)
    reason = "cache_given: the call brings a cache of its own" if given else None
    reason = reason or obstacle(model, call, generation_config, model_kwargs, mode)
    if reason is None and cache is None:
        reason = "layout: this model keeps its state in no Cache"
    if reason is None and compat.cached_tokens(cache):
        reason = "cache_given: the cache that generate prepared is not empty"
    if reason is not None or call.ids is None:
        return Match(tokens=0, entry=None, reason=reason)
    try:
        ids = read_ids(call.ids)
    except InvalidPromptError as error:
        return Match(tokens=0, entry=None, reason=f"inputs: {error}")
    return call.source.fill(cache, ids)


def _pass_in(model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with a filled cache, for a ``generate`` whose steps cannot be reached; unchanged on a miss."""
    began = time.perf_counter()
    given = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    call.ids = given if isinstance(given, torch.Tensor) else None
    config = copy.deepcopy(kwargs.get("generation_config") or model.generation_config)
    model_kwargs = config.update(**{name: value for name, value in kwargs.items() if name != "generation_config"})
    call.expansion = max(config.num_beams or 1, config.num_return_sequences or 1)
    extras = {name: value for name, value in model_kwargs.items() if name not in compat.GENERATE_ARGUMENTS}
    reason = obstacle(model, call, config, extras, config.get_generation_mode())
    if len(args) > 1:
        reason = "inputs: arguments by position are not looked at here"
    if reason is not None or call.ids is None:
        call.finish(Match(tokens=0, entry=None, reason=reason), time.perf_counter() - began)
        return kwargs
    try:
        ids = read_ids(call.ids)
    except InvalidPromptError as error:
        call.finish(Match(tokens=0, entry=None, reason=f"inputs: {error}"), time.perf_counter() - began)
        return kwargs
    arguments, match = call.source.arguments(ids)
    call.finish(match, time.perf_counter() - began)
    if match and compat.names_cache_kind(config):
        arguments["cache_implementation"] = None
    return {**kwargs, **arguments}


def obstacle(model: Any, call: Call, generation_config: Any, model_kwargs: Mapping[str, Any], mode: Any) -> str | None:
    """Why this call must run without the store, or ``None``: whatever is not proven to be right steps aside."""
    name = str(getattr(mode, "value", mode))
    if model.training:
        return "training: the model is in training mode"
    if getattr(generation_config, "use_cache", True) is False:
        return "use_cache: the call runs without a cache"
    if model.config.is_encoder_decoder:
        return "mode: encoder-decoder models are not served yet"
    if name not in _PROVEN_MODES:
        return f"mode: {name} is not served yet"
    for argument in _UNPROVEN_ARGUMENTS:
        if call.arguments.get(argument) is not None:
            return f"mode: {argument} is not served yet"
    for setting in _UNPROVEN_SETTINGS:
        if getattr(generation_config, setting, None):
            return f"mode: {setting} is not served yet"
    extras = sorted(compat.generation_inputs(model_kwargs))
    if extras:
        return f"inputs: {', '.join(extras)} are not served yet"
    if call.ids is None or call.ids.dim() != 2 or call.ids.dtype not in (torch.int64, torch.int32):
        return "inputs: the prompt is not token ids"
    if call.ids.shape[0] != 1 or call.expansion != 1:
        return f"batch: {call.ids.shape[0] * call.expansion} rows are not served yet"
    return _odd_positions(call.ids.shape[1], model_kwargs)


def _odd_positions(length: int, model_kwargs: Mapping[str, Any]) -> str | None:
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.shape[-1] != length or not bool((mask == 1).all())):
        return "mask: the attention mask has zeros"
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        plain = torch.arange(length, dtype=positions.dtype, device=positions.device)
        if positions.numel() != length or not torch.equal(positions.reshape(-1), plain):
            return "positions: position_ids are not 0, 1, 2, ..."
    return None


_attachments: WeakKeyDictionary[Any, Attachment] = WeakKeyDictionary()
_attachments_lock = threading.Lock()


def attachment_of(model: Any) -> Attachment:
    """The one attachment of a model."""
    with _attachments_lock:
        return _attachments.setdefault(model, Attachment())
