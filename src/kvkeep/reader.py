"""Reading a prompt for a live model: what it is fed, whichever form the prompt came in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from kvkeep import compat
from kvkeep.chat import stable_prefix
from kvkeep.errors import InvalidPromptError, InvalidRequestError
from kvkeep.inputs import Inputs, input_device, read_inputs, read_paired
from kvkeep.keys import TokenIds, common_prefix
from kvkeep.prefill import check_known
from kvkeep.prefixes import uncut
from kvkeep.prompts import (
    Prompt,
    Templating,
    is_batch,
    is_messages,
    is_padded,
    read_encoder_prompt,
    read_ids,
    read_prompt,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack


_LAST_WORD = re.compile(r"\s+\S*\Z")
_MERGING = 4


class PromptReader:
    """Reads prompts for one model and its tokenizer; what goes to the chat template comes with each of them."""

    def __init__(self, model: Callable[[], Any], tokenizer: Any) -> None:
        self._model = model
        self.tokenizer = tokenizer

    def inputs(self, prompt: Any, **chat: Unpack[Templating]) -> Inputs:
        """A whole prompt of one sequence."""
        model = self._model()
        if compat.is_encoder_decoder(model):
            given = read_encoder_prompt(prompt, self.tokenizer, compat.encoder_input_name(model, {}))
            return read_paired(model, _decoder_ids(model, given), given)
        read = read_prompt(prompt, self.tokenizer, **chat)
        check_known(model, read.ids)
        return read_inputs(model, read.ids, read.extras)

    def prefix(self, prompt: Any, **chat: Unpack[Templating]) -> tuple[Inputs, str | None]:
        """What of a prompt stays as it is whatever follows, and where its chat template is not stable."""
        if not is_messages(prompt) or compat.is_encoder_decoder(self._model()):
            return self.inputs(prompt, **chat), None
        prefix = stable_prefix(self.tokenizer, prompt, **chat)
        media = frozenset().union(*compat.media_tokens(self._model()).values())
        if media.isdisjoint(prefix.ids.tolist()):
            return Inputs(prefix.ids), prefix.unstable
        whole = self.inputs(prompt, **chat)
        shared = common_prefix(whole.ids.int32, prefix.ids.int32)
        return whole.first(uncut(whole.media, shared)), prefix.unstable

    def cuts(self, prompt: Any, inputs: Inputs, *, every: int | None, **chat: Unpack[Templating]) -> set[int]:
        """After how many of a prefix's tokens other prompts are likely to part from it.

        A text goes on otherwise where its last tokens merge with what follows. With ``every``, also after so many
        tokens each, and behind each message of a conversation.
        """
        found: set[int] = set()
        if isinstance(prompt, str):
            found.add(self._settled(prompt, inputs.ids))
        if every is not None:
            found.update(range(every, len(inputs), every))
            for count in range(1, len(prompt)) if is_messages(prompt) else ():
                with suppress(InvalidRequestError):  # a template may refuse a part of a conversation
                    ids = stable_prefix(self.tokenizer, prompt[:count], **chat).ids
                    found.add(common_prefix(inputs.ids.int32, ids.int32))
        return found

    def _settled(self, text: str, ids: TokenIds) -> int:
        """How many of a text's tokens no further text can change: those before its last word, or before its last ones.

        Measured on five tokenizers, two or three tokens may merge with what follows; all of them of the last word.
        """
        word = _LAST_WORD.search(text)
        if word is None or word.start() == 0:
            return max(0, len(ids) - _MERGING)
        return common_prefix(ids.int32, read_prompt(text[: word.start()], self.tokenizer).ids.int32)

    def held(self, given: Any) -> Inputs:
        """What a cache holds, by the ids, or the mapping, that the caller says it was prefilled with."""
        model = self._model()
        if compat.is_encoder_decoder(model):
            if not isinstance(given, Mapping) or given.get("decoder_input_ids") is None:
                raise InvalidPromptError(
                    "the cache of an encoder-decoder model belongs to what its encoder was fed: save it with a mapping "
                    "of that, as the model takes it, and decoder_input_ids, exactly those that the cache holds"
                )
            rest = {name: value for name, value in given.items() if name != "decoder_input_ids"}
            return read_paired(model, read_ids(given["decoder_input_ids"]), rest)
        read = read_prompt(given, None) if isinstance(given, Mapping) else Prompt(read_ids(given), {}, "ids")
        check_known(model, read.ids)
        return read_inputs(model, read.ids, read.extras)

    def arguments(self, prompt: Any, **chat: Unpack[Templating]) -> dict[str, Any]:
        """The arguments of ``model.generate`` for a prompt of one or of several sequences."""
        model = self._model()
        if compat.is_encoder_decoder(model):
            return self._moved(read_encoder_prompt(prompt, self.tokenizer, compat.encoder_input_name(model, {})))
        if is_batch(prompt) or is_padded(prompt):  # what comes back has the same padding
            if not isinstance(prompt, Mapping | torch.Tensor):
                raise InvalidRequestError(
                    "several prompts at once: pass what tokenizer(texts, padding=True, return_tensors='pt') returns"
                )
            return dict(prompt) if isinstance(prompt, Mapping) else {"input_ids": prompt}
        read = read_prompt(prompt, self.tokenizer, **chat)
        extras = read.extras if read.kind == "mapping" else self._moved(read.extras)
        return {**self.model_inputs(read.ids), **extras}

    def model_inputs(self, ids: TokenIds) -> dict[str, Any]:
        """Ids as ``model.generate`` takes them, [1, tokens], on the model's device."""
        input_ids = Inputs(ids).tensor(input_device(self._model()))
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    def _moved(self, values: Mapping[str, Any]) -> dict[str, Any]:
        device = input_device(self._model())
        return {n: value.to(device) if isinstance(value, torch.Tensor) else value for n, value in values.items()}


def _decoder_ids(model: Any, given: dict[str, Any]) -> TokenIds:
    """The decoder's ids as ``generate`` makes them of those that came with the encoder's input, or of none."""
    ids = given.pop("decoder_input_ids", None)
    ids = None if ids is None else Inputs(read_ids(ids)).tensor(input_device(model))
    ids = compat.decoder_ids(model, compat.encoder_input_name(model, given), ids)
    if ids is None:
        raise InvalidPromptError(
            f"{type(model).__name__} names no decoder_start_token_id: give decoder_input_ids beside what its "
            "encoder is fed"
        )
    return read_ids(ids)
