"""The fingerprint of a tokenizer: what decides the ids of a text, and nothing that a call leaves behind."""

from __future__ import annotations

import inspect
import json
import struct
import sys
from collections.abc import Mapping
from typing import Any

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint.encoding import canonical_json
from kvkeep.keys import digest_fields

_DOMAIN = "kvkeep/tokenizer/1"

_NOT_IDS = ("padding", "truncation", "decoder")
"""Parts of a fast tokenizer's JSON that do not decide the ids of a text: state of the last call, and the way back."""

_MODEL = b',"model":{'  # unescaped quotes: no token can spell it
_VOCABULARY = b',"vocab":'

_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token")
"""The pad token is not among them: it fills batches up, and ``tokenizer.pad_token = tokenizer.eos_token`` is common."""

_TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

_NOT_SETTINGS = frozenset({"clean_up_tokenization_spaces", "model_max_length", "split_special_tokens", "verbose"})
"""Settings of a tokenizer written in Python that are no rules, or are hashed for every tokenizer."""

_TABLES = ("bpe_ranks", "byte_maps")
"""Rules that tokenizers written in Python keep beside their vocabulary."""

_ENGINE_DEPTH = 5  # mistral-common keeps its engine in .tokenizer.instruct_tokenizer.tokenizer._model

_PROBE = (
    " Hello  World, don't you'LL\tx_y=f(1234567.50);\r\n\n   Straße École e\u0301te\u0301 I\u0307 ﬁne １２½² ЙОЖ ёж "
    "日本語テキスト。한국어 \u0627\u0644\u0639\u064e\u0631\u064e\u0628 हिन्दी \U0001f469\u200d\U0001f680 \u200b\u00a0▁"
    "<s></s>[CLS] <unk> naïve—“quoted”… \x07\ufffd\U00010348 end "
)
"""A text that switches act on: case, accents, Unicode forms, spaces, digits, scripts, special tokens as plain text."""


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Hash what decides the ids of a text, 32 hex digits.

    Vocabulary, merges, normaliser, pre-tokenizer, post-processor, added and special tokens are in it. Padding and
    truncation, the chat template (the ids decide, see :func:`chat_template_digest`), the path and the order of the
    serialised form are not. A tokenizer written in Python also counts by the ids that it gives a fixed text, because
    part of its rules is program.

    Args:
        tokenizer: a tokenizer, a processor that has one, or ``None`` for a bind without text (its own fixed digest).

    Raises:
        UnsupportedRequestError: for an object whose rules cannot be read.
    """
    if tokenizer is None:
        return digest_fields("kvkeep/tokenizer/ids-only/1").hex()
    tokenizer = text_tokenizer(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = _backend_rules(backend, tokenizer) if hasattr(backend, "to_str") else _python_rules(tokenizer)
    return digest_fields(_DOMAIN, *rules, canonical_json(_special(tokenizer), where="the tokenizer")).hex()


def chat_template_digest(tokenizer: Any) -> str | None:
    """The digest of the chat template, or ``None`` without one; recorded beside the fingerprint, not part of it."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None and tokenizer is not None:
        template = getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)
    if template is None:
        return None
    return digest_fields("kvkeep/chat-template/1", canonical_json(template, where="the chat template")).hex()


def text_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself, or the one inside a processor."""
    if not callable(getattr(tokenizer, "get_vocab", None)) and getattr(tokenizer, "tokenizer", None) is not None:
        return tokenizer.tokenizer
    return tokenizer


# --- tokenizers with a backend of the tokenizers library ---


def _backend_rules(backend: Any, tokenizer: Any) -> list[bytes]:
    """The rules of a ``tokenizers`` backend, from the JSON that it describes itself with."""
    try:
        text = backend.to_str().encode()
    except Exception as error:  # its own error type for a part that is a Python object
        raise _unreadable(tokenizer, error) from error
    head, _, model = text.rpartition(_MODEL)  # the last: a special token may be called "model"
    rules = json.loads(head + b"}", object_hook=_without_offsets)
    for name in _NOT_IDS:
        rules.pop(name, None)
    rules["post_processor"] = _around(rules.get("post_processor"))
    rules["model"], tables = _model_rules(b"{" + model[:-1])
    return [b"fast", json.dumps(rules, sort_keys=True).encode(), *tables]


def _model_rules(model: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The settings of a backend's model, and its vocabulary and merges.

    These are nearly all of the text and are hashed as they stand: the library always writes them by id and by rank,
    and to parse them would take longer than all the rest. The scores of a Unigram model are the exception, because
    the library's reader changes their last bit: they count as float32, which is what SentencePiece has.
    """
    settings, _, tables = model.partition(_VOCABULARY)
    rules: dict[str, Any] = json.loads(settings + b"}")
    if rules["type"] == "Unigram":
        rules = json.loads(model)
        pieces = rules.pop("vocab")
        scores = struct.pack(f"<{len(pieces)}f", *(score for _, score in pieces))
        return rules, [json.dumps([piece for piece, _ in pieces]).encode(), scores]
    if rules["type"] == "BPE":  # versions of transformers differ in how they say "no affix"
        rules |= {name: rules.get(name) or None for name in _AFFIXES}
    return rules, [tables]


def _without_offsets(rules: dict[str, Any]) -> dict[str, Any]:
    """Drop the switch that moves where a token is said to lie in the text, and nothing else that has its name."""
    if isinstance(rules.get("trim_offsets"), bool):
        del rules["trim_offsets"]
    return rules


