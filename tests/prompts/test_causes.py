"""Causes that ``explain`` names: each where it is the cause, and none where something near it is."""

from __future__ import annotations

import pytest
from test_chat_cut import DATED, HEADER, PLAIN, TURN

from kvkeep import CacheStore

SYSTEM = {"role": "system", "content": "You answer questions about the ferry port."}
ASK = {"role": "user", "content": "When does the first ferry leave for the island?"}
ANSWER = {"role": "assistant", "content": "At six in the morning, from pier four."}
TEXT = "The first ferry leaves at six in the morning, from pier four of the port."
DOCUMENTS = [
    {"title": f"pier {n}", "text": f"Pier {n} is where the {name} ferry lies."} for n, name in enumerate("abc")
]

READING = (
    "{% for one in documents or [] %}{{ one.title + ': ' + one.text + '\n' }}{% endfor %}"
    "{% for message in messages %}" + TURN + "{% endfor %}" + HEADER
)
"""The documents come first."""

SWITCHED = (
    "{{ '<s>system:\nReasoning: ' + ('on' if enable_thinking | default(true) else 'off') + '\n' }}"
    "{{ 'Style: ' + style | default('plain') + '</s>\n' }}"
    "{% for message in messages %}" + TURN + "{% endfor %}" + HEADER
)
"""What the caller switched stands in a header of its own, as in SmolLM3's."""


@pytest.fixture
def bound(tmp_path, tiny_llama, make_tokenizer):
    """A store bound to a tiny model and a tokenizer with this template."""

    def bind(template=None, **settings):
        return CacheStore(tmp_path / "store").bind(tiny_llama, make_tokenizer(template, **settings))

    return bind


def code_of(found):
    return None if found.cause is None else found.cause.partition(":")[0]


# --- bos ---


def test_a_token_that_begins_a_text_on_one_side_alone(bound):
    kv = bound(ends="<s> $A")
    begun, bare = (kv.tokenizer(TEXT, add_special_tokens=special)["input_ids"] for special in (True, False))
    kv.warm(begun)
    found = kv.explain([*bare, 9])
    assert (found.diverged_at, found.cause) == (0, "bos: the prompt begins with no <s>, what is stored with <s>")
    assert found.fix == "tokenize the prompt with add_special_tokens=True, as what is stored was"
    other = kv.tokenizer("Rain fell on the hills all day long.", add_special_tokens=False)["input_ids"]
    assert code_of(kv.explain(other)) is None  # it has none either, and that is not why


def test_a_token_that_begins_a_text_of_the_prompt_alone(bound):
    kv = bound(ends="<s> $A")
    kv.warm(kv.tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    found = kv.explain(TEXT)
    assert found.cause == "bos: the prompt begins with <s>, what is stored with no <s>"
    assert "add_special_tokens=False" in found.fix


# --- date ---


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("2 December 2026", "3 December 2026"),
        ("Wednesday, 2 December 2026", "Thursday, 3 December 2026"),
        ("December 2nd, 2026", "December 3rd, 2026"),
        ("Dec 2, 2026", "Dec 12, 2026"),
        ("2026-12-02", "2026-12-03"),
        ("2026/12/02", "2026/12/03"),
        ("02.12.2026", "03.12.2026"),
        ("10:15", "10:16"),
    ],
)
def test_a_date(bound, was, now):
    kv = bound()
    kv.warm(f"You answer questions about the port. Now: {was}. Say at which pier the ferry lies.")
    found = kv.explain(f"You answer questions about the port. Now: {now}. Say at which pier the ferry lies.")
    assert found.cause == f"date: a date: {was!r} is stored, the prompt says {now!r}"
    assert found.fix == "move the date to the end of the prompt, behind all that is to be reused"


def test_what_differs_near_a_date_is_no_date(bound):
    kv = bound()
    kv.warm("On 2 December 2026 the first ferry left from pier four, as it always does.")
    assert code_of(kv.explain("On 2 December 2026 the last ferry left from pier four, as it always does.")) is None
    assert code_of(kv.explain("On 2 monkeys sat a bird, and sang.")) is None


