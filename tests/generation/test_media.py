"""Prompts with pictures: nothing that holds a picture's place is stored by its ids, and such calls run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from kvkeep import CacheStore, compat
from kvkeep.errors import UnsupportedRequestError

IMAGE, ROWS = 90, 4  # a picture is four tokens


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(5)
    text = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 64,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=ROWS,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
        boi_token_index=91,
        eoi_token_index=92,
        initializer_range=0.3,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():  # zeros as it is made, so that pictures would not count
        model.model.multi_modal_projector.mm_input_projection_weight.normal_()
    return model


def prompt(seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 80, (1, 30), generator=torch.Generator().manual_seed(seed))
    ids[0, 12] = 91
    ids[0, 13 : 13 + ROWS] = IMAGE
    ids[0, 13 + ROWS] = 92
    return ids


def pictured(ids: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    pixels = torch.rand((1, 3, 16, 16), generator=torch.Generator().manual_seed(seed))
    types = (ids == IMAGE).long()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "token_type_ids": types,
    }


OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


def logits(generate: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return generate(*args, **kwargs, **OPTIONS, return_dict_in_generate=True, output_logits=True).logits[0]


def test_the_place_of_a_picture_is_not_stored_by_its_ids(model: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = prompt()
    assert compat.media_token_ids(model) == {IMAGE}
    with pytest.raises(UnsupportedRequestError, match="holds the id 90, which stands for a picture"):
        kv.warm(ids)
    with pytest.raises(UnsupportedRequestError, match="pixel_values"):
        kv.warm(pictured(ids, 1))
    cache = model.generate(**pictured(ids, 1), **OPTIONS, return_dict_in_generate=True)
    cache = getattr(cache, "cache", None) or cache.past_key_values
    with pytest.raises(UnsupportedRequestError, match="which stands for a picture"):
        kv.save(cache, torch.cat([ids, ids[:, :2]], dim=1))
    assert kv.store.entries() == []


def test_two_pictures_with_equal_ids_give_their_own_texts(model: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = prompt()
    kv.warm(ids[:, :12])
    controls = [logits(model.generate, **pictured(ids, seed)) for seed in (1, 2)]
    assert (controls[0] - controls[1]).abs().max() > 1e-3
    for seed, control in zip((1, 2), controls, strict=True):
        assert torch.equal(logits(kv.generate, pictured(ids, seed)), control)
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:8]) == (0, "inputs: ")


def test_text_before_and_without_pictures_is_served(model: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = prompt()
    text = torch.randint(3, 80, (1, 20), generator=torch.Generator().manual_seed(3))
    text[0, :12] = ids[0, :12]
    kv.warm(ids[:, :12])
    control = model.generate(text, attention_mask=torch.ones_like(text), **OPTIONS)
    assert torch.equal(kv.generate(text, **OPTIONS), control)
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (11, None)  # type: ignore[union-attr]
    assert kv.lookup(ids).tokens == 12
