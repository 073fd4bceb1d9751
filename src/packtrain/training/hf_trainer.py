"""Everything private of transformers.Trainer that packtrain overrides or calls, in one place.

The loop is transformers'. It is bent at the methods below, each of which only hands over to a method of our own by a
public name; the defaults here leave Trainer unchanged. So a new release of transformers is this file to look at: a test
compares it with the class, and fails where Trainer has lost or renamed a method, or another module overrides one.

    written against    transformers 5.17 to 5.22 (the tests run with the oldest and the newest)
    overridden         the methods of `HFTrainer` that begin with an underscore: their docstrings say why and until when
    called             by the methods at the end of the class
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from packtrain.core.errors import ConfigError
from packtrain.delivery.trainers.refused_arguments import OWN_LOSS, REFUSED_OPTIONS, refused_arguments


class HFTrainer(Trainer):
    """transformers.Trainer with its private methods under names of our own."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any

    # ---- what our trainer decides

    @property
    def has_steps_left(self) -> bool:
        """Is there anything to train?"""
        return True

    def load_weights(self, model: Any, checkpoint: str) -> bool:
        """Read the weights of a checkpoint; False: Trainer has to."""
        return False

    def load_best_weights(self) -> bool:
        """Read the weights of the best checkpoint; False: Trainer has to."""
        return False

    def reading_states(self, checkpoint: str | None, what: str) -> AbstractContextManager[Any]:
        """Around the reading of a checkpoint's `what`: random states, a loss scale, or states of the optimizer."""
        return nullcontext()

    def states_read(self) -> None:
        """The optimizer's states of a checkpoint were read."""

    def weight_of_step(self, batches: list[Any], device: torch.device) -> Any:
        """The divisor of the sum of a step's losses."""
        return super()._get_num_items_in_batch(batches, device)

    def on_device(self, inputs: Any) -> Any:
        """A batch where the model is; None: Trainer has to move it."""
        return None

    def after_step(self, grad_norm: Any) -> None:
        """A step is done, and nothing was logged, saved or evaluated of it yet."""

    def evaluated(self, evaluate: Callable[[], dict[str, float]], *, at_start: bool) -> dict[str, float]:
        """The metrics of an evaluation that the loop asks for."""
        return evaluate()

    def save_checkpoint(self) -> None:
        """Save the present step."""
        raise NotImplementedError

    def is_best(self, judge: Callable[[], bool], metrics: dict[str, float]) -> bool:
        """Whether a checkpoint is to be saved where only the best are."""
        return judge()

    def finishing(self) -> AbstractContextManager[Any]:
        """Around the end of a run, where Trainer reads the best weights and removes checkpoints."""
        return nullcontext()

    # ---- overridden

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Trainer looks only after a step whether the run is to end: a run that has nothing to do would do one step.

        Until Trainer looks before the first step.
        """
        if self.has_steps_left:
            super()._run_epoch(*args, **options)

    def _init_training_state(self, max_steps: int, *args: Any, **options: Any) -> Any:
        """Trainer puts the steps at which a checkpoint was logged and saved over those that are asked for.

        Until Trainer takes the steps of its arguments.
        """
        state = super()._init_training_state(max_steps, *args, **options)
        self.state.compute_steps(self.args, max_steps)
        return state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Trainer leaves weights that a checkpoint lacks as they are, and looks for other names than were saved.

        Until Trainer refuses missing weights, and reads adapters and shards by the names that we save.
        """
        if not self.load_weights(self.model if model is None else model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """The same, at the end of a run that keeps its best; a missing file would be a warning.

        Until the same.
        """
        if not self.load_best_weights():
            super()._load_best_model()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Errors of unreadable states name neither the file nor a way out.

        Until they do.
        """
        with self.reading_states(checkpoint, "random states"):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """As for random states. Until the same."""
        with self.reading_states(checkpoint, "a loss scale"):
            super()._load_scaler(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The same; and learning rates of a checkpoint would be put over those that are asked for.

        Until a resumed run can have rates of its own.
        """
        if checkpoint is not None:
            with self.reading_states(checkpoint, "the optimizer"):
                super()._load_optimizer_and_scheduler(checkpoint)
                self.states_read()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Trainer counts labels; losses may be weighted, and the host is not to wait for the sum over ranks.

        Until a Trainer can be given the divisor of its loss.
        """
        return self.weight_of_step(batch_samples, device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Trainer waits for each tensor that it moves, and moves all of them.

        Until it moves pinned tensors without waiting, and leaves out those named.
        """
        moved = self.on_device(inputs)
        return super()._prepare_inputs(inputs) if moved is None else moved

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *rest: Any, **named: Any) -> None:
        """The only hook after the optimizer's step that has the gradient norm.

        Until a callback gets the norm.
        """
        self.after_step(grad_norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *rest, **named)

    def _evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Trainer has no way to end an evaluation; `skip_scheduler` marks the one before the first step.

        Until it has one.
        """
        at_start = bool(options.get("skip_scheduler"))
        evaluate = super()._evaluate
        return self.evaluated(lambda: dict(evaluate(*args, **options)), at_start=at_start)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Trainer writes a checkpoint into its place, where a kill leaves a part of one.

        Until it writes beside it, and renames.
        """
        self.save_checkpoint()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Trainer would call a step the best that may have no checkpoint.

        Until it judges saved steps only.
        """
        judge = super()._determine_best_metric
        return self.is_best(lambda: bool(judge(metrics=metrics, trial=trial)), metrics)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Trainer takes an interrupted run for one that has ended.

        Until it tells them apart.
        """
        with self.finishing():
            return super()._finalize_training(*args, **options)

    # ---- called

    def prepared(self, inputs: Any) -> Any:
        """A batch where the model is."""
        return self._prepare_inputs(inputs)

    def write_states(self, folder: str) -> None:
        """Optimizer, scheduler, loss scale and random states, as Trainer writes them."""
        self._save_optimizer_and_scheduler(folder)
        self._save_scaler(folder)
        self._save_rng_state(folder)

    def write_weights(self, folder: str) -> None:
        """The weights as Trainer writes them, without the hub."""
        self.save_model(folder, _internal_call=True)

    def push(self, folder: str) -> None:
        """Send a checkpoint to the hub."""
        self._push_from_checkpoint(folder)

    def evaluate_step(self) -> bool:
        """Evaluate the present step; whether it is the best."""
        return self._determine_best_metric(self._evaluate(None, None), None)

    @property
    def is_wrapped(self) -> bool:
        """Has accelerate prepared the model?"""
        return bool(self.accelerator._models) or self.model_wrapped is not self.model


