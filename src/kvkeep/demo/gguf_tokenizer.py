"""Builds a tokenizer folder from the vocabulary inside a GGUF file.

The two transformers versions that kvkeep supports read this vocabulary in different ways (4.57 gives SmolLM2 a wrong
end token and cuts Gemma's words differently), and two tokenizers would mean two identities of one model. So the
tokenizer is built here, from the file alone, and both versions load the same ``tokenizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kvkeep.errors import InvalidRequestError

_CONTROL, _USER_DEFINED = 3, 4  # token types, as GGUF numbers them
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

Lookup = Callable[[str], Any]


def write_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` into ``folder``.

    Args:
        gguf_path: a GGUF file whose vocabulary is of SmolLM2's or Gemma 3's kind.
        folder: an existing folder.

    Raises:
        InvalidRequestError: the vocabulary is of another kind.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_path)

    def lookup(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = lookup("general.architecture")
    kind = (lookup("tokenizer.ggml.model"), lookup("tokenizer.ggml.pre"))
    if kind == ("gpt2", "smollm"):
        tokenizer = _byte_level(lookup)
    elif kind[0] == "llama" and architecture == "gemma3":
        tokenizer = _gemma(lookup)
    else:
        raise InvalidRequestError(
            f"{gguf_path.name} holds a {kind[0]} vocabulary ({kind[1]}) of architecture {architecture}, but only those "
            "of SmolLM2 and Gemma 3 are converted here: load the model with transformers and save it to a folder."
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(lookup, context_length=lookup(f"{architecture}.context_length"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = lookup("tokenizer.chat_template")
    if template is None and architecture == "gemma3":
        template = gemma_chat_template()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def gemma_chat_template() -> str:
    """Returns a chat template that renders Gemma 3's turns; the base model's file has none."""
    return resources.files(__package__).joinpath("gemma_chat.jinja").read_text(encoding="utf-8")


def merges_by_position(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the merges that a vocabulary in merge order implies, best first.

    Every way to cut a token into two tokens is a merge; the file lists tokens in the order they were learned.
    """
    ids = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += sorted(
            (cut for cut in cuts if cut[0] in ids and cut[1] in ids), key=lambda cut: (ids[cut[0]], ids[cut[1]])
        )
    return merges


def _byte_level(lookup: Lookup) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = lookup("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in lookup("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _mark_added_tokens(tokenizer, tokens, lookup("tokenizer.ggml.token_type"))
    return tokenizer


def _gemma(lookup: Lookup) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    # The file spells runs of spaces with real spaces; text reaches the model with the visible one in their place.
    listed: list[str] = lookup("tokenizer.ggml.tokens")
    tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in listed]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown, bos_id = tokens[lookup("tokenizer.ggml.unknown_token_id")], lookup("tokenizer.ggml.bos_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges_by_position(tokens), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = tokens[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )
    _mark_added_tokens(tokenizer, tokens, lookup("tokenizer.ggml.token_type"))
    return tokenizer


def _mark_added_tokens(tokenizer: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    from tokenizers import AddedToken

    def of_kind(wanted: int) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == wanted
        ]

    tokenizer.add_special_tokens(of_kind(_CONTROL))
    tokenizer.add_tokens(of_kind(_USER_DEFINED))


def _tokenizer_config(lookup: Lookup, *, context_length: int) -> dict[str, Any]:
    tokens = lookup("tokenizer.ggml.tokens")
    named = {role: lookup(f"tokenizer.ggml.{key}_token_id") for role, key in _SPECIAL_TOKENS.items()}
    return {
        # The one class name that both versions know for "what tokenizer.json says".
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: tokens[number] for role, number in named.items() if number is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "model_input_names": ["input_ids", "attention_mask"],  # else 4.57 adds token_type_ids, which no model takes
        "padding_side": "left",
    }
