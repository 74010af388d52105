"""``generate(save=)``: what calls have computed is stored, where the user asked for it, and stays right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_layouts import LAYOUTS, build
from tiny_models import VOCABULARY

from kvkeep import CacheStore
from kvkeep.errors import InvalidRequestError

PROMPT, NEW = 100, 6
TOLERANCE = 2e-4
SERVED = [name for name, layout in LAYOUTS.items() if layout.kept]


@pytest.fixture(scope="module", params=SERVED)
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, build(request.param)


def ids(seed: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def outcome(generate: Any, prompt: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # Without a mask, generate takes ids for padding that the model has written itself.
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt), **options}
    out = generate(prompt, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.cat(out.logits)


def assert_same(mine: tuple[torch.Tensor, torch.Tensor], plain: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(mine[0], plain[0])
    assert (mine[1] - plain[1]).abs().max() < TOLERANCE * plain[1].abs().max()


@pytest.mark.parametrize("mode", ["prompt", "turn"])
def test_a_growing_conversation_is_reused_turn_by_turn(named: tuple[str, Any], mode: str, tmp_path: Path) -> None:
    name, model = named
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    history, before = ids(1, PROMPT), 0
    for turn in range(3):
        plain = outcome(model.generate, history)
        mine = outcome(kv.generate, history, save=mode)
        assert_same(mine, plain)
        report = kv.last_report
        assert report is not None
        if LAYOUTS[name].singly and mode == "turn":
            assert report.not_stored is not None or report.stored is not None
        else:
            assert (report.stored is not None, report.not_stored) == (True, None)
            assert store.entry(report.stored or "").end in (
                (history.shape[1], history.shape[1] - 1) if mode == "prompt" else (mine[0].shape[1] - 1,)
            )
        if turn and not LAYOUTS[name].singly:
            assert report.reused_tokens >= before - 1
        before = history.shape[1] if mode == "prompt" else mine[0].shape[1] - 1
        history = torch.cat([mine[0], ids(turn + 5, 8)], dim=1)


def test_nothing_is_stored_where_nobody_asks(named: tuple[str, Any], tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store")
    kv = store.bind(named[1])
    kv.generate(ids(1, PROMPT), max_new_tokens=2, do_sample=False)
    with kv.attached():
        named[1].generate(ids(1, PROMPT), max_new_tokens=2, do_sample=False)
    assert store.entries() == []
    assert kv.last_report is not None
    assert (kv.last_report.stored, kv.last_report.not_stored) == (None, None)


def test_only_what_two_prompts_have_in_common_is_stored(tmp_path: Path) -> None:
    model = build("full")
    store = CacheStore(tmp_path / "store", save="seen_twice")
    kv = store.bind(model)
    shared = ids(1, PROMPT)
    ends = []
    for seed in range(2, 6):
        prompt = torch.cat([shared, ids(seed, 9)], dim=1)
        assert_same(outcome(kv.generate, prompt), outcome(model.generate, prompt))
        ends.append([one.end for one in store.entries()])
    assert ends == [[], [PROMPT], [PROMPT], [PROMPT]]
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == PROMPT - 1
    kv.generate(ids(40, PROMPT), max_new_tokens=1)
    assert [one.end for one in store.entries()] == [PROMPT]


@pytest.mark.parametrize("mode", ["prompt", "turn"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 2},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_other_ways_to_generate_store_what_is_right_or_say_why_not(
    mode: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = build("full")
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    prompt = ids(1, PROMPT)
    torch.manual_seed(0)
    plain = outcome(model.generate, prompt, **options)
    torch.manual_seed(0)
    assert_same(outcome(kv.generate, prompt, save=mode, **options), plain)
    report = kv.last_report
    assert report is not None
    assert (report.stored is None) == (report.not_stored is not None)
    if report.stored is not None:
        longer = torch.cat([plain[0][:1], ids(9, 4)], dim=1)
        assert_same(outcome(kv.generate, longer), outcome(model.generate, longer))
        assert kv.last_report is not None
        assert kv.last_report.reused_tokens >= PROMPT - 1


def test_a_short_prompt_and_a_full_store_say_so(tmp_path: Path) -> None:
    model = build("full")
    kv = CacheStore(tmp_path / "store", save="prompt").bind(model)
    kv.generate(ids(1, 20), max_new_tokens=1)
    assert kv.last_report is not None
    assert (kv.last_report.not_stored or "").startswith("short: 20 tokens")
    kv = CacheStore(tmp_path / "store", max_bytes=4096).bind(model, save="turn")
    mine = outcome(kv.generate, ids(1, PROMPT))
    assert_same(mine, outcome(model.generate, ids(1, PROMPT)))
    assert kv.last_report is not None
    assert (kv.last_report.not_stored or "").startswith("full: ")
    readonly = CacheStore(tmp_path / "store", readonly=True).bind(model, save="turn")
    assert_same(outcome(readonly.generate, ids(1, PROMPT)), mine)
    assert readonly.last_report is not None
    assert readonly.last_report.not_stored is not None


def test_attached_calls_are_stored_as_the_bind_says(tmp_path: Path) -> None:
    model = build("full")
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model, save="turn")
    with kv.attached():
        model.generate(ids(1, PROMPT), max_new_tokens=NEW, do_sample=False)
    assert [one.end for one in store.entries()] == [PROMPT + NEW - 1]


def test_what_is_no_mode_is_refused(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store")
    with pytest.raises(InvalidRequestError, match="save must be"):
        CacheStore(tmp_path / "store", save="always")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="save must be"):
        store.bind(build("full"), save=True)  # type: ignore[arg-type]
