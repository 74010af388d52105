"""The stable cut with the tokenizers and templates of Qwen3, Llama 3.1, DeepSeek V3 and Mistral 7B v0.3.

SmolLM2 and Gemma 3 are in ``test_chat_cut.py``, with many more texts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import mistral_common
import pytest
import torch
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvkeep import CacheStore
from kvkeep.chat import PROBES, stable_prefix
from kvkeep.demo.gguf_tokenizer import merges_by_position
from kvkeep.demo.models import tokenizer_folder
from kvkeep.keys import TokenIds, common_prefix
from kvkeep.prompts import read_prompt

SYSTEM = {"role": "system", "content": "Answer in one word.\nBe kind."}
QUESTION = {"role": "user", "content": "Who are you?"}
ANSWER = {"role": "assistant", "content": "A robot."}
THOUGHT = {"role": "assistant", "content": "<think>\nWhat am I?\n</think>\n\nA robot."}
NINE = ["Hello", "\n\nnew line", "  two", "\ttab", "7", "'s fine", "日本語", "👩‍👩‍👧", "**bold**"]
"""How the next turn may go on; none of them is a probe of the cut itself."""
MOVES = "the template moves text, such as the system prompt or the tools, to the last turn"
DROPS = "the template drops the thinking of earlier turns"
CONVERSATIONS = {
    "system": [SYSTEM],
    "question": [SYSTEM, QUESTION],
    "answered": [SYSTEM, QUESTION, ANSWER],
    "answered without system": [QUESTION, ANSWER],
}


def _fetched(name: str) -> PreTrainedTokenizerFast:
    folder = tokenizer_folder(name)
    if not folder.is_dir():
        if shutil.which("npm") is None:
            pytest.skip("needs npm (Debian's package npm), and then `make models`")
        pytest.fail(f"{folder} is missing: run `make models` first (`make test` does)", pytrace=False)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedTokenizerFast:
    return _fetched("qwen3")


@pytest.fixture(scope="module")
def llama() -> PreTrainedTokenizerFast:
    return _fetched("llama3.1")


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedTokenizerFast:
    return _fetched("deepseek-v3")


MISTRAL = Path(mistral_common.__file__).parent / "data" / "mistral_instruct_tokenizer_240323.model.v3"


@pytest.fixture(scope="module")
def mistral() -> PreTrainedTokenizerFast:
    """The vocabulary of Mistral 7B v0.3 as transformers has it, with the template that Mistral's library gives it."""
    pieces = SentencePieceProcessor(model_file=str(MISTRAL))
    tokens = [pieces.id_to_piece(number) for number in range(pieces.get_piece_size())]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = merges_by_position(tokens)
    order = {left + right: vocab[left + right] for left, right in merges}
    merges.sort(key=lambda pair: order["".join(pair)])
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([token for number, token in enumerate(tokens) if pieces.is_control(number)])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    template = convert_tokenizer_to_chat_template(MISTRAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def going_on(messages, text):
    """The prompt after one more turn that says ``text``."""
    if messages[-1]["role"] == "user":
        return [*messages, {"role": "assistant", "content": text}, QUESTION]
    return [*messages, {"role": "user", "content": text}]


def check_cut(tokenizer, messages):
    """The prefix, after checking that it begins all nine prompts, and that their common part is at most 3 longer."""
    prefix = stable_prefix(tokenizer, messages)
    texts = [going_on(messages, text) for text in NINE]
    texts.append([*going_on(messages, NINE[0]), ANSWER, QUESTION])
    if messages[-1]["role"] == "user":
        texts.append(messages)
    prompts = [read_prompt(one, tokenizer).ids for one in texts]
    assert [text for text, ids in zip(texts, prompts, strict=True) if ids[: len(prefix.ids)] != prefix.ids] == []
    shared = min(common_prefix(prompts[0].int32, ids.int32) for ids in prompts)
    assert shared - 3 <= len(prefix.ids) <= shared
    return prefix


def test_nine_texts_that_are_no_probes():
    assert len(set(NINE) - set(PROBES)) == 9


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["qwen3", "llama", "deepseek", "mistral"])
def test_nine_continuations_keep_the_cut(name, conversation, request):
    tokenizer, messages = request.getfixturevalue(name), CONVERSATIONS[conversation]
    prefix = check_cut(tokenizer, messages)
    text = tokenizer.decode(prefix.ids.tolist())
    if name == "mistral" and messages[0] is SYSTEM:
        assert prefix.unstable.startswith(f"only {len(prefix.ids)} of ") and prefix.unstable.endswith(MOVES)
        assert SYSTEM["content"] not in text
    elif name == "qwen3" and messages[-1] is ANSWER:  # an empty thinking block, shown for the last answer alone
        assert prefix.unstable.endswith(DROPS)
        assert "A robot." in text and "<think>" not in text
    else:
        assert prefix.unstable is None
        assert all(message["content"] in text for message in messages)


