"""Where the last medium ends: the tail is what stands behind the last media id when everything is written out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import RecordError
from packtrain.core.values import (
    Cost,
    Media,
    MediaHeader,
    MediaKind,
    MediaLimits,
    MediaRef,
    Message,
    Part,
    Record,
    Text,
)
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.delivery.encode.sample_tokens import SampleTokens
from packtrain.families import tiny
from packtrain.families.encoder import RecordEncoder
from packtrain.families.family import Expansion, Rule, Run
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings

SEEING = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava", "llava_next", "llava_onevision"),
    *("internvl", "gemma3", "nanovlm"),
)
WATCHING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "internvl")
READING = tuple(family for family in tiny.tiny_families() if family not in SEEING)
FILM = MediaHeader(kind="video", width=64, height=48, frames=40, fps=8.0, seconds=5.0)
# Letters are texts, images and videos; the last medium stands first, between texts, at the end, and in an answer.
SHAPES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "it"), ("assistant", "t")),
    (("system", "t"), ("user", "tit"), ("assistant", "t"), ("user", "t"), ("assistant", "tt")),
    (("user", "iti"), ("assistant", "t"), ("user", "ti"), ("assistant", "t")),
    (("user", "t"), ("assistant", "ti")),
    (("user", "vt"), ("assistant", "t")),
    (("user", "tv"), ("assistant", "t"), ("user", "tv"), ("assistant", "t")),
    (("user", "vti"), ("assistant", "t")),
    (("user", "ivt"), ("assistant", "t")),
)
TEXTS = (
    *("one", " two", "Three", "\n", "\n\n", " ", "  ", "🦄", "é", "e\u0301", "\u2028", "1234", "'s", ".", ""),
    *("<|im_end|>", "</s>", "[INST]", "<end_of_turn>", "<|vision_end|>", "<fake_token_around_image>", "</img>"),
)


def encoder_for(folder: Path, *, patience: int = 32, **options: Any) -> RecordEncoder:
    settings = read_settings(folder)
    family = load_rule(settings, MediaLimits())
    assert family is not None
    encoder = RecordEncoder(settings, family, **options)
    encoder.skeletons.patience = patience  # type: ignore[misc]
    return encoder


def both_ways(folder: Path, **options: Any) -> tuple[RecordEncoder, RecordEncoder]:
    """One that fills in texts wherever it can, and one that runs the template for every record."""
    return encoder_for(folder, patience=0, **options), encoder_for(folder, patience=10**9, **options)


def samples(family: str, each: int = 4) -> Iterator[tuple[Record, list[MediaHeader]]]:
    """Random records of every shape that the family takes."""
    draw = random.Random(family)
    kinds: dict[str, MediaKind] = {"i": "image", "v": "video"}
    taken = {"t"} | ({"i"} if family in SEEING else set()) | ({"v"} if family in WATCHING else set())

    def part(letter: str) -> Part:
        if letter == "t":
            return Text("".join(draw.choices(TEXTS, k=draw.randint(0, 6))) + "x")
        return Media(kinds[letter], MediaRef(name="m"))

    def header(kind: MediaKind) -> MediaHeader:
        size = {"width": draw.randint(30, 900), "height": draw.randint(60, 500)}
        return FILM if kind == "video" else MediaHeader(kind="image", **size)

    for shape in SHAPES:
        if family == "smolvlm" and {"i", "v"} <= {letter for _, letters in shape for letter in letters}:
            continue  # it takes one kind or the other
        for _ in range(each):
            turns = [(role, tuple(part(letter) for letter in letters if letter in taken)) for role, letters in shape]
            messages = tuple(Message(role=role, parts=parts) for role, parts in turns)
            record = Record(id="r", origin="here:1", source="s", messages=messages)
            yield record, [header(medium.kind) for medium in record.media()]


def written_out(encoder: RecordEncoder, record: Record, headers: list[MediaHeader]) -> tuple[list[int], set[int]]:
    """The ids of the whole text with every media token written as often as it counts, and which ids are media."""
    layout = encoder.layout(record, headers)
    tokens = {piece.token for expansion in layout.expansions for piece in expansion.pieces if isinstance(piece, Run)}
    pieces, cursor = [], 0
    for run in layout.runs:
        (token,) = (token for token in tokens if layout.text.startswith(token, run.at))
        pieces += [layout.text[cursor : run.at], token * run.count]
        cursor = run.at + len(token)
    pieces.append(layout.text[cursor:])
    ids = encoder.tokenizer.encode("".join(pieces), special=layout.special).ids
    return ids, {found for token in tokens if (found := encoder.tokenizer.id_of(token)) is not None}


def runs_of(encoder: RecordEncoder, record: Record, headers: list[MediaHeader], cost: Cost) -> str:
    """The spans of a tail by the labels that are delivered."""
    _, labels, _ = SampleTokens.of(encoder.layout(record, headers), encoder.tokenizer).expand()
    carrying = [label != IGNORED for label in labels[len(labels) - cost.tail_tokens :]]
    found = [len(list(same)) for _, same in groupby(carrying)]
    return ",".join(map(str, [0, *found] if carrying and carrying[0] else found or [0]))


def assert_exact(cost: Cost, ids: list[int], media: set[int]) -> None:
    assert cost.tokens == len(ids)
    last = max(at for at, token in enumerate(ids) if token in media)
    assert cost.tokens - cost.tail_tokens == last + 1
    assert 0 <= cost.tail_tokens < cost.text_tokens


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.full), {"loss_on": "all", "add_eos": True}], ids=str
)
@pytest.mark.parametrize("family", SEEING)
def test_the_tail_begins_behind_the_last_media_id(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    quickly, slowly = both_ways(tiny.write(family, tmp_path), **options)
    compared, tails = 0, set()
    for record, headers in samples(family):
        if headers:
            cost, _ = slowly.cost(record, headers)
            assert_exact(cost, *written_out(slowly, record, headers))
            assert cost.tail_runs == runs_of(slowly, record, headers, cost)
            assert quickly.cost(record, headers)[0] == cost
            tails.add(cost.tail_tokens)
            compared += 1
    assert compared >= 16
    assert len(tails) > 8, "the tails hardly differ"
    assert any(quickly.skeletons._known.values()) or family == "gemma3", "no record was filled in"


def test_a_token_that_the_tokenizer_appends_is_in_the_tail(tmp_path: Path) -> None:
    folder = tiny.write("llava", tmp_path)
    path = folder / "tokenizer.json"
    before = encoder_for(folder)
    content = json.loads(path.read_text())
    (template,) = (p for p in content["post_processor"]["processors"] if p["type"] == "TemplateProcessing")
    end = before.tokenizer.eos_token
    assert end is not None
    template["special_tokens"][end] = {"id": end, "ids": [before.tokenizer.eos_id], "tokens": [end]}
    template["single"].append({"SpecialToken": {"id": end, "type_id": 0}})
    path.write_text(json.dumps(content))
    quickly, slowly = both_ways(folder)
    for record, headers in samples("llava"):
        if headers:
            cost, _ = quickly.cost(record, headers)
            assert cost == slowly.cost(record, headers)[0]
            assert_exact(cost, *written_out(slowly, record, headers))
            assert cost.tail_tokens == before.cost(record, headers)[0].tail_tokens + 1
    assert any(quickly.skeletons._known.values()), "no record was filled in"


@pytest.mark.parametrize("family", tiny.tiny_families())
def test_text_is_all_tail(family: str, tmp_path: Path) -> None:
    compared = 0
    for encoder in both_ways(tiny.write(family, tmp_path)):
        for record, _ in samples(READING[0], each=2):
            texts = [part for message in record.messages for part in message.parts]
            plain = replace(record, plain=True, messages=(Message(role="assistant", parts=(*texts, Text(" y z"))),))
            for one in (record, plain):
                try:
                    cost, _ = encoder.cost(one, [])
                except RecordError:
                    continue  # a text that holds a media token, or a template that refuses the turns
                assert cost.tail_tokens == cost.tokens == cost.text_tokens
                assert cost.tail_runs == runs_of(encoder, one, [], cost)
                compared += 1
    assert compared > 30


def test_a_medium_without_tokens_ends_nothing(tmp_path: Path) -> None:
    """The last media token is then that of an earlier medium."""
    quickly, slowly = both_ways(tiny.write("internvl", tmp_path))
    (record, headers) = next((r, h) for r, h in samples("internvl") if [x.kind for x in h] == ["image"] * 3)
    counts = {headers[0]: 3, headers[1]: 2, headers[2]: 0}
    for encoder in (quickly, slowly):
        family = encoder.layouter.rule
        right = type(family).image

        def image(header: MediaHeader, *args: int, right: Any = right, family: Rule = family) -> Expansion:
            made: Expansion = right(family, header, *args)
            opening, run, closing = made.pieces
            assert isinstance(run, Run)
            return replace(made, pieces=(opening, replace(run, count=counts.get(header, run.count)), closing))

        family.image = image  # type: ignore[method-assign]
    cost, _ = slowly.cost(record, headers)
    assert cost.image_tokens == 5
    assert_exact(cost, *written_out(slowly, record, headers))
    assert quickly.cost(record, headers)[0] == cost
    none = dict.fromkeys(headers, 0)
    counts |= none
    cost, _ = slowly.cost(record, headers)
    assert (cost.image_tokens, cost.tail_tokens) == (0, cost.tokens)
    assert quickly.cost(record, headers)[0] == cost


# ---- other limits


LIMITS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2_vl": ({"max_pixels": 12_544}, {"num_frames": 4}, {"fps": 6.0}),
    "qwen2_5_vl": ({"max_pixels": 12_544}, {"num_frames": 4}, {"fps": 6.0}),
    "qwen3_vl": ({"max_pixels": 70_000}, {"num_frames": 4}, {"fps": 6.0}),
    "idefics3": ({"max_img_size": 300}, {"max_img_size": 728}),
    "smolvlm": ({"max_img_size": 512}, {"num_frames": 2}, {"fps": 3.0}),
    "internvl": ({"num_frames": 4},),
    "llava_onevision": ({"num_frames": 4},),
    "nanovlm": ({"max_img_size": 512}, {"max_img_size": 1024}),
}


def closing(expansion: Expansion) -> tuple[str | Run, ...]:
    """What stands behind the last media token of an expansion."""
    last = max(at for at, piece in enumerate(expansion.pieces) if isinstance(piece, Run) and piece.count)
    return expansion.pieces[last + 1 :]


@pytest.mark.parametrize("family", SEEING)
def test_what_closes_a_medium_is_the_same_for_every_size_and_limit(family: str, tmp_path: Path) -> None:
    """Costs under other limits keep the measured tail, which is right only because of this."""
    settings = read_settings(tiny.write(family, tmp_path))
    rules = [load_rule(settings, MediaLimits(**limits)) for limits in ({}, *LIMITS.get(family, ()))]
    sides = (30, 56, 133, 400, 900, 2000)
    images = [
        MediaHeader(kind="image", width=w, height=h) for w, h in product(sides, sides) if max(w, h) / min(w, h) < 100
    ]
    videos = [
        MediaHeader(kind="video", width=w, height=w, frames=frames, fps=8.0, seconds=frames / 8)
        for w, frames in product((64, 300), (16, 40, 300, 1300))
    ]
    closings: dict[str, set[object]] = {"image": set(), "video": set()}
    spread: dict[str, set[object]] = {"image": set(), "video": set()}
    for rule in rules:
        assert rule is not None
        found = [("image", rule.image(header, count, count)) for header in images for count in (1, 3)]
        found += [("video", rule.video(header)) for header in videos] if family in WATCHING else []
        for kind, expansion in found:
            closings[kind].add(closing(expansion))
            spread[kind].add((expansion.media_tokens, expansion.patches))
    assert len(closings["image"]) == 1
    assert len(closings["video"]) == (family in WATCHING)
    assert len(spread["image"]) > 3 or family in ("llava", "gemma3"), "the sizes cost hardly anything else"
    assert len(spread["video"]) > 1 or family not in WATCHING
