"""A pack is a pure function of its key: in any process, in pieces, with samples that are broken or slow to come."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from made_packs import BROKEN, DEAD, FLAKY, content, loader_of, plan_of, reads, source_of

from packtrain.core.errors import DataError
from packtrain.core.retries import PAUSES
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.delivery.encode.pack_source import STAGE
from packtrain.packing.pack_plan import CUT_SCHEMA, EpochPacks, PackPlan
from packtrain.packing.schedule import EMPTY_PACK


def several(plan: PackPlan, rows: list[tuple[int, int, int]]) -> PackPlan:
    """The plan with one pack only, of these (row, start, tokens)."""
    pieces = [(*row, row[1] == 0) for row in rows]
    entries = pa.table([pa.array(column) for column in zip(*pieces, strict=True)], schema=CUT_SCHEMA)
    packs = plan.epoch(0)._packs.slice(0, 1).set_column(0, "end", pa.array([len(rows)], pa.int64()))
    return PackPlan(plan.summary, [EpochPacks(entries, packs)])


def test_the_samples_of_a_pack_stand_in_its_order() -> None:
    row = source_of(several(plan_of(1), [(4, 0, -1), (1, 0, -1), (3, 0, -1)]))[PackKey(0, 0)]
    assert [sample.row for sample in row.samples] == [4, 1, 3]
    assert [sample.id for sample in row.samples] == ["sample-4", "sample-1", "sample-3"]
    assert row.key == PackKey(0, 0)


def test_samples_are_cut_as_the_plan_says() -> None:
    whole, first, second = source_of(several(plan_of(1), [(4, 0, -1), (4, 0, 2), (4, 2, 4)]))[PackKey(0, 0)].samples
    assert first.input_ids.tolist() + second.input_ids.tolist() == whole.input_ids.tolist()
    assert len(first) == 2


def test_broken_samples_are_left_out_with_their_reason() -> None:
    source = source_of(several(plan_of(1), [(4, 0, -1), (1, 0, -1), (3, 0, -1)]), wrong={1: BROKEN})
    row = source[PackKey(0, 0)]
    assert [sample.row for sample in row.samples] == [4, 3]
    (entry,) = row.failures
    assert (entry.id, entry.origin, entry.stage) == ("sample-1", "data.jsonl:2", STAGE)
    assert entry.reason == "image cannot be decoded"
    assert entry.detail == "decode: 1.png"
    assert not entry.filtered


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("packtrain.core.retries.sleep", pauses.append)
    return pauses


def test_a_fault_of_the_disk_is_waited_out(tmp_path: Path, slept: list[float]) -> None:
    source = source_of(plan_of(5), tmp_path / "log", wrong={3: FLAKY})
    assert len(source[PackKey(0, 3)].samples) == 1
    assert slept == list(PAUSES[:1])
    assert reads(tmp_path / "log") == [3, 3], "the record is read again, since its file may have been at fault"


def test_a_fault_that_stays_stops_the_run(slept: list[float]) -> None:
    source = source_of(plan_of(5), wrong={3: DEAD})
    with pytest.raises(DataError, match="Input/output error") as caught:
        source[PackKey(0, 3)]
    assert "sample-3 (data.jsonl:4)" in str(caught.value)
    assert slept == list(PAUSES)
    assert any("pack 3, epoch 0" in note for note in caught.value.__notes__)


def test_an_empty_pack_reads_nothing(tmp_path: Path) -> None:
    row = source_of(plan_of(5), tmp_path / "log")[PackKey(0, EMPTY_PACK)]
    assert (row.samples, row.failures, reads(tmp_path / "log")) == ((), (), [])


def test_a_source_survives_pickling() -> None:
    plan, key = plan_of(5), PackKey(0, 3)
    again = pickle.loads(pickle.dumps(source_of(plan)))
    assert np.array_equal(again[key].samples[0].input_ids, source_of(plan)[key].samples[0].input_ids)


@pytest.mark.full
def test_spawned_workers_deliver_the_same() -> None:
    plan = plan_of(5)
    spawned = loader_of(plan, num_workers=1, multiprocessing_context="spawn")
    assert [content(batch) for batch in spawned] == [content(batch) for batch in loader_of(plan)]
