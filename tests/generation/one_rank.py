"""One of two ranks that generate together over gloo: prints what it reused in each story. Run by test_ranks.py.

Arguments: the directory of the tests, a file to meet at, the rank, a directory for stores, a model's name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

sys.path.insert(0, sys.argv[1])
from tiny_models import VOCABULARY, build_tiny

from kvkeep import CacheStore, compat, generation

RANK, PLACE, NAME = int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[2], rank=RANK, world_size=2, timeout=timedelta(seconds=40)
)
MODEL = build_tiny(NAME)
IDS = torch.randint(3, VOCABULARY, (1, 45), generator=torch.Generator().manual_seed(1))
PASSES: list[int] = []
MODEL.get_input_embeddings().register_forward_hook(lambda _module, given, _out: PASSES.append(given[0].shape[-1]))
told: dict[str, Any] = {}


def outcome(generate: Callable[..., Any], ids: torch.Tensor, **options: Any) -> tuple[list[Any], list[int]]:
    """The sequence, and how many tokens went into each pass."""
    PASSES.clear()
    mask = torch.ones_like(ids)
    defaults = {"max_new_tokens": 3, "do_sample": False, "synced_gpus": True, "attention_mask": mask}
    return generate(input_ids=ids, **{**defaults, **options}).tolist(), list(PASSES)


def bound(story: str, tokens: int, **options: Any) -> Any:
    """A store of this rank's own, with so many tokens of the prompt in it."""
    kv = CacheStore(PLACE / f"{story}-{RANK}").bind(MODEL, **options)
    if tokens:
        kv.warm(IDS[:, :tokens])
    return kv


def tell(story: str, kv: Any, ids: torch.Tensor = IDS, **options: Any) -> None:
    """Generate with the store and without it, by kv.generate and attached, and note what came of it."""
    control, control_passes = outcome(MODEL.generate, ids, **options)
    own, passes = outcome(kv.generate, ids, **options)
    report = kv.last_report
    told[story] = [report.reused_tokens, report.reason, passes, own == control, len(control_passes)]


def damage(kv: Any) -> None:
    """Turn bytes over in the middle of the rows of every entry."""
    for path in Path(kv.store.path).rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        for at in range(len(content) - 4000, len(content) - 3900):
            content[at] ^= 0xFF
        path.chmod(0o600)
        path.write_bytes(content)


def wrong(story: str) -> Any:
    """A store in which this rank has another prompt's rows for this one."""
    kv = bound(story, 0)
    other = build_tiny(NAME, seed=5)
    cache = compat.complete_cache(compat.text_config(other))
    with torch.no_grad():
        other(IDS[:, :30], **{compat.forward_cache_argument(other): cache}, use_cache=True)
    kv.save(cache, IDS[:, :30], guard=False)
    return kv


def failing(kv: Any) -> Any:
    def serve(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("no such luck")

    kv.store.serve = serve
    return kv


tell("both", bound("both", 30))
tell("static", bound("static", 30), cache_implementation="static")
tell("one misses", bound("misses", 0 if RANK else 30))
kv = bound("damaged", 30)
if RANK:
    damage(kv)
tell("one is damaged", kv)
tell("one is longer", bound("longer", 24 if RANK else 30))
tell("one is longer, static", bound("longer static", 24 if RANK else 30), cache_implementation="static")
tell("one is shorter", bound("shorter", 30 if RANK else 24))
tell("one is wrong", wrong("wrong") if RANK else bound("wrong", 30))
tell("one fails", failing(bound("fails", 30)) if RANK else bound("fails", 30))
tell("one is not guarded", bound("guard", 30, guard=not RANK))
hole = torch.ones_like(IDS)
hole[0, 4] = 0 if RANK else 1
tell("one has an obstacle", bound("obstacle", 30), attention_mask=hole)
tell("two prompts", bound("two", 30), IDS[:, : 45 if RANK else 33])
tell("two sequences", bound("sequences", 30), num_return_sequences=2, do_sample=False, num_beams=2)
tell("in chunks", bound("chunks", 30), prefill_chunk_size=4)
kv = bound("itself", 0 if RANK else 30)
MODEL._is_fsdp_managed_module = True
tell("by itself", kv, synced_gpus=None)
del MODEL._is_fsdp_managed_module
together, generation.ranks_of = generation.ranks_of, lambda *_: None
tell("one is wrong, and nobody agrees", wrong("nobody") if RANK else bound("nobody", 30))
generation.ranks_of = together
if RANK == 0:  # a rank that computes for itself waits for nobody
    tell("alone", bound("alone", 30), synced_gpus=None)
sys.stdout.write(json.dumps(told))
distributed.barrier()
distributed.destroy_process_group()
