"""Prompts in every form that people hold them, read into one record of canonical token ids.

A prompt is text, chat messages, token ids (tensor, array, list) or the mapping that a tokenizer or processor returned.
Nothing here looks at the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from kvkeep.errors import InvalidPromptError, InvalidRequestError
from kvkeep.keys import TokenIds

Message = Mapping[str, Any]

PER_TOKEN = frozenset({"token_type_ids", "mm_token_type_ids", "position_ids"})
"""Model inputs with one value a token: they are cut where the ids are cut."""

_OWN_OPTIONS = frozenset(
    {"conversation", "tools", "documents", "add_generation_prompt", "tokenize", "return_dict", "return_tensors"}
    | {"padding", "truncation", "max_length"}
)


class Templating(TypedDict, total=False):
    """What goes to the chat template, as ``apply_chat_template`` takes it."""

    tools: Sequence[Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt, read.

    Attributes:
        ids: the canonical ids of its one sequence, at least one, without padding.
        extras: the other model inputs that came with it, such as ``pixel_values``, as they came. The attention mask is
            not among them: what it said is that ``ids`` are all there is.
        kind: the form it was given in.
    """

    ids: TokenIds
    extras: Mapping[str, Any]
    kind: Literal["text", "messages", "ids", "mapping"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChatTemplate:
    """A tokenizer's (or processor's) chat template with the options of one call."""

    tokenizer: Any
    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise InvalidRequestError("chat messages need a tokenizer: bind(model, tokenizer)")
        if taken := sorted(_OWN_OPTIONS.intersection(self.options or {})):
            raise InvalidRequestError(f"chat_template_kwargs may not set {', '.join(taken)}: kvkeep sets them itself")

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = True) -> Mapping[str, Any]:
        """Render and tokenize one conversation, or a list of conversations, exactly as transformers does.

        Returns:
            The mapping of model inputs; one conversation gives one row, several give a list of rows.

        Raises:
            InvalidRequestError: the template, or the tokenizer, refused.
        """
        inputs = {"tools": self.tools, "documents": self.documents}
        given = {name: value for name, value in inputs.items() if value is not None}  # not every tokenizer takes both
        options: dict[str, Any] = {**given, **(self.options or {})}
        if not options.get("continue_final_message"):
            options["add_generation_prompt"] = add_generation_prompt
        try:
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except Exception as error:  # a template is a program of somebody else's: it raises what it likes
            raise InvalidRequestError(f"the chat template cannot render these messages: {error}") from error
        return rendered if isinstance(rendered, Mapping) else {"input_ids": rendered}

    @property
    def source(self) -> str:
        """The template's text, or nothing if the tokenizer does not show it."""
        chosen = (self.options or {}).get("chat_template")
        try:
            chosen = self.tokenizer.get_chat_template(chosen, self.tools)
        except (AttributeError, NotImplementedError, ValueError):  # a processor, or a template that is no text
            chosen = chosen or getattr(self.tokenizer, "chat_template", None)
        if isinstance(chosen, Mapping):
            chosen = chosen.get("default")
        return chosen if isinstance(chosen, str) else ""


def read_prompt(
    prompt: Any,
    tokenizer: Any,
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> Prompt:
    """Turn whatever the caller calls a prompt into its one sequence of ids.

    Args:
        prompt: text; chat messages (a list of mappings with ``"role"``); ids as a 1-D or one-row 2-D tensor, array,
            list or tuple; or the mapping that a tokenizer or processor returned. A list of one such prompt is that
            prompt.
        tokenizer: a tokenizer or processor; may be ``None`` where ids are given.
        tools: as ``apply_chat_template`` takes them; for messages only, like the three below.
        documents: likewise.
        chat_template_kwargs: further template variables, such as ``enable_thinking``.
        add_generation_prompt: end with the header of the assistant's answer.

    Raises:
        InvalidPromptError: no ids, several rows, numbers that are not ids, or a mask with a hole.
        InvalidRequestError: a tokenizer is missing, or the chat template refused.
    """
    if isinstance(prompt, str):
        return _read_text(prompt, tokenizer)
    if is_messages(prompt):
        messages = read_messages(prompt)
        template = ChatTemplate(tokenizer=tokenizer, tools=tools, documents=documents, options=chat_template_kwargs)
        return _read_mapping(template.render(messages, add_generation_prompt=add_generation_prompt), "messages")
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, "mapping")
    if isinstance(prompt, (list, tuple)) and len(prompt) == 1 and _is_prompt(prompt[0]):
        return read_prompt(
            prompt[0],
            tokenizer,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )
    return Prompt(read_ids(prompt), {}, "ids")


