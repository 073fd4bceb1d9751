"""Small models of types that packtrain does not list: they build, see their images and take text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.bench import unlisted_trial
from packtrain.bench.unlisted_models import LISTED, CannotBuild, unlisted_types, write_unlisted
from packtrain.bench.unlisted_specs import IMPOSSIBLE, UNLISTED
from packtrain.bench.unlisted_trial import SIZES, Trial, build_report, load_unlisted, try_unlisted

QUICK = (
    *("aya_vision", "cohere2_vision", "deepseek_vl", "gemma4", "glm4v", "lfm2_vl", "llama4", "llava_next_video"),
    *("mistral3", "mllama", "ovis2", "paligemma", "qwen3_5", "qwen3_vl_moe", "vipllava"),
)
TYPES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in UNLISTED]


@pytest.mark.parametrize("model_type", TYPES)
def test_a_small_model_sees_its_images(model_type: str, tmp_path: Path) -> None:
    trial = try_unlisted(model_type, tmp_path)
    assert trial.parameters < 5_000_000
    assert trial.finite
    assert trial.effect > 1e-3
    assert trial.image_tokens >= len(SIZES)
    # Mllama's images stand beside the row, not in it.
    assert trial.counts_image_tokens == (model_type != "mllama")
    assert not trial.problem


def test_every_type_builds_or_has_a_reason() -> None:
    assert len(UNLISTED) >= 25
    assert not UNLISTED.keys() & (set(IMPOSSIBLE) | set(LISTED))
    assert set(unlisted_types()) == UNLISTED.keys() | IMPOSSIBLE.keys()


@pytest.mark.parametrize("model_type", ["blip", "qwen2_vl", "no_such_type"])
def test_what_cannot_be_built_says_why(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match=r"\w+ \w+"):
        write_unlisted(model_type, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_type_always_has_the_same_folder(tmp_path: Path) -> None:
    first, second = (write_unlisted("mistral3", tmp_path / name) for name in ("first", "second"))
    files = sorted(path.name for path in first.iterdir())
    assert {"config.json", "tokenizer.json", "processor_config.json", "chat_template.jinja"} < set(files)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


def test_the_report_has_a_line_for_every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model_type: str, folder: Path) -> Trial:
        if model_type == "vipllava":
            raise IndexError("no such layer")
        return try_unlisted(model_type, folder)

    monkeypatch.setattr(unlisted_trial, "unlisted_types", lambda: ("deepseek_vl", "blip", "vipllava"))
    monkeypatch.setattr(unlisted_trial, "try_unlisted", broken)
    assert build_report() == [
        ("deepseek_vl", True, ""),
        ("blip", False, IMPOSSIBLE["blip"]),
        ("vipllava", False, "IndexError: no such layer"),
    ]


def _trial(**changed: Any) -> Trial:
    facts = {"parameters": 1, "image_tokens": 4, "effect": 1.0, "finite": True, "counts_image_tokens": True}
    return Trial(**{**facts, "has_rope_index": False, "shapes": {}, **changed})


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"parameters": 6_000_000}, "6000000 parameters"),
        ({"finite": False}, "not finite"),
        ({"effect": 0.0}, "do not depend on the pixels"),
        ({"effect": float("nan")}, "do not depend on the pixels"),
    ],
)
def test_a_trial_names_what_is_wrong(changed: dict[str, Any], problem: str) -> None:
    found = _trial(**changed).problem
    assert problem in found
    assert bool(problem) == bool(found)


def test_a_model_that_counts_otherwise_than_its_processor_is_found_out(tmp_path: Path) -> None:
    write_unlisted("mistral3", tmp_path)
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "spatial_merge_size": 1}))
    loaded = load_unlisted(tmp_path)
    from PIL import Image

    inputs = loaded.encode([Image.new("RGB", size) for size in SIZES])
    with pytest.raises(ValueError, match="do not match"):
        loaded.logits(inputs)
