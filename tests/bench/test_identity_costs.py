"""What it costs to know that KV is right, printed at the end of every run: ratios and times of that run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvkeep.bench.identity import measure_identity
from kvkeep.bench.sizes import QUICK

SIZES = replace(QUICK, matrices=24, hashes=5, checks=30, generates=10)
ROOM, ROOM_OF_TIMES = 3, 10
"""A busy machine may take so many times what is asked for, of bare times above all: this finds what is far too slow;
``make bench`` measures on its own."""


def test_the_costs_of_identity(tmp_path: Path, figures: list[str]) -> None:
    rows = {row.name: row for row in measure_identity(tmp_path, SIZES, lambda name, done, total: None)}
    assert list(rows) == ["fingerprint", "identity check", "guard"]
    figures += [f"{r.name}: {r.figure:.2f} {r.unit} (bar: at {r.at} {r.bar}): {r.compared}" for r in rows.values()]
    assert 0.8 / ROOM < rows["fingerprint"].figure < 2
    assert 0 < rows["identity check"].figure < 2.0 * ROOM_OF_TIMES
    assert rows["guard"].figure < 5.0 * ROOM_OF_TIMES
