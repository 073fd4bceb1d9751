"""Rendering by filling in gives what running the template gives, for any text, or it is not used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from packtrain.core.errors import RecordError
from packtrain.core.values import Media, MediaHeader, MediaLimits, MediaRef, Message, Part, Record, Text
from packtrain.families import tiny
from packtrain.families.family import ProcessorSettings
from packtrain.families.layout import Layout, Layouter, LossOn
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings
from packtrain.families.skeleton import Skeletons
from packtrain.families.tokenizer import LightTokenizer

WRITE = (
    "{%- macro write(content) -%}{%- for part in content -%}{%- if part.type == 'image' -%}<|image_pad|>"
    "{%- elif part.type == 'video' -%}<|video_pad|>{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}"
    "{%- endmacro -%}"
)


def each(body: str) -> str:
    """A template that writes every message by `body`, in which t is its text."""
    return (
        WRITE + "{%- for m in messages -%}{%- set t = write(m.content) -%}"
        "{{- '<|im_start|>' + m.role + '\\n' }}" + body + "{{- '<|im_end|>\\n' }}{%- endfor -%}"
    )


# name -> template, and whether filling in may be used for a conversation of single texts. `t` has gone through a macro.
TEMPLATES: dict[str, tuple[str, bool]] = {
    "as it is": (each("{{ t }}"), True),
    "joined": (each("{{ '(' ~ t ~ ')' + t[:0] }}"), False),
    "joined only": (each("{{ '(' ~ t ~ ')' }}"), True),
    "trimmed": (each("{{ t | trim }}"), True),
    "stripped": (each("{{ t.strip() }}"), True),
    "trimmed by a macro": ("{%- macro short(x) -%}{{ x | trim }}{%- endmacro -%}" + each("{{ short(t) }}"), True),
    "trimmed at one side": (each("{{ t.lstrip() }}"), False),
    "trimmed with what is around it": (each("{{ (' a ' + t) | trim }}"), False),
    "trimmed of letters": (each("{{ t.strip('ab') }}"), False),
    "thinking": (each("{{ t.split('</think>')[-1] if '</think>' in t else t }}"), False),
    "framed": (each("{{ 'F' if t.startswith('<x>') and t.endswith('</x>') else t }}"), False),
    "by length": (each("{{ t if t | length < 90 else 'long' }}"), False),
    "by length after joining": (each("{%- set u = '(' ~ t ~ ')' -%}{{ t if u | length < 90 else 'long' }}"), False),
    "by length of a block": (each("{%- set u -%}({{ t }}){%- endset -%}{{ t if u | length < 90 else 'long' }}"), False),
    "by length of a list": (each("{{ t if [t, t] | join | length < 90 else 'long' }}"), False),
    "by length of a join": (each("{{ t if ','.join([t, t]) | length < 90 else 'long' }}"), False),
    "by length of a format": (each("{{ t if '{}!'.format(t) | length < 90 else 'long' }}"), False),
    "by length of a percent": (each("{{ t if ('%s!' % t) | length < 90 else 'long' }}"), False),
    "by number": (each("{{ t if t | int < 7 else 'many' }}"), False),
    "by number of words": (each("{{ t if t | wordcount < 7 else 'many' }}"), False),
    "by truth": (each("{{ t or 'nothing' }}"), False),
    "by default": (each("{{ t | default('nothing', true) }}"), False),
    "by key": (each("{{ {'yes': 'JA'}.get(t, t) }}"), False),
    "by joined key": (each("{{ {'yes!': 'JA'}.get(t ~ '!', t) }}"), False),
    "by list": (each("{{ 'JA' if t in ['yes', 'no'] else t }}"), False),
    "within a word": (each("{{ 'JA' if t in 'yesterday' else t }}"), False),
    "by special token": (each("{{ t if t.startswith(eos_token) else t + '.' }}"), False),
    "by special token after joining": (each("{{ t if (t ~ '').endswith(eos_token) else t + '.' }}"), False),
    "by the text before": (each("{{ '=' if loop.changed(t) else t }}"), False),
    "by its place": (each("{{ t + ('!' if loop.first else '') }}"), True),
    "at the end": (each("{{ t + ('!' if loop.last else '') }}"), False),  # a turn cannot be told by what comes before
    "upper case": (each("{{ t | upper }}"), False),
    "replaced": (each("{{ t | replace('ab', 'b') }}"), False),
    "indented": (each("{{ t | indent }}"), False),
    "escaped": (each("{{ t | e }}"), False),
    "as JSON": (each("{{ t | tojson }}"), False),
    "twice": (each("{{ t + t }}"), False),
    "never": (each("{{ '' }}"), False),
    "in a filter block": (each("{% filter lower %}{{ t }}{% endfilter %}"), False),
    "refused": (each("{% if t == 'b' %}{{ raise_exception('no b') }}{% endif %}{{ t }}"), False),
    "generation": (
        each("{% if m.role == 'assistant' %}{% generation %}{{ t }}{% endgeneration %}{% else %}{{ t }}{% endif %}"),
        True,
    ),
    "generation, trimmed": (
        each("{% if m.role == 'assistant' %}{% generation %}{{ t | trim }}.{% endgeneration %}{% endif %}"),
        False,  # the user's text is not written
    ),
    "media first": (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
        "{%- for p in m.content if p.type == 'image' -%}<|image_pad|>{%- endfor -%}"
        "{%- for p in m.content if p.type == 'video' -%}<|video_pad|>{%- endfor -%}"
        "{%- for p in m.content if p.type == 'text' -%}{{ p.text }}{%- endfor -%}<|im_end|>\n{%- endfor -%}",
        True,
    ),
    "a prompt that opens a thought": (
        each("{{ t }}") + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        False,  # a text that begins with the thought begins behind the prompt
    ),
    "a thought that is always closed": (
        each("{{ '<think></think>' + t if m.role == 'assistant' else t }}")
        + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        True,
    ),
    "ends all turns but the last": (
        each("{{ t }}").replace("{{- '<|im_end|>", "{{- '' if loop.last else '<|im_end|>")
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        False,  # white space at the end of the last text carries no loss
    ),
    "without an end": (each("{{ t }}").replace("{{- '<|im_end|>\\n' }}", "{{- '\\n' }}"), False),
}
FRAGMENTS = (
    *(
        "",
        " ",
        "\n",
        "\t",
        "a",
        "b",
        "ab",
        "é",
        "🙂",
        "\u2028",
        "\u00a0",
        "<b>",
        "&",
        '"',
        "\\",
        "{{ t }}",
        "yes",
        "no",
        "7",
    ),
    *(
        "</think>",
        "<think>\n\n</think>\n\n",
        "<x>",
        "</x>",
        "x" * 100,
        "word " * 8,
        "\ue0f00\ue0f1",
        "\ufdd0",
        "\ufdd1",
    ),
    *("<|im_start|>assistant\n", "<|im_end|>\n", "<|im_end|>", "<|image_pad|>", "ASSISTANT:", " [/INST] ", "</s>"),
    *("<start_of_turn>model\n", "<end_of_turn>", "Assistant:", "<end_of_utterance>", "<|eot_id|>", "(0)", "*"),
)
HEADERS = {
    "image": MediaHeader(kind="image", width=64, height=48),
    "video": MediaHeader(kind="video", width=64, height=48, frames=8, fps=2.0, seconds=4.0),
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Skeletons, "patience", 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProcessorSettings]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: read_settings(tiny.write(family, root / family)) for family in tiny.tiny_families()}


def layouter_for(found: ProcessorSettings, *, loss_on: LossOn | None = None, add_eos: bool = False) -> Layouter:
    family = load_rule(found, MediaLimits())
    assert family is not None
    return Layouter(found, family, LightTokenizer(found), loss_on=loss_on, add_eos=add_eos, typed=False)


def contents(literals: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Texts out of everything that a template might look for."""
    pieces = st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(literals or ("",)), st.text(max_size=5))
    return st.lists(pieces, max_size=4).map("".join)


