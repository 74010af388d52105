"""Where a conversation can be cut so that its tokens stay a prefix of every prompt that continues it.

A rendered conversation is not, token by token, a prefix of its own continuation: tokens merge across the border, and
templates rewrite history. So the cut is found by experiment: render the conversation with many next turns and with a
longer conversation behind it, and keep what all of them share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.errors import InvalidRequestError
from kvkeep.keys import TokenIds, common_prefix
from kvkeep.prompts import ChatTemplate, Message, read_ids, read_messages

PROBES = ("A", "\n\nb", " 7", "'é", "😀", "</b>", ",", "\tq", "\r", "\nc")
"""What the next turn says, each beginning with another kind of character: two plain words miss most merges."""

_ANSWERED_ROLES = frozenset({"user", "tool", "function", "ipython"})
_REACH = 3  # how many tokens back from a border another next character can change
_THINKING = re.compile("think|reason|thought|analysis", re.IGNORECASE)
_WINDOW = 20  # characters that tell what parts two renderings

Conversation = list[Message]


@dataclass(frozen=True, slots=True)
class ChatPrefix:
    """The part of a conversation that stays.

    Attributes:
        ids: the longest token prefix that every continuation shares; never empty.
        unstable: in words, what of the conversation will not be found again although it only goes on, or that the
            template shows the date; ``None`` if there is nothing to say.
    """

    ids: TokenIds
    unstable: str | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Conversations that continue the one at hand.

    Attributes:
        near: those whose answer can be asked for next.
        far: those whose answer can be asked for later.
        more: further ones of those, needed only where the template rewrites what came before.
    """

    near: Sequence[Conversation]
    far: Sequence[Conversation]
    more: Sequence[Conversation]


