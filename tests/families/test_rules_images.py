"""Every family's image rule gives the text and the patches of the real processor, and refuses what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from rule_cases import IMAGE_CASES
from rule_checks import (
    REFUSED,
    Case,
    by_rule,
    differences,
    image_header,
    image_sizes,
    real_images,
    views_of,
    whole_image_call,
    written,
)

pytestmark = pytest.mark.contract

WHOLE_CALLS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava", "llava_next", "llava_onevision")
WHOLE_CALLS += ("internvl", "gemma3", "gemma3-scan-small")
# processors whose own count can be trusted; what it counts beside the media tokens
OWN_COUNTS = {"qwen2_vl": 0, "qwen2_5_vl": 0, "qwen3_vl": 0, "llava": 0, "llava_next": 0, "llava_onevision": 0}
OWN_COUNTS |= {"internvl": 2, "gemma3": 0, "qwen3_vl-bare": 0, "llava_next-bare": 0, "internvl-bare": 2}


def compare(case: Case, count: int, seed: int) -> None:
    processor = case.make()
    family = case.rule(processor)
    pairs = []
    for width, height in image_sizes(count, case.longest, seed):
        rule = by_rule(lambda w=width, h=height: family.image(image_header(w, h), 1))
        pairs.append(((width, height), rule, real_images(case, processor, family, [(width, height)])[0]))
    assert differences(pairs) == []
    accepted = [rule for _, rule, _ in pairs if rule != REFUSED]
    assert len(accepted) > count / 2, "the processor refused most sizes, so little was compared"


@pytest.mark.parametrize("name", IMAGE_CASES)
def test_rule_equals_processor(name: str, cases: dict[str, Any]) -> None:
    compare(cases[name], 100, seed=1)


@pytest.mark.more
@pytest.mark.parametrize("name", IMAGE_CASES)
def test_rule_equals_processor_on_many_sizes(name: str, cases: dict[str, Any]) -> None:
    compare(cases[name], 1000, seed=2)


@pytest.mark.parametrize("name", OWN_COUNTS)
def test_rule_equals_processors_own_count(name: str, cases: dict[str, Any]) -> None:
    """The count that transformers offers without pixels, where it is right."""
    case = cases[name]
    processor = case.make()
    family = case.rule(processor)
    sizes = [size for size in image_sizes(1000, seed=3) if by_rule_accepts(family, size)]
    own = processor._get_num_multimodal_tokens(image_sizes=[[height, width] for width, height in sizes])
    rule = [family.image(image_header(*size), 1).media_tokens + OWN_COUNTS[name] for size in sizes]
    assert len(sizes) > 700
    assert rule == own["num_image_tokens"]


def by_rule_accepts(family: Any, size: tuple[int, int]) -> bool:
    return by_rule(lambda: family.image(image_header(*size), 1)) != REFUSED


@pytest.mark.parametrize("name", WHOLE_CALLS)
def test_whole_call_writes_what_the_rule_says(name: str, cases: dict[str, Any]) -> None:
    """Pixels, tokenizer and all; decoding gives back the exact text."""
    check_whole_calls(cases[name], [(1, 1), (300, 2), (2, 300), (364, 273), (640, 250), (225, 449)])


@pytest.mark.more
@pytest.mark.parametrize("name", WHOLE_CALLS)
def test_whole_call_writes_what_the_rule_says_for_forty_images(name: str, cases: dict[str, Any]) -> None:
    check_whole_calls(cases[name], [*image_sizes(42, longest=400, seed=4), (2000, 11), (5, 900)])


def check_whole_calls(case: Case, sizes: list[tuple[int, int]]) -> None:
    processor = case.make()
    family = case.rule(processor)
    pairs = []
    for size in sizes:
        made = whole_image_call(processor, family, [size])
        truth = made if isinstance(made, str) else (made[0], views_of(case, made[1], "pixel_values"))
        pairs.append((size, by_rule(lambda s=size: family.image(image_header(*s), 1)), truth))
    assert differences(pairs) == []
    assert sum(truth != REFUSED for *_, truth in pairs) >= len(sizes) / 2


@pytest.mark.parametrize(
    "name", ["llava_onevision", "idefics3", "smolvlm", "internvl", "gemma3-scan-small", "qwen2_vl"]
)
def test_several_images_in_one_sample(name: str, cases: dict[str, Any]) -> None:
    case = cases[name]
    processor = case.make()
    family = case.rule(processor)
    for sizes in ([(300, 200), (64, 400)], [(90, 90), (500, 100), (33, 47)]):
        found = whole_image_call(processor, family, sizes)
        rule = [family.image(image_header(*size), len(sizes), number) for number, size in enumerate(sizes, 1)]
        assert found[0] == "".join(written(expansion) for expansion in rule)
        if name != "smolvlm" and name != "idefics3":
            assert views_of(case, found[1], "pixel_values") == sum(expansion.patches for expansion in rule)


def test_onevision_cuts_only_single_images(cases: dict[str, Any]) -> None:
    case = cases["llava_onevision"]
    family = case.rule(case.make())
    alone, together = (family.image(image_header(1000, 700), images) for images in (1, 2))
    assert alone.tiles > 1
    assert together.tiles == 1
    assert alone.media_tokens > together.media_tokens == 730


def test_largest_span_is_the_image_or_the_tile(cases: dict[str, Any]) -> None:
    whole = cases["qwen2_vl"].rule(cases["qwen2_vl"].make()).image(image_header(640, 480), 1)
    cut = cases["idefics3"].rule(cases["idefics3"].make()).image(image_header(640, 480), 1)
    assert whole.max_patches == whole.patches
    assert cut.tiles > 1
    assert cut.max_patches * cut.tiles == cut.patches


def test_comparison_notices_one_token_more(cases: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is wrong by one token fails the comparison above."""
    from packtrain.families.qwen_vl import rule as qwen_vl

    right = qwen_vl._fit_volume
    monkeypatch.setattr(qwen_vl, "_fit_volume", lambda *a: (right(*a)[0] + 28, right(*a)[1]))
    with pytest.raises(AssertionError, match=r"rule .* patches"):
        compare(cases["qwen2_vl"], 20, seed=5)


def test_comparison_notices_a_missing_refusal(cases: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.families.qwen_vl import rule as qwen_vl

    monkeypatch.setattr(qwen_vl, "MAX_RATIO", 10_000)
    with pytest.raises(AssertionError, match="processor refused"):
        compare(cases["qwen2_vl"], 20, seed=5)
