"""`measure`: names and paths in, a cost table out."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, ParamSpec

from packtrain.app.reuse import reusable_folder
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError, nearest
from packtrain.core.fingerprint import digest
from packtrain.delivery.encode.from_transformers import finished_tokenizer, packing_notes
from packtrain.delivery.encode.processor import load_reference
from packtrain.families.chat_template import unused_note
from packtrain.families.model_folder import resolve_model
from packtrain.families.registry import load_rule, plugins_for, require_processor_files
from packtrain.families.settings import read_settings
from packtrain.measuring.engines import Engine, InProcess, LocalProcesses, RayCluster
from packtrain.measuring.failure_budget import FailureBudget
from packtrain.measuring.measure_summary import MeasureSummary, data_notes
from packtrain.measuring.measurement import MeasureOutcome, MeasureProgress, Policy, run_measurement
from packtrain.measuring.request import MAX_IMAGE_PIXELS, Request
from packtrain.measuring.table import CostTable
from packtrain.measuring.work import FAMILY_RULE, Task
from packtrain.packing.source_repeats import check_weights
from packtrain.records.formats.source_files import split_notes
from packtrain.records.open import open_sources

PROCESSOR_RULE = "packtrain.delivery.encode.unlisted:ProcessorRule"
ENGINES = ("local", "ray")
_CHATS = {"messages", "conversations", "question_answer", "instruction"}  # schemas that need a chat template
P = ParamSpec("P")


def measure_outcome(
    data: str | Path | DatasetConfig,
    *,
    model: str | None = None,
    out: str | Path | None = None,
    streaming: bool | None = False,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    progress: Callable[[MeasureProgress], None] = lambda _: None,
    **settings: Any,
) -> MeasureOutcome:
    """Measure, and report whether the table was measured, continued or reused.

    `settings` are those of section `data` in a config, such as `processor_config`, `formatting_func` or
    `max_sample_length`; a DatasetConfig holds them already.
    """
    config = data if isinstance(data, DatasetConfig) else _config(data, model, settings)
    request = make_request(config, streaming=streaming)
    reusable = reusable_folder("measure", digest(config.measured_by()), config.cache_root, dataset=config.dataset_path)
    request = tokenized_request(request)
    family = load_rule(request.settings(), request.limits)
    task = Task(request, FAMILY_RULE if family is not None else PROCESSOR_RULE)
    policy = Policy(
        budget=FailureBudget(on_error=config.on_error, max_failure_rate=config.max_failure_rate),  # type: ignore[arg-type]
        check=config.check or 0,
        content_hash=bool(config.content_hash),
    )
    workers = _engine(engine, config.workers, address)
    user_config = config.user_config()
    if request.plugins:
        user_config["model"]["plugins"] = list(request.plugins)
    if request.template_date is not None:
        user_config["data"]["template_date"] = request.template_date

    def measure_into(folder: Path, again: bool) -> MeasureOutcome:
        processor = functools.partial(load_reference, request)
        return run_measurement(task, folder, workers, policy, processor, progress, user_config=user_config, again=again)

    if out is not None or config.costs is not None:
        folder = Path(out or str(config.costs))
        outcome = measure_into(folder, out is not None)
        reusable.remember(folder)
    else:
        outcome = reusable.open(measure_into)
    processor = request.settings()
    notes = (
        *split_notes(request.specs),
        *unused_note("template_date", config.template_date, processor.templates),
        *(_no_template_note(outcome.table.summary) if processor.chat_template is None else ()),
        *packing_notes(processor),
        *data_notes(outcome.table.summary),
    )
    return replace(outcome, notes=notes)


def _no_template_note(summary: MeasureSummary) -> tuple[str, ...]:
    """How chats are written without a chat template."""
    if _CHATS.isdisjoint(name.partition(" ")[0] for name in summary.schemas):
        return ()
    return (
        "the model has no chat template: question and answer are concatenated as plain text; set chat_template: FILE "
        "(--chat-template)",
    )


def make_request(config: DatasetConfig, *, streaming: bool | None = False) -> Request:
    """The request of a measurement, from the settings of a dataset."""
    _check_type(str(config.dataset_type))
    specs = open_sources(
        str(config.dataset_path),
        format=config.dataset_format,
        media_root=config.media_root,
        split=str(config.split),
        subset=config.subset,
        streaming=streaming,
        sources=config.sources or (),
    )
    if config.part == "eval":  # every record once, however often its source is trained on
        specs = [replace(spec, repeats=None, weight=None) for spec in specs]
    draws = any(spec.max_samples for spec in specs)
    model = resolve_model(config.model_name, cache_dir() / "models").absolute()
    return Request(
        specs=tuple(specs),
        model=str(model),
        plugins=plugins_for(config.plugins or (), read_settings(model).model_type),
        limits=config.media_limits(),
        schema=config.schema_options(),
        filters=config.filters(),
        loss_on=config.loss_on,  # type: ignore[arg-type]  # it was checked
        add_eos=config.add_eos,
        strict_columns=bool(config.strict_columns),
        allow_outside_root=bool(config.allow_outside_root),
        max_image_pixels=config.max_image_pixels or MAX_IMAGE_PIXELS,
        template_date=config.template_date,
        chat_template=config.own_template(),
        seed=config.seed if draws else config.measured_seed,
    )


def tokenized_request(request: Request) -> Request:
    """The request with its template date, and with the tokenizer that transformers would build."""
    _check_sources(request)
    request = request.with_date()
    require_processor_files(request.settings())
    return replace(request, tokenizer=finished_tokenizer(request.settings(), cache_dir() / "tokenizers"))


def _config(data: str | Path, model: str | None, settings: dict[str, Any]) -> DatasetConfig:
    known = DatasetConfig.known()
    if unknown := [f"{name}: unknown setting. {nearest(name, known)}" for name in settings if name not in known]:
        raise ConfigError("measure", problems=unknown)
    return DatasetConfig(dataset_path=str(data), model=model, **settings)


def _returning_table(function: Callable[P, MeasureOutcome]) -> Callable[P, CostTable]:
    @functools.wraps(function)
    def measure(*args: P.args, **kwargs: P.kwargs) -> CostTable:
        return function(*args, **kwargs).table

    measure.__name__ = measure.__qualname__ = "measure"
    measure.__annotations__ = {**function.__annotations__, "return": "CostTable"}
    measure.__signature__ = inspect.signature(function).replace(return_annotation="CostTable")  # type: ignore[attr-defined]
    measure.__doc__ = "Measure a dataset for a model; a table of unchanged inputs is reused."
    return measure


measure = _returning_table(measure_outcome)


def _check_type(dataset_type: str) -> None:
    if dataset_type == "vision_audio":
        raise ConfigError(
            "dataset_type",
            got="vision_audio",
            expected="vision (text, images, video) or fineweb_edu (plain text)",
            fix="audio has no token rule yet; remove the audio and use vision",
        )


def _check_sources(request: Request) -> None:
    names = [spec.name for spec in request.specs]
    for name in request.filters.sources:
        if name not in names:
            raise ConfigError("sources", got=name, expected=", ".join(names), fix=nearest(name, names))
    used = request.filters.sources or names
    check_weights({spec.name: spec.weight for spec in request.specs if spec.name in used})


def _engine(name: str, workers: int | None, address: str | None) -> Engine:
    if name not in ENGINES:
        raise ConfigError("engine", got=name, expected=", ".join(ENGINES), fix=nearest(name, ENGINES))
    if workers is not None and workers < 1:
        raise ConfigError("workers", got=workers, expected="at least 1")
    if name == "ray":
        if workers is not None:
            raise ConfigError("workers", got=workers, expected="none with --engine ray: the cluster sets the number")
        return RayCluster(address)
    if address is not None:
        raise ConfigError("address", got=address, expected="--engine ray as well")
    count = workers or len(os.sched_getaffinity(0))
    return InProcess() if count == 1 else LocalProcesses(count)
