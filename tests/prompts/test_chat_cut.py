"""The cut of a conversation: what is kept is a prefix of every prompt that goes on from it, and no shorter than that.

The templates are our own, each with one habit that real ones have.
"""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from kvkeep.chat import PROBES, stable_prefix
from kvkeep.errors import InvalidPromptError, InvalidRequestError
from kvkeep.keys import common_prefix
from kvkeep.prompts import read_prompt

TURN = "{{ '<s>' + message.role + ':\n' + message.content + '</s>\n' }}"
HEADER = "{% if add_generation_prompt %}{{ '<s>assistant:\n' }}{% endif %}"
OPEN_TURN = "{{ message.role + ':\n' + message.content + '\n' }}"

PLAIN = "{% for message in messages %}" + TURN + "{% endfor %}" + HEADER

BARE = "{{ bos_token }}{% for message in messages %}" + OPEN_TURN + "{% endfor %}"
"""No special token between turns, no header: everything merges."""

FOLDING = (
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{{ '<s>' + message.role + ':\n' + (system + '\n\n' if system and loop.first else '') }}"
    "{{ message.content | trim + '</s>\n' }}{% endfor %}" + HEADER
)
"""The system message is said in the first user turn; alone it is not said at all."""

DROPPING = (
    "{% set asked = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<s>assistant:\n' }}{% if loop.index0 > asked.last %}"
    "{{ '<think>' + (message.reasoning_content or 'nothing much to say here') + '</think>' }}{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ 'call ' + call.function.name }}{% endfor %}"
    "{{ '</s>\n' }}{% else %}" + TURN + "{% endif %}{% endfor %}" + HEADER
)
"""Thinking is shown since the last question only."""

MOVING = (
    "{{ bos_token }}{% for message in messages if message.role != 'system' %}"
    "{{ '<s>' + message.role + ':\n' }}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ message.content + '</s>\n' }}{% endfor %}" + HEADER
)
"""The system prompt is said in the last turn."""

DATED = "\n{{ 'Today:' + (date_string or strftime_now('%d %b %Y')) + '\n' }}" + PLAIN

DEMANDING = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('a user turn is needed') }}{% endif %}" + PLAIN
)

PARTS = (
    "{% for message in messages %}{{ '<s>' + message.role + ':\n' }}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{{ '</s>\n' }}{% endfor %}" + HEADER
)
"""Contents are lists of parts; a plain string is passed over in silence."""

BACKWARDS = "{% for message in messages | reverse %}{{ message.content + '\n' }}{% endfor %}"

TEXTS = [
    *("Hello", "hello", "What is 2+2?", "the", "ing", "s", "b", "AAAA", "x" * 300, "a\nb", "hi", "hi there"),
    *(
        "\nnew line",
        "\n\nx",
        "\n\n\nx",
        "\n x",
        "\n7",
        "\n,",
        "\n😀",
        "\n</b>",
        "\n- item",
        " one",
        "  two",
        "   three",
    ),
    *(
        "\ttab",
        "\t\ttabs",
        "\r\nline",
        "\rline",
        " \nx",
        "\u00a0x",
        "\u3000x",
        "\u200bx",
        "\ufeffx",
        "\u0301x",
        "\u0338x",
    ),
    *("😀", "👩‍👩‍👧", "🇫🇷", "❤️", "7", "42 is", "2024-01-01", "3.14", "-1", "+1", "000", "1st", "1. item", "- item"),
    *(
        "$5",
        "#hash",
        "@at",
        "%",
        "&",
        "*bold*",
        "**bold**",
        "(x)",
        "[x](y)",
        "{x}",
        "/path",
        "\\n",
        "|x|",
        "~x",
        "^",
        "==",
    ),
    *("<b>", "</b>", "</system>", "<think>x", "<|x|>", ">quote", "<!-- x -->", '"x"', "'x'", "'s fine", "“x”", "`x`"),
    *("```py\nx\n```", ",x", ".x", "...", "…", ";", ":", ":\n", "::", "!", "?", "¿Qué?", "é", "Ünder", "ñ", "ß", "_x"),
    *(
        "日本語",
        "中文字",
        "한국어",
        "العربية",
        "עברית",
        "हिन्दी",
        "ไทย",
        "Русский",
        "Ελληνικά",
        "𝓐",
        "__init__",
        "-- sql",
    ),
]

