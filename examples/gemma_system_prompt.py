"""One system prompt for many chat requests, on a model whose generation config names a kind of cache.

It used to take a StaticCache that was prefilled by hand, and a deep copy of it for each request, which `generate` then
refused, because Gemma 3's generation config names a cache itself. Nor is the raw system prompt a prefix of what the
chat template makes of it. Here none of this has to be known.

Run: python examples/gemma_system_prompt.py [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep import CacheStore

MODEL = sys.argv[1] if sys.argv[1:] else "google/gemma-3-270m-it"
SYSTEM = (
    "You are the ticket desk of a small night ferry. Answer in one short sentence. Name the pier and the hour when "
    "asked for a departure. Never promise a cabin. If a traveller is late, tell them to wait at the green lamp."
)
QUESTIONS = ["Which pier?", "I am late, where do I wait?"]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
print(f"the generation config names: {model.generation_config.cache_implementation}")

kv = CacheStore("cache_store").bind(model, tokenizer)
system = [{"role": "system", "content": SYSTEM}]
entry = kv.warm(system, name="ticket-desk")  # the tokens that the chat template keeps, whatever is asked next
print(f"stored: {entry.tokens} tokens, {entry.nbytes / 1e6:.1f} MB")

for question in QUESTIONS:
    prompt = [*system, {"role": "user", "content": question}]
    output = kv.generate(prompt, max_new_tokens=16, do_sample=False)  # the config stays as it is; nothing is copied
    report = kv.last_report
    answer = tokenizer.decode(output[0, report.prompt_tokens :], skip_special_tokens=True)
    print(f"reused {report.reused_tokens} of {report.prompt_tokens} tokens: {question} {answer!r}")
