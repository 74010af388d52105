"""The records that calls return: small, frozen, free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a cache must have been computed with to be reused here, part by part (32 hex digits each).

    Attributes:
        weights: every parameter and buffer, by content.
        config: every configuration field and derived constant that can change KV.
        adapters: the active adapters, or ``None`` for the bare model.
        dtypes: the number formats the model computes in.
        tokenizer: the tokenizer, or the marker of a bind without one.
        model: ``weights``, ``config``, ``adapters`` and ``dtypes`` in one digest.
    """

    weights: str
    config: str
    adapters: str | None
    dtypes: str
    tokenizer: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored stretch of a prefix: tokens [start, end).

    Attributes:
        key: 32 hex digits, also the file's name.
        start: first token that this file holds.
        end: number of tokens of the whole prefix.
        nbytes: bytes of the file.
        created: Unix time in seconds.
        identity: what it was computed with.
        namespace: digest of the namespace it belongs to.
        parent: key of the entry that holds the tokens before ``start``, or ``None``.
        names: the names that point at it.
        form: ``"exact"``, or how it was quantized by the cache that was saved.
    """

    key: str
    start: int
    end: int
    nbytes: int
    created: int
    identity: Identity
    namespace: str
    parent: str | None = None
    names: tuple[str, ...] = ()
    form: str = "exact"

    @property
    def exact(self) -> bool:
        """Whether it holds the keys and values as the model computed them, not quantized ones."""
        return self.form == "exact"

    @property
    def tokens(self) -> int:
        """Tokens of the whole prefix."""
        return self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """An entry that is held in memory.

    Attributes:
        entry: the entry.
        nbytes: bytes of memory that its tensors take, those of what it continues included.
        device: where they lie: ``"cpu"``, ``"cuda:0"``, or several with commas between.
        hits: how often it was handed out.
    """

    entry: Entry
    nbytes: int
    device: str
    hits: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole prefix."""
        return self.entry.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a lookup found. ``tokens == 0`` is a miss.

    Attributes:
        tokens: leading tokens of the prompt whose KV can be reused, at most one fewer than the prompt has.
        entry: the entry they come from, or ``None``.
        reason: why it is not more: ``None`` if all that could be hoped for was found, else ``"code"`` or
            ``"code: detail"``. The codes are listed in the README.
        exact: whether a load gives bit for bit what the model computed. False where it is quantized: in the entry, or
            on the way into a quantized cache.
        resident: whether it is in this process's memory, so that nothing is read from disk.
    """

    tokens: int
    entry: Entry | None
    reason: str | None
    exact: bool = True
    resident: bool = False

    def __bool__(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """What one ``generate`` reused.

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: leading tokens that were not fed to the model, because their KV came from the store.
        reason: why it is not more, as in :class:`Match`.
        load_seconds: time spent on lookup, reading and verifying, in seconds.
        key: key of the entry that was used, or ``None``.
        stored: key of the entry that was stored of this call, or that it continued as it was; ``None`` if none was.
        not_stored: why nothing was stored although ``save=`` asks for it, as in :class:`Match`; else ``None``. What is
            stored is known when ``generate`` has ended: a bind's ``on_report`` is called before.
        resident: whether it came from memory, where it was preloaded.
    """

    prompt_tokens: int
    reused_tokens: int
    reason: str | None
    load_seconds: float
    key: str | None
    stored: str | None = None
    not_stored: str | None = None
    resident: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt can reuse no more than it does. ``str()`` says it for people.

    Attributes:
        tokens: leading tokens that can be reused, as :attr:`Match.tokens`.
        prompt_tokens: tokens of the prompt.
        reason: why it is not more, as :attr:`Match.reason`.
        entry: the nearest entry, or ``None``.
        diverged_at: the first token at which the prompt and that entry differ; ``None`` if one begins like the other.
        stored: what is stored around that token, which stands between « and ».
        prompt: what the prompt has there, marked in the same way.
        differs: what the entry was stored for and differs here: ``weights``, ``config``, ``dtypes``, ``adapters``,
            ``tokenizer``, ``namespace``, ``media``.
        cause: ``"code: detail"`` where the cause is a known one, which was tested. ``None`` where it is not known.
        fix: what would let more be reused, where that is known.

    >>> print(Explanation(tokens=0, prompt_tokens=7, reason="empty: nothing is stored", fix="kv.warm(prompt)"))
    reusable    0 of 7 tokens
    reason      empty: nothing is stored
    fix         kv.warm(prompt)
    """

    tokens: int
    prompt_tokens: int
    reason: str | None
    entry: Entry | None = None
    diverged_at: int | None = None
    stored: str | None = None
    prompt: str | None = None
    differs: tuple[str, ...] = ()
    cause: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        lines = [("reusable", f"{self.tokens:,} of {self.prompt_tokens:,} tokens")]
        if self.reason is not None:
            lines.append(("reason", self.reason))
        if self.entry is not None:
            names = f" ({', '.join(self.entry.names)})" if self.entry.names else ""
            lines.append(("nearest", f"{self.entry.key[:12]}{names}, {self.entry.tokens:,} tokens"))
        if self.diverged_at is not None:
            lines.append(("differs at", f"token {self.diverged_at:,}"))
        if self.differs:
            lines.append(("differs in", ", ".join(self.differs)))
        for label, text in (("stored", self.stored), ("prompt", self.prompt)):
            if text is not None:
                lines.append((label, repr(text)[1:-1]))
        lines += [(label, text) for label, text in (("cause", self.cause), ("fix", self.fix)) if text is not None]
        return "\n".join(f"{label:<12}{text}" for label, text in lines)
