"""One version's side of a crossing: run by ``test_crossing`` with the interpreter of either environment.

``one_side.py FOLDER build`` saves the models there; ``write`` stores an entry of each in FOLDER's store of this
version; ``read`` uses those of the other's. What was seen is printed as JSON.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from kvkeep import CacheStore

STORED, PROMPT, VOCABULARY = 40, 44, 320
START = 1
_AROUND_ATTENTION = ["mamba", "attention", "mamba"]
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2

_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 8, "layer_types": SLIDING_AND_FULL, "head_dim": 16}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_HALF = {"layers": 3, "attention_heads": 4, "ffn_dim": 96}
_LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

_MAMBA = {"state_size": 8, "num_hidden_layers": 3}
_HEADS_OF_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 3,
}

_HALVES = {
    "d_model": 64,
    "max_target_positions": 128,
    **{f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in _HALF.items()},
}

# name: (start of the configuration's class, what its configuration has beside the sizes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {}),
    "codegen": ("CodeGen", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}),
    "cohere2": ("Cohere2", {**_WINDOW}),
    "falcon": ("Falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**_WINDOW, "attn_implementation": "eager"}),
    "gemma3_text": ("Gemma3", {**_WINDOW, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gpt_neo": ("GPTNeo", {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25}),
    "gpt_oss": ("GptOss", {**_WINDOW, **_LOCAL_EXPERTS, "swiglu_limit": 7.0}),
    "granite": ("Granite", {"attention_multiplier": 0.25, "embedding_multiplier": 2.0}),
    "granitemoe": ("GraniteMoe", {**_LOCAL_EXPERTS}),
    "llama": ("Llama", {}),
    "llama, dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama, yarn": ("Llama", {"rope_scaling": _YARN, "rope_theta": 5e5}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {**_LOCAL_EXPERTS, "sliding_window": 8}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**_WINDOW, "rope_theta": 5e5, "rope_scaling": _YARN}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "phi3, longrope": ("Phi3", {"original_max_position_embeddings": 64, "rope_scaling": _LONG}),
    "phi3, longrope, long": ("Phi3", {"original_max_position_embeddings": 32, "rope_scaling": _LONG}),
    "qwen2": ("Qwen2", {}),
    "qwen2, sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 1, 0]}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    # the older brings a cache of its own for these
    "bamba": ("Bamba", {**_HEADS_OF_MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**_HEADS_OF_MAMBA, "mamba_d_ssm": 128}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**_HEADS_OF_MAMBA, **_LOCAL_EXPERTS, "shared_intermediate_size": 48, "layer_types": _AROUND_ATTENTION},
    ),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}),
    "mamba": ("Mamba", {**_MAMBA}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_EXPERTS,
            "head_dim": 16,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "zamba": (
        "Zamba",
        {
            "num_hidden_layers": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "mamba_d_state": 8,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "use_mamba_kernels": False,
        },
    ),
    "bart": ("Bart", {**_HALVES, "init_std": 0.3}),
    "t5": ("T5", {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 4, "num_heads": 4}),
    "whisper": ("Whisper", {**_HALVES, "init_std": 0.3, "num_mel_bins": 8, "max_source_positions": 50}),
    # not the same in both
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "first_k_dense_replace": 4,
        },
    ),
    "gemma2, default attention": ("Gemma2", {**_WINDOW}),
    "falcon_mamba": ("FalconMamba", {**_MAMBA}),
    "mamba2": ("Mamba2", {**_MAMBA, "num_heads": 8, "head_dim": 16, "chunk_size": 16}),
    "gpt_oss, another limit": ("GptOss", {**_WINDOW, **_LOCAL_EXPERTS, "swiglu_limit": 1.0}),
}
KEEP_STATE = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "mamba",
        "mamba2",
        "qwen3_next",
        "zamba",
    }
)
"""Models with state that is valid behind one token alone: it is stored before the last one."""
_TEXT_CONFIG = {"Gemma3"}
SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "llava": {},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
}
"""Models that see pictures, and what each is built with."""
PICTURE, OTHER_PICTURE, BEFORE_PICTURE = 1, 2, 10
PAIRED = {"bart": 12, "t5": 12, "whisper": 50}
"""Models with an encoder, and the positions of its output for what it is fed here."""
_OPTIONS = {
    "max_new_tokens": 1,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def configured(name: str, **more: Any) -> Any:
    """The configuration of one of the models, as this version has it."""
    kind, own = MODELS[name]
    settings = {key: value for key, value in own.items() if key != "attn_implementation"}
    config_class = getattr(transformers, f"{kind}{'Text' if kind in _TEXT_CONFIG else ''}Config")
    sizes = {key: value for key, value in _SIZE.items() if name not in PAIRED or key.endswith(("_size", "_id"))}
    return config_class(**{**sizes, **settings, **more})


def build(folder: Path) -> None:
    """Save every model with a configuration that both versions obey: each names the rotary settings otherwise."""
    from tiny_media import build_seeing
    from tiny_models import build_toy_tokenizer

    build_toy_tokenizer().save_pretrained(folder / "tokenizer")
    for number, name in enumerate(MODELS):
        torch.manual_seed(number)
        model = auto(name).from_config(configured(name))
        if name in PAIRED:
            with torch.no_grad():  # what is made small
                for parameter in model.parameters():
                    parameter.normal_(std=0.3) if parameter.dim() > 1 else None
        model.save_pretrained(folder / name)
        path = folder / name / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | _as_the_newer_says(config)))
    for name, options in SEEING.items():
        build_seeing(name, **options).save_pretrained(folder / name)
        path = folder / name / "config.json"
        config = json.loads(path.read_text())
        text = config["text_config"]
        text |= _as_the_newer_says(text)
        if text.get("rope_scaling"):  # which the newer reads, too, and the base in it before the other
            text["rope_scaling"]["rope_theta"] = text["rope_theta"]
        path.write_text(json.dumps(config))


def _as_the_newer_says(config: dict[str, Any]) -> dict[str, Any]:
    theta = config.get("rope_theta")
    if theta is None:
        return {}
    scaling = dict(config.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    settings = scaling | {"rope_theta": theta}
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if name in config and (name == "partial_rotary_factor" or scaling["rope_type"] == "longrope"):
            settings[name] = config[name]
    if config["model_type"] not in ("gemma3_text", "olmo3"):
        return {"rope_parameters": settings}
    local = config.get("rope_local_base_freq", theta)
    sliding = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {"full_attention": settings, "sliding_attention": sliding}}


def load(folder: Path, name: str) -> Any:
    own = SEEING[name] if name in SEEING else MODELS[name][1]
    attention = {key: own[key] for key in ("attn_implementation",) if key in own}
    model = auto(name).from_pretrained(folder / name, dtype=torch.float32, **attention).eval()
    model.generation_config.decoder_start_token_id = START
    return model


def auto(name: str) -> Any:
    """The class that builds one of the models."""
    if name == "whisper":
        return transformers.AutoModelForSpeechSeq2Seq
    if name in SEEING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForSeq2SeqLM if name in PAIRED else transformers.AutoModelForCausalLM


def bound(folder: Path, name: str, model: Any, written_by: str) -> Any:
    """A store of the version that writes, bound to a model of this one."""
    return CacheStore(folder / f"store of {written_by}" / name).bind(model, tokenizer(folder))


@functools.cache
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")


def ids(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(3, VOCABULARY, (1, PROMPT), generator=generator)


def prompt_of(name: str, tokens: int) -> dict[str, torch.Tensor]:
    """The first tokens of a prompt, as the model takes it."""
    prompt = ids(name)[:, :tokens]
    if name not in PAIRED:
        return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    prompt[:, 0] = START
    if name == "whisper":
        sound = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(1))
        return {"input_features": sound, "decoder_input_ids": prompt}
    heard = ids("what is heard")[:, : PAIRED[name]]
    return {"input_ids": heard, "attention_mask": torch.ones_like(heard), "decoder_input_ids": prompt}


def write(folder: Path, name: str, model: Any) -> dict[str, Any]:
    kv = bound(folder, name, model, transformers.__version__)
    entry = kv.warm(prompt_of(name, STORED))
    return {"identity": asdict(kv.identity()), "tokens": entry.end, "parameters": len(list(model.parameters()))}


def read(folder: Path, name: str, model: Any, written_by: str) -> dict[str, Any]:
    kv = bound(folder, name, model, written_by)
    prompt, heard = prompt_of(name, PROMPT), PAIRED.get(name, 0)
    plain = model.generate(**prompt, **_OPTIONS).logits[0]
    match = kv.lookup(prompt)
    ours = kv.generate(prompt, **_OPTIONS).logits[0]
    report = kv.last_report
    root = kv.store.path
    return {
        "identity": asdict(kv.identity()),
        "tokens": match.tokens - heard,
        "reason": match.reason,
        "reused": report.reused_tokens - heard,
        "report": report.reason,
        "off": ((ours - plain).abs().max() / plain.abs().max()).item(),
        "guard": kv.guard,
        "entries": len(kv.store.entries()),
        "set aside": sorted(path.name for path in root.glob("quarantine/*")),
    }


def seen_prompt(name: str, *, picture: int = PICTURE) -> dict[str, torch.Tensor]:
    """Words, a picture, and words again, as this version's processor returns them."""
    from tiny_media import seen

    return seen(name, [picture], lead=BEFORE_PICTURE)


