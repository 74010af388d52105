"""Two hosts with one remote: what one has warmed the other generates from, with the same tokens and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from remote_stores import open_store
from s3_server import BUCKET, S3Server
from tiny_models import VOCABULARY, build_tiny
from tiny_states import build_stateful

pytest.importorskip("obstore")

IDS = torch.randint(3, VOCABULARY, (1, 900), generator=torch.Generator().manual_seed(3))
NEW = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


class Host:
    """A store of its own, a model, and how many tokens were fed to that."""

    def __init__(self, path: Path, s3: S3Server | None, model: Any) -> None:
        remote = {} if s3 is None else {"remote_options": s3.options}
        self.store = open_store(path, None if s3 is None else f"s3://{BUCKET}/fleet", **remote)
        self.kv = self.store.bind(model)
        self.model = model
        self.fed = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, args: Any, output: Any) -> None:
        self.fed += args[0].shape[-1]

    def generate(self, ids: torch.Tensor) -> Any:
        self.fed = 0
        return self.kv.generate({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **NEW)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_what_one_host_warmed_another_generates_from(tmp_path, s3, name):
    build = (lambda: build_stateful(name)) if name == "lfm2" else (lambda: build_tiny(name))
    one, two = (Host(tmp_path / folder, s3, build()) for folder in ("one", "two"))
    alone = Host(tmp_path / "alone", None, build())
    entry = one.kv.warm(IDS)
    one.store.push(entry.key)
    prompt = torch.cat([IDS, IDS[:, 5:25]], dim=1)
    here, there, cold = one.generate(prompt), two.generate(prompt), alone.generate(prompt)
    assert two.kv.last_report.reused_tokens == one.kv.last_report.reused_tokens >= 890
    assert one.fed < 40  # warming has asked the model already how it takes tokens, which on the other the hit does
    assert two.fed < 180
    assert alone.fed > 900
    assert torch.equal(there.sequences, here.sequences)
    assert torch.equal(there.sequences, cold.sequences)
    for mine, theirs, whole in zip(there.logits, here.logits, cold.logits, strict=True):
        assert torch.equal(mine, theirs)
        assert (mine - whole).abs().max() < 2e-4
    assert two.store.verify(entry.key) is None


def test_warming_what_another_host_has_computes_nothing(tmp_path, s3):
    one, two = (Host(tmp_path / name, s3, build_tiny("llama")) for name in ("one", "two"))
    entry = one.kv.warm(IDS)
    one.store.push(entry.key)
    two.fed = 0
    assert two.kv.warm(IDS).key == entry.key
    assert two.fed < 60  # what the model is asked of its layers, once
    longer = torch.cat([IDS, IDS[:, :300]], dim=1)
    three = Host(tmp_path / "three", s3, build_tiny("llama"))
    three.fed = 0
    made = three.kv.warm(longer)  # what is there of its beginning is not computed again
    assert made.parent == entry.key
    assert three.fed < 400
    assert three.store.push(made.key).entries == 1


def test_another_model_finds_nothing(tmp_path, s3):
    one, two = Host(tmp_path / "one", s3, build_tiny("llama")), Host(tmp_path / "two", s3, build_tiny("llama", seed=1))
    one.store.push(one.kv.warm(IDS).key)
    two.generate(torch.cat([IDS, IDS[:, :9]], dim=1))
    assert two.kv.last_report.reused_tokens == 0
    assert two.store.entries() == []


@pytest.mark.parametrize("kind", ["503", "reset"])
def test_generating_goes_on_without_a_remote(tmp_path, s3, kind):
    one, alone = Host(tmp_path / "one", s3, build_tiny("llama")), Host(tmp_path / "two", None, build_tiny("llama"))
    s3.fault = lambda method, name: kind
    found, cold = one.generate(IDS), alone.generate(IDS)
    assert torch.equal(found.sequences, cold.sequences)
    assert one.kv.last_report.reason.startswith("remote: ")
    assert one.kv.warm(IDS).tokens == IDS.shape[1]
    assert len(s3.requests) == 1
