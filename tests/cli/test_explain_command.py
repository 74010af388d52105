import json
import re
from pathlib import Path

import pytest

from kvkeep import CacheStore


@pytest.fixture
def model_folder(tmp_path, tiny_llama, toy_tokenizer):
    folder = tmp_path / "tiny"
    tiny_llama.save_pretrained(folder)
    toy_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def kv(tmp_path, tiny_llama, toy_tokenizer):
    return CacheStore(tmp_path / "store").bind(tiny_llama, toy_tokenizer)


def test_it_says_why(kv, kvkeep, model_folder, tmp_path):
    kv.warm([{"role": "user", "content": "red green blue red"}], name="colours")
    messages = [{"role": "user", "content": "red green red red"}]
    expected = kv.explain(messages)
    assert 0 < expected.diverged_at < expected.prompt_tokens
    result = kvkeep("explain", "--model", model_folder, "--messages", json.dumps(messages))
    assert (result.exit_code, result.stdout) == (0, f"{expected}\n")
    assert "nearest" in result.stdout
    assert "(colours)" in result.stdout
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(messages))
    result = kvkeep("explain", "--model", model_folder, "--messages", f"@{path}", "--format", "json")
    found = json.loads(result.stdout)
    assert (found["tokens"], found["diverged_at"]) == (expected.tokens, expected.diverged_at)
    assert (found["cause"], found["entry"]["names"]) == (expected.cause, ["colours"])


def test_a_text_and_a_file(kv, kvkeep, model_folder, tmp_path):
    text = "red green blue"
    (tmp_path / "prompt.txt").write_text(text)
    for given in ((text,), ("--file", str(tmp_path / "prompt.txt"))):
        result = kvkeep("explain", "--model", model_folder, *given)
        assert result.stdout == f"{kv.explain(text)}\n"
        assert "empty: nothing is stored" in result.stdout


@pytest.mark.parametrize("given", [(), ("text", "--messages", "[]"), ("--messages", "{")])
def test_one_prompt_is_needed(kvkeep, given):
    result = kvkeep("explain", *given)
    assert (result.exit_code, result.stdout) == (2, "")


def test_stats_count_the_reasons_that_generate_reports(kv, kvkeep):
    codes = []
    for prompt in ([5, 6, 7, 8], [5], [9, 8, 7]):
        kv.generate(prompt, max_new_tokens=1)
        codes.append(kv.last_report.reason.partition(":")[0])
        kv.warm([5, 6, 7, 8])
    kv.store.flush()
    kv.store.journal.flush()
    counted = json.loads(kvkeep("stats", "--format", "json").stdout)["misses"]
    assert codes == ["empty", "short", "prefix"]
    assert counted == {"empty": 1, "prefix": 1, "short": 1}


def test_every_reason_of_a_miss_begins_with_a_code_of_the_readme():
    root = Path(__file__).parents[2]
    listed = set(re.findall(r"`([a-z_]+)`", (root / "README.md").read_text().partition("## Reasons")[2]))
    source = "\n".join(path.read_text() for path in (root / "src" / "kvkeep").glob("*.py"))
    given = re.findall(r'\bmiss\(\s*f?"([^"]*)"|entry=None, reason=f?"([^"]*)"|return 0, None, f?"([^"]*)"', source)
    texts = [text for group in given for text in group if text]
    assert len(texts) > 30
    for text in texts:
        code, colon, _ = text.partition(": ")
        assert colon, text
        assert code in listed, text
