"""Several ranks, as DDP and sharded by FSDP2: the same gradients, checkpoints that go on anywhere, and a common end."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import (
    SAMPLES,
    Gradients,
    dataset,
    difference,
    losses,
    model_of,
    shared,
    trainer_of,
    weights,
    write_samples,
)

from packtrain.core.errors import MemoryLimitError
from packtrain.training.checkpoints import find_latest
from packtrain.training.meter import Meter

sys.path.append(str(Path(__file__).parents[1] / "delivery"))
from processes import run_ranks

pytestmark = [pytest.mark.contract, pytest.mark.full]
FAMILY = "qwen3_vl"
TOLERANCE = 1e-5
WAYS = ("ddp", "fsdp")
WRAPPED = ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]
# Adam divides a gradient by its own size, so the rounding of one that is nearly 0 becomes a whole step. Beside a large
# epsilon it does not: rounding stays as small as it is, and the optimizer still has states that may be lost.
SMOOTH: dict[str, Any] = {"lr_scheduler_type": "constant", "learning_rate": 0.1, "adam_epsilon": 0.1}


# ---- what runs on each rank


def as_launched(rank: int, world_size: int) -> None:
    """The environment that a launcher sets; the process group is there already."""
    torch.set_num_threads(1)
    _restore_to_cpu()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}


@functools.cache
def _restore_to_cpu() -> None:
    """Ranks on CPUs are "cpu:0" to accelerate, and torch 2.11 restores checkpoints to "cpu" only."""
    torch.serialization.register_package(
        5, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
    )


@functools.cache
def shard_on_cpus() -> None:
    """Accelerate shards on GPUs only, and would quietly replicate here: let it take CPUs for devices that can."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    ordinary = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        ordinary(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init


def options_of(way: str) -> dict[str, Any]:
    options: dict[str, Any] = {"ddp_backend": "gloo", "max_grad_norm": 0.0}
    if way.startswith("fsdp"):
        config = {"transformer_layer_cls_to_wrap": WRAPPED, "version": 2}
        options |= {"fsdp": True, "fsdp_config": config}
    return options


