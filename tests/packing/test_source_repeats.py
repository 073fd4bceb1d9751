"""How often rows of a mixture are used: repeats and weights are met to the entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import write_table

from packtrain.core.errors import ConfigError
from packtrain.measuring.table import CostTable, SourceCodes
from packtrain.packing.source_repeats import Draw, draw_of_table, is_mixed


def table_of(folder: Path, rows: dict[str, int], mixture: dict[str, dict[str, Any]]) -> CostTable:
    """A table with so many rows of each source, mixed up."""
    sources = np.array([name for name, count in rows.items() for _ in range(count)], object)
    sources = sources[np.random.default_rng(0).permutation(len(sources))]
    return write_table(folder, {"tokens": [5] * len(sources), "source": sources.tolist()}, mixture=mixture)


def drawn(table: CostTable, epoch: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """How often each row is used, by source."""
    sources = table.source_codes()
    counts = draw_of_table(table, np.ones(len(table), bool)).counts(seed, epoch)
    return {name: counts[sources.codes == code] for code, name in enumerate(sources.names)}


def share(repeats: float | None = None, weight: float | None = None) -> dict[str, Any]:
    return {"repeats": repeats, "weight": weight}


def test_without_shares_every_row_is_used_once(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"a": 3, "b": 4}, {"a": share(), "b": share()})
    assert not is_mixed(table)
    assert [counts.tolist() for counts in drawn(table).values()] == [[1] * len(c) for c in drawn(table).values()]


def test_a_table_without_a_mixture_is_used_once(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"a": 3}, {"a": share()})
    assert not is_mixed(CostTable(table.folder, replace(table.summary, mixture=None)))


def test_repeats_of_one_are_plain(tmp_path: Path) -> None:
    assert not is_mixed(table_of(tmp_path, {"a": 3, "b": 4}, {"a": share(repeats=1), "b": share()}))


@pytest.mark.parametrize("repeats", [0.25, 0.5, 1.0, 2.0, 2.5, 3.1])
def test_repeats_are_exact(tmp_path: Path, repeats: float) -> None:
    table = table_of(tmp_path, {"a": 40, "b": 10}, {"a": share(repeats=repeats), "b": share()})
    counts = drawn(table)
    assert counts["a"].sum() == round(40 * repeats)
    assert set(counts["a"].tolist()) <= {int(repeats), int(repeats) + 1}
    assert counts["b"].tolist() == [1] * 10


@pytest.mark.parametrize("repeats", [0.1, 0.3, 0.5, 0.75, 1.4])
def test_fractions_go_round_the_source_before_they_repeat(tmp_path: Path, repeats: float) -> None:
    table = table_of(tmp_path, {"a": 37, "b": 10}, {"a": share(repeats=repeats), "b": share()})
    seen = np.zeros(37, np.int64)
    for epoch in range(12):
        seen += drawn(table, epoch, seed=5)["a"]
        assert seen.max() - seen.min() <= 1, "one was used again before all were used"
    assert seen.min() > 0


def test_shares_are_those_of_what_fits_packs(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"a": 100, "b": 100}, {"a": share(weight=0.5), "b": share(weight=0.5)})
    sources = table.source_codes()
    b = np.flatnonzero(sources.codes == sources.names.index("b"))
    fits = np.ones(200, bool)
    fits[b[:70]] = False
    counts = draw_of_table(table, fits).counts(0, 0)
    assert counts[fits].sum() == 130
    assert counts[b[70:]].sum() == 65, "half of what is trained"
    assert set(counts[~fits].tolist()) == {1}, "one line of the ledger each"


@pytest.mark.parametrize("mixture", [(0.5, 0.5), (1.0, 1.0), (0.25, None), (1.0, None), (None, 0.5)])
def test_a_source_of_which_nothing_fits_takes_no_share(tmp_path: Path, mixture: tuple[float | None, ...]) -> None:
    table = table_of(tmp_path, {"a": 6, "b": 4}, dict(zip("ab", (share(weight=one) for one in mixture), strict=True)))
    sources = table.source_codes()
    fits = sources.codes == sources.names.index("a")
    assert draw_of_table(table, fits).counts(0, 0).tolist() == [1] * 10, "all of a, and a line of the ledger for each b"


def test_a_fraction_is_another_part_in_each_epoch(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"a": 40, "b": 40}, {"a": share(repeats=1.5), "b": share(repeats=0.5)})
    first, second, other = (drawn(table, epoch, seed) for epoch, seed in ((0, 0), (1, 0), (0, 1)))
    for name in ("a", "b"):
        assert first[name].sum() == second[name].sum() == other[name].sum()
        assert first[name].tolist() != second[name].tolist()
        assert first[name].tolist() != other[name].tolist()
        assert first[name].tolist() == drawn(table)[name].tolist()
    assert (first["a"] - 1).tolist() != first["b"].tolist(), "sources are drawn independently"


def test_weights_are_shares_of_all_entries(tmp_path: Path) -> None:
    table = table_of(
        tmp_path, {"a": 100, "b": 300, "c": 100}, {"a": share(weight=3), "b": share(weight=1), "c": share(weight=1)}
    )
    counts = {name: int(found.sum()) for name, found in drawn(table).items()}
    assert counts == {"a": 300, "b": 100, "c": 100}, "as many entries as rows"


def test_sources_without_a_weight_share_what_is_left(tmp_path: Path) -> None:
    table = table_of(
        tmp_path, {"a": 10, "b": 30, "c": 50}, {"a": share(weight=0.5), "b": share(repeats=2), "c": share()}
    )
    counts = {name: int(found.sum()) for name, found in drawn(table).items()}
    assert counts == {"a": 110, "b": 60, "c": 50}, "half of all entries are of a"


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.9, 0.3), (1.0, 0.5)])
def test_weights_that_leave_nothing_for_other_sources_are_refused(tmp_path: Path, weights: tuple[float, float]) -> None:
    table = table_of(
        tmp_path, {"a": 5, "b": 5, "c": 5}, {"a": share(weight=weights[0]), "b": share(weight=weights[1]), "c": share()}
    )
    with pytest.raises(ConfigError, match="and sources without one \\(c\\)") as error:
        drawn(table)
    assert f"{sum(weights):g}" in str(error.value)


def test_a_source_of_which_nothing_was_measured_takes_no_share(tmp_path: Path) -> None:
    table = table_of(
        tmp_path, {"a": 10, "b": 10}, {"a": share(weight=0.25), "b": share(weight=0.25), "gone": share(weight=0.5)}
    )
    assert {name: int(found.sum()) for name, found in drawn(table).items()} == {"a": 10, "b": 10}


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    repeats=st.lists(st.floats(0.01, 7), min_size=4, max_size=4),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
)
def test_any_repeats_are_met_to_the_entry(rows: list[int], repeats: list[float], seed: int, epoch: int) -> None:
    names = tuple(f"s{n}" for n in range(len(rows)))
    codes = np.repeat(np.arange(len(rows)), rows)
    draw = Draw(dict(zip(names, repeats, strict=False)), SourceCodes(names, codes), np.ones(len(codes), bool))
    counts = draw.counts(seed, epoch)
    for code, (count, times) in enumerate(zip(rows, repeats, strict=False)):
        mine = counts[codes == code]
        assert abs(mine.sum() - count * times) <= 0.5 + 1e-6
        assert mine.max() - mine.min() <= 1
