"""The models that the demo and the tests run on are what their GGUF files say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.demo import models
from kvkeep.demo.gguf_tokenizer import merges_by_position, write_tokenizer
from kvkeep.errors import InvalidRequestError


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert models.convert(gguf_path, folder) == folder
    return folder


def test_the_folder_names_the_converter_and_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_MODELS", str(tmp_path))
    assert models.model_folder("smollm2") == tmp_path / f"smollm2-1-tf{version('transformers')}"
    monkeypatch.delenv("KVKEEP_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.model_folder("x").relative_to(tmp_path).parts[:2] == ("kvkeep", "models")


def test_the_weights_are_those_of_the_file(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    weights, written = model.state_dict(), tiny_gguf.llama_tensors()
    names = {
        "model.embed_tokens": "token_embd",
        "lm_head": "token_embd",
        "model.norm": "output_norm",
        "model.layers.1.self_attn.v_proj": "blk.1.attn_v",
        "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
    }
    for ours, theirs in names.items():
        assert torch.equal(weights[f"{ours}.weight"], torch.from_numpy(written[theirs])), ours
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # GGUF keeps the two halves of a rotated head interleaved.
    keys = torch.from_numpy(written["blk.0.attn_k"]).view(tiny_gguf.HEAD // 2, 2, tiny_gguf.HIDDEN)
    assert torch.equal(weights["model.layers.0.self_attn.k_proj.weight"], keys.transpose(0, 1).flatten(0, 1))


def test_the_rope_base_survives(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    exponents = torch.arange(0, tiny_gguf.HEAD, 2) / tiny_gguf.HEAD
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, tiny_gguf.ROPE_BASE**-exponents)


def test_both_spellings_of_the_rope_base_are_written(tmp_path: Path) -> None:
    config = tmp_path / "config.json"

    def spelled(rope: str) -> str:
        config.write_text(f'{{"rope_parameters": {rope}}}')
        models._spell_rope_both_ways(config)
        return config.read_text()

    assert '"rope_theta": 7.0\n}' in spelled('{"rope_theta": 7.0, "rope_type": "default"}')
    by_layer = spelled('{"full_attention": {"rope_theta": 8.0}, "sliding_attention": {"rope_theta": 9.0}}')
    assert '\n  "rope_theta": 8.0' in by_layer
    assert '\n  "rope_local_base_freq": 9.0' in by_layer


def test_the_tokenizer_is_the_vocabulary_of_the_file(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = {token: number for number, token in enumerate(tiny_gguf.SMOLLM_TOKENS)}
    text = "<|im_start|>hi<sep> hi 12é\n 7<|im_end|>"  # a digit stands alone, so the space before it joins the line end
    pieces = ["<|im_start|>", "hi", "<sep>", "Ġhi", "Ġ", "1", "2", "Ã", "©", "ĊĠ", "7", "<|im_end|>"]
    assert tokenizer(text).input_ids == [ids[piece] for piece in pieces]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == "hi hi 12é\n 7"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.chat_template == tiny_gguf.CHAT
    assert sorted(tokenizer(text)) == ["attention_mask", "input_ids"]


def test_gemma_vocabularies_become_merges_and_visible_spaces(tmp_path: Path) -> None:
    write_tokenizer(tiny_gguf.write_gemma_vocabulary(tmp_path / "tiny.gguf"), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = {token: number for number, token in enumerate(tiny_gguf.GEMMA_TOKENS)}
    text = "abc ab<turn>\n\n  a\u0101"
    pieces = ["<bos>", "abc", "▁ab", "<turn>", "\n\n", "  ", "a", "<0xC4>", "<0x81>"]
    assert tokenizer(text).input_ids == [ids[piece] for piece in pieces]
    assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text
    assert tokenizer.chat_template.startswith("{#- Gemma")


def test_merges_follow_the_order_of_the_vocabulary() -> None:
    assert merges_by_position(["a", "b", "ab", "c", "bc", "abc"]) == [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]


def test_another_kind_of_vocabulary_is_refused(tmp_path: Path) -> None:
    other = tiny_gguf.write_llama(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(InvalidRequestError, match=r"other\.gguf holds a gpt2 vocabulary \(llama-bpe\)"):
        models.convert(other, tmp_path / "models" / "other")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing(gguf_path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_path.read_bytes()[:-1000])
    with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever the reader of such a file raises
        models.convert(cut, tmp_path / "models" / "cut")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_converted_folder_is_left_as_it_is(converted: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    assert models.convert(tmp_path / "no such file.gguf", converted) == converted
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == before


def test_of_two_conversions_the_first_stays(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "tiny"

    def another_process_is_faster(path: Path, fresh: Path) -> None:
        monkeypatch.setattr(models, "write_tokenizer", write_tokenizer)
        models.convert(path, folder)
        (folder / "first").touch()
        write_tokenizer(path, fresh)

    monkeypatch.setattr(models, "write_tokenizer", another_process_is_faster)
    assert models.convert(gguf_path, folder) == folder
    assert (folder / "first").is_file()
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_smollm2_is_whole(smollm2, smollm2_tokenizer) -> None:
    assert smollm2.get_input_embeddings().weight is smollm2.get_output_embeddings().weight
    torch.testing.assert_close(smollm2.model.rotary_emb.inv_freq[1].item(), 100_000 ** (-2 / 64))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smollm2_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = smollm2.generate(**ids, max_new_tokens=12, do_sample=False)
    answer = smollm2_tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_gemma_is_whole(gemma, gemma_tokenizer) -> None:
    assert gemma.get_input_embeddings().weight is gemma.get_output_embeddings().weight
    assert gemma.config.layer_types.count("sliding_attention") == 15
    bases = [buffer[1].item() for name, buffer in gemma.named_buffers() if name.endswith("inv_freq")]
    assert sorted({round(base ** (-256 / 2)) for base in bases}) == pytest.approx([10_000, 1_000_000], rel=1e-3)
    ids = gemma_tokenizer("Monday, Tuesday, Wednesday,", return_tensors="pt")
    assert ids["input_ids"].tolist() == [[2, 49381, 236764, 9863, 236764, 10119, 236764]]
    output = gemma.generate(**ids, max_new_tokens=3, do_sample=False)
    assert gemma_tokenizer.decode(output[0, 7:]) == " Thursday, Friday"


def test_gemma_renders_its_turns(gemma_tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": " Hi  "}]},
        {"role": "assistant", "content": "Hello. "},
        {"role": "user", "content": "Bye"},
    ]
    rendered = gemma_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = gemma_tokenizer(rendered, add_special_tokens=False).input_ids
    assert (ids[0], ids.count(2), ids.count(105), ids.count(106)) == (2, 1, 4, 3)


@pytest.mark.parametrize(
    "roles",
    [["assistant"], ["user", "user"], ["user", "assistant", "assistant"], ["system", "assistant"], ["user", "system"]],
)
def test_gemma_refuses_turns_that_do_not_alternate(gemma_tokenizer, roles: list[str]) -> None:
    messages = [{"role": role, "content": "Hi"} for role in roles]
    with pytest.raises(Exception, match="Roles must alternate"):
        gemma_tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pattern"), [("smollm2", "SmolLM2*.gguf"), ("gemma", "gemma*.gguf")])
def test_a_real_model_is_bit_for_bit_what_the_file_gives(name: str, pattern: str) -> None:
    (path,) = (models.models_directory().parent / "gguf").glob(pattern)
    given = models._load(path)
    converted = AutoModelForCausalLM.from_pretrained(models.model_folder(name), dtype=torch.float32)
    weights = converted.state_dict()
    assert weights.keys() == given.state_dict().keys()
    assert [key for key, value in given.state_dict().items() if not torch.equal(value, weights[key])] == []
    assert all(map(torch.equal, converted.buffers(), given.buffers()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_every_version_of_transformers_gets_the_same_bytes(name: str, file: str) -> None:
    folders = sorted(models.models_directory().glob(f"{name}-{models.CONVERTER_VERSION}-tf*"))
    assert len(folders) >= 2, "run `make models` first (`make test-all` does)"
    assert len({hashlib.sha256((folder / file).read_bytes()).hexdigest() for folder in folders}) == 1
