"""What a dataset is: every count adds up, whatever the data looks like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tables import detection, films, write_table

from packtrain.planning.dataset_statistics import CONTENTS, dataset_stats, histogram, modality_codes

NUMBERS = st.lists(st.integers(0, 10**6) | st.integers(0, 30), min_size=1, max_size=200)


@given(NUMBERS)
@settings(max_examples=150, deadline=None)
def test_a_histogram_counts_every_value_once_between_rising_edges(values: list[int]) -> None:
    found = histogram(np.array(values))
    assert len(found.edges) == len(found.counts) + 1
    assert all(low < high for low, high in zip(found.edges, found.edges[1:], strict=False))
    assert sum(found.counts) == len(values)
    brute = [
        sum(low <= value < high for value in values) for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    assert list(found.counts) == brute


def test_a_long_tail_gets_growing_steps_and_small_numbers_one_bar_each() -> None:
    random = np.random.default_rng(0)
    long_tail = histogram(np.append(random.integers(50, 150, 5000), random.integers(10_000, 90_000, 200)))
    widths = np.diff(long_tail.edges)
    assert widths[-1] > 100 * widths[1]
    few = histogram(np.array([0, 1, 1, 3]))
    assert few.edges == (-0.5, 0.5, 1.5, 2.5, 3.5)
    assert few.counts == (1, 2, 0, 1)


def test_groups_are_a_partition_and_agree_with_a_count_by_hand(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    columns = detection(500)
    columns["images"] = random.integers(0, 4, 500)
    columns["videos"] = random.integers(0, 2, 500)
    columns["source"] = np.array(["lvis", "coco", "text"])[random.integers(0, 3, 500)]
    table = write_table(tmp_path / "t", columns, reasons={"media: file not found": 3})
    stats = dataset_stats(table)
    for groups in (stats.by_source, stats.by_modality):
        assert len(groups) > 2
        assert sum(group.samples for group in groups) == stats.samples == 500
        assert sum(group.tokens for group in groups) == stats.tokens == columns["tokens"].sum()
        assert sum(group.share_of_tokens for group in groups) == pytest.approx(1)
    lvis = next(group for group in stats.by_source if group.name == "lvis")
    mine = columns["source"] == "lvis"
    assert lvis.statistics["objects"]["mean"] == pytest.approx(columns["objects"][mine].mean())
    mixed = next(group for group in stats.by_modality if group.name == "mixed")
    assert mixed.samples == ((columns["images"] > 0) & (columns["videos"] > 0)).sum()
    assert stats.entries_read == 503
    assert stats.measured_ledger == {"media: file not found": 3}
    assert {"tokens", "objects", "vision_tokens"} <= stats.histograms.keys()
    images = stats.histograms["images"]
    assert sum(images.counts) == (columns["images"] > 0).sum(), "those that have none would hide the others"
    assert images.without_zeros["mean"] == pytest.approx(columns["images"][columns["images"] > 0].mean())
    assert not stats.histograms["tokens"].without_zeros


def test_columns_of_zeros_have_no_histogram(tmp_path: Path) -> None:
    stats = dataset_stats(write_table(tmp_path / "t", films(40)))
    assert "images" not in stats.histograms
    assert "objects" not in stats.histograms
    assert stats.statistics["objects"]["max"] == 0
    assert [group.name for group in stats.by_modality] == ["video"]


def test_thousands_of_sources_are_shown_as_the_largest_and_the_rest(tmp_path: Path) -> None:
    columns = {"tokens": np.arange(1, 301), "source": np.array([f"s{number}" for number in range(300)])}
    stats = dataset_stats(write_table(tmp_path / "t", columns))
    assert len(stats.by_source) == 50
    assert sum(group.tokens for group in stats.by_source) == stats.tokens
    assert "s299" in {group.name for group in stats.by_source}
    assert any(group.name == "251 other sources" and group.samples == 251 for group in stats.by_source)


def test_every_modality_has_a_code() -> None:
    codes = modality_codes(np.array([0, 1, 2, 0, 5]), np.array([0, 0, 0, 1, 1]))
    assert [CONTENTS[code] for code in codes] == list(CONTENTS)


def test_what_stands_out_is_said_with_numbers_of_the_data(tmp_path: Path) -> None:
    columns = detection(500)
    stats = dataset_stats(write_table(tmp_path / "t", columns))
    tokens, image = columns["tokens"], columns["image_tokens"]
    assert stats.modality_tokens == {"text": (tokens - image).sum(), "image": image.sum()}
    skew, outliers, shares, spread, supervised = stats.observations
    assert f"{np.median(tokens):,.0f} tokens, the mean {tokens.mean():,.0f}: many short" in skew
    assert f"{tokens.max():,} tokens, {tokens.max() / tokens.mean():,.1f} times the mean" in outliers
    assert f"text {100 * (1 - image.sum() / tokens.sum()):.1f} %" in shares
    assert f"± {image.std():,.0f}" in spread
    assert "are supervised" in supervised
    assert "images" not in stats.histograms, "one bar says nothing"


def test_tiles_are_counted_where_images_are_cut(tmp_path: Path) -> None:
    tiles = np.array([17, 1, 4, 9])
    columns = {"tokens": 64 * tiles + 50, "image_tokens": 64 * tiles, "images": np.array([1, 1, 2, 1])}
    cut = {**columns, "patches": 1024 * tiles, "max_patches_per_image": np.full(4, 1024)}
    assert dataset_stats(write_table(tmp_path / "t", cut)).statistics["tiles"]["total"] == tiles.sum()
    whole = {**columns, "patches": 256 * tiles, "max_patches_per_image": 256 * tiles}
    assert "tiles" not in dataset_stats(write_table(tmp_path / "w", whole)).statistics
