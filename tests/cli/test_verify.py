import json
import shutil

import pytest

from kvkeep import CacheStore


def path_of(store, entry):
    return store.path / "entries" / entry.key[:2] / f"{entry.key}.safetensors"


def flip_last_byte(path):
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    path.chmod(0o400)


def flip_first_row(path):
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    path.write_bytes(data)


def test_whole_entries(store, both, kvkeep):
    one, two = both
    result = kvkeep("verify")
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == sorted(
        [f"ok       {one.key[:12]} (one)", f"ok       {two.key[:12]} (two)"]
    )
    assert result.stderr == "2 entries whole\n"


def test_a_damaged_entry_is_told_and_set_aside(store, both, kvkeep):
    one, two = both
    flip_last_byte(path_of(store, one))
    result = kvkeep("verify")
    assert result.exit_code == 5
    lines = sorted(result.stdout.splitlines())
    assert lines[0].startswith(f"damaged  {one.key[:12]} (one): ")
    assert lines[1] == f"ok       {two.key[:12]} (two)"
    assert result.stderr.splitlines()[-1] == "kvkeep: 1 of 2 entries damaged"
    assert not path_of(store, one).exists()
    again = kvkeep("verify")
    assert (again.exit_code, again.stdout) == (0, f"ok       {two.key[:12]} (two)\n")


def test_only_those_that_are_named(store, both, kvkeep):
    one, two = both
    flip_last_byte(path_of(store, one))
    result = kvkeep("verify", "two", two.key[:6])
    assert (result.exit_code, result.stdout) == (0, f"ok       {two.key[:12]} (two)\n")
    assert path_of(store, one).exists()


def test_as_json(store, both, kvkeep):
    one, two = both
    flip_last_byte(path_of(store, two))
    result = kvkeep("verify", "--format", "json")
    assert result.exit_code == 5
    first, second = sorted(json.loads(result.stdout), key=lambda row: row["names"])
    assert first == {"key": one.key, "names": ["one"], "ok": True, "reason": None}
    assert (second["key"], second["names"], second["ok"]) == (two.key, ["two"], False)
    assert second["reason"]


def test_a_file_that_the_index_has_not_heard_of(store, kvkeep, tmp_path, tiny_llama):
    other = CacheStore(tmp_path / "other")
    entry = other.bind(tiny_llama).warm([5] * 40)
    there = path_of(store, entry)
    there.parent.mkdir(exist_ok=True)
    shutil.copy2(path_of(other, entry), there)
    assert f"ok       {entry.key[:12]}" in kvkeep("verify").stdout.splitlines()
    flip_last_byte(there)
    assert kvkeep("verify").exit_code == 5
    assert not there.exists()


def test_a_file_that_is_no_entry_at_all(store, both, kvkeep):
    key = "ab" * 16
    there = store.path / "entries" / "ab" / f"{key}.safetensors"
    there.parent.mkdir(exist_ok=True)
    there.write_bytes(b"not an entry" * 1000)
    result = kvkeep("verify")
    assert result.exit_code == 5
    assert [line for line in result.stdout.splitlines() if line.startswith(f"damaged  {key[:12]}: ")]
    assert not there.exists()


def test_an_entry_whose_file_is_gone_is_no_entry_any_more(store, both, kvkeep):
    one, two = both
    path_of(store, one).unlink()
    result = kvkeep("verify")
    assert (result.exit_code, result.stdout) == (0, f"ok       {two.key[:12]} (two)\n")
    assert kvkeep("verify", "one").exit_code == 5


@pytest.mark.requirement("R34")
def test_with_a_key_file_only_signed_entries_pass(store, kvkeep, tmp_path, tiny_llama):
    (tmp_path / "keys").write_text("ab" * 32)
    CacheStore(store.path, key=tmp_path / "keys").bind(tiny_llama).warm([9, 8, 7, 6], name="signed")
    assert kvkeep("verify", "signed", "--key-file", str(tmp_path / "keys")).exit_code == 0
    told = kvkeep("verify", "--key-file", str(tmp_path / "keys"))
    assert told.exit_code == 5
    assert told.stdout.count("it is not signed") == 2
    assert kvkeep("verify").exit_code == 0, "nothing was set aside"


@pytest.mark.parametrize("part", ["1/1", "100%"])
def test_all_of_the_data(store, both, kvkeep, part):
    flip_last_byte(path_of(store, both[0]))
    assert kvkeep("verify", "--read-data", part).exit_code == 5


def test_a_part_of_the_data(store, both, kvkeep):
    """Each entry is in one of the parts; of the others the headers are looked at."""
    one, two = both
    flip_first_row(path_of(store, one))
    of_one = int(one.key, 16) % 3 + 1
    for number in {1, 2, 3} - {of_one}:
        result = kvkeep("verify", "--read-data", f"{number}/3")
        unread = 1 if int(two.key, 16) % 3 + 1 == number else 2
        assert (result.exit_code, result.stderr) == (0, f"2 entries whole, {unread} of them by their headers\n")
    assert kvkeep("verify", "--read-data", "0%").exit_code == 0
    assert kvkeep("verify", "--read-data", f"{of_one}/3").exit_code == 5
    header = path_of(store, two)
    header.chmod(0o600)
    header.write_bytes(header.read_bytes()[:100])
    assert kvkeep("verify", "--read-data", "0%").exit_code == 5


@pytest.mark.parametrize("part", ["0/3", "4/3", "101%", "half", "1/0", "-1%", ""])
def test_what_is_no_part(store, both, kvkeep, part):
    result = kvkeep("verify", "--read-data", part)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no part such as 3/7 or 10%" in result.stderr


def test_a_repair_leaves_a_store_in_order(store, both, kvkeep, tiny_llama):
    one, two = both
    ids = store.read_ids(two.key).tolist()
    child = store.bind(tiny_llama).warm([*ids, *range(3, 103)])
    assert child.parent == two.key
    names = sorted(str(path.relative_to(store.path)) for path in store.path.glob("entries/*/*"))
    flip_last_byte(path_of(store, two))
    path_of(store, one).unlink()
    result = kvkeep("verify", "--repair")
    assert result.exit_code == 0
    assert result.stderr == (
        "2 of 2 entries damaged; 1 entry removed that continued what is gone\n"  # one was missed when it was opened
    )
    assert CacheStore(store.path).entries() == []
    assert [name for name in names if (store.path / name).exists()] == []
    again = kvkeep("verify", "--repair")
    assert (again.exit_code, again.stdout) == (0, "")
