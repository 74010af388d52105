"""Models small enough to build in a moment that see pictures, with prompts for them.

Weights are random and wide, the vision tower's too, so that another picture gives another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from kvkeep import compat

IMAGE, START, END, VIDEO = 90, 91, 92, 93
"""The id that holds a picture's place, the ids around it, and the one that would hold a film's."""

WORDS = range(3, 80)
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def _gemma3(window: int = 64, **text: Any) -> Any:
    vision = {**_TOWER, "image_size": 16, "patch_size": 4, "vision_use_head": False}
    config = Gemma3Config(
        text_config={**_TEXT, "head_dim": 16, "sliding_window": window, **text},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        initializer_range=0.3,
    )
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():  # zeros as it is made, so that pictures would not count
        model.model.multi_modal_projector.mm_input_projection_weight.normal_()
    return model


def _llava() -> Any:
    config = LlavaConfig(
        text_config=LlamaConfig(**_TEXT, head_dim=16),
        vision_config=CLIPVisionConfig(**_TOWER, image_size=16, patch_size=8, projection_dim=16),
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_ROPE = {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def _qwen2_vl() -> Any:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = {**_TEXT, "rope_scaling": dict(_ROPE), "rope_parameters": dict(_ROPE)}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS))


def _qwen2_5_vl() -> Any:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [0],
    }
    text = {**_TEXT, "rope_scaling": dict(_ROPE), "rope_parameters": dict(_ROPE)}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS))


def _qwen3_vl() -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    text = {**_TEXT, "head_dim": 16, "rope_scaling": dict(_ROPE), "rope_parameters": dict(_ROPE)}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS))


_BUILDERS = {
    "gemma3": _gemma3,
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
MEDIA_NAMES = tuple(_BUILDERS)


def build_seeing(name: str, *, seed: int = 0, **options: Any) -> Any:
    """A fresh model that sees pictures, in float32 and evaluation mode: the same weights for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[name](**options).eval()
        model.generation_config.eos_token_id = None  # random weights would end anywhere
        with torch.no_grad():  # what the towers leave small
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.std() < 0.2:
                    parameter.normal_(std=0.3)
        return model


def seen(name: str, pictures: Sequence[int], *, text: int = 1, lead: int = 10, tail: int = 12) -> dict[str, Any]:
    """A prompt as a processor returns it: words, then each picture followed by words.

    Args:
        name: of the model.
        pictures: a seed for each picture's content; an odd one is wider, where the model takes any size.
        text: a seed for the words.
        lead: words before the first picture.
        tail: words behind each picture.
    """
    words = torch.Generator().manual_seed(text)

    def some(count: int) -> list[int]:
        return torch.randint(WORDS.start, WORDS.stop, (count,), generator=words).tolist()

    ids, pixels, grids = some(lead), [], []
    for picture in pictures:
        noise = torch.Generator().manual_seed(picture)
        if name.startswith("qwen"):
            grid = [1, 4, 6 if picture % 2 else 4]
            grids.append(grid)
            pixels.append(torch.randn((grid[1] * grid[2], 3 * 2 * 4 * 4), generator=noise))
            places = grid[1] * grid[2] // 4
        else:
            pixels.append(torch.rand((1, 3, 16, 16), generator=noise))
            places = 4
        ids += [START, *[IMAGE] * places, END, *some(tail)]
    input_ids = torch.tensor([ids])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if pictures:
        inputs["pixel_values"] = torch.cat(pixels)
    if grids:
        inputs["image_grid_thw"] = torch.tensor(grids)
    if types := _TYPES.get(name):
        inputs[types] = (input_ids == IMAGE).long()
    return inputs


_TYPES = {"gemma3": "token_type_ids"}
if compat.ENCODE_STEP:  # 4.57's processors have no such types, and its models take none
    _TYPES |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "mm_token_type_ids")


def cut(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The first tokens of a prompt, with all of its pictures that begin among them."""
    ids = inputs["input_ids"][:, :tokens]
    starts = int((ids == START).sum())
    whole = {name: value for name, value in inputs.items() if value.shape[-1] == inputs["input_ids"].shape[-1]}
    short = {name: value[:, :tokens] for name, value in whole.items() if value.dim() == 2 and value.shape[0] == 1}
    if starts and "image_grid_thw" in inputs:
        grid = inputs["image_grid_thw"][:starts]
        return {**short, "image_grid_thw": grid, "pixel_values": inputs["pixel_values"][: int(grid.prod(-1).sum())]}
    return {**short, "pixel_values": inputs["pixel_values"][:starts]} if starts else short
