"""A tiny model in a folder, and a store whose manifest has prefixes that it prefills in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.storage import skeleton

MANIFEST = """version = 1
model = "somebody/something"

[[prefix]]
name = "chat"
messages = [{ role = "system", content = "Answer from this list: one, two, three, four, five." }]

[[prefix]]
name = "numbers"
ids = [9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 5, 4, 30, 31, 32, 33, 34, 35]
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_llama, toy_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama.save_pretrained(folder)
    toy_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "store"
    skeleton.init(path)
    (path / "warm.toml").write_text(MANIFEST, encoding="utf-8")
    return path
