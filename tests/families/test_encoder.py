"""Which tokens carry loss, told by other means; and the same counts whichever way a record is laid out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import Cost, Media, MediaHeader, MediaLimits, MediaRef, Message, Part, Record, Text
from packtrain.families import tiny
from packtrain.families.encoder import RecordEncoder
from packtrain.families.layout import LossOn
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings

VISION = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava", "llava_next", "llava_onevision"),
    *("internvl", "gemma3"),
)
FAMILIES = (*VISION, "llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text")
SLOW = ("idefics3", "smolvlm", "llava_next", "llava_onevision", "internvl")  # processors that make many tiles
PICTURE = MediaHeader(kind="image", width=56, height=84)
FILM = MediaHeader(kind="video", width=64, height=48, frames=20, fps=4.0, seconds=5.0)
# Answers and what is put in their place: no common beginning or end.
WORDS = ("red circle", "twelve birds", "The garden.", "never")
OTHERS = ("blue square!", "some hexagon?", "An orange", "It is so")


def encoder_for(folder: Path, **options: Any) -> RecordEncoder:
    settings = read_settings(folder)
    family = load_rule(settings, MediaLimits())
    assert family is not None
    return RecordEncoder(settings, family, **options)


def record(*turns: tuple[str, Sequence[Part | str]], silent: Sequence[int] = ()) -> Record:
    """Turns of parts, texts as strings; `silent` are the messages that must not carry loss."""
    messages = [
        Message(role=role, parts=tuple(Text(p) if isinstance(p, str) else p for p in parts), train=number not in silent)
        for number, (role, parts) in enumerate(turns)
    ]
    return Record(id="r", origin="here:1", source="s", messages=tuple(messages))


def image() -> Media:
    return Media("image", MediaRef(name="i"))


def cost_of(encoder: RecordEncoder, one: Record) -> Cost:
    headers = [PICTURE if medium.kind == "image" else FILM for medium in one.media()]
    return encoder.cost(one, headers)[0]


# ---- against transformers


def real_ids(folder: Path) -> Callable[[Record], list[int]]:
    """The real processor's ids of a record, all media expanded."""
    from transformers import AutoProcessor, AutoTokenizer

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (PICTURE.height, PICTURE.width, 3), np.uint8))
    if not (folder / "processor_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)

        def of_text(one: Record) -> list[int]:
            messages = [
                {"role": m.role, "content": "".join(p.text for p in m.parts if isinstance(p, Text))}
                for m in one.messages
            ]
            return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])

        return of_text
    processor = AutoProcessor.from_pretrained(folder)

    def of_media(one: Record) -> list[int]:
        messages = [
            {
                "role": m.role,
                "content": [
                    {"type": "text", "text": p.text} if isinstance(p, Text) else {"type": "image", "image": picture}
                    for p in m.parts
                ],
            }
            for m in one.messages
        ]
        made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        return list(made["input_ids"][0].tolist())

    return of_media


def with_answer(one: Record, at: int, text: str) -> Record:
    messages = list(one.messages)
    messages[at] = replace(messages[at], parts=(Text(text),))
    return replace(one, messages=tuple(messages))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def answer_tokens(
    ids_of: Callable[[Record], list[int]], one: Record, ids: list[int], at: int, header: list[int]
) -> set[int]:
    """The tokens that change with an answer, the one that closes it, and those between it and the end of `header`."""
    (text,) = one.messages[at].parts
    assert isinstance(text, Text)
    other = ids_of(with_answer(one, at, OTHERS[WORDS.index(text.text)]))
    first, last = common(ids, other), len(ids) - common(ids[::-1], other[::-1])
    assert first < last
    while header and ids[first - len(header) : first] != header:
        first -= 1
    return set(range(first, last + 1))


