import subprocess
import sys
from pathlib import Path

import pytest

import kvkeep
from kvkeep.errors import InvalidRequestError
from kvkeep.manifest import Manifest, Prefix, load_manifest

HEAD = 'version = 1\nmodel = "org/name"\n'
PACKAGED = Path(kvkeep.__file__).parent / "data" / "warm.toml"
REPOSITORY = Path(__file__).parent.parent


def write(folder: Path, text: str) -> Path:
    path = folder / "warm.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    path = write(folder, text)
    with pytest.raises(InvalidRequestError) as caught:
        load_manifest(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def prefix(body: str, name: str = "a") -> str:
    return f'{HEAD}[[prefix]]\nname = "{name}"\n{body}\n'


def test_every_kind_of_prefix(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.md").write_bytes("één\r\ntwee".encode())
    path = write(
        tmp_path,
        HEAD
        + """dtype = "bfloat16"
[[prefix]]
name = "a"
text = "Hello"
[[prefix]]
name = "b.b-b_B1"
file = "notes/one.md"
pin = true
[[prefix]]
name = "c"
messages = [{ role = "system", content = "Be short." }]
ttl = 60
[[prefix]]
name = "d"
ids = [5, 0, 2147483647]
""",
    )
    assert load_manifest(path) == Manifest(
        path=path,
        model="org/name",
        dtype="bfloat16",
        prefixes=(
            Prefix(name="a", kind="text", prompt="Hello"),
            Prefix(name="b.b-b_B1", kind="text", prompt="één\ntwee", pin=True),
            Prefix(name="c", kind="messages", prompt=[{"role": "system", "content": "Be short."}], ttl=60),
            Prefix(name="d", kind="ids", prompt=[5, 0, 2147483647]),
        ),
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", "org/name"),
        ("./model", "{here}/model"),
        ("../model", "{above}/model"),
        ("/models/m", "/models/m"),
        ("~/m", "{home}/m"),
    ],
)
def test_a_path_of_a_model_is_relative_to_the_manifest(tmp_path, monkeypatch, model, expected):
    monkeypatch.setenv("HOME", "/home/somebody")
    path = write(tmp_path, f'version = 1\nmodel = "{model}"\n[[prefix]]\nname = "a"\ntext = "x"\n')
    here = tmp_path.resolve()
    assert load_manifest(path).model == expected.format(here=here, above=here.parent, home="/home/somebody")


def test_bad_toml_names_the_line(tmp_path):
    message = refusal(tmp_path, HEAD + "[[prefix]]\nname = \n")
    assert message.startswith(" is not valid TOML: ")
    assert "line 4" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('model = "m"\n', ": key 'version': is missing; it is a whole number"),
        ('version = 2\nmodel = "m"\n', ": key 'version': 2 is not a version that this kvkeep reads; write version = 1"),
        ('version = true\nmodel = "m"\n', ": key 'version': must be a whole number, not True"),
        ("version = 1\n", ": key 'model': is missing; it is a text"),
        ('version = 1\nmodel = ""\n', ": key 'model': is empty; write a hub id or a path"),
        (HEAD, ": key 'prefix': is missing; it is a list"),
        (HEAD + "prefix = []\n", ": key 'prefix': is empty; write at least one [[prefix]] table"),
        (HEAD + "prefix = [1]\n", ": [[prefix]] 1 is not a table"),
        (HEAD + 'dtype = "int8"\n', ": key 'dtype': 'int8' is none of float32, float16, bfloat16"),
        (
            HEAD + 'revision = "x"\n[[prefix]]\nname = "a"\ntext = "x"\n',
            ": key 'revision': is not known here; known are version, model, dtype, prefix",
        ),
        (HEAD + '[[prefix]]\ntext = "x"\n', ": [[prefix]] 1: key 'name': is missing; it is a text"),
        (
            prefix('text = "x"', name="a b"),
            ": [[prefix]] 1 (a b): key 'name': 'a b' cannot name an entry: "
            "use 1 to 100 of A-Z, a-z, 0-9, dot, hyphen and underscore",
        ),
        (
            prefix('txt = "x"\ntext = "x"'),
            ": [[prefix]] 1 (a): key 'txt': is not known here; known are name, pin, ttl, text, file, messages, ids",
        ),
        (prefix('text = "x"\npin = 1'), ": [[prefix]] 1 (a): key 'pin': must be true or false, not 1"),
        (prefix('text = "x"\nttl = 0'), ": [[prefix]] 1 (a): key 'ttl': 0 is not a positive number of seconds"),
        (prefix('text = "x"\nttl = 1.5'), ": [[prefix]] 1 (a): key 'ttl': must be a whole number, not 1.5"),
        (
            prefix(""),
            ": [[prefix]] 1 (a): key 'text': a prefix has exactly one of text, file, messages, ids; here: none",
        ),
        (
            prefix('text = "x"\nids = [1]'),
            ": [[prefix]] 1 (a): key 'ids': a prefix has exactly one of text, file, messages, ids; here: text and ids",
        ),
        (prefix('text = ""'), ": [[prefix]] 1 (a): key 'text': is empty"),
        (prefix("text = 1"), ": [[prefix]] 1 (a): key 'text': must be a text, not 1"),
        *(
            (
                prefix(f"ids = {ids}"),
                ": [[prefix]] 1 (a): key 'ids': must be a list of token ids, "
                "whole numbers in [0, 2**31), and not be empty",
            )
            for ids in ("[]", "[-1]", "[2147483648]", "[1, true]", '["1"]')
        ),
        *(
            (
                prefix(f"messages = {messages}"),
                ": [[prefix]] 1 (a): key 'messages': must be a list of tables with role = a text and "
                "content = a text or a list, not empty",
            )
            for messages in (
                "[]",
                '["hi"]',
                '[{ content = "x" }]',
                '[{ role = "", content = "x" }]',
                '[{role = "user", content = 1}]',
            )
        ),
    ],
)
def test_what_is_wrong_is_said_with_table_and_key(tmp_path, text, expected):
    assert refusal(tmp_path, text) == expected


