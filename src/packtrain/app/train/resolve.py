"""A run's config -> everything that training needs, checked as a whole: all contradictions are reported at once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packtrain.config.arguments import trainer_settings
from packtrain.config.data_options import evaluation_config, section_defaults, training_config
from packtrain.config.dataset_config import DatasetConfig
from packtrain.config.run_config import RunConfig, absolute_paths, with_overrides
from packtrain.config.setup import model_settings, step_settings, training_setup
from packtrain.config.steps import RunLength, StepSize, run_length, step_size
from packtrain.config.training_section import RANK_TIMEOUT, STREAM_RANK_TIMEOUT
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import counted
from packtrain.families.chat_template import date_for, unused_note
from packtrain.families.model_folder import resolve_model
from packtrain.families.settings import read_settings
from packtrain.modeling.model_settings import ModelSettings
from packtrain.predicting.values import TrainingSetup
from packtrain.training.step_settings import StepSettings

RUNS = "runs"  # where run folders are made if none is named


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """A run as it will be trained. `counted` adds what depends on how samples fill packs."""

    config: RunConfig  # in our own keys, with defaults of other systems and absolute paths
    folder: Path
    model: ModelSettings
    data: DatasetConfig
    evaluation: DatasetConfig | None
    step: StepSettings
    arguments: Mapping[str, Any]  # of transformers.TrainingArguments, without those that follow from the schedule
    setup: TrainingSetup
    size: StepSize
    length: RunLength
    world_size: int
    rank_timeout: float  # seconds
    packing_check: bool = True
    merge_adapters: bool = False
    notes: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        """packed or padded."""
        return "packed" if self.data.packing else "padded"

    @property
    def is_sharded(self) -> bool:
        """Are the weights sharded over processes?"""
        return self.world_size > 1 and self.setup.sharding in ("fsdp", "zero3")

    def counted(self, *, samples_per_pack: float, packs_per_epoch: int) -> ResolvedRun:
        """The run with its packs per step and epochs, given how samples fill packs."""
        packs = self.size.packs_for(samples_per_pack, self.world_size)
        epochs = self.length.epochs_for(math.ceil(packs_per_epoch / packs))
        return replace(self, data=replace(self.data, packs_per_step=packs, epochs=epochs))


def resolve_run(
    config: RunConfig,
    *,
    world_size: int = 1,
    overrides: Sequence[str] = (),
    name: str = "run",
    max_samples: int | None = None,
) -> ResolvedRun:
    """The run of a config on this many processes; all problems are reported at once."""
    if overrides:
        config = with_overrides(config, overrides)
    config, default_notes = section_defaults(absolute_paths(config))
    if max_samples is not None:
        config = replace(config, data=replace(config.data, max_samples=max_samples))
    folder = Path(config.training.output_dir or Path(RUNS) / name).expanduser()
    parts = _Parts()
    model = parts.take(lambda: model_settings(config), ModelSettings(name="none"))
    size, rows, size_notes = parts.take(lambda: step_size(config, world_size), (StepSize(packs=1, samples=None), 1, ()))
    length = parts.take(lambda: run_length(config), RunLength(epochs=1.0, max_steps=None))
    data, data_notes = parts.take(lambda: training_config(config, rows=rows, packs=size.packs), (None, ()))
    evaluation = parts.take(lambda: evaluation_config(config, rows=rows, world_size=world_size), None)
    parts.take(lambda: data is not None and data.own_template(), None)
    step = parts.take(lambda: step_settings(config), StepSettings())
    setup = parts.take(lambda: training_setup(config, gpus=world_size), TrainingSetup())
    arguments, argument_notes = parts.take(lambda: trainer_settings(config, world_size=world_size), ({}, ()))
    parts.check(name, overrides)
    assert data is not None, "a config without data is a problem"
    return ResolvedRun(
        config=config,
        folder=folder,
        model=model,
        data=data,
        evaluation=evaluation,
        step=step,
        arguments=arguments,
        setup=setup,
        size=size,
        length=length,
        world_size=world_size,
        rank_timeout=config.training.rank_timeout or (STREAM_RANK_TIMEOUT if data.online else RANK_TIMEOUT),
        packing_check=config.training.packing_check is not False,
        merge_adapters=bool(config.model.merge_adapters),
        notes=tuple(
            dict.fromkeys(
                (
                    *config.notes,
                    *default_notes,
                    *size_notes,
                    *_length_note(config),
                    *_gpus_note(config, world_size),
                    *data_notes,
                    *argument_notes,
                    *_parts_note(config, model),
                )
            )
        ),
    )


def resolved_sections(run: ResolvedRun, *, packing_length: int) -> dict[str, dict[str, object]]:
    """A config that resolves to this run on any number of processes, with nothing left to derive."""
    training = {
        name: value
        for name, value in run.config.training.given().items()
        if name not in ("effective_batch_unit", "gradient_accumulation_steps", "num_train_epochs", "max_steps")
    }
    training |= {"output_dir": os.path.abspath(run.folder), "seed": run.arguments["seed"]}
    # As it was set: the epochs that are planned for max_steps depend on all of the steps.
    length = run.length
    training |= {"num_train_epochs": length.epochs} if length.max_steps is None else {"max_steps": length.max_steps}
    if run.data.has_packs:
        training.pop("effective_batch_size", None)
        training.pop("per_device_train_batch_size", None)
        training["packs_per_step"] = run.data.packs_per_step
    else:
        training["effective_batch_size"] = run.data.packs_per_step
        training["per_device_train_batch_size"] = run.data.rows_per_batch
    training["gradient_checkpointing"] = run.setup.gradient_checkpointing
    model = {**run.config.model.given(), "method": run.model.method}
    for flag in ("use_dora", "quantization_bit"):
        model.pop(flag, None)
    data = {**run.config.data.given(), "packing": run.data.packing, "packing_length": packing_length}
    return {"model": model, "data": data, "training": training, "report": run.config.report.given()}


class _Parts:
    """Makes values one by one and collects what is wrong with each."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def take(self, make: Callable[[], Any], instead: Any) -> Any:
        """The value, or a stand-in where the config is wrong."""
        try:
            return make()
        except ConfigError as error:
            self.problems += _lines(error)
            return instead

    def check(self, name: str, overrides: Sequence[str]) -> None:
        """Refuse the config, or the command line where that alone is wrong."""
        problems = list(dict.fromkeys(self.problems))
        given = tuple(override.partition("=")[0] for override in overrides)
        if problems:
            is_given = [problem.partition(":")[0].split(" ")[0] in given for problem in problems]
            raise ConfigError("command line" if all(is_given) else f"config {name}", problems=problems)


