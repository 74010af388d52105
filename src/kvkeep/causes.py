"""Known causes of two token sequences parting although somebody meant them to be the same.

Each cause is tested, not guessed: by what the two sequences decode to, or by rendering the prompt once more with one
thing changed and seeing whether it then goes on as what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvkeep.chat import with_clock
from kvkeep.errors import InvalidRequestError
from kvkeep.keys import TokenIds, common_prefix
from kvkeep.prompts import ChatTemplate, Message, read_ids

_REACH = 8
"""Tokens before the end of a text that what follows may merge with; and by how many a changed rendering must gain."""

_LINE = 16
"""Characters of a line that is no chance when it stands elsewhere, too."""

_SYSTEM = ("system", "developer")

_THINKING = re.compile(
    r"(<(?P<tag>\w*think\w*|reasoning)>.*?</(?P=tag)>|\[THINK\].*?\[/THINK\]|<\|channel\|>analysis.*?<\|end\|>)\s*",
    re.DOTALL,
)
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?(?:{_DAY} {_MONTH},? \d{{4}}|{_MONTH} {_DAY},? \d{{4}})"
    r"|\d{4}([-/])\d\d\1\d\d|\d{1,2}[/.]\d{1,2}[/.]\d{4}|\d{1,2}:\d\d(?::\d\d)?"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause: a short code, what was found, and what to do about it."""

    code: str
    found: str
    fix: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Parting:
    """A stored prefix and a prompt whose tokens part at a place that both have.

    Attributes:
        stored: ids of the stored prefix.
        prompt: ids of the prompt.
        at: the first token that differs.
        tokenizer: the text tokenizer.
        text: the prompt, if it was given as text.
        messages: the prompt, if it was given as messages.
        template: how the messages were rendered, or a text could be.
    """

    stored: TokenIds
    prompt: TokenIds
    at: int
    tokenizer: Any
    text: str | None = None
    messages: Sequence[Message] = ()
    template: ChatTemplate | None = None

    @cached_property
    def texts(self) -> tuple[str, str]:
        """What the stored ids and those of the prompt say."""
        return self.decode(self.stored.tolist()), self.decode(self.prompt.tolist())

    @cached_property
    def same(self) -> int:
        """How many leading characters both say."""
        return _alike(*self.texts)

    @cached_property
    def before(self) -> int:
        """How many characters the shared tokens say."""
        return len(self.decode(self.prompt[: self.at].tolist()))

    @cached_property
    def tokens(self) -> tuple[str, str]:
        """The texts of the two tokens that differ."""
        one, two = (self.decode(ids[: self.at + 1].tolist())[self.before :] for ids in (self.stored, self.prompt))
        return one, two

    def decode(self, ids: Sequence[int]) -> str:
        """What ids say, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def gains(self, ids: TokenIds | None) -> bool:
        """Whether a prompt of other ids is wholly stored, or goes on as stored well past the token that differs."""
        if ids is None:
            return False
        shared = common_prefix(self.stored.int32, ids.int32)
        return shared >= max(self.at, min(len(self.stored), len(ids), self.at + _REACH))

    def rendered(self, messages: Sequence[Message], **changed: Any) -> TokenIds | None:
        """The ids of messages with something of the template's options changed; ``None`` if it refuses."""
        if self.template is None or not messages:
            return None
        try:
            return read_ids(replace(self.template, **changed).render(messages)["input_ids"])
        except (InvalidRequestError, ValueError):
            return None


def find_cause(parting: Parting) -> Cause | None:
    """The cause of a parting, if it is a known one."""
    return next((cause for test in _TESTS if (cause := test(parting)) is not None), None)


def _alike(one: str, other: str) -> int:
    """How many leading characters two texts share."""
    return common_prefix(one.encode("utf-32-le", "surrogatepass"), other.encode("utf-32-le", "surrogatepass"))


def leading_bos(ids: TokenIds, tokenizer: Any) -> int:
    """How many tokens at the start are the one that begins a text."""
    bos = getattr(tokenizer, "bos_token_id", None)
    head = ids[:4].tolist()
    return next((n for n, one in enumerate(head) if one != bos), len(head))


def _bos(parting: Parting) -> Cause | None:
    stored, prompt = (leading_bos(ids, parting.tokenizer) for ids in (parting.stored, parting.prompt))
    if stored == prompt:
        return None
    rests = parting.stored[stored:], parting.prompt[prompt:]
    if common_prefix(rests[0].int32, rests[1].int32) < max(1, min(_REACH, *map(len, rests))):
        return None
    token = parting.tokenizer.bos_token
    found = f"the prompt begins with {_times(prompt, token)}, what is stored with {_times(stored, token)}"
    if prompt > stored:
        fix = "a rendered template has its own: tokenize it with add_special_tokens=False, or give the messages"
    elif stored > 1:
        fix = "what is stored has one too many: remove that entry, and warm it without add_special_tokens"
    else:
        fix = "tokenize the prompt with add_special_tokens=True, as what is stored was"
    return Cause("double_bos" if max(stored, prompt) > 1 else "bos", found, fix)


