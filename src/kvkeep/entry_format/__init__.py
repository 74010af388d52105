"""Format version 1 of an entry: what the header of its safetensors file says, and the checks it must pass.

This package turns records into header bytes and header bytes into records. It touches no disk and no tensor. The prose
of the format is ``FORMAT.md`` in every store; the two are changed together.

A header that passes :func:`decode_header` is internally consistent: every tensor that the layout names is there with a
shape that fits it, nothing else is, and the seal covers every byte of it.
"""

from kvkeep.entry_format.decode import decode_header, decode_listing, header_length, signed_part
from kvkeep.entry_format.encode import encode_header, lay_out
from kvkeep.entry_format.records import (
    ALIGNMENT,
    CHAIN,
    DIGESTS,
    FORMAT_VERSION,
    IDS,
    ITEM_SIZES,
    MAX_HEADER,
    MAX_TENSORS,
    MAX_TOKENS,
    MAX_UNITS,
    STRONG,
    Auth,
    EntryKey,
    EntryMeta,
    Header,
    LayerRecord,
    Media,
    TensorSpec,
    canonical_json,
    tensor_name,
)
from kvkeep.entry_format.units import blocks, chain_length, first_units, table_digest

__all__ = [
    "ALIGNMENT",
    "CHAIN",
    "DIGESTS",
    "FORMAT_VERSION",
    "IDS",
    "ITEM_SIZES",
    "MAX_HEADER",
    "MAX_TENSORS",
    "MAX_TOKENS",
    "MAX_UNITS",
    "STRONG",
    "Auth",
    "EntryKey",
    "EntryMeta",
    "Header",
    "LayerRecord",
    "Media",
    "TensorSpec",
    "blocks",
    "canonical_json",
    "chain_length",
    "decode_header",
    "decode_listing",
    "encode_header",
    "first_units",
    "header_length",
    "lay_out",
    "signed_part",
    "table_digest",
    "tensor_name",
]
