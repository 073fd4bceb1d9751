"""The packer of streams: within the limits, nothing starves, and a saved state continues exactly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import lvis_like

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.packing.arrays import pack_arrays
from packtrain.packing.online import OnlinePacker

CAPACITIES = {"tokens": 50, "images": 4}
streams = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=50)


def push_all(packer: OnlinePacker, samples: list[tuple[int, int]], start: int = 0) -> list[list[str]]:
    """The packs of a stream from sample `start` on, to its end."""
    found = []
    for number in range(start, len(samples)):
        tokens, images = samples[number]
        found += list(packer.push(str(number), {"tokens": tokens, "images": images}))
    return found + list(packer.flush())


@settings(max_examples=100, deadline=None)
@given(samples=streams, buffer=st.integers(1, 20))
def test_a_partition_within_the_limits(samples: list[tuple[int, int]], buffer: int) -> None:
    packs = push_all(OnlinePacker(CAPACITIES, buffer=buffer), samples)
    assert sorted(int(key) for pack in packs for key in pack) == list(range(len(samples)))
    for pack in packs:
        assert pack
        assert sum(samples[int(key)][0] for key in pack) <= 50
        assert sum(samples[int(key)][1] for key in pack) <= 4


@settings(max_examples=60, deadline=None)
@given(samples=streams, buffer=st.integers(1, 12))
def test_no_sample_starves_and_the_buffer_is_bounded(samples: list[tuple[int, int]], buffer: int) -> None:
    packer = OnlinePacker(CAPACITIES, buffer=buffer)
    made = 0
    arrived: dict[str, int] = {}
    for number, (tokens, images) in enumerate(samples):
        arrived[str(number)] = made
        for pack in packer.push(str(number), {"tokens": tokens, "images": images}):
            assert pack[0] == min(arrived, key=int), "the sample that waits longest is in the next pack"
            made += 1
            for key in pack:
                assert made - arrived.pop(key) <= buffer + 1
        assert len(packer) == len(arrived) <= buffer


@settings(max_examples=60, deadline=None)
@given(samples=streams, buffer=st.integers(1, 12))
def test_gaps_are_filled_with_the_largest_that_fits(samples: list[tuple[int, int]], buffer: int) -> None:
    waiting, expected = list(range(len(samples)))[: buffer + 1], []
    arriving = list(range(len(samples)))[buffer + 1 :]
    while waiting:
        pack, tokens, images = [waiting[0]], *samples[waiting[0]]
        while True:
            fits = [n for n in waiting if n not in pack]
            fits = [n for n in fits if tokens + samples[n][0] <= 50 and images + samples[n][1] <= 4]
            if not fits:
                break
            pack.append(max(fits, key=lambda n: max(samples[n][0] / 50, samples[n][1] / 4)))
            tokens, images = (sum(samples[n][r] for n in pack) for r in range(2))
        waiting = [n for n in waiting if n not in pack]
        taken = min(len(pack), len(arriving))
        waiting, arriving = waiting + arriving[:taken], arriving[taken:]
        expected.append([str(n) for n in pack])
    assert push_all(OnlinePacker(CAPACITIES, buffer=buffer), samples) == expected


def test_a_sample_that_fits_badly_does_not_wait_for_ever() -> None:
    packer = OnlinePacker({"tokens": 10}, buffer=3)
    list(packer.push("odd", {"tokens": 7}))
    found = [pack for n in range(12) for pack in packer.push(str(n), {"tokens": 10})]
    assert any("odd" in pack for pack in found[:4])


@settings(max_examples=25, deadline=None)
@given(samples=streams, buffer=st.integers(1, 12))
def test_resuming_at_every_push_gives_the_same_packs(samples: list[tuple[int, int]], buffer: int) -> None:
    whole = push_all(OnlinePacker(CAPACITIES, buffer=buffer), samples)
    packer, done = OnlinePacker(CAPACITIES, buffer=buffer), 0
    for number, (tokens, images) in enumerate(samples):
        state = json.loads(json.dumps(packer.state_dict(), sort_keys=True))
        again = OnlinePacker(dict(reversed(CAPACITIES.items())), buffer=buffer)
        again.load_state_dict(state)
        assert again.state_dict() == packer.state_dict()
        assert push_all(again, samples, number) == whole[done:], f"resume before sample {number} diverges"
        done += len(list(packer.push(str(number), {"tokens": tokens, "images": images})))


def test_a_state_saved_while_packs_are_taken_has_lost_nothing() -> None:
    packer = OnlinePacker({"tokens": 10}, buffer=2)
    for n in range(2):
        list(packer.push(str(n), {"tokens": 6}))
    packs = packer.push("2", {"tokens": 6})  # decided when pushed, not when taken
    state = packer.state_dict()
    taken = list(packs)
    assert packer.state_dict() == state
    assert sorted(key for pack in taken for key in pack) + [row[0] for row in state["waiting"]] == ["0", "1", "2"]


def test_the_order_of_limits_does_not_matter() -> None:
    state_of = []
    for names in (("tokens", "images"), ("images", "tokens")):
        packer = OnlinePacker({name: CAPACITIES[name] for name in names}, buffer=5)
        list(packer.push("a", {"tokens": 40, "images": 1}))
        state_of.append(packer.state_dict())
    assert state_of[0] == state_of[1]


@pytest.mark.parametrize(
    "change",
    [
        {"capacities": {"tokens": 51, "images": 4}},
        {"capacities": {"tokens": 50}},
        {"capacities": {"tokens": 50, "frames": 4}},
        {"buffer": 6},
        {"version": 2},
        {"more": 1},
        {"waiting": None},
        {"waiting": [["a", 1]]},
        {"waiting": [["a", 1, 2, 3]]},
        {"waiting": [["a", 5, 51]]},
        {"waiting": [["a", 1, -1]]},
        {"waiting": [["a", 1, 2.5]]},
        {"waiting": [[3, 1, 2]]},
        {"waiting": "ab"},
        {"waiting": [[]]},
    ],
)
def test_foreign_states_are_refused_and_change_nothing(change: dict[str, Any]) -> None:
    packer = OnlinePacker(CAPACITIES, buffer=5)
    list(packer.push("kept", {"tokens": 1, "images": 1}))
    before = packer.state_dict()
    with pytest.raises(ArtifactError, match="state of the online packer"):
        packer.load_state_dict({**before, **change})
    assert packer.state_dict() == before


@pytest.mark.parametrize("name", ["version", "capacities", "buffer", "waiting"])
def test_states_with_a_part_missing_are_refused(name: str) -> None:
    packer = OnlinePacker(CAPACITIES, buffer=5)
    state = packer.state_dict()
    del state[name]
    with pytest.raises(ArtifactError):
        packer.load_state_dict(state)


@pytest.mark.parametrize(
    ("capacities", "buffer"),
    [
        ({}, 4),
        ({"tokens": 0}, 4),
        ({"tokens": 2.5}, 4),
        ({"tokens": True}, 4),
        ({"tokens": 5}, 0),
        ({"tokens": 5}, 1.5),
    ],
)
def test_limits_are_checked(capacities: Any, buffer: Any) -> None:
    with pytest.raises(ConfigError):
        OnlinePacker(capacities, buffer=buffer)


@pytest.mark.parametrize(
    "costs", [{"tokens": 51, "images": 0}, {"tokens": -1, "images": 0}, {"tokens": 5}, {"tokens": 2.5, "images": 1}]
)
def test_samples_that_fit_no_pack_are_refused_and_not_kept(costs: Any) -> None:
    packer = OnlinePacker(CAPACITIES, buffer=4)
    with pytest.raises(ConfigError, match="sample odd"):
        packer.push("odd", costs)
    assert len(packer) == 0
    list(packer.push("good", {"tokens": np.int64(5), "images": np.int32(1)}))
    assert json.loads(json.dumps(packer.state_dict()))["waiting"]


def test_fill_is_better_than_next_fit_and_grows_with_the_buffer() -> None:
    tokens = lvis_like(2_500)["tokens"]
    packs = []
    for buffer in (32, 128, 512):
        packer = OnlinePacker({"tokens": 20_000}, buffer=buffer)
        made = [pack for n, size in enumerate(tokens.tolist()) for pack in packer.push(str(n), {"tokens": size})]
        packs.append(len(made + list(packer.flush())))
    next_fit = pack_arrays({"tokens": tokens}, {"tokens": 20_000}, "next_fit", seed=None).num_packs
    assert packs[2] <= packs[1] <= packs[0] < next_fit
    assert tokens.sum() / (packs[2] * 20_000) > 0.985
