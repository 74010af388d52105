"""How the command shows, removes and checks entries that continue others."""

from __future__ import annotations

import json

import pytest

from kvkeep import CacheStore, Entry

TURNS = [100, 180, 260]


@pytest.fixture
def chat(store: CacheStore, tiny_llama) -> dict[str, Entry]:
    """A conversation saved after each turn, a fork of its first turn, and beside it ``one`` and ``two``."""
    kv = store.bind(tiny_llama)
    ids = [11 * n % 300 + 3 for n in range(TURNS[-1])]
    saved = {f"turn{number}": kv.warm(ids[:tokens], name=f"turn{number}") for number, tokens in enumerate(TURNS)}
    saved["fork"] = kv.warm([*ids[:100], *range(3, 53)], name="fork")
    assert [entry.start for entry in saved.values()] == [0, 100, 180, 100]
    return saved


def path_of(store, entry):
    return store.path / "entries" / entry.key[:2] / f"{entry.key}.safetensors"


def names_left(store):
    return sorted(name for entry in CacheStore(store.path).entries() for name in entry.names)


def test_ls_shows_what_continues_what(store, chat, kvkeep):
    result = kvkeep("ls")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["KEY", "FROM", "TOKENS", "SIZE", "CREATED", "MODEL", "NAMES"]
    rows = {line.split()[-1]: line for line in lines[1:]}
    for name, depth in {"one": 0, "two": 0, "turn0": 0, "turn1": 1, "turn2": 2, "fork": 1}.items():
        entry = store.entry(name)
        assert rows[name].startswith("  " * depth + entry.key[:12] + " ")
        assert rows[name].split()[1:3] == [str(entry.start), str(entry.end)]
    order = list(rows)
    assert order.index("turn2") == order.index("turn1") + 1
    assert sorted(order[order.index("turn0") + 1 :][:3]) == ["fork", "turn1", "turn2"]
    assert result.stderr.count("\n") == 1
    flat = json.loads(kvkeep("ls", "--format", "json").stdout)
    assert [row["key"] for row in flat] == [entry.key for entry in store.entries()]
    shown = next(row for row in flat if row["names"] == ["turn2"])
    assert (shown["start"], shown["end"], shown["parent"]) == (180, 260, chat["turn1"].key)


def test_ls_of_what_has_lost_its_parent(store, chat, kvkeep):
    CacheStore(store.path)._remove(chat["turn1"].key)
    result = kvkeep("ls")
    assert next(line for line in result.stdout.splitlines() if line.endswith("turn2")).startswith(chat["turn2"].key[:8])
    assert result.stderr.splitlines()[1:] == ["1 entry continues what is gone: `kvkeep gc` removes what is lost"]


def test_rm_refuses_what_others_continue(store, chat, kvkeep):
    before = names_left(store)
    for more in (["--yes"], ["--dry-run"]):
        result = kvkeep("rm", "turn0", *more)
        assert (result.exit_code, result.stdout) == (5, "")
        *shown, last = result.stderr.splitlines()
        assert sorted(line.split()[1] for line in shown) == ["(fork)", "(turn1)", "(turn2)"]
        assert last.startswith("kvkeep: 3 entries continue what is to be removed, and would be lost (")
        assert all(chat[name].key[:12] in last for name in ("fork", "turn1", "turn2"))
        assert last.endswith("name them as well, or give --cascade")
        assert names_left(store) == before


def test_rm_with_what_continues_it(store, chat, kvkeep):
    looked = kvkeep("rm", "turn1", "--cascade", "--dry-run")
    assert [line.split()[3] for line in looked.stdout.splitlines()] == ["(turn2)", "(turn1)"]
    result = kvkeep("rm", "turn1", "--cascade", "--yes")
    assert result.exit_code == 0
    assert [line.split()[2] for line in result.stdout.splitlines()] == ["(turn2)", "(turn1)"]
    assert result.stderr.startswith("removed 2 entries, ")
    assert names_left(store) == ["fork", "one", "turn0", "two"]


def test_rm_of_parents_and_children_together_needs_no_cascade(store, chat, kvkeep):
    result = kvkeep("rm", "turn0", "turn1", "fork", "turn2", "--yes", "--format", "json")
    assert result.exit_code == 0
    order = [name for row in json.loads(result.stdout) for name in row["names"]]
    assert order.index("turn2") < order.index("turn1") < order.index("turn0")
    assert order.index("fork") < order.index("turn0")
    assert names_left(store) == ["one", "two"]


def test_inspect_shows_the_chain(store, chat, kvkeep):
    shown = json.loads(kvkeep("inspect", "turn1", "--format", "json").stdout)
    assert shown["chain"] == [
        {"key": chat[name].key, "start": chat[name].start, "end": chat[name].end, "bytes": chat[name].nbytes}
        for name in ("turn0", "turn1")
    ]
    assert (shown["gone"], shown["continued_by"]) == (None, [chat["turn2"].key])
    assert shown["ids"]["count"] == 80
    assert shown["recorded"]["parent"] == store.header(chat["turn0"].key).meta.digests
    lines = kvkeep("inspect", "turn1").stdout.splitlines()
    chain = [line.split() for line in lines if line.startswith("chain ")]
    assert [line[1:4] for line in chain] == [[chat["turn0"].key, "[0,", "100),"], [chat["turn1"].key, "[100,", "180),"]]
    assert [line.split()[-1] for line in lines if line.startswith("continued by ")] == [chat["turn2"].key]
    CacheStore(store.path)._remove(chat["turn0"].key)
    assert json.loads(kvkeep("inspect", "turn1", "--format", "json").stdout)["gone"] == chat["turn0"].key
    assert f"{chat['turn0'].key} is gone" in kvkeep("inspect", "turn1").stdout


def test_verify_of_an_entry_checks_what_it_continues(store, chat, kvkeep):
    result = kvkeep("verify", "turn2")
    assert result.exit_code == 0
    assert [line.split()[2] for line in result.stdout.splitlines()] == ["(turn0)", "(turn1)", "(turn2)"]
    path = path_of(store, chat["turn0"])
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = kvkeep("verify", "turn2")
    assert result.exit_code == 5
    first, second, third = result.stdout.splitlines()
    assert first.startswith(f"damaged  {chat['turn0'].key[:12]} (turn0): ")
    assert second.endswith(f"(turn1): the entry {chat['turn0'].key} that it continues is gone")
    assert third.endswith(f"(turn2): the entry {chat['turn0'].key} that it continues is gone")
    assert not path.exists()
