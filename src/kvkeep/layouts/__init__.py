"""How each kind of cache layer is described, allocated and finished, and the table that says which is which."""

from kvkeep.layouts.attention import sliding_start
from kvkeep.layouts.base import LayerCodec, LayerPlan, LayerState
from kvkeep.layouts.buffers import DTYPE_NAMES, Buffers, LayerReader, head_buffers, whole_buffer
from kvkeep.layouts.cachemap import (
    batch_pairs,
    cached_row,
    describe_cache,
    describe_layers,
    describe_prefilled,
    fill_cache,
    plan_layers,
    plans_of,
    takes_lines,
)
from kvkeep.layouts.deferred import put_quantized, quantize, take_quantized
from kvkeep.layouts.extended import describe_kept, keeping_cache
from kvkeep.layouts.lending import HeldLayers, hold_layers
from kvkeep.layouts.paired import describe_cross, describe_cross_tensors, fill_paired, positions_of
from kvkeep.layouts.registry import codec_for, register_layer_codec
from kvkeep.layouts.states import has_states, lay_states

__all__ = [
    "DTYPE_NAMES",
    "Buffers",
    "HeldLayers",
    "LayerCodec",
    "LayerPlan",
    "LayerReader",
    "LayerState",
    "batch_pairs",
    "cached_row",
    "codec_for",
    "describe_cache",
    "describe_cross",
    "describe_cross_tensors",
    "describe_kept",
    "describe_layers",
    "describe_prefilled",
    "fill_cache",
    "fill_paired",
    "has_states",
    "head_buffers",
    "hold_layers",
    "keeping_cache",
    "lay_states",
    "plan_layers",
    "plans_of",
    "positions_of",
    "put_quantized",
    "quantize",
    "register_layer_codec",
    "sliding_start",
    "take_quantized",
    "takes_lines",
    "whole_buffer",
]
