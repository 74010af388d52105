"""Real processors in front of the models: what they make of pictures, films and sounds is looked up as it comes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_media import build_seeing
from tiny_models import VOCABULARY, build_toy_tokenizer
from transformers import (
    BatchFeature,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLProcessor,
    WhisperFeatureExtractor,
)

from kvkeep import BoundStore, CacheStore

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
RATE = 16000
WITHOUT_TORCHVISION = "Pil" if hasattr(transformers, "Gemma3ImageProcessorPil") else ""

TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "audio_bos_token": "<start_of_audio>",
    "audio_eos_token": "<end_of_audio>",
}
PLACES = {
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "qwen2_vl": "<start_of_image><image><end_of_image>",
    "qwen2_5_vl": "<start_of_image><image><end_of_image>",
    "qwen2_audio": "<start_of_audio><audio><end_of_audio>",
}
NAMES = tuple(PLACES)
"""What a prompt says where something is to be seen or heard: the processor puts in the placeholders."""

TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else 'PLACE' }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class _Films:
    """Looks at frames as the image processor does: transformers' own needs torchvision."""

    merge_size = temporal_patch_size = 2

    def __init__(self, image_processor: Any) -> None:
        self.frames = image_processor

    def __call__(self, videos: Any, *, fps: float = 2.0, **others: Any) -> BatchFeature:
        looked = [self.frames(frames, return_tensors="pt") for frames in videos]
        grids = [torch.cat([one["image_grid_thw"][:, :1].sum()[None], one["image_grid_thw"][0, 1:]]) for one in looked]
        patches = torch.cat([one["pixel_values"] for one in looked])
        told = {"video_metadata": [SimpleNamespace(sampled_fps=fps) for _ in videos]} if WITHOUT_TORCHVISION else {}
        return BatchFeature({"pixel_values_videos": patches, "video_grid_thw": torch.stack(grids), **told})


class _AnyParts:
    """Lets a processor be made of the parts there are: the tokenizer of its own kind needs large files."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        return type(argument)


class _Qwen2VL(_AnyParts, Qwen2VLProcessor):
    pass


class _Qwen25VL(_AnyParts, Qwen2_5_VLProcessor):
    pass


def build_tokenizer() -> PreTrainedTokenizerFast:
    toy = build_toy_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=toy.backend_tokenizer,
        pad_token=toy.pad_token,
        bos_token=toy.bos_token,
        eos_token=toy.eos_token,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        extra_special_tokens=TOKENS,
    )


def looks(kind: str, **options: Any) -> Any:
    """The image processor that works without torchvision."""
    return getattr(transformers, f"{kind}ImageProcessor{WITHOUT_TORCHVISION}")(**options)


def build_processor(name: str) -> Any:
    tokenizer = build_tokenizer()
    shared: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": TEMPLATE.replace("PLACE", PLACES[name])}
    square = {"height": 16, "width": 16}
    if name == "gemma3":
        return Gemma3Processor(image_processor=looks("Gemma3", size=square), image_seq_length=4, **shared)
    if name == "llava":
        images = looks("CLIP", size={"shortest_edge": 16}, crop_size=square)
        cls = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return LlavaProcessor(image_processor=images, patch_size=8, **cls, **shared)
    if name == "qwen2_audio":
        return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), **shared)
    limits = {"min_pixels": 64, "max_pixels": 4096}
    if WITHOUT_TORCHVISION:
        limits = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    made = {"qwen2_vl": _Qwen2VL, "qwen2_5_vl": _Qwen25VL}[name]
    images = looks("Qwen2VL", patch_size=4, **limits)
    return made(image_processor=images, video_processor=_Films(images), **shared)


def build_model(name: str) -> Any:
    """A fresh model that knows the ids of the tokenizer: the same weights for the same name."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "qwen2_audio":
            return _hearing(tokenizer)
        model = build_seeing(name)
        model.resize_token_embeddings(VOCABULARY, pad_to_multiple_of=8, mean_resizing=False)
    model.config.image_token_id = tokenizer.image_token_id
    if name.startswith("qwen"):
        model.config.video_token_id = tokenizer.video_token_id
        model.config.vision_start_token_id = tokenizer.boi_token_id
        model.config.vision_end_token_id = tokenizer.eoi_token_id
    return model