def read_encoder_prompt(prompt: Any, tokenizer: Any, name: str) -> dict[str, Any]:
    """The model inputs of a prompt for a model with an encoder: text and ids are what the encoder reads.

    Args:
        prompt: text, ids, features, or the mapping that a tokenizer or processor returned, which may hold
            ``decoder_input_ids``, too.
        tokenizer: a tokenizer or processor; may be ``None`` where no text is given.
        name: the name of the encoder's main input.

    Raises:
        InvalidPromptError: for chat messages, or no prompt at all.
        InvalidRequestError: a tokenizer is missing.
    """
    if isinstance(prompt, Mapping):
        return {one: _rows_of(one, value) for one, value in prompt.items() if value is not None}
    if is_messages(prompt) or prompt is None:
        raise InvalidPromptError(
            f"a prompt of an encoder-decoder model is text, ids, or a mapping of {name} and decoder_input_ids, not "
            + ("chat messages" if prompt is not None else "nothing")
        )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError("a text prompt needs a tokenizer: bind(model, tokenizer)")
        return dict(tokenizer(text=prompt, return_tensors="pt"))
    if isinstance(prompt, (torch.Tensor, np.ndarray)):
        value = torch.as_tensor(prompt)
        return {name: value if value.ndim > 1 else value[None]}
    return {name: torch.tensor([read_ids(prompt).tolist()])}


def _rows_of(name: str, value: Any) -> Any:
    """A model input as a tensor, where it is one; ids and masks in rows."""
    tensor = _as_tensor(value) if isinstance(value, (list, tuple, np.ndarray)) else value
    flat = isinstance(tensor, torch.Tensor) and tensor.ndim == 1 and name.endswith(("_ids", "_mask"))
    return tensor[None] if flat else tensor


def read_ids(ids: Any) -> TokenIds:
    """Take the ids of a tensor, array, list or tuple of one sequence.

    Args:
        ids: shape [tokens] or [1, tokens], of any integer type, on any device.

    Raises:
        InvalidPromptError: it is empty, has several rows, or holds something that is no token id.
    """
    if isinstance(ids, (list, tuple)) and len(ids) == 1 and _is_prompt(ids[0]):
        return read_ids(ids[0])
    if is_batch(ids):
        raise InvalidPromptError(
            "the prompt has several rows; one row is needed here: call once for each row, "
            "or give attention_mask= where a whole batch is saved or loaded"
        )
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        read = _read_array(ids)
    elif isinstance(ids, (list, tuple)):
        read = TokenIds.of(ids)
    else:
        raise InvalidPromptError(
            f"a prompt is text, chat messages, token ids or a tokenizer's output, not {type(ids).__name__}"
        )
    if not read:
        raise InvalidPromptError("the prompt is empty: at least one token is needed")
    return read


def is_batch(prompt: Any) -> bool:
    """Whether this is several prompts: rows of ids, texts, conversations, or a mapping of several rows."""
    if isinstance(prompt, (torch.Tensor, np.ndarray)):
        return prompt.ndim == 2 and prompt.shape[0] > 1
    if isinstance(prompt, Mapping):
        return is_batch(prompt.get("input_ids"))
    if not isinstance(prompt, (list, tuple)) or len(prompt) == 0 or is_messages(prompt):
        return False
    return _is_prompt(prompt[0]) and (len(prompt) > 1 or is_batch(prompt[0]))


def is_padded(prompt: Any) -> bool:
    """Whether this is a mapping of tensors, as ``model.generate`` takes it, with padding."""
    if not isinstance(prompt, Mapping):
        return False
    ids, mask = prompt.get("input_ids"), prompt.get("attention_mask")
    if not (isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor)) or ids.dim() != 2:
        return False
    return bool((mask != 1).any())


def is_messages(prompt: Any) -> bool:
    """Whether this is meant as one conversation: a list or tuple that begins with a mapping with a ``"role"``."""
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and _is_message(prompt[0])


