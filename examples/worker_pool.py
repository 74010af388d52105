"""Several processes, one store: whichever worker comes first prefills the prefix, and all the others load it.

Run: python examples/worker_pool.py [MODEL]
"""

import multiprocessing
import os
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep import CacheStore

MODEL = sys.argv[1] if sys.argv[1:] else "HuggingFaceTB/SmolLM2-135M-Instruct"
WORKERS = 2
TIMETABLE = " ".join(f"Bus {n} leaves stop {n * 3 % 17} at {6 + n % 14}:{n * 5 % 60:02}." for n in range(1, 60))
SYSTEM = [{"role": "system", "content": f"You know the timetable. {TIMETABLE}"}]
QUESTIONS = [f"When does bus {n} leave?" for n in (4, 8, 15, 16, 23, 42)]


def start_worker() -> None:
    """Runs once in each process: it loads the model, and makes sure that the prefix is there."""
    global tokenizer, model, kv, prefilled
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    kv = CacheStore("cache_store").bind(model, tokenizer)
    steps = []
    kv.warm(SYSTEM, name="timetable", progress=lambda done, total: steps.append(done))  # called where it is prefilled
    prefilled = bool(steps)


def answer(question: str) -> tuple[int, bool, int, int, str]:
    output = kv.generate([*SYSTEM, {"role": "user", "content": question}], max_new_tokens=16, do_sample=False)
    report = kv.last_report
    text = tokenizer.decode(output[0, report.prompt_tokens :], skip_special_tokens=True)
    return os.getpid(), prefilled, report.reused_tokens, report.prompt_tokens, text


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")  # a forked process must not use torch
    with context.Pool(WORKERS, start_worker) as pool:
        answers = pool.map(answer, QUESTIONS, chunksize=1)
        pool.close()
        pool.join()  # they end by themselves: `kvkeep stats` then counts all that they did
    for question, (worker, _, reused, prompt, text) in zip(QUESTIONS, answers, strict=True):
        print(f"worker {worker} reused {reused} of {prompt} tokens: {question} {text!r}")
    print(f"prefilled by {len({one[0] for one in answers if one[1]})} of {WORKERS} workers")
