"""llama.cpp through llama-cpp-python: its session file, read anew for every start. Needs nothing of kvkeep."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job that ``kvkeep.bench.peers`` describes."""
    import llama_cpp

    ids, prefix = job["ids"], job["prefix"]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    llm = llama_cpp.Llama(
        job["model"], n_ctx=len(ids) + job["answer"] + 8, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    context = llm._ctx.ctx
    path = Path(job["directory"]) / "session"
    room = (llama_cpp.llama_token * len(ids))()
    count = ctypes.c_size_t()

    def answer(tokens: list[int], new: int) -> tuple[list[int], list[float]]:
        out, times = [], []
        llm.eval(tokens)
        for number in range(new):
            out.append(llm.sample(temp=0.0))
            times.append(time.perf_counter())
            if number + 1 < new:
                llm.eval(out[-1:])
        return out, times

    def cold(new: int) -> tuple[list[int], list[float]]:
        llm.reset()
        return answer(ids, new)

    def load(new: int) -> tuple[list[int], list[float]]:
        llm.reset()
        if not llama_cpp.llama_state_load_file(context, str(path).encode(), room, len(ids), ctypes.byref(count)):
            raise RuntimeError("llama.cpp did not load the state that it saved")
        llm.n_tokens = count.value
        llm.input_ids[: count.value] = room[: count.value]
        return answer(ids[count.value :], new)

    seconds_cold = [_timed(lambda: cold(1)) for _ in range(job["colds"])]
    cold_tokens, _ = cold(job["answer"])
    llm.reset()
    llm.eval(ids[:prefix])
    held = (llama_cpp.llama_token * prefix)(*ids[:prefix])
    llama_cpp.llama_state_save_file(context, str(path).encode(), held, prefix)
    load(1)
    seconds = [_timed(lambda: load(1)) for _ in range(job["starts"])]
    tokens, times = load(job["answer"])
    return {
        "version": llama_cpp.__version__,
        "way": "session file, its own quantized weights and float16 rows",
        "cold": seconds_cold,
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
