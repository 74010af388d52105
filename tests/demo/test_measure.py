import json
from pathlib import Path

import pytest

from kvkeep.demo.measure import Row, measure


def row(**changes):
    known = {
        "name": "a",
        "model": "m",
        "prefix_tokens": 2000,
        "prompt_tokens": 2020,
        "reused_tokens": 2000,
        "cold_ttft_s": 4.0,
        "warm_ttft_s": 0.2,
        "identical": True,
        "bytes": 7,
        "reason": None,
    }
    return Row(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, None),
        ({"warm_ttft_s": 0.21}, "the first token came 19.0 times sooner, less than 20"),
        ({"warm_ttft_s": 0.21, "prefix_tokens": 1500}, "the first token came 19.0 times sooner, less than 20"),
        ({"warm_ttft_s": 0.21, "prefix_tokens": 1499}, None),
        ({"identical": False}, "the text differs from the control's"),
        ({"prefix_tokens": 300, "identical": False}, "the text differs from the control's"),
        ({"reused_tokens": 0, "reason": "prefix: none"}, "nothing was reused (prefix: none)"),
    ],
)
def test_what_counts_as_missed(changes, missed):
    assert row(**changes).missed == missed


class Scripted:
    """A process that answers what it was told to, and notes what it was asked."""

    def __init__(self, side, log, seconds, text, **answer):
        self.side, self.log, self.seconds, self.text, self.answer = side, log, list(seconds), text, answer

    def ask(self, do, **arguments):
        self.log.append((self.side, do))
        if do == "first_token":
            return {"seconds": self.seconds.pop(0), **self.answer}
        if do == "write_text":
            Path(arguments["path"]).write_text(json.dumps(self.text[: arguments["tokens"]]))
        return None


@pytest.mark.parametrize(("text", "identical"), [([1, 2, 3], True), ([1, 2, 4], False), ([1, 2], False)])
def test_alternating_pairs_and_medians(tmp_path, monkeypatch, text, identical):
    monkeypatch.setattr("kvkeep.demo.measure._PAUSE", 0)
    log, steps = [], []
    cold = Scripted("cold", log, [5, 9, 6, 7, 1], [1, 2, 3], prompt_tokens=12, reused_tokens=0, reason=None)
    warm = Scripted("warm", log, [3, 1, 2, 9, 2], text, prompt_tokens=12, reused_tokens=10, reason="diverged: x")
    result = measure(
        4,
        {"name": "a", "tokens": 11, "bytes": 99, "prefilled": 0},
        model="m",
        stored=warm,
        control=cold,
        scratch=tmp_path,
        progress=lambda done, total: steps.append((done, total)),
    )
    pair = [(side, what) for side in ("cold", "warm") for what in ("settle", "first_token")]
    assert log[:20] == pair * 5
    assert log[20:] == [("cold", "write_text"), ("warm", "write_text")]
    assert result == Row(
        name="a",
        model="m",
        prefix_tokens=11,
        prompt_tokens=12,
        reused_tokens=10,
        cold_ttft_s=6,
        warm_ttft_s=2,
        identical=identical,
        bytes=99,
        reason="diverged: x",
    )
    assert result.ratio == 3
    assert steps == [(done, 12) for done in range(13)]