SYSTEM = {"role": "system", "content": "Answer in one word.\nBe kind."}
QUESTION = {"role": "user", "content": "Who are you?"}
ANSWER = {"role": "assistant", "content": "A robot."}
CONVERSATIONS = {
    "system": [SYSTEM],
    "system and question": [SYSTEM, QUESTION],
    "question": [QUESTION],
    "answered": [SYSTEM, QUESTION, ANSWER],
    "answered without system": [QUESTION, ANSWER],
    "second question": [SYSTEM, QUESTION, ANSWER, QUESTION],
}
TEMPLATES = {
    "plain": PLAIN,
    "bare": BARE,
    "folding": FOLDING,
    "dropping": DROPPING,
    "moving": MOVING,
    "dated": DATED,
    "demanding": DEMANDING,
}


def going_on(messages, text):
    """The conversation after one more turn that says ``text``, ready for the model's answer."""
    if messages[-1]["role"] in ("user", "tool"):
        return [*messages, {"role": "assistant", "content": text}, QUESTION]
    return [*messages, {"role": "user", "content": text}]


def check_cut(tokenizer, messages, *, later=()):
    """The prefix, after checking it against every text: none breaks it, and it could be at most 3 tokens longer."""
    prefix = stable_prefix(tokenizer, messages)
    prompts = {text: read_prompt(going_on(messages, text), tokenizer).ids for text in TEXTS}
    if messages[-1]["role"] in ("user", "tool"):
        prompts["the conversation itself"] = read_prompt(messages, tokenizer).ids
    for turns in later:
        prompts[f"{len(turns)} turns later"] = read_prompt([*messages, *turns], tokenizer).ids
    assert [text for text, ids in prompts.items() if ids[: len(prefix.ids)] != prefix.ids] == []
    first = next(iter(prompts.values()))
    shared = min(common_prefix(first.int32, ids.int32) for ids in prompts.values())
    assert len(prefix.ids) >= max(1, shared - 3)
    return prefix


def shown(tokenizer, prefix):
    return tokenizer.decode(prefix.ids.tolist())


def test_there_are_texts_enough_and_no_probe_is_among_them():
    assert len(TEXTS) == len(set(TEXTS)) >= 59
    assert len(set(PROBES) & set(TEXTS)) <= 3


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_no_next_turn_breaks_the_cut(template, conversation, make_tokenizer):
    messages = CONVERSATIONS[conversation]
    turns = [QUESTION, ANSWER, QUESTION] if messages[-1]["role"] != "user" else [ANSWER, QUESTION, ANSWER, QUESTION]
    check_cut(make_tokenizer(TEMPLATES[template]), messages, later=[turns])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_smollm2(smollm2_tokenizer, conversation):
    assert check_cut(smollm2_tokenizer, CONVERSATIONS[conversation]).unstable is None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_gemma(gemma_tokenizer, conversation):
    prefix = check_cut(gemma_tokenizer, CONVERSATIONS[conversation])
    assert prefix.unstable is None
    assert CONVERSATIONS[conversation][0]["content"] in shown(gemma_tokenizer, prefix)


def test_gemma_says_a_system_message_alone_in_the_user_turn(gemma_tokenizer):
    text = shown(gemma_tokenizer, stable_prefix(gemma_tokenizer, [SYSTEM]))
    assert text.startswith("<bos><start_of_turn>user\nAnswer in one word.\nBe kind.")


def test_two_plain_next_turns_would_not_do(smollm2_tokenizer):
    """Why there are so many probes: with two, some texts break the cut."""
    prompts = [read_prompt(going_on([SYSTEM], text), smollm2_tokenizer).ids for text in ("Hello", "What is 2+2?")]
    cut = prompts[0][: common_prefix(prompts[0].int32, prompts[1].int32)]
    broken = [t for t in TEXTS if read_prompt(going_on([SYSTEM], t), smollm2_tokenizer).ids[: len(cut)] != cut]
    assert {"\n\nx", "  two", "\t\ttabs"} < set(broken)