@pytest.mark.contract
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.more) if f in SLOW else f for f in FAMILIES])
def test_supervised_tokens(family: str, tmp_path: Path) -> None:
    folder = tiny.write(family, tmp_path)
    ids_of = real_ids(folder)
    plain = encoder_for(folder)
    # Qwen3 opens its last answer with an empty thought, which the model has to write like the rest.
    header = plain.tokenizer.encode("assistant\n", special=False).ids if family == "qwen3" else []
    shown = (image(),) if family in VISION else ()
    one = record(
        ("system", ["Be brief."]),
        ("user", [*shown, "What is it?"]),
        ("assistant", [WORDS[0]]),
        ("user", ["And then? Assistant: red circle", *shown]),
        ("assistant", [WORDS[1]]),
    )
    for conversation in (one, replace(one, messages=one.messages[1:3])):
        ids = ids_of(conversation)
        answers = [n for n, message in enumerate(conversation.messages) if message.role == "assistant"]
        tokens = {at: answer_tokens(ids_of, conversation, ids, at, header) for at in answers}
        cost = cost_of(plain, conversation)
        assert cost.tokens == len(ids)
        assert cost.supervised_tokens == len(set().union(*tokens.values()))
        assert cost_of(encoder_for(folder, loss_on="assistant"), conversation) == cost
        completion = cost_of(encoder_for(folder, loss_on="completion"), conversation)
        assert completion.supervised_tokens == len(tokens[answers[-1]])
        everything = cost_of(encoder_for(folder, loss_on="all"), conversation)
        assert everything.supervised_tokens == len(ids) - cost.image_tokens - 1
        assert (completion.tokens, everything.tokens) == (cost.tokens, cost.tokens)
        if len(answers) > 1:
            quiet = replace(conversation.messages[answers[0]], train=False)
            partly = replace(conversation, messages=(*conversation.messages[:2], quiet, *conversation.messages[3:]))
            assert cost_of(plain, partly).supervised_tokens == len(tokens[answers[1]])
    if family in VISION:
        assert cost_of(plain, one).image_tokens > 0


MARKED: dict[str, str] = {
    "qwen2": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    ),
    "llama": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    ),
}
PIECES = ("one", " two", "\n", "  ", "🦄", "é", "\u2028", "<|im_end|>", "<|eot_id|>", "<|im_start|>assistant\n", "")


@pytest.mark.contract
@pytest.mark.parametrize(("seed", "count"), [(0, 80), pytest.param(1, 400, marks=pytest.mark.more)])
@pytest.mark.parametrize("family", MARKED)
def test_supervised_tokens_of_any_text(family: str, seed: int, count: int, tmp_path: Path) -> None:
    """transformers' own mask, from the same template with the answers marked in it."""
    from transformers import AutoTokenizer

    folder = tiny.write(family, tmp_path)
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), encoder_for(folder)
    encoder.skeletons.patience = 1  # type: ignore[misc]
    draw = random.Random(seed)
    for _ in range(count):
        texts = ["".join(draw.choices(PIECES, k=draw.randint(0, 6))) for _ in range(draw.choice((3, 5)))]
        turns = [("system", "s"), *((("user", "assistant")[n % 2], text) for n, text in enumerate(texts[:-1]))]
        made = tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in turns],
            chat_template=MARKED[family],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        cost = cost_of(encoder, record(*((role, [text]) for role, text in turns)))
        assert cost.tokens == len(made["input_ids"])
        assert cost.supervised_tokens == sum(made["assistant_masks"])


# ---- what never carries loss


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama", "smolvlm"])
@pytest.mark.parametrize("loss_on", [None, "assistant", "completion"])
def test_a_record_without_an_answer(family: str, loss_on: LossOn | None, tmp_path: Path) -> None:
    encoder = encoder_for(tiny.write(family, tmp_path), loss_on=loss_on)
    question = ("user", ["What?"])
    answer = ("assistant", ["This."])
    for one in (record(question), record(("system", ["s"]), question, question), record(question, answer, silent=[1])):
        with pytest.raises(RecordError, match="no supervised tokens"):
            cost_of(encoder, one)
    assert cost_of(encoder, record(question, answer)).supervised_tokens > 1


def test_completion_is_the_last_message_only(tmp_path: Path) -> None:
    encoder = encoder_for(tiny.write("qwen2", tmp_path), loss_on="completion")
    turns = [("user", ["a"]), ("assistant", ["b c d e"]), ("user", ["x"]), ("assistant", ["b"])]
    assert cost_of(encoder, record(*turns)).supervised_tokens == 2
    for one in (record(*turns[:3]), record(*turns, silent=[3])):
        with pytest.raises(RecordError, match="no supervised tokens"):
            cost_of(encoder, one)


def test_the_first_token_is_predicted_from_nothing(tmp_path: Path) -> None:
    folder = tiny.write("qwen2", tmp_path)
    everything = encoder_for(folder, loss_on="all", add_eos=False)
    text = replace(record(("assistant", ["one two three"])), plain=True)
    cost = cost_of(everything, text)
    assert (cost.tokens, cost.supervised_tokens) == (3, 2)
    with pytest.raises(RecordError, match="no supervised tokens"):
        cost_of(everything, replace(record(("assistant", ["one"])), plain=True))
    # A base model whose answer begins the text
    (folder / "chat_template.jinja").unlink()
    base = encoder_for(folder, add_eos=False)
    cost = cost_of(base, record(("user", [""]), ("assistant", ["one two three"])))
    assert (cost.tokens, cost.supervised_tokens) == (3, 2)


