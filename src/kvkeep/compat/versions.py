"""Which transformers this is, and what it calls a cache."""

from __future__ import annotations

import inspect

import transformers
from transformers import GenerationMixin

TRANSFORMERS: str = transformers.__version__
# 5.24 renamed `past_key_values` to `cache`: the argument of generate and forward, and the field of outputs.
_GENERATE_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
GENERATE_CACHE_ARGUMENT = "cache" if "cache" in _GENERATE_PARAMETERS else "past_key_values"
GENERATE_ARGUMENTS = frozenset({"input_ids", *inspect.signature(GenerationMixin.generate).parameters})
"""Arguments of ``generate`` that are no inputs of the model."""
