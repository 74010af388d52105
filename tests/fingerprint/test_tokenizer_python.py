"""Tokenizers written in Python, and the engines behind them: SentencePiece, tiktoken and mistral-common."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import pydoc_data.topics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import sentencepiece
import tiktoken
import transformers
from elsewhere import run_elsewhere
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models
from transformers import AddedToken, ByT5Tokenizer, CTRLTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint import chat_template_digest, fingerprint_tokenizer

V5 = transformers.__version__.startswith("5.")
TEXTS = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:6]]
BertTokenizer = transformers.BertTokenizerLegacy if V5 else transformers.BertTokenizer
MistralTokenizer = transformers.MistralCommonBackend if V5 else transformers.MistralCommonTokenizer


def check_that_only_rules_count(tokenizer: Any, folder: Path) -> None:
    """Calls, settings of batches, copies, and a save and a load twice over leave the fingerprint alone."""
    before = fingerprint_tokenizer(tokenizer)
    tokenizer(["a b", "a"], padding=tokenizer.pad_token is not None, truncation=True, max_length=2)
    tokenizer.encode("some words that were never seen before: 12345")
    tokenizer.padding_side, tokenizer.model_max_length = "left", 3
    assert fingerprint_tokenizer(tokenizer) == before
    tokenizer.save_pretrained(folder / "first")
    first = type(tokenizer).from_pretrained(folder / "first")
    first.save_pretrained(folder / "second")
    second = type(tokenizer).from_pretrained(folder / "second")
    copies = [first, second, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))]
    assert {fingerprint_tokenizer(one) for one in copies} == {before}


# --- rules in Python ---


def ctrl(folder: Path, **options: Any) -> Any:
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b</w>": 1, "a b</w>": 2, "<unk>": 3}))
    merges = options.pop("merges", ["a b</w>", "b a</w>"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), **options)


def bert(folder: Path, **options: Any) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "ab", "##c", ",", "e", "école", "日"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return BertTokenizer(str(folder / "vocab.txt"), **options)


def test_merges_and_added_tokens_count(tmp_path: Path) -> None:
    check_that_only_rules_count(ctrl(tmp_path), tmp_path)
    first = fingerprint_tokenizer(ctrl(tmp_path))
    assert first == "e5358b0e9a366d588b6cd561959d3d4c"  # under every version of transformers
    with_token, with_flag = ctrl(tmp_path), ctrl(tmp_path)
    with_token.add_tokens(["kvkeep"])
    with_flag.add_tokens([AddedToken("kvkeep", lstrip=True)])
    others = [
        ctrl(tmp_path, merges=["b a</w>", "a b</w>"]),
        ctrl(tmp_path, merges=["a b</w>"]),
        ctrl(tmp_path, split_special_tokens=True),
        with_token,
        with_flag,
        ByT5Tokenizer(),
    ]
    assert len({first, *(fingerprint_tokenizer(one) for one in others)}) == 1 + len(others)


def test_a_tokenizer_without_a_file_has_a_fingerprint(tmp_path: Path) -> None:
    check_that_only_rules_count(ByT5Tokenizer(), tmp_path)
    assert fingerprint_tokenizer(ByT5Tokenizer(extra_ids=7)) != fingerprint_tokenizer(ByT5Tokenizer())


def test_each_switch_counts_when_it_is_given_and_when_it_is_set_later(tmp_path: Path) -> None:
    check_that_only_rules_count(bert(tmp_path), tmp_path)
    switches = {"do_lower_case": False, "strip_accents": False, "tokenize_chinese_chars": False}
    given = [fingerprint_tokenizer(bert(tmp_path, **{name: value})) for name, value in switches.items()]
    later = [bert(tmp_path) for _ in switches]
    for tokenizer, (name, value) in zip(later, switches.items(), strict=True):
        setattr(tokenizer.basic_tokenizer, name, value)
    assert len({fingerprint_tokenizer(bert(tmp_path)), *given}) == 4
    assert fingerprint_tokenizer(bert(tmp_path)) not in {fingerprint_tokenizer(one) for one in later}


class Characters(PreTrainedTokenizer):
    """The kind that a model's repository brings along: one id a character, no file."""

    def __init__(self, characters: str = "abcdefAB", **options: Any) -> None:
        self.characters = {character: i for i, character in enumerate(characters)}
        super().__init__(**({"unk_token": "a"} | options))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.characters)

    def _tokenize(self, text: str) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.characters.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.characters)[index]

    def save_vocabulary(self, *_: Any, **__: Any) -> tuple[()]:
        return ()


class LowerCase(Characters):
    def _tokenize(self, text: str) -> list[str]:
        return list(text.lower())


def test_rules_that_are_program_count_by_what_they_do(tmp_path: Path) -> None:
    check_that_only_rules_count(Characters(), tmp_path)
    found = [Characters(), LowerCase(), Characters("abcdefBA"), Characters("abcdefABC")]
    assert len({fingerprint_tokenizer(one) for one in found}) == 4