def _times(number: int, token: str) -> str:
    return f"no {token}" if number == 0 else token if number == 1 else f"{number} {token}"


def _spelled(parting: Parting) -> Cause | None:
    """A special token on one side, and its letters on the other."""
    special = set(parting.tokenizer.all_special_ids)
    added = getattr(parting.tokenizer, "added_tokens_decoder", {})
    special.update(number for number, token in added.items() if getattr(token, "special", False))
    sides = (parting.stored, "what is stored", parting.prompt), (parting.prompt, "the prompt", parting.stored)
    for (ids, has, other), (_, spells, _) in (sides, sides[::-1]):
        near = ids[parting.at : parting.at + 2].tolist()  # a space before it may merge with its first letter
        place = next((n for n, one in enumerate(near) if one in special), None)
        if place is None or near[place] in other[parting.at : parting.at + _REACH].tolist():
            continue
        if len(parting.decode(ids[: parting.at + place + 1].tolist())) <= parting.same:
            return Cause(
                "special_as_text",
                f"{has} has the special token {parting.decode([near[place]])}, {spells} spells it out as text",
                "tokenize both in the same way: give the messages, or ids made with the same split_special_tokens",
            )
    return None


def _merged(parting: Parting) -> Cause | None:
    """The same text up to the end of one side, in other tokens."""
    for mine, side, other in ((0, "what is stored", "the prompt"), (1, "the prompt", "what is stored")):
        ids, text = (parting.stored, parting.prompt)[mine], parting.texts[mine]
        if parting.same < len(text) or len(ids) - parting.at > _REACH:
            continue
        last = len(ids) - parting.at
        if text != text.rstrip():
            return Cause(
                "trailing_space",
                f"{side} ends in white space, which becomes part of the next token where {other} goes on",
                "end the stored text before the space, or store whole chat messages",
            )
        return Cause(
            "merged",
            f"the text is the same, but the last {last if last > 1 else 'token'}{' tokens' if last > 1 else ''} of "
            f"{side} became others together with what follows in {other}",
            "end the stored text where tokens do not merge, at the end of a paragraph, or store whole chat messages",
        )
    if parting.same > parting.before + max(map(len, parting.tokens)) and all(parting.tokens):
        return Cause(
            "retokenized",
            "the text goes on in the same way, in other tokens: generated tokens are not always those of their text",
            "keep the ids that were generated and append to them, instead of tokenizing their text again",
        )
    return None


def _thinking(parting: Parting) -> Cause | None:
    """A block of thinking on one side, without which it goes on as the other."""
    for mine, side, other in ((0, "what is stored", "the prompt"), (1, "the prompt", "what is stored")):
        text, rest = parting.texts[mine], parting.texts[1 - mine]
        for block in _THINKING.finditer(text, max(0, parting.same - 40)):
            if block.start() > parting.same or block.end() <= parting.same:
                break
            without = text[: block.start()] + text[block.end() :]
            agreed = _alike(without, rest)
            if agreed > max(parting.same, block.start()) or agreed in (len(without), len(rest)):
                return Cause(
                    "thinking",
                    f"{side} has a block of thinking there, {other} has none: the template drops it from earlier turns",
                    "store the turns as the template renders them later (warm the messages without the thinking), or "
                    "use a template that keeps it",
                )
    return None


def _date(parting: Parting) -> Cause | None:
    spans = [next((m for m in _DATE.finditer(t) if m.start() <= parting.same < m.end()), None) for t in parting.texts]
    was, now = spans
    if was is None or now is None or was.group() == now.group():
        return None
    found = f"a date: {was.group()!r} is stored, the prompt says {now.group()!r}"
    if not _template_says(parting, was.group(), now):
        return Cause("date", found, "move the date to the end of the prompt, behind all that is to be reused")
    fix = "use a template that shows no date"
    if parting.template is not None and "date_string" in parting.template.source:
        fix = f'give chat_template_kwargs={{"date_string": "{was.group()}"}} to every call'
    return Cause("template_date", f"{found}; the chat template puts it there", fix)


def _template_says(parting: Parting, was: str, now: re.Match[str]) -> bool:
    """Whether the chat template put a date there: with the stored one it goes on as stored, and a text begins so."""
    template = parting.template
    if template is None or not ("strftime_now" in template.source or "date_string" in template.source):
        return False
    options = dict(template.options or {})
    if parting.messages:
        trials = ({**options, "date_string": was}, with_clock(template, was).options)
        return any(parting.gains(parting.rendered(parting.messages, options=trial)) for trial in trials)
    for day in (options, {**options, "date_string": now.group()}):
        shown = parting.rendered([{"role": "user", "content": "?"}], options=day)
        if shown is not None and _alike(parting.decode(shown.tolist()), now.string) >= now.end():
            return True
    return False


