"""Prompts with pictures: a prefix is its ids and its pictures, and the model is fed what is behind it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_media import IMAGE, MEDIA_NAMES, START, build_seeing, cut, seen

from kvkeep import BoundStore, CacheStore, compat
from kvkeep.errors import CacheMismatchError, InvalidPromptError, UnsupportedRequestError

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
LEAD, TAIL = 10, 12
NEW = compat.ENCODE_STEP is not None


@pytest.fixture(scope="module", params=MEDIA_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return build_seeing(name)


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(model)


def logits(generate: Any, *args: Any, **inputs: Any) -> torch.Tensor:
    """[new tokens, vocabulary]"""
    return torch.cat(generate(*args, **inputs, **OPTIONS, output_logits=True).logits)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() < 5e-5 * other.abs().max())


@contextmanager
def fed(model: Any) -> Iterator[dict[str, int]]:
    """Counts the tokens that are embedded and the rows of pixels that are looked at."""
    counts = {"tokens": 0, "pixels": 0}
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower

    def embedded(module: Any, args: Any, output: Any) -> None:
        counts["tokens"] += output.shape[1]

    def looked(module: Any, args: Any, kwargs: Any) -> None:
        pixels = [*args, *(kwargs[one] for one in ("pixel_values", "hidden_states") if one in kwargs)][0]
        counts["pixels"] += len(pixels)

    hooks = [
        model.get_input_embeddings().register_forward_hook(embedded),
        tower.register_forward_pre_hook(looked, with_kwargs=True),
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def tokens(inputs: dict[str, Any]) -> int:
    return int(inputs["input_ids"].shape[1])


def starts(inputs: dict[str, Any]) -> list[int]:
    """Where the pictures' placeholders begin."""
    return [int(at) + 1 for at in (inputs["input_ids"][0] == START).nonzero()]


# --- hits ---


