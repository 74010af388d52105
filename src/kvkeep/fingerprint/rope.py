"""Rotary frequencies as a model really uses them.

Versions of transformers disagree about the settings (one reads ``rope_theta``, another ``rope_parameters``, each
shows the other's field without obeying it), so settings are not trusted where the live frequencies say the same. The
frequencies of the dynamic kinds are rewritten by the forward pass; for those, what the model starts from is taken,
together with the settings that decide how they are rewritten.
"""

from __future__ import annotations

from typing import Any

from torch import nn

FREQUENCIES = "inv_freq"
_ORIGINAL = "original_inv_freq"

SETTINGS = frozenset(
    {
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


def depends_on_length(model: nn.Module) -> bool:
    """Whether rows of this model depend on how long the prompt is, or was at an earlier call."""
    kinds = (getattr(module, "rope_type", None) for module in model.modules())
    return any(_is_dynamic(one) for kind in kinds for one in (kind.values() if isinstance(kind, dict) else [kind]))


def obeyed_settings(config: Any) -> dict[str, Any]:
    """The rope settings that this version of the configuration class acts on."""
    if hasattr(config, "standardize_rope_params"):
        return {"rope_parameters": getattr(config, "rope_parameters", None)}
    scaling = dict(getattr(config, "rope_scaling", None) or {})
    if "type" in scaling:  # the old name of the same field
        scaling.setdefault("rope_type", scaling.pop("type"))
    beside = {name: getattr(config, name, None) for name in ("rope_theta", "partial_rotary_factor")}
    return {"rope_parameters": scaling | {name: value for name, value in beside.items() if value is not None}}


def _is_dynamic(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
