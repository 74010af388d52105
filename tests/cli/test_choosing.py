"""Which entries ``ls``, ``rm`` and ``verify`` are about, in what order, and how ``ls --tree`` draws them."""

from __future__ import annotations

import json
import time

import pytest

from kvkeep import CacheStore, Entry

DAY = 86_400


@pytest.fixture
def several(store: CacheStore, tiny_llama, monkeypatch) -> dict[str, Entry]:
    """Ten days ago ``one`` (90 tokens) and ``two`` (300), and ``fork`` (120), which has 80 of ``two``.

    Two days ago ``one`` was used three times.
    """
    ids = store.read_ids(store.entry("two").key).tolist()
    fork = store.bind(tiny_llama).warm([*ids[:80], *range(3, 43)], name="fork")
    assert (fork.start, fork.end, fork.parent) == (80, 120, store.entry("two").key)
    now = time.time()
    line = {"hits": 3, "misses": {}, "uses": {store.entry("one").key: [3, int(now) + 8 * DAY]}}
    (store.path / "journal").mkdir(exist_ok=True)
    (store.path / "journal" / "1-ab.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(time, "time", lambda: now + 10 * DAY)
    return {name: store.entry(name) for name in ("one", "two", "fork")}


def listed(result) -> list[str]:
    assert (result.exit_code, result.stderr) == (0, "")
    return [name for row in json.loads(result.stdout) for name in row["names"]]


def left(store) -> list[str]:
    return sorted(name for entry in CacheStore(store.path).entries() for name in entry.names)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--filter", "tokens>100"], ["fork", "two"]),
        (["--filter", "tokens >= 90", "--filter", "tokens<=120"], ["fork", "one"]),
        (["--filter", "tokens=300"], ["two"]),
        (["--filter", "size>100kB"], ["two"]),
        (["--filter", "size<0.1MB"], ["fork", "one"]),
        (["--filter", "size>1GB"], []),
        (["--filter", "accessed>7d"], ["fork", "two"]),
        (["--filter", "accessed<3d"], ["one"]),
        (["--filter", "created>240h"], ["fork", "one", "two"]),
        (["--filter", "created<1.5w"], ["fork", "one", "two"]),
        (["--filter", "hits=0"], ["fork", "two"]),
        (["--filter", "hits>2"], ["one"]),
        (["--name", "t*"], ["two"]),
        (["--name", "one", "--name", "f*"], ["fork", "one"]),
        (["--name", "o*", "--filter", "tokens>100"], []),
        (["--model", "0000"], []),
    ],
    ids=" ".join,
)
def test_filters(several, kvkeep, words, names):
    assert sorted(listed(kvkeep("ls", "--format", "json", *words))) == names


def test_the_model_by_its_first_digits(several, kvkeep, store, tiny_mistral):
    other = store.bind(tiny_mistral).warm(list(range(3, 40)), name="other")
    assert listed(kvkeep("ls", "--format", "json", "--model", other.identity.model[:8])) == ["other"]
    assert "other" not in listed(kvkeep("ls", "--format", "json", "--model", several["one"].identity.model[:8]))


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("tokens", ["two", "fork", "one"]),
        ("tokens:asc", ["one", "fork", "two"]),
        ("size", ["two", "one", "fork"]),
        ("name", ["fork", "one", "two"]),
        ("name:desc", ["two", "one", "fork"]),
    ],
)
def test_sorting(several, kvkeep, field, names):
    assert listed(kvkeep("ls", "--format", "json", "--sort", field)) == names
    assert [line.split()[-1] for line in kvkeep("ls", "--sort", field).stdout.splitlines()[1:]] == names


def test_sorting_by_use(several, kvkeep):
    for field in ("hits", "accessed"):
        assert listed(kvkeep("ls", "--format", "json", "--sort", field))[0] == "one"
        assert listed(kvkeep("ls", "--format", "json", "--sort", f"{field}:asc"))[-1] == "one"
    header, first, *_ = kvkeep("ls", "--sort", "hits").stdout.splitlines()
    assert header.split() == ["KEY", "FROM", "TOKENS", "SIZE", "CREATED", "ACCESSED", "HITS", "MODEL", "NAMES"]
    day = time.strftime("%Y-%m-%d", time.localtime(time.time() - 2 * DAY))
    assert first.split()[-5] == day
    assert first.split()[-3:] == ["3", several["one"].identity.model[:8], "one"]


