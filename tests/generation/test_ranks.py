"""Ranks that run one model together reuse the same number of tokens, in the same number of passes: two real processes.

Whatever one of them lacks, no rank waits for another: all the processes of a test end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import run_elsewhere
from tiny_models import build_tiny

from kvkeep.ranks import Agreement, Offer, ranks_of

HERE = Path(__file__).parent
NOTHING = "ranks: there is nothing that every rank can reuse"


def run_both(program: str, tmp_path: Path, *arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    text = (HERE / program).read_text(encoding="utf-8")
    ranks = [(HERE.parent, tmp_path / "meet", rank, tmp_path / "stores", *arguments) for rank in range(2)]
    zero, one = (json.loads(printed.splitlines()[-1]) for printed in run_elsewhere(text, *ranks))
    return zero, one


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_ranks_agree_on_what_they_reuse_before_any_pass(tmp_path: Path, name: str) -> None:
    zero, one = run_both("one_rank.py", tmp_path, name)
    for story, (reused, _, passes, same, _) in (*zero.items(), *one.items()):
        assert same, story  # the tokens of the control, whatever was reused
        if story not in {"two prompts", "alone", "one is wrong, and nobody agrees"}:
            assert (one[story][0], one[story][2]) == (reused, passes), story
    window = name == "mistral"  # no layer keeps the guard's row so long: it has a pass of its own
    hit, missed = [[1, 15] if window else [16], [45]]
    for story in ("both", "static"):
        assert zero[story][:3] == [29, None, [*hit, 1, 1]]
    for story, reason in {
        "one misses": "empty: nothing is stored",
        "one is damaged": "damaged: rows ",
        "one fails": "error: RuntimeError: no such luck",
        "one has an obstacle": "inputs: the attention mask hides tokens",
        "one is not guarded": NOTHING,
        "by itself": "empty: nothing is stored",  # generate itself asks FSDP and ZeRO-3 to go in step
    }.items():
        assert zero[story][:3] == [0, NOTHING, [*missed, 1, 1]], story
        assert one[story][1].startswith(reason)
    for story, shorter, longer in (("one is longer", one, zero), ("one is shorter", zero, one)):
        if name == "llama":
            assert longer[story][:3] == [23, "ranks: another rank can reuse 23 tokens", [22, 1, 1]]
            assert shorter[story][:2] == [23, None]
        else:  # a window that has moved on cannot be cut to what the other has
            assert longer[story][:3] == shorter[story][:3] == [0, NOTHING, [*missed, 1, 1]]
    assert zero["one is longer, static"][0] == zero["one is longer"][0]

    # One rank's guard says no, and both compute the prompt: in the same number of passes.
    assert zero["one is wrong"][:3] == [
        0,
        "guard: another rank computes another row than the stored one",
        [hit[0], 45, 1, 1],
    ]
    assert one["one is wrong"][1].endswith("the entry is set aside")
    alone = "one is wrong, and nobody agrees"
    assert (len(zero[alone][2]), len(one[alone][2])) == (len(hit) + 2, 4)  # what would leave ranks waiting
    assert (zero[alone][0], one[alone][0]) == (29, 0)

    # Each rank may have a prompt of its own; where one guard needs a pass, all run one.
    assert (zero["two prompts"][2], one["two prompts"][2]) == (
        ([1, 3, 1, 1], [1, 15, 1, 1]) if window else ([4, 1, 1], [16, 1, 1])
    )
    for story, code in {"two sequences": "batch", "in chunks": "mode"}.items():
        assert (zero[story][0], zero[story][1].partition(":")[0]) == (0, code)
    assert zero["alone"][:3] == [29, None, [*hit, 1, 1]]  # without synced_gpus there is nobody to ask
    assert "alone" not in one


@pytest.mark.parametrize("shared", ["tp", "fsdp"])
def test_ranks_that_share_a_model_are_served_alike(tmp_path: Path, shared: str) -> None:
    build_tiny("llama").save_pretrained(tmp_path / "model")
    zero, one = run_both("one_shard.py", tmp_path, shared, tmp_path / "model")
    for story in zero.keys() - {"loaded", "not warmed"}:
        assert zero[story][3], story
        assert one[story][3], story
        assert (zero[story][0], zero[story][2]) == (one[story][0], one[story][2]), story
    heads = 1 if shared == "tp" else 2
    assert zero["loaded"] == one["loaded"] == [30, [1, heads, 30, 16]]
    for story in ("shared", "warmed again"):
        assert zero[story][:3] == one[story][:3] == [29, None, [16, 1, 1]]
    assert zero["one misses"][:3] == [0, NOTHING, [45, 1, 1]]
    assert one["one misses"][1] == "empty: nothing is stored"
    assert zero["one is wrong"][2] == [16, 45, 1, 1]
    assert zero["one was changed"][0] == 0
    if shared == "tp":  # a name of the user's own vouches for weights that are never whole: there it is the guard
        assert one["one was changed"][1].startswith("identity: the model has changed, and other ranks run it, too")
        assert one["not warmed"] == one["one was changed"][1].removeprefix("identity: ")
        assert zero["not warmed"].startswith("another rank that runs this model cannot store")
        assert (
            zero["refreshed"][:2]
            == one["refreshed"][:2]
            == [0, "weights: this prefix is stored, but for other weights"]
        )
    assert zero["warmed anew"][:3] == one["warmed anew"][:3] == [32, None, [13, 1, 1]]


def test_whoever_computes_alone_has_no_ranks() -> None:
    model = build_tiny("llama")
    assert ranks_of(model, None) is None
    assert ranks_of(model, synced=True, ids=torch.ones(1, 2)) is None


class Told:
    """Ranks that answer what a test has them say."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers, self.asked = list(answers), list[list[int]]()

    def least(self, numbers: list[int]) -> list[int]:
        self.asked.append([int(one) for one in numbers])
        return self.answers.pop(0)

    def all(self, mine: bool) -> bool:
        return bool(self.least([mine])[0])


def test_an_agreement_ends_in_one_word_whatever_happens() -> None:
    told = Told([0, -29, 0, 0, 1])
    agreement = Agreement(told)  # type: ignore[arg-type]
    agreement.no_offer()  # what was to be offered failed
    agreement.no_offer()
    agreement.no_answer()
    assert told.asked == [[0, 0, 0, 1, 1]]

    told = Told([20, -29, 1, 0, 1], [20, -20, 1, 0, 0], [0])
    agreement = Agreement(told)  # type: ignore[arg-type]
    limits: list[int] = []

    def offer(at_most: int) -> Offer:
        limits.append(at_most)
        return Offer(min(29, at_most), watched=True)

    assert agreement.reach(offer, 44) == Offer(20, watched=True, apart=True)  # the other's guard needs a pass
    assert limits == [44, 20]
    agreement.no_answer()  # its pass failed: the others compute the prompt
    assert agreement.agrees(True)  # nobody waits for a second word
    assert told.asked[2:] == [[0]]

    told = Told([0, -29, 0, 0, 1])
    assert Agreement(told).reach(lambda at_most: Offer(at_most + 1), 29) == Offer()  # type: ignore[arg-type]
    assert told.asked == [[0, 0, 0, 1, 1]]  # more than was asked for is nothing
