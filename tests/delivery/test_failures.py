"""The failure budget of a run: one verdict for all ranks, one ledger, nothing twice after resuming."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from processes import TORCH, run_ranks

from packtrain.core.errors import ArtifactError, ConfigError, DataError
from packtrain.core.values import LedgerEntry
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.delivery.loader.failures import FailureCounter


def batch(pack: int, samples: int = 10, bad: int = 0, reason: str = "image is damaged", **more: Any) -> BatchInfo:
    failures = tuple(
        LedgerEntry(id=f"{pack}-{n}", origin=f"data:{pack}", stage="deliver", reason=reason, **more) for n in range(bad)
    )
    ids = tuple(f"{pack}-{n}" for n in range(bad, samples))
    return BatchInfo(keys=(PackKey(epoch=0, pack=pack),), ids=ids, failures=failures)


def steps(num: int = 6, packs: int = 4) -> list[list[BatchInfo]]:
    """Packs of each step; every third pack lacks a sample or two."""
    numbers = [[step * packs + place for place in range(packs)] for step in range(num)]
    reasons = ("image is damaged", "video is cut off")
    return [[batch(n, bad=n % 3, reason=reasons[n % 2]) for n in step] for step in numbers]


def train(
    watch: FailureCounter, work: list[list[BatchInfo]], rank: int = 0, world_size: int = 1
) -> list[dict[str, Any]]:
    """The state before each step and at the end."""
    states = [watch.state_dict()]
    for step in work:
        for info in step[rank::world_size]:
            watch.take(info)
        watch.decide()
        states.append(json.loads(json.dumps(watch.state_dict())))
    return states


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(work: list[list[BatchInfo]]) -> list[tuple[int, str]]:
    return [(info.keys[0].pack, entry.id) for step in work for info in step for entry in info.failures]


def test_every_failure_is_counted_and_written_once(tmp_path: Path) -> None:
    watch = FailureCounter(1.0, tmp_path / "new" / "ledger.jsonl")
    train(watch, steps())
    found = lines(tmp_path / "new" / "ledger.jsonl")
    assert [(line["pack"], line["id"]) for line in found] == expected(steps())
    assert {"epoch", "pack", "id", "origin", "stage", "reason", "detail", "filtered"} == set(found[0])
    assert watch.verdict.samples == 6 * 4 * 10
    assert watch.verdict.failures == len(found) == 24
    assert sum(watch.verdict.reasons.values()) == 24


def test_resuming_at_every_step_gives_the_same_ledger_and_totals(tmp_path: Path) -> None:
    path, work = tmp_path / "ledger.jsonl", steps()
    whole = FailureCounter(1.0, path)
    states = train(whole, work)
    end, content = whole.state_dict(), path.read_bytes()
    for step, state in enumerate(states):
        # the run went on for two steps after the state was saved, and died while it wrote
        path.write_bytes(content)
        other = FailureCounter(1.0, path)
        other.load_state_dict(state)
        train(other, work[step : step + 2])
        with path.open("ab") as stream:
            stream.write(b'{"id": "cut o')
        again = FailureCounter(1.0, path)
        again.load_state_dict(state)
        train(again, work[step:])
        again.finish()
        assert path.read_bytes() == content, f"resume at step {step} diverges"
        assert again.state_dict() == end


@pytest.mark.parametrize("same_object", [False, True])
def test_a_resumed_run_takes_back_lines_even_if_nothing_fails_again(tmp_path: Path, same_object: bool) -> None:
    path = tmp_path / "ledger.jsonl"
    watch = FailureCounter(1.0, path)
    train(watch, [[batch(0, bad=2)]])
    assert len(lines(path)) == 2
    again = watch if same_object else FailureCounter(1.0, path)
    again.load_state_dict(FailureCounter(1.0, path).state_dict())
    train(again, [[batch(0)]])
    assert lines(path) == []


def test_the_budget_stops_a_run_and_names_the_reasons() -> None:
    watch = FailureCounter(0.1, judged_after=100)
    for pack in range(9):
        watch.take(batch(pack, bad=5, reason="video is cut off" if pack % 3 else "image is damaged"))
        watch.decide()  # too few samples to mean anything
    watch.take(batch(9))
    with pytest.raises(DataError, match=r"45 of the first 100 samples") as caught:
        watch.decide()
    assert "30 x deliver: video is cut off; 15 x deliver: image is damaged" in str(caught.value)
    assert "10 %" in str(caught.value)


def test_a_rate_at_the_limit_passes_and_small_runs_are_judged_at_the_end() -> None:
    watch = FailureCounter(0.1, judged_after=1000)
    watch.take(batch(0, bad=1))
    assert watch.finish().failures == 1
    watch.take(batch(1, bad=2))
    watch.decide()
    with pytest.raises(DataError, match="3 of the first 20"):
        watch.finish()


def test_on_error_fail_stops_at_the_first() -> None:
    watch = FailureCounter(on_error="fail")
    watch.take(batch(0))
    watch.decide()
    watch.take(batch(1, bad=1))
    with pytest.raises(DataError, match="1 of the first 20"):
        watch.decide()


def test_what_the_user_filtered_is_written_but_is_no_failure(tmp_path: Path) -> None:
    watch = FailureCounter(0.0, tmp_path / "ledger.jsonl", judged_after=0)
    watch.take(BatchInfo(keys=batch(0).keys, ids=("a", "b", "c"), failures=batch(0, bad=2, filtered=True).failures))
    assert watch.decide().samples == 3
    assert len(lines(tmp_path / "ledger.jsonl")) == 2


def test_odd_names_are_written(tmp_path: Path) -> None:
    watch = FailureCounter(1.0, tmp_path / "ledger.jsonl")
    watch.take(batch(0, bad=1, detail="naïve \udcff\n日本"))
    watch.decide()
    (line,) = lines(tmp_path / "ledger.jsonl")
    assert line["detail"] == "naïve \udcff\n日本"


def test_several_packs_in_a_batch_leave_the_pack_open(tmp_path: Path) -> None:
    watch = FailureCounter(1.0, tmp_path / "ledger.jsonl")
    one = batch(3, bad=1)
    watch.take(BatchInfo(keys=(*one.keys, PackKey(epoch=0, pack=4)), ids=one.ids, failures=one.failures))
    watch.take(BatchInfo())
    watch.decide()
    assert [(line["epoch"], line["pack"]) for line in lines(tmp_path / "ledger.jsonl")] == [(0, None)]


def test_a_ledger_that_lost_lines_is_refused_and_one_in_another_place_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    state = train(FailureCounter(1.0, path), steps())[-1]
    path.write_bytes(path.read_bytes()[:-5])
    again = FailureCounter(1.0, path)
    again.load_state_dict(state)
    with pytest.raises(ArtifactError, match="before the state was saved"):
        again.decide()
    moved = FailureCounter(1.0, tmp_path / "elsewhere.jsonl")
    moved.load_state_dict(state)
    train(moved, [[batch(99, bad=1)]])
    assert [line["pack"] for line in lines(tmp_path / "elsewhere.jsonl")] == [99]
    assert moved.verdict.failures == 25


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"samples": -1}, {"failures": "1"}, {"reasons": [1]}, {"reasons": {"a": "b"}}, {"reasons": None}],
)
def test_foreign_states_are_refused(change: dict[str, Any]) -> None:
    watch = FailureCounter()
    with pytest.raises(ArtifactError, match="failure counts"):
        watch.load_state_dict({**watch.state_dict(), **change})


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError):
        FailureCounter(1.5)
    with pytest.raises(ConfigError):
        FailureCounter(judged_after=-1)


# ---- several ranks


def spend(rank: int, world_size: int, path: str) -> tuple[str, int]:
    """Only rank 1 meets bad samples; when and how does this rank stop?"""
    watch = FailureCounter(0.2, path, judged_after=40)
    for step in range(10):
        watch.take(batch(step * world_size + rank, bad=6 if rank == 1 else 0))
        try:
            watch.decide()
        except DataError as error:
            return str(error), step
    return "went on", 10


def test_all_ranks_stop_at_the_same_step_with_the_same_message(tmp_path: Path) -> None:
    answers = run_ranks(2, spend, 2, str(tmp_path / "ledger.jsonl"), folder=tmp_path, preload=TORCH)
    assert answers[0] == answers[1], answers
    assert answers[0][1] == 1
    assert "12 of the first 40 samples" in answers[0][0]
    assert len(lines(tmp_path / "ledger.jsonl")) == 12


def run_part(
    rank: int, world_size: int, path: str, state: dict[str, Any] | None, start: int, stop: int
) -> dict[str, Any]:
    watch = FailureCounter(1.0, path)
    if state is not None:
        watch.load_state_dict(state)
    return train(watch, steps()[start:stop], rank, world_size)[-1]


@pytest.mark.full
def test_the_ledger_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    alone = tmp_path / "alone.jsonl"
    end = train(FailureCounter(1.0, alone), steps())[-1]
    path = tmp_path / "ledger.jsonl"
    two = run_ranks(2, run_part, 2, str(path), None, 0, 3, folder=tmp_path / "two", preload=TORCH)
    assert two[0] == two[1], "a state is the same on every rank"
    # This part is taken back.
    run_ranks(2, run_part, 2, str(path), two[0], 3, 5, folder=tmp_path / "lost", preload=TORCH)
    three = run_ranks(3, run_part, 3, str(path), two[1], 3, 6, folder=tmp_path / "three", preload=TORCH)
    assert three[0] == three[1] == three[2] == end
    assert path.read_bytes() == alone.read_bytes()
    assert max(Counter(path.read_text().splitlines()).values()) == 1


def cannot_write(rank: int, path: str) -> str:
    watch = FailureCounter(1.0, path)
    watch.take(batch(rank, bad=1))
    try:
        watch.decide()
    except ArtifactError as error:
        return str(error)
    return "went on"


def test_a_ledger_that_cannot_be_written_stops_every_rank(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    answers = run_ranks(2, cannot_write, str(tmp_path / "folder"), folder=tmp_path, preload=TORCH)
    assert answers[0] == answers[1], answers
    assert "IsADirectoryError" in answers[0]
