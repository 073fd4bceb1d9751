"""recommended.yaml: comments explain, and what is loaded is exactly the config."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import studies
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.planning.study_values import Reason
from packtrain.records.yaml_text import load_yaml
from packtrain.reports.recommended import config_text
from packtrain.reports.study_content import json_value

BASE = studies.single().study.recommendation
TEXT = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        (
            *studies.HOSTILE[:7],
            *studies.HOSTILE[9:],
            "yes",
            "1e5",
            "null",
            "~",
            "0x10",
            "",
            " a ",
            "a: b",
            "- x",
            "# no",
        )
    ),
)
LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT)
TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(TEXT, TREE, max_size=5), st.lists(TEXT, min_size=1, max_size=3))
def test_loads_back_to_the_config(config: dict[str, Any], remarks: list[str]) -> None:
    reasons = tuple(
        Reason(parameter=name, baseline=remarks[0], packing="", reason=remarks[-1]) for name in (*config, *remarks)
    )
    text = config_text(replace(BASE, config=config, reasons=reasons, verdict=remarks[0]), title=remarks)
    assert load_yaml(text) == yaml.safe_load(text) == (config or None)


def test_every_derived_value_stands_under_its_reason() -> None:
    recommendation = studies.lvis(3000).study.recommendation
    lines = config_text(recommendation).splitlines()
    assert len(recommendation.reasons) >= 3
    written = {key for section in recommendation.config.values() for key in section}
    assert "packing_length" in written
    for reason in recommendation.reasons:
        key = reason.parameter.split(".")[-1]
        if key not in written:
            continue
        at = next(at for at, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
        comment: list[str] = []
        while lines[at - 1].strip().startswith("#"):
            at -= 1
            comment.insert(0, lines[at].strip().removeprefix("# "))
        assert " ".join(comment) == reason.reason


def test_a_changed_line_has_its_old_value_and_others_stay() -> None:
    base = {"model": {"method": "lora"}, "data": {"packing_length": 8, "shuffle": False}, "training": {"max_steps": 7}}
    config = {"model": {"method": "lora"}, "data": {"packing_length": 16, "shuffle": False}, "training": {}}
    why = Reason(parameter="packing_length", baseline="8", packing="16", reason="it is twice as long")
    text = config_text(replace(BASE, config=config, base=base, reasons=(why,)))
    assert "  # was 8: it is twice as long\n  packing_length: 16\n  shuffle: false\n" in text
    assert "\n  method: lora\n" in text
    assert "# Left out, since others replace it: training.max_steps 7\n" in text


def test_values_of_other_types_become_plain_ones() -> None:
    config = MappingProxyType({"a": np.int64(3), "b": (1, 2), "c": np.float32(0.5), "d": MappingProxyType({})})
    text = config_text(replace(BASE, config=config))
    assert yaml.safe_load(text) == json_value(config) == {"a": 3, "b": [1, 2], "c": 0.5, "d": {}}


def test_long_values_stay_on_their_line() -> None:
    name = "word " * 500
    for config in ({"s": {"t": {"u": name}}}, {"s": {name: 1, "after": 2}}, {name: {"t": name}}):
        assert yaml.safe_load(config_text(replace(BASE, config=config))) == config