@pytest.mark.parametrize(
    ("conversation", "text"),
    [
        ("system", "<s>system:\nAnswer in one word.\nBe kind.</s>\n<s>user"),
        ("question", "<s>user:\nWho are you?</s>\n<s>assistant"),
        ("answered without system", "<s>user:\nWho are you?</s>\n<s>assistant:\nA robot.</s>\n<s>user"),
    ],
)
def test_the_cut_reaches_into_the_header_of_the_next_turn(conversation, text, make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    prefix = stable_prefix(tokenizer, CONVERSATIONS[conversation])
    assert (shown(tokenizer, prefix), prefix.unstable) == (
        text,
        None,
    )  # ":" and the line end may merge with what follows


def test_a_system_message_folded_into_the_user_turn(make_tokenizer):
    tokenizer = make_tokenizer(FOLDING)
    prefix = stable_prefix(tokenizer, [SYSTEM])
    assert shown(tokenizer, prefix).startswith("<s><s>user:\nAnswer in one word.\nBe kind.")
    assert prefix.unstable is None


def test_a_template_that_needs_a_user_turn_takes_a_system_message_alone(make_tokenizer):
    demanding, plain = make_tokenizer(DEMANDING), make_tokenizer(PLAIN)
    assert stable_prefix(demanding, [SYSTEM]).ids == stable_prefix(plain, [SYSTEM]).ids


def test_a_template_of_one_turn_keeps_the_whole_prompt(make_tokenizer):
    single = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + PLAIN
    tokenizer = make_tokenizer(single)
    prefix = stable_prefix(tokenizer, [SYSTEM, QUESTION])
    assert (prefix.ids, prefix.unstable) == (read_prompt([SYSTEM, QUESTION], tokenizer).ids, None)
    assert stable_prefix(tokenizer, [SYSTEM]).ids == stable_prefix(make_tokenizer(PLAIN), [SYSTEM]).ids


class OwnTemplate(PreTrainedTokenizerFast):
    """A tokenizer that renders one conversation by a program of its own, and has no template to show."""

    def apply_chat_template(self, conversation, add_generation_prompt=False, tokenize=True, return_dict=False):
        text = "".join(f"<s>{message['role']}:{message['content']}" for message in conversation)
        return self(text + "<s>assistant:" if add_generation_prompt else text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_without_a_template_to_show(make_tokenizer):
    tokenizer = OwnTemplate(tokenizer_object=make_tokenizer(merges=()).backend_tokenizer)
    prefix = stable_prefix(tokenizer, [SYSTEM])
    assert shown(tokenizer, prefix) == "<s>system:Answer in one word.\nBe kind.<s>user:"
    assert prefix.unstable is None


def test_thinking_that_is_dropped_is_not_kept_and_said(make_tokenizer):
    tokenizer = make_tokenizer(DROPPING)
    prefix = stable_prefix(tokenizer, [QUESTION, ANSWER])
    assert shown(tokenizer, prefix) == "<s>user:\nWho are you?</s>\n<s>assistant:\nA robot.</s>\n<s>user"
    now = read_prompt([QUESTION, ANSWER], tokenizer, add_generation_prompt=False).ids
    kept = common_prefix(now.int32, prefix.ids.int32)
    assert tokenizer.decode(now[:kept].tolist()) == "<s>user:\nWho are you?</s>\n<s>assistant:\n"
    assert prefix.unstable == (
        f"the last answer changes at token {kept} of {len(now)} once a turn follows: "
        "the template drops the thinking of earlier turns"
    )
    assert stable_prefix(tokenizer, [QUESTION]).unstable is None


def test_a_tool_call_is_continued_by_its_result(make_tokenizer):
    tokenizer = make_tokenizer(DROPPING)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": {}}}
    called = {"role": "assistant", "content": "", "reasoning_content": "look at it", "tool_calls": [call]}
    for messages in ([QUESTION, called], [QUESTION, called, {"role": "tool", "name": "clock", "content": "noon"}]):
        prefix = stable_prefix(tokenizer, messages)
        assert shown(tokenizer, prefix) == "<s>user:\nWho are you?</s>\n<s>assistant:\n"
        assert prefix.unstable.startswith(f"only {len(prefix.ids)} of ")
        assert prefix.unstable.endswith("the template drops the thinking of earlier turns")
        result = [] if messages[-1] is not called else [{"role": "tool", "name": "clock", "content": "noon"}]
        for later in (result, [*result, ANSWER, QUESTION]):
            ids = read_prompt([*messages, *later], tokenizer).ids
            assert ids[: len(prefix.ids)] == prefix.ids


def test_a_tool_result_follows_even_where_a_user_turn_may_not(make_tokenizer):
    strict = (
        "{% for message in messages %}{% if loop.index0 and messages[loop.index0 - 1].tool_calls "
        "and message.tool_call_id != messages[loop.index0 - 1].tool_calls[0].id %}"
        "{{ raise_exception('the result is missing') }}{% endif %}" + TURN + "{% endfor %}" + HEADER
    )
    tokenizer = make_tokenizer(strict)
    called = {"role": "assistant", "content": "x", "tool_calls": [{"id": "abcdefghi", "function": {"name": "clock"}}]}
    prefix = stable_prefix(tokenizer, [QUESTION, called])
    assert shown(tokenizer, prefix).endswith("<s>assistant:\nx</s>\n<s>tool")


def test_a_system_prompt_that_moves_is_cut_before_it_and_said(make_tokenizer):
    tokenizer = make_tokenizer(MOVING)
    prefix = stable_prefix(tokenizer, [SYSTEM])
    assert shown(tokenizer, prefix) == "<s><s>user"
    once = [read_prompt([SYSTEM, {"role": "user", "content": text}], tokenizer).ids for text in PROBES]
    shared = min(common_prefix(once[0].int32, ids.int32) for ids in once)
    assert prefix.unstable == (
        f"only {len(prefix.ids)} of {shared} tokens stay as the conversation goes on: "
        "the template moves text, such as the system prompt or the tools, to the last turn"
    )
    asked = stable_prefix(tokenizer, [SYSTEM, QUESTION])
    assert shown(tokenizer, asked) == "<s><s>user:\n"
    assert asked.unstable.endswith("the template moves text, such as the system prompt or the tools, to the last turn")


def test_every_border_of_a_rewritten_history_is_probed(make_tokenizer):
    """A comma merges with the line end only where the system prompt no longer stands between them."""
    tokenizer = make_tokenizer(MOVING, merges=(("Ċ", ","),))
    prefix = check_cut(tokenizer, [SYSTEM], later=[[{"role": "user", "content": ", and?"}, ANSWER, QUESTION]])
    assert shown(tokenizer, prefix) == "<s><s>user:"


@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, QUESTION]])
def test_a_template_that_forgets_old_turns_is_noticed_two_turns_on(messages, make_tokenizer):
    tokenizer = make_tokenizer("{{ bos_token }}" + PLAIN.replace("in messages", "in messages[-4:]"))
    prefix = stable_prefix(tokenizer, messages)
    assert shown(tokenizer, prefix) == "<s><s>"
    assert prefix.unstable.startswith("only 2 of ")


