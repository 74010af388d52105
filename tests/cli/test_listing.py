import json
import re
import shutil
import time
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from kvkeep import __version__


def test_ls(store, both, kvkeep):
    result = kvkeep("ls")
    lines = result.stdout.splitlines()
    assert lines[0] == "KEY           TOKENS     SIZE  CREATED           MODEL     NAMES"
    expected = {}
    for entry, tokens, size in zip(
        both, ("    90", "   300"), (f"{both[0].nbytes / 1000:.1f}", f"{both[1].nbytes / 1000:.0f}"), strict=True
    ):
        moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
        expected[entry.key] = (
            f"{entry.key[:12]}  {tokens}  {size:>4} kB  {moment}  {entry.identity.model[:8]}  {entry.names[0]}"
        )
    assert lines[1:] == [expected[entry.key] for entry in store.entries()]
    total = both[0].nbytes + both[1].nbytes
    assert result.stderr == f"2 entries, {total / 1000:.0f} kB in {store.path}\n"


def test_ls_of_an_empty_store(kvkeep, tmp_path):
    kvkeep("init")
    result = kvkeep("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"0 entries, 0 B in {tmp_path / 'store'}\n"
    assert kvkeep("ls", "--format", "json").stdout == "[]\n"


def test_ls_as_json(store, both, kvkeep):
    _, two = both
    result = kvkeep("ls", "--format", "json")
    assert result.stderr == ""
    rows = json.loads(result.stdout)
    assert [row["key"] for row in rows] == [entry.key for entry in store.entries()]
    assert next(row for row in rows if row["key"] == two.key) == {
        "key": two.key,
        "names": ["two"],
        "tokens": 300,
        "start": 0,
        "end": 300,
        "parent": None,
        "bytes": (store.path / "entries" / two.key[:2] / f"{two.key}.safetensors").stat().st_size,
        "created": two.created,
        "model": two.identity.model,
        "tokenizer": two.identity.tokenizer,
        "namespace": two.namespace,
        "hits": 0,
        "accessed": two.created,
    }


def test_an_entry_without_a_name_and_one_with_two(store, both, kvkeep):
    one, two = both
    store.name(one, "a.second-name")
    (store.path / "refs" / "two.json").unlink()
    lines = {line[:12]: line for line in kvkeep("ls").stdout.splitlines()}
    assert lines[one.key[:12]].endswith("  a.second-name, one")
    assert lines[two.key[:12]].endswith(f"  {two.identity.model[:8]}")


def test_inspect_as_json(store, both, kvkeep):
    _, two = both
    key = store.header(two.key).meta.key
    assert json.loads(kvkeep("inspect", "two", "--format", "json").stdout) == {
        "key": two.key,
        "names": ["two"],
        "format": 1,
        "form": "exact",
        "tokens": 300,
        "start": 0,
        "end": 300,
        "parent": None,
        "bytes": two.nbytes,
        "created": two.created,
        "creator": {"kvkeep": __version__, "torch": version("torch"), "transformers": version("transformers")},
        "identity": {
            "model": two.identity.model,
            "weights": two.identity.weights,
            "config": two.identity.config,
            "adapters": None,
            "dtypes": two.identity.dtypes,
            "tokenizer": two.identity.tokenizer,
        },
        "namespace": two.namespace,
        "prefix": key.prefix,
        "media": 0,
        "recorded": dict(store.header(two.key).meta.recorded),
        "layers": [
            {
                "kind": "full",
                "count": 3,
                "first": 0,
                "rows": 300,
                "scalars": {},
                "tensors": {"keys": "rows F32 2x16", "values": "rows F32 2x16"},
            }
        ],
        "ids": {
            "count": 300,
            "first": [3, 10, 17, 24, 31, 38, 45, 52],
            "last": [247, 254, 261, 268, 275, 282, 289, 296],
        },
        "chain": [{"key": two.key, "start": 0, "end": 300, "bytes": two.nbytes}],
        "gone": None,
        "continued_by": [],
    }


def test_inspect_for_people(both, kvkeep):
    one, _ = both
    result = kvkeep("inspect", one.key[:4])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    lines = {label: value.strip() for label, value in lines.items()}
    assert lines["key"] == one.key
    assert lines["names"] == "one"
    assert lines["tokens"] == "90"
    assert lines["weights"] == one.identity.weights
    assert re.fullmatch(r"\d\d lines, shown with --format json", lines["recorded config"])
    assert lines["layers"] == "3 x full, rows [0, 90): keys rows F32 2x16, values rows F32 2x16"
    assert lines["ids"] == "90: 3 4 5 6 7 8 9 10 ... 85 86 87 88 89 90 91 92"


def test_inspect_counts_alike_layers_together(store, kvkeep, tiny_gemma3):
    store.bind(tiny_gemma3).warm(list(range(3, 63)), name="windows")
    layers = json.loads(kvkeep("inspect", "windows", "--format", "json").stdout)["layers"]
    assert [(layer["kind"], layer["count"], layer["scalars"].get("window")) for layer in layers] == [
        ("sliding", 3, 8),
        ("full", 1, None),
    ]
    assert layers[0]["first"] > layers[1]["first"] == 0
    assert layers[0]["first"] + layers[0]["rows"] == 60


@pytest.mark.parametrize("wanted", ["nobody", "ffffffff"])
def test_inspect_of_what_is_not_there(store, kvkeep, wanted):
    result = kvkeep("inspect", wanted)
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr.startswith(f"kvkeep: no entry has the key or name '{wanted}'; ")
    assert result.stderr.count("\n") == 1


def test_inspect_of_a_damaged_entry(store, both, kvkeep):
    one, _ = both
    path = store.path / "entries" / one.key[:2] / f"{one.key}.safetensors"
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    result = kvkeep("inspect", "one")
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr.startswith("kvkeep: ")
    assert result.stderr.count("\n") == 1


def test_stats(store, kvkeep, tiny_llama, tmp_path):
    kv = store.bind(tiny_llama)
    prompt = [*range(3, 93), 5, 6, 7]
    kv.generate(prompt, max_new_tokens=1, do_sample=False)
    kv.generate(prompt, max_new_tokens=1, do_sample=False)
    kv.generate([9, 9, 9, 9], max_new_tokens=1, do_sample=False)
    store.journal.flush()
    total = sum(entry.nbytes for entry in store.entries())
    stats = json.loads(kvkeep("stats", "--format", "json").stdout)
    seconds = [stats.pop(f"{what}_seconds") for what in ("load", "prefill", "store")]
    assert all(0 < value < 60 for value in seconds)
    assert stats == {
        "entries": 2,
        "bytes": total,
        "hits": 2,
        "misses": {"prefix": 1},
        "reused_tokens": 178,  # one token a hit is the guard's
        "prefills": 2,
        "prefilled_tokens": 390,
        "stored": 2,
        "stored_bytes": total,
        "damaged": 0,
    }
    lines = kvkeep("stats").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "entries",
        "on disk",
        "hits",
        "misses",
        "",
        "tokens reused",
        "prefills",
        "tokens prefilled",
        "entries written",
        "entries damaged",
    ]
    assert lines[2:5] == ["hits              2", "misses            1", "  prefix          1"]
    assert lines[5].startswith("tokens reused     178 in ")


