"""Runs the examples as a user does, in a directory of the test's own, on a tiny model."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any, toy_tokenizer: Any) -> Path:
    """A folder of the tiny llama and the toy tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama.save_pretrained(folder)
    toy_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[list[str], dict[str, Any]]]:
    """Runs an example in this process, where torch is imported; returns the lines that it prints, and its names."""

    def run(name: str, *arguments: str | Path) -> tuple[list[str], dict[str, Any]]:
        script = EXAMPLES / name
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
            names = runpy.run_path(str(script), run_name="__main__")
        return printed.getvalue().splitlines(), names

    return run


@pytest.fixture
def run_apart(tmp_path: Path) -> Callable[..., list[str]]:
    """The same in a process of its own."""

    def run(name: str, *arguments: str | Path) -> list[str]:
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture
def says() -> Callable[..., tuple[int, str]]:
    """What a model says without a store, after chat messages or inputs: the tokens of the prompt, and the text."""

    def says(names: dict[str, Any], prompt: Any, tokens: int) -> tuple[int, str]:
        model, tokenizer = names["model"], names["tokenizer"]
        if isinstance(prompt, list):
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            prompt = tokenizer.apply_chat_template(prompt, **options)
        fed = prompt["input_ids"].shape[1]
        out = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
        return fed, tokenizer.decode(out[0, fed:], skip_special_tokens=True)

    return says
