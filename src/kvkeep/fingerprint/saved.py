"""Weights by the names and shapes in which ``save_pretrained`` writes them.

Versions of transformers arrange the same weights in other modules (one fuses the experts of a layer into two tensors,
another has three a expert), and agree about what they write to files.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvkeep.fingerprint.holdings import Anatomy, Holding
from kvkeep.fingerprint.tensors import tensor_digests

_HAS_CONVERSIONS = importlib.util.find_spec("transformers.core_model_loading") is not None
_PARTS = {"language_model.model.": "language_model.", "vision_tower.vision_model.": "vision_tower."}
"""What some versions call the parts of a model that sees, in files too, and what all are called here."""


def saved_digests(
    model: nn.Module,
    parts: Anatomy,
    tensors: Mapping[str, torch.Tensor],
    passing: Mapping[str, Holding],
    *,
    threads: int | None,
) -> dict[str, bytes]:
    """Hash the content of every weight, by its name in a file.

    What is rearranged for the file is so one group at a time (the fused experts of a layer) and let go again. A group
    whose rearrangement does not keep every byte counts as it is in the model.

    Args:
        model: an unwrapped model.
        parts: its anatomy.
        tensors: its weights, by their names in the bare model.
        passing: those that lie on disk, which are read one group at a time.
        threads: how many threads hash.
    """
    form = _FileForm.of(model, parts)
    groups = form.groups([*tensors, *passing])
    inside = {name for group in groups for name in group.names}
    found: dict[str, bytes] = {}

    def add(content: Mapping[str, torch.Tensor]) -> None:
        for name, digest in tensor_digests(content, threads=threads).items():
            found[name if name not in found else f"{name} (again)"] = digest

    def rest(names: Iterable[str]) -> dict[str, str]:
        return form.unambiguous([name for name in names if name not in inside])

    names = rest([*tensors, *passing])
    add({names[name]: tensor for name, tensor in tensors.items() if name in names})
    for name, holding in passing.items():  # one at a time: together they may not fit into memory
        if name in names:
            add({names[name]: holding.tensor})
    for group in groups:
        add(form.rearranged(group, {n: tensors[n] if n in tensors else passing[n].tensor for n in group.names}))
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that become others together.

    Attributes:
        name: what the first of the others is called in a file.
        names: the tensors' own names.
        patterns: the pattern that each name matched.
        converter: what rearranges them.
    """

    name: str
    names: tuple[str, ...]
    patterns: tuple[str, ...]
    converter: Any


@dataclass(frozen=True, slots=True)
class _FileForm:
    """How one model's weights are written.

    Attributes:
        config: the model's configuration.
        converters: what rearranges tensors.
        renamings: what renames them, in this order.
        patterns: what renames them in versions that do not rearrange: the first that matches counts.
    """

    config: Any
    converters: tuple[Any, ...] = ()
    renamings: tuple[Any, ...] = ()
    patterns: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, parts: Anatomy) -> _FileForm:
        config: Any = getattr(model, "config", None)
        if not _HAS_CONVERSIONS:
            mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
            return cls(config, patterns=tuple((new, _spelled(old)) for old, new in mapping.items()))  # type: ignore[union-attr, unused-ignore]
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mappings: Any = importlib.import_module("transformers.conversion_mapping")
        found = mappings.get_model_conversion_mapping(model, add_legacy=False)
        # What a file had in front of every name is not known of a model that was never loaded from one.
        reversed_ = [one.reverse_transform() for one in found[::-1] if not isinstance(one, loading.PrefixChange)]
        for one in reversed_:
            if one.scope_prefix:
                one.scope_prefix = parts.name(one.scope_prefix)
        converters = tuple(one for one in reversed_ if isinstance(one, loading.WeightConverter))
        renamings = tuple(one for one in reversed_ if isinstance(one, loading.WeightRenaming))
        return cls(config, converters, renamings)

    def renamed(self, name: str) -> str:
        """A tensor's name in a file."""
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        for pattern, replacement in self.patterns:
            name, count = re.subn(pattern, replacement, name)
            if count:
                break
        for long, short in _PARTS.items():
            name = name.replace(long, short)
        return name

    def unambiguous(self, names: Iterable[str]) -> dict[str, str]:
        """The name in a file of each tensor; its own, too, where two would be called the same."""
        new = {name: self.renamed(name) for name in names}
        taken = list(new.values())
        once = set(taken) if len(set(taken)) == len(taken) else {one for one in taken if taken.count(one) == 1}
        return {name: given if given in once else f"{given} ({name})" for name, given in new.items()}

    def groups(self, names: Iterable[str]) -> list[_Group]:
        """The tensors that are rearranged, by what they become."""
        found: dict[str, tuple[Any, list[str], list[str]]] = {}
        for name in sorted(names, key=_by_number) if self.converters else ():
            for converter in self.converters:
                new, pattern = converter.rename_source_key(name)
                if pattern is not None:
                    _, members, patterns = found.setdefault(new, (converter, [], []))
                    members.append(name)
                    patterns.append(pattern)
                    break
        return [_Group(new, tuple(m), tuple(p), converter) for new, (converter, m, p) in found.items()]

    def rearranged(self, group: _Group, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a group as a file has them, or as they are if that would lose anything."""
        converter = copy.deepcopy(group.converter)
        for name, pattern in zip(group.names, group.patterns, strict=True):
            converter.add_tensor(group.name, name, pattern, tensors[name].detach())
        try:
            made = converter.convert(group.name, model=None, config=self.config)
        except Exception:  # noqa: BLE001 - whatever a conversion that does not fit this model says
            return dict(tensors)
        written = {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
        names = self.unambiguous(written)
        whole = sorted(_spread(written.values())) == sorted(_spread(tensors.values()))
        return {names[name]: tensor for name, tensor in written.items()} if whole else dict(tensors)


def _spread(tensors: Iterable[torch.Tensor]) -> list[tuple[str, int]]:
    """How many elements there are of each dtype."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[str(tensor.dtype)] = counts.get(str(tensor.dtype), 0) + tensor.numel()
    return list(counts.items())


def _spelled(pattern: str) -> str:
    """What a pattern of names matches, as ``save_pretrained`` of such a version spells it."""
    return re.sub(r"\(.*\)", "", pattern.lstrip("^"))


def _by_number(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
