"""Which transformers this is, and what it calls a cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

import transformers
from transformers import GenerationMixin

TRANSFORMERS: str = transformers.__version__
# 5.24 renamed `past_key_values` to `cache`: the argument of generate and forward, and the field of outputs.
_GENERATE_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
GENERATE_CACHE_ARGUMENT = "cache" if "cache" in _GENERATE_PARAMETERS else "past_key_values"


def parameters_of(method: Any) -> Collection[str]:
    """The names of a method's parameters. Asked for at every layer and token, so those of classes are remembered."""
    function = getattr(method, "__func__", None)
    return _parameters(function) if function is not None else inspect.signature(method).parameters


@functools.lru_cache(maxsize=512)
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


GENERATE_ARGUMENTS = frozenset({"input_ids", *inspect.signature(GenerationMixin.generate).parameters})
"""Arguments of ``generate`` that are no inputs of the model."""
