from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvkeep import CacheStore
from kvkeep.bench.machine import cpu_model, facts
from kvkeep.bench.population import LAYERS, TOKENS, entry_ids, made_up_identity, populate
from kvkeep.bench.results import Result
from kvkeep.bench.rows import Row
from kvkeep.bench.run import run_bench
from kvkeep.bench.scratch import scratch_directory
from kvkeep.bench.sizes import FULL, QUICK, Sizes, Sweep
from kvkeep.bench.timing import medians
from kvkeep.cli import main
from kvkeep.keys import TokenIds
from kvkeep.prefixes import Prefix

TINY = Sizes(
    tokens=300,
    puts=2,
    loads=2,
    cold_loads=2,
    entries=20,
    lookup_tokens=2048,
    lookups=2,
    rebuilds=1,
    matrices=2,
    hashes=2,
    checks=3,
    generate_tokens=64,
    generates=2,
    starts=1,
)
NAMES = [
    "put",
    "load",
    "load, disk cold",
    "verification",
    "fingerprint",
    "identity check",
    "guard",
    "copies of the prefix",
    "miss",
    "import",
    "start",
    "lookup",
    "rebuild",
]


def quiet(name: str, done: int, total: int) -> None:
    pass


def row(**changes: object) -> Row:
    known = {"name": "a", "figure": 0.7, "unit": "ratio", "bar": 0.7, "at": "least", "compared": "this to that"}
    return Row(**{**known, **changes})  # type: ignore[arg-type]


# --- a whole run ---


def test_every_row_has_a_figure_its_sizes_and_the_directory_is_gone(tmp_path: Path):
    steps: dict[str, list[tuple[int, int]]] = {}
    rows = run_bench(
        TINY, parent=tmp_path, progress=lambda name, done, total: steps.setdefault(name, []).append((done, total))
    )
    assert list(tmp_path.iterdir()) == []
    found = {one.name: one for one in rows}
    assert list(found) == NAMES
    assert found["import"].figure == 0  # nothing heavy is loaded
    assert found["copies of the prefix"].figure == 0
    none_or_any = ("import", "guard", "copies of the prefix", "load, disk cold")  # not every system forgets pages
    assert all(
        one.figure is not None and math.isfinite(one.figure) and one.figure > 0
        for one in rows
        if one.name not in none_or_any
    )
    assert {name: (one.at, one.bar) for name, one in found.items() if name != "miss"} == {
        "put": ("least", 0.7),
        "load": ("least", 0.8),
        "load, disk cold": ("least", 0.9),
        "verification": ("most", 1.25),
        "fingerprint": ("least", 0.8),
        "identity check": ("most", 2),
        "copies of the prefix": ("most", 0),
        "guard": ("most", 5),
        "import": ("most", 0),
        "start": ("most", 6),
        "lookup": ("most", 1),
        "rebuild": ("most", 3),
    }
    assert found["miss"].at == "most"
    assert found["miss"].bar >= 1.01
    for name, words in {
        "put": "14 MB",
        "load": "page cache warm, 14 MB",
        "identity check": "300 tensors",
        "miss": "64 tokens and 1 new one",
        "lookup": "2,048 tokens, 20 entries of 1,600 (the bar is meant for 10,000), made up",
        "rebuild": "20 files of 30 layers and 1,600 tokens, page cache warm, times 500;",
    }.items():
        assert words in found[name].compared
    assert steps["put"] == [(1, 2), (2, 2)]
    assert steps["start"] == [(1, 1)]


def test_the_directory_is_gone_when_a_run_ends_early(tmp_path: Path):
    seen: list[list[Path]] = []

    def stop(name: str, done: int, total: int) -> None:
        seen.append(list(tmp_path.glob("bench-*/disk/entries")))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(TINY, parent=tmp_path, progress=stop)
    assert [len(found) for found in seen] == [1]
    assert list(tmp_path.iterdir()) == []


def test_the_directory_is_in_the_users_cache_unless_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with scratch_directory(None) as path:
        assert path.parent == tmp_path / "cache" / "kvkeep"
    assert list(path.parent.iterdir()) == []
    with scratch_directory(tmp_path) as path:
        assert path.parent == tmp_path
    assert not path.exists()


# --- rows ---


@pytest.mark.parametrize(
    ("at", "figure", "reached"),
    [
        ("least", 0.71, True),
        ("least", 0.7, True),
        ("least", 0.69, False),
        ("most", 0.69, True),
        ("most", 0.7, True),
        ("most", 0.71, False),
    ],
)
def test_reached_is_told_by_figure_and_bar(at: str, figure: float, reached: bool):
    assert row(at=at, figure=figure).reached is reached


def test_a_row_as_json():
    assert row(figure=0.123456, bar=1.013333, at="most").to_json() == {
        "name": "a",
        "figure": 0.1235,
        "unit": "ratio",
        "bar": 1.0133,
        "at": "most",
        "reached": True,
        "compared": "this to that",
    }


# --- parts ---


