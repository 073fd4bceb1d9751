"""The trainer: transformers.Trainer over packs, with a loss over tokens, safe checkpoints and an orderly end.

    trainer = PackedTrainer(model=model, args=args, train_dataset=dataset, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=True)
    if trainer.interrupted: ...            # a checkpoint was saved; the same call goes on from it

The model's trainable parameters are decided before; it is prepared for packs (`modeling.prepare_model`) unless it
already is. Everything else about a step is here or in the modules beside this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainingArguments
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from packtrain.core.errors import ConfigError
from packtrain.delivery.collate.batch_values import LOSS_WEIGHTS, Batch, BatchInfo
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.trainers.mixin import PackedTrainerMixin
from packtrain.delivery.trainers.refused_arguments import SHARDED
from packtrain.delivery.trainers.watch import START_DEADLINE, RankWatchdog
from packtrain.modeling.attention import has_own_attention
from packtrain.modeling.compiled import refuse_uncompiled
from packtrain.modeling.model_parts import HALF
from packtrain.modeling.preparation import prepare_model, ready_for_steps
from packtrain.modeling.vision import checkpoint_parts
from packtrain.runs.step_metrics import StepMetrics, flat
from packtrain.training.agreement import world_size
from packtrain.training.callbacks import EarlyStopping, FreezeObjects, RunFlow, save_state, saved_state
from packtrain.training.checkpoints import Checkpoint, lost_by_stopping
from packtrain.training.first_packs import check_first_packs
from packtrain.training.hf_trainer import refuse_arguments, refuse_unsharded
from packtrain.training.interrupts import Interrupts
from packtrain.training.loss import LogitsTokenLoss, StepTotals, TokenLossSum, clear_unused_grads, evaluate, make_losses
from packtrain.training.masters import masters_of
from packtrain.training.meter import Meter
from packtrain.training.optimizers import build_optimizer
from packtrain.training.predictions import DeviceMemory, Failure, ModelPrediction, explain, is_memory_error
from packtrain.training.resuming import reading_sharded_states, require_shapes, settings_as_asked
from packtrain.training.saving import CheckpointingTrainer, OnInterrupt
from packtrain.training.step_settings import StepSettings
from packtrain.verifying.check_result import CheckReport
from packtrain.verifying.packing_check import Training

_METER = "packtrain.meter"  # its name in trainer_state.json
WATCH_DEADLINE = 120.0  # seconds until all ranks have ended when one has


class PackedTrainer(PackedTrainerMixin, CheckpointingTrainer):
    """Trains a model on a dataset of packs, or on padded rows; evaluates on another; see docs/reference/trainer.md.

    on_step       gets the metrics of each step, on every rank; Trainer then prints nothing of its own
    on_packing_check  gets the result of that check, once it has passed
    packing_check  whether packing is checked on the samples of the first batch before training
    checked       the report of such a check that has passed on this model and data
    watch_deadline seconds in which all ranks end when one fails or dies; None: they do not watch each other
    rank_timeout  the same where one falls behind the others, as while its data do not come; None: watch_deadline
    memory_model  predicts what would have fitted when memory ends
    on_host       names of what stays on the host when a batch is moved, as `modeling.host_sync.avoid_host_sync` says
    """

    def __init__(
        self,
        *,
        model: Any,
        args: TrainingArguments,
        train_dataset: Any,
        data_collator: Any = None,
        eval_dataset: Any = None,
        eval_collator: Any = None,
        step: StepSettings | None = None,
        meter: Meter | None = None,
        on_step: Callable[[Any], None] | None = None,
        on_packing_check: Callable[[CheckReport], None] | None = None,
        packing_check: bool = True,
        checked: CheckReport | None = None,
        watch_deadline: float | None = WATCH_DEADLINE,
        rank_timeout: float | None = None,
        memory_model: ModelPrediction | None = None,
        on_host: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.settings = step if step is not None else StepSettings()
        packing = getattr(getattr(train_dataset, "config", None), "packing", True)
        refuse_arguments(args, options=options, weighting=self.settings.loss_weighting, packing=packing)
        self._meter: Meter = meter if meter is not None else Meter()
        self._on_step, self._on_packing_check = on_step, on_packing_check
        self._checks_packing, self._deadline, self._rank_timeout = packing_check, watch_deadline, rank_timeout
        self._memory_model, self._on_host = memory_model, tuple(on_host)
        contract = getattr(train_dataset, "contract", None)
        # Packs of an unlisted model are trained only after the check, and it takes the rows of our own collator.
        own_rows = packing_check and isinstance(data_collator, PackCollator | None)
        if packing and contract is not None and contract.unlisted and checked is None and not own_rows:
            raise ConfigError(
                "packing_check" if not packing_check else "data_collator",
                got=f"{contract.model_type!r}, which is trained on packs only where the packing check passes",
                expected="packing_check=True and the dataset's own collator",
                fix="leave both out, or train on padded rows (packing: false)",
            )
        if packing and hasattr(getattr(model, "config", None), "to_dict") and has_own_attention(model):
            prepare_model(model, device=args.device, contract=contract)
        ready_for_steps(model, self.settings.vision_batch_patches, contract=contract)
        if args.fsdp and "state_dict_type" not in (args.fsdp_config or {}):
            args.fsdp_plugin_args["state_dict_type"] = SHARDED
        if args.ddp_find_unused_parameters is None:
            # The vision encoder takes part in every batch, and looking costs time; unlisted models may have weights
            # that they never use, as those of a pooling head.
            args.ddp_find_unused_parameters = contract is not None and contract.unlisted
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        given_loss = options.get("compute_loss_func") is not None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            data_collator=data_collator if data_collator is not None else self._make_collator(train_dataset, model),
            eval_dataset=eval_dataset,
            eval_collator=eval_collator,
            **options,
        )
        refuse_unsharded(args, is_sharded=self.is_fsdp_enabled)
        if use_cache is not None:  # Trainer turns it off, and would save it so; batches say it themselves
            self.model.config.use_cache = use_cache
        self._losses: TokenLossSum | None = None
        if not given_loss:
            self._losses = make_losses(model, self.settings, args.label_smoothing_factor)
        self._interrupts, self._freeze = Interrupts(), FreezeObjects()
        self._flow = RunFlow(self._interrupts, self.decision, save_delay_steps=self.settings.save_delay_steps)
        self._watch: RankWatchdog | None = None
        self.check_report: CheckReport | None = None  # of the check before the first step
        self._targets: Any = None
        self._step_loss: Tensor | float = 0.0
        self._totals: StepTotals | None = None
        self._steps_logged = self._losses_logged = 0  # steps since the last log, and those of them that have a loss
        self._rates: dict[str, float] = {}
        self._metrics: Any = None
        self._metered = 0  # the last step that was measured
        self._latest, self._doing = BatchInfo(), "the start"
        self._fitted = self._allocated = 0
        self._listen()

    def _listen(self) -> None:
        """Callbacks, in the order in which they decide; Trainer's own print, unless steps are shown by `on_step`."""
        if self._on_step is not None:
            for theirs in (PrinterCallback, ProgressCallback):
                self.remove_callback(theirs)
        patience = self.settings.early_stopping_patience
        if patience is not None:
            threshold = self.settings.early_stopping_threshold
            self.add_callback(EarlyStopping(patience=patience, threshold=threshold))
        self.add_callback(self._flow)
        self.add_callback(self._freeze)
        self.add_callback(_Hooks(self))

    @property
    def interrupted(self) -> str | None:
        """The signal that ended the last call of `train`, after a checkpoint was saved."""
        return self._flow.interrupted

    # ---- the run

    def train(self, resume_from_checkpoint: Checkpoint | str | Path | bool | None = None, **options: Any) -> Any:
        """Trainer's own; True resumes from the newest complete checkpoint of the output folder that is undamaged."""
        checkpoint = self._checkpoint(resume_from_checkpoint)
        self._checkpoints.clean()
        with self._interrupts, self._watching(), self._freeze:
            try:
                return super().train(resume_from_checkpoint=checkpoint, **options)
            except Exception as error:
                if is_memory_error(error):
                    raise self._out_of_memory(error) from error
                refuse_uncompiled(error)
                raise
            finally:
                self._meter.detach()

    def _watching(self) -> AbstractContextManager[Any]:
        self._interrupts.on_first = self._answer
        self._interrupts.lost = lambda: lost_by_stopping(Path(str(self.args.output_dir)))
        if world_size() == 1 or self._deadline is None:
            return nullcontext()
        timeout = self._rank_timeout if self._rank_timeout is not None else self._deadline
        self._watch = RankWatchdog.of_group(
            deadline=min(self._deadline, timeout), step_deadline=timeout, start_deadline=max(START_DEADLINE, timeout)
        )
        return self._watch

    def _answer(self) -> None:
        """The run was asked to stop."""
        if self._watch is not None:
            self._watch.hurry()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, OnInterrupt):
                callback.on_interrupt()

    def _out_of_memory(self, error: BaseException) -> Exception:
        plan = self.train_dataset.schedule.plan
        failure = Failure(
            rank=self.args.process_index,
            step=self.state.global_step + 1,
            doing=self._doing,
            batch=self._latest,
            capacity=plan.config.packing_length,
            fitted=self._fitted,
        )
        return explain(error, failure, DeviceMemory.of(self.args.device, before=self._allocated), self._memory_model)

    # ---- a step

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer's own optimizer, with a group for each part of the model and fp32 masters of half weights."""
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        self.optimizer = build_optimizer(model, self.args, self.settings, self.optimizer_cls_and_kwargs)
        return self.optimizer if self.optimizer is not None else super().create_optimizer(model)

    @contextmanager
    def reading_states(self, checkpoint: str | None, what: str) -> Iterator[None]:
        """Settings stay those of the arguments."""
        with ExitStack() as stack:
            stack.enter_context(super().reading_states(checkpoint, what))
            if checkpoint is not None and what == "the optimizer":
                if not self.is_deepspeed_enabled:
                    stack.enter_context(settings_as_asked(self.optimizer, self.lr_scheduler, checkpoint))
                stack.enter_context(reading_sharded_states(self.optimizer, self.model, Path(checkpoint)))
            yield

    def states_read(self) -> None:
        """A shape that differs is found now, not in the first step."""
        if not self.is_deepspeed_enabled:
            require_shapes(self.optimizer)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of a step, and what its sum of losses is divided by."""
        self._meter.begin()
        self._step_loss, self._doing = 0.0, "waiting for data"
        if device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(device)
        batches: list[Batch] = []
        for _ in range(num_batches):
            start = time.perf_counter()
            batch = next(epoch_iterator, None)
            if batch is None:
                break
            self._meter.add_batch(batch.info, time.perf_counter() - start)
            batches.append(batch)
        if self._watch is not None:
            self._watch.beat(self.state.global_step)
        return batches, self.weight_of_step(batches, device)

    def weight_of_step(self, batches: list[Any], device: torch.device) -> Tensor:
        """The weight of all supervised tokens of the step on all ranks; the host does not wait for it."""
        self._totals = StepTotals(batches, device)
        return self._totals.weight

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Trainer's own; where loss is, is found before the batch leaves the host."""
        self._latest, self._doing = inputs.info, "forward and backward"
        self._targets = self._losses.targets(inputs) if self._losses is not None else None
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = self._step_loss + loss
        self._fitted = max(self._fitted, self._latest.tokens + self._latest.padding)
        self._doing = "the optimizer's step"
        return loss

    def on_device(self, inputs: Any) -> Any:
        """Without waiting for it where memory is pinned."""
        if not isinstance(inputs, Batch) or self.is_deepspeed_enabled:
            return None
        kept = {name: inputs.pop(name) for name in self._on_host if name in inputs}
        moved = inputs.to(self.args.device, non_blocking=True)
        moved.update(kept)
        return moved

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """The batch's share of the step's loss, times the number of ranks, whose gradients are averaged."""
        if self._losses is None:  # the user's own
            inputs.pop(LOSS_WEIGHTS, None)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        total, outputs = self._losses.total(model, inputs, self._targets)
        assert num_items_in_batch is not None, "every batch belongs to a step"
        loss = total / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _leave_unreached(self) -> None:
        """Let the optimizer pass over what no batch of the step has reached; schedules go on."""
        if self._totals is None:
            return
        has_loss = self._losses is None or self._totals.has_loss  # users may have a loss of their own
        self._steps_logged += 1
        self._losses_logged += has_loss
        idle = not has_loss and self.accelerator.scaler is None  # a scaler wants gradients to look at
        if idle or not self._totals.has_media:
            clear_unused_grads(self.model, everything=idle)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here, where every batch would walk through all parameters: the meter knows better."""
        return 0

    # ---- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss over the tokens of a dataset of packs, the same number packed and padded; of several, by name."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        datasets = {metric_key_prefix: dataset}
        if isinstance(dataset, dict):
            datasets = {f"{metric_key_prefix}_{name}": one for name, one in dataset.items()}
        done = [self._evaluate_one(one, prefix) for prefix, one in datasets.items()]
        for metrics in done:  # all of them or none: what was told before a signal would be told again after it
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return {name: value for metrics in done for name, value in metrics.items()}

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        started, doing = time.perf_counter(), self._doing
        self._doing = "evaluation"
        model, loader, device = self._model_to_evaluate(), self.get_eval_dataloader(dataset), self.args.device
        outcome = evaluate(model, loader, self._sum_of, device, self._flow.stops(device))
        seconds, self._doing = time.perf_counter() - started, doing
        outcome.warn(prefix, first=self.args.process_index == 0)
        return outcome.metrics(prefix, seconds)

    def _collator_to_evaluate(self, dataset: Any) -> Any:
        return self._make_collator(dataset, self.model)

    def _make_collator(self, dataset: Any, model: Any) -> Any:
        """The dataset's own, with pixels in the precision of the model where that is half."""
        if not hasattr(dataset, "get_collator"):
            return None
        options: dict[str, Any] = {}
        if (dtype := next(model.parameters()).dtype) in HALF:
            options["dtype"] = dtype
        if self.settings.loss_weighting != "token":
            options["loss_weighting"] = self.settings.loss_weighting
        return dataset.get_collator(**options)

    def _sum_of(self, model: Any, batch: Batch) -> Tensor:
        """The sum of the token losses of one batch."""
        self._latest = batch.info
        losses = self._losses if self._losses is not None else LogitsTokenLoss()
        targets = losses.targets(batch)
        with self.compute_loss_context_manager():
            return losses.total(model, self.prepared(batch), targets)[0]

    def _model_to_evaluate(self) -> Any:
        """The model as training has wrapped it; DDP adds nothing without gradients."""
        if not self.is_wrapped:
            model = self.accelerator.prepare_model(self.model, evaluation_mode=True)
            if self.is_fsdp_enabled:
                self.model = self.model_wrapped = model
            return model
        return self.model

    # ---- metrics

    def after_step(self, grad_norm: Any) -> None:
        """Measure the step, and hand its metrics on."""
        step = self.state.global_step
        if step > self._metered:
            self._metered, self._metrics = step, None
            self._metrics = self._meter.end(
                step=step,
                epoch=float(self.state.epoch or 0.0),
                loss=self._step_loss,
                grad_norm=grad_norm,
                learning_rates=dict(self._rates),
            )
            if state := self._meter.state_dict():
                save_state(self.state, _METER, state)
            if self._on_step is not None and self._metrics is not None:
                self._on_step(self._metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's own, with the metrics of the step beside the loss, which is a mean over the steps that have one."""
        if "loss" in logs and self._steps_logged:
            if not self._losses_logged:
                del logs["loss"]
            elif self._losses_logged < self._steps_logged:
                logs["loss"] *= self._steps_logged / self._losses_logged
            self._steps_logged = self._losses_logged = 0
            if isinstance(self._metrics, StepMetrics):
                logs = {**flat(self._metrics), **logs}
        super().log(logs, start_time)

    def _begin(self) -> None:
        """Called once before the first step, when everything is loaded and wrapped."""
        if self.args.gradient_checkpointing and self.settings.vision_checkpointing is not None:
            checkpoint_parts(self.model, language=True, vision=self.settings.vision_checkpointing)
        if (optimizer := masters_of(self.optimizer)) is not None:
            optimizer.follow_weights()  # of a trainer that is used again, whose weights may have been set meanwhile
        self._metered = self.state.global_step
        if (saved := saved_state(self.state, _METER)) is not None:
            self._meter.load_state_dict(saved)
        self._meter.attach(self.model, self.args.device)
        if self._checks_packing and isinstance(self.data_collator, PackCollator):
            self.check_report = check_first_packs(
                self.model_wrapped,
                self.train_dataset,
                self.data_collator,
                contract=self.train_dataset.contract,
                rank=self.args.process_index,
                world_size=self.args.world_size,
                training=self._as_trained(),
            )
            if self._on_packing_check is not None:
                self._on_packing_check(self.check_report)
        self._go_on()

    def _as_trained(self) -> Training | None:
        """The parts of training that the check before the first step runs; None with a loss of the user's own."""
        if self._losses is None:
            return None
        mixed = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return Training(
            loss=self._sum_of,
            backward=not self.is_deepspeed_enabled,
            dtype=mixed,
            smoothing=self.args.label_smoothing_factor,
        )


class _Hooks(TrainerCallback):
    """Tells the trainer what Trainer tells only callbacks."""

    def __init__(self, trainer: PackedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The learning rates of this step: afterwards the scheduler has gone on."""
        self._trainer._leave_unreached()
        groups = self._trainer.optimizer.param_groups
        self._trainer._rates = {group.get("name", "language"): float(group["lr"]) for group in groups}
