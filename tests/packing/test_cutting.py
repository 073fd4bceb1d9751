"""Samples that no pack can hold: nothing is lost unsaid, media are never cut, pieces cover their row exactly."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import runs_of
from tables import spread_runs, write_table

from packtrain.core.errors import ConfigError, DataError
from packtrain.packing.cutting import UNFIT, UNLABELLED, Dropped, Pieces, fit_pieces
from packtrain.packing.packing_config import LIMITS, PackingConfig
from packtrain.packing.resources import Samples, Tails, samples_of

MEDIA = ("vision_tokens", "patches", "images", "videos", "frames", "squared_patches", "largest_patches")


def samples(tokens: list[int], **columns: list[int]) -> Samples:
    """Samples as a cost table gives them; media are zero where not given."""
    length = np.array(tokens, np.int64)
    filled = {name: np.array(columns.get(name, [0] * len(tokens)), np.int64) for name in MEDIA}
    return Samples(
        {
            "tokens": length,
            "samples": np.ones(len(length), np.int64),
            "attention": length * length,
            "supervised_tokens": np.array(columns.get("supervised_tokens", length * 3 // 4), np.int64),
            "longest": length,
            **filled,
        }
    )


def cut(found: Samples, tails: list[int] | np.ndarray, **config: Any) -> Pieces:
    carrying = found["supervised_tokens"]
    runs = [spread_runs(int(tail), int(count)) for tail, count in zip(tails, carrying, strict=True)]
    known = Tails(np.asarray(tails, np.int64), lambda rows: [runs[row] for row in rows])
    return fit_pieces(found, known, PackingConfig(**{"packing_length": 10, **config}))


def why(pieces: Pieces) -> dict[int, str]:
    """Row -> why it is in no pack."""
    assert {one.reason for one in pieces.dropped} <= {UNFIT}
    return {one.row: one.detail for one in pieces.dropped}


def spans(pieces: Pieces) -> list[tuple[int, int, int]]:
    """(row, start, tokens) of every piece."""
    columns = (pieces.entries.rows, pieces.entries.starts, pieces.entries.samples["tokens"])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_what_fits_is_left_as_it_is() -> None:
    found = samples([1, 10, 5])
    for overlong in ("drop", "truncate", "split", "error"):
        pieces = cut(found, [1, 10, 5], overlong=overlong)
        assert spans(pieces) == [(0, 0, 1), (1, 0, 10), (2, 0, 5)]
        assert (why(pieces), pieces.cut_rows, pieces.tokens_lost) == ({}, 0, 0)


def test_drop_leaves_out_exactly_what_is_too_large() -> None:
    pieces = cut(samples([11, 10, 12]), [11, 10, 12])
    assert spans(pieces) == [(1, 0, 10)]
    assert why(pieces) == {0: "11 tokens > packing_length 10", 2: "12 tokens > packing_length 10"}


def test_truncate_keeps_the_beginning_and_says_what_is_lost() -> None:
    pieces = cut(samples([25, 4, 11]), [25, 4, 11], overlong="truncate")
    assert spans(pieces) == [(0, 0, 10), (1, 0, 4), (2, 0, 10)]
    assert (why(pieces), pieces.cut_rows, pieces.tokens_lost) == ({}, 2, 16)


def test_split_covers_rows_in_their_place() -> None:
    pieces = cut(samples([25, 4, 20]), [25, 4, 20], overlong="split")
    assert spans(pieces) == [(0, 0, 10), (0, 10, 10), (0, 20, 5), (1, 0, 4), (2, 0, 10), (2, 10, 10)]
    assert (why(pieces), pieces.cut_rows, pieces.tokens_lost) == ({}, 2, 0)


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_media_are_never_cut(overlong: str) -> None:
    found = samples([25, 25, 25], images=[1, 1, 1], patches=[8, 8, 8])
    pieces = cut(found, [15, 14, 25], overlong=overlong)  # media end at tokens 10, 11 and 0
    assert why(pieces) == {1: "25 tokens > packing_length 10; its media extend to token 11, so it cannot be truncated"}
    first = pieces.entries.starts == 0
    assert pieces.entries.rows[first].tolist() == [0, 2]
    for name in ("images", "patches"):
        assert pieces.entries.samples[name][first].tolist() == found[name][[0, 2]].tolist()
        assert not pieces.entries.samples[name][~first].any()


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_limits_that_cutting_does_not_meet_still_drop(overlong: str) -> None:
    found = samples([5, 25], images=[3, 3])
    pieces = cut(found, [5, 25], overlong=overlong, max_images_per_pack=2)
    assert spans(pieces) == []
    assert why(pieces) == {
        0: "3 images > max_images_per_pack 2",
        1: "25 tokens > packing_length 10; 3 images > max_images_per_pack 2",
    }
    assert (pieces.cut_rows, pieces.tokens_lost) == (0, 0)


def test_error_names_the_first_row_and_how_many_there_are() -> None:
    with pytest.raises(DataError, match="2 samples fit no pack") as error:
        cut(samples([4, 11, 12]), [4, 11, 12], overlong="error")
    assert "row 1: 11 tokens > packing_length 10" in str(error.value)
    assert "drop, truncate or split" in str(error.value)


def test_reasons_name_the_setting_of_every_limit() -> None:
    resources = {
        resource: [1_000_000] for resource in LIMITS.values() if resource not in ("tokens", "samples", "attention")
    }
    limits: dict[str, Any] = {setting: 10 for setting in LIMITS if setting != "max_samples_per_pack"}
    (reason,) = why(cut(samples([2_000], **resources), [2_000], **limits)).values()
    for setting, resource in LIMITS.items():
        if setting != "max_samples_per_pack":
            assert f"{resource} > {setting} 10" in reason
    assert "1,000,000 patches > max_patches_per_pack 10" in reason


@pytest.mark.parametrize("overlong", ["truncate", "split"])
@pytest.mark.parametrize("limit", [4, 24, 25, 26, 99, 2**54 - 1, 2**54])
def test_pieces_stay_within_the_attention_limit(overlong: str, limit: int) -> None:
    length = 2**27 + 5  # 2**54 - 1 is no square, but its root in floating point is 2**27
    tokens = [30, 3] if limit < 2**50 else [length]
    pieces = cut(
        samples(tokens), tokens, packing_length=2 * max(tokens), max_attention_per_pack=limit, overlong=overlong
    )
    assert (pieces.entries.samples["attention"] <= limit).all()
    assert pieces.cut_rows > 0
    longest = int(pieces.entries.samples["tokens"].max())
    assert (longest + 1) ** 2 > limit, "as long as the limit allows"
    assert {one.reason for one in pieces.dropped} <= {UNLABELLED}


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.booleans(), min_size=1, max_size=70), st.integers(0, 70), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    length=st.integers(1, 30),
    attention=st.one_of(st.none(), st.integers(1, 900)),
    overlong=st.sampled_from(["drop", "truncate", "split"]),
)
def test_pieces_cover_rows_and_their_labels_exactly(
    rows: list[tuple[list[bool], int, int]], length: int, attention: int | None, overlong: str
) -> None:
    """Against labels that are written out, as delivering cuts them: the first token of a piece has none."""
    labels = [[False, *row[0][1:]] for row in rows]
    tokens = [len(row) for row in labels]
    tails = [min(row[1], len(row[0])) for row in rows]
    found = samples(
        tokens,
        images=[row[2] for row in rows],
        patches=[4 * row[2] for row in rows],
        supervised_tokens=[sum(row) for row in labels],
    )
    runs = [runs_of(row[len(row) - tail :]) for row, tail in zip(labels, tails, strict=True)]
    settings = PackingConfig(
        packing_length=length,
        max_attention_per_pack=attention,
        overlong=overlong,  # type: ignore[arg-type]
        max_images_per_pack=2,
    )
    pieces = fit_pieces(found, Tails(np.array(tails), lambda some: [runs[row] for row in some]), settings)
    unfit = {one.row for one in pieces.dropped if one.reason == UNFIT}
    unlabelled = Counter(one.row for one in pieces.dropped if one.reason == UNLABELLED)
    assert unfit | set(unlabelled) | set(pieces.entries.rows.tolist()) == set(range(len(rows)))
    assert not unfit & (set(pieces.entries.rows.tolist()) | set(unlabelled))
    lost = labels_lost = 0
    longest = min(length, math.isqrt(attention or length**2))
    for row in range(len(rows)):
        mine = np.flatnonzero(pieces.entries.rows == row)
        starts, lengths = pieces.entries.starts[mine].tolist(), pieces.entries.samples["tokens"][mine].tolist()
        if tokens[row] <= longest:
            assert (starts, lengths) == ([0], [tokens[row]]) or row in unfit, "what fits is not looked into"
            continue
        if row in unfit:
            continue
        begins = range(0, tokens[row], longest) if overlong == "split" else [0]
        whole = {begin: [False, *labels[row][begin + 1 : begin + longest]] for begin in begins}
        carrying = {begin: sum(part) for begin, part in whole.items() if sum(part)}
        assert dict(zip(starts, pieces.entries.samples["supervised_tokens"][mine].tolist(), strict=True)) == carrying
        assert lengths == [len(whole[begin]) for begin in carrying]
        assert unlabelled[row] == len(whole) - len(carrying)
        assert pieces.entries.firsts[mine].tolist() == [at == 0 for at in range(len(mine))]
        if len(mine):
            lost += tokens[row] - sum(map(len, whole.values()))
            labels_lost += sum(labels[row]) - sum(carrying.values())
        for name in ("images", "patches", "vision_tokens"):
            assert pieces.entries.samples[name][mine].tolist() == [found[name][row] * (begin == 0) for begin in starts]
    assert (pieces.tokens_lost, pieces.supervised_lost) == (lost, labels_lost)
    parts = pieces.entries.samples
    assert (parts["tokens"] > 0).all()
    assert (parts["tokens"] <= length).all()
    assert (parts["attention"] == parts["tokens"] ** 2).all()
    assert (parts["longest"] == parts["tokens"]).all()
    assert (parts["samples"] == 1).all()
    assert attention is None or (parts["attention"] <= attention).all()
    assert (parts["images"] <= 2).all()
    assert set(parts.columns) == set(found.columns)


@pytest.mark.parametrize(
    ("overlong", "kept", "labels", "lost"),
    [("truncate", [], [], 0), ("split", [(0, 10, 10), (0, 20, 4)], [1, 3], 1)],  # the label of token 20 is lost
)
def test_a_piece_without_labels_goes_to_the_ledger(
    overlong: Any, kept: list[Any], labels: list[int], lost: int
) -> None:
    """A long question: the answer, the last five of 24 tokens, stands behind the cut."""
    tails = Tails(np.array([24]), lambda _: ["19,5"])
    found = fit_pieces(samples([24], supervised_tokens=[5]), tails, PackingConfig(packing_length=10, overlong=overlong))
    assert spans(found) == kept
    assert (found.entries.samples["supervised_tokens"].tolist(), found.supervised_lost) == (labels, lost)
    assert found.entries.firsts.tolist() == [True, False][: len(kept)]
    assert found.dropped == (Dropped(0, UNLABELLED, "tokens 0 to 10 of 24 carry no loss"),)


def test_runs_that_are_not_those_of_the_tail_are_refused() -> None:
    with pytest.raises(DataError, match="tail_runs 3,4"):
        fit_pieces(
            samples([24]), Tails(np.array([24]), lambda _: ["3,4"]), PackingConfig(packing_length=9, overlong="split")
        )


def test_costs_of_a_table_become_samples(tmp_path: Path) -> None:
    table = write_table(
        tmp_path,
        {
            "tokens": [10, 20, 30],
            "image_tokens": [4, 0, 8],
            "video_tokens": [0, 6, 1],
            "images": [1, 0, 2],
            "videos": [0, 1, 0],
            "frames": [0, 4, 0],
            "patches": [16, 24, 40],
            "max_patches_per_image": [16, 6, 24],
            "tail_tokens": [3, 2, 1],
        },
    )
    found, tails = samples_of(table, 1, 3)
    assert tails.tokens.tolist() == [2, 1]
    assert tails.runs(np.array([1])) == table.column("tail_runs")[2:].tolist()
    assert found["vision_tokens"].tolist() == [6, 9]
    assert found["attention"].tolist() == [400, 900]
    assert found["squared_patches"].tolist() == [24 * 6, 40 * 24]
    assert found["largest_patches"].tolist() == [6, 24]
    assert found["longest"].tolist() == [20, 30]
    assert found["frames"].tolist() == [4, 0]
    assert len(samples_of(table)[0]) == 3


@pytest.mark.parametrize(("column", "value"), [("tokens", 0), ("patches", -1), ("tail_tokens", -5)])
def test_impossible_costs_are_refused_with_their_row(tmp_path: Path, column: str, value: int) -> None:
    columns: dict[str, Any] = {"tokens": [5, 5, 5]}
    columns[column] = [5, 5, value]
    table = write_table(tmp_path, columns)
    with pytest.raises(DataError, match=f"row 2[^0-9][\\s\\S]*{column} {value}"):
        samples_of(table, 1)


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without rows"):
        samples_of(write_table(tmp_path, {"tokens": []}))


# ---- the config of packing


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packing_length": 0}, "packing_length"),
        ({"packing_length": None}, "packing_length"),
        ({"packing_length": True}, "packing_length"),
        ({"packing_length": 10.0}, "packing_length"),
        ({"max_images_per_pack": 0}, "leave it out"),
        ({"packing_window": -1}, "packing_window"),
        ({"epochs": 0}, "epochs"),
        ({"packs_per_step": 0}, "packs_per_step"),
        ({"packing_buffer": 0}, "packing_buffer"),
        ({"packing_strategy": "bestfit"}, "did you mean 'best_fit'"),
        ({"packing_strategy": 3}, "packing_strategy"),
        ({"overlong": "trunc"}, "did you mean 'truncate'"),
        ({"overlong": None}, "overlong"),
        ({"effort": "bst"}, "did you mean 'best'"),
        ({"packing_min_fill_ratio": 1.5}, "packing_min_fill_ratio"),
        ({"packing_min_fill_ratio": float("nan")}, "packing_min_fill_ratio"),
        ({"packing_min_fill_ratio": True}, "packing_min_fill_ratio"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"shuffle": "no"}, "shuffle"),
        ({"packing_drop_last": 1}, "packing_drop_last"),
        ({"repack_each_epoch": None}, "repack_each_epoch"),
        ({"packing_strategy": "my_packer:"}, "module:function"),
        ({"packing_strategy": "wrapt"}, "did you mean 'wrapped'"),
        ({"packing_strategy": "wrapped", "max_samples_per_pack": 3}, "wrapped with max_samples_per_pack"),
        ({"packing_strategy": "wrapped", "overlong": "truncate"}, "wrapped with overlong: truncate"),
        ({"packing_strategy": "wrapped", "pack_alignment": 2}, "wrapped with pack_alignment"),
        ({"pack_alignment": 0}, "pack_alignment"),
        ({"pack_alignment": 6}, "at most half of packing_length"),
        ({"max_packs": 0}, "leave it out for no limit"),
    ],
)
def test_settings_are_checked_when_they_are_made(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PackingConfig(**{"packing_length": 10, **settings})


def test_a_config_survives_its_description() -> None:
    config = PackingConfig(packing_length=10, max_patches_per_pack=7, overlong="split", seed=3, shuffle=False)
    assert PackingConfig(**config.describe()) == config
    assert list(config.capacities().items()) == [("tokens", 10), ("patches", 7)]


@pytest.mark.parametrize(
    ("config", "kept", "lost"),
    [
        ({"cutoff_len": 6}, [(0, 0, 6), (1, 0, 4), (2, 0, 6)], 24),
        ({"cutoff_len": 6, "truncate_side": "left"}, [(0, 19, 6), (1, 0, 4), (2, 5, 6)], 24),
        ({"cutoff_len": 6, "overlong": "split"}, [(0, 0, 6), (1, 0, 4), (2, 0, 6)], 24),
        ({"cutoff_len": 20, "overlong": "split"}, [(0, 0, 10), (0, 10, 10), (1, 0, 4), (2, 0, 10)], 5),
        ({"cutoff_len": 20, "overlong": "truncate"}, [(0, 0, 10), (1, 0, 4), (2, 0, 10)], 16),
        ({"cutoff_len": 20}, [(1, 0, 4)], 0),
        ({"truncate_side": "left", "overlong": "truncate"}, [(0, 15, 10), (1, 0, 4), (2, 1, 10)], 16),
    ],
)
def test_a_sample_is_cut_before_it_is_packed(config: dict[str, Any], kept: list[Any], lost: int) -> None:
    """Whatever happens to what fits no pack; packs may be longer than a sample may be."""
    pieces = cut(samples([25, 4, 11], supervised_tokens=[25, 4, 11]), [25, 4, 11], **config)
    assert (spans(pieces), pieces.tokens_lost) == (kept, lost)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cutoff_len": 6}, "11 tokens > cutoff_len 6; its media extend to token 8, so it cannot be truncated"),
        (
            {"cutoff_len": 9, "truncate_side": "left"},
            "11 tokens > cutoff_len 9; its beginning has media, so it cannot be truncated on the left",
        ),
    ],
)
def test_media_are_never_cut_off(config: dict[str, Any], said: str) -> None:
    pieces = cut(samples([11, 5]), [3, 5], **config)
    assert spans(pieces) == [(1, 0, 5)]
    assert why(pieces) == {0: said}


def test_attention_is_that_of_what_is_left() -> None:
    pieces = cut(samples([11]), [11], packing_length=20, cutoff_len=6, max_attention_per_pack=36)
    assert spans(pieces) == [(0, 0, 6)]
