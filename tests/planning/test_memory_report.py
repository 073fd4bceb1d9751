"""The worst case is explained with the right numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packtrain.planning.memory_report import ResourceUse, explain_worst
from packtrain.predicting.values import Load

TILES = ResourceUse(name="tiles", most=63, setting="max_images_per_pack", limit=306, tokens_each=65)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "4,096 tokens hold at most 63 tiles of 65 tokens, so max_images_per_pack 306 never binds"),
        ({"limit": 63}, "max_images_per_pack 63 binds"),
        ({"limit": 63, "most": 60}, "max_images_per_pack 63 does not bind in this plan"),
        ({"tokens_each": None}, "max_images_per_pack 306 does not bind in this plan"),
        ({"limit": 64}, "never binds"),
        ({"limit": None}, "no limit on tiles is set"),
    ],
)
def test_what_is_said_of_a_limit(changes: dict[str, Any], words: str) -> None:
    use = replace(TILES, **changes)
    text = use.explain(4096)
    assert text.startswith(f"A micro-batch has at most {use.most} tiles; ")
    assert text.endswith(f"{words}.")


def test_the_worst_case_in_sentences() -> None:
    heaviest = Load(tokens=4095, squared_tokens=0, longest=4095, patches=64_512, images=9)
    patches = ResourceUse(name="patches", most=64_512, product=306 * 1024)
    assert explain_worst(7, heaviest, ("a", "b", "c", "d", "e"), (TILES, patches), packing_length=4096) == (
        "Pack 7 needs the most memory: 4,095 of 4,096 tokens, 64,512 patches and 9 images from 5 samples "
        "(a, b, c and 2 more).",
        "A micro-batch has at most 63 tiles; 4,096 tokens hold at most 63 tiles of 65 tokens, so max_images_per_pack "
        "306 never binds.",
        "A micro-batch has at most 64,512 patches; the product of the limits is 313,344; no limit on patches is set.",
    )
    assert "from 1 sample (a)." in explain_worst(7, heaviest, ("a",), (), packing_length=4096)[0]
