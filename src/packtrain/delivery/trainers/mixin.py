"""What transformers.Trainer needs to train a schedule pack by pack, and the arguments that would lose data.

Trainer counts the batches of its first epoch and takes every other epoch to be as long; plans differ from epoch to
epoch. So the whole run is one epoch to it, in which every optimizer step has the same number of batches, and its
arithmetic, resuming included, is exact. Epochs of the plan are shown by `PlanProgress`.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from transformers import (
    DataCollatorWithPadding,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.delivery.collate.batch_values import LOSS_WEIGHTS, BatchInfo
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.loader.failures import FailureCounter
from packtrain.delivery.loader.pack_loader import PackLoader
from packtrain.delivery.loader.sampler import check_ranks, rank_and_world
from packtrain.delivery.trainers.refused_arguments import OWN_LOSS, refused_arguments
from packtrain.delivery.trainers.token_loss import EvaluationLoss, token_loss
from packtrain.families.family import BatchContract
from packtrain.packing.schedule import LoaderState, Schedule

_WHY = {
    "per_device_train_batch_size": "the dataset's rows_per_batch; a pack is a whole row: use a longer packing_length",
    "gradient_accumulation_steps": "packs per step, divided by the number of ranks and the rows of a batch",
}
# Keys in trainer_state.json.
_SAVED, _STREAM, _FAILURES = "packtrain", "packtrain.stream", "packtrain.failures"
LEDGER = "ledger.jsonl"


class PackedData(Protocol):
    """A dataset that knows its own order."""

    @property
    def schedule(self) -> Schedule:
        """The order of its packs."""
        ...

    @property
    def contract(self) -> BatchContract:
        """What its batches look like."""
        ...

    def get_collator(self) -> Any:
        """The collator for its packs."""
        ...

    def loader(self, **options: Any) -> PackLoader:
        """A loader over them."""
        ...


def trainer_arguments(schedule: Schedule, *, world_size: int | None = None, rows_per_batch: int = 1) -> dict[str, Any]:
    """The TrainingArguments that follow from a schedule and a dataset's `rows_per_batch`; give them beside your own."""
    world_size = rank_and_world()[1] if world_size is None else world_size
    return {
        "per_device_train_batch_size": rows_per_batch,  # 1: one pack is one row
        "gradient_accumulation_steps": schedule.accumulation(world_size, rows_per_batch),
        "max_steps": schedule.num_steps(),
        "num_train_epochs": schedule.plan.num_epochs,
        "remove_unused_columns": False,
        "ignore_data_skip": False,
        "dataloader_drop_last": False,
        "logging_nan_inf_filter": False,  # it would show the mean of earlier losses instead of a NaN
    }


def with_derived(args: TrainingArguments, schedule: Schedule, *, rows_per_batch: int = 1) -> TrainingArguments:
    """A copy in which what was left at its default follows from the schedule; what was set is kept.

    Epochs that were set are steps of the plan, unless steps were set, which count before them. A value that was set to
    its default looks like one that was not: a warning names what is replaced.
    """
    derived = copy.copy(args)  # the same arguments may be meant for another dataset, too
    values = trainer_arguments(schedule, world_size=args.world_size, rows_per_batch=rows_per_batch)
    if "num_train_epochs" in _set(args) and "max_steps" not in _set(args):
        values["max_steps"] = _count_steps(args.num_train_epochs, schedule)
    replaced = {name: value for name, value in values.items() if name not in _set(args)}
    for name, value in replaced.items():
        setattr(derived, name, value)
    changes = [
        f"{name} {getattr(args, name)} -> {value}"
        for name, value in replaced.items()
        if getattr(args, name) != value and (name, getattr(args, name)) != ("max_steps", -1)  # which says nothing
    ]
    if changes and args.process_index == 0:
        warnings.warn(
            f"training arguments that follow from the dataset's packs: {', '.join(changes)}; "
            "TrainingArguments(**trainer_arguments(schedule), ...) sets them",
            stacklevel=3,
        )
    return derived


def _set(args: TrainingArguments) -> set[str]:
    """Names of arguments that have another value than their default."""
    return {one.name for one in fields(args) if one.init and getattr(args, one.name, one.default) != one.default}


