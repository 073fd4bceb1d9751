"""What the estimates expect of a run on the GPU at hand: seconds, tokens per second, memory of the worst batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.app.train.prepare import Prepared, batch_rows
from packtrain.app.train.resolve import ResolvedRun
from packtrain.core.artifacts import free_bytes
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError, PacktrainError, in_one_line
from packtrain.core.numbers import counted, gib, memory
from packtrain.families.model_folder import resolve
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.planning.clock import FIELDS, Clock, PassColumns, pack_passes, padded_batches
from packtrain.planning.memory_report import GPUS_PER_NODE
from packtrain.predicting.calibration import coefficients_for
from packtrain.predicting.gpus import Gpu, find_gpu
from packtrain.predicting.host import host_needs
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, estimate_memory, largest_tokens
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.time import Coefficients
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

if TYPE_CHECKING:
    from transformers import TrainingArguments


_MANY_PASSES = 10  # over each sample, that are said


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
    return padded_batches(loads, starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What users look for before the first step."""

    rates: Mapping[str, float]  # by part of the model that learns
    schedule: str
    warmup_steps: int
    optimizer: str
    weight_decay: float
    max_grad_norm: float  # 0: gradients are not clipped
    precision: str  # of computing
    saves: str
    saved_times: int  # checkpoints that the run makes
    kept: int | None  # of them; None: all
    evaluates: str
    logged_every: int  # steps
    notes: tuple[str, ...]


