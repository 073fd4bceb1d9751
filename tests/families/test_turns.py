"""Which characters are the assistant's: exact for every template, whatever the texts themselves contain."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import ConfigError, RecordError
from packtrain.families import tiny
from packtrain.families.chat_template import ChatTemplate
from packtrain.families.settings import read_settings
from packtrain.families.turns import TurnFinder


@dataclass(frozen=True)
class Dialect:
    """What a family's template writes around an assistant's text, by hand."""

    opening: str  # the generation prompt, or what stands in its place
    blank: str  # what the template writes between it and the answer
    closing: str  # up to the token that ends the turn
    after: str = ""  # white space behind it


CHATML = Dialect("<|im_start|>assistant\n", "", "<|im_end|>", "\n")
DIALECTS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "qwen2", "smollm3", "nanovlm"), CHATML),
    "llava_onevision": Dialect("<|im_start|>assistant ", "", "<|im_end|>", "\n"),
    "idefics3": Dialect("Assistant:", " ", "<end_of_utterance>", "\n"),
    "smolvlm": Dialect("Assistant:", " ", "<end_of_utterance>", "\n"),
    "llava": Dialect("ASSISTANT:", " ", "</s>"),
    "llava_next": Dialect(" [/INST]", " ", "</s>"),
    "mistral": Dialect(" [/INST]", " ", "</s>"),
    "gemma3": Dialect("<start_of_turn>model\n", "", "<end_of_turn>", "\n"),
    "gemma3_text": Dialect("<start_of_turn>model\n", "", "<end_of_turn>", "\n"),
    "llama": Dialect("<|start_header_id|>assistant<|end_header_id|>\n\n", "", "<|eot_id|>"),
}
TRIMS = ("gemma3", "gemma3_text", "llama")
STRINGS = ("qwen2", "qwen3", "smollm3", "mistral", "llama", "gemma3_text", "nanovlm")


def finder_for(family: str, folder: Path) -> tuple[ChatTemplate, TurnFinder]:
    settings = read_settings(tiny.write(family, folder))
    assert settings.chat_template is not None
    template = ChatTemplate(settings.chat_template, settings.special_tokens)
    return template, TurnFinder(template, string_content=family in STRINGS)


def conversation(family: str, *turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": text if family in STRINGS else [{"type": "text", "text": text}]}
        for role, text in turns
    ]


def spoken(template: ChatTemplate, finder: TurnFinder, messages: list[dict[str, Any]]) -> list[str]:
    """The text of every span, after checking that spans are apart and in order."""
    rendered = template.render(messages)
    spans = finder.spans(rendered, messages)
    edges = [edge for turn in spans for span in turn for edge in span]
    assert edges == sorted(edges)
    return ["".join(rendered.text[start:end] for start, end in turn) for turn in spans]


def answer(family: str, text: str) -> str:
    dialect = DIALECTS[family]
    return dialect.blank + (text.strip() if family in TRIMS else text) + dialect.closing


def test_every_family_is_here() -> None:
    assert set(DIALECTS) | {"qwen3"} == set(tiny.tiny_families())


@pytest.mark.parametrize("family", DIALECTS)
def test_spans_are_the_answers_with_their_end(family: str, tmp_path: Path) -> None:
    template, finder = finder_for(family, tmp_path)
    draw = random.Random(0)
    pieces = ("one", "Zwei", "三", "🙂", "  ", "\n", "<b>", "[x]", "\u2028", "?", "")
    for _ in range(60):
        texts = ["".join(draw.choices(pieces, k=draw.randint(0, 5))) for _ in range(2 * draw.randint(1, 4))]
        turns = [(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]
        if draw.random() < 0.4:
            turns.insert(0, ("system", "be brief"))
        if draw.random() < 0.2:
            turns.append(("user", "and?"))
        found = spoken(template, finder, conversation(family, *turns))
        assert found == [answer(family, text) for role, text in turns if role == "assistant"]


@pytest.mark.parametrize("family", DIALECTS)
def test_texts_that_look_like_turns_move_nothing(family: str, tmp_path: Path) -> None:
    template, finder = finder_for(family, tmp_path)
    dialect = DIALECTS[family]
    fakes = (
        dialect.opening,
        dialect.opening.strip(),
        dialect.closing,
        dialect.closing + dialect.after,
        f"x{dialect.closing}{dialect.after}{dialect.opening}{dialect.blank}fake{dialect.closing}{dialect.after}y",
        f"{dialect.opening}{dialect.opening}",
        f"a {dialect.opening.strip()}",
        "qzanswerone",
    )
    for fake in fakes:
        for user, reply in ((fake, "real"), ("q", fake), (fake, fake)):
            first = [("user", user), ("assistant", reply)]
            for turns in (
                first,
                [*first, ("user", "then"), ("assistant", "last")],
                [("user", "u"), ("assistant", "v"), *first],
            ):
                found = spoken(template, finder, conversation(family, *turns))
                assert found == [answer(family, text) for role, text in turns if role == "assistant"], (fake, turns)
    turns = [("system", f"x{dialect.opening}y{dialect.closing}"), ("user", "q"), ("assistant", "real")]
    assert spoken(template, finder, conversation(family, *turns)) == [answer(family, "real")]


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl", "llama", "smolvlm"])
def test_a_conversation_that_the_assistant_opens(family: str, tmp_path: Path) -> None:
    template, finder = finder_for(family, tmp_path)
    dialect = DIALECTS[family]
    for user in ("hello", dialect.opening, f"{dialect.closing}{dialect.opening}"):
        turns = [("assistant", "Welcome"), ("user", user), ("assistant", "real")]
        found = spoken(template, finder, conversation(family, *turns))
        assert [text.lstrip() for text in found] == [answer(family, text).lstrip() for text in ("Welcome", "real")]


def test_an_answer_that_depends_on_what_follows(tmp_path: Path) -> None:
    """Thinking is written for the last answer only, and the model has to write it there."""
    template, finder = finder_for("qwen3", tmp_path)
    thinking = "<think>\nhm\n</think>\n\nyes"
    turns = [("user", "a"), ("assistant", thinking), ("user", "b"), ("assistant", "no")]
    expected = ["yes<|im_end|>", "<think>\n\n</think>\n\nno<|im_end|>"]
    assert spoken(template, finder, conversation("qwen3", *turns)) == expected
    assert spoken(template, finder, conversation("qwen3", *turns[:2])) == [thinking + "<|im_end|>"]
    fake = [("user", "<|im_start|>assistant\n<think>"), *turns[1:]]
    assert spoken(template, finder, conversation("qwen3", *fake)) == expected
    fake[1] = ("assistant", "<|im_end|></think>x<|im_end|>\n<|im_start|>user\n")
    expected[0] = "x<|im_end|>\n<|im_start|>user\n<|im_end|>"
    assert spoken(template, finder, conversation("qwen3", *fake)) == expected


# ---- templates written here


def each(answer: str, prompt: str = "<a>", *, first: str = "", user: str = "<u>{{ m.content }}</u>\n") -> str:
    """A template that writes answers by `answer`, and `prompt` where a generation prompt is asked for."""
    return (
        f"{first}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{% else %}}{user}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


LATEST = "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
SHORT = "{% set t = m.content.split('</think>')[-1].lstrip() %}"
QUESTION, REASONED = ("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nyes")
TWO = (QUESTION, ("assistant", "6"), QUESTION, ("assistant", "7 "))
# name -> template, conversation, what carries loss of each answer
KINDS: dict[str, tuple[str, tuple[tuple[str, str], ...], list[str]]] = {
    "plain": (each("<a>{{ m.content }}</a>\n"), TWO, ["6</a>", "7 </a>"]),
    "trimmed": (each("<a>{{ m.content | trim }}</a>\n"), TWO, ["6</a>", "7</a>"]),
    "a blank before the answer": (each("<a> {{ m.content }}</a>"), TWO, [" 6</a>", " 7 </a>"]),
    "no generation prompt": (
        each(" {{ m.content }}</s>", "", first="<s>", user="[INST] {{ m.content }} [/INST]"),
        TWO,
        [" 6</s>", " 7 </s>"],
    ),
    "no generation prompt, but a header": (each("<a>{{ m.content }}</a>", ""), TWO, ["<a>6</a>", "<a>7 </a>"]),
    "the prompt opens a thought, history has none": (
        each("<a>" + LATEST + "{{ m.content }}</a>\n", "<a><think>\n"),
        TWO,
        ["6</a>", "\n</think>\n\n7 </a>"],
    ),
    "the prompt opens a thought, history closes it": (
        each("<a><think></think>{{ m.content }}</a>\n", "<a><think>\n"),
        TWO,
        ["</think>6</a>", "</think>7 </a>"],
    ),
    "the prompt skips a thought, history has none": (
        each("<a>{{ m.content }}</a>\n", "<a><think></think>"),
        (*TWO[:3], ("assistant", "<b>")),
        ["6</a>", "<b></a>"],
    ),
    "thoughts of the latest answer only": (
        each("<a>" + SHORT + "{{ m.content if loop.last else t }}</a>\n"),
        (QUESTION, REASONED, QUESTION, REASONED),
        ["yes</a>", "<think>\nhm\n</think>\n\nyes</a>"],
    ),
    "the prompt opens a thought that the answer has": (
        each("<a>" + SHORT + "{{ m.content if loop.last else t }}</a>\n", "<a><think>\n"),
        (QUESTION, REASONED, QUESTION, REASONED),
        ["yes</a>", "hm\n</think>\n\nyes</a>"],
    ),
    "thoughts dropped": (each("<a>" + SHORT + "{{ t }}</a>"), (QUESTION, REASONED), ["yes</a>"]),
    "a thought or none, as the question says": (
        each("<a>{{ m.content }}</a>", "<a>{{ '<think>' if 'why' in messages[-1].content else '' }}"),
        (QUESTION, ("assistant", "<think>1"), ("user", "why"), ("assistant", "<think>2")),
        ["<think>1</a>", "2</a>"],
    ),
    "only the last turn is not closed": (
        each("<a>{{ m.content }}{% if not loop.last %}</a>{% endif %}"),
        TWO,
        ["6</a>", "7"],
    ),
    "the last turn is closed otherwise": (
        each("<a>{{ m.content }}{{ '<end>' if loop.last else '</a>' }}"),
        TWO,
        ["6</a>", "7 <end>"],
    ),
    "roles that must alternate, the last turn not closed": (
        each(
            "<a>{{ m.content }}{% if not loop.last %}</s>{% endif %}",
            first="<s>",
            user="{% if loop.previtem is defined and loop.previtem.role == 'user' %}{{ raise_exception('no') }}"
            "{% endif %}<u>{{ m.content }}",
        ),
        TWO,
        ["6</s>", "7"],
    ),
    "an end of the whole text": (
        each("<a>{{ m.content }}</a>\n") + "{% if not add_generation_prompt %}<eot>{% endif %}",
        TWO,
        ["6</a>", "7 </a>"],
    ),
    "never closed": (each("A: {{ m.content }}\n", "A:", user="U: {{ m.content }}\n"), TWO, [" 6", " 7"]),
    "the header is marked": (
        each("{% generation %}<a><think></think>{{ m.content }}</a>\n{% endgeneration %}", "<a><think>"),
        TWO,
        ["</think>6</a>", "</think>7 </a>"],
    ),
    "a date in the header": (
        each("<a {{ strftime_now('%d') }}>{{ m.content }}</a>", "<a {{ strftime_now('%d') }}>"),
        TWO,
        ["6</a>", "7 </a>"],
    ),
    "two answers in a row": (
        each("<a>{{ m.content }}</a>"),
        (QUESTION, ("assistant", "6"), ("assistant", "6")),
        ["6</a>", "6</a>"],
    ),
    "two answers in a row, no prompt behind the first": (
        each(
            "<a>{{ m.content }}{% if not loop.last %}</a>{% endif %}",
            "{% if messages[-1].role == 'user' %}<a>{% endif %}",
        ),
        (QUESTION, ("assistant", "6"), ("assistant", "7")),
        ["6</a>", "7"],
    ),
    "one turn of two answers": (
        each(
            "{% if loop.previtem.role != 'assistant' %}<a>{% endif %}{{ m.content }}"
            "{% if not loop.last and loop.nextitem.role != 'assistant' %}</a>{% endif %}"
        ),
        (QUESTION, ("assistant", "6"), ("assistant", "7"), QUESTION, ("assistant", "8")),
        ["6", "7</a>", "8"],
    ),
    "a question at the end": (each("<a>{{ m.content }}</a>"), (*TWO, QUESTION), ["6</a>", "7 </a>"]),
    "an answer at the beginning": (each("<a>{{ m.content }}</a>", first="<s>"), TWO[1:], ["6</a>", "7 </a>"]),
    "nothing to say": (each("<a>{{ m.content }}</a>"), (QUESTION, ("assistant", "")), ["</a>"]),
    "a line break": (each("<a>{{ m.content }}</a>"), (QUESTION, ("assistant", "\n6")), ["\n6</a>"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_the_model_has_to_write(name: str) -> None:
    source, turns, expected = KINDS[name]
    template = ChatTemplate(source, {"eos_token": "</s>"}, "2026-01-01")
    finder = TurnFinder(template, string_content=True)
    assert spoken(template, finder, conversation("qwen2", *turns)) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content / 0 }}", "the chat template failed"),
        ("{% if 1 / 0 %}{% endif %}", "ZeroDivisionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{{ cycler.__init__.__globals__ }}", "refused the record"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "SyntaxError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_refused_in_words(source: str, words: str) -> None:
    with pytest.raises((RecordError, ConfigError), match=words):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_marks_of_the_parts_of_an_answer() -> None:
    """One mark for each text: they belong to the answer in which they stand, whatever their number."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% for p in m.content %}"
        "{% generation %}{{ p.text + ' ' }}{% endgeneration %}{% endfor %}{% else %}U: {{ m.content[0].text }} "
        "{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    template = ChatTemplate(source, {})
    texts = (("u",), ("one", "two"), ("u",), ("",))
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": [{"type": "text", "text": text} for text in parts]}
        for n, parts in enumerate(texts)
    ]
    assert spoken(template, TurnFinder(template, string_content=False), messages) == ["one two", ""]


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}U:{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def found_by(source: str, *turns: tuple[str, str]) -> list[str]:
    template = ChatTemplate(source, {"eos_token": "<e>"})
    return spoken(template, TurnFinder(template, string_content=True), conversation("qwen2", *turns))


def test_generation_marks_are_honoured() -> None:
    turns = [("user", "one"), ("assistant", "two"), ("user", "A:three!"), ("assistant", "")]
    assert found_by(MARKED, *turns) == ["two!", "!"]
    template = ChatTemplate(MARKED, {})
    rendered = template.render(conversation("qwen2", *turns))
    assert rendered.text == "U:one\nA:two!\nU:A:three!\nA:!\n", "the marks themselves are cut out"


@pytest.mark.parametrize("text", ["\ufdd0", "a\ufdd1b", "\ufdd0\ufdd1"])
def test_a_text_with_non_characters_stays_whole(text: str) -> None:
    template = ChatTemplate(MARKED, {})
    rendered = template.render(conversation("qwen2", ("user", text), ("assistant", text)))
    assert rendered.text == f"U:{text}\nA:{text}!\n"
    assert found_by(MARKED, ("user", text), ("assistant", text)) == [f"{text}!"]


def test_marks_around_something_else_are_not_taken_for_turns() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}<e>\n"
        "{% else %}<u>{% generation %}{{ m.content }}{% endgeneration %}<e>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    assert found_by(source, ("user", "one"), ("user", "two"), ("assistant", "three")) == ["three<e>"]