def write_seen(folder: Path, name: str, model: Any) -> dict[str, Any]:
    from tiny_media import cut

    kv = bound(folder, name, model, transformers.__version__)
    prompt = seen_prompt(name)
    entry = kv.warm(cut(prompt, prompt["input_ids"].shape[1] - 4))
    return {"identity": asdict(kv.identity()), "tokens": entry.end}


def read_seen(folder: Path, name: str, model: Any, written_by: str) -> dict[str, Any]:
    kv = bound(folder, name, model, written_by)
    prompt = seen_prompt(name)
    plain = model.generate(**prompt, **_OPTIONS).logits[0]
    match = kv.lookup(prompt)
    other = kv.lookup(seen_prompt(name, picture=OTHER_PICTURE))
    with kv.attached():
        ours = model.generate(**prompt, **_OPTIONS).logits[0]
    report = kv.last_report
    return {
        "identity": asdict(kv.identity()),
        "tokens": match.tokens,
        "reason": match.reason,
        "other picture": [other.tokens, other.reason],
        "reused": report.reused_tokens,
        "report": report.reason,
        "off": ((ours - plain).abs().max() / plain.abs().max()).item(),
        "guard": kv.guard,
        "set aside": sorted(path.name for path in kv.store.path.glob("quarantine/*")),
    }


def main(folder: Path, *steps: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # such small products are slower with more
    if "build" in steps:
        build(folder)
    seen: dict[str, Any] = {"version": transformers.__version__, "written": {}, "read": {}}
    written_by = next((step.removeprefix("read ") for step in steps if step.startswith("read ")), None)
    for name in MODELS:
        model = load(folder, name)
        if "write" in steps:
            seen["written"][name] = write(folder, name, model)
        if written_by is not None:
            seen["read"][name] = read(folder, name, model, written_by)
    for name in SEEING:
        model = load(folder, name)
        if "write" in steps:
            seen["written"][name] = write_seen(folder, name, model)
        if written_by is not None:
            seen["read"][name] = read_seen(folder, name, model, written_by)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
