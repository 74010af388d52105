"""What the index knows of one entry: enough to choose it for a prompt or to list it, without opening its file.

A row is derived from the entry's header and never believed over it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from kvkeep.entry_format import EntryMeta, Header, LayerRecord, Media, canonical_json, chain_length
from kvkeep.keys import DIGEST_SIZE
from kvkeep.records import Identity

_HEX32 = re.compile(r"[0-9a-f]{32}")
_FORM = re.compile(r"[\x21-\x7e]{1,64}")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One entry, as the index lists it.

    Attributes:
        key: the entry's key, 32 hex digits.
        start: first token that its file holds.
        end: number of tokens of the whole prefix.
        parent: key of the entry that holds the tokens before ``start``, or ``None``.
        nbytes: bytes of the file.
        created: Unix time in seconds.
        identity: what it was computed with.
        namespace: digest of the namespace, 32 hex digits.
        prefix: hash of the whole prefix, 32 hex digits.
        form: how exactly it is stored (``exact``, ...).
        attention: name of the attention kernel it was computed with, or ``None``.
        chain: the packed 16-byte digests of the block boundaries in (start, end].
        trims: for layers with rows, the distinct pairs (first stored row, window; 0 is a full layer).
        snapshots: whether it holds state that is valid at ``end`` only.
        media: what else than token ids decided it.
        tp: tensor-parallel (size, rank), or ``None``.
    """

    key: str
    start: int
    end: int
    parent: str | None
    nbytes: int
    created: int
    identity: Identity
    namespace: str
    prefix: str
    form: str
    attention: str | None
    chain: bytes
    trims: tuple[tuple[int, int], ...]
    snapshots: bool
    media: tuple[Media, ...] = ()
    tp: tuple[int, int] | None = None

    @classmethod
    def from_header(cls, header: Header, chain: bytes) -> Row:
        """The row of the entry with this header, whose packed chain is ``chain``."""
        return cls.from_meta(header.meta, header.size, chain)

    @classmethod
    def from_meta(cls, meta: EntryMeta, size: int, chain: bytes) -> Row:
        """The row of the entry with this metadata, in a file of ``size`` bytes."""
        return cls(
            key=meta.key.hash,
            start=meta.start,
            end=meta.end,
            parent=meta.parent,
            nbytes=size,
            created=meta.created,
            identity=meta.key.identity,
            namespace=meta.key.namespace,
            prefix=meta.key.prefix,
            form=meta.key.form,
            attention=_recorded(meta, "attention"),
            chain=bytes(chain),
            trims=trims(meta),
            snapshots=has_snapshots(meta),
            media=meta.key.media,
            tp=meta.key.tp,
        )

    def to_json(self) -> str:
        """The row as one line of canonical JSON."""
        identity = self.identity
        return canonical_json(
            {
                "key": self.key,
                "start": self.start,
                "end": self.end,
                "parent": self.parent,
                "nbytes": self.nbytes,
                "created": self.created,
                "identity": [
                    identity.weights,
                    identity.config,
                    identity.adapters,
                    identity.dtypes,
                    identity.tokenizer,
                    identity.model,
                ],
                "namespace": self.namespace,
                "prefix": self.prefix,
                "form": self.form,
                "attention": self.attention,
                "chain": base64.b64encode(self.chain).decode(),
                "trims": self.trims,
                "snapshots": self.snapshots,
                "media": [[m.kind, m.content, m.start, m.end] for m in self.media],
                "tp": self.tp,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Row:
        """Read a row back.

        Raises:
            ValueError: the text is not exactly what :meth:`to_json` writes for a possible entry.
        """
        try:
            source = _object(json.loads(text))
            take = source.pop
            row = cls(
                key=_hex(take("key")),
                start=_natural(take("start")),
                end=_natural(take("end")),
                parent=_optional(_hex, take("parent")),
                nbytes=_natural(take("nbytes")),
                created=_natural(take("created")),
                identity=_identity(*_list(take("identity"), 6)),
                namespace=_hex(take("namespace")),
                prefix=_hex(take("prefix")),
                form=_form(take("form")),
                attention=_optional(_text, take("attention")),
                chain=base64.b64decode(take("chain"), validate=True),
                trims=tuple(_pair(item) for item in _list(take("trims"))),
                snapshots=_flag(take("snapshots")),
                media=tuple(_medium(item) for item in _list(take("media"))),
                tp=_optional(_pair, take("tp")),
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"the row lacks something or holds another type: {error}") from None
        if source:
            raise ValueError(f"the row holds the unknown member {min(source)!r}")
        if not row.start < row.end or (row.parent is None) != (row.start == 0):
            raise ValueError(f"tokens [{row.start}, {row.end}) are not a stretch of a prefix")
        if len(row.chain) != DIGEST_SIZE * chain_length(row.start, row.end):
            raise ValueError("the row's chain does not have the length of its stretch")
        return row


def trims(meta: EntryMeta) -> tuple[tuple[int, int], ...]:
    """For an entry's layers with rows, the distinct pairs (first stored row, window; 0 is a full layer)."""
    return tuple(sorted({(layer.first, _window(layer)) for layer in _distinct(meta.layers) if layer.rows}))


def has_snapshots(meta: EntryMeta) -> bool:
    """Whether an entry holds state that is valid at its end only. Model state is not known to be right elsewhere."""
    layers = _distinct((*meta.layers, *(meta.cross or ())))
    return bool(meta.state) or any("snapshot" in layer.tensors.values() for layer in layers)


def _recorded(meta: EntryMeta, name: str) -> str | None:
    value = meta.recorded.get(name)
    return value[:64] if isinstance(value, str) else None


def _distinct(layers: Sequence[LayerRecord]) -> Iterable[LayerRecord]:
    """The layers once each: those that are alike were decoded into one object."""
    return {id(layer): layer for layer in layers}.values()


def _window(layer: LayerRecord) -> int:
    window = layer.scalars.get("window")
    return window if isinstance(window, int) and not isinstance(window, bool) else 0


@lru_cache(maxsize=256)  # entries share few identities: this keeps one object of each
def _identity(*parts: str | None) -> Identity:
    weights, config, adapters, dtypes, tokenizer, model = parts
    return Identity(
        weights=_hex(weights),
        config=_hex(config),
        adapters=_optional(_hex, adapters),
        dtypes=_hex(dtypes),
        tokenizer=_hex(tokenizer),
        model=_hex(model),
    )


def _hex(value: object) -> str:
    if not isinstance(value, str) or not _HEX32.fullmatch(value):
        raise TypeError("not 32 hex digits")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _form(value: object) -> str:
    if not isinstance(value, str) or not _FORM.fullmatch(value):
        raise TypeError("not the name of a form")
    return value


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("not a natural number")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("neither true nor false")
    return value


def _optional(kind: Callable[[object], _T], value: object) -> _T | None:
    return None if value is None else kind(value)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _list(value: object, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise TypeError("not a list of the right length")
    return value


def _pair(value: object) -> tuple[int, int]:
    first, second = _list(value, 2)
    return _natural(first), _natural(second)


def _medium(value: object) -> Media:
    kind, content, start, end = _list(value, 4)
    if not isinstance(kind, str):
        raise TypeError("a medium's kind is not text")
    return Media(kind=kind, content=_hex(content), start=_natural(start), end=_natural(end))
