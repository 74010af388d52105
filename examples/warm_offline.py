"""Prefill ahead of time, in a build or a nightly job; a server then loads the prefix when it starts.

Run: python examples/warm_offline.py warm [MODEL]     once, where there is time
     python examples/warm_offline.py serve [MODEL]    as often as you like; it never writes to the store

(Without code: `kvkeep warm`, with the prefixes in a file; see cache_store/warm.toml.)
"""

import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep import CacheStore

TASK = sys.argv[1]
MODEL = sys.argv[2] if sys.argv[2:] else "HuggingFaceTB/SmolLM2-135M-Instruct"
RULES = " ".join(f"Rule {n}: parcels of size {n} go to shelf {n * 7 % 23}." for n in range(1, 60))
SYSTEM = [{"role": "system", "content": f"You sort parcels in a depot. {RULES}"}]
QUESTIONS = ["Where does a parcel of size 12 go?", "Where does a parcel of size 40 go?"]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")

if TASK == "warm":
    kv = CacheStore("cache_store").bind(model, tokenizer)
    began = time.perf_counter()
    entry = kv.warm(SYSTEM, name="depot", pin=True)
    print(f"warm: {entry.tokens} tokens, {entry.nbytes / 1e6:.1f} MB, in {time.perf_counter() - began:.2f} s")
else:
    kv = CacheStore("cache_store", readonly=True).bind(model, tokenizer)
    prompts = [[*SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]

    match = kv.lookup(prompts[0])
    if not match:  # better now than at the first request
        sys.exit(f"not warm: {match.reason}")
    began = time.perf_counter()
    kv.load(prompts[0])  # reads and checks every byte, so that the first request does not wait for it
    print(f"ready: {match.tokens} tokens loaded and verified in {time.perf_counter() - began:.3f} s")

    for prompt in prompts:
        output = kv.generate(prompt, max_new_tokens=16, do_sample=False)
        report = kv.last_report
        answer = tokenizer.decode(output[0, report.prompt_tokens :], skip_special_tokens=True)
        print(f"reused {report.reused_tokens} of {report.prompt_tokens} tokens: {answer!r}")