def course_of(
    args: TrainingArguments, run: ResolvedRun, *, steps: int, epochs: float, learns: Iterable[str], dtype: str
) -> Course:
    """From the arguments, as the trainer will read them."""
    rates = {"vision": run.step.vit_lr, "projector": run.step.aligner_lr}
    every = _every(args.save_steps, steps)
    strategy, delay = str(args.save_strategy.value), run.step.save_delay_steps
    times = {"no": 0, "steps": -(-steps // every), "epoch": math.ceil(epochs)}.get(strategy, steps)
    return Course(
        rates={part: args.learning_rate if (own := rates.get(part)) is None else own for part in learns},
        schedule=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        warmup_steps=args.get_warmup_steps(steps),
        optimizer=str(getattr(args.optim, "value", args.optim)),
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm or 0.0,
        precision="bf16 autocast" if args.bf16 else "fp16 autocast, scaled loss" if args.fp16 else dtype,
        saves=_saves(strategy, every, delay, args.save_total_limit, steps),
        saved_times=0 if delay > steps else times,
        kept=args.save_total_limit,
        evaluates=_evaluates(args, steps),
        logged_every=_every(args.logging_steps, steps) if args.logging_strategy == "steps" else steps,
        notes=(*_beyond(args, run, steps), *_often(epochs, evaluates=run.evaluation is not None)),
    )


def disk_warning(course: Course, machine: Machine | None, folder: Path) -> tuple[str, ...]:
    """What to say where checkpoints and weights are expected not to fit on the disk of the run.

    A disk without room for one of them is refused: nothing would be left of the run.
    """
    if machine is None:
        return ()
    kept = course.saved_times if course.kept is None else min(course.kept, course.saved_times)
    nothing = Load(tokens=0, squared_tokens=0, longest=0)
    needs = host_needs(shape=machine.shape, setup=machine.setup, load=nothing, workers=0, checkpoints_kept=kept)
    parts = {part.name: part for part in needs.disk}
    saved, final = parts["checkpoints"].bytes, parts["final weights"].bytes
    free = free_bytes(folder) + _held(folder)
    least = max(saved // (kept + 1), final)
    if least > free:
        raise ConfigError(
            "training.output_dir",
            got=f"{folder}, where {memory(free)} are free",
            expected=f"{memory(least)} for the {'first checkpoint' if saved else 'weights'}",
            fix="make room, or name another output_dir; the run would end without anything to keep",
        )
    if saved + final <= free:
        return ()
    wanted = f"the run is expected to write {memory(saved + final)} into {folder}"
    why = f"where {memory(free)} are free (checkpoints: {parts['checkpoints'].why})"
    return (f"{wanted}, {why}: make room, or lower save_total_limit",)


def _held(folder: Path) -> int:
    """Bytes of checkpoints that later ones will replace."""
    return sum(path.stat().st_size for path in folder.glob("checkpoint-*/**/*") if path.is_file())


def _every(interval: float, steps: int) -> int:
    """Steps between two; below one it is a share of all."""
    return max(1, math.ceil(interval * steps) if interval < 1 else int(interval))


def _saves(strategy: str, every: int, delay: int, kept: int | None, steps: int) -> str:
    if strategy == "no" or delay > steps:
        why = "save_strategy: no" if strategy == "no" else f"save_delay_steps: {delay}"
        return f"none ({why}), unless the run is interrupted"
    if strategy == "steps" and every >= steps:
        return f"one, at the end (save_steps: {every})"
    when = {"steps": f"every {every:,} steps and at the end", "epoch": "after every epoch"}.get(
        strategy, "after every evaluation that is the best"
    )
    first = f", from step {delay:,} on" if delay else ""
    return f"{when}{first}; {'all are' if kept is None else f'the newest {kept} are'} kept"


def _evaluates(args: TrainingArguments, steps: int) -> str:
    strategy = str(args.eval_strategy.value)
    every = f"every {_every(args.eval_steps or args.logging_steps, steps):,} steps"
    return {"no": "", "epoch": "after every epoch"}.get(strategy, every)


def _often(epochs: float, *, evaluates: bool) -> Iterator[str]:
    """Many passes over the same samples."""
    if epochs < _MANY_PASSES:
        return
    see = "watch the evaluation loss" if evaluates else "set data.eval_path to see it in the evaluation loss"
    yield f"every sample is trained on {epochs:,.4g} times; so many passes tend to overfit: {see}"


def _beyond(args: TrainingArguments, run: ResolvedRun, steps: int) -> Iterator[str]:
    """What was asked for and lies behind the last step."""
    said = run.config.training.given()
    end = f"beyond the run's {counted(steps, 'step')}"
    if run.step.save_delay_steps > steps:
        yield f"save_delay_steps {run.step.save_delay_steps} is {end}: no checkpoint is saved, unless it is interrupted"
    elif args.save_strategy == "steps" and "save_steps" in said and _every(args.save_steps, steps) > steps:
        yield f"save_steps {args.save_steps:g} is {end}: a checkpoint is saved at its end only"
    if args.eval_strategy == "steps":
        if "eval_delay" in said and args.eval_delay > steps:
            yield f"eval_delay {args.eval_delay:g} is {end}: nothing is evaluated"
        elif "eval_steps" in said and _every(args.eval_steps or 0, steps) > steps:
            yield f"eval_steps {args.eval_steps:g} is {end}: it is evaluated at its end only"
    if (warmup := args.get_warmup_steps(steps)) >= steps > 1:
        yield f"the warm-up of {warmup:,} steps is not over when the run ends: rates stay below what is set"


def try_arguments(args: TrainingArguments) -> None:
    """Make once what the trainer will make of them: loggers, the optimizer's options, the schedule."""
    from transformers import Trainer

    optimizer = f"{_plain(args.optim)}, {args.optim_args}"
    schedule = f"{_plain(args.lr_scheduler_type)}, {args.lr_scheduler_kwargs}"
    _try("training.report_to", str(args.report_to), _loggers, args)
    _try("training.optim, optim_args", optimizer, Trainer.get_optimizer_cls_and_kwargs, args)
    _try("training.lr_scheduler_type, lr_scheduler_kwargs", schedule, _schedule, args)


def _plain(name: object) -> object:
    return getattr(name, "value", name)


def _try(name: str, given: str, make: Callable[[TrainingArguments], object], args: TrainingArguments) -> None:
    try:
        make(args)
    except Exception as error:  # each of them checks in its own way
        raise ConfigError(
            name, got=f"{given}: {in_one_line(error)}", expected="values that transformers can train with"
        ) from error


def _loggers(args: TrainingArguments) -> None:
    from transformers.integrations import get_reporting_integration_callbacks

    for logger in get_reporting_integration_callbacks(args.report_to):
        logger()


def _schedule(args: TrainingArguments) -> None:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(args.max_steps),
        num_training_steps=args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
