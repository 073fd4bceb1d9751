"""The packing benchmark: its sets have the shape they claim, files are read or refused, and its numbers agree."""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from packtrain.bench import pack
from packtrain.bench.lengths import LVIS_SAMPLES, MIXTURES, lvis_shape, mixture, read_lengths, samples_from
from packtrain.bench.other_packers import OTHERS, OtherPacker, PackerRun
from packtrain.bench.pack import LIMITS, WHOLE, PackResult, bench_pack, best_fit_decreasing, equal_work, plan_of
from packtrain.bench.printing import show_pack
from packtrain.bench.scaling import GeneratedRows, scaling
from packtrain.core.errors import ConfigError, DataError, PacktrainError
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.predicting.flops import WorkModel

LENGTHS = [6, 500, 20, 4_000, 31]
WORK = WorkModel(per_token=1, per_squared_token=0, per_supervised_token=0, per_patch=0, per_squared_patch=0)


# ---- generated sets


def test_the_generated_set_has_the_shape_it_claims() -> None:
    samples = lvis_shape()
    tokens = samples["tokens"]
    assert len(tokens) == LVIS_SAMPLES == 99_388
    assert abs(tokens.sum() / 132.6e6 - 1) < 0.01
    assert abs(np.median(tokens) / 864 - 1) < 0.02
    assert abs(np.percentile(tokens, 95) / 3_669 - 1) < 0.02
    assert 90 <= (tokens > 20_000).sum() <= 110
    assert tokens.max() > 24_000
    assert 335 < samples["vision_tokens"].mean() < 360
    assert (samples["images"] == 1).all()
    assert (samples["patches"] == 4 * samples["vision_tokens"]).all()


@pytest.mark.parametrize("make", [lvis_shape, *(lambda n, s, name=name: mixture(name, n, s) for name in MIXTURES)])
def test_sets_follow_from_size_and_seed(make: Callable[[int, int], Any]) -> None:
    one, again, other = make(3_000, 5), make(3_000, 5), make(3_000, 6)
    assert set(one.columns) == {*RESOURCES, *EXTRAS}
    for name, column in one.columns.items():
        assert (column == again[name]).all()
        assert column.dtype == np.int64
        assert len(column) == 3_000
    assert (one["tokens"] != other["tokens"]).any()
    assert (one["vision_tokens"] < one["tokens"]).all()
    assert (one["largest_patches"] <= one["patches"]).all()
    assert ((one["images"] + one["videos"] > 0) == (one["vision_tokens"] > 0)).all()


def test_mixtures_have_their_shares_and_know_their_names() -> None:
    found = mixture("balanced", 1_000)
    assert (found["vision_tokens"] == 0).sum() == 400
    assert ((found["images"] > 1).sum(), found["videos"].sum()) == (200, 50)
    with pytest.raises(ConfigError, match="balanced"):
        mixture("balancd", 10)


def test_generated_rows_are_the_same_by_range() -> None:
    rows = GeneratedRows(200_000)
    whole, tails = rows.read(0, 200_000)
    assert len(rows) == len(whole) == 200_000
    assert (tails.tokens == whole["tokens"] - whole["vision_tokens"]).all()
    assert whole["tokens"].min() > 0
    part, _ = rows.read(0, 131_072)
    assert (part["tokens"] == whole["tokens"][:131_072]).all()


# ---- files


def write(path: Path, tokens: Any) -> Path:
    """The lengths as the kind of file that the name says."""
    values = np.array(tokens)
    if path.suffix == ".npy":
        np.save(path, values, allow_pickle=values.dtype == object)
    elif path.suffix == ".npz":
        np.savez(path, tokens=values, allow_pickle=values.dtype == object)
    elif path.suffix == ".csv":
        path.write_text("id,total_tokens\n" + "".join(f"a{n},{value}\n" for n, value in enumerate(tokens)))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"tokens": tokens, "id": ["x"] * len(tokens)}), path)
    else:
        path.write_text(" ".join(map(str, tokens[:2])) + "\n" + "\n".join(map(str, tokens[2:])))
    return path


KINDS = ("a.npy", "a.npz", "a.csv", "a.parquet", "a.txt", "a.lengths")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_is_read(tmp_path: Path, name: str) -> None:
    samples = read_lengths(write(tmp_path / name, LENGTHS))
    assert samples["tokens"].tolist() == LENGTHS
    assert samples["tokens"].dtype == np.int64
    assert set(samples.columns) == {*RESOURCES, *EXTRAS}


