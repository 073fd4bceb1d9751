"""One process of a run, from loading the model on: checks before the first step, training, and the run folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.app.train.first_check import check_first_step
from packtrain.app.train.forecast import disk_warning, heaviest, memory_warning, model_prediction, predict_run
from packtrain.app.train.outcome import ProcessPlace, ReadyRun, TrainOutcome, model_card
from packtrain.app.train.resolve import resolved_sections
from packtrain.app.train.resume import (
    changes_note,
    check_frozen,
    check_length,
    check_plan,
    check_resumed,
    check_same_data,
    config_of_run,
    other_evaluation,
)
from packtrain.app.train.trainer_arguments import course_notes, make_arguments, make_course, try_arguments
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import in_one_line
from packtrain.core.numbers import counted
from packtrain.families.model_folder import PREFIX, resolve_model
from packtrain.families.registry import plugin_code
from packtrain.measuring.table import LEDGER as MEASURED
from packtrain.measuring.work import NOT_DRAWN, OTHER_PART
from packtrain.packing.pack_plan import LEDGER as PACKED
from packtrain.reports.run_page import PAGE, write_run_report
from packtrain.runs.early_warnings import MonitorLimits
from packtrain.runs.run_folder import DELIVERY, FINAL, Invocation, RunFacts, RunFolder, RunOutcome, origin
from packtrain.runs.run_summary import Summary, summarise_run
from packtrain.runs.training_run import read_run

if TYPE_CHECKING:  # torch is loaded when a run begins, not when its module is
    from rich.console import Console
    from transformers import TrainingArguments

    from packtrain.app.train.prepare import Prepared
    from packtrain.app.train.run_numbers import Dataset
    from packtrain.delivery.collate.batch_values import BatchInfo
    from packtrain.modeling.preparation import ReadyModel
    from packtrain.packing.pack_plan import PackPlan
    from packtrain.training.callbacks import RunLogger
    from packtrain.training.checkpoints import Checkpoint
    from packtrain.training.predictions import ModelPrediction
    from packtrain.training.progress import TrainingProgress
    from packtrain.training.trainer import PackedTrainer


_ROUNDED = (
    "weights are kept and updated in half precision, where small updates round to zero: training.master_weights keeps "
    "fp32 copies in the optimizer, with adamw_torch_fused, adafactor and sgd"
)
_NO_TF32 = "training.tf32 has no effect on a CPU: matrix products have the precision of the weights"
_NO_BASE = (
    "a tiny model has random weights that are not in a file, so the adapters in final/ have no base model to load them "
    "onto: model.merge_adapters=true saves merged weights"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Session:
    """A run with its model loaded, in one of its processes."""

    prepared: Prepared
    here: ProcessPlace
    loaded: ReadyModel
    prediction: ModelPrediction | None
    args: TrainingArguments
    checkpoint: Checkpoint | None
    ready: ReadyRun
    frozen: Mapping[str, str]  # fingerprints of the base weights of adapters, by dtype
    invocation: Invocation

    @classmethod
    def open(
        cls,
        prepared: Prepared,
        here: ProcessPlace,
        *,
        resume: bool,
        batch_stats: int,
        invocation: Invocation,
        progress: Callable[[Any], None] = lambda _: None,
    ) -> Session:
        """Load the model, check packing on it, and predict speed and memory; nothing is trained yet."""
        import torch

        from packtrain.modeling.adapters import frozen_state
        from packtrain.modeling.preparation import ready_model, training_device, weights_dtype
        from packtrain.training.agreement import gather_values
        from packtrain.training.checkpoints import find_latest
        from packtrain.training.resuming import checkpoint_to_resume

        run = prepared.run
        device = training_device(here.local_rank, use_cpu=bool(run.arguments.get("use_cpu")))
        args = make_arguments(prepared, bf16_weights=weights_dtype(run.model, device) == torch.bfloat16)
        try_arguments(args)
        check_same_data(prepared)
        checkpoint = checkpoint_to_resume(resume and find_latest(run.folder) is not None, run.folder, progress)
        if checkpoint is not None:
            check_resumed(RunFolder(run.folder), _inputs(prepared.dataset))
            check_plan(RunFolder(run.folder), checkpoint.path, prepared, args)
            check_length(checkpoint.step, prepared.numbers.steps)
        progress("loading the model")
        loaded = ready_model(
            run.model,
            run.setup,
            device=device,
            packing=bool(run.data.packing),
            seed=run.arguments["seed"],
            contract=prepared.dataset.contract,
            compile=run.step.compile,
        )
        prepared = _with_possible_loss(prepared, loaded)
        run = prepared.run
        # Those of rank 0: other ranks may get their weights from it later.
        frozen = gather_values(frozen_state(loaded.model))[0] if run.model.has_adapters else {}
        if checkpoint is not None:
            check_frozen(RunFolder(run.folder), frozen)
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        prediction = model_prediction(
            prepared, gpu=gpu, attention=loaded.attn_implementation, compiled=loaded.compiled, bf16=loaded.is_half
        )
        masters = loaded.trains_half and run.setup.has_masters
        notes = list(run.notes)
        if run.arguments.get("tf32") and device.type == "cpu":
            notes.append(_NO_TF32)
        if loaded.trains_half and not masters:
            notes.append(_ROUNDED)
        if checkpoint is not None:
            notes += [f"skipped, the run continues from an earlier step: {one}" for one in checkpoint.passed_over]
            notes += other_evaluation(RunFolder(run.folder), _evaluation_inputs(prepared))
        elif resume and RunFolder(run.folder).holds_run:
            notes.append("the run has no complete checkpoint yet: it starts from the beginning")
        if run.model.has_adapters and not run.merge_adapters and run.model.name.startswith(PREFIX):
            notes.append(_NO_BASE)
        workers, prefetch = args.dataloader_num_workers, args.dataloader_prefetch_factor or 2
        predicted = predict_run(prepared, prediction, workers=workers, prefetch=prefetch)
        steps, epochs = prepared.numbers.steps, prepared.numbers.epochs
        course = make_course(
            args,
            run,
            steps=steps,
            epochs=epochs,
            trained=[one.name for one in loaded.trainable if one.trained],
            dtype=str(loaded.dtype).removeprefix("torch."),
        )
        ready = ReadyRun(
            run=run,
            numbers=prepared.numbers,
            done=prepared.done,
            notes=(*notes, *course_notes(args, run, steps=steps, epochs=epochs)),
            warnings=prepared.warnings,
            risks=(*memory_warning(predicted, prepared), *disk_warning(course, prediction, run.folder)),
            course=course,
            attn_implementation=loaded.attn_implementation,
            parts=loaded.trainable,
            dtype=str(loaded.dtype).removeprefix("torch."),
            masters=masters,
            compiled=loaded.compiled,
            packing_check=check_first_step(
                prepared,
                loaded,
                _collator(prepared, prepared.dataset, loaded),
                device,
                inputs=_inputs(prepared.dataset),
                resumed=checkpoint is not None,
                progress=progress,
            ),
            expected=predicted,
            batches=_first_batches(prepared, loaded, here.world_size, batch_stats) if here.first else (),
            resumed=checkpoint.step if checkpoint is not None else 0,
        )
        return cls(
            prepared=prepared,
            here=here,
            loaded=loaded,
            prediction=prediction,
            args=args,
            checkpoint=checkpoint,
            ready=ready,
            frozen=frozen,
            invocation=invocation,
        )

    def ended_before(self) -> TrainOutcome | None:
        """The outcome of a run that is complete already, where nothing else was requested; else None."""
        folder, run = RunFolder(self.prepared.run.folder), self.prepared.run
        if self.checkpoint is None or not folder.holds_run:
            return None
        ended = folder.facts().outcome or RunOutcome(status="running")
        final, report = folder.path / FINAL, Path(run.config.report.out or folder.path / PAGE).expanduser()
        if ended.status != "complete" or ended.steps != self.prepared.numbers.steps or not final.is_dir():
            return None
        before = config_of_run(folder.path, run.config)
        same = not changes_note(before, run.config) and before.report == run.config.report
        if self.checkpoint.step < ended.step or not same:
            return None
        return TrainOutcome(
            folder=folder.path,
            ready=self.ready,
            outcome=ended,
            report=report if report.is_file() else None,
            final=final,
            problems=("the run was already complete: nothing was trained, and its folder is unchanged",),
        )

    def train(self, console: Console | None) -> TrainOutcome:
        """Train until the end, or until it is stopped."""
        from packtrain.runs.metrics_log import METRICS, MetricsLog
        from packtrain.training.callbacks import RunLogger

        folder = RunFolder(self.prepared.run.folder)
        if self.here.first:
            self._begin(folder)
        started, trainer = time.monotonic(), None
        with MetricsLog(folder.path / METRICS if self.here.first else None) as log:
            shown = self._progress(console)
            watch = RunLogger(log, shown, MonitorLimits.of(self.prepared.run.config.training.monitors or {}))
            try:
                trainer = self._trainer(watch)
                with shown:
                    trainer.train(resume_from_checkpoint=self.checkpoint)
                status, detail = _end_status(trainer)
            except BaseException as error:
                detail = in_one_line(error)
                status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                self._finish(folder, self._outcome(status, detail, trainer, watch, started))
                raise
        outcome = self._outcome(status, detail, trainer, watch, started)
        final = self._export(trainer, folder, outcome) if status == "complete" else None
        report, problems = self._finish(folder, outcome)
        return TrainOutcome(
            folder=folder.path, ready=self.ready, outcome=outcome, report=report, final=final, problems=problems
        )

    def _begin(self, folder: RunFolder) -> None:
        """Write what is about to be trained into the run folder."""
        prepared, run = self.prepared, self.prepared.run
        plan, schedule = prepared.dataset.plan, prepared.dataset.schedule
        facts = RunFacts(
            title=run.config.report.title,
            model=run.model.name,
            families=plugin_code(),
            origin=origin(run.model.name, run.arguments["seed"]),
            mode=run.mode,
            plan=None if run.data.online else str(plan.folder),
            cost_table=None if run.data.online else plan.summary.cost_table,
            planned_epochs=plan.num_epochs,
            packs_per_step=run.data.packs_per_step,
            rows_per_batch=run.data.rows_per_batch,
            seed=run.data.seed,
            balance=run.data.order,
            world_size=run.world_size,
            fingerprints={"plan": None if run.data.online else plan.fingerprint, "schedule": schedule.hash},
            measured=_inputs(prepared.dataset),
            evaluated=_evaluation_inputs(prepared),
            frozen=dict(self.frozen),
            derived=self.ready.derived(),
            notes=(*self.ready.warnings, *self.ready.notes, *self.ready.risks),
            prepared=self.ready.done,
            invocation=self.invocation,
            outcome=RunOutcome(status="running", step=self.ready.resumed, steps=prepared.numbers.steps),
        )
        if self.checkpoint is not None and folder.holds_run:
            before = folder.facts()  # of the start of the run, not of this process
            invocation = replace(self.invocation, planned_in=before.invocation.planned_in)
            facts = replace(facts, began=before.began, invocation=invocation)
        folder.begin(resolved_sections(run, packing_length=prepared.numbers.packing_length), facts)
        folder.write_ledger(self._ledger())

    def _finish(self, folder: RunFolder, outcome: RunOutcome) -> tuple[Path | None, tuple[str, ...]]:
        """Write how it ended to run.json and the report; a fault there must not hide the outcome of the run."""
        if not self.here.first:
            return None, ()
        try:
            folder.finish(outcome, self._ledger())
            out = self.prepared.run.config.report.out
            return write_run_report(folder.path, out=Path(out).expanduser() if out is not None else None), ()
        except Exception as error:  # the weights are saved already, whatever is wrong with the report
            lines = str(error).splitlines()
            return None, (f"the report could not be written: {type(error).__name__}: {lines[0] if lines else ''}",)

    def _ledger(self) -> Iterator[bytes]:
        """Lines about training data and evaluation data; delivery writes those of a stream."""
        prepared = self.prepared
        if not prepared.run.data.online:
            yield from _ledger_lines(prepared.dataset.plan)
        if prepared.evaluation is not None:
            held_out = not prepared.run.config.data.eval_path  # of the same data: who is in which part was said
            chosen = {NOT_DRAWN, OTHER_PART} if held_out else set()
            for line in _ledger_lines(prepared.evaluation.plan):
                entry = json.loads(line)
                if f"{entry['stage']}: {entry['reason']}" not in chosen:
                    yield line

    def _outcome(
        self, status: str, detail: str, trainer: PackedTrainer | None, watch: RunLogger, started: float
    ) -> RunOutcome:
        last, numbers = watch.last, _summary(self.prepared.run.folder) if self.here.first else None
        return RunOutcome(
            status=status,
            step=trainer.state.global_step if trainer is not None else self.ready.resumed,
            steps=self.prepared.numbers.steps,
            loss=numbers.loss_end if numbers is not None else None,
            loss_samples=round(numbers.loss_window) if numbers is not None else None,
            eval_loss=watch.eval_loss,
            samples_seen=last.samples_seen if last is not None else 0,
            undelivered=trainer.failures.verdict.failures if trainer is not None else 0,
            tokens_per_second=numbers.tokens_per_second if numbers is not None else None,
            seconds=round(watch.seconds_before + time.monotonic() - started, 3),
            detail=detail,
        )

    def _progress(self, console: Console | None) -> TrainingProgress:
        from rich.console import Console

        from packtrain.training.progress import TrainingProgress

        numbers = self.prepared.numbers
        per_step = numbers.tokens / numbers.steps_per_epoch
        return TrainingProgress(
            console or Console(quiet=True),
            steps=numbers.steps,
            work=per_step * numbers.steps,
            done_steps=self.ready.resumed,
            done_work=per_step * self.ready.resumed,
            quiet=console is None,
            every=self.ready.course.logged_every,
        )

    def _trainer(self, watch: RunLogger) -> PackedTrainer:
        from packtrain.delivery.loader.failures import FailureCounter
        from packtrain.training.meter import StepMeter
        from packtrain.training.trainer import PackedTrainer

        prepared, run, loaded = self.prepared, self.prepared.run, self.loaded
        if (logs := run.config.training.logging_dir) is not None:
            os.environ["TENSORBOARD_LOGGING_DIR"] = os.path.abspath(os.path.expanduser(logs))
        evaluation, predicted = prepared.evaluation, self.prediction
        if predicted is not None and not run.data.online:
            predicted = replace(predicted, heaviest=heaviest(prepared, predicted))
        meter = StepMeter(
            model=predicted,
            world_size=self.here.world_size,
            rank=self.here.rank,
            capacity=prepared.numbers.packing_length if run.data.packing else None,
        )
        return PackedTrainer(
            model=loaded.model,
            args=self.args,
            train_dataset=prepared.dataset,
            data_collator=_collator(prepared, prepared.dataset, loaded),
            eval_dataset=evaluation,
            eval_collator=_collator(prepared, evaluation, loaded) if evaluation is not None else None,
            step=run.step,
            meter=meter,
            on_host=loaded.on_host,
            on_step=watch.on_step,
            # With several processes the model is checked as it is wrapped.
            packing_check=run.packing_check and self.here.world_size > 1,
            checked=self.ready.packing_check,
            on_packing_check=watch.on_packing_check if run.is_sharded else None,  # else it is shown before the run
            rank_timeout=run.rank_timeout,
            memory_model=None if run.data.online else predicted,
            callbacks=[watch],
            failures=FailureCounter(
                float(run.data.max_failure_rate or 0),
                run.folder / DELIVERY,
                on_error="fail" if run.data.on_error == "fail" else "skip",
            ),
        )

    def _export(self, trainer: PackedTrainer, folder: RunFolder, outcome: RunOutcome) -> Path:
        """Save the final weights; all processes take part where they are sharded."""
        from packtrain.modeling.export import save_final

        run = self.prepared.run
        target = folder.path / FINAL
        state = trainer.whole_state_dict() if trainer.is_fsdp_enabled else None
        if self.here.first:
            save_final(
                trainer.accelerator.unwrap_model(trainer.model),
                target,
                merge_adapters=run.merge_adapters,
                processor_folder=resolve_model(run.model.name, cache_dir() / "models"),
                limits=run.data.media_limits(),
                state_dict=state,
                chat_template=run.data.own_template(),
                card=model_card(self.ready, outcome, merged=run.merge_adapters),
            )
        return target


def _ledger_lines(plan: PackPlan) -> Iterator[bytes]:
    """What measuring and packing left out."""
    assert plan.folder is not None, "plans of runs have a folder"
    for ledger in (Path(plan.summary.cost_table) / MEASURED, plan.folder / PACKED):
        if ledger.is_file():
            with ledger.open("rb") as lines:
                yield from lines


def _summary(folder: Path) -> Summary | None:
    """The numbers of the run's report; a fault here must not hide the outcome of the run."""
    try:
        return summarise_run(read_run(folder))
    except Exception:
        return None


