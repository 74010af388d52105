"""What a model is fed for one prompt: its ids, the media among them, and any stretch of both.

Media are pictures, films and sounds. An item of media has its place among the ids, which its placeholders hold, and
its content: the digest of everything that the processor made of it. Where the inputs of several items cannot be told
apart with certainty, all of one kind are one item.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvkeep import compat
from kvkeep.encoded import EncoderInput, read_encoder
from kvkeep.entry_format import Media
from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import check_hashable, tensor_digests
from kvkeep.keys import TokenIds, digest_fields
from kvkeep.placement import device_of
from kvkeep.prefixes import Prefix, media_before

_Runs = list[tuple[int, int]]
_Rows = dict[str, tuple[int, int]]
_USUAL_TYPES = {"image": 1, "video": 2, "audio": 3}


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One prompt, as its model takes it.

    Attributes:
        ids: its token ids.
        media: the items among them, in their order.
        values: the media inputs by name.
        rows: for each item, which rows of which inputs are its.
        types: the inputs that say of each token what kind it is, each [1, tokens].
        encoder: what the encoder is fed, where the ids are a decoder's.
    """

    ids: TokenIds
    media: tuple[Media, ...] = ()
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: tuple[_Rows, ...] = ()
    types: Mapping[str, torch.Tensor] = field(default_factory=dict)
    encoder: EncoderInput | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prefix(self) -> Prefix:
        """What decides the KV of the prompt."""
        return Prefix(self.ids, self.media if self.encoder is None else (self.encoder.item, *self.media))

    def between(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """The media inputs of the items that begin at tokens [begin, end)."""
        wanted = [rows for one, rows in zip(self.media, self.rows, strict=True) if begin <= one.start < end]
        found: dict[str, torch.Tensor] = {}
        for name, value in self.values.items():
            spans = [rows[name] for rows in wanted if name in rows]
            if spans:
                found[name] = value[spans[0][0] : spans[-1][1]]
        return found

    def types_before(self, end: int) -> dict[str, torch.Tensor]:
        """The token types of the first ``end`` tokens."""
        return {name: values[:, :end] for name, values in self.types.items()}

    def whole(self, end: int) -> int:
        """The end of a pass that is meant to end at token ``end``: none ends within an item."""
        ends = [one.end for one in self.media if one.start < end < one.end]
        return self.whole(max(ends)) if ends else end

    def first(self, tokens: int) -> Inputs:
        """The first so many tokens."""
        media = media_before(self.media, tokens)
        kept = self.between(0, tokens)
        types = self.types_before(tokens)
        return Inputs(self.ids[:tokens], media, kept, self.rows[: len(media)], types, self.encoder)

    def tensor(self, device: torch.device, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The ids [begin, end), int64 of shape [1, tokens]."""
        data = bytearray(memoryview(self.ids.int64)[8 * begin : None if end is None else 8 * end])
        return torch.frombuffer(data, dtype=torch.int64)[None].to(device)

    def on(self, device: torch.device) -> Inputs:
        """The same inputs on a device."""
        values = {name: value.to(device) for name, value in self.values.items()}
        types = {name: value.to(device) for name, value in self.types.items()}
        encoder = None if self.encoder is None else self.encoder.on(device)
        return Inputs(self.ids, self.media, values, self.rows, types, encoder)

    def encoded(self, output: Any) -> Inputs:
        """The same inputs with what the encoder makes of its part of them."""
        encoder = None if self.encoder is None else self.encoder.encoded(output)
        return Inputs(self.ids, self.media, self.values, self.rows, self.types, encoder)


def read_inputs(model: Any, ids: TokenIds, extras: Mapping[str, Any]) -> Inputs:
    """Take the ids of a prompt with the other model inputs that came with it.

    Raises:
        UnsupportedRequestError: for inputs whose part in the KV kvkeep does not know, media without a place among the
            ids, or a place without media.
    """
    extras = {name: value for name, value in extras.items() if value is not None}
    tokens = compat.media_tokens(model)
    types = {name: _token_types(name, extras.pop(name), len(ids)) for name in compat.TOKEN_TYPES if name in extras}
    if unknown := unknown_inputs(model, {**extras, **types}):
        raise UnsupportedRequestError(
            f"the prompt comes with {', '.join(unknown)}, which decide KV beside the token ids in a way that is not "
            "known: such prompts cannot be looked up and stored"
        )
    values: dict[str, torch.Tensor] = {}
    found: list[tuple[Media, _Rows]] = []
    places: _Runs = []
    for kind, placeholders in tokens.items():
        inputs = {name: _tensor(name, extras[name]) for name in compat.MEDIA_INPUTS[kind] if name in extras}
        values |= inputs
        runs = list(_runs(ids, placeholders))
        places += runs
        if inputs and not runs:
            raise UnsupportedRequestError(f"{', '.join(sorted(inputs))} came with a prompt that has no place for them")
        if runs and not inputs:
            one = min(placeholders.intersection(ids.tolist()))
            raise UnsupportedRequestError(
                f"the prompt holds the id {one}, which stands for a picture, film or sound that did not come with it: "
                "pass all that the processor returned"
            )
        if inputs and compat.MEDIA_CONTENT.isdisjoint(inputs):
            raise UnsupportedRequestError(f"{', '.join(sorted(inputs))} came without what they are about")
        if runs and not compat.CUTS_INPUTS and all(end - begin == 1 and end < len(ids) for begin, end in runs):
            raise UnsupportedRequestError(
                "a single id stands for all of a picture, film or sound: the old form of prompts"
            )
        found += _items(kind, runs, inputs, types, typed=compat.takes_media_types(model))
    _check_types(types, places)
    found.sort(key=lambda item: (item[0].start, item[0].kind))
    return Inputs(ids, tuple(one for one, _ in found), values, tuple(rows for _, rows in found), types)


def read_paired(model: Any, ids: TokenIds, given: Mapping[str, Any]) -> Inputs:
    """Take the ids of a decoder with what the encoder is fed, which are all of the other inputs.

    Raises:
        InvalidPromptError, UnsupportedRequestError: as :func:`~kvkeep.encoded.read_encoder`, and for a decoder's ids
            with padding among them.
    """
    rest = dict(given)
    mask = rest.pop("decoder_attention_mask", None)
    if mask is not None and not bool((torch.as_tensor(mask) == 1).all()):
        raise UnsupportedRequestError("the decoder_attention_mask hides some of the decoder's ids: leave them out")
    unplaced = (compat.unplaced_ids(model) or frozenset()).intersection(ids.tolist())
    if unplaced:
        raise UnsupportedRequestError(
            f"the decoder's ids hold {min(unplaced)}, which is padding to {type(model).__name__}: it places the tokens "
            "behind it otherwise than a cache counts them"
        )
    return Inputs(ids, encoder=read_encoder(model, rest))


def input_device(model: Any) -> torch.device:
    """The device that token ids are fed on: that of the input embeddings."""
    return device_of(model.get_input_embeddings()) or torch.device("cpu")


def unknown_inputs(model: Any, extras: Mapping[str, Any]) -> list[str]:
    """The names of those model inputs whose part in the KV is not known."""
    kinds = compat.media_tokens(model)
    known = {*(name for kind in kinds for name in compat.MEDIA_INPUTS[kind]), *(compat.TOKEN_TYPES if kinds else ())}
    return sorted(extras.keys() - known)


def _token_types(name: str, value: Any, tokens: int) -> torch.Tensor:
    types = torch.as_tensor(value).reshape(-1)
    if types.shape[0] != tokens or types.is_floating_point():
        raise UnsupportedRequestError(
            f"{name} has {types.shape[0]} values of {types.dtype} for {tokens} tokens of one row"
        )
    return types[None]


def _runs(ids: TokenIds, placeholders: frozenset[int]) -> Iterator[tuple[int, int]]:
    """The stretches of placeholders, [start, end)."""
    inside = np.isin(np.frombuffer(ids.int32, dtype="<i4"), list(placeholders))
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _items(
    kind: str, runs: _Runs, tensors: Mapping[str, torch.Tensor], types: Mapping[str, torch.Tensor], *, typed: bool
) -> list[tuple[Media, _Rows]]:
    """The items of one kind, and their rows.

    Types of media are part of an item where they are other than its placeholders say, or where a model that is
    ``typed`` by them is given none: what is usual in one version is not known in another, which computes the same.
    """
    if not runs:
        return []
    missing = [b"no " + compat.MEDIA_TYPES.encode()] if typed and compat.MEDIA_TYPES not in types else []
    parts = _rows_of_each(runs, tensors)
    if parts is None:
        runs = [(runs[0][0], runs[-1][1])]
        parts = [{name: (0, len(tensor)) for name, tensor in tensors.items()}]
    digests = tensor_digests(
        {
            (number, name): tensor
            for number, ((begin, end), rows) in enumerate(zip(runs, parts, strict=True))
            for name, tensor in [
                *((name, tensors[name][first:last]) for name, (first, last) in rows.items()),
                *((name, values[:, begin:end]) for name, values in types.items()),
            ]
        }
    )
    items = []
    for number, ((begin, end), rows) in enumerate(zip(runs, parts, strict=True)):
        names = sorted({*rows, *(name for name in types if not _is_usual(name, types[name][:, begin:end], kind))})
        named = (part for name in names for part in (name.encode(), digests[number, name]))
        content = digest_fields("kvkeep/media/1", kind.encode(), *named, *missing)
        items.append((Media(kind=kind, content=content.hex(), start=begin, end=end), rows))
    return items


def _is_usual(name: str, types: torch.Tensor, kind: str) -> bool:
    """Whether types of media say what placeholders of this kind are, each of them, as processors do."""
    return name == compat.MEDIA_TYPES and bool((types == _USUAL_TYPES[kind]).all())


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        tensor = None
    if tensor is not None:
        check_hashable(name, tensor)
    if tensor is None or not tensor.dim():
        raise UnsupportedRequestError(f"{name} is a {type(value).__name__} that is no tensor: pass return_tensors='pt'")
    return tensor


def _rows_of_each(runs: _Runs, tensors: Mapping[str, torch.Tensor]) -> list[_Rows] | None:
    """Which rows of which inputs belong to each run of placeholders, or ``None`` where that is not certain.

    An input has one row an item, or as many as the item has patches, of which each placeholder stands for as many. As
    items are laid one after another into whatever placeholders there are, runs must be as long as their items.
    """
    lengths = [end - begin for begin, end in runs]
    grid = next((tensor for name, tensor in tensors.items() if name.endswith("_grid_thw")), None)
    patches: list[int] = []
    if grid is not None:
        if grid.shape[:1] != (len(runs),):
            return None
        patches = grid.prod(-1).tolist()
        if any(count * lengths[0] != patches[0] * length for count, length in zip(patches, lengths, strict=True)):
            return None
    elif len(set(lengths)) > 1 or any(
        _differ(tensor) for name, tensor in tensors.items() if name not in compat.MEDIA_CONTENT
    ):
        return None
    bounds = [0, *np.cumsum(patches).tolist()]
    parts: list[_Rows] = [{} for _ in runs]
    for name, tensor in tensors.items():
        if len(tensor) == len(runs):
            spans = [(number, number + 1) for number in range(len(runs))]
        elif patches and len(tensor) == bounds[-1]:
            spans = list(pairwise(bounds))
        else:
            return None
        for rows, span in zip(parts, spans, strict=True):
            rows[name] = span
    return parts


def _differ(tensor: torch.Tensor) -> bool:
    """Whether the rows are not all alike: sizes and masks, by which items of equal shape have other lengths."""
    return bool((tensor != tensor[:1]).any())


def _check_types(types: Mapping[str, torch.Tensor], runs: _Runs) -> None:
    """Raise UnsupportedRequestError for token types other than 0 that belong to no media."""
    for name, values in types.items():
        rest = values.clone()
        for begin, end in runs:
            rest[:, begin:end] = 0
        if rest.any():
            raise UnsupportedRequestError(f"{name} sets tokens apart that stand for no picture, film or sound")