def read_messages(messages: Any) -> list[Message]:
    """Take a conversation, checked as far as every template needs it.

    Raises:
        InvalidPromptError: it is empty, or something in it is no mapping with a role.
    """
    if not is_messages(messages) or not all(map(_is_message, messages)):
        raise InvalidPromptError("chat messages are a list of mappings, each with a role")
    return list(messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _is_prompt(value: Any) -> bool:
    """Whether an item of a list is itself a prompt, and not the id of a token."""
    return isinstance(value, (str, list, tuple, Mapping)) or getattr(value, "ndim", 0) > 0


def _read_array(ids: torch.Tensor | np.ndarray[Any, Any]) -> TokenIds:
    if isinstance(ids, torch.Tensor):
        if ids.is_meta or ids.layout != torch.strided:
            raise InvalidPromptError("a prompt's token ids must be a dense tensor with values")
        if ids.is_floating_point() or ids.is_complex():  # asked here: numpy has no bfloat16
            raise InvalidPromptError(f"a prompt's token ids must be integers, not {ids.dtype}")
        ids = ids.detach().cpu().numpy()
    if ids.dtype.kind not in "iu":
        raise InvalidPromptError(f"a prompt's token ids must be integers, not {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise InvalidPromptError(f"a prompt's token ids have one or two dimensions, not {ids.ndim}")
    return TokenIds(ids.astype("<i8", copy=False).tobytes())


def _read_text(text: str, tokenizer: Any) -> Prompt:
    if tokenizer is None:
        raise InvalidRequestError("a text prompt needs a tokenizer: bind(model, tokenizer)")
    prompt = _read_mapping(tokenizer(text=text), "text")
    keep = len(prompt.ids) - _appended_eos(text, prompt.ids, getattr(tokenizer, "tokenizer", tokenizer))
    return _cut(prompt, 0, keep)


def _appended_eos(text: str, ids: TokenIds, tokenizer: Any) -> int:
    """How many EOS tokens stand at the end that the text itself does not end in."""
    eos = tokenizer.eos_token_id
    if eos is None or ids[len(ids) - 1 :].tolist() != [eos]:
        return 0
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    return _run_at_end(ids.tolist(), eos) - _run_at_end(plain, eos)


def _run_at_end(ids: Sequence[int], token: int) -> int:
    run = 0
    while run < len(ids) and ids[-1 - run] == token:
        run += 1
    return run


def _read_mapping(inputs: Mapping[str, Any], kind: Literal["text", "messages", "mapping"]) -> Prompt:
    if inputs.get("input_ids") is None:
        hint = "; put a single chat message in a list" if "role" in inputs else ""
        raise InvalidPromptError(f"the prompt is a mapping without input_ids{hint}")
    extras = {
        name: value
        for name, value in inputs.items()
        if name not in ("input_ids", "attention_mask") and (kind == "mapping" or not _says_nothing(name, value))
    }
    if kind != "mapping":  # rendered here, where nobody could ask for tensors
        extras = {name: _as_tensor(value) for name, value in extras.items()}
    prompt = Prompt(read_ids(inputs["input_ids"]), extras, kind)
    mask = inputs.get("attention_mask")
    return prompt if mask is None else _cut(prompt, left_padding(mask, len(prompt.ids)), len(prompt.ids))


def _as_tensor(value: Any) -> Any:
    """A value as a tensor, or as it is where it is none."""
    try:
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        return value


def _says_nothing(name: str, value: Any) -> bool:
    """Whether these are the token types of plain text: some tokenizers add them for models that refuse them."""
    return name == "token_type_ids" and not np.any(np.asarray(value))


def left_padding(mask: Any, tokens: int) -> int:
    """How many tokens an attention mask of one row hides at the left edge.

    Raises:
        InvalidPromptError: if it has another length, or hides others.
    """
    values = mask.detach().cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask)
    if values.shape not in ((tokens,), (1, tokens)):
        raise InvalidPromptError(f"the attention mask has shape {list(values.shape)}, the prompt has {tokens} tokens")
    hidden = values.reshape(-1) == 0
    if not (hidden | (values.reshape(-1) == 1)).all():
        raise InvalidPromptError("the attention mask has values besides 0 and 1")
    padding = int(np.count_nonzero(hidden))
    if not hidden[:padding].all():
        raise InvalidPromptError("the attention mask hides tokens that are not padding at the left edge: remove them")
    return padding


def _cut(prompt: Prompt, start: int, stop: int) -> Prompt:
    """The prompt's tokens [start, stop), with those of its extras that count tokens."""
    if start == 0 and stop == len(prompt.ids):
        return prompt
    if start >= stop:
        raise InvalidPromptError("the prompt is empty: at least one token is needed")
    extras = {
        name: _cut_value(value, start, stop) if name in PER_TOKEN else value for name, value in prompt.extras.items()
    }
    return Prompt(prompt.ids[start:stop], extras, prompt.kind)


def _cut_value(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[..., start:stop]
    if value and isinstance(value[0], (list, tuple)):
        return [row[start:stop] for row in value]
    return value[start:stop]