def stable_prefix(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrefix:
    """Find the longest token prefix of a conversation that is stable under any continuation.

    After a message of the user or of a tool comes the assistant's answer, after an assistant's tool call its results,
    after anything else the user's next turn. The options must be those that the later prompts are rendered with.

    Raises:
        InvalidPromptError: ``messages`` is no conversation.
        InvalidRequestError: the template refuses every continuation, does not show what they say, or lets them share
            no token at all.
    """
    conversation = read_messages(messages)
    options = dict(chat_template_kwargs or {})
    if options.pop("continue_final_message", None) and len(conversation) > 1:
        conversation.pop()  # an answer left open has no border yet: keep what comes before it
    template = ChatTemplate(tokenizer=tokenizer, tools=tools, documents=documents, options=options)
    first, near, far = _render_continuations(template, conversation)
    stop = _shared([*near, *far])
    if stop == 0:
        raise InvalidRequestError(
            "the chat template lets two continuations of these messages share no token, so there is no prefix to keep; "
            "warm the token ids of a whole prompt instead"
        )
    notes = [_rewritten(template, conversation, near, far), _dated(template, first, near[0][:stop])]
    return ChatPrefix(near[0][:stop], "; ".join(note for note in notes if note) or None)


def with_clock(template: ChatTemplate, shown: str) -> ChatTemplate:
    """The same template where its clock shows a date of our own."""
    clock = "{% macro strftime_now(format) %}" + shown + "{% endmacro %}\n"  # trim_blocks takes the line end away again
    return replace(template, options={**(template.options or {}), "chat_template": clock + template.source})


def _render_continuations(
    template: ChatTemplate, conversation: Conversation
) -> tuple[Conversation, list[TokenIds], list[TokenIds]]:
    """The first continuations that the template renders and whose words it shows: one of them, and the ids of all."""
    plans = list(_plans(conversation))
    alone: list[TokenIds] = []
    for plan in plans:
        near, far = _render_all(template, plan.near), _render_all(template, plan.far)
        told = near if len(plan.near) > 1 else far
        if near and len(set(told)) > 1:
            if _shared([*near, *far]) < _shared(near):
                far += _render_all(template, plan.more)
            return plan.near[0], near, far
        if len(plan.near) == 1 and not far:
            alone = near
    if alone:  # a template of one turn: what can be asked next is all that can ever be asked
        return conversation, alone, []
    template.render(plans[0].near[0])  # raises what the template says, if it refused
    raise InvalidRequestError("the chat template does not show what the next turn says: check the form of the contents")


def _plans(conversation: Conversation) -> Iterator[_Plan]:
    """Continuations to try, the likeliest first: contents as the conversation has them, then in the other form."""
    last = conversation[-1]
    in_parts = any(isinstance(message.get("content"), (list, tuple)) for message in conversation)
    for parts in (in_parts, not in_parts):

        def says(role: str, text: str, parts: bool = parts, **fields: Any) -> Message:
            return {"role": role, "content": [{"type": "text", "text": text}] if parts else text, **fields}

        asks = [says("user", text) for text in PROBES]
        answers = [says("assistant", text) for text in PROBES]
        goes_on = [answers[0], asks[0]]
        if last["role"] in _ANSWERED_ROLES:
            later = [[*conversation, answer, asks[0]] for answer in answers]
            yield _Plan([conversation], later, [[*conversation, *goes_on, *goes_on]])
            continue
        turns = [[ask] for ask in asks]
        if calls := last.get("tool_calls"):
            results = [[says("tool", text, **_call(call)) for call in calls] for text in PROBES]
            yield _plan(conversation, results, goes_on)
        yield _plan(conversation, turns, goes_on)


def _plan(conversation: Conversation, turns: Sequence[Sequence[Message]], goes_on: Sequence[Message]) -> _Plan:
    later = [[*conversation, *turn, *goes_on] for turn in turns]
    return _Plan([[*conversation, *turn] for turn in turns], [later[0], [*later[-1], *goes_on]], later[1:])


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that tie a tool's result to its call."""
    function = call.get("function", call)
    return {"tool_call_id": call.get("id", "000000000"), "name": function.get("name", "tool")}


def _render_all(template: ChatTemplate, conversations: Sequence[Conversation]) -> list[TokenIds]:
    """The ids of those conversations that the template accepts."""
    try:
        return [read_ids(row) for row in template.render(conversations)["input_ids"]]  # at once: tokenized in parallel
    except InvalidRequestError:
        rendered = []
        for conversation in conversations:
            with suppress(InvalidRequestError):
                rendered.append(read_ids(template.render(conversation)["input_ids"]))
        return rendered


def _shared(rows: Sequence[TokenIds]) -> int:
    return min(common_prefix(rows[0].int32, row.int32) for row in rows)


def _rewritten(
    template: ChatTemplate, conversation: Conversation, near: Sequence[TokenIds], far: Sequence[TokenIds]
) -> str | None:
    """What the template says differently once the conversation goes on."""
    next_stop, stop = _shared(near), _shared([*near, *far])
    role = conversation[-1]["role"]
    now = _render_now(template, conversation) if role in _ANSWERED_ROLES or role == "assistant" else None
    if role in _ANSWERED_ROLES:  # the conversation is itself the next prompt, up to the header of the answer
        next_stop = common_prefix(near[0].int32, now.int32) if now else stop
    if stop < next_stop:
        reason = _reason(template, near[0], far[-1], stop)
        return f"only {stop} of {next_stop} tokens stay as the conversation goes on: {reason}"
    if now and role == "assistant":
        kept = common_prefix(now.int32, near[0].int32)
        if kept < len(now) - _REACH:
            reason = _reason(template, now, near[0], kept)
            return f"the last answer changes at token {kept} of {len(now)} once a turn follows: {reason}"
    return None


def _render_now(template: ChatTemplate, conversation: Conversation) -> TokenIds | None:
    """The conversation as it stands, if the template accepts that."""
    try:
        return read_ids(template.render(conversation, add_generation_prompt=False)["input_ids"])
    except InvalidRequestError:
        return None


def _reason(template: ChatTemplate, before: TokenIds, after: TokenIds, at: int) -> str:
    """Why two renderings part at a token, as far as their text tells."""
    was, became = (template.tokenizer.decode(ids[at:].tolist()) for ids in (before, after))
    lost = was[:_WINDOW].strip()
    if _THINKING.search(was[:_WINDOW]) and not _THINKING.search(became[:_WINDOW]):
        return "the template drops the thinking of earlier turns"
    if lost and lost in became:
        return "the template moves text, such as the system prompt or the tools, to the last turn"
    return "the template renders earlier turns differently"


def _dated(template: ChatTemplate, conversation: Conversation, ids: TokenIds) -> str | None:
    """Where a prefix shows the date: found by rendering the same template without its clock."""
    if "strftime_now" not in template.source:
        return None
    undated = _render_all(with_clock(template, "?"), [conversation])
    if not undated:
        return "the template reads the date: on another day the prefix may not be found"
    token = common_prefix(ids.int32, undated[0].int32)
    if token == len(ids):
        return None
    return f"the template shows the date at token {token}: on another day nothing from there on is found"
