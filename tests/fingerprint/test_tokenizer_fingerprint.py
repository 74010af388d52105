from __future__ import annotations

import copy
import json
import pickle
import pydoc_data.topics
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from elsewhere import run_elsewhere
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
    assert fingerprint_tokenizer(pickle.loads(pickle.dumps(tokenizer))) == fingerprint_tokenizer(tokenizer)
    loaded.name_or_path = "somebody/else"
    assert fingerprint_tokenizer(loaded) == fingerprint_tokenizer(tokenizer)


def test_it_can_be_taken_while_another_thread_uses_the_tokenizer(tokenizer: Any) -> None:
    before = fingerprint_tokenizer(tokenizer)
    enough = threading.Event()

    def use() -> int:
        calls = 0
        while not enough.is_set() or calls < 200:
            tokenizer("one two three", padding="max_length", max_length=8 + calls % 3, truncation=True)
            calls += 1
        return calls

    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(use)
        seen = {fingerprint_tokenizer(tokenizer) for _ in range(100)}
        enough.set()
        assert calls.result() >= 200
    assert seen == {before}


def test_the_order_of_the_serialised_form_does_not_count(trained: str) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, list):
            return [shuffled(item) for item in value]
        if not isinstance(value, dict):
            return value
        items = list(value.items())
        random.Random(0).shuffle(items)
        return {key: shuffled(item) for key, item in items}

    rules = shuffled(json.loads(trained))
    rules["added_tokens"].reverse()
    text = json.dumps(rules)
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
        "another that does": lambda rules: rules["model"]["vocab"].update({',"vocab":': 600}),
        "normaliser": lambda rules: rules.update(normalizer={"type": "Lowercase"}),
        "no normaliser": lambda rules: rules.update(normalizer=None),
        "pre-tokenizer": lambda rules: rules["pre_tokenizer"].update(use_regex=False),
        "no post-processor": lambda rules: rules.update(post_processor=None),
        "a token after the text": lambda rules: rules["post_processor"]["single"].reverse(),
        "another token before the text": lambda rules: rules["post_processor"]["special_tokens"]["<s>"].update(ids=[2]),
        "a flag of an added token": lambda rules: rules["added_tokens"][1].update(lstrip=True),
        "one more added token": lambda rules: rules["added_tokens"].append(
            dict(rules["added_tokens"][3], id=600, content="x")
        ),
        "byte fallback": lambda rules: rules["model"].update(byte_fallback=True),
        "a suffix": lambda rules: rules["model"].update(end_of_word_suffix="</w>"),
        "no unknown token": lambda rules: rules["model"].update(unk_token=None),
    }


@pytest.mark.parametrize("name", edits())
def test_each_rule_counts(trained: str, name: str) -> None:
    rules = json.loads(trained)
    edits()[name](rules)
    assert fingerprint_tokenizer(wrap(json.dumps(rules))) != fingerprint_tokenizer(wrap(trained))


def test_each_flag_of_a_normaliser_counts(trained: str) -> None:
    flags = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": False, "lowercase": True}
    settings = [flags, *(flags | {name: not value} for name, value in flags.items())]
    normals = [{"type": "BertNormalizer"} | one for one in settings]
    texts = [json.dumps(json.loads(trained) | {"normalizer": normal}) for normal in normals]
    assert len({fingerprint_tokenizer(wrap(text)) for text in texts}) == 5


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
    (printed,) = run_elsewhere(program, [tmp_path / "tokenizer.json"])
    assert printed.split()[-1] == fingerprint_tokenizer(tokenizer)


# --- the same under every version of transformers ---


def template(single: str, pair: str | None = None) -> Any:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[("<s>", 1), ("</s>", 2)])


SAME_IDS: dict[str, list[Any]] = {
    "nothing": [
        None,
        template("$A"),
        template("$A:0", "$A:0 $B:1"),
        processors.ByteLevel(trim_offsets=False),
        processors.Sequence([processors.ByteLevel(), template("$A")]),
    ],
    "around": [
        template("<s> $A </s>"),
        template("<s>:1 $A:1 </s>:0", "<s> $A $B"),
        processors.BertProcessing(("</s>", 2), ("<s>", 1)),
        processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=False),
        processors.Sequence([processors.ByteLevel(), template("<s> $A </s>")]),
    ],
    "before": [template("<s> $A"), processors.Sequence([template("<s> $A"), processors.ByteLevel()])],
    "after": [template("$A </s>")],
    "twice": [template("<s> <s> $A")],
}


def test_a_post_processor_counts_by_the_ids_that_it_adds(trained: str) -> None:
    digests = {}
    for name, alike in SAME_IDS.items():
        found, ids = set(), set()
        for one in alike:
            rules = json.loads(trained) | {"post_processor": None}
            tokenizer = wrap(json.dumps(rules))
            if one is not None:
                tokenizer.backend_tokenizer.post_processor = one
            found.add(fingerprint_tokenizer(tokenizer))
            ids.add(tuple(tokenizer("one two").input_ids))
        assert (len(found), len(ids)) == (1, 1), name
        digests[name] = found.pop()
    assert len(set(digests.values())) == len(SAME_IDS)


def test_a_special_token_may_be_called_model(trained: str) -> None:
    def with_token(name: str) -> str:
        rules = json.loads(trained)
        rules["added_tokens"].append(dict(rules["added_tokens"][0], id=600, content=name))
        special = {
            "<s>": rules["post_processor"]["special_tokens"]["<s>"],
            name: {"id": name, "ids": [600], "tokens": [name]},
        }
        single = [{"SpecialToken": {"id": one, "type_id": 0}} for one in special]
        rules["post_processor"] |= {
            "special_tokens": special,
            "single": [*single, {"Sequence": {"id": "A", "type_id": 0}}],
        }
        return json.dumps(rules)

    assert wrap(with_token("model")).backend_tokenizer.to_str().count(',"model":{') == 2
    seen = {fingerprint_tokenizer(wrap(text)) for text in (trained, with_token("model"), with_token("pattern"))}
    assert len(seen) == 3


