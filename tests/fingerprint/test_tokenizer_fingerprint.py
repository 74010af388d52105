from __future__ import annotations

import copy
import json
import os
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import chat_template_digest, fingerprint_tokenizer

Edit = Callable[[dict[str, Any]], Any]
TEXTS = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:12]]


@pytest.fixture(scope="module")
def trained() -> str:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text: str = backend.to_str()
    return text


def wrap(text: str, **options: Any) -> Any:
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **(roles | options))


@pytest.fixture
def tokenizer(trained: str) -> Any:
    return wrap(trained)


def test_no_tokenizer_has_its_own_fixed_digest() -> None:
    assert fingerprint_tokenizer(None) == "5a99564473f7631b6044d9ce9a9bd855"


def test_calls_leave_the_fingerprint_alone(tokenizer: Any) -> None:
    before = fingerprint_tokenizer(tokenizer)
    serialised = tokenizer.backend_tokenizer.to_str()
    tokenizer(["one two three", "one"], padding="max_length", max_length=8, truncation=True)
    assert tokenizer.backend_tokenizer.to_str() != serialised
    assert fingerprint_tokenizer(tokenizer) == before
    tokenizer.padding_side, tokenizer.truncation_side = "left", "left"
    tokenizer(["one two three", "one"], padding=True, truncation=True, max_length=4, pad_to_multiple_of=4)
    tokenizer("<s>", split_special_tokens=True, add_special_tokens=False)
    tokenizer.model_max_length = 7
    assert fingerprint_tokenizer(tokenizer) == before


def test_saved_and_loaded_again_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.name_or_path == str(tmp_path)
    assert fingerprint_tokenizer(loaded) == fingerprint_tokenizer(tokenizer)
    assert fingerprint_tokenizer(copy.deepcopy(tokenizer)) == fingerprint_tokenizer(tokenizer)


def test_the_order_of_the_serialised_form_does_not_count(trained: str) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, list):
            return [shuffled(item) for item in value]
        if not isinstance(value, dict):
            return value
        items = list(value.items())
        random.Random(0).shuffle(items)
        return {key: shuffled(item) for key, item in items}

    text = json.dumps(shuffled(json.loads(trained)))
    assert text != trained
    assert fingerprint_tokenizer(wrap(text)) == fingerprint_tokenizer(wrap(trained))


