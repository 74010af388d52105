"""Ask many questions about one document: what the prompts have in common is prefilled once, for the whole batch.

Run: python examples/batch_over_document.py [DOCUMENT.txt] [MODEL]
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep import CacheStore

DOCUMENT = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent.parent / "SECURITY.md"
MODEL = sys.argv[2] if sys.argv[2:] else "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = [
    "What is this text about?",
    "Name those who should read it.",
    "Is there anything that it does not promise?",
]

tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
kv = CacheStore("cache_store").bind(model, tokenizer)

instructions = {"role": "system", "content": "Answer from this text alone.\n\n" + DOCUMENT.read_text(encoding="utf-8")}
prompts = [[instructions, {"role": "user", "content": question}] for question in QUESTIONS]
for entry in kv.warm_shared(prompts):  # the document comes first and the question last: that is what can be shared
    print(f"shared: {entry.tokens} tokens, {entry.nbytes / 1e6:.1f} MB")

batch = tokenizer.apply_chat_template(
    prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
)
output = kv.generate(batch, max_new_tokens=16, do_sample=False)
report = kv.last_report  # of all lines together
print(f"reused: {report.reused_tokens} of {report.prompt_tokens} tokens")
for question, line in zip(QUESTIONS, output, strict=True):
    text = tokenizer.decode(line[batch["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{question} {text!r}")
