"""Which characters are the assistant's: exact for every template, whatever the texts themselves contain."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import RecordError
from packtrain.families.chat_template import ChatTemplate
from packtrain.families.settings import read_settings
from packtrain.families.turns import TurnFinder
from packtrain.models import tiny


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
    "llava_next": Dialect(" [/INST] ", "", "</s>"),
    "mistral": Dialect(" [/INST] ", "", "</s>"),
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
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(edges)
    return [rendered.text[start:end] for start, end in spans]


def answer(family: str, text: str) -> str:
    dialect = DIALECTS[family]
    return dialect.blank + (text.strip() if family in TRIMS else text) + dialect.closing


def test_every_family_is_here() -> None:
    assert set(DIALECTS) | {"qwen3"} == set(tiny.TINY_FAMILIES)


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
    assert found_by(source, ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d e ")) == ["b", "d e"]


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