def edits() -> dict[str, Edit]:
    def swap_ids(rules: dict[str, Any]) -> None:
        vocabulary = rules["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    def swap_merges(rules: dict[str, Any]) -> None:
        merges = rules["model"]["merges"]
        merges[3], merges[4] = merges[4], merges[3]

    return {
        "one merge removed": lambda rules: rules["model"]["merges"].pop(5),
        "two merges swapped": swap_merges,
        "two ids swapped": swap_ids,
        "a token added": lambda rules: rules["model"]["vocab"].update(zz=600),
        "a token that looks like JSON": lambda rules: rules["model"]["vocab"].update({',"model":{': 600}),
        "normaliser": lambda rules: rules.update(normalizer={"type": "Lowercase"}),
        "no normaliser": lambda rules: rules.update(normalizer=None),
        "pre-tokenizer": lambda rules: rules["pre_tokenizer"].update(use_regex=False),
        "no post-processor": lambda rules: rules.update(post_processor=None),
        "a flag of an added token": lambda rules: rules["added_tokens"][1].update(lstrip=True),
        "byte fallback": lambda rules: rules["model"].update(byte_fallback=True),
    }


@pytest.mark.parametrize("name", edits())
def test_each_rule_counts(trained: str, name: str) -> None:
    rules = json.loads(trained)
    edits()[name](rules)
    assert fingerprint_tokenizer(wrap(json.dumps(rules))) != fingerprint_tokenizer(wrap(trained))


def test_live_changes_count(tokenizer: Any) -> None:
    seen = {fingerprint_tokenizer(tokenizer)}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    seen.add(fingerprint_tokenizer(tokenizer))
    tokenizer.add_tokens(["kvkeep"])
    seen.add(fingerprint_tokenizer(tokenizer))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    seen.add(fingerprint_tokenizer(tokenizer))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    seen.add(fingerprint_tokenizer(tokenizer))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    seen.add(fingerprint_tokenizer(tokenizer))
    tokenizer.bos_token = "</s>"
    seen.add(fingerprint_tokenizer(tokenizer))
    tokenizer.split_special_tokens = True
    seen.add(fingerprint_tokenizer(tokenizer))
    assert len(seen) == 8


def test_the_pad_token_and_the_way_back_to_text_do_not_count(tokenizer: Any) -> None:
    before = fingerprint_tokenizer(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    assert fingerprint_tokenizer(tokenizer) == before


def test_a_processor_counts_by_its_tokenizer(tokenizer: Any) -> None:
    class Processor:
        def __init__(self) -> None:
            self.tokenizer = tokenizer
            self.chat_template = "{{ pictures }}"

    assert fingerprint_tokenizer(Processor()) == fingerprint_tokenizer(tokenizer)
    assert chat_template_digest(Processor()) != chat_template_digest(tokenizer)


def test_the_chat_template_is_recorded_beside(tokenizer: Any) -> None:
    before = fingerprint_tokenizer(tokenizer)
    assert chat_template_digest(None) is None
    assert chat_template_digest(tokenizer) is None
    digests = []
    for template in ("{{ a }}", "{{ b }}", {"default": "{{ a }}", "tool_use": "{{ b }}"}):
        tokenizer.chat_template = template
        digests.append(chat_template_digest(tokenizer))
    assert len(set(digests)) == 3 and all(len(digest) == 32 for digest in digests if digest)
    assert fingerprint_tokenizer(tokenizer) == before


def test_a_tokenizer_written_in_python_counts_by_its_vocabulary_and_switches(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer, CTRLTokenizer

    vocabulary = {"a": 0, "b</w>": 1, "a b</w>": 2, "<unk>": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\nb a</w>\n")

    def slow(**options: Any) -> Any:
        return CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), **options)

    first = fingerprint_tokenizer(slow())
    assert fingerprint_tokenizer(slow()) == first
    assert fingerprint_tokenizer(slow(split_special_tokens=True)) != first
    (tmp_path / "merges.txt").write_text("#version: 0.2\nb a</w>\na b</w>\n")
    assert fingerprint_tokenizer(slow()) != first
    assert len({first, fingerprint_tokenizer(ByT5Tokenizer())}) == 2


@pytest.mark.parametrize("thing", [object(), "gpt2", lambda text: [1]], ids=["object", "name", "function"])
def test_what_is_no_tokenizer_is_named(thing: Any) -> None:
    with pytest.raises(
        UnsupportedRequestError, match=rf"^{type(thing).__qualname__} is not a tokenizer .*bind\(model, None"
    ):
        fingerprint_tokenizer(thing)


def test_another_process_agrees(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    program = (
        "import sys; from transformers import PreTrainedTokenizerFast; from kvkeep.fingerprint import *\n"
        "print(fingerprint_tokenizer(PreTrainedTokenizerFast(tokenizer_file=sys.argv[1], unk_token='<unk>', "
        "bos_token='<s>', eos_token='</s>', pad_token='<pad>')))"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )
    assert child.stdout.split()[-1] == fingerprint_tokenizer(tokenizer)


def test_a_vocabulary_of_49_thousand_takes_less_than_150_milliseconds() -> None:
    letters = [chr(ordinal) for ordinal in range(0x4E00, 0x4E00 + 221)]
    pairs = [(a, b) for a in letters for b in letters][: 49_152 - len(letters)]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=pairs)))
    assert len(tokenizer) == 49_062
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        fingerprint_tokenizer(tokenizer)
        seconds.append(time.perf_counter() - begin)
    print(f"fingerprint of a 49k vocabulary: median {statistics.median(seconds) * 1e3:.0f} ms")
    assert min(seconds) < 0.15