def test_ls_says_how_many_of_how_many(several, kvkeep, store):
    result = kvkeep("ls", "--name", "one")
    size = f"{several['one'].nbytes / 1000:.1f} kB"
    assert result.stderr == f"1 entry of 3, {size} in {store.path}\n"
    assert kvkeep("ls", "--name", "nobody").stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--filter", "size"],
        ["--filter", "size>much"],
        ["--filter", "accessed>7"],
        ["--filter", "accessed>1GB"],
        ["--filter", "tokens>1.5"],
        ["--filter", "colour=red"],
        ["--sort", "colour"],
        ["--sort", "size:up"],
    ],
    ids=" ".join,
)
def test_what_is_no_condition(several, kvkeep, store, words):
    for command in (["ls"], ["verify"], ["rm", "--yes"]):
        result = kvkeep(*command, *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"Invalid value for '{words[0]}'" in result.stderr
        assert repr(words[1]) in result.stderr
    assert left(store) == ["fork", "one", "two"]


# --- rm and verify ---


def test_rm_of_what_was_not_used(several, kvkeep, store):
    looked = kvkeep("rm", "--filter", "accessed>7d", "--dry-run")
    assert [line.split()[3] for line in looked.stdout.splitlines()] == ["(fork)", "(two)"]
    assert left(store) == ["fork", "one", "two"]
    asked = kvkeep("rm", "--filter", "accessed>7d", stdin="n\n")
    assert (asked.exit_code, left(store)) == (1, ["fork", "one", "two"])
    assert kvkeep("rm", "--filter", "accessed>7d", "--yes").exit_code == 0
    assert left(store) == ["one"]


def test_rm_leaves_what_is_pinned_unless_it_is_named(several, kvkeep, store):
    store.name(several["one"], "one", pin=True)
    result = kvkeep("rm", "--filter", "tokens<100", "--yes")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "removed 0 entries, 0 B\n")
    assert left(store) == ["fork", "one", "two"]
    assert kvkeep("rm", "one", "two", "--filter", "tokens<100", "--yes").exit_code == 0
    assert left(store) == ["fork", "two"]


def test_rm_by_filter_refuses_what_others_continue(several, kvkeep, store):
    result = kvkeep("rm", "--filter", "tokens=300", "--yes")
    assert (result.exit_code, result.stdout) == (5, "")
    assert left(store) == ["fork", "one", "two"]
    assert kvkeep("rm", "--filter", "tokens=300", "--cascade", "--yes").exit_code == 0
    assert left(store) == ["one"]


def test_rm_needs_something_to_go_by(several, kvkeep, store):
    assert kvkeep("rm", "--sort", "size", "--yes").exit_code == 2
    assert kvkeep("rm", "--namespace", "", "--name", "one", "--yes").exit_code == 2
    assert left(store) == ["fork", "one", "two"]


def test_verify_checks_those_that_are_left_in_order(several, kvkeep):
    def names(*words: str) -> list[str]:
        result = kvkeep("verify", *words)
        assert result.exit_code == 0
        return [line.split()[2].strip("()") for line in result.stdout.splitlines()]

    assert names("--name", "one") == ["one"]
    assert names("--name", "fork") == ["two", "fork"]  # with what it continues, first
    assert names("--sort", "tokens") == ["two", "fork", "one"]
    assert names("--sort", "hits")[0] == "one"


# --- the tree ---


def test_the_tree_shows_what_is_shared(store, kvkeep, tiny_llama):
    kv = store.bind(tiny_llama)
    ids = [11 * n % 300 + 3 for n in range(260)]
    for number, tokens in enumerate((100, 180, 260)):
        kv.warm(ids[:tokens], name=f"turn{number}")
    kv.warm([*ids[:100], *range(3, 53)], name="fork")
    result = kvkeep("ls", "--tree", "--name", "turn*", "--name", "fork", "--sort", "name:desc")
    keys = {name: store.entry(name).key[:12] for name in ("turn0", "turn1", "turn2", "fork")}
    lines = result.stdout.splitlines()[1:]
    assert [line.split("  ")[0] for line in lines] == [
        keys["turn0"],
        f"├─{keys['turn1']}",
        f"│ └─{keys['turn2']}",
        f"└─{keys['fork']}",
    ]
    assert [line.split()[-1] for line in lines[:2]] == ["turn0", "turn1"]
    assert result.stderr.splitlines()[1] == "380 tokens of them are stored once and shared"  # 100 + 180 + 100
    assert "├" not in kvkeep("ls").stdout
