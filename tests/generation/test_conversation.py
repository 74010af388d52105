"""``kv.chat``: conversations that outlive the process, and what a job's prompts share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_layouts import build

from kvkeep import CacheStore
from kvkeep.errors import InvalidRequestError, StoreReadOnlyError, UnsupportedRequestError
from kvkeep.manner import manner_of

SYSTEM = [{"role": "system", "content": "the rest of the night and the end of the " * 4}]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def control(model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The answer to a conversation without a store."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, **OPTIONS)
    return str(tokenizer.decode(out[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.fixture(params=["full", "full, windowed", "full, recurrent"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def test_turns_reuse_one_another_across_stores_and_forks(model: Any, toy_tokenizer: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(model, toy_tokenizer)
    chat = kv.chat("mine", SYSTEM)
    singly = manner_of(model).singly  # such models go on from a cache one token at a time, or not at all
    for number, question in enumerate(("and the end", "of the night", "in the rest")):
        said = [*chat.messages, {"role": "user", "content": question}]
        assert chat.send(question, **OPTIONS) == control(model, toy_tokenizer, said)
        assert [one["role"] for one in chat.messages[-2:]] == ["user", "assistant"]
        assert chat.last_report is not None
        if number and not singly:
            assert chat.last_report.reused_tokens > 64
    other = CacheStore(tmp_path / "store").bind(model, toy_tokenizer).chat("mine")
    assert other.messages == chat.messages
    fork = other.fork()
    assert fork.id != other.id
    entries = len(kv.store.entries())
    for one, question in ((other, "to be"), (fork, "or not")):
        said = [*one.messages, {"role": "user", "content": question}]
        assert one.send(question, **OPTIONS) == control(model, toy_tokenizer, said)
        assert one.last_report is not None
        assert singly or one.last_report.reused_tokens > 64
    added = sorted(kv.store.entries(), key=lambda one: one.created)[entries:]
    assert singly or all(one.start > 0 for one in added), "the stored beginning was copied"
    with pytest.raises(InvalidRequestError, match="continued elsewhere"):
        chat.send("again", **OPTIONS)
    assert other.delete()
    assert kv.chat("mine").messages == []


def test_what_is_no_conversation_is_refused(toy_tokenizer: Any, tmp_path: Path) -> None:
    model = build("full")
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model, toy_tokenizer)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        store.bind(model).chat()
    chat = kv.chat("mine", SYSTEM)
    before = chat.messages
    with pytest.raises(UnsupportedRequestError, match="one answer"):
        chat.send("and", num_return_sequences=2, do_sample=True, max_new_tokens=2)
    assert chat.messages == before
    with pytest.raises(InvalidRequestError, match="nothing was said"):
        chat.send([])
    chat.send({"role": "user", "content": "the end"}, **OPTIONS)
    with pytest.raises(InvalidRequestError, match="other messages"):
        kv.chat("mine", [{"role": "system", "content": "another"}])
    with pytest.raises(InvalidRequestError, match="already"):
        chat.fork("mine")
    with pytest.raises(StoreReadOnlyError):
        CacheStore(tmp_path / "store", readonly=True).bind(model, toy_tokenizer).chat("mine")
    # Namespaces share no conversation, and a damaged file says so.
    assert CacheStore(tmp_path / "store", namespace="b").bind(model, toy_tokenizer).chat("mine").messages == []
    (file,) = (tmp_path / "store" / "chats").iterdir()
    file.write_bytes(b"{")
    with pytest.raises(InvalidRequestError, match="not as it was written"):
        kv.chat("mine")


def test_the_beginnings_that_prompts_share_are_stored_once(tmp_path: Path) -> None:
    model = build("full")
    store = CacheStore(tmp_path / "store")
    kv = store.bind(model)
    system, document = list(range(3, 103)), [7, 9] * 50
    prompts = [
        [*system, *document, 11, 12],
        [*system, *document, 13],
        [*system, 14, 15],
        [20] * 40,
        [*system, *document, 13],
    ]
    done: list[tuple[int, int]] = []
    entries = kv.warm_shared(prompts, progress=lambda now, total: done.append((now, total)))
    assert [one.end for one in entries][:2] == [100, 200]
    assert done[-1][0] == done[-1][1] == len(entries)
    for prompt, tokens in zip(prompts, (200, 200, 100, 0, 200), strict=True):
        assert kv.lookup(prompt).tokens == tokens
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
        assert torch.equal(kv.generate(prompt, max_new_tokens=3, do_sample=False), plain)
    assert kv.warm_shared([[1] * 70, [2] * 70]) == []
    assert kv.warm_shared([]) == []


def test_what_another_worker_said_meanwhile_is_not_lost(toy_tokenizer: Any, tmp_path: Path) -> None:
    model = build("full")
    kv = CacheStore(tmp_path / "store").bind(model, toy_tokenizer)
    chat = kv.chat("mine", SYSTEM)
    chat.send("and the end", **OPTIONS)
    other = CacheStore(tmp_path / "store").bind(model, toy_tokenizer).chat("mine")
    with pytest.raises(InvalidRequestError, match="continued elsewhere"):
        chat.send("of it", **OPTIONS, on_report=lambda _report: other.send("of the other", **OPTIONS))
    assert [one["content"] for one in other.messages if one["role"] == "user"] == ["and the end", "of the other"]
    assert kv.chat("mine").messages == other.messages
    assert chat.messages[-2]["content"] == "of it"
    assert chat.fork().messages == chat.messages


@pytest.mark.parametrize("name", ["full", "full, recurrent"])
def test_a_store_that_is_full_costs_no_answer(name: str, toy_tokenizer: Any, tmp_path: Path) -> None:
    model = build(name)
    kv = CacheStore(tmp_path / "store", max_bytes=2000).bind(model, toy_tokenizer)
    chat = kv.chat("mine", SYSTEM)
    said = [*SYSTEM, {"role": "user", "content": "the end", "marks": (1, 2)}]
    assert chat.send(said[-1], **OPTIONS) == control(model, toy_tokenizer, said)
    assert chat.send("again", **OPTIONS)
    assert kv.store.entries() == []


def test_a_turn_waits_for_another_workers_and_does_not_replace_it(toy_tokenizer: Any, tmp_path: Path) -> None:
    one, other = (CacheStore(tmp_path / "store", durability="none") for _ in range(2))
    model, answered = build("full"), threading.Event()
    chat = one.bind(model, toy_tokenizer).chat("mine", SYSTEM)
    chat.send("and the end", **OPTIONS)
    theirs = [*chat.messages, {"role": "user", "content": "of the night"}]
    with ThreadPoolExecutor(1) as pool:
        with other.locked(other.chats.key("mine")):  # another worker looks, and then writes
            sent = pool.submit(chat.send, "in the rest", on_report=lambda _: answered.set(), **OPTIONS)
            assert answered.wait(60)
            assert not wait([sent], timeout=0.5).done
            other.chats.put("mine", theirs)
        with pytest.raises(InvalidRequestError, match="continued elsewhere"):
            sent.result()
    assert other.chats.get("mine") == theirs