def test_columns_beside_tokens_are_used(tmp_path: Path) -> None:
    text, image = np.array([200, 7], np.uint8), np.array([100, 9], np.uint8)
    np.savez(tmp_path / "a.npz", text_tokens=text, image_tokens=image, images=[1, 3], patches=[400, 36], other=[1])
    samples = read_lengths(tmp_path / "a.npz")
    assert samples["tokens"].tolist() == [300, 16]  # 300 is more than eight bits hold
    assert samples["vision_tokens"].tolist() == [100, 9]
    assert samples["largest_patches"].tolist() == [400, 12]
    (tmp_path / "a.csv").write_text("text_tokens,n_media,vision_tokens,n_frames,total_tokens\n5,1,10,4,15\n")
    samples = read_lengths(tmp_path / "a.csv")
    assert [samples[n].tolist() for n in ("tokens", "vision_tokens", "images", "frames")] == [[15], [10], [1], [4]]


def test_the_folder_of_a_cost_table_is_read(tmp_path: Path) -> None:
    write(tmp_path / "costs.parquet", LENGTHS)
    assert read_lengths(tmp_path)["tokens"].tolist() == LENGTHS


BAD = {
    "nan": [1.0, math.nan],
    "infinite": [1.0, math.inf],
    "half": [1.0, 2.5],
    "negative": [5, -1],
    "zero": [5, 0],
    "huge": [5, 2**40],
    "empty": [],
    "words": ["5", "many"],
}


@pytest.mark.parametrize(("name", "case"), itertools.product(KINDS[:-1], BAD))
def test_bad_lengths_are_refused_with_the_place(tmp_path: Path, name: str, case: str) -> None:
    path = write(tmp_path / name, BAD[case])
    with pytest.raises(DataError) as raised:
        read_lengths(path)
    assert str(path) in str(raised.value)
    if case in ("negative", "zero", "huge") and name != "a.txt":
        assert "sample 1" in str(raised.value)


