import json

import pytest

from kvkeep import CacheStore


def left(store):
    return sorted(entry.names for entry in CacheStore(store.path).entries())


@pytest.fixture
def keys(both):
    return [entry.key for entry in both]


@pytest.mark.parametrize("given", ["name", "key", "start", "name and key"])
def test_rm(store, kvkeep, keys, given):
    key = keys[0]
    wanted = {"name": ["one"], "key": [key], "start": [key[:4]], "name and key": ["one", key]}[given]
    size = store.entry("one").nbytes
    result = kvkeep("rm", *wanted, "--yes")
    assert result.exit_code == 0
    assert result.stdout == f"removed {key[:12]} (one)  90 tokens, {size / 1000:.1f} kB\n"
    assert result.stderr == f"removed 1 entry, {size / 1000:.1f} kB\n"
    assert left(store) == [("two",)]
    assert not (store.path / "entries" / key[:2] / f"{key}.safetensors").exists()
    assert [p.name for p in (store.path / "refs").iterdir()] == ["two.json"]


def test_rm_of_several(store, kvkeep, keys):
    result = kvkeep("rm", "two", "one", "-y", "--format", "json")
    assert [row["key"] for row in json.loads(result.stdout)] == [keys[1], keys[0]]
    assert left(store) == []


def test_dry_run(store, kvkeep, keys):
    result = kvkeep("rm", "one", "two", "--dry-run")
    assert result.exit_code == 0
    assert [line[:25] for line in result.stdout.splitlines()] == [f"would remove {key[:12]}" for key in keys]
    assert result.stderr.endswith("; nothing was removed\n")
    assert left(store) == [("one",), ("two",)]


def test_if_one_is_not_there_nothing_is_removed(store, kvkeep):
    result = kvkeep("rm", "one", "three", "--yes")
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr.startswith("kvkeep: no entry has the key or name 'three'; ")
    assert left(store) == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("answer", "exit_code", "names"),
    [("y\n", 0, [("two",)]), ("n\n", 1, [("one",), ("two",)]), ("\n", 1, [("one",), ("two",)])],
)
def test_it_asks(store, kvkeep, answer, exit_code, names):
    result = kvkeep("rm", "one", stdin=answer)
    assert result.exit_code == exit_code
    assert "Remove 1 entry, " in result.stderr
    assert bool(result.stdout) == (exit_code == 0)
    assert left(store) == names


def test_nobody_answers(store, kvkeep):
    result = kvkeep("rm", "one", stdin="")
    assert (result.exit_code, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last == "kvkeep: nothing was removed, since nobody answered the question: give --yes"
    assert left(store) == [("one",), ("two",)]


def test_rm_of_nothing_is_a_wrong_request(store, kvkeep):
    assert kvkeep("rm", "--yes").exit_code == 2


def test_rm_of_a_namespace(store, kvkeep, both):
    assert kvkeep("rm", "one", "--namespace", "x").exit_code == 2
    result = kvkeep("rm", "--namespace", "nobody", "--yes")
    assert (result.exit_code, result.stderr) == (0, "removed 0 entries, 0 other files, 0 B\n")
    result = kvkeep("rm", "--namespace", "", stdin="n\n")
    assert result.exit_code == 1
    assert "Remove all of the namespace '': 2 entries, 2 other files, " in result.stderr
    assert left(store) == [("one",), ("two",)]
    removed = json.loads(kvkeep("rm", "--namespace", "", "--yes", "--format", "json").stdout)
    assert sorted((one["kind"], one["name"]) for one in removed) == sorted(
        [("entry", entry.key) for entry in both] + [("name", "one"), ("name", "two")]
    )
    assert left(store) == []
