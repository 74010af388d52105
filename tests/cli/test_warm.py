import json
import os
import pty
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from kvkeep import CacheStore

MANIFEST = """version = 1
model = "{model}"
dtype = "float32"

[[prefix]]
name = "system"
pin = true
messages = [{{ role = "system", content = "Answer in one word." }}]

[[prefix]]
name = "numbers"
ids = {ids}
"""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tiny_llama, toy_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama.save_pretrained(folder)
    toy_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def manifest(tmp_path, model_folder, kvkeep) -> Path:
    """The store's own warm.toml, with the tiny model."""
    kvkeep("init")
    path = tmp_path / "store" / "warm.toml"
    path.write_text(MANIFEST.format(model=model_folder, ids=list(range(3, 93))), encoding="utf-8")
    return path


def prefilled(result):
    return {row["name"]: row["prefilled_tokens"] for row in json.loads(result.stdout)}


def test_it_warms_once(manifest, kvkeep, tmp_path, model_folder):
    first = kvkeep("warm", "--format", "json")
    assert first.exit_code == 0
    assert first.stderr.splitlines()[0] == f"loading {model_folder}"
    store = CacheStore(tmp_path / "store")
    entries = {name: store.entry(name) for name in ("system", "numbers")}
    assert prefilled(first) == {"system": entries["system"].tokens, "numbers": 90}
    assert [row["key"] for row in json.loads(first.stdout)] == [entries["system"].key, entries["numbers"].key]
    assert json.loads((store.path / "refs" / "system.json").read_text())["pin"] is True
    assert prefilled(kvkeep("warm", "--format", "json")) == {"system": 0, "numbers": 0}
    assert kvkeep("warm").stdout.splitlines() == [
        f"system  {entries['system'].key[:12]}  {entries['system'].tokens} tokens: already stored, 0 tokens prefilled",
        f"numbers  {entries['numbers'].key[:12]}  90 tokens: already stored, 0 tokens prefilled",
    ]


def test_the_words_of_what_is_prefilled(manifest, kvkeep):
    lines = kvkeep("warm").stdout.splitlines()
    assert re.fullmatch(r"numbers  [0-9a-f]{12}  90 tokens: 90 tokens prefilled in \d+\.\d s", lines[1])


def test_another_manifest_and_another_model(manifest, kvkeep, tmp_path, build_tiny, toy_tokenizer):
    other = tmp_path / "other"
    build_tiny("mistral").save_pretrained(other)
    toy_tokenizer.save_pretrained(other)
    path = tmp_path / "mine.toml"
    path.write_text('version = 1\nmodel = "/no/such/folder"\n[[prefix]]\nname = "a"\nids = [7, 8, 9]\n')
    assert prefilled(kvkeep("warm", str(path), "--model", str(other), "--format", "json")) == {"a": 3}
    assert CacheStore(tmp_path / "store").entry("a").tokens == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1\n", "key 'model': is missing; it is a text"),
        (
            'version = 1\nmodel = "/no/such/folder"\n[[prefix]]\nname = "a"\nids = [7]\n',
            "no model folder /no/such/folder",
        ),
        ('version = 1\nmodel = "no-such/model"\n[[prefix]]\nname = "a"\nids = [7]\n', "no-such/model cannot be loaded"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(manifest, kvkeep, text, message):
    manifest.write_text(text, encoding="utf-8")
    result = kvkeep("warm")
    assert (result.exit_code, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("kvkeep: ")
    assert message in last


def test_an_absent_manifest(manifest, kvkeep):
    result = kvkeep("warm", "absent.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "kvkeep: absent.toml cannot be read: No such file or directory\n"


def test_what_is_stored_is_said_even_if_the_next_prefix_fails(manifest, kvkeep, tmp_path):
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text + '[[prefix]]\nname = "third"\nids = [7, 8, 9]\n', encoding="utf-8")
    (tmp_path / "store" / "refs" / "third.json").mkdir(parents=True)  # where the name's file would go
    result = kvkeep("warm")
    assert result.exit_code == 4
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["system", "numbers"]


def test_ctrl_c_in_the_middle_of_a_prefill(manifest, start, tmp_path, build_tiny, toy_tokenizer):
    """The bar on a terminal counts tokens; Ctrl-C then keeps what is done, and nothing half stored."""
    slow = tmp_path / "slow"
    build_tiny("llama", num_hidden_layers=24, max_position_embeddings=65536).save_pretrained(slow)
    toy_tokenizer.save_pretrained(slow)
    ids = [7 * n % 300 + 3 for n in range(40_000)]
    manifest.write_text(MANIFEST.format(model=slow, ids=ids), encoding="utf-8")
    master, slave = pty.openpty()
    with start("warm", stderr=slave) as process, os.fdopen(master, "rb", buffering=0) as terminal:
        os.close(slave)
        seen = b""
        while not re.search(rb"numbers.*[1-9]\d*/40000", seen, re.DOTALL):
            seen += terminal.read(4096)  # raises when the process has ended
        process.send_signal(signal.SIGINT)
        with suppress(OSError):
            while terminal.read(4096):
                pass
        stdout = process.communicate()[0]
    assert process.returncode == 130
    assert [line.split()[0] for line in stdout.splitlines()] == ["system"]
    store = CacheStore(tmp_path / "store")
    assert [entry.names for entry in store.entries()] == [("system",)]
    assert store.verify(store.entries()[0].key) is None
    assert list((store.path / "tmp").iterdir()) == []