class Trap:
    """An object whose unpickling leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "bare.npy", "bare.npz"])
def test_pickled_files_are_refused_and_never_run(tmp_path: Path, name: str) -> None:
    trap = Trap(tmp_path / "trace")
    if name.startswith("bare"):
        (tmp_path / name).write_bytes(pickle.dumps(trap))
    elif name.endswith("npy"):
        np.save(tmp_path / name, np.array([trap], dtype=object), allow_pickle=True)
    else:
        np.savez(tmp_path / name, tokens=np.array([trap], dtype=object))
    with pytest.raises(DataError) as raised:
        read_lengths(tmp_path / name)
    assert not trap.trace.exists()
    assert "pickled objects are not loaded" in raised.value.fix
    pickle.loads(pickle.dumps(trap))
    assert trap.trace.exists(), "the trap would not have shown"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.npz", LENGTHS * 100).read_bytes()
    contents = {
        "cut.npz": whole[: len(whole) // 2],
        "cut.npy": write(tmp_path / "whole.npy", LENGTHS * 100).read_bytes()[:-7],
        "cut.parquet": write(tmp_path / "whole.parquet", LENGTHS).read_bytes()[:-7],
        "vast.npy": b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(117)
        + b"\n",
        "noise.txt": bytes(range(256)),
        "noise.csv": b"tokens\n" + bytes(range(128, 256)),
        "short.csv": b"id,tokens\na,1\nb\n",
        "nothing.csv": b"",
        "nothing.npy": b"",
        "nothing.npz": b"",
        "nothing.parquet": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as raised:
            read_lengths(tmp_path / name)
        assert name in str(raised.value)


def test_columns_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", sizes=[1])
    np.savez(tmp_path / "uneven.npz", text_tokens=[1, 2], image_tokens=[1])
    np.savez(tmp_path / "more.npz", tokens=[1, 2], vision_tokens=[1, 3])
    np.savez(tmp_path / "below.npz", text_tokens=[10], image_tokens=[-3])
    np.save(tmp_path / "square.npy", np.ones((2, 2), int))
    for name, said in {
        "other.npz": "text_tokens",
        "uneven.npz": "equal length",
        "more.npz": "sample 1",
        "below.npz": "-3",
        "square.npy": "shape",
    }.items():
        with pytest.raises(DataError, match=said):
            read_lengths(tmp_path / name)
    for path in (tmp_path / "absent.npy", tmp_path):
        with pytest.raises(ConfigError, match="--lengths"):
            read_lengths(path)


# ---- parts


def test_best_fit_decreasing_equals_a_plain_one() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        sizes, capacities = random.integers(0, 50, (60, 3)) + 1, np.array([100, 90, 80])
        packs: list[np.ndarray] = []
        for size in sizes[np.argsort(-(sizes / capacities).sum(axis=1), kind="stable")]:
            open_ = [pack for pack in packs if (pack + size <= capacities).all()]
            if not open_:
                packs.append(np.zeros(3))
                open_ = packs[-1:]
            min(open_, key=lambda pack: ((capacities - pack) / capacities).sum())[:] += size
        assert best_fit_decreasing(sizes, capacities) == len(packs)
        assert len(packs) > 10


def test_plan_in_memory_holds_every_sample_once() -> None:
    samples = lvis_shape(3_000)
    plan = plan_of(samples, PackingConfig(packing_length=8_192, packing_window=1_000), WORK)
    packs = plan.epoch(0)
    fitting = np.flatnonzero(samples["tokens"] <= 8_192)
    assert 0 < len(fitting) < 3_000
    assert np.array_equal(np.sort(packs.rows), fitting)
    for number in range(0, packs.num_packs, 7):
        rows = packs.pack(number).rows
        assert packs.load("tokens")[number] == samples["tokens"][rows].sum() <= 8_192
        assert packs.load("window")[number] in (0, 1, 2)
        assert len(set(rows // 1_000)) <= 2, "of a window, and what the one before left over"
    assert np.array_equal(plan.predicted_work(0), packs.load("tokens"))


def test_equal_work_compares_the_three_orders() -> None:
    found = asdict(equal_work("set", mixture("video", 6_000), {"packing_length": 8_192}, ranks=(4, 16, 100_000)))
    assert [line["ranks"] for line in found["lines"]] == [4, 16]
    for line in found["lines"]:
        assert 1 <= line["strict"]["slowest"] <= line["sorted"]["slowest"] < line["random"]["slowest"]
        assert line["sorted"]["length_spread"] == pytest.approx(line["random"]["length_spread"])
        assert line["sorted"]["samples_spread"] == pytest.approx(line["random"]["samples_spread"])


@pytest.mark.parametrize("other", [other for other in OTHERS if other.package != "trl"], ids=lambda other: other.name)
def test_other_packers_pack_everything(other: OtherPacker) -> None:
    check_other(other)


@pytest.mark.full
@pytest.mark.parametrize("other", [other for other in OTHERS if other.package == "trl"], ids=lambda other: other.name)
def test_trl_packs_everything(other: OtherPacker) -> None:
    check_other(other)


def check_other(other: OtherPacker) -> None:
    if not other.installed:
        pytest.skip(f"{other.package} is not installed")
    lengths = lvis_shape(2_500)["tokens"]
    lengths = lengths[lengths <= 4_096]
    run = other.prepare(lengths, 4_096)
    loads = run.loads(run.pack())
    assert loads.sum() == lengths.sum()
    assert 0 < loads.min() <= loads.max() <= 4_096
    assert len(loads) < 1.1 * lengths.sum() / 4_096
    assert sorted(run.loads(run.pack())) == sorted(loads), "packing changed what was given"


@pytest.mark.parametrize("loads", [[4_000], [4_000, 4_097]])
def test_a_packer_that_cheats_is_noticed(loads: list[int]) -> None:
    cheat = OtherPacker(
        name="cheat",
        package="nothing",
        module="json",
        most=10,
        prepare=lambda lengths, capacity: PackerRun(pack=lambda: None, loads=lambda _: np.array(loads)),
    )
    with pytest.raises(RuntimeError, match="cheat"):
        pack._beside(cheat, np.array([4_000, 97, 4_000]), 4_096)


# ---- all of it


def check_result(result: dict[str, Any]) -> None:
    """The numbers of one result agree with each other."""
    assert json.loads(json.dumps(result))["samples"] == result["samples"]
    strategies = result["strategies"]["rows"]
    assert len(strategies) == len(WHOLE)
    for row in (*result["one_resource"], *strategies):
        assert row["packs"] >= row["bound"] > 0
        assert row["of_bound"] == row["bound"] / row["packs"]
        assert row["samples"] + row["dropped"] == result["samples"]
        assert row["samples_per_second"] * row["nanoseconds_per_sample"] == pytest.approx(1e9)
    packs = {row["strategy"]: row["packs"] for row in strategies}
    assert packs["best_fit"] <= packs["window_1000"] <= packs["next_fit"] <= packs["none"]
    assert packs["none"] == strategies[0]["samples"]
    for row in result["others"]["rows"]:
        assert row["packs"] >= row["bound"]
        assert row["our_packs"] <= row["packs"]
        assert row["times_our_seconds"] == row["seconds"] / row["our_seconds"] > 0
    assert [(row["mixture"], row["limits"]) for row in result["several"]] == list(itertools.product(MIXTURES, LIMITS))
    for row in result["several"]:
        ways = [row[way] for way in ("first_fit_random", "first_fit_decreasing", "best_fit_decreasing")]
        assert 0.5 < min(ways) <= max(ways) <= 1
        assert row["first_fit_random"] <= row["fast"] + 0.02
        assert row["fast"] <= row["best"] + 0.02 <= 1.02
        assert row["fast_seconds_per_million"] > 0 < row["best_seconds_per_million"]
    for found in result["equal_work"]["sets"]:
        assert found["lines"]
    for row in result["scaling"]:
        assert row["packs"] >= row["bound"] > 0
        assert row["seconds"] > 0 <= row["extra_bytes_per_sample_of_a_window"]  # small sets drown in a process's own
        assert row["peak_gib"] > 0.02


def shown(result: PackResult) -> str:
    page = io.StringIO()
    show_pack(result, Console(file=page, width=200))
    return page.getvalue()


def test_benchmark_of_a_file(tmp_path: Path) -> None:
    """All but other packers and growth, which start processes and import trainers."""
    np.save(tmp_path / "mine.npy", lvis_shape(1_500)["tokens"])
    said: list[str] = []
    made = bench_pack(tmp_path / "mine.npy", [8_192, 4_096], [], False, said.append, several=400, work=1_500)
    result = asdict(made)
    check_result(result)
    assert result["set"] == "mine.npy"
    assert result["samples"] == 1_500
    assert [row["capacity"] for row in result["one_resource"]] == [8_192, 4_096]
    assert result["one_resource"][0]["dropped"] > 0
    assert said[0] == "one resource"
    page = shown(made)
    for title in ("Best fit, one resource", "Strategies at 8,192", "Several resources", "Load balance", "mine.npy"):
        assert title in page
    assert "Growth" not in page


@pytest.mark.full
def test_benchmark_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "lvis_shape", lambda samples=1_500: lvis_shape(min(samples, 1_500)))
    made = bench_pack(None, [8_192], [20_000], True, several=400, work=1_500)
    result = asdict(made)
    check_result(result)
    assert "synthetic" in result["set"]
    assert {row["packer"] for row in result["others"]["rows"]} == {other.name for other in OTHERS if other.installed}
    assert [row["what"] for row in result["scaling"]] == ["alone", "plan"]
    page = shown(made)
    for name in (*(other.name for other in OTHERS), "ms-swift", "Growth"):
        assert name in page


def test_growth_in_windows_counts_all_samples() -> None:
    found = asdict(scaling(9_000, 4_096, "alone", window=4_000))
    assert found["window"] == 4_000
    assert found["packs"] >= found["bound"] > 9_000 * 1_000 / 4_096
    assert found["nanoseconds_per_sample"] == pytest.approx(found["seconds"] / 9_000 * 1e9)


@pytest.mark.full
def test_memory_is_that_of_packing() -> None:
    """At least the order that is handed back, 8 bytes a sample; and not the process, which alone is above 100 MiB."""
    found = asdict(scaling(1_000_000, 8_192, "alone"))
    assert 8 <= found["extra_bytes_per_sample_of_a_window"] < 64
    assert found["peak_gib"] > 0.1


@pytest.mark.parametrize(
    ("capacities", "sizes", "where"),
    [([], [], "--capacities"), ([0], [], "--capacities"), ([8_192, -1], [], "--capacities"), ([8_192], [0], "--sizes")],
)
def test_counts_are_checked_before_anything_runs(capacities: list[int], sizes: list[int], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        bench_pack(None, capacities, sizes, False)


def test_a_capacity_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "long.npy", np.array([9_000, 5_000]))
    with pytest.raises(PacktrainError, match="5,000"):
        bench_pack(tmp_path / "long.npy", [8_192, 4_096], [], False)


def test_what_is_not_given_is_nothing() -> None:
    samples = samples_from(np.array([10, 20]))
    assert not samples["vision_tokens"].any()
    assert not samples["patches"].any()
    assert samples["supervised_tokens"].tolist() == [5, 10]
