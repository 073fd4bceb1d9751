"""Half-precision weights on two ranks, as DDP and sharded by FSDP2: masters are sharded and saved as weights are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import dataset, difference, losses, model_of, shared, trainer_of, weights, whole, write_samples
from test_trainer_sharded import FAMILY, answered, as_launched, fresh, launch, options_of, packs

from packtrain.training.masters import MASTER, masters_of
from packtrain.training.step_settings import StepSettings

pytestmark = [pytest.mark.contract, pytest.mark.full]
WAYS = ("ddp", "fsdp")
STEPS = 5
# At a rate at which half-precision weights alone would hardly move; and with an epsilon beside which the rounding of
# gradients that are nearly 0 stays small.
RATE: dict[str, Any] = {"learning_rate": 1e-3, "adam_epsilon": 0.1, "lr_scheduler_type": "constant"}


def train(place: str, folder: str, way: str, checkpoint: str | None = None, *, masters: bool | None = None) -> Any:
    """What was found of a run: losses, weights, masters, how many of them are sharded, and warnings."""
    step = StepSettings(loss_chunk=16, master_weights=masters)
    trainer = trainer_of(
        packs(place), Path(folder), model_of(FAMILY, dropout=0.0).to(torch.bfloat16),
        parts={"watch_deadline": 30.0, "step": step}, save_steps=3, max_steps=STEPS, **RATE, **options_of(way),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=checkpoint)
    optimizer = masters_of(trainer.optimizer)
    named = {id(weight): name for name, weight in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}
    found, sharded = {}, 0
    for weight, state in (optimizer.state if optimizer is not None else {}).items():
        sharded += all(hasattr(state[name], "full_tensor") for name in (MASTER, "exp_avg", "exp_avg_sq"))
        assert {one.dtype for one in state.values()} == {torch.float32}
        found[named[id(weight)]] = whole(state[MASTER]).detach().clone()
    return losses(trainer), weights(trainer), found, sharded, [str(one.message) for one in said]


def runs_of(rank: int, world_size: int, place: str, folder: str, way: str) -> str:
    as_launched(rank, world_size)
    made = {}
    for name, options in {
        "whole": {},
        "resumed": {"checkpoint": f"{folder}/{way}-whole/checkpoint-3"},
        "plain": {"masters": False},
        "from plain": {"checkpoint": f"{folder}/{way}-plain/checkpoint-3"},
        "plain from masters": {"checkpoint": f"{folder}/{way}-whole/checkpoint-3", "masters": False},
    }.items():
        fresh(way)
        made[name] = train(place, f"{folder}/{way}-{name.replace(' ', '-')}", way, **options)  # type: ignore[arg-type]
    return answered(made, f"{folder}/{way}-{rank}.pt")


@pytest.fixture(scope="module")
def place() -> Path:
    """Data, measured before any process group is there."""
    made = shared() / "sharded"
    write_samples(made)
    dataset(FAMILY, folder=made)
    return made


@pytest.fixture(scope="module", params=WAYS)
def runs(request: pytest.FixtureRequest, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("masters")
    return request.param, launch(2, runs_of, str(place), str(folder), request.param, folder=folder / "meeting")


def test_masters_are_sharded_as_weights_are(runs: Any) -> None:
    way, ranks = runs
    for rank in ranks:
        _, final, masters, sharded, _ = rank["whole"]
        assert masters.keys() == final.keys()
        assert sharded == (len(final) if way == "fsdp" else 0)
        for name, master in masters.items():
            assert torch.equal(final[name], master.to(torch.bfloat16))
        finer = [name for name, master in masters.items() if not torch.equal(final[name].float(), master)]
        assert len(finer) > 0.9 * len(masters), "or nothing was tested"


def test_resumed_it_is_the_same_bit_by_bit(runs: Any) -> None:
    _, ranks = runs
    for rank in ranks:
        for one, other in zip(rank["whole"][1:3], rank["resumed"][1:3], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert rank["whole"][0] == rank["resumed"][0]


def test_a_checkpoint_without_masters_is_resumed_and_said(runs: Any) -> None:
    _, ranks = runs
    for rank in ranks:
        found, final, masters, _, said = rank["from plain"]
        assert any("no fp32 masters" in one for one in said)
        assert not any("no fp32 masters" in one for one in rank["resumed"][4])
        assert {step: found[step] for step in (1, 2, 3)} == {step: rank["plain"][0][step] for step in (1, 2, 3)}
        assert masters.keys() == final.keys()


def test_and_one_with_masters_by_a_run_without(runs: Any) -> None:
    way, ranks = runs
    for rank in ranks:
        found, _, masters, _, said = rank["plain from masters"]
        assert not masters
        assert any("fp32 masters, which are ignored" in one for one in said) == (way == "fsdp")
        assert {step: found[step] for step in (1, 2, 3)} == {step: rank["whole"][0][step] for step in (1, 2, 3)}
        assert len(found) == STEPS


def test_both_ways_learn_the_same_as_one_process(runs: Any, place: Path, tmp_path: Path) -> None:
    way, ranks = runs
    alone = trainer_of(
        dataset(FAMILY, folder=place), tmp_path, model_of(FAMILY, dropout=0.0).to(torch.bfloat16), save_strategy="no",
        max_steps=STEPS, max_grad_norm=0.0, **RATE,
    )  # fmt: skip
    start = weights(alone)
    alone.train()
    optimizer = masters_of(alone.optimizer)
    assert optimizer is not None
    wanted = {name: optimizer.state[weight][MASTER] for name, weight in alone.model.named_parameters()}
    moved = difference(wanted, start)
    assert difference(ranks[0]["whole"][2], wanted) < 0.1 * moved, way
