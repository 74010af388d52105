import os
import pty
import resource
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from click.testing import CliRunner

from kvkeep import CacheStore, __version__
from kvkeep.cli import COMMANDS, main
from kvkeep.cli.common import open_store

FREE = {"torch", "transformers", "numpy", "safetensors", "rich"}


def test_help_names_every_command_and_the_exit_codes():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    named = [
        line.split()[0] for line in result.stdout.partition("Commands:\n")[2].splitlines() if line.startswith("  ")
    ]
    assert named[: len(COMMANDS)] == [
        "demo",
        "init",
        "warm",
        "ls",
        "inspect",
        "verify",
        "gc",
        "rm",
        "stats",
        "explain",
        "push",
        "bench",
    ]
    assert "  130  ended with Ctrl-C\n" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert ("--store PATH" in result.stdout) == (name != "bench")  # bench has a store of its own
    assert ("--format [human|json]" in result.stdout) == (name != "init")
    shown = " ".join(result.stdout.split())
    assert f"Example: kvkeep {name}" in shown or f"Examples: kvkeep {name}" in shown or name == "init"


def test_version():
    assert CliRunner().invoke(main, ["--version"]).stdout == f"kvkeep, version {__version__}\n"


def test_an_unknown_command_is_a_wrong_request():
    assert CliRunner().invoke(main, ["lss"]).exit_code == 2


@pytest.mark.parametrize(
    "words",
    [["ls"], ["inspect", "x"], ["verify"], ["rm", "x", "--yes"], ["gc"], ["gc", "--dry-run"], ["stats"], ["warm"]],
)
def test_no_store(kvkeep, tmp_path, words):
    result = kvkeep(*words)
    expected = f"kvkeep: there is no store at {tmp_path / 'store'}; `kvkeep init` makes one\n"
    assert (result.exit_code, result.stdout, result.stderr) == (4, "", expected)
    assert not (tmp_path / "store").exists()


def test_looking_at_an_empty_directory_does_not_make_it_a_store(kvkeep, tmp_path):
    (tmp_path / "store").mkdir()
    assert kvkeep("ls").exit_code == 4
    assert list((tmp_path / "store").iterdir()) == []


def test_a_directory_of_something_else(kvkeep, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").touch()
    result = kvkeep("ls")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith(f"kvkeep: {tmp_path / 'store'} has no store.json")
    assert result.stderr.count("\n") == 1


def test_the_store_may_be_named_before_and_after_the_command_or_in_the_environment(store, tmp_path, monkeypatch):
    elsewhere = str(tmp_path / "elsewhere")
    path = str(store.path)
    monkeypatch.setenv("KVKEEP_STORE", path)
    for words in (
        ["--store", path, "stats"],
        ["stats", "--store", path],
        ["--store", elsewhere, "stats", "--store", path],
        ["stats"],
    ):
        assert CliRunner().invoke(main, words).stdout.splitlines()[0] == "entries           2"
    assert CliRunner().invoke(main, ["--store", elsewhere, "stats"]).exit_code == 4


def test_a_store_that_may_not_be_written_is_opened_read_only(store, monkeypatch):
    assert not open_store(store.path).readonly
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    assert open_store(store.path).readonly
    assert {entry.tokens for entry in open_store(store.path).entries()} == {90, 300}


def test_an_error_of_the_system_is_one_line(kvkeep, store):
    for ref in (store.path / "refs").iterdir():
        ref.unlink()
    (store.path / "refs").rmdir()
    (store.path / "refs").write_text("not a directory")
    result = kvkeep("ls")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("kvkeep: ")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_at_the_question_ends_with_130_and_removes_nothing(store, start):
    process = start("rm", "one")
    seen = ""
    while "Remove 1 entry" not in seen:
        seen += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.endswith("kvkeep: interrupted\n")
    assert "Traceback" not in stderr
    assert {entry.names for entry in CacheStore(store.path).entries()} == {("one",), ("two",)}


def test_a_reader_that_has_seen_enough_is_no_error(store, start):
    reader, writer = os.pipe()
    os.close(reader)
    process = start("ls", stdout=writer)
    os.close(writer)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (1, "")


def test_a_table_on_a_terminal(store, start):
    master, slave = pty.openpty()
    with start("ls", stdout=slave) as process, os.fdopen(master, "rb", buffering=0) as terminal:
        os.close(slave)
        seen = b""
        with suppress(OSError):  # the end of the terminal
            while part := terminal.read(4096):
                seen += part
    assert process.returncode == 0
    assert b"\x1b[1mKEY" in seen
    for entry in store.entries():
        assert f"{entry.key[:12]}  ".encode() in seen


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["ls", "--format", "json"],
        ["ls", "--tree", "--filter", "accessed<7d", "--sort", "hits"],
        ["inspect", "two"],
        ["verify"],
        ["stats"],
        ["rm", "one", "--yes"],
        ["gc"],
        ["init"],
    ],
    ids=" ".join,
)
def test_what_needs_no_model_imports_no_torch(store, words):
    code = (
        "import sys\nfrom kvkeep.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        f"print(sorted({FREE} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "--store", str(store.path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_listing_starts_fast(store):
    """`ls` stays within 6 times a Python that imports click, in processor time: it is 3 times here."""
    listing = [sys.executable, "-m", "kvkeep", "--store", str(store.path), "ls"]
    bare = [sys.executable, "-c", "import click"]
    times = {tuple(command): [] for command in (listing, bare)}
    for _ in range(7):
        for command, seconds in times.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times[tuple(listing)]) <= 6 * min(times[tuple(bare)])
    report = subprocess.run(
        [sys.executable, "-X", "importtime", *listing[1:]], capture_output=True, text=True, check=True
    ).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in report.splitlines()}
    assert "kvkeep" in imported
    assert not imported & FREE
