"""One of two ranks that each have a part of one model, over gloo: prints what it reused. Run by test_ranks.py.

Arguments: the directory of the tests, a file to meet at, the rank, a directory for stores, how the model is shared
(``tp`` or ``fsdp``), the directory of the model.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

sys.path.insert(0, sys.argv[1])
from tiny_models import VOCABULARY

from kvkeep import CacheStore, KvkeepError

RANK, PLACE, FOLDER = int(sys.argv[3]), Path(sys.argv[4]), sys.argv[6]
os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2")
distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[2], rank=RANK, world_size=2, timeout=timedelta(seconds=40)
)
WHOLE = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
if sys.argv[5] == "tp":
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, tp_plan="auto").eval()
else:
    from torch.distributed.fsdp import fully_shard

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
PASSES: list[int] = []
model.model.norm.register_forward_hook(lambda _module, given, _out: PASSES.append(given[0].shape[1]))
IDS = torch.randint(3, VOCABULARY, (1, 45), generator=torch.Generator().manual_seed(1))
told: dict[str, Any] = {}


def outcome(generate: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    PASSES.clear()
    out = generate(
        input_ids=IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


def tell(story: str, kv: Any, control: Any = WHOLE) -> None:
    together = {} if sys.argv[5] == "tp" else {"synced_gpus": True}
    sequences, logits = outcome(control.generate, **({} if control is WHOLE else together))
    ours = outcome(kv.generate, **together)
    near = float((ours[1] - logits).abs().max()) < 2e-4
    report = kv.last_report
    told[story] = [report.reused_tokens, report.reason, list(PASSES), torch.equal(ours[0], sequences) and near]


def bound(place: str) -> Any:
    named = None if sys.argv[5] == "tp" else "a name for weights that nobody sees whole"
    return CacheStore(PLACE / place).bind(model, salt="passes are counted", model_id=named)


kv = bound("shared")
kv.warm(IDS[:, :30])
loaded = kv.load(IDS)
told["loaded"] = [kv.lookup(IDS).tokens, list(loaded.layers[0].keys.shape)]
tell("shared", kv)
own = bound(f"own-{RANK}")
entry = own.warm(IDS[:, :30])
if RANK:
    own.store.remove(entry.key)
own = bound(f"own-{RANK}")
tell("one misses", own)
own.warm(IDS[:, :30])  # both prefill, though one has it
tell("warmed again", own)
wrong = bound(f"wrong-{RANK}")
cache = kv.load(IDS)
for layer in cache.layers:
    layer.keys = layer.keys * (1.5 if RANK else 1)
wrong.save(cache, IDS[:, :30], guard=False)
tell("one is wrong", wrong)
weight = model.model.layers[1].mlp.up_proj.weight
weight = getattr(weight, "_local_tensor", weight)
with torch.no_grad():
    weight[0, 0] += 1 if RANK else 0
tell("one was changed", kv, model)
try:
    kv.warm(IDS[:, :33])
except KvkeepError as error:
    told["not warmed"] = str(error)
kv.refresh()
tell("refreshed", kv, model)
kv.warm(IDS[:, :33])
tell("warmed anew", kv, model)
sys.stdout.write(json.dumps(told))
distributed.barrier()
distributed.destroy_process_group()
