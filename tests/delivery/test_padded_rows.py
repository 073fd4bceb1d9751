"""Several packs in one batch, a row each: the same packs and promises as with one, for any number of rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_packs import PADDED, content, loader_of, plan_of, source_of
from small_training import Model, Packs, PackTrainer, arguments, same, weights
from torch.utils.data import DataLoader

from packtrain.core.errors import ConfigError
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.delivery.loader.pack_loader import PackLoader, PackStream
from packtrain.delivery.loader.sampler import PackSampler
from packtrain.delivery.trainers.mixin import check_arguments, trainer_arguments
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.schedule import EMPTY_PACK, Schedule

WORKERS = [0, 2]


def packs_of(batches: Any) -> list[int]:
    return [key.pack for batch in batches for key in batch.info.keys if key.pack != EMPTY_PACK]


# ---- delivery


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("world_size", "rows"), [(1, 3), (2, 2), (3, 4)])
def test_every_pack_is_a_row_once_in_each_epoch(world_size: int, rows: int, workers: int) -> None:
    plan = plan_of(13, 7)
    ranks = [
        loader_of(plan, 6, rank=rank, world_size=world_size, rows_per_batch=rows, num_workers=workers)
        for rank in range(world_size)
    ]
    for epoch in range(2):
        delivered = [list(rank) for rank in ranks]
        assert len({len(batches) for batches in delivered}) == 1, "ranks have as many micro-batches as each other"
        assert sorted(pack for batches in delivered for pack in packs_of(batches)) == list(
            range(plan.epoch(epoch).num_packs)
        )
        for batch in (batch for batches in delivered for batch in batches):
            real = [key for key in batch.info.keys if key.pack != EMPTY_PACK]
            assert len(batch.info.keys) == rows
            assert {key.epoch for key in batch.info.keys} == {epoch}
            assert len(batch["input_ids"]) == max(1, len(real)), "what only fills up is no row"
            assert batch.info.rows == tuple(key.pack for key in real)
            assert (batch.info.supervised_tokens > 0) == bool(real)


def test_the_rows_of_a_batch_are_neighbours_in_the_order_of_the_step() -> None:
    plan = plan_of(24)
    for balance in ("random", "length"):
        schedule = Schedule(plan, packs_per_step=12, balance=balance)
        for number in range(2):
            order = schedule.step(0, number).tolist()
            for rank in range(2):
                for micro_batch, turn in enumerate(PackSampler(schedule, rank, 2, rows_per_batch=3).micro_batches()):
                    if turn.keys[0].step != number:
                        continue
                    places = [order.index(key.pack) for key in turn.keys]
                    assert sorted(places) == list(range(min(places), min(places) + 3))
                    assert micro_batch % 2 == turn.keys[0].micro_batch


def test_a_step_is_the_same_packs_whatever_the_rows() -> None:
    plan = plan_of(22, 9)

    def steps(rows: int) -> dict[tuple[int, int], set[int]]:
        found: dict[tuple[int, int], set[int]] = {}
        loader = loader_of(plan, 8, rows_per_batch=rows, span="run")
        for batch in loader:
            for key in batch.info.keys:
                found.setdefault((key.epoch, key.step), set()).add(key.pack)
        return {step: packs - {EMPTY_PACK} for step, packs in found.items()}

    assert len(steps(1)) == 5
    assert steps(1) == steps(2) == steps(3) == steps(8) == steps(11)


def test_lengths_and_steps_are_known_before() -> None:
    loader = loader_of(plan_of(10, 3), packs_per_step=8, rank=0, world_size=2, rows_per_batch=3)
    assert (loader.accumulation, loader.num_steps) == (2, 3)
    for epoch, micro_batches in ((0, 3), (1, 1)):
        loader.set_epoch(epoch)
        assert len(loader) == micro_batches == len(list(loader))
    run = loader_of(plan_of(10, 3), packs_per_step=8, rank=0, world_size=2, rows_per_batch=3, span="run")
    assert len(run) == 6
    assert [batch.info.keys[0].last for batch in run] == [False, True] * 3


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    plan = plan_of(19, 5)
    streams = [
        [content(batch) for _ in range(2) for batch in loader]
        for loader in (loader_of(plan, 6, rank=1, world_size=2, rows_per_batch=2, num_workers=w) for w in (0, 1, 2))
    ]
    assert len(streams[0]) > 4
    assert streams[0] == streams[1] == streams[2]


# ---- states


@pytest.mark.parametrize("span", ["epoch", "run"])
@pytest.mark.parametrize(("world_size", "size", "rows"), [(1, 4, 2), (2, 9, 2), (3, 10, 4)])
def test_resumes_exactly_at_every_step(span: Any, world_size: int, size: int, rows: int) -> None:
    plan = plan_of(23, 11)

    def make(rank: int) -> PackLoader:
        return loader_of(plan, size, rank=rank, world_size=world_size, rows_per_batch=rows, span=span)

    for rank in range(world_size):
        whole, states, loader = [], [], make(rank)
        for batch in loader:
            whole.append(content(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert len(whole) == len(make(rank)) > 2
        for step, state in enumerate(states[:-1]):
            again = make(rank)
            again.load_state_dict(state)
            rest = [content(batch) for batch in again]
            begin = 1 + states.index(state)  # micro-batches in which no rank has a pack are no progress
            assert all(key.pack == EMPTY_PACK for keys, _ in whole[begin : step + 1] for key in keys)
            assert rest == whole[begin:], f"resume behind step {step} diverges"


@settings(max_examples=60, deadline=None)
@given(
    packs=st.integers(1, 40),
    size=st.integers(1, 12),
    before=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stop=st.integers(0, 12),
)
def test_saved_with_some_rows_and_continued_with_others(
    packs: int, size: int, before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    schedule = Schedule(plan_of(packs), packs_per_step=size)

    def turns(world_size: int, rows: int, next_pack: int) -> list[list[tuple[PackKey, ...]]]:
        samplers = [PackSampler(schedule, rank, world_size, rows_per_batch=rows) for rank in range(world_size)]
        for sampler in samplers:
            sampler.seek(0, next_pack)
        found = [list(sampler.micro_batches()) for sampler in samplers]
        positions = [[turn.next_pack for turn in rank] for rank in found]
        assert all(one == positions[0] for one in positions)
        reached.append(positions[0])
        return [[turn.keys for turn in rank] for rank in found]

    reached: list[list[int]] = []
    first = turns(*before, 0)
    stop = min(stop, len(first[0]))
    next_pack = reached[0][stop - 1] if stop else 0
    trained = Counter(key.pack for rank in first for keys in rank[:stop] for key in keys)
    trained.update(key.pack for rank in turns(*after, next_pack) for keys in rank for key in keys)
    del trained[EMPTY_PACK]
    assert trained == Counter(range(packs))


def test_rows_are_no_part_of_the_state() -> None:
    plan = plan_of(12)
    states = [loader_of(plan, 4, rows_per_batch=rows).state_dict() for rows in (1, 2)]
    assert states[0] == states[1]


# ---- streams


@pytest.mark.parametrize("workers", WORKERS)
def test_a_stream_gives_the_rows_of_each_batch_one_after_the_other(workers: int) -> None:
    plan = plan_of(17)
    schedule = Schedule(plan, packs_per_step=5, seed=3)
    wanted = [content(batch) for batch in loader_of(plan, 5, rows_per_batch=2)]
    stream = PackStream(source_of(plan), schedule, rows_per_batch=2)
    assert len(stream) == 2 * len(wanted)
    found = DataLoader(stream, batch_size=2, collate_fn=PADDED, num_workers=workers)
    assert [content(batch) for batch in found] == wanted


def test_a_batch_of_which_some_rows_were_given_begins_again() -> None:
    plan = plan_of(12)
    schedule = Schedule(plan, packs_per_step=6)
    stream = PackStream(source_of(plan), schedule, rows_per_batch=3)
    rows = iter(stream)
    given_out = [next(rows).key.pack for _ in range(4)]
    assert stream.state_dict()["next_pack"] == 3
    again = PackStream(source_of(plan), schedule, rows_per_batch=3)
    again.load_state_dict(stream.state_dict())
    assert sorted(given_out[:3] + [row.key.pack for row in again]) == list(range(12))


# ---- what cannot be


@pytest.mark.parametrize("rows", [0, -2, True, 1.5, "2"])
def test_rows_are_checked(rows: Any) -> None:
    with pytest.raises(ConfigError, match="rows_per_batch"):
        PackSampler(Schedule(plan_of(2), packs_per_step=1), rows_per_batch=rows)


def test_packed_rows_are_not_put_together() -> None:
    from made_packs import COLLATOR

    loader = PackLoader(source_of(plan_of(4)), Schedule(plan_of(4), packs_per_step=4), COLLATOR, rows_per_batch=2)
    with pytest.raises(ConfigError, match="2 packs in one batch"):
        next(iter(loader))


# ---- under Trainer


class PaddedPacks(Packs):
    """A dataset of padded batches of three rows."""

    rows_per_batch = 3

    def get_collator(self) -> Any:
        return PADDED

    def loader(self, **options: Any) -> PackLoader:
        options["collator"] = None
        return super().loader(**options, rows_per_batch=self.rows_per_batch)


def padded_trainer(plan: PackPlan, folder: Path, **given: Any) -> PackTrainer:
    data = PaddedPacks(plan, 6)
    derived = trainer_arguments(data.schedule, rows_per_batch=data.rows_per_batch)
    args = arguments(folder, **{**derived, "save_strategy": "no", **given})
    return PackTrainer(model=Model(given.pop("dropout", 0.3)), args=args, train_dataset=data)


@pytest.mark.contract
def test_trainer_trains_every_row(tmp_path: Path) -> None:
    plan = plan_of(14, 9)
    trainer = padded_trainer(plan, tmp_path)
    seen: list[int] = []
    collate = trainer.data_collator

    def noted(rows: Any) -> Any:
        seen.extend(row.key.pack + 100 * row.key.epoch for row in rows if row.key.pack != EMPTY_PACK)
        return collate(rows)

    loader = trainer.get_train_dataloader()
    loader.collate_fn = noted
    trainer.get_train_dataloader = lambda: loader  # type: ignore[method-assign]
    trainer.train()
    assert trainer.state.global_step == 3 + 2
    assert sorted(seen) == [*range(14), *range(100, 109)]


@pytest.mark.contract
def test_trainer_resumes_padded_batches_exactly(tmp_path: Path) -> None:
    plan = plan_of(14, 9)
    whole = padded_trainer(plan, tmp_path / "whole", save_strategy="steps", save_steps=1)
    whole.train()
    again = padded_trainer(plan, tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.state.global_step == whole.state.global_step
    assert same(weights(whole), weights(again))


def test_arguments_of_padded_batches_are_derived_and_demanded(tmp_path: Path) -> None:
    schedule = Schedule(plan_of(40), packs_per_step=12)
    found = trainer_arguments(schedule, world_size=2, rows_per_batch=4)
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == (4, 2)
    args = arguments(tmp_path, **trainer_arguments(schedule, world_size=1, rows_per_batch=4))
    check_arguments(args, schedule, world_size=1, rows_per_batch=4)
    for rows in (1, 3):
        with pytest.raises(ConfigError, match=f"per_device_train_batch_size: 4 instead of {rows}"):
            check_arguments(args, schedule, world_size=1, rows_per_batch=rows)


def test_the_gradient_is_that_of_the_rows_one_by_one(tmp_path: Path) -> None:
    """With dropout off, a step of two batches of three rows trains as six batches of one row do."""
    plan = plan_of(12)

    class OneByOne(PaddedPacks):
        rows_per_batch = 1

    trained = []
    for kind in (PaddedPacks, OneByOne):
        data = kind(plan, 6)
        derived = trainer_arguments(data.schedule, rows_per_batch=data.rows_per_batch)
        args = arguments(tmp_path / kind.__name__, **derived, save_strategy="no")
        trainer = PackTrainer(model=Model(dropout=0.0), args=args, train_dataset=data)
        trainer.train()
        trained.append(torch.cat([weight.ravel() for weight in weights(trainer)]))
    start = torch.cat([weight.detach().ravel() for weight in Model(dropout=0.0).parameters()])
    assert (trained[0] - start).abs().max() > 1e-2
    assert torch.allclose(*trained, atol=1e-5)