def _left_out(parting: Parting) -> Cause | None:
    """Turns that the prompt has no more: it goes on with what was said later."""
    found = _message_at(parting)
    if found is None or parting.messages[found[0]]["role"] in _SYSTEM:
        return None
    number, begin = found
    stored = parting.texts[0]
    contents = [_content(message).strip() for message in parting.messages[number:]]
    at, seen = begin + 1, 0
    for content in contents:
        at = stored.find(content, at)
        if at < 0:
            break
        at, seen = at + len(content), seen + len(content)
    if seen < _LINE or stored.startswith(contents[0], begin):
        return None
    return Cause(
        "history",
        f"turns were left out: message {number} ({parting.messages[number]['role']}) comes later in what is stored",
        "keep the earliest turns, and leave out many at once, so that several prompts begin in the same way",
    )


def _order(parting: Parting) -> Cause | None:
    """Documents, or lines, that both have in another order."""
    stored, prompt = parting.texts
    documents = list((parting.template.documents if parting.template else None) or ())
    known = [one for one in map(_content, documents) if one]
    if len(known) > 1 and all(one in stored for one in known):
        documents.sort(key=lambda one: stored.find(_content(one)))
        moved = parting.gains(parting.rendered(parting.messages, documents=documents))
    else:
        begin = prompt.rfind("\n", 0, parting.same) + 1
        was, now = (text[begin:].partition("\n")[0].strip() for text in (stored, prompt))
        moved = min(len(was), len(now)) >= _LINE and was in prompt[begin:] and now in stored[begin:] and was != now
    if not moved:
        return None
    return Cause(
        "order",
        "the same passages stand in another order",
        "give documents in one fixed order, for example sorted by their id; a prefix is reused up to where it differs",
    )


def _options(parting: Parting) -> Cause | None:
    """Something given to the chat template without which, or with which, the prompt would go on as what is stored."""
    template = parting.template
    if template is None:
        return None
    if parting.text is not None and parting.gains(parting.rendered([{"role": "user", "content": parting.text}])):
        found = "what is stored is a chat, the prompt is its bare text"
        return Cause("untemplated", found, 'give [{"role": "user", "content": ...}] instead of the text')
    for name in ("tools", "documents"):
        if getattr(template, name) and parting.gains(parting.rendered(parting.messages, **{name: None})):
            return Cause(name, f"what is stored was rendered without these {name}", f"warm it with the same {name}=")
    options = dict(template.options or {})
    trials = [(f"without {name}", {key: options[key] for key in options if key != name}) for name in options]
    if "enable_thinking" in template.source:
        wanted = not options.get("enable_thinking", True)
        trials.append((f"with enable_thinking={wanted}", {**options, "enable_thinking": wanted}))
    for what, trial in trials:
        if parting.gains(parting.rendered(parting.messages, options=trial)):
            fix = "give the same chat_template_kwargs= to every call"
            return Cause("template_options", f"what is stored was rendered {what}", fix)
    if (
        parting.messages
        and parting.messages[0]["role"] == "system"
        and parting.gains(parting.rendered(parting.messages[1:]))
    ):
        return Cause("system", "what is stored has no system message of its own", "warm it with the system message")
    return None


def _white_space(parting: Parting) -> Cause | None:
    """Texts that differ in white space, and then go on alike."""
    rests = [" ".join(text[max(0, parting.same - 1) :].split())[: 4 * _LINE] for text in parting.texts]
    size = min(map(len, rests))
    if size < _LINE or rests[0][:size] != rests[1][:size]:
        return None
    return Cause("white_space", "the texts differ in white space alone there", "build both from one template")


def _message(parting: Parting) -> Cause | None:
    """Which of the messages it is in."""
    found = _message_at(parting)
    if found is None:
        return None
    number, begin = found
    role, character = parting.messages[number]["role"], parting.same - begin
    if role in _SYSTEM:
        return Cause(
            "system",
            f"the system message is another one, from its character {character} on",
            "keep what changes out of the system message, or at its end; warm the new one if it is to stay",
        )
    if number == len(parting.messages) - 1:
        return Cause("question", "the last message is another one", "nothing: only what comes before is shared")
    return Cause(
        "history",
        f"message {number} ({role}) is another one, from its character {character} on",
        "append to a conversation without changing what was said",
    )


def _message_at(parting: Parting) -> tuple[int, int] | None:
    """The number of the message in which the texts part, and where it begins in that of the prompt."""
    text, begin = parting.texts[1], 0
    for number, message in enumerate(parting.messages):
        content = _content(message).strip()
        begin = text.find(content, begin)
        if begin < 0 or not content:
            return None
        if begin <= parting.same <= begin + len(content):
            return number, begin
        begin += len(content)
    return None


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content", message.get("text"))
    if isinstance(content, (list, tuple)):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


_TESTS: Sequence[Callable[[Parting], Cause | None]] = (
    _bos,
    _spelled,
    _merged,
    _options,
    _thinking,
    _date,
    _left_out,
    _order,
    _white_space,
    _message,
)
