"""The fingerprint of a tokenizer: what decides the ids of a text, and nothing that a call leaves behind."""

from __future__ import annotations

import json
from typing import Any

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint.encoding import canonical_json
from kvkeep.keys import digest_fields

_DOMAIN = "kvkeep/tokenizer/1"

_NOT_IDS = ("padding", "truncation", "decoder")
"""Parts of a fast tokenizer's JSON that do not decide the ids of a text: state of the last call, and the way back."""

_MODEL = ',"model":{'  # unescaped quotes: no token can spell it

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token")
"""The pad token is not among them: it fills batches up, and ``tokenizer.pad_token = tokenizer.eos_token`` is common."""

_TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Hash what decides the ids of a text, 32 hex digits.

    Vocabulary, merges, normaliser, pre-tokenizer, post-processor, added and special tokens are in it. Padding and
    truncation, the chat template (the ids decide, see :func:`chat_template_digest`), the path and the order of the
    serialised form are not.

    Args:
        tokenizer: a tokenizer, a processor that has one, or ``None`` for a bind without text (its own fixed digest).

    Raises:
        UnsupportedRequestError: for an object whose rules cannot be read.
    """
    if tokenizer is None:
        return digest_fields("kvkeep/tokenizer/ids-only/1").hex()
    tokenizer = text_tokenizer(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = _fast_rules(backend) if hasattr(backend, "to_str") else _slow_rules(tokenizer)
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


def _fast_rules(backend: Any) -> list[bytes | None]:
    """The rules of a ``tokenizers`` backend, from the JSON that it describes itself with.

    The vocabulary and merges, last in that text and nearly all of it, are hashed as they stand: the library always
    writes them by id and by rank, and to parse them again would take ten times as long as all the rest.
    """
    text = backend.to_str()
    head, mark, model = text.partition(_MODEL) if text.count(_MODEL) == 1 else (text[:-1], "", "")
    rules = json.loads(head + "}", object_hook=_without_offsets)
    for name in _NOT_IDS:
        rules.pop(name, None)
    return [b"fast", json.dumps(rules, sort_keys=True).encode(), (mark + model).encode()]


def _without_offsets(rules: dict[str, Any]) -> dict[str, Any]:
    """Drop the switch that moves where a token is said to lie in the text, and nothing else that has its name."""
    if isinstance(rules.get("trim_offsets"), bool):
        del rules["trim_offsets"]
    return rules


def _slow_rules(tokenizer: Any) -> list[bytes | None]:
    """The rules of a tokenizer written in Python: its class, its vocabulary, and its merges or SentencePiece model."""
    kind = type(tokenizer).__qualname__
    model = getattr(tokenizer, "sp_model", None)
    merges = getattr(tokenizer, "bpe_ranks", None)
    if not all(hasattr(tokenizer, name) for name in ("get_vocab", "init_kwargs", "added_tokens_decoder")):
        raise UnsupportedRequestError(
            f"{kind} is not a tokenizer whose rules kvkeep can read; give a fast tokenizer (AutoTokenizer), a "
            "processor that has one, or bind(model, None) and prompts as token ids"
        )
    rules = {
        "class": kind,
        "vocabulary": dict(tokenizer.get_vocab()),
        "merges": None if merges is None else sorted(merges, key=merges.__getitem__),
        "switches": {name: getattr(tokenizer, name, value) for name, value in _switches(tokenizer)},
        "added": {str(i): _token(token) for i, token in tokenizer.added_tokens_decoder.items()},
    }
    proto = None if model is None else model.serialized_model_proto()
    return [b"slow", canonical_json(rules, where="the tokenizer"), proto]


def _switches(tokenizer: Any) -> list[tuple[str, bool]]:
    """The on/off settings it was built with: ``do_lower_case``, ``add_bos_token`` and the like."""
    return [(name, value) for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool)]


def _special(tokenizer: Any) -> dict[str, Any]:
    """What the wrapper around the rules adds: the roles of special tokens, and whether text may spell them."""
    roles = getattr(tokenizer, "special_tokens_map", {})
    return {
        "roles": {name: str(roles[name]) for name in _ROLES if roles.get(name) is not None},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
    }


def _token(token: Any) -> dict[str, Any]:
    return {flag: getattr(token, flag) for flag in _TOKEN_FLAGS}
