"""The fingerprint of a live model, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import config, constants, rope
from kvkeep.fingerprint.adapters import adapters_digest
from kvkeep.fingerprint.encoding import canonical_json, dtype_name
from kvkeep.fingerprint.holdings import Anatomy, Holding, anatomy, holdings, state, unwrap
from kvkeep.fingerprint.saved import saved_digests
from kvkeep.fingerprint.tensors import tensor_digests
from kvkeep.keys import digest_fields
from kvkeep.placement import device_of, gathers_weights, shard_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What decides a model's KV, in parts that are compared one by one (32 hex digits each).

    Attributes:
        weights: every parameter and persistent buffer of the bare model, by dtype, content, and the name and shape
            that it has in a file.
        config: every configuration field and derived constant that can change KV, in one form for all versions.
        adapters: the adapters that act, by content and place, or ``None`` for the bare model.
        dtypes: the number formats it computes in: the model's own, and autocast.
        fields: what ``config`` is made of, as this version has it, 8 hex digits each: to name what differs, not to
            tell that nothing does.
    """

    weights: str
    config: str
    adapters: str | None
    dtypes: str
    fields: Mapping[str, str] = field(compare=False, repr=False)


def fingerprint_model(
    model: nn.Module,
    *,
    model_id: str | None = None,
    salted: bool = False,
    weights: str | None = None,
    threads: int | None = None,
) -> ModelParts:
    """Hash the live model: equal parts mean the same model, whatever it is called and wherever it was loaded from.

    The weights are read once, by all cores; a model on an accelerator is copied to the host in pieces of 16 MiB.
    Device, memory layout, file split, path, hub name and wrappers (``torch.compile``, data parallel, PEFT) do not
    matter, and neither does it whether equal tensors are tied. Adapters that do not act, and names of adapters, do not
    matter either.

    Args:
        model: a transformers model.
        model_id: the caller's own word for the weights; they are then not read, and may lie anywhere. Adapters are.
        salted: the caller's own word stands for what cannot be seen of adapters of unknown kinds.
        weights: the weights' digest, where it is known from an earlier call and :meth:`ModelWatch.weights_changed`
            says that they are the same.
        threads: how many threads hash; all cores by default.

    Raises:
        UnsupportedRequestError: for parts that have no content to hash: parameters on the meta device, tensors that
            a module hides from ``state_dict()``, settings without a canonical text, unknown kinds of adapters. The
            message names the part.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**size))
    >>> fingerprint_model(model) == fingerprint_model(model)
    True
    """
    if model_id is None and gathers_weights(model):
        raise UnsupportedRequestError(
            "the weights of this model are whole within a forward pass alone (FSDP, ZeRO-3), so they cannot be hashed: "
            "give bind(model_id=...) your own name for them"
        )
    model = unwrap(model)
    parts = anatomy(model, salted=salted)
    held = holdings(model, parts, weights=model_id is None)
    if model_id is not None:
        weights = _id_digest(model_id)
    told = [one for one in held if one.part == "constant" and not constants.says_nothing(one)]
    digests = tensor_digests({one.name: one.tensor for one in told}, threads=threads)
    fields = _config_parts(model, parts, digests)
    return ModelParts(
        weights=weights or _weights_digest(model, parts, held, threads),
        config=digest_fields("kvkeep/config/1", *_listed(_in_one_form(model, parts, told, digests, fields))).hex(),
        adapters=adapters_digest(parts.layers, threads=threads),
        dtypes=_dtypes_digest(model),
        fields={name: digest.hex()[:8] for name, digest in fields.items()},
    )


def _weights_digest(model: nn.Module, parts: Anatomy, held: list[Holding], threads: int | None) -> str:
    tensors, passing, extras = state(model, parts, held)
    digests = saved_digests(model, parts, tensors, passing, threads=threads)
    settings = canonical_json(extras, where="state_dict()") if extras else None
    shard = shard_of(model)
    mine = [] if shard is None else [canonical_json(shard, where="shard")]
    return digest_fields("kvkeep/weights/1", settings, *_listed(digests), *mine).hex()


