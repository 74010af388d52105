"""What the generic shrinking of ``tiny_zoo`` does not get right, type by type.

Most of it says which layers to build: where the default is one kind throughout, or the kinds follow from periods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FULL, _SLIDING, _LINEAR, _INDEXED = "full_attention", "sliding_attention", "linear_attention", "indexed_attention"
_ALTERNATING = {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
_QWEN_SLIDING = {**_SWITCHED_ON, "layer_types": [_FULL, _SLIDING, _SLIDING]}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
    "head_dim": 16,
    "per_layer_config": {number: {"head_dim": 32} for number in ("01", "03", "05")},
}
_GEMMA4_SHARING = {**_GEMMA4, "num_kv_shared_layers": 2}
_DOTS3 = {
    "num_hidden_layers": 4,
    "layer_types": [_INDEXED, _SLIDING, _INDEXED, _SLIDING],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "head_dim": 32,
    "per_layer_config": {
        number: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 24}
        for number in ("01", "03")
    },
}
_QWEN4 = {
    "num_hidden_layers": 4,
    "layer_types": [_LINEAR, _LINEAR, _INDEXED, _LINEAR],
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_layer_ids": [],
    "ngram_vocab_size_base": 200,
}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # states of more than one kind
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": [_LINEAR, _FULL, _LINEAR]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", _FULL, "conv"], "full_attn_idxs": None},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", _FULL, "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax": {"num_hidden_layers": 4, "layer_types": [_FULL, _LINEAR] * 2},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"]},
    "nemotron_h": {"layers_block_type": [_LINEAR, "moe", _FULL, "mlp", _LINEAR]},
    "zaya": {
        "num_experts_per_tok": 1,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 8,
    },
    # compressed and sparse attention
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.25,
        "num_hidden_layers": 4,
        "layer_types": [
            "heavily_compressed_attention", "compressed_sparse_attention", _SLIDING, "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    },
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": [_FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "rotary_dim": 8,
    },
    "dots3_note_text": _DOTS3,
    "dots3_note": {
        "text_config": _DOTS3,
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    },
    # windows that the default leaves out
    "gemma2": _ALTERNATING,
    "laguna": {
        **_ALTERNATING,
        "num_attention_heads_per_layer": [4] * 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "mellum": {**_ALTERNATING, "mlp_layer_types": ["sparse"] * 4},
    "cohere_compass_text": {
        **_ALTERNATING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in (_FULL, _SLIDING)},
    },
    "ministral": {**_ALTERNATING, "head_dim": 16},
    "ministral3": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "phimoe": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "dots1": {
        **_ALTERNATING, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "max_window_layers": 1,
    },
    "qwen2": _QWEN_SLIDING,
    "qwen3": _QWEN_SLIDING,
    "qwen2_moe": _QWEN_SLIDING,
    "qwen3_moe": {**_SWITCHED_ON},
    "smollm3": _QWEN_SLIDING,
    "dory": {
        "num_hidden_layers": 8,
        "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2,
        "layer_types": [_SLIDING, "mlp", _SLIDING, "mlp", _FULL, "mlp", _FULL, "mlp"],
    },
    # layers that share another one's rows
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": [_SLIDING, _FULL] * 3,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": _GEMMA4_SHARING,
    "gemma4_unified_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4_SHARING},
    "gemma4_unified": {"text_config": _GEMMA4},
    # so deep that the smallest difference grows beyond all limits
    "hrm_text": {"H_cycles": 1, "L_cycles": 1, "num_hidden_layers": 2, "embedding_scale": 1.0},
    # sizes that must fit one another
    "vibevoice_asr": {
        side: {"num_filters": 2, "depths": [1] * 7, "hidden_size": 16}
        for side in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    },
    "blt": {
        "encoder_hash_byte_group_vocab": 512,
        "vocab_size": 320,
        **{f"{part}_config": {"vocab_size": 320} for part in ("patcher", "encoder", "decoder")},
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ["global", "local"] * 2,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 4},
    "nemotron": {"num_key_value_heads": 2},
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 64]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "gemma4_assistant": {"text_config": {**_GEMMA4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "transfo-xl": {"cutoffs": [100, 200, 300], "d_embed": 64, "div_val": 1},
    "nemo_speechlm": {"audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}}},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "crop_size": 28, "image_size": 28, "patch_size": 14, "image_token_id": 300,
        },
        "audio_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_blocks": 2, "num_attention_heads": 4,
            "audio_token_id": 301,
        },
    },
    "xlstm": {"chunk_size": 8, "num_heads": 4, "qk_dim_factor": 1.0, "num_blocks": 3, "num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""Fields of the configuration, by model type; a mapping for a nested configuration."""

OLD_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "mega": {"bidirectional": False},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "mllama": {"text_config": {"rope_scaling": {"rope_type": "default"}}},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}
"""What differs where configurations are not dataclasses yet (4.57): merged over ``OVERRIDES``."""

PARTS: Mapping[str, Mapping[str, str]] = {
    "encoder-decoder": {"encoder": "BertConfig", "decoder": "BertConfig"},
    "musicgen": {"text_encoder": "T5Config", "audio_encoder": "EncodecConfig", "decoder": "MusicgenDecoderConfig"},
    "musicgen_melody": {
        "text_encoder": "T5Config",
        "audio_encoder": "EncodecConfig",
        "decoder": "MusicgenMelodyDecoderConfig",
    },
}
"""Nested configurations without a default: the class of each."""

CLASSES: Mapping[tuple[str, str], str] = {}
"""Model classes other than the one that the mapping names."""