def _around(post_processor: Any) -> list[Any]:
    """What a post-processor puts around one text, as ids and ``"A"`` for the text; nothing is the empty list.

    The same ids can be said in several ways, and versions of transformers differ in how they say them.
    """
    kind = post_processor["type"] if post_processor else "ByteLevel"
    if kind == "ByteLevel":  # moves offsets only
        return []
    if kind == "Sequence":
        return [wrap for one in post_processor["processors"] for wrap in _around(one)]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [[post_processor["cls"][1], "A", post_processor["sep"][1]]]
    if kind != "TemplateProcessing":
        return [post_processor]
    wrap: list[Any] = []
    for piece in post_processor["single"]:
        special = piece.get("SpecialToken")
        wrap += ["A"] if special is None else post_processor["special_tokens"][special["id"]]["ids"]
    return [] if wrap == ["A"] else [wrap]


# --- tokenizers written in Python ---


def _python_rules(tokenizer: Any) -> list[bytes]:
    """The rules of any other tokenizer: its tables, its settings, its engine, and what it makes of a fixed text."""
    if not (callable(tokenizer) and hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "encode")):
        raise _unreadable(tokenizer)
    try:
        vocabulary = sorted((str(token), int(i)) for token, i in tokenizer.get_vocab().items())
        ids = [int(i) for i in tokenizer.encode(_PROBE, verbose=False)]
    except Exception as error:  # a program of somebody else's: it raises what it likes
        raise _unreadable(tokenizer, error) from error
    added = getattr(tokenizer, "added_tokens_decoder", None)  # a method that raises in mistral-common's
    rules = {
        "tables": {name: _table(getattr(tokenizer, name, None)) for name in _TABLES},
        "settings": _settings(tokenizer),
        "added": {str(i): _token(token) for i, token in added.items()} if isinstance(added, Mapping) else {},
        "probe": ids,
    }
    found = [b"python", json.dumps(vocabulary).encode(), canonical_json(rules, where="the tokenizer")]
    return found + sorted(_engines(tokenizer))


def _table(rules: Any) -> Any:
    """Merges in the order of their ranks; any other table as it is."""
    pairs = isinstance(rules, Mapping) and all(isinstance(key, tuple) for key in rules)
    return sorted(rules, key=rules.__getitem__) if pairs else rules


def _settings(tokenizer: Any) -> dict[str, bool | int | float]:
    """The switches and numbers that its class can be built with, as they stand now: ``do_lower_case`` and the like.

    The signatures name them, because what a tokenizer remembers of how it was built differs from one way of loading
    to the next. Settings that are text can be paths; what they change, the probe shows.
    """
    found: dict[str, bool | int | float] = {}
    for kind in type(tokenizer).__mro__[:-1]:
        for name, parameter in inspect.signature(vars(kind).get("__init__", object)).parameters.items():
            given = getattr(tokenizer, "init_kwargs", {}).get(name, parameter.default)
            value = getattr(tokenizer, name, given)
            if isinstance(value, bool | int | float) and name not in _NOT_SETTINGS:
                found.setdefault(name, value)
    return found


def _engines(tokenizer: Any) -> set[bytes]:
    """Digests of the engines inside: SentencePiece models, tiktoken encodings, ``tokenizers`` backends.

    A set, because a tokenizer may hold one engine under two names and switch between them.
    """
    found: set[bytes] = set()
    things = [tokenizer]
    for _ in range(_ENGINE_DEPTH):
        inner = [value for thing in things for value in vars(thing).values() if not _of_python_itself(value)]
        engines = [_engine(value, tokenizer) for value in inner]
        found |= {digest for digest in engines if digest is not None}
        things = [value for value, digest in zip(inner, engines, strict=True) if digest is None]
        things = [value for value in things if hasattr(value, "__dict__")]
    return found


def _engine(value: Any, tokenizer: Any) -> bytes | None:
    """The digest of an engine's rules, or ``None`` for anything else."""
    if hasattr(value, "serialized_model_proto"):
        return digest_fields("sentencepiece", value.serialized_model_proto())
    if hasattr(value, "to_str") and hasattr(value, "pre_tokenizer"):
        return digest_fields("tokenizers", *_backend_rules(value, tokenizer))
    ranks = getattr(value, "_mergeable_ranks", None)
    if not isinstance(ranks, Mapping):
        return None
    tokens = b"".join(len(token).to_bytes(4, "little") + token for token in sorted(ranks, key=ranks.__getitem__))
    rules = canonical_json([value._pat_str, value._special_tokens, sorted(ranks.values())], where="the tokenizer")
    return digest_fields("tiktoken", rules, tokens)


def _of_python_itself(value: Any) -> bool:
    """Whether it is a plain value, a module, a function or a logger: nothing that could hold an engine."""
    return type(value).__module__.partition(".")[0] in sys.stdlib_module_names


# --- both ---


def _special(tokenizer: Any) -> dict[str, Any]:
    """What the wrapper around the rules adds: the roles of special tokens, and whether text may spell them."""
    roles = getattr(tokenizer, "special_tokens_map", None)
    if roles is None:
        roles = {name: getattr(tokenizer, name, None) for name in _ROLES}
    return {
        "roles": {name: str(roles[name]) for name in _ROLES if roles.get(name) is not None},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
    }


def _token(token: Any) -> dict[str, Any]:
    return {flag: getattr(token, flag) for flag in _TOKEN_FLAGS}


def _unreadable(tokenizer: Any, error: Exception | None = None) -> UnsupportedRequestError:
    reason = f" ({error})" if error is not None else ""
    return UnsupportedRequestError(
        f"{type(tokenizer).__qualname__} is not a tokenizer whose rules kvkeep can read{reason}; give a fast tokenizer "
        "(AutoTokenizer), a processor that has one, or bind(model, None) and prompts as token ids"
    )