def free(monkeypatch, nbytes):
    usage = SimpleNamespace(total=2 * nbytes, used=nbytes, free=nbytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_init(kvkeep, tmp_path, monkeypatch):
    free(monkeypatch, 0)
    store = tmp_path / "store"
    first = kvkeep("init")
    assert (first.exit_code, first.stdout) == (0, "")
    assert first.stderr == f"made a store at {store}; `kvkeep warm` warms its warm.toml\n"
    assert {"store.json", "CACHEDIR.TAG", ".gitignore", "FORMAT.md", "warm.toml"} <= {p.name for p in store.iterdir()}
    (store / "warm.toml").write_text("mine")
    again = kvkeep("init")
    assert (again.exit_code, again.stderr) == (0, f"{store} is a store already\n")
    assert (store / "warm.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("nbytes", "budget"), [(80 * 2**30, "40GiB"), (80 * 2**30 - 1, "39GiB"), (2**31 - 1, "1023MiB"), (2**21 - 1, None)]
)
def test_init_proposes_half_of_what_is_free_and_writes_nothing(kvkeep, tmp_path, monkeypatch, nbytes, budget):
    free(monkeypatch, nbytes)
    made, *proposed = kvkeep("init").stderr.splitlines()
    assert made.startswith("made a store")
    says = f"no budget: kvkeep init --max-bytes {budget} would use half of what is free"
    assert proposed == ([] if budget is None else [says])
    written = json.loads((tmp_path / "store" / "store.json").read_text())
    assert written.get("max_bytes") is None
    assert kvkeep("init").stderr == f"{tmp_path / 'store'} is a store already\n"
    if budget is not None:  # what is proposed can be done
        assert kvkeep("init", "--max-bytes", budget).exit_code == 0
        written = json.loads((tmp_path / "store" / "store.json").read_text())
        assert nbytes // 2 - 2**30 < written["max_bytes"] <= nbytes // 2


def test_init_with_a_budget_proposes_none(kvkeep, monkeypatch):
    free(monkeypatch, 80 * 2**30)
    assert kvkeep("init", "--max-bytes", "1GiB").stderr.count("\n") == 1


def test_init_shared(kvkeep, tmp_path):
    assert kvkeep("init", "--shared").exit_code == 0
    assert (tmp_path / "store").stat().st_mode & 0o7777 == 0o2770


def test_init_where_something_else_is(kvkeep, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "file").touch()
    assert kvkeep("init").exit_code == 4
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["file"]
