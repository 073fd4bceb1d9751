"""Arguments that Trainer looks at only when it trains, tried before anything of a run is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from packtrain.core.errors import ConfigError, in_one_line

if TYPE_CHECKING:
    from transformers import TrainingArguments


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