def test_a_date_of_the_prompt_is_not_the_templates(bound):
    kv = bound(DATED)
    days = ("02 Dec 2026", "03 Dec 2026")
    options = {"chat_template_kwargs": {"date_string": days[0]}}
    for stored, prompt in (
        [f"Minutes of {day}: the ferry was late, as it often is in winter." for day in days],
        [[{"role": "user", "content": f"It is {day}. When does the ferry leave?"}, ANSWER, ASK] for day in days],
    ):
        kv.warm(stored, **options)
        assert code_of(kv.explain(prompt, **options)) == "date"


def test_a_date_that_template_and_prompt_say(bound):
    kv = bound(DATED)
    messages = [{"role": "user", "content": "On 03 Dec 2026, when does the first ferry leave?"}]
    kv.warm(messages, chat_template_kwargs={"date_string": "02 Dec 2026"})
    found = kv.explain(messages, chat_template_kwargs={"date_string": "03 Dec 2026"})
    assert code_of(found) == "template_date"
    assert found.fix == 'give chat_template_kwargs={"date_string": "02 Dec 2026"} to every call'


@pytest.mark.parametrize("as_text", [False, True])
def test_a_date_of_the_templates_clock(bound, as_text):
    kv = bound(DATED.replace("date_string or ", ""))
    clock = "{% macro strftime_now(format) %}02 Dec 2020{% endmacro %}\n"
    template = kv.tokenizer.chat_template
    kv.warm(kv.tokenizer.apply_chat_template([ASK], chat_template=clock + template, return_dict=True)["input_ids"])
    found = kv.explain(kv.tokenizer.apply_chat_template([ASK], tokenize=False) if as_text else [ASK])
    assert found.cause.startswith("template_date: a date: '02 Dec 2020' is stored, the prompt says ")
    assert found.fix == "use a template that shows no date"


# --- documents ---


def test_documents_that_are_not_in_what_is_stored(bound):
    kv = bound(READING)
    kv.warm([ASK])
    found = kv.explain([ASK], documents=DOCUMENTS)
    assert found.cause == "documents: what is stored was rendered without these documents"
    assert found.fix == "warm it with the same documents="
    kv.warm([ASK], documents=DOCUMENTS)
    changed = [DOCUMENTS[0], {**DOCUMENTS[1], "text": "Nothing lies there."}, DOCUMENTS[2]]
    assert code_of(kv.explain([ASK], documents=changed)) is None
    assert code_of(kv.explain([ASK], documents=[DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[1]])) == "order"


def test_documents_in_another_order_behind_what_differs(bound):
    kv = bound("{{ '<s>' + messages[0].content + '</s>' }}" + READING.replace("in messages", "in messages[1:]"))
    kv.warm([SYSTEM, ASK], documents=DOCUMENTS)
    edited = {**SYSTEM, "content": "You answer in one word."}
    assert code_of(kv.explain([edited, ASK], documents=DOCUMENTS[::-1])) == "system"


# --- template_options ---


@pytest.mark.parametrize(
    ("stored", "prompt", "how"),
    [
        ({}, {"style": "brief"}, "without style"),
        ({"enable_thinking": False}, {}, "with enable_thinking=False"),
        ({}, {"enable_thinking": False}, "without enable_thinking"),
    ],
)
def test_an_option_of_the_template(bound, stored, prompt, how):
    kv = bound(SWITCHED)
    kv.warm([ASK], chat_template_kwargs=stored)
    found = kv.explain([ASK], chat_template_kwargs=prompt)
    assert found.cause == f"template_options: what is stored was rendered {how}"
    assert found.fix == "give the same chat_template_kwargs= to every call"


def test_an_option_that_changes_nothing_there(bound):
    kv = bound(SWITCHED)
    options = {"chat_template_kwargs": {"style": "brief", "enable_thinking": False}}
    kv.warm([ASK], **options)
    other = [{**ASK, "content": "Where does it leave?"}]
    assert code_of(kv.explain(other, **options)) == "question"
    assert code_of(kv.explain([ASK, {**ANSWER, "content": "<think>So.</think>"}, ASK], **options)) is None