def test_no_affix_is_no_affix(trained: str) -> None:
    rules = json.loads(trained)
    rules["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokenizer = wrap(json.dumps(rules))
    assert '"continuing_subword_prefix":""' in tokenizer.backend_tokenizer.to_str()
    assert fingerprint_tokenizer(tokenizer) == fingerprint_tokenizer(wrap(trained))


def test_a_copy_of_a_unigram_model_is_the_same_and_another_score_is_not() -> None:
    """The library's reader changes the last bit of a score that is no short number."""
    draw = random.Random(3)
    pieces = [("<unk>", 0.0), *((chr(97 + i % 26) * (1 + i // 26), -3 - 9 * draw.random()) for i in range(400))]

    def wrapped(pieces: list[tuple[str, float]]) -> Any:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, 0)), unk_token="<unk>")
        tokenizer._tokenizer = Tokenizer(models.Unigram(pieces, 0))  # the one that it was given is copied
        tokenizer._tokenizer.add_special_tokens(["<unk>"])
        return tokenizer

    tokenizer = wrapped(pieces)
    again = copy.deepcopy(tokenizer)
    assert again.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str()
    assert fingerprint_tokenizer(again) == fingerprint_tokenizer(tokenizer)
    for at, changed in ((5, (pieces[5][0], pieces[5][1] + 1e-5)), (400, ("new", pieces[400][1]))):
        others = [*pieces[:at], changed, *pieces[at + 1 :]]
        assert fingerprint_tokenizer(wrapped(others)) != fingerprint_tokenizer(tokenizer)
    assert fingerprint_tokenizer(wrapped([pieces[0], *reversed(pieces[1:])])) != fingerprint_tokenizer(tokenizer)


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", *alphabet, "th", "the", "Ġthe"])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["kv keep"])
    return backend


def word_piece() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "a", "##b", "é"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


def unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.25), ("▁a", -1.1), ("a", -3.7)], unk_id=0))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    return backend


def spaces_as_pieces() -> Tokenizer:
    vocabulary = {
        token: i for i, token in enumerate(["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"])
    }
    backend = Tokenizer(
        models.BPE(vocabulary, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


GOLDEN: dict[str, tuple[Callable[[], Tokenizer], dict[str, str], str]] = {
    "byte-level BPE": (byte_level, {"bos_token": "<s>"}, "24a5a0aa0283c1897c32772f72c5faa9"),
    "WordPiece": (
        word_piece,
        {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
        "9b130498c0f4f3f0fb47dac36b9d63fe",
    ),
    "Unigram": (unigram, {"unk_token": "<unk>"}, "6b146364a994bcca9bd55254caa8d2d2"),
    "SentencePiece-like BPE": (
        spaces_as_pieces,
        {"unk_token": "<unk>", "bos_token": "<s>"},
        "82d58f8e661a5d550d90e09dbc741d2d",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_tokenizer_json_has_one_fingerprint_for_ever(name: str, tmp_path: Path) -> None:
    build, roles, digest = GOLDEN[name]
    build().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | roles))
    assert fingerprint_tokenizer(AutoTokenizer.from_pretrained(tmp_path)) == digest


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer"])
def test_the_class_that_wraps_a_tokenizer_json_does_not_count(name: str, tmp_path: Path) -> None:
    """Versions of transformers build these classes in different ways; two constants hold under all of them."""
    backend = byte_level()
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    split += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    if name == "Qwen2Tokenizer":
        words = pre_tokenizers.Split(Regex(split), "isolated")
        bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer, backend.normalizer = pre_tokenizers.Sequence([words, bare]), normalizers.NFC()
    backend.save(str(tmp_path / "tokenizer.json"))
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} | roles))
    golden = {"GPT2": "6c44394e98cf9be1a6db07a6db358b38", "Qwen2": "1caf4e3e567003c5e0752e1f400cc082"}
    assert fingerprint_tokenizer(AutoTokenizer.from_pretrained(tmp_path)) == golden[name.partition("Tokenizer")[0]]


def test_smollm2_has_one_fingerprint_under_every_version_that_converts_it(smollm2_tokenizer: Any) -> None:
    assert fingerprint_tokenizer(smollm2_tokenizer) == "e34c603ce22dfa83791746a3d1c70e16"


# --- what cannot be read ---


def test_a_backend_with_a_part_in_python_is_refused(tokenizer: Any) -> None:
    class Words:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda number, part: [part])

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Words())
    with pytest.raises(UnsupportedRequestError, match=r"\(Custom .*\); give a fast tokenizer .* bind\(model, None\)"):
        fingerprint_tokenizer(tokenizer)


def test_a_vocabulary_of_262_thousand_takes_less_than_a_second() -> None:
    letters = [chr(ordinal) for ordinal in range(0x4E00, 0x4E00 + 512)]
    pairs = [(a, b) for a in letters for b in letters][: 262_144 - len(letters)]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=pairs)))
    assert len(tokenizer) == 262_144
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        fingerprint_tokenizer(tokenizer)
        seconds.append(time.perf_counter() - begin)
    print(f"fingerprint of a 262k vocabulary: median {statistics.median(seconds) * 1e3:.0f} ms")
    assert min(seconds) < 1
