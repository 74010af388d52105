"""Being part of ``model.generate``: how a stored prefix gets into the cache that transformers prepares itself.

``generate`` expands its inputs, prepares an empty cache of whatever kind was asked for, and then feeds what that cache
does not hold yet. Between the last two steps an :class:`Attachment` fills the cache. Nothing is passed in, so nothing
can contradict a configuration, and every kind of cache that has a codec is served where it lies. Where a model's
``generate`` does not take these steps, a filled dynamic cache is passed in instead.

While attached, ``generate`` (to see its arguments) and the methods of ``compat.SEAM`` are shadowed on the instance. The
last of them is where the first forward pass is over and nothing is sampled yet: the guard's place. Detaching puts back
exactly what was there.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from kvkeep import compat
from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import unwrap
from kvkeep.forks import renew_after_fork
from kvkeep.generation import Call
from kvkeep.served import Source, miss
from kvkeep.settings import SaveMode


class _Shadow:
    """A method of one model's instance, in front of the one that was there. A copy of the model gets its own method."""

    def __init__(self, model: Any, name: str, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._model = weakref.ref(model)
        self._name = name
        self._call = call
        self._original = original
        self.gone = False  # whoever took it for the model's own method may keep it, and calls it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._original if self.gone else self._call)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:  # transformers looks at what some methods take
        return inspect.signature(self._original)

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
    def running(self, model: Any, source: Source, *, guard: bool, save: SaveMode | None) -> Iterator[Call]:
        """Serve the first ``generate`` of this thread, within the block, from ``source``."""
        outer = self._call
        call = self._local.call = Call(source, guard, save=save)
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

    # --- the shadowed methods ---

    def _shadow(self, model: Any) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            wraps = {"generate": self._generate}
            wraps |= {name: self._batches for name in compat.BATCHING if hasattr(model, name)}
            if compat.has_seam(model):
                wraps |= dict(zip(compat.SEAM, (self._expand, self._prepare, self._guard), strict=True))
                if compat.is_encoder_decoder(model):
                    wraps[compat.ENCODER_STEP] = self._hear
                elif compat.media_tokens(model):
                    wraps[compat.INPUTS_STEP] = self._inputs
                    if compat.ENCODE_STEP is not None:
                        wraps[compat.ENCODE_STEP] = self._encode
                elif compat.DRAFTS_WHOLE:
                    wraps[compat.INPUTS_STEP] = self._draft
            for name, wrap in wraps.items():
                original = getattr(model, name)
                if name == "generate" and name not in model.__dict__:
                    original = _inherited(model, name, original)
                shadow = _Shadow(model, name, original, wrap(model, original))
                self._replaced[name] = model.__dict__.get(name), shadow
                model.__dict__[name] = shadow

    def _unshadow(self, model: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for name, (before, shadow) in self._replaced.items():
                shadow.gone = True
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
            call = outer if outer is not None and not outer.taken else None
            for source in self._sources[-1:] if call is None else ():  # nobody's own call: who is attached serves it
                call = Call(source, source.guard)
            self._local.call = call  # none, too: one generate within another is not the other's
            try:
                if call is None:
                    return original(*args, **kwargs)
                call.arguments, call.taken = _named(original, args, kwargs), True
                if not compat.has_seam(model):
                    kwargs = call.pass_in(model, args, kwargs)
                out = original(*args, **kwargs)
                call.ended(out)  # what never came to a cache says so, too
                return out
            finally:
                self._local.call = outer
                if call is not None and call.agreement is not None:
                    call.agreement.no_answer()

        return generate

    def _batches(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def batches(*args: Any, **kwargs: Any) -> Any:
            outer = self._call
            call = outer
            for source in self._sources[-1:] if call is None else ():
                call = Call(source, source.guard, taken=True)
            if call is not None and call.waits:
                call.finish(miss("mode: batches that are run continuously keep their own KV"), 0)
            self._local.call = call  # what it makes on its way is no other
            try:
                return original(*args, **kwargs)
            finally:
                self._local.call = outer

        return batches

    def _expand(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def expand(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is not None and call.waits:
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
            call = self._call
            if call is not None and call.waits:
                call.hand_over(model, generation_config, model_kwargs, generation_mode, given)
            return result

        return prepare

    def _guard(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None:
                return original(*args, **kwargs)
            args, kwargs = call.cut_ids(args, kwargs)
            if not call.watched and not call.quantized:
                return original(*args, **kwargs)
            return compat.run_guarded(
                model, original, call.all_ids, lambda cache: call.judge(model, cache), call.take_back, args, kwargs
            )

        return guarded

    def _encode(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def encode(ids: Any, model_kwargs: dict[str, Any], name: Any, generation_config: Any) -> Any:
            call = self._call
            rows = (generation_config.num_beams or 1) * (generation_config.num_return_sequences or 1)
            if call is None or not call.waits or rows > 1:
                return original(ids, model_kwargs, name, generation_config)
            call.encode = lambda inputs: original(ids, inputs, name, generation_config)
            return model_kwargs

        return encode

    def _hear(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def hear(inputs: Any, model_kwargs: dict[str, Any], model_input_name: Any, generation_config: Any) -> Any:
            def encode(given: dict[str, Any]) -> Any:
                """What the step would have added, had it run in its place: what came behind is not the encoder's."""
                after = original(inputs, dict(before), model_input_name, generation_config)
                given.update({one: value for one, value in after.items() if value is not before.get(one)})
                return given

            before = dict(model_kwargs)
            call = self._call
            if call is None or not call.waits or model_kwargs.get(compat.ENCODER_OUTPUTS) is not None:
                return encode(model_kwargs)
            call.heard = {**before, model_input_name or model.main_input_name: inputs}
            if not compat.encoder_can_wait(model, generation_config):
                return encode(model_kwargs)
            call.encode = encode
            return model_kwargs

        return hear

    def _draft(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def draft(ids: Any, **kwargs: Any) -> Any:
            call = self._call
            return original(ids, **(kwargs if call is None or not call.drafts else call.cut_draft(ids, kwargs)))

        return draft

    def _inputs(self, model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def inputs(ids: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None or not call.untold:
                return original(ids, **kwargs)
            return call.first_inputs(model, original, ids, kwargs)

        return inputs


def _inherited(model: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that a model has from its class, as the class has it when it is called: others patch that, too."""
    kept = weakref.ref(model)

    @functools.wraps(original)
    def inherited(*args: Any, **kwargs: Any) -> Any:
        method = getattr(type(kept()), name, original)
        return (method.__get__(kept()) if inspect.isfunction(method) else original)(*args, **kwargs)

    return inherited


def _named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those by position too, as far as the method names them."""
    if len(args) < 2:  # the first is the prompt
        return kwargs
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):  # somebody's own callable, which does not say
        return kwargs
    return {**dict(zip(names, args, strict=False)), **kwargs}


_attachments: WeakKeyDictionary[Any, Attachment] = WeakKeyDictionary()
_attachments_lock = threading.Lock()


def _after_fork() -> None:
    global _attachments_lock  # another thread of the parent may have held it
    _attachments_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def attachment_of(model: Any) -> Attachment:
    """The one attachment of a model."""
    with _attachments_lock:
        return _attachments.setdefault(model, Attachment())


def reached(model: Any) -> Any:
    """The model whose ``generate`` can be reached from inside: it, or the one that PEFT or torch.compile wraps.

    What is between the two, a wrapper's settings too, is then just what the call itself brings.
    """
    if compat.has_seam(model):
        return model
    try:
        inner = unwrap(model)
    except UnsupportedRequestError:
        return model
    return inner if compat.has_seam(inner) else model
