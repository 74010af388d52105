import ast
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvkeep import CacheStore

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
pytestmark = pytest.mark.slow


@contextmanager
def serving(folder, model, workers):
    """A real uvicorn on a port that was free, once all its workers have said that they are warm."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "--port", str(port)]
    environment = {**os.environ, "KVKEEP_STORE": str(folder / "store"), "MODEL": str(model), "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*command, "--workers", str(workers), "service:app"], cwd=folder, env=environment, stdout=file, stderr=file
        ) as process,
    ):
        try:
            while log.read_text().count("Application startup complete.") < workers:
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1/chat/completions", log.read_text()
        finally:
            process.terminate()


def post(url, messages, **options):
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 16, **options}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["content-type"], answer.read().decode()


def test_a_service_with_two_workers(tmp_path, says, tiny_folder, tiny_llama, toy_tokenizer):
    source = (EXAMPLES / "service.py").read_text(encoding="utf-8")
    words, times = re.search(r'"porter": (".*") \* (\d+)', source).groups()
    system = {"role": "system", "content": ast.literal_eval(words) * int(times)}
    names = {"model": tiny_llama, "tokenizer": toy_tokenizer}
    with serving(tmp_path, tiny_folder, 2) as (url, log):
        entry = CacheStore(tmp_path / "store").entry("porter")
        warm = re.findall(r"worker (\d+): porter is warm, (\d+) tokens", log)
        assert len(set(warm)) == len(warm) == 2
        assert {int(tokens) for _, tokens in warm} == {entry.tokens}
        for question in ("When is breakfast?", "And where?", "Good night."):
            messages = [system, {"role": "user", "content": question}]
            fed, text = says(names, messages, 16)
            kind, body = post(url, messages)
            assert kind == "application/json"
            answer = json.loads(body)
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
            made = answer["usage"]["completion_tokens"]
            assert 1 <= made <= 16
            usage = {"prompt_tokens": fed, "completion_tokens": made, "total_tokens": fed + made}
            usage["prompt_tokens_details"] = {"cached_tokens": entry.tokens - 1}
            assert answer["usage"] == usage

            kind, body = post(url, messages, stream=True)
            assert kind.startswith("text/event-stream")
            *chunks, done = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
            assert done == "[DONE]"
            *chunks, last = map(json.loads, chunks)
            assert len(chunks) > 1
            assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
            assert last == {"choices": [], "usage": usage}
        unknown = json.loads(post(url, [{"role": "user", "content": "Hello"}])[1])
        assert unknown["usage"]["prompt_tokens_details"]["cached_tokens"] < 32
    assert len(CacheStore(tmp_path / "store").entries()) == 1


def test_the_notebook(tmp_path, smollm2_folder):
    execute = [sys.executable, "-c", "from nbclient.cli import main; main()", "--kernel_name=python3"]
    done = subprocess.run(
        [*execute, f"--output={tmp_path / 'done.ipynb'}", str(EXAMPLES / "before_after.ipynb")],
        env={**os.environ, "MODEL": str(smollm2_folder), "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    lines = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout").splitlines()
    said = r"(\d+) tokens: (\d+\.\d{3}) s, (\d+\.\d{3}) s with (\d+) reused, the same token"
    found = [re.fullmatch(said, line).groups() for line in lines]
    assert [(int(length), int(reused)) for length, _, _, reused in found] == [(200, 199), (400, 399), (800, 799)]
    assert float(found[-1][1]) > 2 * float(found[-1][2])
    assert [list(output["data"]) for output in outputs if "data" in output] == [["image/png", "text/plain"]]