def test_the_sides_take_turns_and_each_is_told_by_its_median(monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []
    now = 0.0
    takes = {"a": iter([50.0, 1.0, 9.0, 2.0]), "b": iter([50.0, 3.0, 4.0, 5.0])}

    def side(name: str) -> None:
        nonlocal now
        log.append(name)
        now += next(takes[name])

    def between() -> None:
        nonlocal now
        log.append("|")
        now += 1000

    monkeypatch.setattr("time.perf_counter", lambda: now)
    found = medians("x", lambda: side("a"), lambda: side("b"), times=3, progress=quiet, between=between)
    assert found == [2, 4]
    assert "".join(log) == "a|b|" + "a|b|" + "b|a|" + "a|b|"


def test_made_up_entries_are_whole_and_can_be_found(tmp_path: Path):
    store = CacheStore(tmp_path / "store")
    populate(store.path, made_up_identity(), store.namespace_digest, entries=7)
    entries = store.entries()
    assert [entry.tokens for entry in entries] == [TOKENS] * 7
    assert {store.verify(entry.key) for entry in entries} == {None}
    assert len(store.header(entries[0].key).meta.layers) == LAYERS
    for number in range(7):
        match = store.find(made_up_identity(), Prefix(TokenIds.of([*entry_ids(number), 5, 5])), limit=TOKENS + 1)
        assert match.entry is not None
        assert store.read_ids(match.entry.key).tolist() == entry_ids(number)


def test_ids_of_made_up_entries_differ_and_share_what_they_say():
    ids = [entry_ids(number) for number in range(FULL.entries)]
    assert len({tuple(one[1024:]) for one in ids}) == FULL.entries
    assert {len(one) for one in ids} == {TOKENS}
    assert ids[0][:1280] == ids[2][:1280] != ids[3][:1280]


def test_the_machine_is_named(tmp_path: Path):
    assert set(facts()) == {"date", "cores", "cpu", "system", "python", "torch", "transformers", "kvkeep"}
    source = tmp_path / "cpuinfo"
    source.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: a b\n")
    assert cpu_model(source) == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "missing") != ""


# --- the command ---


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sizes, Path | None]]:
    """Two rows instead of a run, one of them missed; and what the run was asked for."""
    asked: list[tuple[Sizes, Path | None]] = []

    def run(sizes: Sizes, *, parent: Path | None, progress: object) -> list[Row]:
        asked.append((sizes, parent))
        return [row(name="good", figure=0.9), row(name="bad", figure=3.14159, unit="ms", bar=2.0, at="most")]

    def compare(subjects: object, sweep: Sweep, **options: object) -> list[Result]:
        asked_to_compare.append(sweep)
        tiny = {"model": "tiny", "weights": "random weights", "prefix_tokens": 512, "prompt_tokens": 524}
        return [
            Result(**tiny, way="in memory, shared", seconds=(0.1,), ratio=1.0, disk_bytes=0, same_tokens=True),
            Result(**tiny, way="llama-cpp", note="no interpreter was named for it"),
        ]

    asked_to_compare: list[Sweep] = []
    monkeypatch.setattr("kvkeep.bench.run.run_bench", run)
    monkeypatch.setattr("kvkeep.bench.compare.compare", compare)
    return asked


def test_the_tables_and_what_was_missed(made_up: list[tuple[Sizes, Path | None]], tmp_path: Path):
    result = CliRunner().invoke(main, ["bench", "--dir", str(tmp_path)])
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[:3] == [
        ["NAME", "FIGURE", "BAR", "REACHED", "COMPARED"],
        ["good", "0.90x", ">=", "0.70x", "reached", "this", "to", "that"],
        ["bad", "3.14", "ms", "<=", "2", "ms", "missed", "this", "to", "that"],
    ]
    assert [line[:3] for line in lines[3:5]] == [["first", "token,", "read"], ["first", "token,", "mapped"]]
    ways = [" ".join(line) for line in lines[5:]]
    assert any("in memory, shared 100.0 ms 1.00x" in line and "yes" in line for line in ways)
    assert any("llama-cpp not measured" in line and "no interpreter was named for it" in line for line in ways)
    first, *rest = result.stderr.splitlines()
    assert first.startswith("date 2")
    assert rest == ["missed: bad: 3.14 ms, <= 2 ms"]
    assert made_up == [(FULL, tmp_path)]


def test_json_has_the_machine_the_bars_and_the_ways(made_up: list[tuple[Sizes, Path | None]], tmp_path: Path):
    chart = tmp_path / "chart.png"
    result = CliRunner().invoke(main, ["bench", "--quick", "--plot", str(chart), "--format", "json"])
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert set(told) == {"machine", "command", "quick", "bars", "ways"}
    assert (told["quick"], told["machine"]) == (True, facts())
    assert told["command"] == f"kvkeep bench --quick --plot {chart} --format json"
    bars = {one["name"]: one["reached"] for one in told["bars"]}
    assert bars == {"good": True, "bad": False, "first token, read": None, "first token, mapped": None}
    assert [(one["way"], one["first_token_s"]) for one in told["ways"]] == [
        ("in memory, shared", 0.1),
        ("llama-cpp", None),
    ]
    assert chart.read_bytes()[:4] == b"\x89PNG"
    assert made_up == [(QUICK, None)]


def test_a_directory_that_is_not_there_is_a_wrong_request(tmp_path: Path):
    assert CliRunner().invoke(main, ["bench", "--dir", str(tmp_path / "missing")]).exit_code == 2