def test_other_changes_of_history_are_said_too(make_tokenizer):
    counting = "{{ messages | length ~ ' messages\n' }}" + PLAIN
    with pytest.raises(InvalidRequestError, match="share no token"):
        stable_prefix(make_tokenizer(counting), [QUESTION])
    late = "{{ bos_token }}{{ 'There are ' ~ messages | length ~ ' messages\n' }}" + PLAIN
    tokenizer = make_tokenizer(late)
    prefix = stable_prefix(tokenizer, [SYSTEM])
    assert shown(tokenizer, prefix) == "<s>There are "
    assert prefix.unstable.endswith("goes on: the template renders earlier turns differently")


def test_a_date_is_kept_and_said(make_tokenizer):
    tokenizer, before = make_tokenizer(DATED, merges=()), "\nToday:"
    prefix = stable_prefix(tokenizer, [SYSTEM])
    assert shown(tokenizer, prefix).endswith("Be kind.</s>\n<s>user:\n")
    assert (
        prefix.unstable
        == f"the template shows the date at token {len(before)}: on another day nothing from there on is found"
    )


def test_a_date_that_the_caller_pins_is_stable(make_tokenizer):
    tokenizer = make_tokenizer(DATED)
    prefix = stable_prefix(tokenizer, [SYSTEM], chat_template_kwargs={"date_string": "1 Jan 2030"})
    assert prefix.unstable is None
    assert "Today:1 Jan 2030" in shown(tokenizer, prefix)


def test_a_date_in_the_next_turn_alone_does_not_matter(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN + "{{ strftime_now('%Y') }}")
    assert stable_prefix(tokenizer, [SYSTEM]).unstable is None


