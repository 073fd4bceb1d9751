"""Counting in pieces gives what counting the whole text gives, for any texts, in every family that allows it."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.values import Media, MediaHeader, MediaLimits, MediaRef, Message, Record, Text
from packtrain.families.encoder import RecordEncoder, _count
from packtrain.families.registry import load_rule
from packtrain.families.segments import Draft
from packtrain.families.settings import read_settings
from packtrain.families.skeleton import shape_of
from packtrain.families.tiny import tiny_families, write
from packtrain.families.tokenizer import _runs_into

IMAGE = MediaHeader(kind="image", width=300, height=200)
SPECIAL = (
    *(
        "<|im_end|>",
        "<|im_",
        "start|>",
        "<|im_start|>assistant\n",
        "</s>",
        "[/INST]",
        "<end_of_utterance>",
        "<|eot_id|>",
    ),
    *("<end_of_turn>", "<|vision_end|>", "<fake_token_around_image>", "\n", " ", "\n\n", "é", "🙂", "1234", "a", "'s"),
)
TEXTS = st.lists(st.sampled_from(SPECIAL) | st.text(string.printable + "äß日🙂\u2028", max_size=12), max_size=5).map(
    "".join
)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], RecordEncoder]:
    made = {}
    for family in tiny_families():
        read = read_settings(write(family, tmp_path_factory.mktemp(family)))
        for loss_on in ("assistant", "completion", "all"):
            rule = load_rule(read, MediaLimits())
            assert rule is not None
            made[family, loss_on] = RecordEncoder(read, rule, loss_on=loss_on)
    return made


def record_of(texts: tuple[str, str, str, str, str], *, image: bool, system: bool) -> Record:
    picture = (Media("image", MediaRef(name="")),) if image else ()
    turns = [Message(role="system", parts=(Text(texts[0]),))] if system else []
    turns += [
        Message(role="user", parts=(*picture, Text(texts[1]))),
        Message(role="assistant", parts=(Text(texts[2]),)),
        Message(role="user", parts=(Text(texts[3]),)),
        Message(role="assistant", parts=(Text(texts[4]),)),
    ]
    return Record(id="1", origin="x:1", source="x", messages=tuple(turns))


PLAIN = record_of(("s", "a", "b", "c", "d"), image=False, system=False)


@pytest.mark.parametrize("examples", [20, pytest.param(100, marks=pytest.mark.more)])
@pytest.mark.parametrize("family", tiny_families())
def test_pieces_count_as_the_whole(family: str, examples: int, encoders: dict[tuple[str, str], RecordEncoder]) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(texts=st.tuples(TEXTS, TEXTS, TEXTS, TEXTS, TEXTS), image=st.booleans(), system=st.booleans())
    def same(texts: tuple[str, str, str, str, str], image: bool, system: bool) -> None:
        require_same(family, encoders, texts, image=image, system=system)

    same()


def require_same(
    family: str,
    encoders: dict[tuple[str, str], RecordEncoder],
    texts: tuple[str, str, str, str, str],
    *,
    image: bool,
    system: bool,
) -> None:
    for loss_on in ("assistant", "completion", "all"):
        encoder = encoders[family, loss_on]
        image = image and "image" in encoder.layouter.family.placeholders
        record, headers = record_of(texts, image=image, system=system), (IMAGE,) * image
        shape = encoder._shape(record, shape_of(record))
        if shape is None or encoder._skeletons.hides_placeholder(texts):
            continue
        draft = shape.draft(
            texts if system else texts[1:], encoder.layouter.expansions(headers), encoder._cutter.pricer
        )
        assert isinstance(draft, Draft)
        layout = encoder.layout(record, headers)
        whole = _count(layout, encoder.tokenizer.encode(layout.text, special=layout.special))
        assert draft.counts([encoder.tokenizer.encode(text, special=False) for text in draft.segments]) == whole


def test_most_families_are_counted_in_pieces(encoders: dict[tuple[str, str], RecordEncoder]) -> None:
    """Otherwise the property above would hold of nothing."""
    counted = {
        family for (family, _), encoder in encoders.items() if encoder._shape(PLAIN, shape_of(PLAIN)) is not None
    }
    assert len(counted) >= 12
    assert {"qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "llama"} <= counted


def test_pieces_are_fewer_than_the_whole(encoders: dict[tuple[str, str], RecordEncoder]) -> None:
    encoder = encoders["qwen2_5_vl", "assistant"]
    record = record_of(("s", "a", "b", "c", "d"), image=True, system=False)
    shape = encoder._shape(record, shape_of(record))
    assert shape is not None
    draft = shape.draft(["a", "b", "c", "d"], encoder.layouter.expansions([IMAGE]), encoder._cutter.pricer)
    assert draft is not None
    assert sum(map(len, draft.segments)) < len(encoder.layout(record, [IMAGE]).text) / 3


@pytest.mark.parametrize(
    ("other", "token", "found"),
    [
        ("<a><b>", "<b>", True),  # a text that ends in <a> would take the token with it
        ("<image>s", "<image>", True),
        ("x<", "<b>", True),
        ("<b>", "<c>", False),
        ("<row_1_col_1>", "<row_1_col_11>", False),
        ("b>", "<b>", False),  # found later than the token, which therefore wins
    ],
)
def test_tokens_that_a_text_can_run_into_are_not_cut_at(other: str, token: str, found: bool) -> None:
    assert _runs_into(other, token) is found
