"""Chat sessions that survive a restart: say one thing a run, and each run goes on where the one before ended.

Run: python examples/chat_sessions.py SESSION "What you say" [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep import CacheStore

SESSION, MESSAGE = sys.argv[1:3]
MODEL = sys.argv[3] if sys.argv[3:] else "HuggingFaceTB/SmolLM2-135M-Instruct"
SYSTEM = {
    "role": "system",
    "content": "You help people to grow vegetables on balconies. Ask for the light that a balcony gets before you "
    "propose a plant. Keep to two sentences. Never propose a plant that needs more than a bucket of earth.",
}

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
kv = CacheStore("cache_store").bind(model, tokenizer)

chat = kv.chat(SESSION, [SYSTEM])  # a new session, or the one that is stored, with all that was said
print(f"{chat.id}: {len(chat.messages) - 1} messages so far")

text = chat.send(MESSAGE, max_new_tokens=32, do_sample=False)  # the turn is stored, only its own tokens, for the next
report = chat.last_report
print(f"reused: {report.reused_tokens} of {report.prompt_tokens} tokens")
print(f"answer: {text!r}")
