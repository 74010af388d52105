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
class Match:
    """What a lookup found. ``tokens == 0`` is a miss.

    Attributes:
        tokens: leading tokens of the prompt whose KV can be reused, at most one fewer than the prompt has.
        entry: the entry they come from, or ``None``.
        reason: why it is not more: ``None`` if all that could be hoped for was found, else ``"code"`` or
            ``"code: detail"``. The codes are listed in the README.
        exact: whether a load gives bit for bit what the model computed. False where it is quantized: in the entry, or
            on the way into a quantized cache.
    """

    tokens: int
    entry: Entry | None
    reason: str | None
    exact: bool = True

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
    """

    prompt_tokens: int
    reused_tokens: int
    reason: str | None
    load_seconds: float
    key: str | None