def fresh(way: str) -> None:
    """Accelerate keeps its state for the whole process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if way.startswith("fsdp"):
        shard_on_cpus()


def packs(place: str, **settings: Any) -> Any:
    return dataset(FAMILY, folder=Path(place), **settings)


def gradients(rank: int, world_size: int, place: str, folder: str, way: str, **settings: Any) -> Any:
    as_launched(rank, world_size)
    fresh(way)
    seen = Gradients()
    model = model_of(FAMILY, dropout=0.0)
    parts = {"callbacks": [seen], "watch_deadline": 30.0, "packing_check": settings.get("packing", True)}
    trainer = trainer_of(
        packs(place, epochs=1, **settings), Path(folder), model, parts=parts, save_strategy="no", max_steps=1,
        **options_of(way),
    )  # fmt: skip
    trainer.train()
    sharded = sum(hasattr(weight, "full_tensor") for weight in trainer.model.parameters())
    ids = [name for some in trainer.trained for name in some]
    return ids, seen.found, sharded, len(list(trainer.model.parameters())), losses(trainer)


def train(
    rank: int,
    world_size: int,
    place: str,
    folder: str,
    way: str,
    checkpoint: str | None = None,
    steps: int | None = None,
) -> Any:
    """A whole run, or up to a step; what was trained, every loss and the final weights."""
    as_launched(rank, world_size)
    fresh(way)
    given = {"max_steps": steps} if steps is not None else {}
    trainer = trainer_of(
        packs(place), Path(folder), model_of(FAMILY, dropout=0.0), **SMOOTH,
        parts={"watch_deadline": 30.0, "eval_dataset": packs(place, epochs=1, packing=False)}, eval_strategy="steps",
        eval_steps=4, save_steps=3, **options_of(way), **given,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    exported, final = trainer.whole_state_dict(), weights(trainer)  # all ranks take part
    assert (exported is None) == (way == "ddp")
    assert not exported or all(torch.equal(exported[name], final[name]) for name in final)
    assert rank or exported != {}, "the first rank has all of it"
    evaluated = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    return trainer.trained, losses(trainer), final, evaluated


def all_gradients(rank: int, world_size: int, place: str, folder: str) -> str:
    """One start of processes for all of them, since that is what takes long."""
    found = {
        f"{way} {name}": gradients(rank, world_size, place, f"{folder}/gradients", way, **settings)
        for way in WAYS
        for name, settings in LAYOUTS.items()
    }
    return answered(found, f"{folder}/gradients-{rank}.pt")


def whole_and_resumed(rank: int, world_size: int, place: str, folder: str, way: str) -> str:
    found = {
        "whole": train(rank, world_size, place, f"{folder}/{way}", way),
        "resumed": train(rank, world_size, place, f"{folder}/{way}-2", way, f"{folder}/{way}/checkpoint-3"),
    }
    return answered(found, f"{folder}/{way}-{rank}.pt")


def resumed(rank: int, world_size: int, place: str, folder: str, way: str, checkpoint: str) -> str:
    return answered(train(rank, world_size, place, folder, way, checkpoint), f"{folder}/answer-{rank}.pt")


def answered(found: Any, path: str) -> str:
    """Through a file: tensors that are handed over by a process must not outlive it."""
    torch.save(found, path)
    return path


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed in one micro-batch": {"packing_length": 1024, "packs_per_step": 2},
    "packed in many": {"packs_per_step": 15},
    "padded": {"packing": False, "packs_per_step": SAMPLES},
    "padded in rows": {"packing": False, "packs_per_step": SAMPLES, "rows_per_batch": 4},
}


# ---- the tests


def launch(world_size: int, target: Any, *args: Any, folder: Path, seconds: float = 120) -> list[Any]:
    answers = run_ranks(world_size, target, world_size, *args, folder=folder, seconds=seconds)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [torch.load(answer, weights_only=False) if isinstance(answer, str) else answer for answer in answers]


@pytest.fixture(scope="module")
def place() -> Path:
    """Data, measured before any process group is there."""
    made = shared() / "sharded"
    write_samples(made)
    for settings in ({}, {"epochs": 1, "packing": False}, *({"epochs": 1, **one} for one in LAYOUTS.values())):
        dataset(FAMILY, folder=made, **settings)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def ranks(place: Path, folder: Path) -> list[dict[str, Any]]:
    """The gradients of both ranks, in every way and layout."""
    return launch(2, all_gradients, str(place), str(folder), folder=folder / "meeting")


@functools.cache
def runs(way: str, place: Path, folder: Path) -> list[dict[str, Any]]:
    """A whole run on two ranks, and one that was resumed."""
    return launch(2, whole_and_resumed, str(place), str(folder), way, folder=folder / f"meeting-{way}")


@pytest.fixture(scope="module")
def alone(place: Path, folder: Path) -> Any:
    """The same on one process, in this one."""
    seen = Gradients()
    data = dataset(FAMILY, folder=place, epochs=1, **LAYOUTS["packed in many"])
    trainer = trainer_of(
        data, folder / "alone", model_of(FAMILY, dropout=0.0), parts={"callbacks": [seen]}, save_strategy="no",
        max_steps=1, max_grad_norm=0.0,
    )  # fmt: skip
    trainer.train()
    run = trainer_of(
        dataset(FAMILY, folder=place), folder / "one", model_of(FAMILY, dropout=0.0), **SMOOTH,
        parts={"eval_dataset": dataset(FAMILY, folder=place, epochs=1, packing=False)}, eval_strategy="steps",
        eval_steps=4, max_grad_norm=0.0,
    )  # fmt: skip
    run.train()
    return seen.found, run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], alone: Any, way: str, layout: str) -> None:
    answers = [rank[f"{way} {layout}"] for rank in ranks]
    assert sorted(name for answer in answers for name in answer[0]) == sorted(f"r{n}" for n in range(SAMPLES))
    for _, found, sharded, parameters, _ in answers:
        assert difference(found, alone[0]) < TOLERANCE
        assert sharded == (parameters if way == "fsdp" else 0), "really sharded, the vision encoder too"


@pytest.mark.parametrize("way", WAYS)
def test_a_run_on_two_ranks_is_that_of_one(place: Path, folder: Path, alone: Any, way: str) -> None:
    wanted = losses(alone[1])
    for trained, found, final, evaluated in (rank["whole"] for rank in runs(way, place, folder)):
        assert len(trained) == 2 * len(wanted)
        assert found == pytest.approx(wanted, rel=TOLERANCE)
        assert difference(final, weights(alone[1])) < TOLERANCE
        logged = {line["step"]: line["eval_loss"] for line in alone[1].state.log_history if "eval_loss" in line}
        assert evaluated == pytest.approx(logged, rel=TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
def test_resumed_on_as_many_ranks_it_is_the_same_bit_by_bit(place: Path, folder: Path, way: str) -> None:
    for rank in runs(way, place, folder):
        trained, found, final, _ = rank["resumed"]
        all_trained, all_found, all_final, _ = rank["whole"]
        assert trained == all_trained[2 * 3 :]
        assert found == all_found
        assert all(torch.equal(final[name], all_final[name]) for name in final)


# ---- steps without pictures

FEW: dict[str, Any] = {"packs_per_step": 2, "epochs": 1, "seed": 3}  # pictures in its last two steps of five alone
DECAYING: dict[str, Any] = {**SMOOTH, "weight_decay": 0.1, "save_steps": 2}


def few_pictures(rank: int, world_size: int, place: str, folder: str, half: bool) -> str:
    """The weights after each checkpoint of runs with pictures in some steps, and of those that were resumed."""
    as_launched(rank, world_size)
    found = {}
    for way in WAYS:
        for name, checkpoint in (("whole", None), ("resumed", f"{folder}/{way}-whole/checkpoint-2")):
            fresh(way)
            model = model_of(FAMILY, dropout=0.0)
            trainer = trainer_of(
                packs(place, **FEW), Path(folder, f"{way}-{name}"), model.to(torch.bfloat16) if half else model,
                parts={"watch_deadline": 30.0}, **DECAYING, **options_of(way),
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=checkpoint)
            found[way, name] = losses(trainer), weights(trainer)
    return answered(found, f"{folder}/few-{rank}.pt")


@pytest.mark.parametrize("half", [False, True])
def test_a_step_without_pictures_on_any_rank_leaves_the_vision_encoder_alone(tmp_path: Path, half: bool) -> None:
    place = shared() / "few-pictures"
    write_samples(place, every=12)
    data = dataset(FAMILY, folder=place, **FEW)
    one = trainer_of(
        data, tmp_path / "one", model_of(FAMILY, dropout=0.0), max_grad_norm=0.0, **DECAYING
    )  # fmt: skip
    one.train()
    checkpoint = load_file(tmp_path / "one" / "checkpoint-2" / "model.safetensors")
    before = model_of(FAMILY, dropout=0.0).state_dict()
    assert all(torch.equal(checkpoint[name], before[name]) for name in checkpoint if ".visual." in name)
    for rank in launch(2, few_pictures, str(place), str(tmp_path), half, folder=tmp_path / "meeting"):
        for way in WAYS:
            whole, again = rank[way, "whole"], rank[way, "resumed"]
            assert half or difference(whole[1], weights(one)) < TOLERANCE
            assert whole[0] == again[0]
            assert all(torch.equal(whole[1][name], again[1][name]) for name in whole[1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.more)])
def test_resumed_on_another_number_of_ranks(
    place: Path, folder: Path, tmp_path: Path, way: str, world_size: int
) -> None:
    ranks, checkpoint = runs(way, place, folder), str(folder / way / "checkpoint-3")
    again = launch(world_size, resumed, str(place), str(tmp_path), way, checkpoint, folder=tmp_path / "meeting")
    names = [name for answer in again for ids in answer[0] for name in ids]
    before = [name for rank in ranks for ids in rank["whole"][0][: 2 * 3] for name in ids]
    assert Counter(names) + Counter(before) == Counter({f"r{n}": 2 for n in range(SAMPLES)}), "each once an epoch"
    wanted = ranks[0]["whole"]
    for _, found, final, _ in again:
        assert found == pytest.approx(wanted[1], rel=TOLERANCE)
        assert difference(final, wanted[2]) < TOLERANCE


# ---- ends


def interrupted(rank: int, world_size: int, place: str, folder: str) -> Any:
    as_launched(rank, world_size)
    fresh("ddp")
    from transformers import TrainerCallback

    class Send(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == 1 and state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    # Handlers belong to the main thread, which this is.
    parts = {"callbacks": [Send()], "watch_deadline": 30.0}
    trainer = trainer_of(
        packs(place), Path(folder), model_of(FAMILY), parts=parts, save_strategy="no", **options_of("ddp")
    )
    sums = sums_at_step_ends(trainer)
    trainer.train()
    return (trainer.interrupted, trainer.state.global_step, sums), interrupted_in_evaluation(rank, place, folder)


def sums_at_step_ends(trainer: Any) -> list[int]:
    """For how many sums over the ranks the host waits at the end of each step."""
    import torch.distributed as dist

    found: list[int] = []
    real, ended = dist.all_reduce, trainer.callback_handler.on_step_end

    def all_reduce(*args: Any, **options: Any) -> Any:
        found[-1] += 1
        return real(*args, **options)

    def on_step_end(*args: Any, **options: Any) -> Any:
        found.append(0)
        dist.all_reduce = all_reduce
        try:
            return ended(*args, **options)
        finally:
            dist.all_reduce = real

    trainer.callback_handler.on_step_end = on_step_end
    return found


def interrupted_in_evaluation(rank: int, place: str, folder: str) -> Any:
    """A signal comes to the second rank with the third batch of the evaluation after the second step."""
    parts = {"watch_deadline": 30.0, "eval_dataset": packs(place, epochs=1, packing=False)}
    options = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, **options_of("ddp")}
    trainer = trainer_of(packs(place), Path(folder, "evaluated"), model_of(FAMILY), parts=parts, **options)
    real, batches = trainer._sum_of, list[int]()

    def sum_of(model: Any, inputs: Any) -> Any:
        batches.append(1)
        if rank == 1 and len(batches) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, inputs)

    trainer._sum_of = sum_of
    trainer.train()
    evaluated = [line for line in trainer.state.log_history if "eval_loss" in line]
    return trainer.interrupted, trainer.state.global_step, len(batches), evaluated


def test_a_signal_to_one_rank_ends_all_of_them_at_the_same_step(place: Path, tmp_path: Path) -> None:
    answers = launch(2, interrupted, str(place), str(tmp_path), folder=tmp_path / "meeting")
    ends, evaluations = zip(*answers, strict=True)
    assert ends == (("a signal to another rank", 3, [1, 1, 1]), ("SIGTERM", 3, [1, 1, 1])), "and one sum is enough"
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, found.world_size) == (3, 2)
    assert (found.path / "rng_state_1.pth").exists()
    # In an evaluation they ask before each batch, and hear what was said before the last: 12 would have been all.
    assert evaluations == (("a signal to another rank", 2, 4, []), ("SIGTERM", 2, 4, []))
    assert [path.name for path in (tmp_path / "evaluated").glob("checkpoint-*")] == ["checkpoint-2"]


def unsharded(rank: int, world_size: int, place: str, folder: str) -> Any:
    """Without `shard_on_cpus` accelerate would train whole copies."""
    as_launched(rank, world_size)
    fresh("ddp")
    trainer_of(packs(place), Path(folder), model_of(FAMILY), **options_of("fsdp"))


def test_sharding_that_accelerate_does_not_do_is_refused(place: Path, tmp_path: Path) -> None:
    for answer in run_ranks(2, unsharded, 2, str(place), str(tmp_path), folder=tmp_path / "meeting"):
        assert "2 processes on cpu, on which accelerate does not shard weights" in str(answer)


def out_of_memory(rank: int, world_size: int, place: str, folder: str) -> Any:
    # The process that these are forked from may have the standard error of an earlier test.
    os.dup2(os.open(Path(folder, f"stderr-{rank}"), os.O_WRONLY | os.O_CREAT), 2)
    as_launched(rank, world_size)
    fresh("ddp")
    model = model_of(FAMILY)

    def forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if rank == 1 and model.steps == 2:
            raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB")

    model.steps = 0
    model.register_forward_pre_hook(forward, with_kwargs=True)

    def count(said: Any) -> None:
        model.steps = said

    class Steps(Meter):
        def end(self, **facts: Any) -> int:
            return facts["step"]

    parts = {"meter": Steps(), "on_step": count, "watch_deadline": 6.0}
    trainer = trainer_of(packs(place), Path(folder), model, parts=parts, save_strategy="no", **options_of("ddp"))
    try:
        trainer.train()
    except MemoryLimitError as error:
        Path(folder, f"said-{rank}").write_text(str(error))
        raise
    return "nothing happened"


def test_a_rank_without_memory_ends_the_others(place: Path, tmp_path: Path) -> None:
    try:
        answers = run_ranks(2, out_of_memory, 2, str(place), str(tmp_path), folder=tmp_path / "meeting")
    except EOFError:  # the other rank has ended without a word to us, and does not wait for ever
        said = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(2))
        assert "failed: MemoryLimitError: rank 1, step 3: out of memory in forward and backward" in said
        assert "rank 0 on" in said
    else:  # it noticed the loss of its neighbour by itself, before it was told
        assert all(isinstance(answer, Exception) for answer in answers), answers
    assert "rank 1, step 3: out of memory" in (tmp_path / "said-1").read_text()


def save_with_fault(rank: int, world_size: int, place: str, folder: str) -> Any:
    as_launched(rank, world_size)
    fresh("ddp")
    trainer = trainer_of(
        packs(place), Path(folder), model_of(FAMILY), parts={"watch_deadline": 30.0}, **options_of("ddp")
    )
    real = trainer._save_rng_state

    def fail(path: str) -> None:
        if rank == 1 and trainer.state.global_step == 2:
            raise OSError(28, "No space left on device")
        real(path)

    trainer._save_rng_state = fail
    trainer.train()


def test_a_fault_of_one_rank_while_saving_is_one_of_all(place: Path, tmp_path: Path) -> None:
    answers = run_ranks(2, save_with_fault, 2, str(place), str(tmp_path), folder=tmp_path / "meeting")
    for answer in answers:
        assert "rank 1: OSError" in str(answer)
        assert "checkpoint-1 is complete" in str(answer)
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-1"]