def test_thinking_that_was_switched_off_is_an_option(bound):
    """Qwen3's way: a block that is empty, in front of the answer."""
    kv = bound(PLAIN + "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}")
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = kv.tokenizer("At six.")["input_ids"]
    ids = [
        kv.tokenizer.apply_chat_template([ASK], add_generation_prompt=True, return_dict=True, **one)["input_ids"]
        for one in ({"enable_thinking": False}, {})
    ]
    kv.warm([*ids[1], *answer])
    found = kv.explain([ASK], **quiet)
    assert found.cause == "template_options: what is stored was rendered without enable_thinking"


# --- history ---


def test_an_earlier_message_that_was_changed(bound):
    kv = bound(PLAIN)
    later = {"role": "user", "content": "And when does it come back?"}
    kv.warm([SYSTEM, ASK, ANSWER, later])
    changed = {**ANSWER, "content": "At six in the evening, from pier four."}
    found = kv.explain([SYSTEM, ASK, changed, later])
    assert found.cause == "history: message 2 (assistant) is another one, from its character 14 on"
    assert found.fix == "append to a conversation without changing what was said"
    assert code_of(kv.explain([SYSTEM, ASK, ANSWER, {**later, "content": "Where?"}])) == "question"
    assert code_of(kv.explain([SYSTEM, ASK, ANSWER, later, ANSWER, ASK])) is None  # it goes on, and nothing differs


def test_turns_that_were_left_out(bound):
    kv = bound(PLAIN)
    turns = [
        {"role": role, "content": f"{word} is what was said in turn {number} of the talk."}
        for number in range(3)
        for role, word in (("user", f"This {number}"), ("assistant", f"That {number}"))
    ]
    kv.warm([SYSTEM, *turns, ASK])
    found = kv.explain([SYSTEM, *turns[2:], ASK, ANSWER, turns[0]])
    assert found.cause == "history: turns were left out: message 1 (user) comes later in what is stored"
    assert "keep the earliest turns" in found.fix
    kv.warm([*turns, ASK])
    found = kv.explain([*turns[2:], ASK])
    assert found.cause == "history: turns were left out: message 0 (user) comes later in what is stored"
    assert "left out" not in kv.explain([SYSTEM, {**turns[0], "content": "This 0 was said."}, *turns[1:]]).cause


# --- tools, and tokens of the same text ---


def test_tools_that_are_not_in_what_is_stored(bound):
    kv = bound("{% for tool in tools or [] %}{{ 'tool ' + tool.function.name + '\n' }}{% endfor %}" + PLAIN)
    tools = [
        {"type": "function", "function": {"name": name, "description": "It says when."}} for name in ("when", "at")
    ]
    kv.warm([ASK])
    found = kv.explain([ASK], tools=tools)
    assert found.cause == "tools: what is stored was rendered without these tools"
    assert found.fix == "warm it with the same tools="
    kv.warm([ASK], tools=tools)
    assert code_of(kv.explain([ASK], tools=tools[1:])) is None
    assert code_of(kv.explain([{**ASK, "content": "Where?"}], tools=tools)) == "question"


def test_a_special_token_that_is_spelled_out(bound):
    kv = bound()
    special, spelled = (
        kv.tokenizer(f"{TEXT}</s>{TEXT}", split_special_tokens=split)["input_ids"] for split in (False, True)
    )
    kv.warm(special)
    found = kv.explain(spelled)
    assert found.cause == (
        "special_as_text: what is stored has the special token </s>, the prompt spells it out as text"
    )
    assert code_of(kv.explain(f"{TEXT}<s>{TEXT}")) is None  # another special token


def test_tokens_that_are_not_those_of_their_text(bound):
    kv = bound()
    ids = kv.tokenizer(f"hi there. {TEXT}")["input_ids"]
    parts = kv.tokenizer.convert_tokens_to_ids(["h", "i"])
    kv.warm([*parts, *ids[1:]])
    found = kv.explain([*ids, 9])
    assert found.cause.startswith("retokenized: the text goes on in the same way, in other tokens")
    assert found.fix == "keep the ids that were generated and append to them, instead of tokenizing their text again"
    assert code_of(kv.explain([*kv.tokenizer("his")["input_ids"], *ids[1:]])) is None