def _end_status(trainer: PackedTrainer) -> tuple[str, str]:
    """The status of a run that ended, and why it ended before its last step."""
    if trainer.interrupted:
        return "interrupted", trainer.interrupted
    patience, state = trainer.settings.early_stopping_patience, trainer.state
    if patience is not None and state.global_step < state.max_steps:
        return "complete", f"early stopping: no improvement in {counted(patience, 'evaluation')}"
    return "complete", ""


def _with_possible_loss(prepared: Prepared, loaded: ReadyModel) -> Prepared:
    """The loss from whole logits where an unlisted model's cannot be taken in chunks, which is the default."""
    from packtrain.modeling.chunked_loss import why_not_chunked

    run = prepared.run
    why = why_not_chunked(loaded.model) if prepared.dataset.contract.unlisted and run.step.chunked_loss else ""
    if not why:
        return prepared
    step, setup = replace(run.step, chunked_loss=False), replace(run.setup, chunked_loss=False)
    note = f"chunked_loss: false, since this model has {why}; logits of whole rows take more memory"
    return replace(prepared, run=replace(run, step=step, setup=setup, notes=(*run.notes, note)))


def _collator(prepared: Prepared, dataset: Dataset, loaded: ReadyModel) -> Any:
    from packtrain.modeling.preparation import collator_of, round_up_shapes

    static_shapes = None
    if loaded.compiled and dataset.config.packing:
        static_shapes = round_up_shapes(prepared.numbers.packing_length)
    return collator_of(dataset, loaded, prepared.run.step.loss_weighting, static_shapes)


def _evaluation_inputs(prepared: Prepared) -> Mapping[str, Any] | None:
    """The fingerprint of the evaluation data."""
    return prepared.evaluation.plan.summary.inputs if prepared.evaluation is not None else None


def _inputs(dataset: Dataset) -> Mapping[str, Any]:
    """The fingerprint of the data; for a stream, of its beginning."""
    plan: Any = dataset.plan
    return dict(plan.inputs if dataset.config.online else plan.summary.inputs)


def _first_batches(
    prepared: Prepared, loaded: ReadyModel, world_size: int, count: int
) -> tuple[tuple[BatchInfo, ...], ...]:
    """The first batches of every rank, decoded as in training."""
    if not count:
        return ()
    collate = _collator(prepared, prepared.dataset, loaded)
    loaders = (
        prepared.dataset.loader(collate, rank=rank, world_size=world_size, span="run") for rank in range(world_size)
    )
    return tuple(tuple(batch.info for batch in islice(loader, count)) for loader in loaders)
