"""mlx-lm: its prompt cache file, read anew for every start. Needs nothing of kvkeep."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job that ``kvkeep.bench.peers`` describes."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
    from mlx_lm.utils import load

    ids, prefix = job["ids"], job["prefix"]
    model = load(job["model"])[0]
    path = Path(job["directory"]) / "prompt.safetensors"

    def answer(tokens: list[int], new: int, cache: Any) -> tuple[list[int], list[float]]:
        out, times = [], []
        for token, _ in generate_step(mx.array(tokens), model, max_tokens=new, prompt_cache=cache):
            out.append(int(token))
            times.append(time.perf_counter())
        return out, times

    def cold(new: int) -> tuple[list[int], list[float]]:
        return answer(ids, new, make_prompt_cache(model))

    def start(new: int) -> tuple[list[int], list[float]]:
        return answer(ids[prefix:], new, load_prompt_cache(str(path)))

    colds = [_timed(lambda: cold(1))]
    cold_tokens, _ = cold(job["answer"])
    cache = make_prompt_cache(model)
    for _ in generate_step(mx.array(ids[:prefix]), model, max_tokens=0, prompt_cache=cache):
        pass
    save_prompt_cache(str(path), cache)
    start(1)
    seconds = [_timed(lambda: start(1)) for _ in range(job["starts"])]
    tokens, times = start(job["answer"])
    return {
        "version": version("mlx-lm"),
        "way": "prompt cache file",
        "cold": colds,
        "seconds": seconds,
        "tokens_per_second": (len(times) - 1) / (times[-1] - times[0]),
        "disk_bytes": path.stat().st_size,
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
