"""kvboost: chunks of the prefix kept in memory by ``warm``, used by ``generate``. Needs nothing of kvkeep.

The time is taken around the whole call: the one that it reports leaves most of it out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job that ``kvkeep.bench.peers`` describes. It takes text, whose tokens must be the ids again."""
    import torch
    from kvboost import GenerationMode, KVBoost
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids, prefix = job["ids"], job["prefix"]
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(job["model"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    engine = KVBoost(model, tokenizer, max_cache_bytes=8 << 30, max_chunks=1024, device="cpu")
    first, prompt = tokenizer.decode(ids[:prefix]), tokenizer.decode(ids)
    if engine._encode(prompt) != ids:
        raise RuntimeError("the text of these ids has other tokens, and kvboost takes no ids")

    def answer(new: int, mode: Any) -> tuple[list[int], list[float]]:
        out: list[int] = []
        times: list[float] = []

        def note(token: int) -> None:
            out.append(token)
            times.append(time.perf_counter())

        engine.generate(prompt, max_new_tokens=new, mode=mode, cacheable_prefix_len=prefix, on_token=note)
        return out, times

    colds = [_timed(lambda: answer(1, GenerationMode.BASELINE)) for _ in range(job["colds"])]
    cold_tokens, _ = answer(job["answer"], GenerationMode.BASELINE)
    engine.warm(first)
    answer(1, GenerationMode.CHUNK_KV_REUSE)
    seconds = [_timed(lambda: answer(1, GenerationMode.CHUNK_KV_REUSE)) for _ in range(job["starts"])]
    tokens, times = answer(job["answer"], GenerationMode.CHUNK_KV_REUSE)
    return {
        "version": version("kvboost"),
        "way": "warm() and generate(), chunks in memory",
        "cold": colds,
        "seconds": seconds,
        "tokens_per_second": (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
        "disk_bytes": 0,
        "tokens": tokens,
        "cold_tokens": cold_tokens,
    }


def _timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)  # whatever else is printed is no answer
        pipe.write(json.dumps({"result": measure(json.loads(sys.stdin.readline()))}) + "\n")
