"""`packtrain bench families`: what the table says of a type, and the page that is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtrain.bench import families
from packtrain.bench.families import (
    FAILS,
    LISTED_TYPE,
    NO_TEXT,
    NOT_TRIED,
    PROVEN,
    REFUSED,
    TRAINS,
    FamiliesResult,
    FamilyRow,
    bench_families,
    families_page,
    image_text_types,
    mixed_records,
    text_records,
    try_type,
)
from packtrain.bench.unlisted_models import LISTED, unlisted_types
from packtrain.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def test_every_type_is_listed_or_not() -> None:
    assert set(image_text_types()) >= set(unlisted_types())
    assert set(image_text_types()) - set(unlisted_types()) == set(LISTED) & set(image_text_types())
    with pytest.raises(ConfigError, match="vipllava"):
        bench_families(["vipllama"])


@pytest.mark.parametrize(
    ("model_type", "images", "text", "padded", "reason"),
    [
        ("vipllava", PROVEN, PROVEN, TRAINS, ""),
        ("lfm2_vl", REFUSED, REFUSED, TRAINS, "with images and text only: its layers carry state along the row"),
        ("blip", NOT_TRIED, NOT_TRIED, NOT_TRIED, "chat template"),
        pytest.param("pp_chart2table", PROVEN, NO_TEXT, TRAINS, "", marks=pytest.mark.full),
        pytest.param("qwen2_vl", LISTED_TYPE, PROVEN, TRAINS, "", marks=pytest.mark.full),
    ],
)
def test_a_type_is_tried(model_type: str, images: str, text: str, padded: str, reason: str) -> None:
    row = try_type(model_type)
    assert (row.images, row.text, row.padded) == (images, text, padded)
    assert reason in row.reason
    assert bool(reason) == bool(row.reason)


def test_what_goes_wrong_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: str, **_: object) -> None:
        raise IndexError("no such layer\nin a second line")

    monkeypatch.setattr("packtrain.app.verify.verify", broken)
    monkeypatch.setattr("packtrain.app.train.train.train", lambda *_: broken(""))
    row = try_type("vipllava")
    assert (row.images, row.text, row.padded) == (FAILS, FAILS, FAILS)
    assert row.reason == "IndexError: no such layer"


def test_the_records_have_images_and_none(tmp_path: Path) -> None:
    shown = [_images(line) for line in mixed_records(tmp_path).read_text().splitlines()]
    assert {len(images) for images in shown} == {0, 1, 2}
    assert all((tmp_path / name).exists() for images in shown for name in images)
    texts = text_records(tmp_path).read_text().splitlines()
    assert not any(_images(line) for line in texts)
    assert max(len(line.split()) for line in texts) > 1_000  # words, and no fewer tokens


def _images(line: str) -> list[str]:
    content = json.loads(line)["messages"][0]["content"]
    return [part["image"] for part in content if part["type"] == "image"]


def test_the_page_has_words_totals_and_every_type() -> None:
    rows = (
        FamilyRow(model_type="one", images=PROVEN, text=PROVEN, padded=TRAINS),
        FamilyRow(model_type="two", images=REFUSED, text=REFUSED, padded=TRAINS, reason="a | b <c>"),
    )
    page = families_page(FamiliesResult(versions={"transformers": "9.9"}, rows=rows), "the command")
    assert "Written by `the command` with transformers 9.9: 2 types." in page
    assert "| trains |  |  | 2 |" in page
    assert "| `one` | proven | proven | trains |  |" in page
    assert "| `two` | refused | refused | trains | a \\| b &lt;c> |" in page
    meanings, _, _ = page.partition("## Totals")
    assert all(f"| {word} |" in meanings for word in (PROVEN, REFUSED, TRAINS))
    assert f"| {FAILS} |" not in meanings
    assert families.FAMILY_COLUMNS.keys() <= set(FamilyRow.__dataclass_fields__)