def _hearing(tokenizer: Any) -> Any:
    ear = {"num_mel_bins": 8, "d_model": 16, "max_source_positions": 50}
    ear |= {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    text = {**build_seeing("llava").config.text_config.to_dict(), "model_type": "qwen2", "vocab_size": VOCABULARY}
    config = Qwen2AudioConfig(audio_config=ear, text_config=text, audio_token_index=tokenizer.audio_token_id)
    model = Qwen2AudioForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.std() < 0.2:
                parameter.normal_(std=0.3)
    return model


model_of, processor_of = cache(build_model), cache(build_processor)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def processor(name: str) -> Any:
    return processor_of(name)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return model_of(name)


@pytest.fixture
def kv(model: Any, processor: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model, processor)


def thing(name: str, seed: int) -> Any:
    """A picture of 24 by 16 pixels, or half a second of sound."""
    noise = np.random.default_rng(seed)
    if name == "qwen2_audio":
        return noise.standard_normal(RATE // 2, dtype=np.float32)
    return Image.fromarray(noise.integers(0, 256, (16, 24, 3), dtype=np.uint8))


def process(processor: Any, text: str, things: list[Any], **options: Any) -> Any:
    """What the processor returns for a text with ``@`` where the things are."""
    media: dict[str, Any] = {"images": things}
    if isinstance(processor, Qwen2AudioProcessor):
        media = {"audio": things, "sampling_rate": RATE}
    text = text.replace("@", _place(processor))
    return processor(text=text, return_tensors="pt", **(media if things else {}), **options)


def _place(processor: Any) -> str:
    return max((place for place in PLACES.values() if place in processor.chat_template), key=len)


def logits(generate: Any, *args: Any, **inputs: Any) -> torch.Tensor:
    """[new tokens, vocabulary]"""
    return torch.cat(generate(*args, **inputs, **OPTIONS, output_logits=True).logits)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() < 5e-5 * other.abs().max())


def tokens(inputs: Any) -> int:
    return int(inputs["input_ids"].shape[1])


def begins(model: Any, inputs: Any) -> list[int]:
    """Where each run of placeholders begins."""
    ids = {getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")} - {None}
    held = [False, *(one in ids for one in inputs["input_ids"][0].tolist())]
    return [at for at in range(len(held) - 1) if held[at + 1] and not held[at]]


def reused(kv: BoundStore) -> tuple[int, str | None]:
    assert kv.last_report is not None
    return kv.last_report.reused_tokens, kv.last_report.reason


# --- what a processor returns ---


def test_the_same_thing_with_more_text_is_not_looked_at_again(
    model: Any, processor: Any, name: str, kv: BoundStore
) -> None:
    short = process(processor, "the cat is in @ and sits", [thing(name, 1)])
    long = process(processor, "the cat is in @ and sits on the mat", [thing(name, 1)])
    entry = kv.warm(short)
    assert entry.end == tokens(short)
    control = logits(model.generate, **long)
    assert close(logits(kv.generate, long), control)
    assert reused(kv) == (tokens(short) - 1, None)
    with kv.attached():
        assert close(logits(model.generate, **long), control)
    assert reused(kv) == (tokens(short) - 1, None)
    kv.warm(long)
    assert close(logits(kv.generate, **long), control)
    assert reused(kv) == (tokens(long) - 2, None)


def test_a_second_thing_is_new_and_the_first_is_not(model: Any, processor: Any, name: str, kv: BoundStore) -> None:
    text = "the cat is in @ and sits on @ or not"
    one = process(processor, "the cat is in @ and sits", [thing(name, 1)])
    both, other = (process(processor, text, [thing(name, 1), thing(name, second)]) for second in (2, 3))
    controls = [logits(model.generate, **prompt) for prompt in (both, other)]
    assert (controls[0] - controls[1]).abs().max() > 1e-2
    kv.warm(one)
    assert close(logits(kv.generate, both), controls[0])
    assert reused(kv) == (tokens(one) - 1, None)
    kv.warm(both)
    assert close(logits(kv.generate, other), controls[1])
    second = begins(model, both)[1]
    kind = "audio" if name == "qwen2_audio" else "image"
    assert reused(kv) == (second - 1, f"media: what is stored has something else at token {second} than this {kind}")


def test_other_preprocessing_is_another_key(model: Any, processor: Any, name: str, kv: BoundStore) -> None:
    text, same = "the cat is in @ and sits", thing(name, 1)
    prompt = process(processor, text, [same])
    entry = kv.warm(prompt)
    if name == "qwen2_audio":
        others = [process(processor, text, [sound]) for sound in (np.repeat(same[::2], 2), same / 10)]
    else:
        others = [process(processor, text, [same.resize((40, 16))]), process(processor, text, [same.resize((12, 8))])]
        others += [process(processor, text, [same], **{step: False}) for step in ("do_rescale", "do_normalize")]
    (start,) = begins(model, prompt)
    keys = {entry.key}
    for other in others:
        match = kv.lookup(other)
        assert (match.tokens, str(match.reason)[:7]) == (start, "media: ")
        keys.add(kv.warm(other).key)
    assert len(keys) == len(others) + 1
    assert close(logits(kv.generate, others[0]), logits(model.generate, **others[0]))
    assert reused(kv) == (tokens(others[0]) - 2, None)
    assert kv.warm(process(processor, text, [thing(name, 1)])).key == entry.key


def test_padding_on_the_left_is_no_part_of_the_prompt(processor: Any, name: str, kv: BoundStore) -> None:
    text = "the cat is in @ and sits"
    entry = kv.warm(process(processor, text, [thing(name, 1)]))
    room = {"padding": "max_length", "max_length": entry.end + 9, "padding_side": "left"}
    if name == "qwen2_audio":
        room = {"text_kwargs": room}
    padded = process(processor, text, [thing(name, 1)], **room)
    assert (tokens(padded), kv.warm(padded).key) == (entry.end + 9, entry.key)


def test_a_picture_in_crops(tmp_path: Path) -> None:
    model, processor = model_of("gemma3"), processor_of("gemma3")
    kv = CacheStore(tmp_path / "store").bind(model, processor)
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
    wide = thing("gemma3", 1).resize((48, 16))
    short = process(processor, "the cat is in @ and sits", [wide], **crops)
    long = process(processor, "the cat is in @ and sits on @ or not", [wide, thing("gemma3", 2)], **crops)
    assert len(begins(model, short)) == 4
    kv.warm(short)
    assert close(logits(kv.generate, long), logits(model.generate, **long))
    assert reused(kv) == (tokens(short) - 1, None)


# --- chat ---


def says(role: str, text: str, *things: Any) -> dict[str, Any]:
    kinds = ["audio" if isinstance(one, np.ndarray) else "image" for one in things]
    parts = [{"type": kind, kind: one} for kind, one in zip(kinds, things, strict=True)]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def rendered(processor: Any, messages: list[dict[str, Any]]) -> Any:
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )


def test_a_chat_goes_on_behind_its_picture(model: Any, processor: Any, name: str, kv: BoundStore) -> None:
    asked = [says("user", "what is it", thing(name, 1))]
    later = [*asked, says("assistant", "a cat"), says("user", "and this", thing(name, 2))]
    now, then = rendered(processor, asked), rendered(processor, later)
    controls = [logits(model.generate, **inputs) for inputs in (now, then)]
    entry = kv.warm(asked)
    assert entry.end == tokens(now) - 1  # the line end behind "assistant" can merge with the answer
    assert entry.end > begins(model, now)[0]
    assert close(logits(kv.generate, asked), controls[0])
    assert reused(kv) == (entry.end - 1, None)
    assert close(logits(kv.generate, later), controls[1])
    assert reused(kv) == (entry.end - 1, None)
    assert kv.lookup(then).tokens == kv.lookup(later).tokens == entry.end  # rendered by the caller, or here

    assert kv.warm(later).end == kv.lookup(later).tokens == tokens(then) - 1
    assert close(logits(model.generate, **kv.prepare(later)), controls[1])

    another = [says("user", "what is it", thing(name, 3))]
    assert kv.lookup(another).tokens == begins(model, now)[0]
    assert str(kv.lookup(another).reason).startswith("media: ")


def test_text_alone_through_a_processor(model: Any, processor: Any, name: str, kv: BoundStore) -> None:
    control = logits(model.generate, **process(processor, "the cat sits on the mat", []))
    entry = kv.warm("the cat sits")
    assert close(logits(kv.generate, "the cat sits on the mat"), control)
    assert reused(kv) == (entry.end - 1, None)

    asked = [says("user", "what is it")]
    later = [*asked, says("assistant", "a cat"), says("user", "and now")]
    entry = kv.warm(asked)
    assert close(logits(kv.generate, later), logits(model.generate, **rendered(processor, later)))
    assert reused(kv) == (entry.end - 1, None)


# --- films ---


def film(processor: Any, text: str, frames: list[int], *pictures: int, **options: Any) -> Any:
    """A prompt with a film where ``#`` is, and pictures where ``@`` is."""
    places = text.replace("#", "<start_of_image><video><end_of_image>")
    shown = {"videos": [[thing("film", frame) for frame in frames]], **options}
    return process(processor, places, [thing("picture", picture) for picture in pictures], **shown)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_film_is_seen_once(name: str, tmp_path: Path) -> None:
    model, processor = model_of(name), processor_of(name)
    kv = CacheStore(tmp_path / "store").bind(model, processor)
    short = film(processor, "the cat is in # and sits", [1, 2, 3])
    long = film(processor, "the cat is in # and sits on @ or not", [1, 2, 3], 4)
    other = film(processor, "the cat is in # and sits on @ or not", [1, 5, 3], 4)
    controls = [logits(model.generate, **prompt) for prompt in (long, other)]
    assert (controls[0] - controls[1]).abs().max() > 1e-2
    kv.warm(short)
    assert close(logits(kv.generate, long), controls[0])
    assert reused(kv) == (tokens(short) - 1, None)
    entry = kv.warm(long)
    start, _ = begins(model, long)
    assert close(logits(kv.generate, other), controls[1])
    assert reused(kv) == (start - 1, f"media: what is stored has something else at token {start} than this video")
    assert kv.warm(other).key != entry.key
    if name == "qwen2_5_vl":  # as many frames of a film that runs faster
        faster = film(processor, "the cat is in # and sits", [1, 2, 3], fps=4.0)
        assert torch.equal(faster["pixel_values_videos"], short["pixel_values_videos"])
        assert kv.lookup(faster).tokens == start


# --- sounds ---


def test_sounds_of_unequal_length(tmp_path: Path) -> None:
    model, processor = model_of("qwen2_audio"), processor_of("qwen2_audio")
    kv = CacheStore(tmp_path / "store").bind(model, processor)
    short, long = thing("qwen2_audio", 1), np.tile(thing("qwen2_audio", 2), 2)
    both = process(processor, "hear @ that it is @ and on", [short, long])
    more = process(processor, "hear @ that it is @ and on and on", [short, long])
    one, other = begins(model, both)
    ids = both["input_ids"][0].tolist()
    assert ids[other:].count(ids[other]) > ids[one:other].count(ids[one])
    kv.warm(both)
    assert close(logits(kv.generate, more), logits(model.generate, **more))
    assert reused(kv) == (tokens(both) - 1, None)


# --- another process ---


def test_a_fresh_bind_hits_what_was_stored_through_another_processor(
    model: Any, processor: Any, name: str, kv: BoundStore, tmp_path: Path
) -> None:
    prompt = process(processor, "the cat is in @ and sits", [thing(name, 1)])
    entry = kv.warm(prompt)
    fresh, again = build_model(name), build_processor(name)
    long = process(again, "the cat is in @ and sits on the mat", [thing(name, 1)])
    bound = CacheStore(tmp_path / "store").bind(fresh, again)
    assert bound.identity() == kv.identity()
    assert close(logits(bound.generate, long), logits(model.generate, **long))
    assert reused(bound) == (entry.end - 1, None)
    bound = CacheStore(tmp_path / "store").bind(fresh, again.tokenizer)
    assert bound.identity() == kv.identity()
    assert bound.lookup(long).tokens == entry.end
    again.tokenizer.add_tokens(["cats"])
    bound = CacheStore(tmp_path / "store").bind(fresh, again)
    assert bound.identity().tokenizer != kv.identity().tokenizer
    assert bound.identity().model == kv.identity().model