# ---- arguments that are refused, beside those that contradict a schedule


def refuse_arguments(
    args: TrainingArguments, *, options: dict[str, Any], weighting: str = "token", packing: bool = True
) -> None:
    """All of them at once. `weighting` is that of the loss over tokens; `packing`: rows hold several samples."""
    problems = refused_arguments(args, "trainer", packing=packing)
    problems += [f"{name}: {why}" for name, why in REFUSED_OPTIONS.items() if options.get(name) is not None]
    if options.get("compute_loss_func") is not None and weighting != "token":
        problems.append(
            f"compute_loss_func with loss_weighting {weighting!r}: a custom loss does not get the weights, yet would "
            "be divided by their sum; use loss_weighting 'token', or leave compute_loss_func out"
        )
    if options.get("compute_loss_func") is not None and args.label_smoothing_factor:
        problems.append(f"label_smoothing_factor: {args.label_smoothing_factor} ({OWN_LOSS})")
    if problems:
        raise ConfigError(
            "training arguments",
            problems=problems,
            expected="arguments that PackedTrainer supports",
            fix="leave these out",
        )


def refuse_unsharded(args: TrainingArguments, *, is_sharded: bool) -> None:
    """Accelerate shards on GPUs only; elsewhere it would train whole copies and say nothing."""
    if args.fsdp and args.world_size > 1 and not is_sharded:
        raise ConfigError(
            "training.sharding fsdp",
            got=f"{args.world_size} processes on {args.device.type}, on which accelerate does not shard weights",
            expected="processes with a GPU each",
            fix="leave out sharding or deepspeed: each process then has a full copy (ddp)",
        )
