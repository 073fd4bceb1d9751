"""What the estimates expect of a run on the GPU at hand: seconds, tokens per second, memory of the worst batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from packtrain.app.train.prepare import Prepared, batch_rows
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import PacktrainError
from packtrain.core.numbers import gib
from packtrain.families.model_folder import resolve
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.planning.clock import FIELDS, Clock, PassColumns, pack_passes
from packtrain.planning.memory_report import GPUS_PER_NODE
from packtrain.predicting.calibration import coefficients_for
from packtrain.predicting.gpus import Gpu, find_gpu
from packtrain.predicting.host import host_needs
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, estimate_memory, largest_tokens
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.time import Coefficients
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

_SUMS = ("supervised_tokens", "vision_tokens", "patches", "squared_patches", "images", "frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRun:
    """Predictions for a run, and what they rest on."""

    gpu: str
    tokens_per_second: float  # real tokens, over all GPUs
    step_seconds: float
    run_seconds: float
    memory_bytes: int  # of one GPU with the largest of everything that a batch has
    gpu_bytes: int
    host_bytes: int  # of a node, with its loaders' workers
    fitting_tokens: int  # of a batch like the heaviest one that the GPU has room for
    fitted: bool  # coefficients were fitted to this kind of GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What estimates know of a run: the model, how it is trained, on which GPU, with which coefficients."""

    shape: ModelShape
    setup: TrainingSetup
    gpu: Gpu | None
    time: Coefficients | None = None
    memory: MemoryCoefficients = DEFAULT_COEFFICIENTS

    @property
    def fitted(self) -> bool:
        """Do both models rest on measurements?"""
        return self.memory.fitted and self.time is not None and self.time.fitted


def machine_of(prepared: Prepared, *, gpu: str | None, attention: str, compiled: bool, bf16: bool) -> Machine | None:
    """The model on this GPU; None where the model's shape is not known."""
    run = prepared.run
    try:
        shape = read_shape(resolve(run.model.name, cache_dir() / "models"))
    except PacktrainError:
        return None
    try:
        found = find_gpu(gpu) if gpu is not None else None
    except PacktrainError:
        found = None  # a GPU that is in no list
    kernel = (
        "varlen" if attention.startswith(("varlen", "flash", "flex")) else "eager" if attention == "eager" else "sdpa"
    )
    setup = replace(run.setup, attention=kernel, weights_dtype="bf16" if bf16 else "fp32", compiled=compiled)  # type: ignore[arg-type]
    if found is None:
        return Machine(shape=shape, setup=setup, gpu=None)
    time, memory, _ = coefficients_for(found, compiled=compiled)
    return Machine(shape=shape, setup=setup, gpu=found, time=time, memory=memory)


def expected(
    prepared: Prepared, machine: Machine | None, *, workers: int = 0, prefetch: int = 2
) -> PredictedRun | None:
    """The first epoch's speed and the worst batch's memory; None without a known GPU, or without measured data."""
    if machine is None or machine.gpu is None or prepared.run.data.online:
        return None
    numbers, rows = prepared.numbers, prepared.run.data.rows_per_batch
    passes = _passes(prepared, machine)
    clock = Clock(shape=machine.shape, setup=machine.setup, gpu=machine.gpu, coefficients=machine.time)
    per_step = -(-numbers.packs_per_step // rows)
    seconds = clock.epoch(passes, per_step, packs=True)
    model, worst = (machine.shape, machine.setup), heaviest(prepared, machine)
    return PredictedRun(
        gpu=machine.gpu.name,
        tokens_per_second=numbers.tokens / seconds,
        step_seconds=seconds / numbers.steps_per_epoch,
        run_seconds=seconds / numbers.steps_per_epoch * numbers.steps,
        memory_bytes=estimate_memory(*model, worst, machine.memory).total,
        gpu_bytes=machine.gpu.memory_bytes,
        host_bytes=host_needs(
            shape=machine.shape,
            setup=machine.setup,
            load=worst,
            workers=workers,
            prefetch=prefetch,
            gpus_per_node=min(prepared.run.world, GPUS_PER_NODE),
        ).memory_bytes,
        fitting_tokens=largest_tokens(*model, machine.gpu.memory_bytes, worst, machine.memory),
        fitted=machine.fitted,
    )


def too_large(found: PredictedRun | None, prepared: Prepared) -> tuple[str, ...]:
    """What to say where the heaviest batch is expected not to fit."""
    if found is None or found.memory_bytes <= found.gpu_bytes:
        return ()
    needs = f"the heaviest batch is expected to need {gib(found.memory_bytes)} of {gib(found.gpu_bytes)}"
    data, tokens = prepared.run.data, found.fitting_tokens
    if not tokens:
        change = "no batch would fit: gradient_checkpointing, LoRA or FSDP2 make room"
    elif data.pad_packs:
        change = "a shorter packing_length or gradient_checkpointing make room"
    elif data.packing:
        change = f"packing_length of at most {tokens // 64 * 64 or tokens:,} should fit, or gradient_checkpointing"
    else:
        change = "fewer samples per batch (per_device_train_batch_size) or gradient_checkpointing make room"
    return (f"{needs}: {change}",)


def heaviest(prepared: Prepared, machine: Machine) -> Load:
    """The largest of everything that a batch of the run has: epochs differ in what meets in one."""
    epochs = [_passes(prepared, machine, epoch).worst() for epoch in range(prepared.dataset.plan.num_epochs)]
    return Load(**{name: max(getattr(one, name) for one in epochs) for name in FIELDS})


def _passes(prepared: Prepared, machine: Machine, epoch: int = 0) -> PassColumns:
    """The batches of an epoch in their order; padded ones are as long as their longest row."""
    packs, schedule = prepared.dataset.plan.epoch(epoch), prepared.dataset.schedule
    rows = prepared.run.data.rows_per_batch
    order, starts = batch_rows(schedule, rows, epoch)
    loads = {name: packs.load(name)[order] for name in (*RESOURCES, *EXTRAS)}
    if prepared.run.data.packing:
        found = pack_passes(loads)  # compiled layers have rows of one shape
        return found.filled(prepared.numbers.packing_length) if machine.setup.compiled else found
    sizes, longest = np.add.reduceat(loads["samples"], starts), np.maximum.reduceat(loads["longest"], starts)
    return PassColumns(
        {
            "tokens": sizes * longest,
            "squared_tokens": sizes * longest * longest,
            "longest": longest,
            "samples": sizes,
            "rows": sizes,
            "largest_patches": np.maximum.reduceat(loads["largest_patches"], starts),
            **{name: np.add.reduceat(loads[name], starts) for name in _SUMS},
        }
    )
