"""TrainingArguments of a run: made, tried before anything is written, and what users look for in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from packtrain.app.train.prepare import Prepared
from packtrain.app.train.resolve import ResolvedRun
from packtrain.core.errors import ConfigError, in_one_line
from packtrain.core.numbers import counted
from packtrain.runs.derived import Course

if TYPE_CHECKING:
    from transformers import TrainingArguments
_MANY_EPOCHS = 10


def make_course(
    args: TrainingArguments, run: ResolvedRun, *, steps: int, epochs: float, trained: Iterable[str], dtype: str
) -> Course:
    """From the arguments, as the trainer reads them."""
    rates = {"vision": run.step.vit_lr, "projector": run.step.aligner_lr}
    every = _every(args.save_steps, steps)
    strategy, delay = str(args.save_strategy.value), run.step.save_delay_steps
    times = {"no": 0, "steps": -(-steps // every), "epoch": math.ceil(epochs)}.get(strategy, steps)
    return Course(
        rates={part: args.learning_rate if (own := rates.get(part)) is None else own for part in trained},
        schedule=str(args.lr_scheduler_type.value),
        warmup_steps=args.get_warmup_steps(steps),
        optimizer=str(args.optim.value),
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm or 0.0,
        precision="bf16 autocast" if args.bf16 else "fp16 autocast, scaled loss" if args.fp16 else dtype,
        saves=_saves(strategy, every, delay, args.save_total_limit, steps),
        saved_times=0 if delay > steps else times,
        kept=args.save_total_limit,
        evaluates=_evaluates(args, steps),
        logged_every=_every(args.logging_steps, steps) if args.logging_strategy == "steps" else steps,
    )


def course_notes(args: TrainingArguments, run: ResolvedRun, *, steps: int, epochs: float) -> tuple[str, ...]:
    """What of these settings may not be meant."""
    return (*_never_reached(args, run, steps), *_many_epochs_note(epochs, evaluates=run.evaluation is not None))


def make_arguments(prepared: Prepared, *, bf16_weights: bool = False) -> TrainingArguments:
    """TrainingArguments from the config, the schedule and the precision of the weights."""
    import torch

    from packtrain.delivery.trainers.mixin import trainer_arguments

    run, dataset = prepared.run, prepared.dataset
    derived = trainer_arguments(dataset.schedule, world_size=run.world_size, rows_per_batch=dataset.rows_per_batch)
    own = {**run.arguments, **derived, "max_steps": prepared.numbers.steps, "output_dir": str(run.folder)}
    own["gradient_checkpointing"] = False  # set on the model already, part by part
    if bf16_weights:
        own["bf16"] = False  # there is nothing to cast
    own.setdefault("dataloader_pin_memory", torch.cuda.is_available())
    if not torch.cuda.is_available() or own.get(
        "use_cpu"
    ):  # without it a launcher's processes would not find each other
        own["use_cpu"] = True
        own.pop("tf32", None)
        if run.world_size > 1:
            own.setdefault("ddp_backend", "gloo")
    return accepted_arguments(own, given=run.arguments)


def accepted_arguments(arguments: Mapping[str, Any], *, given: Iterable[str]) -> TrainingArguments:
    """TrainingArguments; where transformers refuses, the error names the `given` ones that cause it."""
    from transformers import TrainingArguments

    try:
        return TrainingArguments(**arguments)
    except Exception as error:  # each argument is checked in its own way
        problem = error
    blamed = []
    for name in given:
        try:
            TrainingArguments(**{other: value for other, value in arguments.items() if other != name})
        except Exception:
            continue
        blamed.append(f"training.{name}")
    where, got = ", ".join(blamed) or "training", in_one_line(problem)
    raise ConfigError(where, got=got, expected="arguments that transformers accepts") from problem


def _every(interval: float, steps: int) -> int:
    """An interval in steps; below 1 it is a share of all steps."""
    return max(1, math.ceil(interval * steps) if interval < 1 else int(interval))


def _saves(strategy: str, every: int, delay: int, kept: int | None, steps: int) -> str:
    if strategy == "no" or delay > steps:
        why = "save_strategy: no" if strategy == "no" else f"save_delay_steps: {delay}"
        return f"none ({why}), unless the run is interrupted"
    if strategy == "steps" and every >= steps:
        return f"one, at the end (save_steps: {every})"
    when = {"steps": f"{_each(every)} and at the end", "epoch": "after every epoch"}.get(
        strategy, "after every evaluation that is the best"
    )
    first = f", from step {delay:,} on" if delay else ""
    return f"{when}{first}; {'all are' if kept is None else f'the newest {kept} are'} kept"


def _each(every: int) -> str:
    return "after every step" if every == 1 else f"every {every:,} steps"


def _evaluates(args: TrainingArguments, steps: int) -> str:
    strategy = str(args.eval_strategy.value)
    every = _each(_every(args.eval_steps or args.logging_steps, steps))
    return {"no": "", "epoch": "after every epoch"}.get(strategy, every)


def _many_epochs_note(epochs: float, *, evaluates: bool) -> Iterator[str]:
    """Many epochs over the same samples."""
    if epochs < _MANY_EPOCHS:
        return
    see = "watch the evaluation loss" if evaluates else "set data.eval_path to see it in the evaluation loss"
    yield f"every sample is trained on {epochs:,.4g} times, which tends to overfit: {see}"


def _never_reached(args: TrainingArguments, run: ResolvedRun, steps: int) -> Iterator[str]:
    """Settings that take effect after the last step only."""
    given = run.config.training.given()
    end = f"beyond the run's {counted(steps, 'step')}"
    if run.step.save_delay_steps > steps:
        delay = f"save_delay_steps {run.step.save_delay_steps}"
        yield f"{delay} is {end}: no checkpoint is saved unless the run is interrupted"
    elif args.save_strategy == "steps" and "save_steps" in given and _every(args.save_steps, steps) > steps:
        yield f"save_steps {args.save_steps:g} is {end}: a checkpoint is saved at the end only"
    if args.eval_strategy == "steps":
        if "eval_delay" in given and args.eval_delay > steps:
            yield f"eval_delay {args.eval_delay:g} is {end}: evaluation never runs"
        elif "eval_steps" in given and _every(args.eval_steps or 0, steps) > steps:
            yield f"eval_steps {args.eval_steps:g} is {end}: evaluation runs at the end only"
    if (warmup := args.get_warmup_steps(steps)) >= steps > 1:
        length = counted(warmup, "step")
        yield f"the warm-up of {length} is longer than the run: learning rates stay below their set values"


def try_arguments(args: TrainingArguments) -> None:
    """Make what the trainer will make of them once: loggers, the optimizer's options, the schedule."""
    from transformers import Trainer

    optimizer = f"{args.optim.value}, {args.optim_args}"
    schedule = f"{args.lr_scheduler_type.value}, {args.lr_scheduler_kwargs}"
    for names, given, make in (
        ("training.report_to", str(args.report_to), _make_loggers),
        ("training.optim, optim_args", optimizer, Trainer.get_optimizer_cls_and_kwargs),
        ("training.lr_scheduler_type, lr_scheduler_kwargs", schedule, _make_schedule),
    ):
        try:
            make(args)
        except Exception as error:  # each of them checks in its own way
            got = f"{given}: {in_one_line(error)}"
            raise ConfigError(names, got=got, expected="values that transformers can train with") from error


def _make_loggers(args: TrainingArguments) -> None:
    from transformers.integrations import get_reporting_integration_callbacks

    for logger in get_reporting_integration_callbacks(args.report_to):
        logger()


def _make_schedule(args: TrainingArguments) -> None:
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
