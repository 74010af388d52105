"""Move a cache that an old library kept as tuples into a store, generate from it, and hand a tuple back.

CACHE.pt is what `torch.save({"input_ids": ids, "past_key_values": past}, "CACHE.pt")` wrote years ago: the ids of one
sequence, [1, tokens], and for each layer a pair (keys, values), [1, heads, tokens, dim]. transformers takes such tuples
no longer.

Run: python examples/legacy_tuples.py CACHE.pt [MODEL]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep import CacheStore

OLD_FILE = Path(sys.argv[1])
MODEL = sys.argv[2] if sys.argv[2:] else "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "\nWhat is this text about? It is about"

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
kv = CacheStore("cache_store").bind(model, tokenizer)

old = torch.load(OLD_FILE)
ids, past = old["input_ids"], old["past_key_values"]
entry = kv.save(past, ids, name=OLD_FILE.stem)  # the model is asked whether these are its own keys and values
print(f"saved: {len(past)} layers of {entry.tokens} tokens, {entry.nbytes / 1e6:.1f} MB")

question = tokenizer(QUESTION, add_special_tokens=False, return_tensors="pt")["input_ids"]
prompt = torch.cat([ids, question], dim=1)  # ids, not text: the old tokens have to be exactly these
output = kv.generate(prompt, max_new_tokens=16, do_sample=False)
report = kv.last_report
print(f"reused: {report.reused_tokens} of {report.prompt_tokens} tokens")
print(f"answer: {tokenizer.decode(output[0, report.prompt_tokens :], skip_special_tokens=True)!r}")

pairs = kv.to_legacy(kv.load(prompt))  # for the code that still wants them
keys, values = pairs[0]
print(f"and back: {len(pairs)} layers, keys {list(keys.shape)}, equal: {torch.equal(keys, past[0][0])}")