def test_media_in_an_answer_carry_no_loss_nor_does_what_is_around_them(tmp_path: Path) -> None:
    encoder = encoder_for(tiny.write("qwen2_5_vl", tmp_path))
    without = cost_of(encoder, record(("user", ["Draw!"]), ("assistant", ["Here:"])))
    cost, supervised = encoder.cost(record(("user", ["Draw!"]), ("assistant", ["Here:", image()])), [PICTURE])
    assert supervised.media == (False,)
    assert cost.supervised_tokens == without.supervised_tokens
    assert cost.tokens == without.tokens + 2 + cost.image_tokens  # <|vision_start|> and <|vision_end|>
    _, supervised = encoder.cost(record(("user", [image(), "What?"]), ("assistant", ["Here:"])), [PICTURE])
    assert supervised.media == (False,)


def unsupervised(encoder: RecordEncoder, one: Record) -> list[str]:
    """The spans that carry no loss, the same whether the shape is learned or not."""
    layout = encoder.layouter.layout(one, ())
    assert encoder.layout(one, ()) == layout
    assert layout.supervised is not None
    edges = [0, *(edge for span in layout.supervised for edge in span), len(layout.text)]
    return [found for a, b in zip(edges[::2], edges[1::2], strict=True) if (found := layout.text[a:b])]


def test_a_message_without_loss_has_none_where_all_text_carries_it(tmp_path: Path) -> None:
    folder = tiny.write("qwen2", tmp_path)
    turns = (("user", ["Sure?"]), ("assistant", ["six"]), ("user", ["Sure?"]), ("assistant", ["6"]))
    everything = encoder_for(folder, loss_on="all")
    assert encoder_for(folder, loss_on="all").layout(record(*turns), ()).supervised is None
    assert unsupervised(everything, record(*turns, silent=[1])) == ["six<|im_end|>"]
    assert unsupervised(everything, record(*turns, silent=[2])) == ["Sure?"]
    assert unsupervised(everything, record(*turns, silent=[0, 3])) == ["Sure?", "6<|im_end|>"]
    (folder / "chat_template.jinja").unlink()
    base = encoder_for(folder, loss_on="all", add_eos=False)
    assert unsupervised(base, record(*turns[:2], silent=[1])) == ["six"]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    ("template", "answers", "options", "expected"),
    [
        ("<a>{{ m.content }}<|im_end|>", ["6"], {}, (True, False)),
        ("<a>{{ m.content }}", ["6"], {}, (False, False)),
        ("<a>{{ m.content }}", ["6"], {"loss_on": "all"}, (False, False)),
        ("<a>{{ m.content }}", ["6"], {"add_eos": True}, (True, False)),
        ("<a>{{ m.content }}.", ["6"], {}, (False, False)),
        ("<a>{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}", ["6"], {}, (False, False)),
        ("<a>{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}", ["6", "7"], {}, (True, False)),
        ("<a>{{ m.content.split('</t>')[-1] }}<|im_end|>", ["<t> 1 </t>6"], {}, (True, True)),
        ("<a>{{ m.content.split('</t>')[-1] }}<|im_end|>", ["6"], {}, (True, False)),
        ("<a>{{ m.content | trim }}<|im_end|>", [" 6 \n"], {}, (True, False)),
    ],
)
def test_answers_without_an_end_and_shortened_ones_are_known(
    template: str, answers: list[str], options: Any, expected: Any, learned: bool, tmp_path: Path
) -> None:
    folder = tiny.write("qwen2", tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}" + template + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    encoder = encoder_for(folder, **options)
    one = record(*[turn for text in answers for turn in (("user", ["q"]), ("assistant", [text]))])
    for _ in range(encoder.skeletons.patience + 1 if learned else 1):
        _, found = encoder.cost(one, ())
    assert (found.ended, found.shortened) == expected