def _count_steps(epochs: float, schedule: Schedule) -> int:
    """Optimizer steps of a number of epochs of a plan."""
    planned = schedule.plan.num_epochs
    if not 0 < epochs <= planned:
        raise ConfigError(
            "training arguments",
            got=f"num_train_epochs {epochs:g}, and a dataset with a plan of {planned}",
            expected=f"epochs up to {planned}",
            fix=f"set DatasetConfig(epochs={math.ceil(epochs)}, ...)" if epochs > 0 else "",
        )
    full = math.floor(epochs)
    part = epochs - full
    rest = round(part * schedule.num_steps(full)) if part else 0
    return max(1, sum(schedule.num_steps(epoch) for epoch in range(full)) + rest)


def check_arguments(
    args: TrainingArguments,
    schedule: Schedule,
    *,
    world_size: int | None = None,
    rows_per_batch: int = 1,
    packing: bool = True,
    own_loss: bool = False,
) -> None:
    """Refuse arguments under which packs would be lost, trained twice or weighted wrongly; all of them in one error.

    Also those of Trainer and TRL that would do nothing, or something else, on packs. `packing`: rows may hold several
    samples. `own_loss`: the loss is one of the user's.
    """
    world_size = args.world_size if world_size is None else world_size
    required = trainer_arguments(schedule, world_size=world_size, rows_per_batch=rows_per_batch)
    steps = required["max_steps"]
    problems = [
        f"{name}: {getattr(args, name)} instead of {required[name]} ({why})"
        for name, why in _WHY.items()
        if getattr(args, name) != required[name]
    ]
    if not 0 < args.max_steps <= steps:
        problems.append(f"max_steps: {args.max_steps} instead of 1 to {steps} (the steps of the plan)")
    problems += refused_arguments(args, "packs", packing=packing)
    if own_loss and args.label_smoothing_factor:
        problems.append(f"label_smoothing_factor: {args.label_smoothing_factor} ({OWN_LOSS})")
    if problems:
        argument = f", rows_per_batch={rows_per_batch}" if rows_per_batch > 1 else ""
        raise ConfigError(
            "training arguments",
            problems=problems,
            expected="arguments that agree with the schedule of packs",
            fix=f"use TrainingArguments(**trainer_arguments(schedule{argument}), ...)",
        )


