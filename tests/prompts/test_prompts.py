"""Every form of a prompt is read into the same ids, and what is no prompt is refused with what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, PreTrainedTokenizerFast, ProcessorMixin

from kvkeep.errors import InvalidPromptError, InvalidRequestError
from kvkeep.prompts import is_batch, read_ids, read_messages, read_prompt

TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + ':' + message.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + ':' }}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hi"}]


class TextProcessor(ProcessorMixin):
    """The smallest real processor: a tokenizer alone."""

    attributes = ("tokenizer",)
    tokenizer_class = "PreTrainedTokenizerFast"

    def __init__(self, tokenizer=None, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6, 2**31 - 1],
        (5, 6, 2**31 - 1),
        [[5, 6, 2**31 - 1]],
        [np.int64(5), np.int32(6), np.int64(2**31 - 1)],
        [torch.tensor(5), torch.tensor(6), torch.tensor(2**31 - 1)],
        [torch.tensor([5, 6, 2**31 - 1])],
        torch.tensor([5, 6, 2**31 - 1]),
        torch.tensor([[5, 6, 2**31 - 1]]),
        torch.tensor([[5, 6, 2**31 - 1]], dtype=torch.int32),
        torch.tensor([[5, 0, 6, 0, 2**31 - 1, 0]])[:, ::2],
        np.array([5, 6, 2**31 - 1]),
        np.array([[5, 6, 2**31 - 1]], dtype=np.uint32),
        np.array([5, 6, 2**31 - 1], dtype=">i8"),
    ],
)
def test_ids_in_every_form_are_the_same_ids(ids):
    prompt = read_prompt(ids, None)
    assert prompt.ids.int64 == b"".join(number.to_bytes(8, "little") for number in (5, 6, 2**31 - 1))
    assert (prompt.kind, prompt.extras) == ("ids", {})
    assert read_ids(ids) == prompt.ids


@pytest.mark.parametrize("wrap", [dict, BatchEncoding])
def test_a_mapping_keeps_the_other_inputs_as_they_came(wrap):
    pixels, types = torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, dtype=torch.long)
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.ones(1, 3),
        "pixel_values": pixels,
        "token_type_ids": types,
    }
    prompt = read_prompt(wrap(inputs), None)
    assert (prompt.ids.tolist(), prompt.kind) == ([5, 6, 7], "mapping")
    assert set(prompt.extras) == {"pixel_values", "token_type_ids"}
    assert prompt.extras["pixel_values"] is pixels and prompt.extras["token_type_ids"] is types


@pytest.mark.parametrize("form", [torch.tensor, np.array, list])
def test_left_padding_is_cut_from_everything_that_counts_tokens(form):
    inputs = {
        "input_ids": form([[0, 0, 5, 6]]),
        "attention_mask": form([[0, 0, 1, 1]]),
        "position_ids": form([[1, 1, 0, 1]]),
        "image_sizes": form([[7, 7, 7, 7]]),
    }
    prompt = read_prompt(inputs, None)
    assert prompt.ids.tolist() == [5, 6]
    assert np.asarray(prompt.extras["position_ids"]).tolist() == [[0, 1]]
    assert prompt.extras["image_sizes"] is inputs["image_sizes"]


def test_a_mask_and_ids_of_one_dimension():
    inputs = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "token_type_ids": [3, 4, 5]}
    prompt = read_prompt(inputs, None)
    assert (prompt.ids.tolist(), prompt.extras) == ([5, 6], {"token_type_ids": [4, 5]})


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[1, 1, 0]], [[0, 1, 0]], [[1, 1]], [[1, 1, 1], [1, 1, 1]]])
def test_a_mask_with_a_hole_or_another_length_is_refused(mask):
    with pytest.raises(InvalidPromptError, match="attention mask"):
        read_prompt({"input_ids": [[5, 6, 7]], "attention_mask": mask}, None)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        ([[]], "empty"),
        ("", "empty"),
        (torch.tensor([], dtype=torch.long), "empty"),
        (np.zeros((0, 4), dtype=np.int64), "empty"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "empty"),
        ([[1, 2], [3, 4]], "one row is needed here"),
        ([[1, 2], [3]], "one row is needed here"),
        (torch.ones(2, 3, dtype=torch.long), "one row is needed here"),
        ({"input_ids": np.ones((2, 3), dtype=np.int64)}, "one row is needed here"),
        ([torch.tensor([1]), torch.tensor([2])], "one row is needed here"),
        (["a", "b"], "one row is needed here"),
        ([HELLO, HELLO], "one row is needed here"),
        (torch.ones(1, 1, 3, dtype=torch.long), "dimensions, not 3"),
        (torch.ones(3), "integers, not torch.float32"),
        (torch.ones(3, dtype=torch.bfloat16), "integers, not torch.bfloat16"),
        (torch.ones(3, dtype=torch.bool), "integers, not bool"),
        (np.ones(3), "integers, not float64"),
        (np.array(["a"]), "integers, not <U1"),
        ([1.0, 2.0], "integers in"),
        ([1, [2]], "integers in"),
        ([1, -1], "must lie in"),
        ([1, 2**31], "must lie in"),
        ([1, 2**63], "integers in"),
        (np.array([2**64 - 1], dtype=np.uint64), "must lie in"),
        (None, "not NoneType"),
        (7, "not int"),
        (b"hi", "not bytes"),
        ({"inputs_embeds": torch.ones(1, 2, 3)}, "without input_ids"),
        (HELLO[0], "put a single chat message in a list"),
        ([*HELLO, {"content": "no role"}], "each with a role"),
        ([*HELLO, "text"], "each with a role"),
    ],
)
def test_what_is_no_prompt_is_refused_with_what_to_do(prompt, says, make_tokenizer):
    with pytest.raises(InvalidPromptError, match=says):
        read_prompt(prompt, make_tokenizer(TEMPLATE))


@pytest.mark.parametrize("prompt", ["hi", HELLO, ["hi"], [HELLO]])
def test_text_and_messages_need_a_tokenizer(prompt):
    with pytest.raises(InvalidRequestError, match=r"bind\(model, tokenizer\)"):
        read_prompt(prompt, None)


@pytest.mark.parametrize("wrap", [lambda prompt: prompt, lambda prompt: [prompt]], ids=["alone", "in a list"])
def test_text_is_what_the_tokenizer_makes_of_it(wrap, make_tokenizer):
    tokenizer = make_tokenizer(ends="<s> $A")
    prompt = read_prompt(wrap("hi\n\nthere"), tokenizer)
    assert prompt.ids.tolist() == tokenizer("hi\n\nthere")["input_ids"]
    assert prompt.ids[:2].tolist() == [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("hi")]
    assert (prompt.kind, prompt.extras) == ("text", {})


@pytest.mark.parametrize(
    ("ends", "text", "kept"),
    [
        ("$A </s>", "hi", ["hi"]),
        ("<s> $A </s>", "hi", ["<s>", "hi"]),
        ("<s> $A </s> </s>", "hi", ["<s>", "hi"]),
        ("$A </s>", "hi</s>", ["hi", "</s>"]),
        ("$A", "hi</s>", ["hi", "</s>"]),
        ("</s> $A", "hi", ["</s>", "hi"]),
        ("<s> $A </s>", "", ["<s>"]),
    ],
)
def test_text_is_cut_before_an_eos_that_the_tokenizer_appended(ends, text, kept, make_tokenizer):
    tokenizer = make_tokenizer(ends=ends)
    assert tokenizer.convert_ids_to_tokens(read_prompt(text, tokenizer).ids.tolist()) == kept


def test_an_eos_in_given_ids_stays(make_tokenizer):
    tokenizer = make_tokenizer(ends="$A </s>")
    given = tokenizer("hi", return_tensors="pt")
    assert given["input_ids"][0, -1] == tokenizer.eos_token_id
    assert read_prompt(given, tokenizer).ids.tolist() == given["input_ids"][0].tolist()


def test_messages_are_what_the_template_makes_of_them(make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE)
    prompt = read_prompt(HELLO, tokenizer)
    assert tokenizer.decode(prompt.ids.tolist()) == "<s>user:hi<s>assistant:"
    assert (prompt.kind, prompt.extras) == ("messages", {})
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert prompt.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert read_prompt(tuple(HELLO), tokenizer).ids == read_prompt([HELLO], tokenizer).ids == prompt.ids


def test_messages_take_the_options_of_the_template(make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE)
    prompt = read_prompt(
        HELLO,
        tokenizer,
        tools=[{"name": "clock"}],
        documents=[{"title": "t", "text": "page"}],
        chat_template_kwargs={"mood": "calm"},
        add_generation_prompt=False,
    )
    assert tokenizer.decode(prompt.ids.tolist()) == "<s>user:hiclockpagecalm"


def test_an_answer_left_open_has_no_header_after_it(make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE)
    messages = [*HELLO, {"role": "assistant", "content": "Well"}]
    prompt = read_prompt(messages, tokenizer, chat_template_kwargs={"continue_final_message": True})
    assert tokenizer.decode(prompt.ids.tolist()) == "<s>user:hi<s>assistant:Well"


def test_options_that_kvkeep_sets_itself_are_refused(make_tokenizer):
    with pytest.raises(InvalidRequestError, match="may not set return_tensors, tokenize"):
        read_prompt(HELLO, make_tokenizer(TEMPLATE), chat_template_kwargs={"tokenize": False, "return_tensors": "pt"})


@pytest.mark.parametrize(
    ("template", "says"),
    [(None, "chat_template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")],
)
def test_a_template_that_refuses_is_quoted(template, says, make_tokenizer):
    with pytest.raises(InvalidRequestError, match=says):
        read_prompt(HELLO, make_tokenizer(template))


def test_a_processor_reads_like_its_tokenizer(make_tokenizer):
    tokenizer = make_tokenizer(PARTS_TEMPLATE, ends="$A </s>")
    processor = TextProcessor(tokenizer, chat_template=PARTS_TEMPLATE)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    prompt = read_prompt(messages, processor)
    assert (prompt.kind, prompt.extras) == ("messages", {})
    assert tokenizer.decode(prompt.ids.tolist()) == "<s>user:hi"
    assert tokenizer.decode(read_prompt("hi", processor).ids.tolist()) == "hi"


@pytest.mark.parametrize(
    ("prompt", "several"),
    [
        ("text", False),
        (["text"], False),
        (["text", "text"], True),
        (HELLO, False),
        ([*HELLO, *HELLO], False),
        ([HELLO], False),
        ([HELLO, HELLO], True),
        ([1, 2], False),
        ([[1, 2]], False),
        ([[1], [2]], True),
        ([torch.tensor(1), torch.tensor(2)], False),
        ([np.array([1]), np.array([2])], True),
        (torch.ones(2), False),
        (torch.ones(1, 2), False),
        (torch.ones(2, 1), True),
        ({"input_ids": torch.ones(2, 1)}, True),
        (BatchEncoding({"input_ids": [[1], [2]]}), True),
        ({"input_ids": [1, 2]}, False),
        ([], False),
        (None, False),
    ],
)
def test_several_rows_are_recognised(prompt, several):
    assert is_batch(prompt) is several


def test_read_messages_copies_the_list_and_not_the_messages():
    messages = read_messages(tuple(HELLO))
    assert messages == HELLO and messages is not HELLO and messages[0] is HELLO[0]
    with pytest.raises(InvalidPromptError, match="each with a role"):
        read_messages("hi")


@pytest.mark.parametrize("prompt", ["hi", HELLO])
def test_the_token_types_of_plain_text_are_left_out(prompt, make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in tokenizer("hi")
    assert read_prompt(prompt, tokenizer).extras == {}


class IdsOnly(PreTrainedTokenizerFast):
    """A tokenizer whose template takes neither tools nor documents, and which never returns a mapping."""

    def apply_chat_template(self, conversation, add_generation_prompt=False, tokenize=True, return_dict=False):
        return super().apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, tokenize=tokenize, return_dict=False
        )


def test_a_template_that_returns_bare_ids_and_takes_no_tools(make_tokenizer):
    plain = make_tokenizer(TEMPLATE)
    tokenizer = IdsOnly(
        tokenizer_object=plain.backend_tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    assert read_prompt(HELLO, tokenizer).ids == read_prompt(HELLO, plain).ids
