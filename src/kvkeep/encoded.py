"""What an encoder is fed before a decoder reads its own ids: a part of the prefix, always wholly in it.

A text, a sound or a picture decides, through the cross-attention layers, the KV of every token of the decoder. So it is
an item of the prefix that ends before token 0, and its content is the digest of all that the encoder is fed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvkeep import compat
from kvkeep.entry_format import Media
from kvkeep.errors import InvalidPromptError, UnsupportedRequestError
from kvkeep.fingerprint import check_hashable, tensor_digests
from kvkeep.keys import digest_fields

_IGNORED = frozenset({"use_cache", "return_dict", "output_attentions", "output_hidden_states", "logits_to_keep"})
_OF_THE_DECODER = ("decoder_", "cross_attn", "cross_attention", "cache", "past_key_values", "labels", "encoder_outputs")


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """The encoder's part of one prompt.

    Attributes:
        item: its place in the prefix, before token 0, and its content.
        name: the input that it is about.
        values: all of the encoder's inputs by name, each of one sequence.
        output: what the encoder makes of them, where that is known.
    """

    item: Media
    name: str = ""
    values: Mapping[str, torch.Tensor] | None = None
    output: Any = None

    @property
    def others(self) -> dict[str, torch.Tensor]:
        """The inputs beside the main one: the decoder is fed them, too."""
        return {name: value for name, value in (self.values or {}).items() if name != self.name}

    def on(self, device: torch.device) -> EncoderInput:
        """The same input on a device."""
        values = {name: value.to(device) for name, value in (self.values or {}).items()}
        return EncoderInput(self.item, self.name, values, self.output)

    def encoded(self, output: Any) -> EncoderInput:
        """The same input with what the encoder makes of it."""
        return EncoderInput(self.item, self.name, self.values, output)


def item_of(content: bytes) -> Media:
    """The item of an encoder input with this digest."""
    return Media(kind="encoder", content=content.hex(), start=0, end=0)


def read_encoder(model: Any, given: Mapping[str, Any]) -> EncoderInput:
    """Take what the encoder of one prompt is fed.

    Args:
        model: an encoder-decoder model.
        given: its inputs by name, without those of the decoder.

    Raises:
        InvalidPromptError: without the encoder's main input, or with several sequences.
        UnsupportedRequestError: for inputs whose part in the KV kvkeep does not know.
    """
    given = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
    name = compat.encoder_input_name(model, given)
    if name not in given:
        raise InvalidPromptError(
            f"a prompt of {type(model).__name__} is a mapping with {name} for the encoder and, if it goes on from "
            f"more than the start token, decoder_input_ids: {name} is missing"
        )
    values = {}
    for other, value in given.items():
        if other.startswith(_OF_THE_DECODER):
            raise UnsupportedRequestError(
                f"the prompt comes with {other}, which decides KV in a way that is not known: leave it out, or run "
                "model.generate without the store"
            )
        values[other] = _rows(other, value)
    hashed = {n: value for n, value in values.items() if n != "attention_mask" or not bool((value == 1).all())}
    digests = tensor_digests(hashed)
    named = (part for one in sorted(hashed) for part in (one.encode(), digests[one]))
    return EncoderInput(item_of(digest_fields("kvkeep/encoder/1", *named)), name, values)


def _rows(name: str, value: Any) -> torch.Tensor:
    """One sequence of an input, with its batch dimension; integers as the models take them."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        raise UnsupportedRequestError(f"{name} is a {type(value).__name__} that is no tensor") from None
    check_hashable(name, tensor)
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() == 0 or not tensor.numel():
        raise UnsupportedRequestError(f"{name} has the shape {list(tensor.shape)}, which is no sequence")
    if tensor.shape[0] != 1:
        raise InvalidPromptError(
            f"{name} has {tensor.shape[0]} rows: an encoder-decoder prompt is one sequence; call once for each"
        )
    return tensor if tensor.is_floating_point() else tensor.long()