def _lines(error: ConfigError) -> list[str]:
    """One line for each problem of an error that may hold several."""
    if error.problems:
        return [*error.problems]
    words = [f"{error.where}: {error.got}", f"instead of {error.expected}" if error.expected else ""]
    return [". ".join(part for part in (" ".join(word for word in words if word), error.fix) if part)]


def _length_note(config: RunConfig) -> list[str]:
    steps, epochs = config.training.max_steps, config.training.num_train_epochs
    if steps is None or steps < 1 or epochs is None:
        return []
    return [f"max_steps {steps} decides how long the run is; num_train_epochs {epochs:g} has no effect"]


def _gpus_note(config: RunConfig, world_size: int) -> list[str]:
    given = config.training.num_gpus
    if given in (None, world_size):
        return []
    start = f"torchrun --nproc-per-node {given} -m packtrain.cli train ..."
    return [
        f"num_gpus is {given}, and this run has {counted(world_size, 'process', 'processes')}: {start} starts {given}"
    ]


def _parts_note(config: RunConfig, model: ModelSettings) -> list[str]:
    """Parts that are trained or frozen because of their own learning rate."""
    notes = []
    for part, rate, trained in (
        ("vision encoder", "vit_lr", model.trains_vision),
        ("projector", "aligner_lr", model.trains_projector),
    ):
        setting = "train_vision" if rate == "vit_lr" else "train_projector"
        given = getattr(config.training, rate)
        if given is not None and getattr(config.model, setting) is None and (model.has_adapters or not trained):
            notes.append(f"{rate} is {given:g}, so the {part} is {'trained' if trained else 'frozen'}")
    return notes


_KEY = "template_date"


def with_template_date(run: ResolvedRun) -> ResolvedRun:
    """The run with the date that the chat template writes into samples, or without one where it writes none."""
    own = run.data.own_template()
    template = own or read_settings(resolve_model(run.model.name, cache_dir() / "models")).templates
    given = run.config.data.template_date
    chosen = date_for(template, given)
    if chosen is not None and given is None:
        notes: tuple[str, ...] = (f"the chat template writes a date: every sample gets data.{_KEY} {chosen}",)
    else:
        notes = unused_note(f"data.{_KEY}", given, template)
    if chosen == given:
        return run
    return replace(
        run,
        config=replace(run.config, data=replace(run.config.data, template_date=chosen)),
        data=replace(run.data, template_date=chosen),
        evaluation=replace(run.evaluation, template_date=chosen) if run.evaluation is not None else None,
        notes=(*run.notes, *notes),
    )
