"""The trainer's arguments of a run, tried before anything of it is written, and what they make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.app.train.predicted import Machine
from packtrain.app.train.resolve import ResolvedRun
from packtrain.core.artifacts import free_bytes
from packtrain.core.errors import ConfigError, in_one_line
from packtrain.core.numbers import counted, memory
from packtrain.predicting.host import host_needs
from packtrain.predicting.values import Load

if TYPE_CHECKING:
    from transformers import TrainingArguments


_MANY_PASSES = 10  # over each sample, that are said


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
