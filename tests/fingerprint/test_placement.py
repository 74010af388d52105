"""A model whose tensors are elsewhere: offloaded by accelerate, or in the shards of two real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from elsewhere import run_elsewhere
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore
from kvkeep.placement import content_of, device_of, is_placed, shard_of

IDS = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))


def offloaded(kind: str, folder: Path) -> Any:
    model = build_tiny("llama")
    if kind == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    if kind == "disk":
        return disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{number}": "disk" if number else "cpu" for number in range(3)}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def logits(generate: Any) -> torch.Tensor:
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return torch.stack(generate(IDS, attention_mask=torch.ones_like(IDS), **options).logits)


# transformers 4.57 says so of every model that accelerate has offloaded whole
@pytest.mark.filterwarnings(
    "ignore:You are calling .generate.. with the `input_ids` being on a device type:UserWarning"
)
@pytest.mark.parametrize("kind", ["cpu", "disk", "some of each"])
def test_an_offloaded_model_is_the_model_it_is_and_is_served(tmp_path: Path, kind: str) -> None:
    whole = build_tiny("llama")
    store = CacheStore(tmp_path / "store")
    plain = store.bind(whole)
    model = offloaded(kind, tmp_path / "weights")
    assert any(parameter.is_meta for parameter in model.parameters())
    kv = store.bind(model)
    assert kv.identity() == plain.identity()
    entry = kv.warm(IDS[:, :30])
    assert plain.warm(IDS[:, :30]) == entry
    control = logits(whole.generate)
    for bound in (kv, plain):
        assert (logits(bound.generate) - control).abs().max() < 2e-4
        assert (bound.last_report.reused_tokens, bound.last_report.reason) == (29, None)  # type: ignore[union-attr]
    known = kv._live._known
    kv.identity()
    assert kv._live._known is known  # a forward pass is no change: nothing was hashed again
    assert (kv.load(IDS).layers[0].keys == plain.load(IDS).layers[0].keys).all()


def test_a_change_of_an_offloaded_weight_is_seen(tmp_path: Path) -> None:
    model = offloaded("cpu", tmp_path)
    kv = CacheStore(tmp_path / "store").bind(model)
    before = kv.identity()
    module = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        content_of(module, "weight", module.weight)[0, 0] += 1
    assert kv.identity().weights != before.weights


def test_devices_are_those_that_modules_compute_on(tmp_path: Path) -> None:
    model = offloaded("cpu", tmp_path)
    assert device_of(model) == device_of(model.lm_head) == torch.device("cpu")
    assert device_of(torch.nn.Identity()) is None
    assert is_placed(model.lm_head.weight)
    assert not is_placed(build_tiny("llama").lm_head.weight)
    assert shard_of(model) is None


SHARDS = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
sys.path.insert(0, sys.argv[1])
from tiny_models import build_tiny
from kvkeep import CacheStore
from kvkeep.errors import UnsupportedRequestError
from kvkeep.placement import shard_of

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[3]), world_size=2)
model = build_tiny("llama")
mesh = init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    weight = layer.mlp.up_proj.weight
    layer.mlp.up_proj.weight = torch.nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]), requires_grad=False)
kv = CacheStore(sys.argv[4]).bind(model)
first = kv.identity()
same = kv.identity() == first
shard = model.model.layers[1].mlp.up_proj.weight.to_local()
with torch.no_grad():
    shard[0, 0] += 1 if dist.get_rank() else 0
try:
    changed = kv.identity() != first
except UnsupportedRequestError as error:
    changed = str(error)
refreshed = kv.refresh().weights
named = CacheStore(sys.argv[4]).bind(model, model_id="one name").identity().weights
print(json.dumps([shard_of(model), first.weights, same, changed, list(shard.shape), refreshed, named]))
dist.barrier()
dist.destroy_process_group()
"""


def test_each_rank_hashes_its_own_shard_and_says_which_it_is(tmp_path: Path) -> None:
    here = str(Path(__file__).parents[1])
    ranks = [(here, tmp_path / "meet", rank, tmp_path / "store") for rank in range(2)]
    (zero, one) = [json.loads(printed.splitlines()[-1]) for printed in run_elsewhere(SHARDS, *ranks)]
    assert (zero[0], one[0]) == ([2, 0], [2, 1])
    whole = build_tiny("llama")
    plain = CacheStore(tmp_path / "store").bind(whole).identity().weights
    assert len({plain, zero[1], one[1]}) == 3
    assert (zero[2], one[2]) == (True, True)
    assert zero[3] is False
    assert one[3].startswith("the model has changed, and other ranks run it, too: call kv.refresh()")
    assert zero[4] == [48, 64]
    # What a rank computes depends on the shards of all of them: one was changed, and it is another model on both.
    assert len({zero[1], one[1], zero[5], one[5]}) == 4
    assert zero[6] != one[6]  # a name of the user's own stands for the whole model, of which each has its part
