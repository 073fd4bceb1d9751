"""The measuring stage for users: names and paths in, a cost table out."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, ParamSpec

from packtrain.core.errors import ConfigError, nearest
from packtrain.core.fingerprint import digest
from packtrain.core.places import cache_dir
from packtrain.core.values import MediaLimits
from packtrain.costs.engines import Engine, InProcess, LocalProcesses, RayCluster
from packtrain.costs.judge import FailureBudget
from packtrain.costs.request import MAX_IMAGE_PIXELS, Filters, Request
from packtrain.costs.run import Outcome, Policy, Progress, run
from packtrain.costs.statistics import label_notes
from packtrain.costs.table import CostTable
from packtrain.costs.worker import FAMILY_RULE, Task
from packtrain.families.encoder import LossOn
from packtrain.families.registry import load_family
from packtrain.families.template_date import unused_note
from packtrain.models.tiny import known_as, resolve
from packtrain.packs.model_config import packing_notes
from packtrain.packs.reference import load_reference
from packtrain.packs.tokenizer import finished_tokenizer
from packtrain.records.open import open_sources
from packtrain.records.schemas.convert import SchemaOptions

PROCESSOR_RULE = "packtrain.packs.reference:ProcessorRule"
DATASET_TYPES = ("vision", "vision_audio", "fineweb_edu")
ENGINES = ("local", "ray")
P = ParamSpec("P")


def measure_outcome(
    data: str | Path,
    *,
    model: str,
    out: str | Path | None = None,
    media_root: str | Path | None = None,
    dataset_format: str | None = None,
    dataset_type: str = "vision",
    split: str = "train",
    subset: str | None = None,
    streaming: bool = False,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    processor_config: Mapping[str, int | float | None] | None = None,
    loss_on: LossOn | None = None,
    add_eos: bool = False,
    schema: SchemaOptions | None = None,
    limit: int | None = None,
    sources: Sequence[str] = (),
    min_seconds: float | None = None,
    max_seconds: float | None = None,
    max_images_per_sample: int | None = None,
    max_sample_length: int | None = None,
    allow_outside_root: bool = False,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    on_error: Literal["skip", "fail"] = "skip",
    max_failure_rate: float = 0.05,
    check: int = 32,
    content_hash: bool = False,
    template_date: str | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Measure, and say what was done: measured, continued or found unchanged.

    `template_date` (YYYY-MM-DD) is what a chat template that asks for the time writes; today, where it is left out.
    """
    _check_type(dataset_type)
    request = Request(
        specs=tuple(
            open_sources(
                str(data),
                format=dataset_format,
                media_root=str(media_root) if media_root is not None else None,
                split=split,
                subset=subset,
                streaming=streaming,
            )
        ),
        model=str(resolve(model, cache_dir() / "models").absolute()),
        limits=_limits(processor_config or {}),
        schema=_schema(schema or SchemaOptions(), dataset_type),
        filters=Filters(
            min_seconds=min_seconds,
            max_seconds=max_seconds,
            sources=tuple(sources),
            max_images_per_sample=max_images_per_sample,
            max_sample_length=max_sample_length,
            limit=limit,
        ),
        loss_on=loss_on,
        add_eos=add_eos,
        allow_outside_root=allow_outside_root,
        max_image_pixels=max_image_pixels,
        template_date=template_date,
        seed=seed,
    )
    _check_sources(request)
    request = request.dated()
    request = replace(request, tokenizer=finished_tokenizer(request.settings(), cache_dir() / "tokenizers"))
    family = load_family(request.settings(), request.limits)
    task = Task(request, FAMILY_RULE if family is not None else PROCESSOR_RULE)
    folder = Path(out) if out is not None else cache_dir() / "measure" / _name(request)
    policy = Policy(
        budget=FailureBudget(on_error=on_error, max_failure_rate=max_failure_rate),
        check=check,
        content_hash=content_hash,
    )
    outcome = run(task, folder, _engine(engine, workers, address), policy, lambda: load_reference(request), progress)
    settings = request.settings()
    unused = unused_note("template_date", template_date, settings.chat_template)
    return replace(outcome, notes=(*unused, *packing_notes(settings), *label_notes(outcome.table.summary["counts"])))


def _name(request: Request) -> str:
    """Of a table in the cache: one for each dataset, place of it and model; what has changed in these is named then."""
    places = request.places()
    sources = [[place.path, place.media_root] for place in places.sources]
    return digest([request.describe(), sources, known_as(places.model)])


def _table_of(function: Callable[P, Outcome]) -> Callable[P, CostTable]:
    @functools.wraps(function)
    def measure(*args: P.args, **kwargs: P.kwargs) -> CostTable:
        return function(*args, **kwargs).table

    measure.__name__ = measure.__qualname__ = "measure"
    measure.__annotations__ = {**function.__annotations__, "return": "CostTable"}
    measure.__doc__ = "Measure a dataset for a model; unchanged inputs are not measured twice."
    return measure


measure = _table_of(measure_outcome)


def _check_type(dataset_type: str) -> None:
    if dataset_type not in DATASET_TYPES:
        raise ConfigError(
            "dataset_type",
            got=dataset_type,
            expected=", ".join(DATASET_TYPES),
            fix=nearest(dataset_type, DATASET_TYPES),
        )
    if dataset_type == "vision_audio":
        raise ConfigError(
            "dataset_type",
            got="vision_audio",
            expected="vision (text, images, video) or fineweb_edu (plain text)",
            fix="audio has no token rule yet; leave the audio out and use vision",
        )


def _schema(options: SchemaOptions, dataset_type: str) -> SchemaOptions:
    """`fineweb_edu` is running text, whatever other columns its records have."""
    if dataset_type == "fineweb_edu" and options.schema is None and options.formatting is None:
        return replace(options, schema="text")
    return options


def _limits(processor_config: Mapping[str, int | float | None]) -> MediaLimits:
    names = MediaLimits.__slots__
    for name, value in processor_config.items():
        if name not in names:
            raise ConfigError(
                f"processor_config.{name}", got=value, expected=", ".join(names), fix=nearest(name, names)
            )
    return MediaLimits(**processor_config)  # type: ignore[arg-type]


def _check_sources(request: Request) -> None:
    names = [spec.name for spec in request.specs]
    for name in request.filters.sources:
        if name not in names:
            raise ConfigError("sources", got=name, expected=", ".join(names), fix=nearest(name, names))


def _engine(name: str, workers: int | None, address: str | None) -> Engine:
    if name not in ENGINES:
        raise ConfigError("engine", got=name, expected=", ".join(ENGINES), fix=nearest(name, ENGINES))
    if workers is not None and workers < 1:
        raise ConfigError("workers", got=workers, expected="at least 1")
    if name == "ray":
        if workers is not None:
            raise ConfigError(
                "workers", got=workers, expected="none beside --engine ray: the cluster has its own number"
            )
        return RayCluster(address)
    if address is not None:
        raise ConfigError("address", got=address, expected="--engine ray beside it")
    count = workers or len(os.sched_getaffinity(0))
    return InProcess() if count == 1 else LocalProcesses(count)
