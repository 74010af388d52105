"""Every block of Python in the documents runs, in order, and does what the text around it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from transformers import PreTrainedModel, pipeline

from kvkeep import CacheStore

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(name: str) -> list[str]:
    return PYTHON.findall((ROOT / name).read_text())


def prefilled(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        output = model(ids, attention_mask=torch.ones_like(ids), use_cache=True)
    return output["cache" if "cache" in output else "past_key_values"]


@pytest.fixture
def names(
    build_tiny: Callable[..., PreTrainedModel], toy_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What the blocks take as given: a model, its tokenizer, things to say, caches of one line and of two."""
    monkeypatch.chdir(tmp_path)
    model = build_tiny("llama")
    ids = torch.randint(3, VOCABULARY, (2, 120), generator=torch.Generator().manual_seed(1))
    return {
        "model": model,
        "tokenizer": toy_tokenizer,
        "pipeline": pipeline,
        "handbook": "Gates close ten minutes before a ship leaves. " * 8,
        "document": "The ferry port has nine gates. " * 60,
        "prompts": [f"{'All about the port of Aland. ' * 10}Question {number}" for number in range(3)],
        "your_cache": prefilled(model, ids[:1, :80]),
        "your_ids": ids[:1, :80],
        "batch_cache": prefilled(model, ids),
        "batch_ids": ids,
        "mask": torch.ones_like(ids),
    }


def test_the_readme(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    first, beyond, growing, remote = blocks("README.md")
    exec(first, names)
    kv, model = names["kv"], names["model"]
    reused = kv.last_report.reused_tokens
    assert reused > 100 and f"reused_tokens={reused}" in capsys.readouterr().out
    inputs = names["tokenizer"].apply_chat_template(
        names["question"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert torch.equal(names["output"], model.generate(**inputs, max_new_tokens=24))

    exec(beyond, names)
    assert names["match"].tokens > 100
    assert names["entry"].end == 80 and [entry.end for entry in names["entries"]] == [120, 120]
    assert names["cache"].get_seq_length() == 119

    exec(growing, names)
    assert [message["role"] for message in names["chat"].messages] == ["system", "user", "assistant"]
    assert names["other"].messages == names["chat"].messages
    assert kv.lookup(names["document"] + " More.").tokens > 512
    assert kv.lookup(names["prompts"][0]).tokens > 100

    exec(remote.replace("s3://bucket/prefix", "far"), names)
    elsewhere = CacheStore("elsewhere", remote="far").bind(model, names["tokenizer"])
    assert elsewhere.lookup(names["question"]).tokens > 100
