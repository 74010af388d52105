"""Boundaries at which models that keep state, or a window, go on otherwise than the prefix that was warmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_layouts import LAYOUTS, build
from tiny_models import VOCABULARY

from kvkeep import CacheStore, compat, storing
from kvkeep.errors import InvalidRequestError, StoreFullError

LENGTH, EVERY = 300, 80
BOUNDARIES = (80, 160, 240)
TOLERANCE = 2e-4
STATES = [name for name, layout in LAYOUTS.items() if layout.states and layout.kept]


@pytest.fixture(scope="module", params=["full", "windowed", "full, windowed", *STATES])
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, build(request.param)


def ids(seed: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def logits(generate: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.cat(out.logits)


@pytest.mark.parametrize("parted", [100, 240, 299])
def test_a_prompt_that_parts_from_a_warmed_one_uses_the_boundary_before(
    named: tuple[str, Any], parted: int, tmp_path: Path
) -> None:
    name, model = named
    layout = LAYOUTS[name]
    kv = CacheStore(tmp_path / "store").bind(model)
    prefix = ids(1, LENGTH)
    kv.warm(prefix, checkpoint_every=EVERY)
    prompt = torch.cat([prefix[:, :parted], ids(2, 5)], dim=1)
    mine, plain = logits(kv.generate, prompt), logits(model.generate, prompt)
    assert torch.equal(mine[0], plain[0])
    assert (mine[1] - plain[1]).abs().max() < TOLERANCE * plain[1].abs().max()
    report = kv.last_report
    assert report is not None
    if not layout.states:
        assert report.reused_tokens == parted - 1  # the guard's
    elif parted == LENGTH - 1 and not layout.singly:
        assert report.reused_tokens == parted  # where the state of the whole prefix is kept
    elif not layout.singly:
        assert report.reused_tokens == max(b for b in BOUNDARIES if b <= parted)
    else:
        assert (report.reused_tokens == 0) == (parted != LENGTH - 1), "no state is known on the way"


def test_attention_rows_are_stored_once(named: tuple[str, Any], tmp_path: Path) -> None:
    name, model = named
    layout = LAYOUTS[name]
    whole = CacheStore(tmp_path / "one")
    whole.bind(model).warm(ids(1, LENGTH))
    store = CacheStore(tmp_path / "two")
    kv = store.bind(model)
    entry = kv.warm(ids(1, LENGTH), checkpoint_every=EVERY)
    others = [one for one in store.entries() if one.key != entry.key]
    if not layout.states or layout.singly:
        assert others == []
        return
    assert sorted(one.end for one in others) == list(BOUNDARIES)
    for one in others:
        assert (one.start, one.parent) == ((0, None) if name == "recurrent" else (one.end - 1, entry.key))
        assert one.nbytes < whole.entries()[0].nbytes
    assert kv.warm(ids(1, LENGTH), checkpoint_every=EVERY).key == entry.key
    assert len(store.entries()) == 4
    # What was warmed without boundaries gets them when they are asked for.
    kv = whole.bind(model)
    kv.warm(ids(1, LENGTH), checkpoint_every=EVERY)
    assert sorted(one.end for one in whole.entries()) == sorted(one.end for one in store.entries())


def test_a_text_goes_on_otherwise_where_its_last_tokens_merge(tmp_path: Path, toy_tokenizer: Any) -> None:
    name = "full, recurrent"
    model = build(name)
    text, more = "a rest in the night and the rest of " * 8 + "th", "e end"
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model, toy_tokenizer)
    entry = kv.warm(text)
    whole = toy_tokenizer(text + more)["input_ids"]
    alone = toy_tokenizer(text)["input_ids"]
    assert whole[: len(alone) - 1] != alone[:-1], "the text's last tokens were to merge with what follows"
    shared = next(n for n, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b)
    if LAYOUTS[name].singly:
        assert kv.lookup(text + more).tokens == 0
        return
    found = kv.lookup(text + more)
    assert 0 < found.tokens <= shared
    assert found.tokens >= shared - 3
    assert found.entry is not None
    assert found.entry.parent == entry.key
    mine = logits(kv.generate, torch.tensor([whole]))
    plain = logits(model.generate, torch.tensor([whole]))
    assert torch.equal(mine[0], plain[0])


def test_messages_are_boundaries(tmp_path: Path, toy_tokenizer: Any) -> None:
    model = build("full, recurrent")
    kv = CacheStore(tmp_path / "store").bind(model, toy_tokenizer)
    said = [
        {"role": "system", "content": "the rest of the night " * 12},
        {"role": "user", "content": "and the end"},
        {"role": "assistant", "content": "in the rest"},
    ]
    kv.warm(said, checkpoint_every=100_000)
    found = kv.lookup([said[0], {"role": "user", "content": "of another"}])
    if compat.LINEAR_LAYERS:
        assert found.tokens > 64
        assert found.tokens > len(toy_tokenizer(said[0]["content"])["input_ids"])
    else:
        assert found.tokens == 0


def test_what_is_no_number_of_tokens_is_refused(tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(build("full"))
    with pytest.raises(InvalidRequestError, match="checkpoint_every"):
        kv.warm([1, 2, 3], checkpoint_every=0)


def test_what_fits_no_budget_is_refused_after_the_first_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "CHUNK", 32)
    model, passes = build("full"), list[int]()
    whole = CacheStore(tmp_path / "one").bind(model).warm(ids(1, LENGTH)).nbytes
    kv = CacheStore(tmp_path / "two", max_bytes=whole // 2).bind(model)
    with pytest.raises(StoreFullError, match="max_bytes"):
        kv.warm(ids(1, LENGTH), progress=lambda done, _total: passes.append(done))
    assert passes == []
    with pytest.raises(StoreFullError, match="quota"):
        CacheStore(tmp_path / "three", quota=whole // 2).bind(model).warm(ids(1, LENGTH))
    assert CacheStore(tmp_path / "four", max_bytes=whole).bind(model).warm(ids(1, LENGTH)).nbytes == whole
    # What is there already costs nothing: the rest fits.
    first = kv.warm(ids(1, LENGTH)[:, :100])
    assert kv.warm(ids(1, LENGTH)[:, :130]).parent == first.key