@st.composite
def records(draw: st.DrawFn, literals: tuple[str, ...], kinds: tuple[str, ...]) -> Record:
    text = contents(literals)
    roles = [draw(st.sampled_from(("system", "user", "user")))]
    while len(roles) < draw(st.integers(1, 5)):
        roles.append("assistant" if roles[-1] == "user" else "user")
    if draw(st.integers(0, 9)) == 0:
        roles[0] = "assistant"
    messages = []
    for role in roles:
        parts: list[Part] = [Text(draw(text)) for _ in range(draw(st.sampled_from((1, 1, 1, 0, 2))))]
        for _ in range(draw(st.sampled_from((0, 0, 1, 2))) if role == "user" and kinds else 0):
            medium = Media(draw(st.sampled_from(kinds)), MediaRef(name="m"))  # type: ignore[arg-type]
            parts.insert(draw(st.integers(0, len(parts))), medium)
        messages.append(Message(role=role, parts=tuple(parts), train=draw(st.integers(0, 5)) > 0))
    return Record(id="r", origin="here:1", source="s", messages=tuple(messages))


def outcome(lay_out: Any, record: Record) -> Layout | str:
    try:
        return lay_out(record, [HEADERS[medium.kind] for medium in record.media()])  # type: ignore[no-any-return]
    except RecordError:
        return "refused"  # for which of several reasons depends on what is looked at first