def test_a_second_prefix_of_the_same_name(tmp_path):
    text = prefix('text = "x"') + '[[prefix]]\nname = "b"\ntext = "y"\n[[prefix]]\nname = "a"\ntext = "z"\n'
    expected = ": [[prefix]] 3: key 'name': 'a' is the name of [[prefix]] 1 as well; a name points at one entry"
    assert refusal(tmp_path, text) == expected


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    missing = refusal(tmp_path, prefix('file = "no.md"'))
    assert missing == f": [[prefix]] 1 (a): key 'file': {tmp_path / 'no.md'} cannot be read: No such file or directory"
    (tmp_path / "bad.md").write_bytes(b"one\ntwo \xff\n")
    garbled = refusal(tmp_path, prefix('file = "bad.md"'))
    assert garbled == f": [[prefix]] 1 (a): key 'file': {tmp_path / 'bad.md'}, line 2: not UTF-8 text"


def test_a_manifest_that_is_not_there(tmp_path):
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file or directory"):
        load_manifest(tmp_path / "warm.toml")


def test_the_manifest_that_comes_with_the_package():
    manifest = load_manifest(PACKAGED)
    assert (manifest.model, manifest.dtype) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "float32")
    assert [(p.name, p.kind, [m["role"] for m in p.prompt]) for p in manifest.prefixes] == [
        ("support", "messages", ["system"]),
        ("handbook", "messages", ["system"]),
    ]


def test_the_store_of_the_repository_has_the_same_one():
    assert (REPOSITORY / "cache_store" / "warm.toml").read_bytes() == PACKAGED.read_bytes()


def test_it_is_read_without_torch():
    code = (
        "import sys; from kvkeep.manifest import load_manifest; load_manifest(sys.argv[1]); "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(PACKAGED)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