def test_an_image_that_begins_the_text(tmp_path: Path) -> None:
    """Its first token carries no loss anyway, so none of the text's is left out."""
    folder = tiny.write("qwen2_5_vl", tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for p in m.content %}{{ '<|image_pad|>' if p.type == 'image' else p.text }}"
        "{% endfor %}{% endfor %}"
    )
    one = record(("user", [image(), "one two"]), ("assistant", [" three"]))
    cost = cost_of(encoder_for(folder, loss_on="all"), one)
    assert (cost.text_tokens, cost.supervised_tokens) == (3, 3)


# ---- models without a template


def test_a_base_model(tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    encoder, ended = encoder_for(folder, add_eos=False), encoder_for(folder)
    prompt = encoder.tokenizer.encode("Q:", special=True).ids
    for answer in ("\none two", "\n🦄", "\n🦄🦄", "\n\u2028", "\n👩\u200d👧", "\n𝔘", "\none 𝔘𝔘 two"):
        whole = encoder.tokenizer.encode("Q:" + answer, special=True).ids
        assert whole[: len(prompt)] == prompt
        cost = cost_of(encoder, record(("user", ["Q:"]), ("assistant", [answer])))
        assert (cost.tokens, cost.supervised_tokens) == (len(whole), len(whole) - len(prompt)), repr(answer)
        longer = cost_of(ended, record(("user", ["Q:"]), ("assistant", [answer])))
        assert (longer.tokens, longer.supervised_tokens) == (cost.tokens + 1, cost.supervised_tokens + 1)
    with pytest.raises(RecordError, match="no chat template"):
        cost_of(encoder, record(("user", ["a"]), ("assistant", ["b"]), ("user", ["c"])))


def test_an_unknown_rule(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="completion"):
        encoder_for(tiny.write("llama", tmp_path), loss_on="completions")


# ---- ways of laying out


SHAPES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "t"), ("assistant", "t")),
    (("system", "t"), ("user", "it"), ("assistant", "t"), ("user", "ti"), ("assistant", "t")),
    (("user", "tit"), ("assistant", "t"), ("user", "t"), ("assistant", "tt"), ("user", "t")),
    (("user", "v"), ("assistant", "t")),
)
TEXTS = (
    *(
        "one",
        " two",
        "Three",
        "\n",
        "\n\n",
        " ",
        "  ",
        "\t",
        "🦄",
        "é",
        "e\u0301",
        "\u2028",
        "\u00a0",
        "7",
        "1234",
        "'s",
    ),
    *("<|im_", "end|>", "<|im_end|>", "<|im_start|>", "</s>", "<s>", "[INST]", " [/INST]", "<", ">", "<end_of_turn>"),
    *("<|eot_id|>", "Assistant:", "<end_of_utterance>", "<think>", "</think>", "<row_1_col_1>", "<bos>", ".", ":", ""),
)


@pytest.mark.parametrize("loss_on", [pytest.param(None, marks=pytest.mark.full), "all"])
@pytest.mark.parametrize("family", tiny.tiny_families())
def test_filling_in_costs_what_the_template_costs(family: str, loss_on: LossOn | None, tmp_path: Path) -> None:
    folder = tiny.write(family, tmp_path)
    quickly, slowly = encoder_for(folder, loss_on=loss_on), encoder_for(folder, loss_on=loss_on)
    quickly.skeletons.patience, slowly.skeletons.patience = 0, 10**9  # type: ignore[misc]
    kinds = quickly.layouter.rule.placeholders
    draw = random.Random(family)

    def one(shape: tuple[tuple[str, str], ...]) -> Record:
        def part(letter: str) -> Part:
            if letter == "t":
                return Text("".join(draw.choices(TEXTS, k=draw.randint(0, 6))))
            return Media("image" if letter == "i" else "video", MediaRef(name="m"))

        taken = {"t"} | {kind[0] for kind in kinds}
        return record(*((role, [part(letter) for letter in parts if letter in taken]) for role, parts in shape))

    def outcome(encoder: RecordEncoder, found: Record) -> object:
        headers = [
            MediaHeader(kind="image", width=random.Random(n).randint(30, 900), height=200)
            if m.kind == "image"
            else FILM
            for n, m in enumerate(found.media())
        ]
        try:
            return encoder.cost(found, headers)
        except RecordError as error:
            return error.reason

    compared = 0
    for shape in SHAPES:
        for _ in range(40):
            found = one(shape)
            whole = outcome(slowly, found)
            assert outcome(quickly, found) == whole, found
            compared += isinstance(whole, tuple)
    assert compared > 80
    filled = any(quickly.skeletons._known.values())
    assert filled or family in ("qwen3", "nanovlm") or loss_on == "all", "no record was ever filled in"