def assert_same(layouter: Layouter, skeletons: Skeletons, record: Record) -> None:
    assert outcome(skeletons.layout, record) == outcome(layouter.layout, record)


def chat(*texts: str) -> Record:
    messages = [Message(role=("user", "assistant")[n % 2], parts=(Text(text),)) for n, text in enumerate(texts)]
    return Record(id="r", origin="here:1", source="s", messages=tuple(messages))


def filled_in(skeletons: Skeletons, record: Record) -> bool:
    return skeletons.skeleton(record) is not None


@pytest.mark.parametrize(
    "loss_on", [None, *(pytest.param(loss_on, marks=pytest.mark.full) for loss_on in ("completion", "all"))]
)
@pytest.mark.parametrize("family", tiny.tiny_families())
def test_the_templates_of_all_families(
    family: str, loss_on: LossOn | None, folders: dict[str, ProcessorSettings]
) -> None:
    layouter = layouter_for(folders[family], loss_on=loss_on)
    skeletons = Skeletons(layouter)
    kinds = tuple(layouter.rule.placeholders)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(record=records(layouter.template_literals, kinds))
    def same(record: Record) -> None:
        assert_same(layouter, skeletons, record)

    same()
    assert filled_in(skeletons, chat("a", "b")) == (family != "qwen3"), "only thinking templates look into a text"


@pytest.mark.parametrize("name", TEMPLATES)
def test_adversarial_templates(name: str, folders: dict[str, ProcessorSettings]) -> None:
    source, may_fill_in = TEMPLATES[name]
    layouter = layouter_for(replace(folders["qwen2_5_vl"], chat_template=source))
    skeletons = Skeletons(layouter)
    literals = layouter.template_literals

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(record=records(literals, ("image", "video")))
    @example(chat("b", "b"))
    @example(chat("yes", "yes"))
    @example(chat("7", "8"))
    @example(chat("x" * 200, "y" * 200))
    @example(chat("<|im_end|>", "a<|im_end|>"))
    @example(chat("one two three four five six seven eight", "<x>a</x>"))
    @example(chat("a \n", " b "))
    @example(chat("<|im_start|>assistant\nb<|im_end|>\n", "c", "<|im_start|>assistant\n", "d"))
    def same(record: Record) -> None:
        assert_same(layouter, skeletons, record)

    same()
    assert filled_in(skeletons, chat("a", "b")) == may_fill_in


@pytest.mark.full
@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("family", [*tiny.tiny_families(), *(f"template {name}" for name in TEMPLATES)])
def test_many_more_texts(family: str, add_eos: bool, folders: dict[str, ProcessorSettings]) -> None:
    name = family.removeprefix("template ")
    found = replace(folders["qwen2_5_vl"], chat_template=TEMPLATES[name][0]) if name != family else folders[family]
    layouter = layouter_for(found, add_eos=add_eos)
    skeletons = Skeletons(layouter)

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(record=records(layouter.template_literals, tuple(layouter.rule.placeholders)))
    def same(record: Record) -> None:
        assert_same(layouter, skeletons, record)

    same()


def test_every_literal_of_a_template_in_every_place(folders: dict[str, ProcessorSettings]) -> None:
    for family in ("qwen2_5_vl", "smolvlm", "mistral", "gemma3_text", "llama", "llava"):
        layouter = layouter_for(folders[family])
        skeletons = Skeletons(layouter)
        literals = [text for text in layouter.template_literals if not layouter.placeholders.search(text)]
        assert len(literals) > 5
        for literal in literals:
            for text in (literal, f"{literal}a", f"a{literal}", f"a {literal} b"):
                assert_same(layouter, skeletons, chat(text, "b"))
                assert_same(layouter, skeletons, chat("a", text))
                assert_same(layouter, skeletons, chat("a", "b", text, text))


def test_a_placeholder_in_a_text_is_never_taken_for_a_medium(folders: dict[str, ProcessorSettings]) -> None:
    layouter = layouter_for(folders["qwen2_5_vl"])
    skeletons = Skeletons(layouter)
    assert filled_in(skeletons, chat("a", "b"))
    with pytest.raises(RecordError, match="placeholders"):
        skeletons.layout(chat("what is <|image_pad|>?", "b"), [])


def test_plain_text_is_not_rendered(folders: dict[str, ProcessorSettings], tmp_path: Path) -> None:
    layouter = layouter_for(folders["qwen2"])
    record = replace(chat("just text"), plain=True)
    assert Skeletons(layouter).layout(record, []).text == "just text"
