"""Why a prompt would miss, or could reuse no more: what ``BoundStore.explain`` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.causes import Cause, Parting, find_cause, leading_bos
from kvkeep.errors import EntryError
from kvkeep.fingerprint.tokenizer import text_tokenizer
from kvkeep.keys import TokenIds, common_prefix
from kvkeep.prefixes import Prefix
from kvkeep.prompts import ChatTemplate, Templating, is_messages, read_messages
from kvkeep.records import Entry, Explanation, Identity, Match

if TYPE_CHECKING:
    from kvkeep.store import CacheStore

_PARTS = ("weights", "config", "dtypes", "adapters", "tokenizer")
_AROUND = 12
"""Tokens that are shown before and behind the one that differs."""

_FIXES = {
    "empty": "kv.warm(prompt)",
    "prefix": "kv.warm(prompt), or what its later prompts share",
    "short": "nothing: the last token is always fed",
    "namespace": "open the store with the namespace that it was warmed in, or warm it in this one",
    "weights": "load the weights that it was warmed with, or warm it again with these",
    "config": "load the model with the configuration that it was warmed with, or warm it again",
    "dtypes": "load the model with the dtype that it was warmed with (dtype=), or warm it again",
    "adapters": "switch to the adapter that it was warmed with, or warm it with this one",
    "tokenizer": "bind the tokenizer that it was warmed with, or warm it again",
    "media": "give the same pictures, films or sounds at the same places, processed in the same way",
    "encoder": "give the encoder the same input, or warm it with this one",
    "trim": "kv.warm(prompt): it keeps what this very prompt needs",
    "damaged": "kv.warm(prompt): `kvkeep verify` says what is wrong with the entry",
    "unreadable": "look at the disk or its rights, then kv.warm(prompt)",
    "unknown": "use the version of kvkeep that wrote the entry, or a newer one",
    "attention": "load the model with the attention kernel that it was warmed with, or leave strict_identity out",
    "rope": "warm a prompt of the same side of the length at which the frequencies change",
    "identity": "undo what the reason names, or give bind(..., salt=)",
}


@dataclass(frozen=True, slots=True)
class _Near:
    entry: Entry
    ids: TokenIds
    shared: int


def explain(
    store: CacheStore,
    match: Match,
    identity: Identity | None,
    prefix: Prefix,
    tokenizer: Any,
    prompt: Any,
    chat: Templating,
) -> Explanation:
    """Say why a match is not more than it is.

    Args:
        store: the store.
        match: what a lookup of the prompt found.
        identity: what it looked for; ``None`` if the model has none now.
        prefix: the prompt, read.
        tokenizer: tokenizer or processor, or ``None``.
        prompt: the prompt as it was given.
        chat: what goes to the chat template with it.
    """
    tokenizer = None if tokenizer is None else text_tokenizer(tokenizer)
    own, others = ([], []) if identity is None else store.nearby(identity, _starts(prefix, tokenizer))
    near = _nearest(store, own, prefix.ids, tokenizer)
    code = (match.reason or "").partition(":")[0]
    stranger = others[0] if others and not match.tokens else None
    differs = () if stranger is None or identity is None else _differing(stranger, identity, store)
    if not differs and code in ("media", "encoder"):
        differs = ("media",)
    if differs and stranger is not None:
        entry: Entry | None = stranger
        found = f"this prefix is stored, for other {_listed(differs)}"
        return _explanation(match, prefix, entry, differs=differs, cause=Cause(differs[0], found, _FIXES[differs[0]]))
    if near is None:
        return _explanation(match, prefix, None, differs=differs, fix=_FIXES.get(code))
    at = near.shared
    if at >= min(len(near.ids), len(prefix)) or differs:
        return _explanation(match, prefix, near.entry, differs=differs, fix=_FIXES.get(code))
    parting = None if tokenizer is None else _parting(near, prefix.ids, tokenizer, prompt, chat)
    return _explanation(
        match,
        prefix,
        near.entry,
        cause=None if parting is None else find_cause(parting),
        diverged_at=at,
        stored=_context(near.ids, at, tokenizer),
        prompt=_context(prefix.ids, at, tokenizer),
        fix=_FIXES.get(code),
    )


def _explanation(
    match: Match,
    prefix: Prefix,
    entry: Entry | None,
    *,
    cause: Cause | None = None,
    fix: str | None = None,
    **fields: Any,
) -> Explanation:
    return Explanation(
        tokens=match.tokens,
        prompt_tokens=len(prefix),
        reason=match.reason,
        entry=entry,
        cause=None if cause is None else f"{cause.code}: {cause.found}",
        fix=fix if cause is None else cause.fix,
        **fields,
    )


def _starts(prefix: Prefix, tokenizer: Any) -> list[Prefix]:
    """The prompt, and the prompt with fewer or more of the tokens that begin a text: one more shifts all the others."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or prefix.media:
        return [prefix]
    ids = prefix.ids.tolist()
    run = leading_bos(prefix.ids, tokenizer)
    counts = [number for number in (run - 1, run + 1) if number >= 0]
    return [prefix, *(Prefix(TokenIds.of([bos] * number + ids[run:])) for number in counts)]


