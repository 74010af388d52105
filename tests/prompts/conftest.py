"""Small real tokenizers, made in memory: bytes, a few merges, and special tokens around a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MERGES = (("Ċ", "Ċ"), ("Ġ", "Ġ"), (":", "Ċ"), ("ĊĊ", "Ċ"), ("Ċ", "Ġ"), (":Ċ", "Ċ"), ("<", "/"), ("h", "i"))
"""Pairs that merge across the border of a turn, written in the byte-level alphabet (Ċ is a line end, Ġ a space)."""


def build(template: str | None = None, *, merges: Sequence[tuple[str, str]] = MERGES, ends: str = ""):
    """A byte-level BPE tokenizer; ``ends`` is a template of special tokens around a text, such as ``"<s> $A </s>"``."""
    vocab = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if ends:
        specials = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=ends, special_tokens=specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build