def test_the_mistral_tokenizer_is_the_real_one(mistral):
    real = MistralTokenizer.from_file(MISTRAL)
    messages = [SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "What's 2+2?  日本語"}]
    expected = real.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    assert read_prompt(messages, mistral).ids.tolist() == expected


# --- templates that change what they said ---


def test_qwen3_drops_the_thinking_of_earlier_turns(qwen3):
    prefix = stable_prefix(qwen3, [QUESTION, THOUGHT])
    now = read_prompt([QUESTION, THOUGHT], qwen3, add_generation_prompt=False).ids
    at = common_prefix(now.int32, prefix.ids.int32)
    assert qwen3.decode(now[at : at + 1].tolist()) == "<think>"
    assert prefix.unstable == f"the last answer changes at token {at} of {len(now)} once a turn follows: {DROPS}"


R1 = "{% set content = message['content'].split('</think>')[-1] %}{{'<｜Assistant｜>' + content + '<｜end"


def test_deepseek_r1_drops_the_thinking_of_earlier_turns(deepseek):
    """V3's template with the one difference that matters of R1's, which has the same tokenizer."""
    template = deepseek.chat_template.replace("{{'<｜Assistant｜>' + message['content'] + '<｜end", R1)
    assert template != deepseek.chat_template
    answered, options = [QUESTION, THOUGHT], {"chat_template": template}
    prefix = stable_prefix(deepseek, answered, chat_template_kwargs=options)
    text = deepseek.decode(prefix.ids.tolist())
    assert text.startswith("<｜begin▁of▁sentence｜><｜User｜>Who are you?<｜Assistant｜>")
    assert "<think>" not in text and "What am I?" not in text
    # The model's own cache holds the thinking; no later prompt does.
    thought = deepseek(THOUGHT["content"], add_special_tokens=False)["input_ids"]
    written = TokenIds.of([*read_prompt([QUESTION], deepseek).ids.tolist(), *thought])
    later = read_prompt([*answered, QUESTION], deepseek, chat_template_kwargs=options).ids
    at = common_prefix(written.int32, later.int32)
    assert at == len(read_prompt([QUESTION], deepseek).ids)


DATED = "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}\n\n<|eot_id|>"


def test_a_date_in_llamas_header_is_said(llama):
    """As the templates of Llama 3.2 and 3.3 have it; 3.1's here shows none."""
    template = "{{ bos_token }}" + DATED + llama.chat_template.replace("bos_token + content", "content")
    prefix = stable_prefix(llama, [SYSTEM], chat_template_kwargs={"chat_template": template})
    before = llama("<|begin_of_text|>" + DATED.split("{{")[0], add_special_tokens=False)["input_ids"]
    at = (
        len(before) - 1
    )  # the space before a number is a token of its own, and before the word without a clock it is not
    assert (
        prefix.unstable == f"the template shows the date at token {at}: on another day nothing from there on is found"
    )


# --- a conversation over a template that rewrites history ---


class Scripted:
    """Gives the ids of a text as the model's answer, whatever the model would say."""

    def __init__(self, prompt_length: int, ids: list[int]) -> None:
        self.prompt_length, self.ids = prompt_length, ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[min(input_ids.shape[1] - self.prompt_length, len(self.ids) - 1)]] = 0
        return forced


@pytest.fixture(scope="module")
def wide_llama() -> LlamaForCausalLM:
    """A tiny model with Qwen3's vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=151_936,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def test_a_conversation_reuses_up_to_the_thinking_that_qwen3_drops(qwen3, wide_llama, tmp_path):
    kv = CacheStore(tmp_path).bind(wide_llama, qwen3)
    chat = kv.chat("thinking", [{"role": "system", "content": "Answer in one word, and be kind. " * 20}])
    first = len(read_prompt([*chat.messages, QUESTION], qwen3).ids)
    ids = qwen3(THOUGHT["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    answer = chat.send(QUESTION["content"], max_new_tokens=len(ids), logits_processor=[Scripted(first, ids)])
    assert answer == THOUGHT["content"]
    assert chat.last_report.stored is not None

    asked = [*chat.messages, {"role": "user", "content": "And now?"}]
    later = read_prompt(asked, qwen3).ids
    assert qwen3.decode(later[first : first + 2].tolist()) == "A robot"  # where the thinking was
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    warm = kv.generate(asked, **options)
    cold = wide_llama.generate(torch.tensor([later.tolist()]), **options)
    assert warm.sequences.tolist() == cold.sequences.tolist()
    torch.testing.assert_close(torch.cat(warm.logits), torch.cat(cold.logits), rtol=1e-4, atol=1e-4)

    chat.send("And now?", max_new_tokens=1)
    for report in (chat.last_report, kv.last_report):
        assert (report.prompt_tokens, report.reused_tokens) == (len(later), first - 1)  # the guard feeds one again
        assert report.reason == f"diverged: the stored prefix goes on otherwise at token {first}"
