"""What a model computes with besides weights and settings, by what it does and not by where a version keeps it.

Rotary frequencies are one module for all layers in one version and one a layer in another; a causal mask is a buffer
in one and made anew in another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvkeep.fingerprint import rope
from kvkeep.fingerprint.holdings import Holding

_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+(?=\.|$)")
_ROLES = {
    "global_rotary_emb": "full_attention",
    "local_rotary_emb": "sliding_attention",
    "rotary_emb_local": "sliding_attention",
}
_TABLE = "embed_positions"  # sines and cosines instead of frequencies
_BY_ROLE = "rotary_embs"  # a dictionary of rotary modules
_SCALED_UNSEEN = frozenset({"gemma", "gemma2", "vaultgemma"})
"""Types that some versions scale the embeddings of by a number made in the forward pass, others by a buffer."""
_NEVER = (-1e4, -1e9)
"""What old code adds to a score instead of minus infinity."""


def says_nothing(holding: Holding) -> bool:
    """Whether a constant is what every model of its type has, be it a buffer or not.

    Positions that are counted from 0, the mask that hides what comes later, the score of what is hidden, the root of
    the width of a head.
    """
    name = holding.name.rpartition(".")[2]
    tensor = holding.tensor
    if name == "position_ids":
        counted = torch.arange(tensor.shape[-1], device=tensor.device) if tensor.dim() else tensor
        return tensor.dim() > 0 and bool((tensor == counted).all())
    if name == "scale_attn":
        width = getattr(holding.module, "head_dim", None)
        return tensor.dim() == 0 and width is not None and float(tensor) == float(torch.tensor(float(width)).sqrt())
    if name == "masked_bias":
        return tensor.dim() == 0 and any(bool(tensor == tensor.new_tensor(value)) for value in _NEVER)
    if name != "bias" or tensor.dtype is not torch.bool or tensor.dim() != 4:
        return False
    rows, columns = tensor.shape[-2:]
    return rows == columns and bool((tensor == torch.ones_like(tensor).tril()).all())


def embedding_scales(modules: Iterable[tuple[str, nn.Module]], config: Any) -> dict[str, Any]:
    """The numbers that Gemma's kinds multiply embeddings by, by the buffer's name, in the number format in use."""
    found: dict[str, Any] = {}
    if "gemma" not in str(getattr(config, "model_type", "")):
        return found
    for path, module in modules:
        if path.rpartition(".")[2] != "embed_tokens" or not isinstance(getattr(module, "weight", None), torch.Tensor):
            continue
        dtype: Any = module.weight.dtype
        scale = module._buffers.get("embed_scale")
        if scale is None and getattr(config, "model_type", None) in _SCALED_UNSEEN:
            scale = torch.tensor(config.hidden_size**0.5, dtype=dtype)
        if scale is not None and scale.dim() == 0 and not scale.is_meta and dtype.is_floating_point:
            found[f"{path}.embed_scale"] = float(scale.to(dtype))
    return found


@dataclass(frozen=True, slots=True)
class _Rotary:
    """One set of frequencies, the factor beside it, and the layer that it lies in, if it lies in one."""

    names: tuple[str, str]
    layer: str
    role: str
    value: tuple[bytes, float]


def rotary_by_role(
    holdings: Iterable[Holding], digests: Mapping[str, bytes], paths: Iterable[str]
) -> tuple[dict[str, tuple[bytes, float]], set[str]]:
    """The rotary frequencies and factors of each part of a model, by the layers that they are for.

    Layers that all rotate in the same way are one role, however many modules say so. A part whose modules contradict
    each other, or that lie in some layers only, is left out.

    Args:
        holdings: the constants of a model.
        digests: their digests, by name.
        paths: the paths of all modules.

    Returns:
        Digest and factor by name (of the module and buffer that a version has which keeps them in one place), and the
        live names that these stand for.
    """
    owners: dict[str, list[_Rotary]] = {}
    for holding in holdings:
        if holding.name.endswith((rope.FREQUENCIES, _TABLE)):
            owner, rotary = _placed(holding, digests[holding.name])
            owners.setdefault(owner, []).append(rotary)
    found: dict[str, tuple[bytes, float]] = {}
    replaced: set[str] = set()
    found_layers = [(path, _A_LAYER.search(path)) for path in paths]
    layers = Counter(path[: one.start()] for path, one in found_layers if one is not None and one.end() == len(path))
    for owner, rotaries in owners.items():
        inside = {one.layer for one in rotaries if one.layer}
        roles = _roles(rotaries) if len(inside) in (0, layers[owner]) else None
        if roles is None:
            continue
        place = f"{owner}.rotary_emb" if owner else "rotary_emb"
        found |= {f"{place}.{role}": value for role, value in roles.items()}
        replaced.update(name for one in rotaries for name in one.names)
    return found, replaced


def _placed(holding: Holding, digest: bytes) -> tuple[str, _Rotary]:
    path, _, buffer = holding.name.rpartition(".")
    role = buffer.removesuffix(rope.FREQUENCIES).removesuffix(_TABLE).rstrip("_")
    factor = getattr(holding.module, f"{role}_attention_scaling" if role else "attention_scaling", 1.0)
    layer = _A_LAYER.search(path)
    owner, _, name = path.rpartition(".")
    if layer is not None:
        owner = path[: layer.start()]
    elif owner.rpartition(".")[2] == _BY_ROLE:
        owner, role = owner.rpartition(".")[0], name
    names, role = (holding.name, f"{path}.scaling"), role or _ROLES.get(name, "")
    return owner, _Rotary(names, layer.group() if layer else "", role, (digest, float(factor)))


def _roles(rotaries: Iterable[_Rotary]) -> dict[str, tuple[bytes, float]] | None:
    """The one value of each role; ``None`` if some role has two."""
    roles: dict[str, set[tuple[bytes, float]]] = {}
    for one in rotaries:
        roles.setdefault(one.role, set()).add(one.value)
    if len(roles) > 1 and "" in roles:  # beside one for the sliding layers
        roles.setdefault("full_attention", set()).update(roles.pop(""))
    if any(len(values) > 1 for values in roles.values()):
        return None
    single = {role: next(iter(values)) for role, values in roles.items()}
    return {"": next(iter(single.values()))} if len(set(single.values())) == 1 else single