def _id_digest(model_id: str) -> str:
    return digest_fields("kvkeep/model-id/1", model_id.encode()).hex()


def _config_parts(model: nn.Module, parts: Anatomy, digests: Mapping[str, bytes]) -> dict[str, bytes]:
    """A digest for every configuration field, for every constant derived from them, and for the rest of rope."""
    fields = config.config_fields(model, keep_rope=not any(name.endswith(rope.FREQUENCIES) for name in digests))
    rotary = {path: module for path, module in parts.modules if hasattr(module, "rope_type")}
    for path, module in rotary.items():
        scalings = {name: factor for name, factor in rope.scalings(module).items() if factor != 1.0}
        if scalings:  # by 1 is what a module without a factor scales
            fields[f"{path}.scaling"] = scalings
    if any(rope.is_dynamic(module) for module in rotary.values()):  # what the forward pass rewrites them by, and where
        rule = rope.length_rule(model)
        settings = rope.obeyed_settings(config.text_config(model))
        if rule is not None:  # which knows where; some versions do not say it here
            settings["rope_parameters"].pop("original_max_position_embeddings", None)
        fields["rope settings"] = [settings, rule and [rule.switch, rule.beyond]]
    undeclared = config.undeclared(config.text_config(model))
    named = {name: _field_digest(name, value, declared=name not in undeclared) for name, value in fields.items()}
    return {**named, **digests}


def _field_digest(name: str, value: Any, *, declared: bool = True) -> bytes:
    kind = "kvkeep/config-field/1" if declared else "kvkeep/config-field-of-no-class/1"
    return digest_fields(kind, canonical_json(value, where=f"config.{name}"))


def _in_one_form(
    model: nn.Module,
    parts: Anatomy,
    told: list[Holding],
    digests: Mapping[str, bytes],
    fields: Mapping[str, bytes],
) -> dict[str, bytes]:
    """The same fields where every version has them: rotary frequencies by role, and how embeddings are scaled."""
    roles, replaced = constants.rotary_by_role(told, digests, [path for path, _ in parts.modules])
    found = {name: digest for name, digest in fields.items() if name not in replaced}
    factors: dict[str, dict[str, float]] = {}
    for name, (digest, factor) in roles.items():
        place, _, role = name.rpartition(".")
        start = f"{role}_" if role else ""
        found[f"{place}.{start}{rope.FREQUENCIES}"] = digest
        factors.setdefault(f"{place}.scaling", {})[f"{start}attention_scaling"] = factor
    scales = constants.embedding_scales(parts.modules, config.text_config(model))
    return found | {name: _field_digest(name, value) for name, value in (factors | scales).items()}


def _listed(digests: Mapping[str, bytes]) -> list[bytes]:
    return [field for name in sorted(digests) for field in (name.encode(), digests[name])]


def _dtypes_digest(model: nn.Module) -> str:
    formats = compute_dtypes(model, device_types(model))
    return digest_fields("kvkeep/dtypes/1", canonical_json(formats, where="the dtypes")).hex()


def device_types(model: nn.Module) -> list[str]:
    """The kinds of device that the model's parameters are on, of those that know autocast."""
    kinds = {tensor.device.type for tensor in model.parameters()}
    if "meta" in kinds:  # offloaded
        kinds |= {device.type for device in [device_of(model)] if device is not None}
    return sorted(filter(torch.amp.is_autocast_available, kinds))


def compute_dtypes(model: nn.Module, devices: list[str]) -> dict[str, Any]:
    """The number formats that a forward pass would use now: the model's, and autocast's where it is on."""
    autocast = {dtype_name(torch.get_autocast_dtype(kind)) for kind in devices if torch.is_autocast_enabled(kind)}
    return {"model": getattr(model, "dtype", None), "autocast": sorted(autocast)}