def test_a_picture_is_seen_once_and_a_later_one_when_it_comes(model: Any, name: str, kv: BoundStore) -> None:
    first, both = seen(name, [1]), seen(name, [1, 2])
    control = logits(model.generate, **both)
    entry = kv.warm(first)
    assert (entry.end, kv.lookup(both).tokens) == (tokens(first), tokens(first))
    with fed(model) as counts:
        assert close(logits(kv.generate, both), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (tokens(first) - 1, None)
    later = len(both["pixel_values"]) - len(first["pixel_values"])
    # of the new tokens, the last is sampled and never fed
    assert counts == {"tokens": tokens(both) - tokens(first) + 1 + OPTIONS["max_new_tokens"] - 1, "pixels": later}

    kv.warm(both)
    with fed(model) as counts:
        assert close(logits(kv.generate, both), control)
    assert kv.last_report.reused_tokens == tokens(both) - 2
    assert counts == {"tokens": 2 + OPTIONS["max_new_tokens"] - 1, "pixels": 0}


def test_equal_ids_with_another_picture_are_another_prefix(model: Any, name: str, kv: BoundStore) -> None:
    prompts = [seen(name, [1, 2]), seen(name, [1, 4]), seen(name, [3, 2])]
    assert torch.equal(prompts[0]["input_ids"], prompts[1]["input_ids"])
    controls = [logits(model.generate, **prompt) for prompt in prompts]
    assert (controls[0][0] - controls[1][0]).abs().max() > 1e-2
    assert (controls[0][0] - controls[2][0]).abs().max() > 1e-2
    kv.warm(prompts[0])
    for prompt, control, start in zip(prompts[1:], controls[1:], (starts(prompts[0])[1], LEAD + 1), strict=True):
        assert close(logits(kv.generate, prompt), control)
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == start - 1
        assert kv.last_report.reason == f"media: what is stored has something else at token {start} than this image"
        assert kv.lookup(prompt).tokens == start
    entries = {kv.warm(prompt).key for prompt in prompts}
    assert len(entries) == 3
    for prompt, control in zip(prompts, controls, strict=True):
        assert close(logits(kv.generate, prompt), control)
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (tokens(prompt) - 2, None)


def test_many_prompts_of_equal_ids_are_told_apart_by_their_pictures(model: Any, name: str, kv: BoundStore) -> None:
    prompts = [seen(name, [picture]) for picture in range(2, 62, 2)]  # more than are compared one by one
    for prompt in prompts:
        kv.warm(prompt)
    longer = {**prompts[7], "input_ids": torch.cat([prompts[7]["input_ids"], torch.tensor([[5, 6, 7]])], dim=1)}
    longer |= {one: torch.zeros_like(longer["input_ids"]) for one in longer if "token_type" in one}
    for one in (one for one in longer if "token_type" in one):
        longer[one][:, : tokens(prompts[7])] = prompts[7][one]
    del longer["attention_mask"]
    assert (kv.lookup(longer).tokens, kv.lookup(longer).reason) == (tokens(prompts[7]), None)


def test_text_before_a_picture_serves_any_picture(model: Any, name: str, kv: BoundStore) -> None:
    kv.warm(seen(name, [])["input_ids"])
    for picture in (1, 2):
        prompt = seen(name, [picture])
        control = logits(model.generate, **prompt)
        assert close(logits(kv.generate, prompt), control)
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (LEAD - 1, None)


def test_a_prompt_of_text_alone_is_served_after_one_with_pictures(model: Any, name: str, kv: BoundStore) -> None:
    text = seen(name, [], lead=30)
    control = logits(model.generate, **text)
    logits(model.generate, **seen(name, [1]))  # leaves the position state of a picture on the model
    kv.warm(text["input_ids"][:, :20])
    logits(model.generate, **seen(name, [1]))
    assert close(logits(kv.generate, text), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (19, None)


@pytest.mark.parametrize("end", [LEAD + 2, LEAD + 4])
def test_no_prefix_ends_within_a_picture(model: Any, name: str, kv: BoundStore, end: int) -> None:
    """The ids agree up to some placeholder, and there the other picture is shorter or longer."""
    short, long = (seen(name, [picture]) for picture in (2, 1))
    kv.warm(long)
    for prompt in (short, long):
        assert kv.lookup(cut(prompt, end)).tokens == LEAD + 1


def test_a_model_that_is_attached_sees_what_is_new(model: Any, name: str, kv: BoundStore) -> None:
    first, both = seen(name, [1]), seen(name, [1, 2])
    control = logits(model.generate, **both)
    beams = {**OPTIONS, "num_beams": 2}
    kv.warm(first)
    before = set(vars(model))
    with kv.attached():
        assert close(logits(model.generate, **both), control)
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens == tokens(first) - 1
        of_beams = model.generate(**both, **beams).sequences
        assert kv.last_report.reused_tokens == 0
        assert str(kv.last_report.reason).startswith(("batch: ", "inputs: "))
    assert set(vars(model)) == before
    assert torch.equal(model.generate(**both, **beams).sequences, of_beams)


def test_a_static_cache_is_filled_too(model: Any, name: str, kv: BoundStore) -> None:
    first, both = seen(name, [1]), seen(name, [1, 2])
    options = {"cache_implementation": "static", "disable_compile": True}
    control = logits(model.generate, **both, **options)
    kv.warm(first)
    assert close(logits(kv.generate, both, **options), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (tokens(first) - 1, None)


@pytest.mark.parametrize("window", [8, 16])
def test_windows_that_have_moved_past_a_picture(tmp_path: Path, window: int) -> None:
    model = build_seeing("gemma3", window=window)
    kv = CacheStore(tmp_path / "store").bind(model)
    first, both = seen("gemma3", [1], tail=30), seen("gemma3", [1, 2], tail=30)
    control = logits(model.generate, **both)
    kv.warm(first)
    assert close(logits(kv.generate, both), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (tokens(first) - 1, None)


def test_long_prompts_are_warmed_in_several_passes(model: Any, name: str, kv: BoundStore) -> None:
    """The first pass would end within the picture; positions go on behind it."""
    prompt = seen(name, [1], lead=508, tail=60)
    control = logits(model.generate, **prompt)
    logits(model.generate, **seen(name, [3], text=2))
    kv.warm(cut(prompt, 560))
    for guard in (True, False):
        assert close(logits(kv.generate, prompt, guard=guard), control)
        assert kv.last_report is not None
        assert (kv.last_report.reused_tokens, kv.last_report.reason) == (560 - guard, None)


def test_positions_of_the_callers_own_are_not_served(model: Any, name: str, kv: BoundStore) -> None:
    text = seen(name, [], lead=30)
    positions = torch.arange(30)[None]
    kv.warm(cut(text, 20))
    given = {**text, "position_ids": positions}
    assert torch.equal(logits(kv.generate, given), logits(model.generate, **given))
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, str(kv.last_report.reason)[:10]) == (0, "positions:")
    assert len(kv.store.entries()) == 1


def test_embeddings_are_taken_as_ever_while_attached(model: Any, name: str, kv: BoundStore) -> None:
    embeddings = model.get_input_embeddings()(seen(name, [])["input_ids"])

    def outcome() -> list[int] | str:
        try:
            return list(model.generate(inputs_embeds=embeddings, **OPTIONS).sequences[0].tolist())
        except ValueError as error:  # Gemma 3 takes none in the newer version
            return str(error)

    control = outcome()
    with kv.attached():
        assert outcome() == control


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_model_behind_a_peft_wrapper_sees_what_is_new(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_seeing(name), config).eval()
    kv = CacheStore(tmp_path / "store").bind(model)
    first, both = seen(name, [1]), seen(name, [1, 2])
    controls = [logits(model.generate, **prompt) for prompt in (first, both)]
    kv.warm(cut(first, tokens(first) - 4))
    for prompt, control in zip((first, both), controls, strict=True):
        assert close(logits(kv.generate, prompt), control)
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens >= tokens(first) - 6 or not NEW


# --- what is in the key ---


def test_one_pixel_and_its_type_are_in_the_key(name: str, kv: BoundStore) -> None:
    prompt = seen(name, [1])
    kv.warm(prompt)
    pixel = prompt["pixel_values"].clone()
    pixel.view(-1)[7] = torch.nextafter(pixel.view(-1)[7], torch.tensor(9.0))
    changed = [{**prompt, "pixel_values": pixel}, {**prompt, "pixel_values": prompt["pixel_values"].double()}]
    if "image_grid_thw" in prompt:
        changed.append({**prompt, "image_grid_thw": torch.tensor([[1, 6, 4]])})
    types = [one for one in prompt if "token_type" in one]
    changed += [{one: value for one, value in prompt.items() if one != absent} for absent in types]
    changed += [{**prompt, odd: prompt[odd] * 2} for odd in types]
    for other in changed:
        match = kv.lookup(other)
        assert match.tokens == LEAD + 1
        assert str(match.reason).startswith("media: ")
    assert kv.lookup({**prompt, "pixel_values": prompt["pixel_values"].clone()}).tokens == tokens(prompt) - 1


def test_a_token_type_without_a_picture_is_refused(tmp_path: Path) -> None:
    model = build_seeing("gemma3")
    kv = CacheStore(tmp_path / "store").bind(model)
    text = seen("gemma3", [], lead=30)
    kv.warm(text)
    assert kv.lookup({**text, "token_type_ids": None}).tokens == 29
    types = text["token_type_ids"].clone()
    types[0, 17:19] = 1
    with pytest.raises(UnsupportedRequestError, match="token_type_ids sets tokens apart that stand for no picture"):
        kv.lookup({**text, "token_type_ids": types})
    control = logits(model.generate, **{**text, "token_type_ids": types})
    assert torch.equal(logits(kv.generate, {**text, "token_type_ids": types}), control)
    assert kv.last_report is not None
    assert str(kv.last_report.reason).startswith("inputs: token_type_ids sets tokens apart")


def test_pictures_that_cannot_be_told_apart_are_one(name: str, kv: BoundStore) -> None:
    """Placeholders moved from one picture to the next: then each run holds something of both."""
    both = seen(name, [2, 4])
    ids = both["input_ids"].clone()
    one, two = starts(both)
    rest = ids[0, one:two].tolist()
    moved = torch.tensor([[*ids[0, :one].tolist(), IMAGE, *rest, *ids[0, two + 1 :].tolist()]])
    both = {one: value for one, value in both.items() if "token_type" not in one} | {"input_ids": moved}
    (media,) = kv._reader.inputs(both).media
    assert (media.start, media.end) == (one, two + 4)
    assert kv._reader.inputs(seen(name, [2, 4])).media[1].start == two


# --- refused ---


def test_a_place_without_its_picture_is_refused(model: Any, name: str, kv: BoundStore) -> None:
    ids = seen(name, [1])["input_ids"]
    for act in (kv.warm, kv.lookup, kv.load, kv.prepare):
        with pytest.raises(UnsupportedRequestError, match=f"holds the id {IMAGE}, which stands for a picture"):
            act(ids)
    with pytest.raises(UnsupportedRequestError, match="pixel_values came with a prompt that has no place for them"):
        kv.warm({**seen(name, []), "pixel_values": seen(name, [1])["pixel_values"]})
    with pytest.raises(UnsupportedRequestError, match="comes with pixel_mask, which decide KV"):
        kv.warm({**seen(name, [1]), "pixel_mask": torch.ones(1, 4)})
    with pytest.raises(UnsupportedRequestError, match="pixel_values is a list that is no tensor"):
        kv.warm({**seen(name, [1]), "pixel_values": [torch.ones(2), torch.ones(3)]})
    assert kv.store.entries() == []


def test_pictures_that_the_model_does_not_take_are_refused(name: str, kv: BoundStore) -> None:
    prompt = seen(name, [2, 4])
    half = len(prompt["pixel_values"]) // 2
    fewer = {**prompt, "pixel_values": prompt["pixel_values"][:half]}
    if "image_grid_thw" in prompt:
        fewer["image_grid_thw"] = prompt["image_grid_thw"][:1]
    with pytest.raises(InvalidPromptError, match="the model does not take this prompt"):
        kv.warm(fewer)
    assert kv.store.entries() == []


# --- load, save, prepare ---


def go_on(model: Any, cache: Any, ids: torch.Tensor, held: int, steps: int = 3) -> torch.Tensor:
    """Feed the rest of a prompt and some more, one pass after another, with nothing but the cache."""
    out = []
    rest = ids[:, held:]
    for _ in range(steps):
        extra = {}
        if compat.takes(model, "cache_position"):
            extra = {"cache_position": torch.arange(held, held + rest.shape[1])}
        with torch.no_grad():
            logits = model(
                input_ids=rest, **{compat.forward_cache_argument(model): cache}, use_cache=True, **extra
            ).logits
        out.append(logits[:, -1])
        held, rest = held + rest.shape[1], logits[:, -1:].argmax(-1)
    return torch.cat(out)


def test_a_loaded_cache_goes_on_at_the_right_positions(model: Any, name: str, kv: BoundStore, tmp_path: Path) -> None:
    prompt = seen(name, [1])
    control = logits(model.generate, **prompt)[:3]
    kv.warm(cut(prompt, tokens(prompt) - 5))
    fresh = build_seeing(name)  # as in another process: no picture was ever placed here
    loaded = CacheStore(tmp_path / "store").bind(fresh)
    logits(fresh.generate, **seen(name, [3, 5, 1], text=3))  # and then others were
    cache = loaded.load(prompt)
    assert compat.cached_tokens(cache) == tokens(prompt) - 5
    assert close(go_on(fresh, cache, prompt["input_ids"], tokens(prompt) - 5), control)

    text = seen(name, [], lead=30)
    control = logits(model.generate, **text)[:3]
    loaded.warm(text["input_ids"][:, :20])
    logits(fresh.generate, **prompt)
    cache = loaded.load(text["input_ids"])
    assert close(go_on(fresh, cache, text["input_ids"], 20), control)


def test_a_cache_with_a_picture_is_saved_with_it(model: Any, name: str, kv: BoundStore) -> None:
    prompt = seen(name, [1])
    out = model.generate(**prompt, **OPTIONS)
    cache = getattr(out, compat.GENERATE_CACHE_ARGUMENT)
    held = {**prompt, "input_ids": out.sequences[:, :-1]}
    del held["attention_mask"]
    for one in [one for one in prompt if "token_type" in one]:
        held[one] = torch.nn.functional.pad(prompt[one], (0, tokens(held) - tokens(prompt)))
    for other in (
        {**held, "pixel_values": prompt["pixel_values"].flip(-1)},
        {**held, "input_ids": held["input_ids"].clone()},
    ):
        if other["pixel_values"] is prompt["pixel_values"]:
            other["input_ids"][0, 3] = 4
        with pytest.raises(CacheMismatchError, match="not hold what this model computes for these inputs"):
            kv.save(cache, other)
    with pytest.raises(UnsupportedRequestError, match="which stands for a picture"):
        kv.save(cache, held["input_ids"])
    entry = kv.save(cache, held)
    assert entry.end == tokens(held)
    assert kv.lookup(prompt).tokens == tokens(prompt) - 1


def test_prepared_arguments_give_the_same_text(model: Any, name: str, kv: BoundStore) -> None:
    first, both = seen(name, [1]), seen(name, [1, 2])
    controls = {1: logits(model.generate, **first), 2: logits(model.generate, **both)}
    kv.warm(cut(first, tokens(first) - 4))
    one, two = kv.prepare(first), kv.prepare(both)
    kv.load(seen(name, [3], text=2))
    assert close(logits(model.generate, **one), controls[1])
    assert close(logits(model.generate, **two), controls[2])
    # 4.57 takes no picture behind a given cache, and counts the positions of some models by the latest call.
    assert ("pixel_values" not in one) == (NEW or not name.startswith("qwen"))
    assert (compat.GENERATE_CACHE_ARGUMENT in two) == NEW


# --- the guard ---


def test_the_guard_stops_a_changed_model_and_all_pictures_are_seen_again(name: str, tmp_path: Path) -> None:
    model = build_seeing(name)
    kv = CacheStore(tmp_path / "store").bind(model, model_id="the same word whatever it is")
    both = seen(name, [1, 2])
    kv.warm(seen(name, [1]))
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.mul_(1.01)
    control = logits(model.generate, **both)
    with fed(model) as counts:
        assert close(logits(kv.generate, both), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == 0
    assert str(kv.last_report.reason).startswith("guard: ")
    assert counts["pixels"] >= len(both["pixel_values"])