class PackedTrainerMixin:
    """Mixin for Trainer: `class MyTrainer(PackedTrainerMixin, Trainer)`, with a dataset of packs as train_dataset.

    The loader is handed to Trainer as it is: accelerate would share its packs out among the ranks once more. Without
    a loss or a collator of your own they are `token_loss` and the dataset's. Arguments that were left at their defaults
    and have to follow from the schedule do (`trainer.args`); those that were set and disagree are refused. Samples that
    cannot be decoded are counted by `failures`, by default into `ledger.jsonl` of the output folder; all ranks stop
    together when there are too many. An evaluation is over a dataset of packs too, one in each batch, and its loss is
    the mean over all tokens; `eval_collator` is by default that dataset's, with pixels as training has them.
    """

    args: TrainingArguments
    state: TrainerState
    train_dataset: PackedData
    eval_dataset: Any
    data_collator: Any
    compute_loss_func: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        failures: FailureCounter | None = None,
        eval_collator: Any = None,
        **options: Any,
    ) -> None:
        self._eval_collator = eval_collator
        self._evaluated: EvaluationLoss | None = None  # the evaluation that is under way
        if not hasattr(train_dataset, "schedule"):
            raise ConfigError(
                "train_dataset",
                got=type(train_dataset).__name__,
                expected="a dataset of packs",
                fix="pass a built MultiModalDataset or MultiModalIterableDataset",
            )
        rows = getattr(train_dataset, "rows_per_batch", 1)
        if args is not None:
            args = with_derived(args, train_dataset.schedule, rows_per_batch=rows)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **options)  # type: ignore[call-arg]
        if self.data_collator in (default_data_collator, None) or isinstance(
            self.data_collator, DataCollatorWithPadding
        ):
            self.data_collator = self.train_dataset.get_collator()  # what Trainer takes when none is given
        own_loss, smoothing = self.compute_loss_func is not None, self.args.label_smoothing_factor
        if not own_loss:
            self.compute_loss_func = partial(token_loss, label_smoothing=smoothing) if smoothing else token_loss
        schedule = self.train_dataset.schedule
        check_ranks(self.args.process_index, self.args.world_size)
        packing = isinstance(self.data_collator, PackCollator)
        check_arguments(self.args, schedule, rows_per_batch=rows, packing=packing, own_loss=own_loss)
        ledger = Path(str(self.args.output_dir)) / LEDGER
        self.failures = failures if failures is not None else FailureCounter(ledger_path=ledger)
        self._progress = PlanProgress(schedule, self.train_dataset)
        self.decision = JointDecision(self.failures, self._progress.epoch_ends)
        for callback in (self._progress, self.decision):
            self.add_callback(callback)  # type: ignore[attr-defined]

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Trainer's own, with what the batch lacks taken down."""
        info = getattr(inputs, "info", BatchInfo())
        self.failures.take(info)
        self._progress.take(info)
        return super().training_step(model, inputs, *args, **options)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Trainer's own, which would hand weights of tokens to the model, where nobody looks at them."""
        if LOSS_WEIGHTS in inputs:
            raise ConfigError(
                "data_collator",
                got="a loss_weighting whose weights this loss ignores",
                expected="loss_weighting 'token'",
                fix="use PackedTrainer with StepSettings(loss_weighting=...)",
            )
        return super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Trainer's own; it takes packs for samples, so their speed is put right, also in what `train` returns."""
        if logs.get("train_runtime") and "train_samples_per_second" in logs:
            samples = self.train_dataset.schedule.num_samples(self._progress.begun, self.state.global_step)
            del logs["train_samples_per_second"]
            if samples is not None:  # nobody counts those of a stream beforehand
                logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
        super().log(logs, *args, **options)  # type: ignore[misc]

    def get_train_dataloader(self) -> PackLoader:
        """This rank's packs of the whole run."""
        persistent = self.args.dataloader_persistent_workers
        return self._loader(self.train_dataset, self.data_collator, span="run", persistent_workers=persistent)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PackLoader:
        """This rank's packs of the first epoch of the evaluation's own plan."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if not hasattr(dataset, "schedule"):
            raise ConfigError(
                "eval_dataset",
                got=type(dataset).__name__,
                expected="a dataset of packs",
                fix="pass a built MultiModalDataset, with packing: false for padded rows",
            )
        collator = self._eval_collator if self._eval_collator is not None else self._collator_to_evaluate(dataset)
        return self._loader(dataset, collator, span="epoch", persistent_workers=False)

    def _loader(self, dataset: PackedData, collator: Any, **options: Any) -> PackLoader:
        args = self.args
        return dataset.loader(
            collator=collator,
            rank=args.process_index,
            world_size=args.world_size,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
            **options,
        )

    def _collator_to_evaluate(self, dataset: Any) -> Any:
        """The dataset's own: its packs may be longer than those that are trained."""
        dtype = getattr(self.data_collator, "dtype", None)
        return dataset.get_collator() if dtype is None else dataset.get_collator(dtype=dtype)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Trainer's own, with what the batch holds taken down."""
        if self._evaluated is not None:
            self._evaluated.take(getattr(inputs, "info", BatchInfo()))
        return super().prediction_step(model, inputs, *args, **options)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Trainer's own, which takes the mean of the means of batches; the loss is that of the tokens instead."""
        options["metric_key_prefix"] = metric_key_prefix
        if not isinstance(dataloader, PackLoader):
            return super().evaluation_loop(dataloader, *args, **options)  # type: ignore[misc]
        loss_func, taking = self.compute_loss_func, EvaluationLoss(self.compute_loss_func)
        self.compute_loss_func = self._evaluated = taking
        try:
            output = super().evaluation_loop(dataloader, *args, **options)  # type: ignore[misc]
        finally:
            self.compute_loss_func, self._evaluated = loss_func, None
        evaluated = taking.outcome()
        evaluated.warn(metric_key_prefix, first=self.args.process_index == 0)
        output.metrics.update(evaluated.counts(metric_key_prefix))
        return output._replace(num_samples=evaluated.samples)


