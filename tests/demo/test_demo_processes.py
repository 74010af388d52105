import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvkeep import CacheStore, errors
from kvkeep.cli import main
from kvkeep.demo.process import Settings, _error, start_worker
from kvkeep.demo.run import HUB_ID, choose_models, choose_store
from kvkeep.demo.worker import serve
from kvkeep.errors import InvalidRequestError, KvkeepError, StoreFormatError


@pytest.fixture
def settings(model_folder, store_path, tmp_path):
    manifest = tmp_path / "three.toml"
    text = (store_path / "warm.toml").read_text(encoding="utf-8")
    manifest.write_text(text + '[[prefix]]\nname = "text"\ntext = "The gate closes at noon."\n', encoding="utf-8")
    return Settings(
        model=str(model_folder),
        dtype="float32",
        manifest=str(manifest),
        store=str(store_path),
        label="-x",
    )


def converse(settings, *requests):
    lines = [json.dumps(request) for request in (asdict(settings), *requests)]
    sink = io.StringIO()
    serve(io.StringIO("\n".join(lines) + "\n"), sink)
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_a_worker_answers_line_by_line(settings, store_path, tmp_path):
    out = tmp_path / "ids.json"
    answers = converse(
        settings,
        {"do": "warm"},
        {"do": "settle"},
        {"do": "first_token", "number": 1},
        {"do": "first_token", "number": 2},
        {"do": "write_text", "number": 1, "tokens": 3, "path": str(out)},
    )
    assert sorted(answers[0]["result"]) == ["bind", "import", "model"]
    progress = [answer["progress"] for answer in answers if "progress" in answer]
    warmed, settled, first_token, after_text, text = [answer["result"] for answer in answers[1:] if "result" in answer]
    assert [one["name"] for one in warmed] == ["chat-x", "numbers-x", "text-x"]
    entry = CacheStore(store_path).entry("numbers-x")
    assert (warmed[1]["tokens"], warmed[1]["bytes"], warmed[1]["prefilled"]) == (18, entry.nbytes, 18)
    assert ["numbers-x", 18, 18] in progress
    assert (settled, text) == (None, None)
    assert (first_token["reused_tokens"], first_token["reason"]) == (17, None)  # one for the guard
    assert 0 < after_text["reused_tokens"] <= warmed[2]["tokens"] < after_text["prompt_tokens"]
    ids = json.loads(out.read_text())
    assert ids[:18] == [9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 5, 4, 30, 31, 32, 33, 34, 35]
    assert first_token["prompt_tokens"] < len(ids) <= first_token["prompt_tokens"] + 3


def test_the_control_has_no_store(settings):
    control = replace(settings, store=None)
    ready, first_token = converse(control, {"do": "first_token", "number": 1})
    assert ready["result"]["bind"] < 0.1
    assert (first_token["result"]["reused_tokens"], first_token["result"]["reason"]) == (0, None)
    answers = converse(control, {"do": "warm"}, {"do": "settle"})
    assert answers[1:] == [{"error": {"type": "InvalidRequestError", "message": "the control has no store to warm"}}]


def test_every_error_comes_across():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvkeepError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = _error({"type": kind.__name__, "message": "what to do"})
        assert (type(error), str(error)) == (kind, "what to do")


def test_a_worker_that_ends_is_an_error(settings):
    with start_worker(settings) as process:
        with pytest.raises(KvkeepError, match="a process of the demo ended with exit code 1"):
            process.ask("no_such_method")
        with pytest.raises(KvkeepError, match="a process of the demo ended with exit code 1"):
            process.ask("settle")


def test_ctrl_c_does_not_wait_for_what_a_worker_is_doing(settings, tmp_path):
    manifest = tmp_path / "long.toml"
    ids = [7 * n % 300 + 3 for n in range(30_000)]
    manifest.write_text(f'version = 1\nmodel = "m"\n[[prefix]]\nname = "long"\nids = {ids}\n', encoding="utf-8")
    interrupted = []

    def interrupt():
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(1, interrupt)

    def ask():
        with start_worker(replace(settings, manifest=str(manifest))) as process:
            timer.start()
            process.ask("first_token", number=0)

    with pytest.raises(KeyboardInterrupt):
        ask()
    assert time.monotonic() - interrupted[0] < 2


def test_default_models(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_MODELS", str(tmp_path))
    (hub,) = choose_models(None, gemma=False)
    assert (hub.name, hub.source, hub.label) == ("SmolLM2-135M-Instruct", HUB_ID, "")
    with pytest.raises(InvalidRequestError, match="has not been converted"):
        choose_models(None, gemma=True)
    from kvkeep.demo.models import model_folder

    for name in ("smollm2", "gemma"):
        model_folder(name).mkdir()
        (model_folder(name) / "config.json").touch()
    smollm2, gemma = choose_models(None, gemma=True)
    assert (smollm2.name, smollm2.source, smollm2.label) == (hub.name, str(model_folder("smollm2")), "")
    assert (gemma.name, gemma.source, gemma.label) == ("gemma-3-270m", str(model_folder("gemma")), "-gemma")


def test_a_model_of_your_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert [(one.name, one.source) for one in choose_models("mine", gemma=False)] == [("mine", str(tmp_path / "mine"))]
    assert [(one.name, one.source) for one in choose_models("org/m", gemma=False)] == [("m", "org/m")]


def test_default_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVKEEP_STORE", str(tmp_path / "default"))
    assert choose_store(None) == tmp_path / "default"
    assert (tmp_path / "default" / "store.json").is_file()
    (tmp_path / "cache_store").mkdir()
    assert choose_store(None) == tmp_path / "default"
    CacheStore("cache_store")
    assert choose_store(None) == Path("cache_store")
    assert choose_store(tmp_path / "named") == tmp_path / "named"
    with pytest.raises(StoreFormatError):
        choose_store(tmp_path)


def test_neither_a_converted_model_nor_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(main, ["demo", "--store", str(tmp_path / "store")])
    assert (result.exit_code, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"kvkeep: the model {HUB_ID} cannot be loaded")
    assert "run `make demo` in a clone of kvkeep once" in last


def test_ctrl_c_ends_the_workers_too(tmp_path, model_folder, store_path):
    command = [sys.executable, "-m", "kvkeep", "demo", "--store", str(store_path), "--model", str(model_folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        for line in process.stderr:
            if line.startswith("warming process"):
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "kvkeep: interrupted"
    assert "Traceback" not in stderr
    deadline = time.monotonic() + 10
    while True:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