# --- SentencePiece ---


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type=request.param,
        max_sentence_length=100_000,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def slow(model: Path, **options: Any) -> Any:
    settings = {"legacy": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    if V5:
        from transformers import SentencePieceBackend

        return SentencePieceBackend(vocab_file=str(model), **(settings | options))
    return transformers.LlamaTokenizer(str(model), **(settings | options))


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_counts_by_its_model(pieces: Path, tmp_path: Path, legacy: bool) -> None:
    check_that_only_rules_count(slow(pieces, legacy=legacy), tmp_path)
    (tmp_path / "elsewhere.model").write_bytes(pieces.read_bytes())
    first = fingerprint_tokenizer(slow(pieces, legacy=legacy))
    assert fingerprint_tokenizer(slow(tmp_path / "elsewhere.model", legacy=legacy)) == first
    assert fingerprint_tokenizer(slow(pieces, legacy=not legacy)) != first


def test_each_part_of_a_sentencepiece_model_counts(pieces: Path, tmp_path: Path) -> None:
    def one_score(proto: Any) -> None:
        proto.pieces[50].score -= 0.25

    def one_flag(proto: Any) -> None:
        proto.normalizer_spec.remove_extra_whitespaces = False

    def two_ids(proto: Any) -> None:
        proto.pieces[50].piece, proto.pieces[51].piece = proto.pieces[51].piece, proto.pieces[50].piece

    seen = {fingerprint_tokenizer(slow(pieces))}
    changes: list[Callable[[Any], None]] = [one_score, one_flag, two_ids]
    for number, change in enumerate(changes):
        proto = sentencepiece_model_pb2.ModelProto.FromString(pieces.read_bytes())
        change(proto)
        (tmp_path / f"{number}.model").write_bytes(proto.SerializeToString())
        seen.add(fingerprint_tokenizer(slow(tmp_path / f"{number}.model")))
    with_token = slow(pieces)
    with_token.add_tokens(["kvkeep"])
    assert len(seen | {fingerprint_tokenizer(with_token)}) == 5


SEVERAL = """
import sys, tiktoken
from transformers import NAME as Slow
from kvkeep.fingerprint import fingerprint_tokenizer
tokenizer = Slow(vocab_file=sys.argv[1], legacy=True, unk_token="<unk>")
for i in range(8):
    engine = tiktoken.Encoding("", pat_str="a", mergeable_ranks={bytes([i]): 0}, special_tokens={})
    setattr(tokenizer, f"engine_{i}", engine)
print(fingerprint_tokenizer(tokenizer))
"""


@pytest.mark.parametrize("pieces", ["bpe"], indirect=True)
def test_processes_with_other_hash_seeds_agree(pieces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several engines in one tokenizer, because the order of a set of them is another in each process."""
    program = SEVERAL.replace("NAME", "SentencePieceBackend" if V5 else "LlamaTokenizer")
    (printed,) = run_elsewhere(program, [pieces])
    monkeypatch.setattr(sys, "argv", ["-c", str(pieces)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(program, here := {})
    first, second = printed.split()[-1], fingerprint_tokenizer(here["tokenizer"])
    assert first == second and len(first) == 32


# --- tiktoken ---


def encoding(
    *, merges: tuple[bytes, ...] = (b"th", b"the", b" the"), pattern: str = r" ?\w+|\s", **special: int
) -> Any:
    tokens = [*(bytes([i]) for i in range(256)), *merges]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special or {"<s>": 300})


class OnTiktoken(PreTrainedTokenizer):
    """The kind of Qwen's and Kimi's first releases: an encoding in an attribute, bytes for tokens."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return int(self.model.n_vocab)

    def get_vocab(self) -> Any:
        return dict(self.model._mergeable_ranks)

    def tokenize(self, text: str, **_: Any) -> list[Any]:
        return [self.model.decode_single_token_bytes(i) for i in self.model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token: Any) -> int:
        return int(self.model._mergeable_ranks[token])


def test_a_tokenizer_on_tiktoken_counts_by_its_encoding() -> None:
    first = fingerprint_tokenizer(OnTiktoken(encoding()))
    assert fingerprint_tokenizer(OnTiktoken(encoding())) == first
    assert fingerprint_tokenizer(copy.deepcopy(OnTiktoken(encoding()))) == first
    others = [
        encoding(merges=(b"th", b"the")),
        encoding(merges=(b"th", b" the", b"the")),
        encoding(merges=(b"th", b"the", b"xq")),  # no text of ours has it
        encoding(pattern=r" ?\w+|[\s]"),
        encoding(s=301),
    ]
    assert len({first, *(fingerprint_tokenizer(OnTiktoken(one)) for one in others)}) == 6


class Lossy(OnTiktoken):
    """The kind whose vocabulary is text, so that bytes which are no text fall together."""

    def get_vocab(self) -> dict[str, int]:
        return {"?": 0}


def test_the_ids_of_an_encoding_count_whatever_the_vocabulary_says() -> None:
    tokens = [*(bytes([i]) for i in range(256)), b"xq"]  # no text of ours has the last
    ids = [range(257), [*range(256), 300]]
    found = [
        tiktoken.Encoding("", pat_str=r"\w+", mergeable_ranks=dict(zip(tokens, one, strict=True)), special_tokens={})
        for one in ids
    ]
    assert len({fingerprint_tokenizer(Lossy(one)) for one in found}) == 2


def test_an_encoding_that_transformers_converted_has_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # it would keep what it once read from a path
    special = {"extra_special_tokens" if V5 else "additional_special_tokens": ["<s>"]}
    found = []
    for merges in [(b"th", b"the"), (b"th", b"the"), (b"th", b"he")]:
        ranks = encoding(merges=merges)._mergeable_ranks.items()
        lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks]
        (tmp_path / "tokenizer.model").write_text("\n".join(lines))
        backend = TikTokenConverter(str(tmp_path / "tokenizer.model"), **special).converted()
        found.append(fingerprint_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert found[0] == found[1] != found[2]


# --- mistral-common ---


def tekken(
    path: Path, *, merges: tuple[bytes, ...] = (b"th", b"the"), pattern: str = r" ?\w+|\s", **options: Any
) -> Any:
    tokens = [*(bytes([i]) for i in range(256)), *merges]
    vocabulary = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    sizes = {"num_vocab_tokens": len(tokens), "default_num_special_tokens": 20, "default_vocab_size": 20 + len(tokens)}
    path.mkdir()
    file = path / "tekken.json"
    file.write_text(json.dumps({"config": {"pattern": pattern, "version": "v3"} | sizes, "vocab": vocabulary}))
    return MistralTokenizer(file, **options)


def test_mistral_common_counts_by_its_encoding(tmp_path: Path) -> None:
    tokenizer = tekken(tmp_path / "a")
    first = fingerprint_tokenizer(tokenizer)
    tokenizer(["the one", "the"], padding=True, truncation=True, max_length=8)
    tokenizer.padding_side, tokenizer.model_max_length = "right", 3
    assert fingerprint_tokenizer(tokenizer) == first
    assert fingerprint_tokenizer(tekken(tmp_path / "b")) == first
    tokenizer.save_pretrained(tmp_path / "c")
    assert fingerprint_tokenizer(MistralTokenizer.from_pretrained(tmp_path / "c")) == first
    assert chat_template_digest(tokenizer) is None
    others = [
        tekken(tmp_path / "d", merges=(b"th", b"he")),
        tekken(tmp_path / "e", merges=(b"th", b"xq")),
        tekken(tmp_path / "f", pattern=r" ?\w+|[\s]"),
    ]
    assert len({first, *(fingerprint_tokenizer(one) for one in others)}) == 4


def test_the_tokenizers_that_mistral_common_brings() -> None:
    data = Path(mistral_common.__file__).parent / "data"
    # transformers 4.57.6 cannot open mistral-common's SentencePiece files any more
    names = ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"] if V5 else ["tekken_240911.json"]
    found = [fingerprint_tokenizer(MistralTokenizer(data / name)) for name in names]
    again = [fingerprint_tokenizer(MistralTokenizer(data / name)) for name in names]
    assert again == found and len(set(found)) == len(names)


# --- what cannot be read ---


class WithoutVocabulary(Characters):
    def get_vocab(self) -> dict[str, int]:
        raise NotImplementedError("no vocabulary")


class WithoutIds(Characters):
    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise ValueError("words and boxes, please")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Tokenizer(models.BPE()), "Tokenizer is not a tokenizer whose rules kvkeep can read; give"),
        (encoding, "Encoding is not a tokenizer whose rules kvkeep can read; give"),
        (sentencepiece.SentencePieceProcessor, "SentencePieceProcessor is not a tokenizer whose rules"),
        (WithoutIds, r"WithoutIds is not .* can read \(words and boxes, please\); give a fast tokenizer"),
    ],
    ids=["a bare backend", "a bare encoding", "a bare model", "no ids of a text"],
)
def test_what_cannot_be_read_is_refused(build: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UnsupportedRequestError, match=f"^{reason}.*bind\\(model, None\\) and prompts as token ids$"):
        fingerprint_tokenizer(build())


def test_a_tokenizer_without_a_vocabulary_is_refused() -> None:
    tokenizer = Characters()
    tokenizer.__class__ = WithoutVocabulary
    with pytest.raises(UnsupportedRequestError, match=r"^WithoutVocabulary .*\(no vocabulary\); give"):
        fingerprint_tokenizer(tokenizer)
