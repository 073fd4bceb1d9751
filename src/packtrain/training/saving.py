"""Saving and resuming, as a part of the trainer: Trainer's own files, in checkpoints that are whole or not there.

What is read back when a run is resumed, and how:

    *.safetensors                     weights and adapters: no code in the format
    optimizer.pt, scheduler.pt, ...   torch.load(weights_only=True), by Trainer itself
    rng_state*.pth                    the same, with arrays of numpy allowed
    *.metadata, *.distcp              of FSDP: pickles, which torch unpickles; looked through first (`sharded_files`)
    *.json                            plain values
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from packtrain.core.errors import ArtifactError
from packtrain.modeling.load import reload_adapters, reload_weights
from packtrain.training.agreement import fail_together, gather_faults
from packtrain.training.callbacks import RunFlow, is_due
from packtrain.training.checkpoints import Checkpoint, CheckpointFolder, bytes_to_save, read_checkpoint
from packtrain.training.hf_trainer import HFTrainer
from packtrain.training.loss import EvaluationStopped
from packtrain.training.resuming import OTHER_STATES, checkpoint_to_resume, require_undamaged, states_in_words
from packtrain.training.sharded_files import refuse_code
from packtrain.training.step_settings import StepSettings


@runtime_checkable
class BeforeSaving(Protocol):
    """A callback that has to flush something to the disk before a checkpoint is there."""

    def before_saving(self) -> None:
        """The checkpoint of this step is about to be written."""
        ...


@runtime_checkable
class OnInterrupt(Protocol):
    """A callback that answers a request to stop."""

    def on_interrupt(self) -> None:
        """The run will stop after its step. Called in a thread of its own."""
        ...


class CheckpointingTrainer(HFTrainer):
    """Trainer whose checkpoints are whole or not there."""

    settings: StepSettings
    _flow: RunFlow
    _resumed: Path | None = None  # the checkpoint that the present call of `train` goes on from

    def _checkpoint(self, given: Checkpoint | str | Path | bool | None) -> str | None:
        """The folder to go on from; all ranks agree on its step. One that was chosen before is as it was then."""
        checkpoint = given
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = checkpoint_to_resume(checkpoint, Path(str(self.args.output_dir)))
            for words in checkpoint.passed_over if checkpoint is not None else ():
                warnings.warn(f"skipped, the run continues from an earlier step: {words}", stacklevel=3)
        self._resumed = None if checkpoint is None else checkpoint.path
        return None if checkpoint is None else str(checkpoint.path)

    def load_weights(self, model: Any, checkpoint: str) -> bool:
        """All weights or adapters of a model that every rank has whole, or an error; Trainer reads sharded ones."""
        read = reload_adapters if _is_peft(model) else reload_weights
        if self._is_sharded or not (_is_peft(model) or isinstance(model, PreTrainedModel)):
            return False
        with _without_bars():
            fail_together(lambda: read(model, Path(checkpoint)), checkpoint, "weights that all ranks can read")
        return True

    def load_best_weights(self) -> bool:
        """The same, at the end of a run that keeps its best. Where that is, a file of a checkpoint may have said."""
        best = Path(str(self.state.best_model_checkpoint))
        fail_together(
            lambda: refuse_code(read_checkpoint(best).path), str(best), "a checkpoint that all ranks can read"
        )
        require_undamaged(read_checkpoint(best))
        return self.load_weights(self.model, str(best))

    def reading_states(self, checkpoint: str | None, what: str) -> AbstractContextManager[Any]:
        """In words, whatever is wrong with them."""
        other = f"{what} of another kind"
        return states_in_words(checkpoint, other if what != "the optimizer" else OTHER_STATES)

    @property
    def _is_sharded(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _go_on(self) -> None:
        """Before the first step: an evaluation that an interrupt prevented comes first, as it would have come."""
        self._set_others_aside()
        if not self._makes_up:
            return
        state, best = self.state, self.evaluate_step()
        if best and state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(self._resumed)  # of this step, and saved already

    @property
    def _makes_up(self) -> bool:
        """Does the checkpoint lack an evaluation that can be made?"""
        return is_due(self.state) and self.eval_dataset is not None

    @property
    def has_steps_left(self) -> bool:
        """Not where a resumed run has come to its end already."""
        return not self.control.should_training_stop and self.state.global_step < self.state.max_steps

    def evaluated(self, evaluate: Callable[[], dict[str, float]], *, at_start: bool) -> dict[str, float]:
        """A signal ends an evaluation: the run then saves and stops, and has no numbers of it."""
        if at_start and self._makes_up:  # it was just made
            return {}
        try:
            with self._flow.evaluating():
                return evaluate()
        except EvaluationStopped:
            self._flow.cut(self.state, self.control)
            return {}

    def _set_others_aside(self) -> None:
        """Checkpoints that this run will not come by are not its own: no later resume or rotation may take them so."""
        moved, fault = list[Path](), None
        try:
            moved = self._checkpoints.set_aside(self._resumed)
        except (OSError, ArtifactError) as error:
            fault = " ".join(str(error).split())
        if faults := gather_faults(fault):
            raise ArtifactError(
                str(self.args.output_dir),
                got="; ".join(faults),
                expected="a folder in which checkpoints of another run can be renamed",
                fix="save elsewhere (output_dir)",
            )
        if moved and self._checkpoints.writes:
            begun = "again" if self._resumed is None else f"from {self._resumed.name}"
            names = ", ".join(path.name for path in moved)
            text = f"the run starts {begun}, so checkpoints of another run were renamed: {names}"
            warnings.warn(f"{self.args.output_dir}: {text}", stacklevel=2)

    @property
    def _checkpoints(self) -> CheckpointFolder:
        args = self.args
        return CheckpointFolder(
            folder=Path(str(args.output_dir)),
            writes=args.process_index == 0,
            per_machine=args.local_process_index == 0,
            limit=args.save_total_limit,
        )

    def save_checkpoint(self) -> None:
        """In Trainer's format, and whole or not there."""
        self.store_flos()
        folder, state, whole = self._checkpoints, self.state, not self.args.save_only_model
        if state.best_global_step:
            best = folder.path(state.best_global_step)
            if state.best_global_step == state.global_step or best.is_dir():
                state.best_model_checkpoint = str(best)
        parts: list[Callable[[Path], None]] = [self._before_saving, self._write_weights]
        if whole:
            parts.append(lambda path: self.write_states(str(path)))
        saved = folder.save(
            state.global_step,
            [*parts, self._write_state],
            needed=bytes_to_save(self.model, self.optimizer if whole else None, only_trained=_has_adapters(self.model)),
            resumable=whole,
            best=Path(state.best_model_checkpoint) if state.best_model_checkpoint else None,
        )
        if self.args.push_to_hub:
            self.push(str(saved))

    def _before_saving(self, path: Path) -> None:
        """A part of the checkpoint, so that a fault of one rank is one of all."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, BeforeSaving):
                callback.before_saving()

    def _write_weights(self, path: Path) -> None:
        with _without_bars():
            self.write_weights(str(path))
        if not self.args.should_save:
            return
        (path / "training_args.bin").unlink(missing_ok=True)  # arguments as a pickle, which nothing reads
        if not self._is_sharded:
            _require_saved(self.model, path)

    def _write_state(self, path: Path) -> None:
        if not self.args.should_save:
            return
        kept = self.state.stateful_callbacks
        assert isinstance(kept, dict)
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                kept[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(path / "trainer_state.json"))

    def is_best(self, judge: Callable[[], bool], metrics: dict[str, float]) -> bool:
        """Only among steps that may have a checkpoint."""
        if not metrics:  # it was cut short
            return bool(self.control.should_save)
        return self.state.global_step >= self.settings.save_delay_steps and judge()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """An interrupted run keeps its newest checkpoint, and its weights as they are."""
        best = self.state.best_model_checkpoint
        if self._flow.interrupted is not None:
            self.state.best_model_checkpoint = None
        try:
            yield
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


def _require_saved(model: Any, path: Path) -> None:
    """A checkpoint without what a run is resumed from would be found out too late. One line: others are cut off."""
    pattern = "**/adapter_model.safetensors" if _is_peft(model) else "model*.safetensors"
    if not any(path.glob(pattern)):
        names = ", ".join(sorted(one.name for one in path.iterdir())) or "nothing"
        way = "" if _is_peft(model) or not _has_adapters(model) else "; add adapters with get_peft_model"
        raise ArtifactError(f"no {pattern.removeprefix('**/')} was written, but {names}{way}")


def _is_peft(model: Any) -> bool:
    """A model that peft has wrapped. Adapters that transformers itself has put into one cannot be resumed."""
    return _has_adapters(model) and not isinstance(model, PreTrainedModel)


def _has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")