def test_a_closing_that_is_not_always_written() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if not m.content.endswith(eos_token) %}.{% endif %}<e>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [("user", "a"), ("assistant", "b<e>"), ("user", "c"), ("assistant", "d")]
    assert found_by(source, *turns) == ["b<e><e>", "d.<e>"]


def test_a_turn_without_any_end() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d e ")]
    assert found_by(source, *turns) == ["assistant: b", "assistant: d e"], "nobody else writes the header"
    prompt = "{% if add_generation_prompt %}assistant:{% endif %}"
    assert found_by(source + prompt, *turns) == [" b", " d e"]


def test_a_turn_that_cannot_be_found_is_said() -> None:
    source = "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}"
    with pytest.raises(RecordError, match="assistant turn not found"):
        found_by(source, ("user", "a"), ("assistant", "b"))


@pytest.mark.contract
def test_marks_agree_with_transformers(tmp_path: Path) -> None:
    """Rendered text and marked spans are those of transformers' own renderer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = conversation(
        "qwen2", ("user", "one\u2028"), ("assistant", " two 🙂"), ("user", "{{ x }}"), ("assistant", "")
    )
    texts, marks = render_jinja_template(
        conversations=[turns], chat_template=MARKED, return_assistant_tokens_mask=True, eos_token="<e>"
    )
    rendered = ChatTemplate(MARKED, {"eos_token": "<e>"}).render(turns)
    assert rendered.text == texts[0]
    assert rendered.generated == tuple(tuple(mark) for mark in marks[0])
