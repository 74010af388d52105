"""Prefill a long prefix once; afterwards every process that asks about it begins at once.

Run it twice: python examples/quickstart.py [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep import CacheStore
from kvkeep.demo.models import is_converted, model_folder

ROOMS = " ".join(f"Room {n} is on floor {n // 10 + 1} and has {n % 3 + 1} beds." for n in range(1, 100))
HANDBOOK = f"You are the friendly porter of the Hotel Heron. {ROOMS}"

folder = model_folder("smollm2")  # what `make demo` converted
default = folder if is_converted(folder) else "HuggingFaceTB/SmolLM2-135M-Instruct"
model_id = sys.argv[1] if sys.argv[1:] else default
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="float32")

store = CacheStore("cache_store")
kv = store.bind(model, tokenizer)

messages = [{"role": "system", "content": HANDBOOK}]
entry = kv.warm(messages, name="quickstart")  # prefills in the first run, and finds it stored in the next
print(f"stored: {entry.tokens} tokens, {entry.nbytes / 1e6:.1f} MB")

prompt = [*messages, {"role": "user", "content": "Say hello to a guest."}]
output = kv.generate(prompt, max_new_tokens=24, do_sample=False)

report = kv.last_report
print(f"reused: {report.reused_tokens} of {report.prompt_tokens} tokens, loaded in {report.load_seconds:.3f} s")
print(tokenizer.decode(output[0, report.prompt_tokens :], skip_special_tokens=True))
