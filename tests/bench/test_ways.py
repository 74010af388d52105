"""The ways to start from a prefix that `kvkeep bench` compares: all give the same tokens, and all are in the chart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.bench.bars import bars_of
from kvkeep.bench.first_token import measure_ways
from kvkeep.bench.forgetting import CAN_FORGET
from kvkeep.bench.plot import check_plot, draw
from kvkeep.bench.results import Result, ratios_to
from kvkeep.bench.sizes import QUICK_SWEEP
from kvkeep.bench.subjects import ANSWER, QUESTION, Opened, Subject
from kvkeep.bench.ways import REFERENCE
from kvkeep.errors import InvalidRequestError

SUBJECT = Subject(
    name="tiny",
    weights="random weights",
    shape={
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    },
)
LENGTHS = (40, 80)
WAYS = [
    "in memory, shared",
    "cold prefill",
    "StaticCache, deepcopy",
    "torch.load",
    "safetensors load_file",
    "kvkeep, resident",
    "kvkeep, page cache warm",
    *(["kvkeep, disk cold"] if CAN_FORGET else []),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    opened, sweep = Opened(SUBJECT), replace(QUICK_SWEEP, starts=2, decode_lengths=(80,))
    found: list[Result] = []
    for length in LENGTHS:
        folder = tmp_path_factory.mktemp("ways")
        found += measure_ways(SUBJECT, opened, length, folder, sweep, lambda name, done, total: None)
    return ratios_to(REFERENCE, found)


def test_every_way_gives_the_tokens_of_the_reference(results: list[Result]) -> None:
    assert [one.way for one in results] == WAYS * 2
    assert all(one.same_tokens for one in results)
    assert {(one.prefix_tokens, one.prompt_tokens) for one in results} == {(n, n + QUESTION) for n in LENGTHS}
    for one in results:
        assert len(one.seconds) == (1 if one.way == "cold prefill" else 2)
        assert one.ratio is not None and math.isfinite(one.ratio) and one.ratio > 0
        assert (one.ratio == 1) == (one.way == REFERENCE)
        assert (one.tokens_per_second is not None) == (one.prefix_tokens == 80)
        rows = 2 * 2 * 2 * one.prefix_tokens * 16 * 4  # layers, keys and values, heads, tokens, dim, bytes
        on_disk = one.way in ("torch.load", "safetensors load_file") or one.way.startswith("kvkeep")
        assert (one.disk_bytes or 0) >= rows if on_disk else one.disk_bytes == 0


def test_the_chart_has_every_series_and_its_labels(results: list[Result], tmp_path: Path) -> None:
    figure = draw(results, "2 cores")
    (panel,) = figure.axes
    assert "prefix" in panel.get_xlabel() and "token" in panel.get_xlabel()
    assert "first token" in panel.get_ylabel()
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}
    assert list(lines) == WAYS
    for way, points in lines.items():
        assert points == [[one.prefix_tokens, one.first_token] for one in results if one.way == way]
    texts = [
        text.get_text() for legend in [panel.get_legend(), *figure.legends] if legend for text in legend.get_texts()
    ]
    assert texts == WAYS
    figure.savefig(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


def test_a_chart_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"ends in \.png"):
        check_plot(tmp_path / "chart.pdf")
    with pytest.raises(InvalidRequestError, match="there is no folder"):
        check_plot(tmp_path / "none" / "chart.png")


def test_bars_say_what_was_not_measured(results: list[Result]) -> None:
    read, mapped = bars_of(results)
    assert (read.figure, mapped.figure) == (None, None)
    assert "not measured" in read.compared and "not measured" in mapped.compared
    long = [replace(one, prefix_tokens=2048) for one in results if one.prefix_tokens == 80]
    read, _ = bars_of(long)
    assert read.figure == next(one.ratio for one in long if one.way == "kvkeep, page cache warm")
    assert ANSWER == 33
