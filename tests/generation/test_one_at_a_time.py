"""Models that do not look at their state when they are fed several tokens: they are fed one token at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from tiny_states import build_stateful

from kvkeep import CacheStore, storing
from kvkeep.inputs import Inputs
from kvkeep.keys import TokenIds
from kvkeep.manner import manner_of
from kvkeep.prefill import prefill

PREFIX, PROMPT = 40, 44
TOLERANCE = 2e-4  # right is below it in float32, wrong is above 0.05
WRONG = 0.05
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


@pytest.fixture(scope="module", params=["falcon_mamba", "jamba", "mamba", "zamba"])
def model(request: pytest.FixtureRequest) -> Any:
    return build_stateful(request.param)


def ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def off(mine: Any, right: Any) -> float:
    one, other = torch.cat(mine.logits), torch.cat(right.logits)
    return ((one - other).abs().max() / other.abs().max()).item()


def test_a_long_prefix_is_prefilled_in_one_pass(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manner_of(model).singly
    monkeypatch.setattr(storing, "CHUNK", 16)
    kv, plain = CacheStore(tmp_path / "store").bind(model), model.generate(ids(), **OPTIONS)
    passes: list[int] = []
    kv.warm(ids()[:, :PREFIX], progress=lambda done, total: passes.append(done))
    assert passes == [PREFIX - 1]
    ours = kv.generate(ids(), **OPTIONS)
    assert kv.last_report is not None and kv.last_report.reused_tokens == PREFIX - 1
    assert off(ours, plain) < TOLERANCE
    # What the user prefilled is compared with one pass, too.
    inputs = Inputs(TokenIds.of(ids()[0].tolist()))
    kv.save(prefill(model, inputs), ids())
    assert kv.lookup(torch.cat([ids(), ids()], dim=1)).tokens == PROMPT


def test_several_passes_would_have_stored_something_else(model: Any, tmp_path: Path) -> None:
    """The control: how far off the same is where the prefix was fed in parts."""
    inputs = Inputs(TokenIds.of(ids()[0, : PREFIX - 1].tolist()))
    try:
        parts = prefill(model, inputs, chunk=16)
    except (RuntimeError, IndexError):
        return  # this model takes one token behind a cache or refuses
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.save(parts, ids()[:, : PREFIX - 1], guard=False)
    ours = kv.generate(ids(), **OPTIONS)
    assert kv.last_report is not None and kv.last_report.reused_tokens == PREFIX - 1
    assert off(ours, model.generate(ids(), **OPTIONS)) > WRONG
