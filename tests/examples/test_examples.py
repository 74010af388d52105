import re
import runpy
from pathlib import Path

import pytest
import torch

from kvkeep import CacheStore, compat

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def entry_of(folder, name):
    return CacheStore(folder / "cache_store").entry(name)


def prefills(folder):
    return CacheStore(folder / "cache_store").journal.totals().prefills


def size(entry):
    return f"{entry.nbytes / 1e6:.1f} MB"


def user(question):
    return {"role": "user", "content": question}


def test_the_readme_lists_every_example():
    rows = [
        line for line in (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    assert sorted(row.split("`")[1] for row in rows) == SCRIPTS


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.endswith(".py")])
def test_it_is_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 60


# --- a system prompt ---


def check_system_prompt(tmp_path, run, says, folder, named):
    lines, names = run("gemma_system_prompt.py", folder)
    entry = entry_of(tmp_path, "ticket-desk")
    assert lines[:2] == [f"the generation config names: {named}", f"stored: {entry.tokens} tokens, {size(entry)}"]
    assert len(lines) == 2 + len(names["QUESTIONS"]) == 4
    for question, line in zip(names["QUESTIONS"], lines[2:], strict=True):
        fed, text = says(names, [*names["system"], user(question)], 16)
        assert line == f"reused {entry.tokens - 1} of {fed} tokens: {question} {text!r}"


def test_a_system_prompt(tmp_path, run, says, build_tiny, toy_tokenizer):
    model = build_tiny("gemma3")
    model.generation_config.cache_implementation = "static"  # as Gemma 3's own names one
    model.save_pretrained(tmp_path / "gemma")
    toy_tokenizer.save_pretrained(tmp_path / "gemma")
    check_system_prompt(tmp_path, run, says, tmp_path / "gemma", "static")


@pytest.mark.slow
def test_a_system_prompt_of_the_real_gemma(tmp_path, run, says, gemma_folder):
    check_system_prompt(tmp_path, run, says, gemma_folder, None)


# --- legacy tuples ---


def test_legacy_tuples(tmp_path, run, says, tiny_folder, tiny_llama, toy_tokenizer):
    ids = toy_tokenizer("The ferry to the island leaves at the green lamp. " * 8, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = tiny_llama(ids, use_cache=True)
    layers = getattr(out, compat.forward_cache_argument(tiny_llama)).layers
    past = tuple((layer.keys, layer.values) for layer in layers)
    torch.save({"input_ids": ids, "past_key_values": past}, tmp_path / "ferry.pt")
    tokens = ids.shape[1]
    lines, names = run("legacy_tuples.py", tmp_path / "ferry.pt", tiny_folder)
    entry = entry_of(tmp_path, "ferry")
    prompt = names["prompt"]
    fed, text = says(names, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, 16)
    assert lines == [
        f"saved: 3 layers of {tokens} tokens, {size(entry)}",
        f"reused: {tokens - 1} of {fed} tokens",
        f"answer: {text!r}",
        f"and back: 3 layers, keys [1, 2, {tokens}, 16], equal: True",
    ]
    assert prefills(tmp_path) == 0


# --- warm offline ---


def test_warm_offline_and_serve(tmp_path, run, says, tiny_folder):
    lines, names = run("warm_offline.py", "warm", tiny_folder)
    names["kv"].store.journal.flush()  # as the end of a process does
    entry = entry_of(tmp_path, "depot")
    assert re.fullmatch(rf"warm: {entry.tokens} tokens, {size(entry)}, in \d+\.\d\d s", *lines)
    before = sorted((tmp_path / "cache_store").rglob("*"))
    ready, *answers = run("warm_offline.py", "serve", tiny_folder)[0]
    assert re.fullmatch(rf"ready: {entry.tokens} tokens loaded and verified in \d+\.\d{{3}} s", ready)
    assert len(answers) == len(names["QUESTIONS"]) == 2
    for question, line in zip(names["QUESTIONS"], answers, strict=True):
        fed, text = says(names, [*names["SYSTEM"], user(question)], 16)
        assert line == f"reused {entry.tokens - 1} of {fed} tokens: {text!r}"
    assert sorted((tmp_path / "cache_store").rglob("*")) == before
    assert prefills(tmp_path) == 1


def test_a_server_does_not_start_cold(tmp_path, run, tiny_folder):
    CacheStore(tmp_path / "cache_store")
    with pytest.raises(SystemExit, match=r"^not warm: empty"):
        run("warm_offline.py", "serve", tiny_folder)


# --- a pool of workers ---


@pytest.mark.slow
def test_a_pool_of_workers(tmp_path, run_apart, says, tiny_folder, tiny_llama, toy_tokenizer):
    *lines, last = run_apart("worker_pool.py", tiny_folder)
    constants = runpy.run_path(str(EXAMPLES / "worker_pool.py"), run_name="constants")
    entry = entry_of(tmp_path, "timetable")
    names = {"model": tiny_llama, "tokenizer": toy_tokenizer}
    for question, line in zip(constants["QUESTIONS"], lines, strict=True):
        fed, text = says(names, [*constants["SYSTEM"], user(question)], 16)
        worker, said = re.fullmatch(r"worker (\d+) (.*)", line).groups()
        assert said == f"reused {entry.tokens - 1} of {fed} tokens: {question} {text!r}"
        assert int(worker) > 1
    assert last == "prefilled by 1 of 2 workers"
    assert prefills(tmp_path) == 1


# --- chat sessions ---


def test_chat_sessions_survive_a_restart(tmp_path, run, says, tiny_folder):
    first, names = run("chat_sessions.py", "anna", "Four hours of sun.", tiny_folder)
    said = [names["SYSTEM"], user("Four hours of sun.")]
    fed, text = says(names, said, 32)
    assert first == ["anna: 0 messages so far", f"reused: 0 of {fed} tokens", f"answer: {text!r}"]
    names["kv"].store.journal.flush()

    second, names = run("chat_sessions.py", "anna", "And in winter?", tiny_folder)
    said += [{"role": "assistant", "content": text}, user("And in winter?")]
    asked, answer = says(names, said, 32)
    reused = int(re.fullmatch(rf"reused: (\d+) of {asked} tokens", second[1])[1])
    assert fed - 1 <= reused < asked
    assert (second[0], second[2:]) == ("anna: 2 messages so far", [f"answer: {answer!r}"])

    other, _ = run("chat_sessions.py", "bert", "Four hours of sun.", tiny_folder)  # shares the beginning, not the words
    assert other == [
        "bert: 0 messages so far",
        f"reused: {fed - 2} of {fed} tokens",
        f"answer: {text!r}",
    ]  # the last token and the guard's are fed


# --- a batch over one document ---


def test_a_batch_over_one_document(tmp_path, run, says, tiny_folder):
    (tmp_path / "rules.txt").write_text("".join(f"Rule {n}: shelf {n * 7 % 23}.\n" for n in range(40)))
    lines, names = run("batch_over_document.py", "rules.txt", tiny_folder)
    (entry,) = CacheStore(tmp_path / "cache_store").entries()
    each = [says(names, prompt, 16) for prompt in names["prompts"]]
    padding = sum(max(fed for fed, _ in each) - fed for fed, _ in each)  # all lines are cut at one slot
    assert lines == [
        f"shared: {entry.tokens} tokens, {size(entry)}",
        f"reused: {3 * (entry.tokens - 1) - padding} of {sum(fed for fed, _ in each)} tokens",
        *(f"{question} {text!r}" for question, (_, text) in zip(names["QUESTIONS"], each, strict=True)),
    ]
