"""Predictions for a run on this GPU: seconds, tokens per second, memory and disk; and warnings from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packtrain.app.train.prepare import Prepared
from packtrain.core.artifacts import free_bytes
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError, PacktrainError
from packtrain.core.numbers import gib, memory
from packtrain.families.model_folder import resolve_model
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.packing.schedule import Schedule
from packtrain.planning.clock import Clock, PassColumns, pack_passes, padded_batches
from packtrain.planning.memory_report import GPUS_PER_NODE
from packtrain.predicting.calibration import coefficients_for
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.host_memory import host_needs
from packtrain.predicting.memory import estimate_memory
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.values import Load
from packtrain.runs.derived import Course, PredictedRun

if TYPE_CHECKING:
    from packtrain.training.predictions import ModelPrediction


def model_prediction(
    prepared: Prepared, *, gpu: str | None, attention: str, compiled: bool, bf16: bool
) -> ModelPrediction | None:
    """The predictor of the model on this GPU; None where the model's shape is unknown."""
    from packtrain.training.predictions import ModelPrediction

    run = prepared.run
    try:
        shape = read_shape(resolve_model(run.model.name, cache_dir() / "models"))
    except PacktrainError:
        return None
    try:
        data_sheet = find_gpu(gpu) if gpu is not None else None
    except PacktrainError:
        data_sheet = None  # no data sheet for this GPU
    kernel = (
        "varlen" if attention.startswith(("varlen", "flash", "flex")) else "eager" if attention == "eager" else "sdpa"
    )
    setup = replace(run.setup, attn_implementation=kernel, weights_dtype="bf16" if bf16 else "fp32", compiled=compiled)  # type: ignore[arg-type]
    if data_sheet is None:
        return ModelPrediction(shape=shape, setup=setup)
    time, memory, _ = coefficients_for(data_sheet, compiled=compiled)
    return ModelPrediction(shape=shape, setup=setup, gpu=data_sheet, time=time, memory=memory)


def predict_run(
    prepared: Prepared, model: ModelPrediction | None, *, workers: int = 0, prefetch: int = 2
) -> PredictedRun | None:
    """The first epoch's speed and the worst batch's memory; None without a known GPU, or without measured data."""
    if model is None or model.gpu is None or prepared.run.data.online:
        return None
    numbers, rows = prepared.numbers, prepared.run.data.rows_per_batch
    passes = _passes(prepared, model)
    clock = Clock(shape=model.shape, setup=model.setup, gpu=model.gpu, coefficients=model.time)
    per_step = -(-numbers.packs_per_step // rows)
    seconds = clock.epoch(passes, per_step, packs=True)
    worst = heaviest(prepared, model)
    return PredictedRun(
        gpu=model.gpu.name,
        tokens_per_second=numbers.tokens / seconds,
        step_seconds=seconds / numbers.steps_per_epoch,
        run_seconds=seconds / numbers.steps_per_epoch * numbers.steps,
        memory_bytes=estimate_memory(model.shape, model.setup, worst, model.memory).total,
        gpu_bytes=model.gpu.memory_bytes,
        host_bytes=host_needs(
            shape=model.shape,
            setup=model.setup,
            load=worst,
            workers=workers,
            prefetch=prefetch,
            gpus_per_node=min(prepared.run.world_size, GPUS_PER_NODE),
        ).memory_bytes,
        fitting_tokens=model.fitting(worst, model.gpu.memory_bytes),
        fitted=model.memory.fitted and model.time is not None and model.time.fitted,
    )


def memory_warning(predicted: PredictedRun | None, prepared: Prepared) -> tuple[str, ...]:
    """A warning where the heaviest batch is not expected to fit."""
    if predicted is None or predicted.memory_bytes <= predicted.gpu_bytes:
        return ()
    needs = f"the heaviest batch is expected to need {gib(predicted.memory_bytes)} of {gib(predicted.gpu_bytes)}"
    data, tokens = prepared.run.data, predicted.fitting_tokens
    if not tokens:
        fix = "no batch would fit: use gradient_checkpointing, LoRA or FSDP2"
    elif data.pad_packs:
        fix = "use a shorter packing_length or gradient_checkpointing"
    elif data.packing:
        fix = f"packing_length of at most {tokens // 64 * 64 or tokens:,} should fit, or gradient_checkpointing"
    else:
        fix = "use fewer samples per batch (per_device_train_batch_size) or gradient_checkpointing"
    return (f"{needs}: {fix}",)


def heaviest(prepared: Prepared, model: ModelPrediction) -> Load:
    """The largest of everything that a batch of the run has: epochs differ in what meets in one."""
    epochs = range(prepared.dataset.plan.num_epochs)
    return Load.largest([_passes(prepared, model, epoch).worst() for epoch in epochs])


def _passes(prepared: Prepared, model: ModelPrediction, epoch: int = 0) -> PassColumns:
    """The batches of an epoch in their order; padded ones are as long as their longest row."""
    packs, schedule = prepared.dataset.plan.epoch(epoch), prepared.dataset.schedule
    rows = prepared.run.data.rows_per_batch
    order, starts = batch_rows(schedule, rows, epoch)
    loads = {name: packs.load(name)[order] for name in (*RESOURCES, *EXTRAS)}
    if prepared.run.data.packing:
        passes = pack_passes(loads)
        # Compiled layers get rows of one shape.
        return passes.filled(prepared.numbers.packing_length) if model.setup.compiled else passes
    return padded_batches(loads, starts)


def batch_rows(schedule: Schedule, rows: int, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Packs of an epoch in training order, and where each batch of them begins, for any number of processes."""
    order, per_step = schedule.order(epoch), schedule.packs_per_step
    firsts = np.arange(0, len(order), per_step)
    sizes = np.minimum(firsts + per_step, len(order)) - firsts
    # Fillers come before a step's packs, so the first batch of a step is the one with fewer.
    within = ((first, np.arange(-(-size % rows), size, rows)) for first, size in zip(firsts, sizes, strict=True))
    return order, np.concatenate([first + starts.clip(min=0) for first, starts in within])


def disk_warning(course: Course, model: ModelPrediction | None, folder: Path) -> tuple[str, ...]:
    """A warning where checkpoints and weights are not expected to fit on the run's disk.

    A disk without room for one checkpoint or the final weights is refused: nothing of the run could be kept.
    """
    if model is None:
        return ()
    kept = course.saved_times if course.kept is None else min(course.kept, course.saved_times)
    no_load = Load(tokens=0, squared_tokens=0, longest=0)
    needs = host_needs(shape=model.shape, setup=model.setup, load=no_load, workers=0, checkpoints_kept=kept)
    parts = {part.name: part for part in needs.disk}
    saved, final = parts["checkpoints"].bytes, parts["final weights"].bytes
    free = free_bytes(folder) + _checkpoint_bytes(folder)
    least = max(saved // (kept + 1), final)
    if least > free:
        raise ConfigError(
            "training.output_dir",
            got=f"{folder}, where {memory(free)} are free",
            expected=f"{memory(least)} for the {'first checkpoint' if saved else 'weights'}",
            fix="free some space, or choose another output_dir; nothing of the run could be saved",
        )
    if saved + final <= free:
        return ()
    need = f"the run is expected to write {memory(saved + final)} into {folder}"
    why = f"where {memory(free)} are free (checkpoints: {parts['checkpoints'].why})"
    return (f"{need}, {why}: free some space, or lower save_total_limit",)


def _checkpoint_bytes(folder: Path) -> int:
    """The size of the checkpoints that later ones will replace."""
    return sum(path.stat().st_size for path in folder.glob("checkpoint-*/**/*") if path.is_file())