def test_two_notes_are_both_given(make_tokenizer):
    tokenizer = make_tokenizer("{{ bos_token + strftime_now('%Y') }}" + DROPPING)
    changes, date = stable_prefix(tokenizer, [QUESTION, ANSWER]).unstable.split("; ")
    assert changes.startswith("the last answer changes at token") and date.startswith(
        "the template shows the date at token 1:"
    )


def test_turns_that_the_template_refuses_are_left_out(make_tokenizer):
    tidy = "{% for message in messages if message.content != message.content | trim %}"
    picky = tidy + "{{ raise_exception('untidy') }}{% endfor %}" + PLAIN
    tokenizer = make_tokenizer(picky)
    assert shown(tokenizer, stable_prefix(tokenizer, [SYSTEM])).endswith("</s>\n<s>user:\n")


def test_contents_in_parts_are_continued_in_parts(make_tokenizer):
    tokenizer = make_tokenizer(PARTS)
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be kind."}]}]
    assert shown(tokenizer, stable_prefix(tokenizer, messages)) == "<s>system:\nBe kind.</s>\n<s>user"


def test_a_template_that_takes_both_forms_is_asked_in_that_of_the_conversation(make_tokenizer):
    both = PARTS.replace("{% for part in", "{{ 'text=' if message.content is string else 'parts=' }}{% for part in")
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be kind."}]}]
    tokenizer = make_tokenizer(both.replace("{{ part.text }}", "{{ part.text or part }}"))
    assert shown(tokenizer, stable_prefix(tokenizer, messages)).endswith("<s>user:\nparts=")
    assert shown(tokenizer, stable_prefix(tokenizer, [SYSTEM])).endswith("<s>user:\ntext=")


def test_a_merge_at_the_end_of_the_last_answer_is_no_change_of_history(make_tokenizer):
    tokenizer = make_tokenizer(BARE, merges=(("Ċ", "u"),))
    prefix = stable_prefix(tokenizer, [QUESTION, ANSWER])
    assert (shown(tokenizer, prefix), prefix.unstable) == (
        "<s>user:\nWho are you?\nassistant:\nA robot.\nuser:\n",
        None,
    )


def test_contents_that_the_template_passes_over_are_tried_in_the_other_form(make_tokenizer):
    tokenizer = make_tokenizer(PARTS)
    assert shown(tokenizer, stable_prefix(tokenizer, [SYSTEM])) == "<s>system:\n</s>\n<s>user"
    with pytest.raises(InvalidRequestError, match="does not show what the next turn says"):
        stable_prefix(make_tokenizer("{% for message in messages %}{{ message.role }}{% endfor %}"), [SYSTEM])


def test_an_answer_left_open_is_cut_before_it(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": "I am"}]
    prefix = stable_prefix(tokenizer, messages, chat_template_kwargs={"continue_final_message": True})
    assert prefix == stable_prefix(tokenizer, messages[:-1])
    assert prefix != stable_prefix(tokenizer, messages)


def test_tools_documents_and_options_reach_the_template(make_tokenizer):
    template = "{{ tools[0].name + documents[0].text + mood }}" + PLAIN
    tokenizer = make_tokenizer(template)
    prefix = stable_prefix(
        tokenizer,
        [SYSTEM],
        tools=[{"name": "clock"}],
        documents=[{"title": "t", "text": "page"}],
        chat_template_kwargs={"mood": "calm"},
    )
    assert shown(tokenizer, prefix).startswith("clockpagecalm<s>system:\n")


def test_no_empty_prefix_is_ever_returned(make_tokenizer):
    with pytest.raises(InvalidRequestError, match="share no token"):
        stable_prefix(make_tokenizer(BACKWARDS), [SYSTEM])


@pytest.mark.parametrize("messages", [[], "text", [{"content": "x"}], [QUESTION, {"content": "x"}], None])
def test_what_is_no_conversation_is_refused(messages, make_tokenizer):
    with pytest.raises(InvalidPromptError, match="each with a role"):
        stable_prefix(make_tokenizer(PLAIN), messages)


def test_turns_that_the_template_refuses_are_an_error_that_quotes_it(make_tokenizer):
    with pytest.raises(InvalidRequestError, match="turns must alternate"):
        stable_prefix(make_tokenizer(FOLDING), [SYSTEM, QUESTION, QUESTION])
    with pytest.raises(InvalidRequestError, match="bind"):
        stable_prefix(None, [SYSTEM])
