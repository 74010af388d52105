"""A store bound to one live model and tokenizer: everything that needs both."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch

from kvkeep import compat, prefilling, preloading, saving
from kvkeep.attachment import attachment_of, reached
from kvkeep.autosave import AutoSave
from kvkeep.boundaries import holds_state
from kvkeep.conversation import Chat
from kvkeep.drafting import describe_encoder
from kvkeep.empty_caches import new_cache, own_cache, quantized_cache
from kvkeep.errors import (
    EntryNotFoundError,
    InvalidPromptError,
    InvalidRequestError,
    UnsupportedCacheError,
    UnsupportedRequestError,
)
from kvkeep.explaining import explain
from kvkeep.identity import LiveIdentity
from kvkeep.layouts import plans_of
from kvkeep.legacy import to_pairs, tokens_for_pairs
from kvkeep.lines import batch_lines
from kvkeep.prefixes import uncut
from kvkeep.prompts import Templating
from kvkeep.reader import PromptReader
from kvkeep.records import Entry, Explanation, GenerateReport, Identity, Match
from kvkeep.refusals import refuse, refuse_prompt
from kvkeep.serving import Serving, StoredLayers
from kvkeep.settings import SaveMode, check_save
from kvkeep.shared_prefixes import shared_prefixes
from kvkeep.storing import Storing, describe_idle

if TYPE_CHECKING:
    from kvkeep.store import CacheStore

log = logging.getLogger("kvkeep")


class BoundStore:
    """A :class:`~kvkeep.CacheStore` for one model: made by ``store.bind(model, tokenizer)``.

    It fingerprints the live model when it is made and checks at each call that the model has not changed since. It
    does not keep the model alive. A prompt may be text, chat messages, token ids ([tokens] or [1, tokens], as tensor,
    array or list), or the mapping that a tokenizer returned; ``tools``, ``documents`` and ``chat_template_kwargs`` go
    to the chat template. For an encoder-decoder model it is what its encoder is fed, in any of these forms but
    messages; a mapping may hold ``decoder_input_ids`` beside it, which begin with the model's start token as
    ``generate`` puts it there, and are that token alone if they are left out. Positions of the encoder count as tokens.

    Attributes:
        store: the store.
        guard: whether one token of every hit is computed again and compared.
        last_report: the report of the latest ``generate`` of any thread, or ``None``.
    """

    def __init__(
        self,
        store: CacheStore,
        model: Any,
        tokenizer: Any = None,
        *,
        model_id: str | None = None,
        salt: str | None = None,
        guard: bool = True,
        save: SaveMode | None = None,
        on_report: Callable[[GenerateReport], None] | None = None,
    ) -> None:
        self.store = store
        self.guard = guard
        self.last_report: GenerateReport | None = None
        self._on_report = on_report
        self._live = LiveIdentity(model, tokenizer, model_id=model_id, salt=salt)
        self._live.current()
        self._reached = weakref.ref(reached(model))
        self._reader = PromptReader(self._live.model, tokenizer)
        self._serving = Serving(store, self._live, guard=guard, reported=self._reported, amended=self._amended)
        self._storing = Storing(store, self._live, tokenizer, self._serving, guard)
        self._serving.keeper = AutoSave(self._storing, store.save if save is None else save, store.min_tokens)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer or processor, or ``None``."""
        return self._reader.tokenizer

    def identity(self) -> Identity:
        """What entries must have been computed with to be reused here, part by part."""
        return self._live.current()

    def refresh(self) -> Identity:
        """Hash the model again, after an update that no check can see."""
        return self._live.refresh()

    # --- lookup and load ---

    def lookup(
        self,
        prompt: Any,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_implementation: str = "dynamic",
        cache_config: Mapping[str, Any] | None = None,
    ) -> Match:
        """Say how many leading tokens of the prompt are stored and usable for it, at most one fewer than it has.

        With ``cache_implementation="quantized"`` and its ``cache_config``: what :meth:`load` would find for that.

        Returns:
            The match; ``tokens == 0`` is a miss, and ``reason`` says why. ``exact`` says whether a load gives bit for
            bit what the model computed.
        """
        inputs = self._reader.inputs(
            prompt, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
        )
        quantized = cache_implementation == "quantized"
        cache = quantized_cache(self._live.model(), cache_config) if quantized else None
        return self._serving.lookup(inputs, cache=cache)

    def explain(
        self,
        prompt: Any,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Explanation:
        """Say why the prompt can reuse no more than it does: the nearest entry, where the two part, and why.

        It reads the ids of up to some hundred entries, so it is for people and not for every call. What it shows of an
        entry's text is of this namespace alone; of others it says only that they have this prefix.

        Returns:
            The explanation; ``print`` it. A cause is named only where a test proved it.
        """
        chat = Templating(tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs)
        inputs = self._reader.inputs(prompt, **chat)
        match = self._serving.lookup(inputs)
        try:
            identity: Identity | None = self._live.current()
        except UnsupportedRequestError:  # the reason of the match says so
            identity = None
        return explain(self.store, match, identity, inputs.prefix, self.tokenizer, prompt, chat)

    def load(
        self,
        prompt: Any,
        *,
        cache_implementation: str = "dynamic",
        max_cache_len: int | None = None,
        cache_config: Mapping[str, Any] | None = None,
        into: Any = None,
        attention_mask: Any = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any | None:
        """Rebuild the cache of the longest stored prefix of the prompt, for you to pass on.

        Nothing is computed, so the guard has no part in it. A few models (Mamba, Jamba; with transformers 4.57 all that
        bring a cache of their own) do not look at the state that a cache holds when they are fed several tokens at
        once: feed what follows one by one, or use :meth:`generate`.

        Args:
            prompt: the whole prompt. The cache covers at most all of its tokens but the last.
            cache_implementation: ``"dynamic"``, ``"static"``, ``"offloaded"``, ``"offloaded_static"`` or
                ``"quantized"``, as ``generate`` names them. Loading into a quantized cache is lossy: it is filled as a
                prefill of exactly these tokens fills one. An entry that was saved from a quantized cache of the same
                settings is loaded as it was saved instead, if it is not the shorter one; no other cache takes it.
            max_cache_len: capacity of a static cache in tokens; must leave room for the prompt and what follows.
            cache_config: how to quantize, as ``generate`` takes it: ``backend`` (``"quanto"`` by default), ``nbits``,
                ``axis_key``, ``axis_value``, ``q_group_size``, ``residual_length``.
            into: a cache of yours to be emptied and filled in place, instead of a new one: the buffers of a static
                cache stay where they are, so that what was compiled for them goes on without being compiled anew.
            attention_mask: for a batch, [lines, slots] like the ids that are then the prompt: 0 where a slot is
                padding, which may only be at the left. The cache holds all lines up to one slot, as far as all are
                stored; it has seen that many tokens.

        Returns:
            ``into``, or a cache of the kind asked for, of your own (nothing else holds its tensors). ``None``
            on a miss; ``into`` is empty then.

        Raises:
            InvalidRequestError: for an unknown cache kind, a static cache without enough room, also as ``into``, or
                settings that transformers does not quantize by (its backend may not be installed).
        """
        if into is not None and (cache_implementation, max_cache_len, cache_config) != ("dynamic", None, None):
            raise InvalidRequestError("into= is a cache already: leave out what kind of cache to make")
        if attention_mask is not None:
            lines = batch_lines(self._live.model(), prompt, attention_mask)
            tokens = max(line.padding + len(line.inputs) for line in lines)
        else:
            inputs = self._reader.inputs(
                prompt, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
            )
            tokens = len(inputs)
        if into is None:
            cache = new_cache(self._live.model(), cache_implementation, max_cache_len, cache_config, tokens)
        else:
            cache = own_cache(self._live.model(), into, tokens)
        held = (
            self._serving.load_lines(cache, lines) if attention_mask is not None else self._serving.load(cache, inputs)
        )
        return cache if held else None

    @property
    def cuts_anywhere(self) -> bool:
        """Whether every layer of the model keeps all rows, so that what is stored of it can be cut at any token."""
        return not any(plan.window or plan.snapshot for plan in self._live.asked(plans_of))

    # --- warm and save ---

    def warm(
        self,
        prompt: Any,
        *,
        name: str | None = None,
        pin: bool = False,
        ttl: float | None = None,
        checkpoint_every: int | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Entry:
        """Prefill the prompt and store it, unless it is stored already; one process prefills, the others wait for it.

        What is stored of its beginning is neither computed nor stored again: the entry continues that one. Chat
        messages are cut where the template is stable under any continuation; a log line says where a template is not
        (dates, thinking that is dropped from history).

        Args:
            prompt: the prefix.
            name: a name for the entry.
            pin: keep the named entry from eviction.
            ttl: let the name expire after so many seconds.
            checkpoint_every: let prompts that part from this one use it, too, where the model's layout does not allow
                that anywhere: up to each multiple of so many tokens, and to the end of each chat message. Layers with
                a window then keep the rows behind it; recurrent state is kept at each of these places. Where all
                layers keep all rows, nothing changes.
            progress: called with tokens done and tokens in all. Not called when nothing is prefilled.

        Returns:
            The entry.

        Raises:
            UnsupportedCacheError: if this model's cache has a layout that kvkeep does not keep.
            StoreReadOnlyError, StoreWriteError: if it could not be stored.
        """
        if name is None and (pin or ttl is not None):
            raise InvalidRequestError("pin= and ttl= belong to a name: give name= as well")
        if checkpoint_every is not None and checkpoint_every < 1:
            raise InvalidRequestError(f"checkpoint_every is a number of tokens, not {checkpoint_every!r}")
        inputs, unstable = self._reader.prefix(
            prompt, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
        )
        if unstable is not None:
            log.warning("kvkeep: %s", unstable)

        def cuts() -> Collection[int]:
            if checkpoint_every is None and not holds_state(self._live):
                return ()
            return self._reader.cuts(
                prompt,
                inputs,
                every=checkpoint_every,
                tools=tools,
                documents=documents,
                chat_template_kwargs=chat_template_kwargs,
            )

        entry = prefilling.warm(self._storing, inputs, progress, cuts)
        if name is None:
            return entry
        try:
            return self.store.name(entry, name, pin=pin, ttl=ttl)
        except EntryNotFoundError:  # evicted before it had its name, which now keeps it from that if it is pinned
            entry = prefilling.warm(self._storing, inputs, progress, cuts)
            return self.store.name(entry, name, pin=pin, ttl=ttl)

    def warm_shared(
        self,
        prompts: Sequence[Any],
        *,
        min_tokens: int = 64,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Entry]:
        """Prefill and store what the prompts of a job have in common: every beginning that two of them share.

        Args:
            prompts: the prompts, each as :meth:`generate` takes it.
            min_tokens: beginnings that are shorter are left out.
            progress: called with beginnings done and beginnings in all.

        Returns:
            An entry for each beginning, the shorter ones first. Nothing is stored of prompts that share nothing.
        """
        read = [
            self._reader.inputs(prompt, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs)
            for prompt in prompts
        ]
        found = shared_prefixes([inputs.ids for inputs in read], min_tokens)
        entries = []
        for done, (number, tokens) in enumerate(found, start=1):
            inputs = read[number]
            if (kept := uncut(inputs.media, tokens)) >= max(1, min_tokens):
                entries.append(prefilling.warm(self._storing, inputs.first(kept), None))
            if progress is not None:
                progress(done, len(found))
        return entries

    def preload(
        self,
        prompts: Any,
        *,
        device: Any = None,
        max_bytes: int | str | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Entry]:
        """Read stored prefixes into memory, at process start: what is generated from them then reads nothing from disk.

        They are handed out without a copy, to any number of calls and threads; whoever writes into what it was given
        gets a copy first. Layers that are written in place (static ones, recurrent state) cost a copy of what they
        hold. All that goes for entries on disk goes for them: ids are compared, one token is computed again, a model
        that has changed is not served, and what is removed from the store is let go. A longer prefix on disk is
        preferred. ``store.resident()`` shows what is held; all binds of the store share it.

        Args:
            prompts: a list of names or keys of entries, and of prompts as :meth:`generate` takes them, of which the
                longest stored prefix is taken. A text is a name, if there is such a name.
            device: where to hold them; where the model keeps each layer by default. From another device than the
                model's, a hand-out costs a copy to there.
            max_bytes: what all that the store holds in memory may take, from now on, in bytes or as ``"2GiB"``: what
                was unused for the longest time makes way. Unlimited, if it was never given.
            tools: for the chat template, as are ``documents`` and ``chat_template_kwargs``.

        Returns:
            The entries that are held now, in this order.

        Raises:
            EntryNotFoundError: one is not stored, or not for this model. Nothing was read then.
            EntryDamagedError: one is not what was stored; it was set aside.
            InvalidRequestError: one takes more than ``max_bytes``, or there is no such device.
        """

        def lookup(prompt: Any) -> Match:
            inputs, _ = self._reader.prefix(
                prompt, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
            )
            return self._serving.lookup(inputs)

        return preloading.preload(
            self.store, self._live, prompts, lookup, StoredLayers, device=device, max_bytes=max_bytes
        )

    @overload
    def save(self, cache: Any, input_ids: Any, *, name: str | None = None, guard: bool | None = None) -> Entry: ...

    @overload
    def save(
        self, cache: Any, input_ids: Any, *, attention_mask: Any, name: None = None, guard: bool | None = None
    ) -> list[Entry]: ...

    def save(
        self,
        cache: Any,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        name: str | None = None,
        guard: bool | None = None,
    ) -> Entry | list[Entry]:
        """Store a cache that you prefilled yourself: a ``DynamicCache``, a ``StaticCache``, or a legacy tuple.

        The model computes the last token again, and the cache must agree: nothing else can prove that it belongs to
        this model and these ids. Where a sliding window has moved on, or the cache holds more than keys and values,
        that takes the whole prefill.

        Args:
            cache: the cache of one sequence, or, with ``attention_mask``, of several. It is only read.
            input_ids: exactly the ids that it holds: after ``generate`` that is one fewer than the sequence has. Where
                pictures are among them, a mapping of these ids and what the processor returned with them. Of an
                encoder-decoder model, a mapping of what its encoder was fed and these ids as ``decoder_input_ids``.
            attention_mask: for a cache of several lines, [lines, slots] like the ids: 0 where a slot is padding, which
                may only be at the left. What generated tokens need, ones at the right, may be left out.
            name: a name for the entry.
            guard: ``False`` saves the cache unchecked. The bind's setting by default.

        Returns:
            The entry; the one that was there, if this prefix was stored before. With ``attention_mask`` a list, one
            entry a line.

        Raises:
            CacheMismatchError: if ids and cache disagree in length, a layer is not filled, or the model computes
                something else for these ids.
            UnsupportedCacheError: naming the class, for a cache or layer that kvkeep does not know.
            StoreReadOnlyError, StoreWriteError: if it could not be stored.
        """
        guarded = self.guard if guard is None else guard
        if attention_mask is not None:
            if compat.is_encoder_decoder(self._live.model()):
                raise UnsupportedRequestError(
                    "caches of several sequences of an encoder-decoder model are not taken apart: save one at a time, "
                    "with its encoder's attention_mask in the mapping"
                )
            if name is not None:
                raise InvalidRequestError("name= is for one entry: name those of a batch with store.name(entry, name)")
            lines = batch_lines(self._live.model(), input_ids, attention_mask)
            return saving.save_lines(self._storing, cache, lines, guard=guarded)
        held = self._reader.held(input_ids)
        entry = saving.save(self._storing, cache, held, guard=guarded)
        return entry if name is None else self.store.name(entry, name)

    def to_legacy(self, cache: Any) -> tuple[tuple[torch.Tensor, ...] | None, ...]:
        """The cache as the tuple of (keys, values) a layer that older tools want: views, [1, heads, rows, dim].

        A layer that keeps nothing is ``None``. Of an encoder-decoder model a layer is four tensors: the last two are
        what it sees of the encoder.

        Raises:
            UnsupportedCacheError: naming layer and kind, for a model whose layers keep more than keys and values; for
                a quantized cache.
            CacheMismatchError: if the cache is empty, or not as the model would fill it.
        """
        if compat.is_quantized(cache):
            raise UnsupportedCacheError("the rows of a quantized cache are packed: a tuple cannot hold them")
        model = self._live.model()
        plans, paired = plans_of(model), compat.is_encoder_decoder(model)
        states = describe_idle(model, cache, tokens_for_pairs(cache, plans), plans, paired=paired)
        return to_pairs(states, describe_encoder(cache, len(plans)) if paired else ())

    # --- generate ---

    def prepare(
        self,
        prompt: Any,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The keyword arguments for your own ``model.generate(**inputs, ...)``, with the stored prefix loaded.

        Returns:
            ``input_ids`` and ``attention_mask`` of the whole prompt ([1, tokens]); on a hit also the cache, under the
            name that this version of transformers takes, and ``cache_implementation=None`` where the model's own
            generation config asks for a cache kind. They are for one call: ``generate`` changes the cache. The guard
            has computed the last stored token in a pass of its own.
        """
        inputs = self._reader.inputs(
            prompt, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
        )
        arguments = self._serving.arguments(inputs, guard=self.guard)[0]
        return arguments if inputs.encoder is not None else {**self._reader.model_inputs(inputs.ids), **arguments}

    def generate(
        self,
        prompt: Any = None,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        guard: bool | None = None,
        save: SaveMode | None = None,
        on_report: Callable[[GenerateReport], None] | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """``model.generate``, with the longest stored prefix of the prompt reused instead of computed.

        Takes the arguments of ``model.generate`` and returns what it returns; sequences include the whole prompt. What
        was reused is in ``last_report``; of several lines it has the sums. Modes that are not served yet run without
        the store, with that reason. Lines of a batch are cut where all of them are stored.

        One stored token is computed again with the new ones. If its rows are not the stored ones, the whole prompt is
        computed before anything is sampled; ``guard`` overrules the bind's setting for this call.

        ``save`` says what is stored of this call, of one sequence, for others to come: ``"never"``, the ``"prompt"``,
        the ``"turn"`` (prompt and answer, as far as they are cached), or with ``"seen_twice"`` as much of the prompt as
        an earlier call of this bind had, too. The bind's or the store's setting by default. Whether it was stored, and
        if not, why, is in the report; that never stops a call.

        Raises:
            InvalidPromptError: for ids that are none, such as floats, negative ones, or ones beyond the vocabulary.
            UnsupportedRequestError: for ``use_cache=False``, ``inputs_embeds``, a cache of your own, or a model in
                training mode: a stored prefix cannot serve these; the message says what to do.
        """
        model = self._live.model()
        if save is not None:
            check_save(save)
        refuse(model, generate_kwargs)
        if (
            prompt is None
            and not compat.is_encoder_decoder(model)
            and generate_kwargs.get("input_ids", generate_kwargs.get("inputs")) is None
        ):
            raise InvalidPromptError("generate needs a prompt: text, chat messages, token ids, or input_ids=")
        if prompt is not None:
            for name in ("inputs", "input_ids"):
                if generate_kwargs.get(name) is not None:
                    raise InvalidRequestError(f"the prompt was given twice: as the first argument and as {name}=")
            inputs = self._reader.arguments(
                prompt, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
            )
            generate_kwargs = {**inputs, **generate_kwargs}
        refuse_prompt(model, generate_kwargs)
        inner = self._reached() or model
        with attachment_of(inner).running(
            inner, self._serving, guard=self.guard if guard is None else guard, save=save
        ) as call:
            out = model.generate(**generate_kwargs)
        report = call.finished()
        if on_report is not None:
            on_report(report)
        return out

    def chat(
        self,
        id: str | None = None,  # noqa: A002 - what everybody calls it
        messages: Sequence[Mapping[str, Any]] = (),
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Chat:
        """A conversation whose turns reuse one another: a new one, or the one that was stored under this id.

        Args:
            id: its name; a new one gets one of its own if this is left out. In the store it is kept with what was said,
                in a file that is as private as the entries.
            messages: what a new one begins with, such as a system message.
            tools: for the chat template, as are ``documents`` and ``chat_template_kwargs``; not stored.

        Raises:
            InvalidRequestError: a conversation of this id is stored that begins with other messages, or there is no
                tokenizer.
            StoreReadOnlyError: the store never writes.
        """
        return Chat(self, id, messages, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs)

    @contextmanager
    def attached(self) -> Iterator[BoundStore]:
        """Within the block ``model.generate`` itself reuses the store, whoever calls it, in every thread.

        A call that the store cannot serve runs as if it were not there, and ``last_report`` has the reason; it never
        raises for that. Afterwards the model is exactly as before. A ``generate`` that calls itself, as Whisper's does
        for each window of a long recording, is served in its first call. transformers 4.57 gives all calls with a
        static cache on one model the same one: run those one after the other, with a store or without.
        """
        self.attach()
        try:
            yield self
        finally:
            self.detach()

    def attach(self) -> None:
        """Make ``model.generate`` itself reuse the store until :meth:`detach`."""
        model = self._reached() or self._live.model()
        attachment_of(model).attach(model, self._serving)

    def detach(self) -> None:
        """End the latest :meth:`attach`; does nothing if there is none, or the model is gone."""
        model = self._reached()
        if model is not None:
            attachment_of(model).detach(model, self._serving)

    def _amended(self, report: GenerateReport) -> None:
        """Note what was stored of a call."""
        self.last_report = report

    def _reported(self, report: GenerateReport) -> None:
        """Note what one call reused."""
        self.last_report = report
        try:
            self.store.journal.generated(report)
        except Exception as error:  # noqa: BLE001  # the caller's work goes on
            self._serving.failed(error)
        if self._on_report is not None:
            self._on_report(report)
