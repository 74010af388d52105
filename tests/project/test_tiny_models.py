"""The tiny models are what other tests take them for."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY_NAMES, VOCABULARY, WINDOW, build_tiny

LAYERS = {
    "llama": [None] * 3,
    "mistral": [WINDOW] * 3,
    "gemma3": [WINDOW, WINDOW, None, WINDOW],
    "gpt_oss": [WINDOW, None, WINDOW, None],
}
PROMPT = torch.arange(3, 3 + 24)[None]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_layers_see_what_they_should(name: str) -> None:
    model = build_tiny(name)
    assert model.dtype == torch.float32
    assert not model.training
    cache = model(PROMPT, use_cache=True).past_key_values
    kept = [layer.keys.shape[2] for layer in cache.layers]
    assert kept == [24 if window is None else window - 1 for window in LAYERS[name]]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    state = torch.random.get_rng_state()
    first, again, other = build_tiny(name), build_tiny(name), build_tiny(name, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    weights = first.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in again.state_dict().items())
    assert not torch.equal(
        weights["model.layers.0.self_attn.k_proj.weight"], other.model.layers[0].self_attn.k_proj.weight
    )


@pytest.mark.parametrize("name", TINY_NAMES)
def test_what_is_generated_depends_on_the_first_token(name: str) -> None:
    model = build_tiny(name)
    changed = PROMPT.clone()
    changed[0, 0] = 200
    texts = [
        model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, 24:].tolist()
        for ids in (PROMPT, changed)
    ]
    # A window of 8 in each of three layers reaches 21 tokens back: what lies before is out of Mistral's sight.
    assert (texts[0] == texts[1]) == (name == "mistral")
    assert len(set(texts[0])) > 4


def test_the_toy_tokenizer_fits_the_models_and_loses_nothing(toy_tokenizer) -> None:
    text = "the other thing, and\n\n  ÿ é 😀 in order"
    ids = toy_tokenizer(text).input_ids
    assert toy_tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert len(toy_tokenizer) <= VOCABULARY
    assert sorted(toy_tokenizer(text)) == ["attention_mask", "input_ids"]


def test_the_toy_tokenizer_renders_chat(toy_tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = toy_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = toy_tokenizer(rendered).input_ids
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
