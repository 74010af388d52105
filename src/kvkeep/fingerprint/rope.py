"""Rotary frequencies as a model really uses them.

Versions of transformers disagree about the settings (one reads ``rope_theta``, another ``rope_parameters``, each
shows the other's field without obeying it), so settings are not trusted where the live frequencies say the same. The
frequencies of the dynamic kinds are rewritten by the forward pass; for those, what the model starts from is taken,
together with the settings that decide how they are rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

FREQUENCIES = "inv_freq"
_ORIGINAL = "original_inv_freq"

SETTINGS = frozenset(
    {
        "global_rope_theta",
        "local_rope_theta",
        "partial_rotary_factor",
        "rope_local_base_freq",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rotary_emb_base",
        "rotary_pct",
    }
)
"""Configuration fields that the live frequencies stand for."""

RUN_TIME_STATE = ("original_inv_freq", "long_inv_freq", "max_seq_len_cached")
"""Ends of the names of what rotary modules derive from the settings and from the prompts that they have seen."""


def frequency_sources(module: nn.Module) -> dict[str, str] | None:
    """Which attribute holds the content of each frequency buffer of a rotary module; ``None`` for other modules.

    The attribute is the buffer itself, unless the forward pass rewrites it. Buffers that only remember the start of
    a static kind are not obeyed, and left out.
    """
    rope_type = getattr(module, "rope_type", None)
    if not isinstance(rope_type, str | dict):
        return None
    sources = {}
    for name in list(module._buffers):
        if name.endswith(FREQUENCIES) and not name.endswith(RUN_TIME_STATE):
            prefix = name.removesuffix(FREQUENCIES)
            kind = rope_type if isinstance(rope_type, str) else rope_type.get(prefix.rstrip("_"))
            original = prefix + _ORIGINAL
            sources[name] = original if _is_dynamic(kind) and hasattr(module, original) else name
    return sources


def scalings(module: nn.Module) -> dict[str, float]:
    """The factors that a rotary module multiplies its cosines and sines by."""
    return {name: value for name, value in vars(module).items() if name.endswith("attention_scaling")}


def is_dynamic(module: nn.Module) -> bool:
    """Whether the forward pass of this module rewrites its frequencies."""
    return any(source != name for name, source in (frequency_sources(module) or {}).items())


@dataclass(frozen=True, slots=True)
class LengthRule:
    """How a model's rotary frequencies depend on the length of what it reads.

    Attributes:
        switch: up to so many tokens they are one set.
        beyond: whether they are one other set beyond that; otherwise every length has its own.
    """

    switch: int
    beyond: bool

    def refuses(self, length: int) -> str | None:
        """Why KV computed for so many tokens serves no other length, or ``None`` if it does."""
        if length <= self.switch or self.beyond:
            return None
        return f"rope: beyond {self.switch} tokens every length has its own rotary frequencies"

    def obstacle(self, entry: int, tokens: int, prompt: int) -> str | None:
        """Why ``tokens`` tokens of an entry computed for ``entry`` tokens cannot serve a prompt of ``prompt``."""
        refused = self.refuses(entry) or self.refuses(prompt)
        if refused is not None:
            return refused
        far = prompt > self.switch
        # Some models drop a cache that does not reach behind the switch itself.
        if (entry > self.switch) == far and (not far or tokens > self.switch):
            return None
        needs, has = ("beyond", "up to") if far else ("up to", "beyond")
        return f"rope: the prompt needs the frequencies {needs} {self.switch} tokens, the entry has those {has} them"


def length_rule(model: nn.Module) -> LengthRule | None:
    """The rule that the model's frequencies follow, or ``None`` if they do not depend on the length."""
    rules = {rule for module in model.modules() for rule in _rules(module)}
    if not rules:
        return None
    return rules.pop() if len(rules) == 1 else LengthRule(min(rule.switch for rule in rules), beyond=False)


def _rules(module: nn.Module) -> Iterator[LengthRule]:
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    for layer_type, kind in kinds.items():
        if isinstance(kind, str) and "dynamic" in kind:
            # At the original length itself, what an earlier, longer call left behind is not reset.
            yield LengthRule(int(getattr(module, "original_max_seq_len", 1)) - 1, beyond=False)
        elif kind == "longrope":
            yield LengthRule(_original_length(module.config, layer_type), beyond=True)


def _original_length(config: Any, layer_type: str | None) -> int:
    """The length at which LongRoPE switches, from the setting that this version obeys."""
    if hasattr(config, "standardize_rope_params"):
        settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        return int(settings["original_max_position_embeddings"])
    return int(getattr(config, "original_max_position_embeddings", config.max_position_embeddings))


def obeyed_settings(config: Any) -> dict[str, Any]:
    """The rope settings that this version of the configuration class acts on."""
    if hasattr(config, "standardize_rope_params"):
        return {"rope_parameters": _said(getattr(config, "rope_parameters", None) or {})}
    scaling = dict(getattr(config, "rope_scaling", None) or {})
    if "type" in scaling:  # the old name of the same field
        scaling.setdefault("rope_type", scaling.pop("type"))
    beside = {name: getattr(config, name, None) for name in ("rope_theta", "partial_rotary_factor")}
    return {"rope_parameters": _said(scaling | beside)}


def _said(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that one version names and another leaves out: they say what is so anyway."""
    return {
        name: value
        for name, value in settings.items()
        if value is not None
        and not (name == "type" and settings.get("rope_type") == value)  # its old name
        and (name, value) not in (("rope_type", "default"), ("partial_rotary_factor", 1.0))
    }


def _is_dynamic(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
