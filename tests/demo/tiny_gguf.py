"""Writes small GGUF files with vocabularies of the two kinds that the demo's converter reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 32, 2, 1, 2, 48
HEAD = HIDDEN // HEADS
ROPE_BASE = 5000.0
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4

CHAT = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
SMOLLM_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<sep>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
SMOLLM_TOKENS += ["hi", "Ġhi", "ĊĠ"]
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "\n\n", "  ", *(f"<0x{byte:02X}>" for byte in range(256))]
GEMMA_TOKENS += ["ab", "abc", "▁ab", "▁", "a", "b", "c", "\n"]


def llama_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a two-layer Llama, under GGUF's names."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(SMOLLM_TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_llama(path: Path, *, pre: str = "smollm") -> Path:
    """A Llama with a vocabulary of SmolLM2's kind."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(SMOLLM_TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(SMOLLM_TOKENS)
    writer.add_token_types([CONTROL] * 4 + [NORMAL] * (len(SMOLLM_TOKENS) - 4))
    writer.add_token_merges(["h i", "Ġ hi", "Ċ Ġ"])
    _special(writer, bos=1, eos=2, unknown=0, padding=2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)
    for name, tensor in llama_tensors().items():
        writer.add_tensor(f"{name}.weight", tensor)
    return _close(writer, path)


def write_gemma_vocabulary(path: Path, tokens: Sequence[str] = GEMMA_TOKENS) -> Path:
    """A file with a vocabulary of Gemma 3's kind, and no tensors."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(512)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(tokens))
    kinds = [CONTROL] * 5 + [USER_DEFINED] * 2 + [NORMAL] * (len(tokens) - 7)
    writer.add_token_types(kinds)
    writer.add_token_scores([0.0] * len(tokens))
    _special(writer, bos=2, eos=1, unknown=3, padding=0)
    writer.add_add_bos_token(True)
    return _close(writer, path)


def _special(writer: gguf.GGUFWriter, *, bos: int, eos: int, unknown: int, padding: int) -> None:
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(unknown)
    writer.add_pad_token_id(padding)


def _close(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