def _nearest(store: CacheStore, entries: Sequence[Entry], wanted: TokenIds, tokenizer: Any) -> _Near | None:
    """The entry that shares the most leading ids, a difference in how texts begin aside; then the most ids at all."""
    counts = Counter(wanted.tolist())
    best: tuple[int, int, int] | None = None
    found: _Near | None = None
    behind = wanted[leading_bos(wanted, tokenizer) :].int32
    for entry in entries:
        ids = _ids_of(store, entry)
        if ids is None:
            continue
        shared = common_prefix(ids.int32, wanted.int32)
        aside = common_prefix(ids[leading_bos(ids, tokenizer) :].int32, behind)
        score = (max(shared, aside), sum((Counter(ids.tolist()) & counts).values()), -len(ids))
        if best is None or score > best:
            best, found = score, _Near(entry, ids, shared)
    return found


def _ids_of(store: CacheStore, entry: Entry) -> TokenIds | None:
    """All ids of an entry with what it continues; ``None`` if it cannot be read."""
    parts: list[bytes] = []
    key: str | None = entry.key
    stop = entry.end
    try:
        while key is not None:
            meta = store.header(key).meta
            parts.append(store.read_ids(key).int32[: 4 * (stop - meta.start)])
            key, stop = meta.parent, meta.start
    except (EntryError, OSError):
        return None
    return TokenIds.from_int32(b"".join(reversed(parts)))


def _differing(entry: Entry, identity: Identity, store: CacheStore) -> tuple[str, ...]:
    names = [name for name in _PARTS if getattr(entry.identity, name) != getattr(identity, name)]
    if "dtypes" in names and "weights" in names:  # weights differ with their dtype: it is the more telling
        names.sort(key=lambda name: name != "dtypes")
    if entry.namespace != store.namespace_digest.hex():
        names.append("namespace")
    return tuple(names)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _parting(near: _Near, ids: TokenIds, tokenizer: Any, prompt: Any, options: Templating) -> Parting:
    messages = read_messages(prompt) if is_messages(prompt) else []
    text = prompt if isinstance(prompt, str) else None
    template = None
    if getattr(tokenizer, "chat_template", None) and (messages or text is not None):
        template = ChatTemplate(
            tokenizer=tokenizer,
            tools=options.get("tools"),
            documents=options.get("documents"),
            options=options.get("chat_template_kwargs"),
        )
    return Parting(
        stored=near.ids,
        prompt=ids,
        at=near.shared,
        tokenizer=tokenizer,
        text=text,
        messages=messages,
        template=template,
    )


def _context(ids: TokenIds, at: int, tokenizer: Any) -> str:
    """What stands around a token, which is marked."""
    begin, end = max(0, at - _AROUND), min(len(ids), at + 1 + _AROUND)
    around = ids[begin:end].tolist()
    if tokenizer is None:
        words = [str(one) for one in around]
        words[at - begin] = f"«{words[at - begin]}»"
        return " ".join(words)
    cuts = [
        len(tokenizer.decode(around[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for stop in (at - begin, at - begin + 1)
    ]
    text = tokenizer.decode(around, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return f"{text[: cuts[0]]}«{text[cuts[0] : cuts[1]]}»{text[cuts[1] :]}"
