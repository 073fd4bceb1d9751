"""Packing window by window: what one leaves under-filled goes on to the next, nothing is lost, memory stays bounded."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import lvis_table, runs_of

import packtrain.packing.windows as windows_module
from packtrain.core.errors import DataError
from packtrain.measuring.table import CostTable
from packtrain.packing.arrays import pack_sums
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES, Samples, Tails
from packtrain.packing.windows import MAXIMA, TableRows, WindowPacks, fill_ratio, pack_windows


class MadeRows:
    """Rows from a list of lengths, or from labels; every text may be cut. `images`: of each row but the first."""

    images = 0

    def __init__(self, tokens: np.ndarray, labels: list[list[bool]] | None = None) -> None:
        self.tokens = np.asarray(tokens, np.int64)
        self.labels = labels if labels is not None else [[True] * int(n) for n in self.tokens]
        self.reads: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        self.reads.append((start, stop))
        tokens = self.tokens[start:stop]
        columns = {name: np.zeros(len(tokens), np.int64) for name in (*RESOURCES, *EXTRAS)}
        columns |= {"tokens": tokens, "longest": tokens, "attention": tokens**2, "samples": np.ones_like(tokens)}
        columns["supervised_tokens"] = np.array([sum(row) for row in self.labels[start:stop]], np.int64)
        columns["images"] = np.where(np.arange(start, stop) > 0, self.images, 0)
        return Samples(columns), Tails(tokens, lambda rows: [runs_of(self.labels[start + row]) for row in rows])


def windows_of(
    tokens: Any, *, epoch: int = 0, counts: np.ndarray | None = None, **config: Any
) -> tuple[list[WindowPacks], MadeRows]:
    rows = MadeRows(np.asarray(tokens))
    settings = PackingConfig(**{"packing_length": 100, **config})
    return list(pack_windows(rows, settings, epoch, counts)), rows


def packed_rows(windows: list[WindowPacks]) -> list[int]:
    return [row for window in windows for row in window.entries.rows.tolist()]


def as_lists(windows: list[WindowPacks]) -> list[list[list[int]]]:
    return [
        [part.tolist() for part in np.split(w.entries.rows, w.offsets[1:-1])] if len(w.offsets) > 1 else []
        for w in windows
    ]


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 130), min_size=1, max_size=60),
    window=st.one_of(st.integers(1, 6), st.integers(7, 70)),
    ratio=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    strategy=st.sampled_from(["best_fit", "first_fit", "next_fit", "knapsack", "none"]),
    overlong=st.sampled_from(["drop", "truncate", "split"]),
    alignment=st.sampled_from([1, 1, 4, 50]),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_nothing_is_lost_whatever_is_carried(
    tokens: list[int],
    window: int,
    ratio: float,
    strategy: str,
    overlong: str,
    alignment: int,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    times_used = st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens))
    repeats = data.draw(st.none()) if data.draw(st.integers(0, 3)) == 0 else data.draw(times_used)
    counts = None if repeats is None else np.array(repeats)
    found, _ = windows_of(
        tokens,
        counts=counts,
        packing_window=window,
        packing_min_fill_ratio=ratio,
        packing_strategy=strategy,
        overlong=overlong,
        pack_alignment=alignment,
        shuffle=shuffle,
    )
    # A single token behind a cut has nothing before it, so it carries no loss.
    pieces = {"drop": lambda n: int(n <= 100), "truncate": lambda n: 1, "split": lambda n: 1 + (n > 101)}[overlong]
    times = repeats or [1] * len(tokens)
    expected = {row: times[row] * pieces(n) for row, n in enumerate(tokens)}
    assert Counter(packed_rows(found)) == Counter({row: n for row, n in expected.items() if n})
    left_out = {"drop": lambda n: n > 100, "truncate": lambda n: False, "split": lambda n: n == 101}[overlong]
    dropped = sum(times[row] for row, n in enumerate(tokens) if left_out(n))
    assert sum(w.counts.dropped for w in found) == dropped
    assert sum(w.counts.drawn for w in found) == sum(expected.values()) + dropped
    assert sum(w.rows for w in found) == len(tokens)
    for w in found:
        assert (np.diff(w.offsets) > 0).all()
        assert w.offsets[-1] == len(w.entries)
        aligned = -(-w.entries.samples["tokens"] // alignment) * alignment
        assert (pack_sums(aligned, w.offsets) <= 100).all()


def test_what_is_too_long_once_aligned_is_cut_at_a_multiple() -> None:
    for overlong, expected in {"drop": [], "truncate": [8, 8], "split": [2, 8, 8]}.items():  # one token has no loss
        ((window,), _) = windows_of([9, 10], packing_length=11, pack_alignment=4, overlong=overlong)
        assert sorted(window.entries.samples["tokens"].tolist()) == expected


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=30),
    length=st.integers(1, 30),
    window=st.integers(1, 12),
    cutoff=st.one_of(st.none(), st.integers(1, 40)),
    side=st.sampled_from(["left", "right"]),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_wrapped_packs_are_samples_one_behind_the_other(
    rows: list[list[bool]],
    length: int,
    window: int,
    cutoff: int | None,
    side: str,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    """Against labels that are written out, as delivering cuts them: the first token of a piece has none."""
    times_used = st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))
    repeats = data.draw(st.one_of(st.none(), times_used))
    counts = None if repeats is None else np.array(repeats)
    labels = [[False, *row[1:]] for row in rows]
    source = MadeRows(np.array(list(map(len, rows))), labels)
    cut = {} if cutoff is None else {"cutoff_len": cutoff, "truncate_side": side}
    made = PackingConfig(
        packing_length=length,
        packing_strategy="wrapped",
        packing_window=window,
        shuffle=shuffle,
        **cut,  # type: ignore[arg-type]
    )
    found = list(pack_windows(source, made, 0, counts))
    kept = Counter[tuple[int, int]]()
    for w in found:
        sizes, carried = w.entries.samples["tokens"], w.entries.samples["supervised_tokens"]
        columns = (w.entries.rows, w.entries.starts, sizes, carried)
        for row, start, size, carrying in zip(*(column.tolist() for column in columns), strict=True):
            kept.update((row, at) for at in range(start, start + size))
            assert carrying == sum(labels[row][start + (start > 0) : start + size])
    for w in found:
        for one in w.left_out:
            begin, end = map(int, re.findall(r"\d+", one.detail))
            assert not any(labels[one.row][begin + (begin > 0) : end]), "only what carries no loss"
            kept.update((one.row, at) for at in range(begin, end))
    expected = Counter[tuple[int, int]]()
    for row, marks in enumerate(labels):
        size = min(len(marks), cutoff or len(marks))
        first = len(marks) - size if side == "left" else 0
        lost = size < len(marks) and not any(marks[first + (first > 0) : first + size])
        if not lost:
            expected.update({(row, at): 1 if repeats is None else repeats[row] for at in range(first, first + size)})
    assert kept == +expected
    loads = np.concatenate([w.loads["tokens"] for w in found])
    assert (loads <= length).all()
    entries = sum(len(w.entries) for w in found)
    assert sum(w.counts.drawn for w in found) == entries + sum(w.counts.dropped for w in found)
    if not any(w.left_out for w in found):
        assert (loads[:-1] == length).all(), "all but the last are full"
    if repeats is None:
        firsts = [row for w in found for row in w.entries.rows[w.entries.firsts].tolist()]
        assert sorted(firsts) == sorted(set(packed_rows(found))), "every sample is counted once"
        assert shuffle or packed_rows(found) == sorted(packed_rows(found))


def test_media_are_not_wrapped() -> None:
    source = MadeRows(np.array([5, 6, 7]))
    source.images = 1
    with pytest.raises(DataError, match=r"(?s)2 samples with images or videos, the first of them row 1.*best_fit"):
        list(pack_windows(source, PackingConfig(packing_length=10, packing_strategy="wrapped"), 0, None))


def test_loads_are_sums_and_maxima_of_packs(tmp_path: Path) -> None:
    table = lvis_table(tmp_path, 300)
    rows = TableRows(table)
    (found,) = pack_windows(rows, PackingConfig(packing_length=20_000), 0, None)
    samples, _ = rows.read(0, 300)
    for number, part in enumerate(np.split(found.entries.rows, found.offsets[1:-1])):
        for name in (*RESOURCES, *EXTRAS):
            whole = samples[name][part]
            assert found.loads[name][number] == (whole.max() if name in MAXIMA else whole.sum())


# ---- windows


def test_windows_are_consecutive_rows_in_random_order() -> None:
    found, rows = windows_of(np.full(95, 50), packing_window=10, packing_strategy="none")
    assert sorted(rows.reads) == [(start, min(start + 10, 95)) for start in range(0, 95, 10)]
    assert rows.reads != sorted(rows.reads)
    for (start, stop), w in zip(rows.reads, found, strict=True):
        assert sorted(w.entries.rows.tolist()) == list(range(start, stop))


def test_every_epoch_and_seed_visits_windows_in_its_own_order() -> None:
    orders = [
        windows_of(np.full(400, 30), packing_window=10, **c)[1].reads for c in ({"epoch": 0}, {"epoch": 1}, {"seed": 1})
    ]
    assert len({tuple(order) for order in orders}) == 3
    again = windows_of(np.full(400, 30), packing_window=10, epoch=1)[1].reads
    assert again == orders[1]
    fixed = windows_of(np.full(400, 30), packing_window=10, epoch=1, repack_each_epoch=False)[1].reads
    assert fixed == orders[0]


def test_without_shuffling_everything_stays_in_order() -> None:
    found, rows = windows_of(np.full(40, 30), packing_window=10, shuffle=False, packing_strategy="next_fit")
    assert rows.reads == sorted(rows.reads)
    assert packed_rows(found) == list(range(40))


def test_windows_and_epochs_are_packed_in_different_ways() -> None:
    # All windows have the same lengths, so that equal packs would show that they share a seed.
    tokens = np.tile(np.random.default_rng(0).integers(5, 30, 40), 3)
    kwargs: dict[str, Any] = {"packing_window": 40, "packing_strategy": "first_fit"}
    first, rows = windows_of(tokens, **kwargs)
    shapes = [
        [[row - start for row in pack] for pack in packs]
        for packs, (start, _) in zip(as_lists(first), rows.reads, strict=True)
    ]
    assert shapes[0] != shapes[1] != shapes[2]
    second, _ = windows_of(tokens, epoch=1, **kwargs)
    sets = [{frozenset(pack) for packs in as_lists(found) for pack in packs} for found in (first, second)]
    assert sets[0] != sets[1]


def test_window_n_is_best_fit_in_windows() -> None:
    tokens = np.random.default_rng(1).integers(1, 60, 100)
    by_name, _ = windows_of(tokens, packing_strategy="window_30")
    by_setting, _ = windows_of(tokens, packing_window=30)
    assert as_lists(by_name) == as_lists(by_setting)
    assert len(by_name) == 4


def test_a_window_larger_than_the_table_is_one_window() -> None:
    tokens = np.random.default_rng(1).integers(1, 60, 50)
    whole, _ = windows_of(tokens)
    for config in ({"packing_window": 10**15}, {"packing_strategy": "window_" + "9" * 30}, {"packing_window": 50}):
        assert as_lists(windows_of(tokens, **config)[0]) == as_lists(whole)


# ---- what is carried


def carried_from(found: list[WindowPacks], reads: list[tuple[int, int]]) -> list[int]:
    """How many entries each window has of earlier ones."""
    return [
        sum(not start <= row < stop for row in w.entries.rows.tolist())
        for w, (start, stop) in zip(found, reads, strict=True)
    ]


@pytest.mark.parametrize("strategy", ["first_fit", "next_fit", "best_fit", "knapsack"])
def test_underfilled_packs_are_packed_again_with_the_next_window(strategy: str) -> None:
    # Each window of 21 samples fills two packs and has one sample left over.
    config: dict[str, Any] = {"packing_window": 21, "packing_strategy": strategy}
    for ratio in (0.0, 0.95):
        found, rows = windows_of(np.full(210, 10), packing_min_fill_ratio=ratio, **config)
        assert any(carried_from(found, rows.reads))
        assert Counter(packed_rows(found)) == Counter(range(210))
        if strategy != "knapsack":  # which leaves what is missing in several packs
            assert [len(w.offsets) - 1 for w in found] == [2] * 9 + [3]
            assert all((fill_ratio(w.loads, {"tokens": 100}) == 1).all() for w in found)
        else:
            assert sum(len(w.offsets) - 1 for w in found) <= 25


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    window=st.integers(1, 20),
    strategy=st.sampled_from(["best_fit", "first_fit", "next_fit", "knapsack", "none"]),
)
def test_without_shuffling_packs_keep_the_order_of_the_dataset(tokens: list[int], window: int, strategy: str) -> None:
    found, rows = windows_of(tokens, packing_window=window, shuffle=False, packing_strategy=strategy)
    assert rows.reads == sorted(rows.reads)
    for packs in as_lists(found):
        assert all(pack == sorted(pack) for pack in packs)
        assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)
    if strategy in ("next_fit", "none"):
        whole, _ = windows_of(tokens, shuffle=False, packing_strategy=strategy)
        assert [pack for packs in as_lists(found) for pack in packs] == as_lists(whole)[0], "windows change nothing"
        assert packed_rows(found) == list(range(len(tokens)))


def test_the_last_window_keeps_what_is_underfilled() -> None:
    found, rows = windows_of(np.full(12, 10), packing_window=6, packing_min_fill_ratio=1.0, packing_length=110)
    assert [len(w.offsets) - 1 for w in found] == [0, 2], "12 samples of 10 are one pack of 110 and a rest"
    assert carried_from(found, rows.reads) == [0, 6]
    assert Counter(packed_rows(found)) == Counter(range(12))


def test_packs_that_are_full_enough_are_not_carried() -> None:
    found, rows = windows_of(np.full(40, 50), packing_window=10, packing_min_fill_ratio=1.0)
    assert not any(carried_from(found, rows.reads))


def test_the_fullest_limit_decides_what_is_underfilled() -> None:
    # 25 tokens of 100, but all samples that a pack may have.
    found, rows = windows_of(np.full(40, 5), packing_window=10, packing_min_fill_ratio=0.9, max_samples_per_pack=5)
    assert not any(carried_from(found, rows.reads))


def test_what_is_carried_is_bounded() -> None:
    # No two of these fit together, so that every pack stays under-filled for ever.
    found, _ = windows_of(np.full(100, 51), packing_window=10, packing_min_fill_ratio=0.9)
    assert Counter(packed_rows(found)) == Counter(range(100))
    sizes = [len(w.entries) for w in found]
    assert max(sizes[:-1]) <= 15, "at most half a window more than a window"
    assert sizes[-1] <= 15


def test_windows_smaller_than_a_pack_still_make_full_packs() -> None:
    found, _ = windows_of(np.full(100, 10), packing_window=4, packing_min_fill_ratio=0.9)
    loads = np.concatenate([w.loads["tokens"] for w in found])
    assert (np.sort(loads)[1:] >= 90).all(), "all but the last"
    assert max(len(w.entries) for w in found) <= 10 + 4


# ---- tables read by range


@pytest.mark.parametrize(
    "config", [{}, {"packing_min_fill_ratio": 0.95}, {"overlong": "split", "packing_length": 5_000}]
)
@pytest.mark.parametrize("row_group", [7, 50, 65_536])
def test_reading_by_range_gives_the_same_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], row_group: int
) -> None:
    table = lvis_table(tmp_path, 200, row_group=row_group)
    settings = PackingConfig(**{"packing_length": 20_000, "packing_window": 60, **config})
    whole = list(pack_windows(TableRows(table), settings, 0, None))
    monkeypatch.setattr(windows_module, "LARGEST_WINDOW", 64)
    asked: list[int] = []
    read = CostTable.rows

    def watched(self: CostTable, names: Any, positions: np.ndarray) -> dict[str, np.ndarray]:
        if "tokens" in names:
            asked.append(len(positions))
        return read(self, names, positions)

    monkeypatch.setattr(CostTable, "rows", watched)
    by_range = list(pack_windows(TableRows(table), settings, 0, None))
    assert as_lists(by_range) == as_lists(whole)
    for mine, theirs in zip(by_range, whole, strict=True):
        assert all((mine.loads[name] == theirs.loads[name]).all() for name in mine.loads)
        assert (mine.entries.starts == theirs.entries.starts).all()
    assert len(asked) == 4
    assert max(asked) == 60, "only a window is in memory"


def test_a_table_too_large_for_one_window_gets_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = lvis_table(tmp_path, 200)
    monkeypatch.setattr(windows_module, "LARGEST_WINDOW", 64)
    found = list(pack_windows(TableRows(table), PackingConfig(packing_length=20_000), 0, None))
    assert sorted(w.rows for w in found) == [8, 64, 64, 64]
    assert Counter(packed_rows(found)) == Counter(range(200))
