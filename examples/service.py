"""A chat service for OpenAI's clients: several workers, one store, prefixes warmed at start, streaming, cached_tokens.

Run: KVKEEP_STORE=cache_store uvicorn --app-dir examples --workers 2 service:app    (pip install fastapi uvicorn)
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from kvkeep import CacheStore

MODEL = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
PREFIXES = {"porter": "You are the porter of the Hotel Heron. Breakfast is on the first floor, from 7 to 10. " * 8}

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
kv = CacheStore().bind(model, tokenizer)  # the store is $KVKEEP_STORE
for name, text in PREFIXES.items():  # before the first request: one worker prefills, the others wait for it and load
    entry = kv.warm([{"role": "system", "content": text}], name=name)
    print(f"worker {os.getpid()}: {name} is warm, {entry.tokens} tokens", flush=True)

app = FastAPI()


class Request(BaseModel):
    messages: list[dict[str, str]]
    max_tokens: int = 64
    stream: bool = False


def answer(request):
    """The answer as OpenAI's chunks, the last of which has the usage."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {"max_new_tokens": request.max_tokens, "do_sample": False, "streamer": streamer}
    reports = []  # those of this call: kv.last_report is the latest of any thread
    with ThreadPoolExecutor(1) as thread:
        output = thread.submit(kv.generate, request.messages, on_report=reports.append, **options)
        output.add_done_callback(lambda _: streamer.end())  # if it fails, too
        yield from ({"choices": [{"index": 0, "delta": {"content": text}}]} for text in streamer)
    total, prompt, cached = output.result().shape[1], reports[0].prompt_tokens, reports[0].reused_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": total - prompt, "total_tokens": total}
    yield {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}}


@app.post("/v1/chat/completions")
def complete(request: Request):
    if request.stream:
        lines = (f"data: {json.dumps(chunk)}\n\n" for chunk in answer(request))
        return StreamingResponse(chain(lines, ["data: [DONE]\n\n"]), media_type="text/event-stream")
    *chunks, last = answer(request)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], "usage": last["usage"]}
