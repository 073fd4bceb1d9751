"""Every entry of a plan is in a pack or in the ledger, the tail included; what limits stopped is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import WORK
from reading import config, ledger, packs
from tables import write_table

import packtrain.packing.plan_builder as build_module
from packtrain.core.errors import ArtifactError, DataError
from packtrain.core.seeds import stream
from packtrain.measuring.table import CostTable
from packtrain.packing.cutting import UNFIT, UNLABELLED
from packtrain.packing.pack_plan import BlockedCount
from packtrain.packing.plan_builder import BEYOND, PROBES, TAIL, Blocked, build_plan
from packtrain.packing.resources import samples_of

# ---- every entry is accounted for


def mixture(**shares: tuple[str, float]) -> dict[str, Any]:
    return {name: {"repeats": None, "weight": None, kind: value} for name, (kind, value) in shares.items()}


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("repeats", [None, (2.5, 0.5)])
def test_entries_are_packed_or_in_the_ledger(
    tmp_path: Path, overlong: str, drop_last: bool, repeats: tuple[float, float] | None
) -> None:
    random = np.random.default_rng(1)
    tokens = random.integers(1, 1_300, 150)
    tokens[3] = 1_001  # of which the last token alone carries no loss
    tails = np.where(random.random(150) < 0.3, tokens // 9, tokens)  # media of some reach nearly to their end
    columns = {"tokens": tokens, "tail_tokens": tails, "source": ["a"] * 90 + ["b"] * 60}
    shares = None if repeats is None else mixture(a=("repeats", repeats[0]), b=("repeats", repeats[1]))
    table = write_table(tmp_path / "costs", columns, mixture=shares)
    made = config(
        packing_length=1_000,
        packing_window=40,
        packing_min_fill_ratio=0.9,
        overlong=overlong,
        packing_drop_last=drop_last,
        packs_per_step=8,
        epochs=2,
    )
    plan = build_plan(table, made, WORK, tmp_path / "plan")
    lines = ledger(tmp_path / "plan")
    cut = overlong != "drop"
    unfit = {row for row in range(150) if tokens[row] > 1_000 and (not cut or tokens[row] - tails[row] > 1_000)}
    assert len(unfit) > 5
    assert sorted(line["row"] for line in lines if line["reason"] == UNFIT) == sorted(unfit), "once for all epochs"
    tailed = Counter[int]()
    for epoch in range(2):
        counts = plan.summary.epochs[epoch]
        entries = [entry for pack in packs(plan, epoch) for entry in pack]
        left = [line["row"] for line in lines if line["reason"] == TAIL and line["epoch"] == epoch]
        tailed[epoch] = len(left)
        assert counts.tail == len(left)
        assert counts.entries == len(entries)
        assert counts.drawn == counts.entries + counts.dropped + counts.tail
        pieces = [1 + (overlong == "split" and n > 1_001) for n in tokens.tolist()]
        used = Counter(row for row, _, _ in entries) + Counter(left)
        assert not unfit & set(used)
        times = np.array([used[row] / pieces[row] for row in range(150) if row not in unfit])
        whole = {None: (1, 1), (2.5, 0.5): (2, 0)}[repeats]
        assert all(
            int(n) == n and n - whole[int(row >= 90)] in (0, 1)
            for row, n in zip(np.setdiff1d(np.arange(150), list(unfit)), times, strict=True)
        )
        fitting = [sum(row not in unfit for row in rows) for rows in (range(90), range(90, 150))]
        drawn = [round(n * share) for n, share in zip(fitting, repeats or (1, 1), strict=True)]
        assert times.sum() == sum(drawn), "a fraction is one of what can be packed"
        single = [row for row in range(150) if overlong == "split" and tokens[row] == 1_001 and row not in unfit]
        unlabelled = sum(used[row] for row in single)
        assert (counts.dropped, counts.unlabelled) == (len(unfit) + unlabelled, unlabelled)
        assert counts.waiting == (0 if repeats is None else fitting[1] - drawn[1])
        assert drop_last or plan.epoch(epoch).num_samples == times.sum()
        assert counts.packs == len(packs(plan, epoch))
        assert counts.packs % 8 == 0 or not drop_last
        assert counts.totals["tokens"] == int(plan.epoch(epoch).load("tokens").sum())
        assert counts.most["tokens"] == int(plan.epoch(epoch).load("tokens").max()) <= 1_000
        assert counts.fill == pytest.approx(counts.totals["tokens"] / 1_000 / counts.packs)
        assert counts.bound == -(-counts.totals["tokens"] // 1_000) <= counts.packs
    assert (sum(tailed.values()) > 0) == drop_last
    reasons = Counter(f"pack: {line['reason']}" for line in lines)
    assert plan.summary.ledger.reasons == dict(reasons)
    assert plan.summary.epochs[0].tokens_lost == (
        sum(int(n) - 1_000 for row, n in enumerate(tokens) if n > 1_000 and row not in unfit)
        if overlong == "truncate"
        else 0
    )


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [None, 30])
def test_packs_beyond_the_most_are_in_the_ledger_of_their_epoch(
    tmp_path: Path, shuffle: bool, window: int | None
) -> None:
    table = write_table(tmp_path / "costs", {"tokens": np.random.default_rng(0).integers(1, 50, 200)})
    usual = config(packing_length=50, packing_window=window, shuffle=shuffle, epochs=2)
    made = replace(usual, max_packs=21, packing_drop_last=True, packs_per_step=4)
    plan, whole = build_plan(table, made, WORK, tmp_path / "plan"), build_plan(table, usual, WORK)
    lines = ledger(tmp_path / "plan")
    for epoch in range(2):
        kept, everything = packs(plan, epoch), packs(whole, epoch)
        assert len(kept) == 20
        assert Counter(map(tuple, kept)) <= Counter(map(tuple, everything)), "those of the plan without a limit"
        reasons = Counter(line["reason"] for line in lines if line["epoch"] == epoch)
        rows = [row for pack in kept for row, _, _ in pack] + [line["row"] for line in lines if line["epoch"] == epoch]
        assert sorted(rows) == list(range(200))
        assert set(reasons) == {BEYOND, TAIL}
        if shuffle and window is None:  # packs stand by length: the first would be the longest samples alone
            samples = [len(pack) for pack in everything]
            assert abs(np.mean([len(pack) for pack in kept]) - np.mean(samples)) < 0.4 * np.std(samples)
    assert not shuffle or packs(plan, 0) != packs(plan, 1)


def test_pieces_that_only_one_epoch_leaves_out_are_in_its_ledger(tmp_path: Path) -> None:
    table = write_table(tmp_path / "costs", {"tokens": np.random.default_rng(0).integers(1, 60, 200)})
    plan = build_plan(table, config(packing_length=50, packing_strategy="wrapped", epochs=2), WORK, tmp_path / "plan")
    lines = ledger(tmp_path / "plan")
    found = [{(line["row"], line["detail"]) for line in lines if line["epoch"] == epoch} for epoch in range(2)]
    assert [len(one) for one in found] == [plan.summary.epochs[epoch].unlabelled for epoch in range(2)]
    assert found[0] != found[1]
    assert {line["reason"] for line in lines} == {UNLABELLED}


def test_the_ledger_names_what_is_missing_and_why(tmp_path: Path) -> None:
    table = write_table(tmp_path / "costs", {"tokens": [5, 50, 7], "id": ["x", "long", "y"], "images": [0, 3, 0]})
    build_plan(table, config(packing_length=20, max_images_per_pack=2), WORK, tmp_path / "plan")
    assert ledger(tmp_path / "plan") == [
        {
            "id": "long",
            "origin": "data.jsonl:2",
            "stage": "pack",
            "reason": "fits no pack",
            "detail": "50 tokens > packing_length 20; 3 images > max_images_per_pack 2",
            "row": 1,
            "epoch": None,
        }
    ]


def test_a_long_ledger_is_written_in_parts(table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"packing_length": 1_000, "packing_window": 30, "epochs": 2}
    build_plan(table, config(**settings), WORK, tmp_path / "whole")
    monkeypatch.setattr(build_module, "_LINES", 20)
    plan = build_plan(table, config(**settings), WORK, tmp_path / "parts")
    by_row = [sorted(ledger(tmp_path / name), key=lambda line: int(line["row"])) for name in ("whole", "parts")]
    assert len(by_row[0]) > 60
    assert by_row[0] == by_row[1]
    assert plan.summary.ledger.reasons == {f"pack: {UNFIT}": len(by_row[0])}


def test_an_entry_lost_on_the_way_is_noticed(table: CostTable, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_module.pack_windows

    def losing(*arguments: Any) -> Any:
        for window in whole(*arguments):
            yield replace(window, counts=replace(window.counts, drawn=window.counts.drawn + 1))

    monkeypatch.setattr(build_module, "pack_windows", losing)
    with pytest.raises(ArtifactError, match="ledger of epoch 0"):
        build_plan(table, config(), WORK)


@pytest.mark.parametrize("settings", [{"packing_length": 3}, {"packing_drop_last": True, "packs_per_step": 500}])
def test_a_plan_without_packs_is_refused(table: CostTable, tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no packs"):
        build_plan(table, config(**settings), WORK, tmp_path / "plan")
    assert not list(tmp_path.iterdir())


def test_cut_rows_are_spans_of_their_row(table: CostTable) -> None:
    plan = build_plan(table, config(packing_length=5_000, overlong="split"), WORK)
    assert plan.epoch(0).cut
    tokens = table.column("tokens")
    spans: dict[int, list[tuple[int, int]]] = {}
    for row, start, length in (entry for pack in packs(plan) for entry in pack):
        spans.setdefault(row, []).append((start, length))
    assert any(len(parts) > 1 for parts in spans.values())
    for row, parts in spans.items():
        at = 0
        for start, length in sorted(parts):
            assert start == at
            at += length
        assert at == tokens[row]
    uncut = build_plan(table, config(), WORK)
    assert not uncut.epoch(0).cut
    assert {entry[1:] for pack in packs(uncut) for entry in pack} == {(0, -1)}


# ---- the tail


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    window=st.integers(1, 90),
    ratio=st.sampled_from([0.0, 0.6, 0.95]),
    size=st.integers(1, 9),
)
def test_packs_make_whole_steps_where_the_tail_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], window: int, ratio: float, size: int
) -> None:
    table = write_table(tmp_path_factory.mktemp("costs"), {"tokens": tokens})
    settings: dict[str, Any] = {"packing_length": 100, "packing_window": window, "packing_min_fill_ratio": ratio}
    kept = build_plan(table, config(**settings), WORK)
    try:
        plan = build_plan(table, config(**settings, packing_drop_last=True, packs_per_step=size), WORK)
    except DataError:
        plan = None
    else:
        assert plan.epoch(0).num_packs % size == 0
        assert plan.summary.epochs[0].tail + plan.epoch(0).num_entries == len(tokens)
        assert {frozenset(pack) for pack in packs(plan)} <= {frozenset(pack) for pack in packs(kept)}
    if ratio == 0:
        assert (0 if plan is None else plan.num_packs) == kept.num_packs // size * size


def test_steps_are_whole_even_if_the_last_window_is_left_out(tmp_path: Path) -> None:
    # Packs by window: 6, 1, 3; a whole step is 4, and the last window is under-filled, so that 7 packs remain: 4 must.
    tokens = [100] * 6 + [100, *[30] * 5]
    table = write_table(tmp_path, {"tokens": tokens})
    plan = build_plan(
        table,
        config(
            packing_length=100,
            packing_window=6,
            packing_strategy="none",
            packing_min_fill_ratio=0.5,
            packing_drop_last=True,
            packs_per_step=4,
            shuffle=False,
        ),
        WORK,
    )
    assert plan.num_packs == 4
    assert plan.summary.epochs[0].tail == 8


def test_the_emptiest_packs_make_up_the_tail(tmp_path: Path) -> None:
    table = write_table(tmp_path, {"tokens": [100, 60, 70, 80, 90]})
    plan = build_plan(table, config(packing_length=100, packing_drop_last=True, packs_per_step=2), WORK)
    assert sorted(entry[0] for pack in packs(plan) for entry in pack) == [0, 2, 3, 4]


# ---- which limit stopped how much


def test_blocked_counts_are_those_of_offering_samples(table: CostTable) -> None:
    limits = {"max_patches_per_pack": 18_000, "max_samples_per_pack": 14}
    plan = build_plan(table, config(**limits, seed=5), WORK)
    capacities = plan.config.capacities()
    samples, _ = samples_of(table)
    rows = plan.epoch(0).rows
    chosen = rows[stream(5 + 1, "offers").integers(len(rows), size=PROBES)]
    stopped, alone, fullest = Counter[str](), Counter[str](), Counter[str]()
    refused = 0
    for number in range(plan.num_packs):
        load = {name: int(plan.epoch(0).load(name)[number]) for name in capacities}
        fullest[max(capacities, key=lambda name: load[name] / capacities[name])] += 1
        for row in chosen.tolist():
            stops = [name for name, limit in capacities.items() if load[name] + samples[name][row] > limit]
            stopped.update(stops)
            alone.update(stops if len(stops) == 1 else [])
            refused += bool(stops)
    found = plan.summary.blocked
    assert (found.offers, found.refused) == (plan.num_packs * PROBES, refused)
    for name in capacities:
        assert found.limits[name] == BlockedCount(stopped=stopped[name], alone=alone[name], fullest=fullest[name])
    assert sum(fullest.values()) == plan.num_packs
    assert all(stopped[name] for name in capacities), "every limit stops something here"


def test_blocked_counts_do_not_depend_on_how_many_packs_are_looked_at_at_once(
    table: CostTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_plan(table, config(max_patches_per_pack=18_000), WORK).summary.blocked
    monkeypatch.setattr("packtrain.packing.plan_builder._PACKS_AT_ONCE", 3)
    assert build_plan(table, config(max_patches_per_pack=18_000), WORK).summary.blocked == whole


def test_nothing_is_offered_where_there_are_no_packs(table: CostTable) -> None:
    blocked = Blocked({"tokens": 5})
    samples, _ = samples_of(table, 0, 1)
    blocked.add(samples, {"tokens": np.zeros(0, np.int64)}, 0)
    assert (blocked.summary().offers, blocked.summary().limits["tokens"].stopped) == (0, 0)
