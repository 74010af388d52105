"""Entries that one host stores in a remote, and others find there; and manifests that ranks share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_warm import MANIFEST

from kvkeep import CacheStore
from kvkeep.cli.warm import rank_and_size


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tiny_llama, toy_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama.save_pretrained(folder)
    toy_tokenizer.save_pretrained(folder)
    return folder


def manifest_of(path: Path, model_folder: Path, prefixes: int = 1) -> Path:
    path.write_text(MANIFEST.format(model=model_folder, ids=list(range(3, 93))), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        for number in range(prefixes - 1):
            file.write(f'[[prefix]]\nname = "more{number}"\nids = {list(range(4 + number, 104 + number))}\n')
    return path


def test_what_one_pushes_another_finds(store, both, kvkeep, tmp_path, tiny_llama):
    one, two = both
    far = tmp_path / "far"
    result = kvkeep("push", "one", "--remote", str(far))
    assert (result.exit_code, result.stdout) == (0, f"{one.key[:12]} (one): {one.nbytes / 1000:.1f} kB\n")
    assert result.stderr.endswith(f"1 entry at {far}, {one.nbytes / 1000:.1f} kB sent\n")
    again = json.loads(kvkeep("push", "--remote", str(far), "--format", "json").stdout)
    sent = {row["key"]: row["sent"] for row in again}
    assert sent == {one.key: 0, two.key: two.nbytes}
    other = CacheStore(tmp_path / "other", remote=far).bind(tiny_llama)
    for entry in both:
        ids = store.read_ids(entry.key).tolist()
        assert other.lookup([*ids, 5]).tokens == entry.tokens
        assert (other.store.header(entry.key).meta.digests) == store.header(entry.key).meta.digests


def test_those_that_are_chosen(store, both, kvkeep, tmp_path):
    result = kvkeep("push", "--filter", "tokens>100", "--remote", str(tmp_path / "far"), "--format", "json")
    assert [row["names"] for row in json.loads(result.stdout)] == [["two"]]


def test_without_a_remote(store, kvkeep, monkeypatch, tmp_path):
    result = kvkeep("push")
    assert (result.exit_code, result.stderr) == (2, "kvkeep: give --remote, or set $KVKEEP_REMOTE\n")
    monkeypatch.setenv("KVKEEP_REMOTE", str(tmp_path / "far"))
    assert kvkeep("push").exit_code == 0


def test_warming_fetches_what_another_host_has_prefilled(kvkeep, tmp_path, model_folder):
    manifest, far = manifest_of(tmp_path / "warm.toml", model_folder), tmp_path / "far"

    def warmed(store: str) -> dict[str, int]:
        from click.testing import CliRunner

        from kvkeep.cli import main

        CliRunner().invoke(main, ["--store", str(tmp_path / store), "init"])
        words = ["--store", str(tmp_path / store), "warm", str(manifest), "--remote", str(far), "--format", "json"]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0
        return {row["name"]: row["prefilled_tokens"] for row in json.loads(result.stdout)}

    first = warmed("a")
    assert first["numbers"] == 90 and first["system"] > 0
    assert warmed("b") == {"numbers": 0, "system": 0}
    assert {e.key for e in CacheStore(tmp_path / "a").entries()} == {
        e.key for e in CacheStore(tmp_path / "b").entries()
    }


def test_ranks_share_a_manifest(start, kvkeep, tmp_path, model_folder, monkeypatch):
    kvkeep("init")
    manifest = manifest_of(tmp_path / "warm.toml", model_folder, prefixes=4)
    running = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        running.append(start("warm", str(manifest), "--format", "json"))
    told = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    done = [[row["name"] for row in json.loads(out)] for out, _ in told]
    assert done == [["system", "more0", "more2"], ["numbers", "more1"]]
    assert "rank 1 of 2: 2 prefixes" in told[1][1]
    assert all(row["prefilled_tokens"] for out, _ in told for row in json.loads(out))
    assert len(CacheStore(tmp_path / "store").entries()) == 5


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, (1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),
        ({"RANK": "9", "WORLD_SIZE": "8"}, (0, 1)),
        ({"RANK": "x", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"RANK": "1"}, (0, 1)),
    ],
)
def test_which_rank_of_how_many(environment, expected):
    assert rank_and_size(environment) == expected
