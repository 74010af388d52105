"""Conversations: each turn reuses what the turns before have stored, in this process or in another one."""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvkeep.errors import (
    InvalidPromptError,
    InvalidRequestError,
    KvkeepError,
    UnsupportedCacheError,
    UnsupportedRequestError,
)
from kvkeep.prompts import Message, Templating, read_messages
from kvkeep.records import GenerateReport

if TYPE_CHECKING:
    from kvkeep.bound import BoundStore

log = logging.getLogger("kvkeep")


class Chat:
    """One conversation with a bound model: made by ``kv.chat()``, or found again by its id.

    Each :meth:`send` generates with the KV of the turns before, and stores its own; the messages are stored as well, so
    that another process can go on with the same ``id``. Where the chat template renders earlier turns otherwise (some
    drop thinking, or show the date), what is the same is reused, and ``last_report`` says where they part.

    Attributes:
        id: the conversation's name.
        last_report: the report of the latest :meth:`send`, or ``None``.
    """

    def __init__(
        self,
        kv: BoundStore,
        id: str | None,  # noqa: A002 - what everybody calls it
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        kv.store.check_writable()
        if kv.tokenizer is None:
            raise InvalidRequestError("a conversation needs the tokenizer: bind(model, tokenizer)")
        self.id = uuid.uuid4().hex if id is None else id
        self.last_report: GenerateReport | None = None
        self._kv = kv
        self._template: Templating = {
            "tools": tools,
            "documents": documents,
            "chat_template_kwargs": chat_template_kwargs,
        }
        stored = None if id is None else kv.store.chats.get(id)
        if stored is not None and messages and list(messages) != stored[: len(messages)]:
            raise InvalidRequestError(
                f"the conversation {id!r} is stored and begins with other messages: leave messages= out to go on with "
                "it, or give the new one another id"
            )
        begun = [dict(message) for message in read_messages(messages)] if messages else []
        self._messages: list[dict[str, Any]] = begun if stored is None else stored
        self._stored = copy.deepcopy(stored)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said so far: a copy."""
        return copy.deepcopy(self._messages)

    def send(self, message: str | Message | Sequence[Message], **generate_kwargs: Any) -> str:
        """Say something, and return the answer.

        Args:
            message: what the user says, or messages of your own (the results of tools, say).
            generate_kwargs: as :meth:`~kvkeep.BoundStore.generate` takes them. One sequence is generated.

        Raises:
            InvalidRequestError: the conversation was continued by somebody else meanwhile: take it up again by
                ``kv.chat(id)``, or go on apart with :meth:`fork`.
            UnsupportedRequestError: for several sequences at once.
            StoreError: if what was said cannot be stored. The answer is in ``messages`` then.
        """
        said = [{"role": "user", "content": message}] if isinstance(message, str) else message
        said = [dict(said)] if isinstance(said, Mapping) else [dict(one) for one in said]
        if not said:
            raise InvalidPromptError("nothing was said: send a text, a message or several")
        self._check_current()
        asked = [*self._messages, *said]
        try:
            cut = self._kv.cuts_anywhere
        except UnsupportedCacheError:  # nothing of this model is stored, and it answers all the same
            cut = True
        told = generate_kwargs.pop("on_report", None)

        def reported(report: GenerateReport) -> None:
            self.last_report = report
            if told is not None:
                told(report)

        options = {"save": "turn" if cut else "never", **generate_kwargs}
        out = self._kv.generate(asked, on_report=reported, **self._template, **options)
        sequences = getattr(out, "sequences", out)
        if not isinstance(sequences, torch.Tensor) or sequences.dim() != 2 or sequences.shape[0] != 1:
            raise UnsupportedRequestError("a conversation has one answer a turn: leave num_return_sequences= out")
        prompt = 0 if self.last_report is None else self.last_report.prompt_tokens
        answer = str(self._kv.tokenizer.decode(sequences[0][prompt:], skip_special_tokens=True))
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        with self._kv.store.locked(self._kv.store.chats.key(self.id)):
            self._check_current()  # somebody else may have said something meanwhile, which is not to be lost
            self._kv.store.chats.put(self.id, self._messages)
            self._stored = self._kv.store.chats.get(self.id)  # as JSON has it: a tuple is a list there
        if not cut:  # state behind the answer's tokens serves no prompt that renders it otherwise
            try:
                self._kv.warm(self._messages, **self._template)
            except (KvkeepError, OSError) as error:  # the answer is there, and is stored
                log.warning("kvkeep: the turn's KV was not stored: %s", error)
        return answer

    def fork(self, id: str | None = None) -> Chat:  # noqa: A002
        """A conversation of its own with the same beginning, of which nothing is copied but the messages."""
        if id is not None and self._kv.store.chats.get(id) is not None:
            raise InvalidRequestError(f"there is a conversation {id!r} already: fork it under another id")
        return Chat(self._kv, id, self.messages, **self._template)

    def delete(self) -> bool:
        """Forget what was said. Its entries stay: others may share them, and eviction takes them in time."""
        self._stored = None
        return self._kv.store.chats.remove(self.id)

    def _check_current(self) -> None:
        if self._kv.store.chats.get(self.id) != self._stored:
            raise InvalidRequestError(
                f"the conversation {self.id!r} was continued elsewhere: take it up again by kv.chat({self.id!r}), or "
                "go on apart with fork()"
            )