def _checkpoint_state(state: TrainerState) -> dict[str, Any]:
    """The entries that checkpoints keep in trainer_state.json, by name."""
    if state.stateful_callbacks is None:
        state.stateful_callbacks = {}
    return state.stateful_callbacks


class PlanProgress(TrainerCallback):
    """Says in which epoch of the plan a run is, keeps its position in checkpoints, and refuses those of other runs."""

    def __init__(self, schedule: Schedule, dataset: Any = None) -> None:
        self._schedule, self._dataset = schedule, dataset
        self._stream: Mapping[str, Any] | None = None  # of packs that were not measured: where the last batch ended
        self.begun = 0  # the step that this call of `train` started from
        steps = map(schedule.num_steps, range(schedule.plan.num_epochs))
        self.epoch_ends = tuple(accumulate(steps))  # the last step of each epoch of the plan

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """A checkpoint continues with its own schedule, where it stopped."""
        self.begun = state.global_step
        if state.global_step:
            saved = _checkpoint_state(state).get(_SAVED)
            if saved is None:
                raise ArtifactError(
                    "checkpoint",
                    got=f"step {state.global_step} without a position in a plan",
                    expected="a checkpoint of a run over packs",
                    fix="load its weights and start a new run instead of resuming",
                )
            position = LoaderState.from_plain(saved)
            self._schedule.check(position)
            expected = self._schedule.state_after(state.global_step)
            if position != expected:
                raise ArtifactError("checkpoint", got=str(asdict(position)), expected=f"{asdict(expected)} at its step")
            stream = _checkpoint_state(state).get(_STREAM)
            if stream is not None and self._dataset is not None:  # else it is read from its beginning
                self._dataset.source.load_state_dict(stream)
                self._stream = stream
        return control

    def take(self, info: BatchInfo) -> None:
        """A batch of this rank is trained."""
        self._stream = info.stream if info.stream is not None else self._stream

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Save the position; actions at the end of an epoch happen at the end of the plan's epochs."""
        step = state.global_step
        saved = _checkpoint_state(state)
        saved[_SAVED] = asdict(self._schedule.state_after(step))
        if self._stream is not None:
            saved[_STREAM] = dict(self._stream)
        state.epoch = self._epoch(step)
        if step in self.epoch_ends[:-1]:  # Trainer sees the end of the last one itself
            control.should_log |= args.logging_strategy == "epoch"
            control.should_save |= args.save_strategy == "epoch"
            control.should_evaluate |= args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
        return control

    def _epoch(self, step: int) -> float:
        """Epochs of the plan that have been trained."""
        spans = enumerate(zip([0, *self.epoch_ends], self.epoch_ends, strict=False))
        parts = (epoch + (step - start) / (end - start) for epoch, (start, end) in spans if step <= end and end > start)
        return next(parts, float(len(self.epoch_ends)))


class JointDecision(TrainerCallback):
    """At the end of each step all ranks decide together whether too many samples could not be delivered.

    A rate needs some samples to mean anything; the end of an epoch, and that of the run, are judged in any case.

    That is where the host waits for the other ranks; a question to all of them is asked there, by `vote`, and callbacks
    after this one find in `votes` how many ranks said yes.
    """

    def __init__(self, failures: FailureCounter, epoch_ends: Collection[int] = ()) -> None:
        self._failures = failures
        self._epoch_ends = frozenset(epoch_ends)  # steps
        self.vote: Callable[[], bool] = lambda: False
        self.votes = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Go on with what was counted before a checkpoint."""
        saved = _checkpoint_state(state).get(_FAILURES)
        if state.global_step and saved is not None:
            self._failures.load_state_dict(saved)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.votes = self._failures.decide(vote=self.vote(), whole=state.global_step in self._epoch_ends).votes
        _checkpoint_state(state)[_FAILURES] = self._failures.state_dict()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Runs that end before their first epoch does; one that was asked to stop continues later."""
        if not self.votes:
            self._failures.finish()
