"""Saving and resuming, as a part of the trainer: Trainer's own files, in checkpoints that are whole or not there.

What is read back when a run is resumed, and how:

    *.safetensors                     weights and adapters: no code in the format
    optimizer.pt, scheduler.pt, ...   torch.load(weights_only=True), by Trainer itself
    rng_state*.pth                    the same, with arrays of numpy allowed
    */.metadata                       of FSDP: a pickle, which torch unpickles; looked through first (`sharded_files`)
    *.json                            plain values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.utils import logging

from packtrain.core.errors import ArtifactError
from packtrain.training.checkpoints import CheckpointFolder, bytes_to_save, find_latest, read_checkpoint
from packtrain.training.flow import RunFlow
from packtrain.training.settings import StepSettings
from packtrain.training.sharded_files import refuse_code


class SafeCheckpoints:
    """Stands before Trainer."""

    args: TrainingArguments
    state: TrainerState
    settings: StepSettings
    _flow: RunFlow
    model: Any
    model_wrapped: Any
    optimizer: Any
    control: Any
    callback_handler: Any
    is_fsdp_enabled: bool

    def _checkpoint(self, given: str | Path | bool | None) -> str | None:
        """The folder to go on from; one that is not complete is refused."""
        if given is None or given is False:
            return None
        found = find_latest(Path(str(self.args.output_dir))) if given is True else read_checkpoint(Path(given))
        if found is None or not found.resumable:
            raise ArtifactError(
                str(self.args.output_dir if given is True else given),
                got="no complete checkpoint" if found is None else "weights only (save_only_model)",
                expected="a checkpoint of this trainer",
                fix="start without resuming",
            )
        refuse_code(found.path)
        return str(found.path)

    @property
    def _checkpoints(self) -> CheckpointFolder:
        args = self.args
        return CheckpointFolder(
            folder=Path(str(args.output_dir)),
            writes=args.process_index == 0,
            per_machine=args.local_process_index == 0,
            limit=args.save_total_limit,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """In Trainer's format, and whole or not there."""
        self.store_flos()  # type: ignore[attr-defined]
        folder, state, whole = self._checkpoints, self.state, not self.args.save_only_model
        if state.best_global_step:
            best = folder.path(state.best_global_step)
            if state.best_global_step == state.global_step or best.is_dir():
                state.best_model_checkpoint = str(best)
        parts: list[Callable[[Path], None]] = [self._write_weights]
        if whole:
            parts += [
                lambda path: self._save_optimizer_and_scheduler(str(path)),  # type: ignore[attr-defined]
                lambda path: self._save_scaler(str(path)),  # type: ignore[attr-defined]
                lambda path: self._save_rng_state(str(path)),  # type: ignore[attr-defined]
            ]
        saved = folder.save(
            state.global_step,
            [*parts, self._write_state],
            needed=bytes_to_save(self.model, self.optimizer if whole else None, only_trained=_has_adapters(self.model)),
            resumable=whole,
            best=Path(state.best_model_checkpoint) if state.best_model_checkpoint else None,
        )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(saved))  # type: ignore[attr-defined]

    def _write_weights(self, path: Path) -> None:
        with _without_bars():
            self.save_model(str(path), _internal_call=True)  # type: ignore[attr-defined]
        if self.args.should_save:  # arguments as a pickle, which nothing reads
            (path / "training_args.bin").unlink(missing_ok=True)

    def _write_state(self, path: Path) -> None:
        if not self.args.should_save:
            return
        kept = self.state.stateful_callbacks
        assert isinstance(kept, dict)
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                kept[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(path / "trainer_state.json"))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Only among steps that may have a checkpoint."""
        if self.state.global_step < self.settings.save_delay_steps:
            return False
        found: bool = super()._determine_best_metric(metrics=metrics, trial=trial)  # type: ignore[misc]
        return found

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Trainer's own. An interrupted run keeps its newest checkpoint, and its weights as they are."""
        best = self.state.best_model_checkpoint
        if self._flow.interrupted is not None:
            self.state.best_model_checkpoint = None
        try:
            return super()._finalize_training(*args, **options)  # type: ignore[misc]
        finally:
            self.state.best_model_checkpoint = best

    def whole_state_dict(self) -> dict[str, Tensor] | None:
        """All weights on the host of the first rank, where they are sharded; None where every rank has them anyway.

        All ranks call it; the others get an empty one.
        """
        if not self.is_fsdp_enabled:
            return None
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(self.model_wrapped, options=options))


@contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers shows a progress bar for every file of weights; only the command line shows progress."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")
