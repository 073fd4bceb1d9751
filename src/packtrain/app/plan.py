"""`plan`: a cost table, a model and GPUs in; a study, a recommended config and a report out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.config.data_options import data_seed, section_defaults
from packtrain.config.data_section import DataSection
from packtrain.config.dataset_config import FILTERS, MEASURED_DEFAULTS
from packtrain.config.run_config import RunConfig, absolute_paths, load_config
from packtrain.config.setup import (
    ATTENTION,
    compiles,
    own_limits,
    sharding_notes,
    training_setup,
    unknown_limits,
    without_limits,
)
from packtrain.config.steps import configured_samples, in_packs, step_size
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError, nearest
from packtrain.core.numbers import counted
from packtrain.core.secrets import has_secrets, secret_settings, without_secrets
from packtrain.core.user_code import without_folder
from packtrain.delivery.encode.from_transformers import packing_notes, why_unpackable
from packtrain.families.model_folder import known_as, resolve_model
from packtrain.families.registry import load_plugins
from packtrain.families.settings import read_settings
from packtrain.measuring.table import CostTable
from packtrain.packing.cutting import fit_pieces
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import LIMITS, PackingConfig
from packtrain.packing.resources import samples_of
from packtrain.planning.question import Baseline, Question, packing_from, read_rows
from packtrain.planning.study import StudyProgress, study_outcome
from packtrain.planning.study_values import Study
from packtrain.predicting.calibration import Fit, coefficients_for
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.values import ModelShape
from packtrain.reports.study_files import NUMBERS, SampleChunk, check_place, write_study

_PACKING = {field.name for field in fields(PackingConfig)}
_CHUNK = 1 << 18  # samples whose lines are written together
# Keys of a run's config that a baseline has, too.
_BASELINE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size", "group_by_length"),
    *("num_train_epochs", "learning_rate", "vit_lr", "aligner_lr", "warmup_ratio", "warmup_steps"),
    *("eval_steps", "save_steps", "save_delay_steps", "logging_steps"),
)
_STEP_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size")  # of a baseline


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A study and the files that show it."""

    study: Study
    files: Mapping[str, Path]
    notes: tuple[str, ...]  # how keys of other systems were read; what training would note


def plan(
    costs: CostTable | str | Path,
    *,
    out: str | Path,
    model: str | None = None,
    gpu: str = "h200",
    gpus: int | None = None,
    config: RunConfig | str | Path | None = None,
    lengths: Sequence[int] | None = None,
    limits: Mapping[str, Sequence[int]] | None = None,
    setup: Mapping[str, Any] | None = None,
    baseline: Mapping[str, Any] | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    progress: Callable[[StudyProgress], None] = lambda _: None,
) -> Planned:
    """Sweep lengths and limits, recommend a config for these GPUs, and write the report.

    `limits` maps settings such as max_images_per_pack to the values to try besides no limit; `setup` and `baseline`
    override the config's settings of the packed run and of the padded run it is compared with.
    """
    measured = costs if isinstance(costs, CostTable) else CostTable.load(costs)
    given = load_config(config) if isinstance(config, str | Path) else config or RunConfig()
    load_plugins(measured.plugins)
    run, carried = with_measured(measured, given)
    load_plugins(run.model.plugins or ())
    gpus = gpus if gpus is not None else run.training.num_gpus or 1
    name, folder, shape = _model(measured, model or run.model.model_name_or_path)
    run, foreign = own_limits(run, read_settings(folder))
    table, relimited = _under_limits(measured, run)
    table, filtered = _filter_samples(table, run)
    run, warning = _for_family(run, table, folder, shape)
    check_place(Path(out), overwrite=overwrite)  # before the work, not after it
    today, counted = _baseline(run, table, gpus, configured=config is not None)
    compiled = {"compiled": compiles(run, packing=True)}
    own = training_setup(run, gpus=gpus, given=compiled)
    planned, data_sheet = training_setup(run, gpus=gpus, given={**compiled, **(setup or {})}), find_gpu(gpu)
    padded = Baseline(**{**today, **_known("baseline", baseline or {}, Baseline)})
    time, memory, calibrated = coefficients_for(data_sheet, compiled=planned.compiled)
    padded_time, padded_memory, _ = coefficients_for(data_sheet, compiled=padded.compiled)
    packing = packing_from(_packing(run), seed=run.training.seed or 0 if seed is None else seed)
    question = Question(
        rows=read_rows(table, packing.seed),
        shape=shape,
        model=name,
        gpu=data_sheet,
        setup=planned,
        baseline=padded,
        packing=packing,
        time=time,
        memory=memory,
        padded_fit=Fit(time=padded_time, memory=padded_memory),
        configured=own,
        base=_base(run, seed),
        unpackable=why_unpackable(read_settings(folder)),
        missing=frozenset(package for package in ("deepspeed", "bitsandbytes") if find_spec(package) is None),
    )
    outcome = study_outcome(table, question, lengths=lengths, limits=_limit_sets(limits or {}), progress=progress)
    study = replace(outcome.study, recommendation=replace(outcome.study.recommendation, warning=warning))
    files = write_study(study, _PlanSamples(table, outcome.plan).chunks(), Path(out), overwrite=overwrite)
    notes = (
        *run.notes,
        *carried,
        *foreign,
        *filtered,
        *counted,
        *calibrated,
        *relimited,
        *sharding_notes(run),
        *_epochs_note(run, study),
        *_secrets_note(run),
        *_cut_note(outcome.plan),
        *packing_notes(read_settings(folder)),
    )
    return Planned(study=study, files=files, notes=notes)


def with_measured(table: CostTable, given: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The user's config over the settings of the measurement, so that a run trains on the samples of this table."""
    user_config, sections, notes = table.user_config, absolute_paths(given).sections(), []
    measured, data = user_config.get("data", {}), sections["data"]
    if (path := measured.get("dataset_path")) and data.get("dataset_path", path) != path:
        notes.append(f"the config's dataset_path is {data['dataset_path']}; the costs are those of {path}")
        data["dataset_path"] = path
    problems = [
        f"data.{name}: {data[name]!r}, measured with {measured.get(name, usual)!r}"
        for name, usual in MEASURED_DEFAULTS.items()
        if measured and name in data and _plain(name, data[name]) != _plain(name, measured.get(name, usual))
    ]
    seed, own = table.user_config.get("training", {}).get("seed", 0), given.training.given("seed", "data_seed")
    if own and data_seed(given) != seed and any(measured.get(name) for name in ("eval_size", "max_samples")):
        problems.append(f"training.seed: {data_seed(given)}, records were drawn with {seed}")
    if data.get("online"):
        problems.append("data.online: true, for streams that are not measured")
    if problems:
        raise ConfigError(
            "--config",
            problems=problems,
            expected="the settings that the costs were measured with",
            fix="measure again with these settings, or remove them",
        )
    limits = {**measured.get("processor_config", {}), **(given.data.processor_config or {})}
    merged = {name: {**user_config.get(name, {}), **sections[name]} for name in sections}
    merged["data"] |= {"processor_config": limits} if limits else {}
    run = RunConfig.of(merged, "--config")
    config, meanings = section_defaults(replace(run, notes=given.notes, written_as=given.written_as))
    return config, (*notes, *meanings)


def _plain(name: str, value: Any) -> Any:
    """A value to compare: false for a section that is disabled; functions without the folder of their file."""
    if name == "formatting_func" and value is not None:
        return without_folder(value)
    return bool(value["enabled"]) if isinstance(value, Mapping) and "enabled" in value else value


def _base(run: RunConfig, seed: int | None) -> dict[str, dict[str, Any]]:
    """The config to recommend with changes: the settings of `measure` and of the config, without secrets."""
    sections = without_secrets({name: values for name, values in run.sections().items() if values})
    if seed is not None:
        sections["training"] = {**sections.get("training", {}), "seed": seed}
    return sections


def _secrets_note(run: RunConfig) -> tuple[str, ...]:
    """Secrets are not stored, so a recommended config is incomplete without them."""
    urls = [f"data.{name}" for name, value in run.data.given("dataset_path", "eval_path").items() if has_secrets(value)]
    names = [*(f"training.{name}" for name in secret_settings(run.training.given())), *urls]
    return (
        (f"secrets are not written into the config, pass them to packtrain train: {', '.join(names)}",) if names else ()
    )


def _filter_samples(table: CostTable, run: RunConfig) -> tuple[CostTable, tuple[str, ...]]:
    """The table under the config's filters, where it was measured without them."""
    measured = table.user_config.get("data", {})
    chosen = {name: value for name, value in run.data.given(*FILTERS).items() if measured.get(name) != value}
    if not chosen:
        return table, ()
    filtered = table.filtered(**chosen)
    filters = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return filtered, (f"the config's {filters} leaves out {len(table) - len(filtered):,} of {len(table):,} samples",)


def _model(table: CostTable, given: str | None) -> tuple[str, Path, ModelShape]:
    """Name, folder and shape of the model; by default the measured one."""
    name = given or known_as(table.places.model)
    if given and (there := Path(given).expanduser()).is_dir():  # the recommended config may be used in another folder
        name = str(there.absolute())
    if not name:
        raise ConfigError("model", got="none", expected="a model folder, a hub name or tiny:FAMILY")
    try:
        folder = resolve_model(name, cache_dir() / "models")
        return name, folder, read_shape(folder)
    except ConfigError as error:
        if given:
            raise
        raise ConfigError(
            f"the model that was measured for, {name!r}",
            got=error.got,
            expected=error.expected,
            fix="name a model with --model",
        ) from None


def _under_limits(table: CostTable, run: RunConfig) -> tuple[CostTable, tuple[str, ...]]:
    """The table under the config's media limits, where it was measured under others."""
    measured = {**table.summary.limits.given(), **table.limits.given()}
    configured = {name: value for name, value in (run.data.processor_config or {}).items() if value is not None}
    changed = {name: value for name, value in configured.items() if measured.get(name) != value}
    if not changed:
        return table, ()
    limits = ", ".join(f"{name} {value}" for name, value in changed.items())
    limited = table.with_limits(**changed)  # type: ignore[arg-type]  # numbers of each kind were checked
    return limited, (f"costs are computed again for the config's {limits}",)


def _for_family(run: RunConfig, table: CostTable, folder: Path, shape: ModelShape) -> tuple[RunConfig, str]:
    """The config without limits that the model's family does not have, and a warning if another family was measured."""
    measured = table.summary.model_type or shape.model_type
    if measured == shape.model_type:
        return run, ""
    gone = unknown_limits(run, read_settings(folder))
    warning = (
        f"The costs were measured for {measured}, the model is {shape.model_type}: its token counts differ, and so do "
        "lengths, limits, time and memory. Measure with this model before training it."
    )
    if gone:
        limits = ", ".join(f"{name} {value}" for name, value in gone.items())
        warning += f" Removed from processor_config, since {shape.model_type} has no such limit: {limits}."
    return without_limits(run, gone), warning


def _epochs_note(run: RunConfig, study: Study) -> tuple[str, ...]:
    epochs = run.training.num_train_epochs
    return () if epochs in (None, study.epochs) else (f"num_train_epochs {epochs:g} is planned as {study.epochs}",)


def _cut_note(plan: PackPlan) -> tuple[str, ...]:
    """A note on what the recommended packs cut off in an epoch."""
    counts = plan.summary.epochs[0]
    if not counts.cut_rows:
        return ()
    lost = f"{counts.tokens_lost:,} tokens and {counts.supervised_lost:,} labels are not trained on"
    bare = f"; {counts.unlabelled:,} pieces have no label and are left out" if counts.unlabelled else ""
    return (f"{counts.cut_rows:,} samples are cut, {lost}{bare}",)


def _baseline(
    run: RunConfig, table: CostTable, gpus: int, *, configured: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of the padded run to compare with, and notes on how they were read."""
    settings = run.training.given(*_BASELINE)
    settings["compiled"] = compiles(run, packing=False)
    settings["today"] = configured and not run.packs
    if run.training.attn_implementation is not None:
        kernel = run.training.attn_implementation
        settings["attn_implementation"] = ATTENTION.get(kernel, kernel)
    shares = []
    for name in ("eval_steps", "save_steps", "logging_steps", "warmup_steps", "save_delay_steps"):
        value = settings.get(name)
        if isinstance(value, float) and value < 1:  # a share of all steps
            settings.pop(name)
            if name == "warmup_steps":
                settings["warmup_ratio"] = value
            else:
                shares.append(f"{name} {value:g} is a share of all steps; the study recommends whole steps")
        elif isinstance(value, float):
            settings[name] = round(value)
    if isinstance(epochs := settings.get("num_train_epochs"), float):
        settings["num_train_epochs"] = max(1, round(epochs))
    settings, counted = _in_samples(settings, run, table, gpus)
    return settings, (*shares, *counted)


def _in_samples(
    settings: dict[str, Any], run: RunConfig, table: CostTable, gpus: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The samples of a step, as in `train`, where the config has a step size."""
    counts_packs = in_packs(run)
    if not counts_packs and configured_samples(run, gpus) is None:
        return settings, ()
    size, rows, _ = step_size(run, gpus)
    settings = {name: value for name, value in settings.items() if name not in _STEP_SIZES}
    if size.samples is not None:
        of_batch = {} if run.packs or run.data.pad_packs else {"per_device_train_batch_size": rows}
        return {**settings, **of_batch, "effective_batch_size": size.samples}, ()
    if run.data.packing_length is None:
        return settings, ()
    packs = size.packs_for(1.0, gpus)
    samples = max(1, round(packs * _samples_per_pack(run.data, table)))
    note = f"the config packs already: a step of {counted(packs, 'pack')} has about {counted(samples, 'sample')}"
    return {**settings, "effective_batch_size": samples}, (note,)


def _samples_per_pack(data: DataSection, table: CostTable) -> float:
    """The approximate number of samples in a pack of this config."""
    fits = np.ones(len(table), bool)
    if data.overlong in (None, "drop"):  # dropped samples must not count in the mean
        fits = np.minimum(table.column("tokens"), data.cutoff_len or 2**62) <= data.packing_length
    if not fits.any():
        return 1.0
    columns = table.summary.statistics.columns
    used = [(limit, LIMITS[name]) for name, limit in data.given(*LIMITS).items() if LIMITS[name] in columns]
    means = [(limit, float(table.column(resource)[fits].mean())) for limit, resource in used]
    return min(limit / mean for limit, mean in means if mean)


def _packing(run: RunConfig) -> dict[str, Any]:
    """The packing settings of the config."""
    return {name: value for name, value in run.data.given().items() if name in _PACKING}


def _known(where: str, given: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    names = [field.name for field in fields(cls)]
    for name in given:
        if name not in names:
            raise ConfigError(f"{where}.{name}", got=name, expected=", ".join(names), fix=nearest(name, names))
    return {name: value for name, value in given.items() if value is not None}


def _limit_sets(limits: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every combination of the values to try, including no limit."""
    for name in limits:
        if name not in LIMITS or name == "packing_length":
            settings = [setting for setting in LIMITS if setting != "packing_length"]
            raise ConfigError(f"limits.{name}", got=name, expected=", ".join(settings), fix=nearest(name, settings))
    choices = [[(name, value) for value in (None, *values)] for name, values in limits.items()]
    sets = [{name: value for name, value in one if value is not None} for one in product(*choices)]
    return [one for one in sets if one]


class _PlanSamples:
    """The samples of a table with their packs, in chunks."""

    def __init__(self, table: CostTable, plan: PackPlan) -> None:
        self._table, self._plan = table, plan

    def chunks(self) -> Iterator[SampleChunk]:
        """In dataset order."""
        first_pack = np.full(len(self._table), -1, np.int64)
        packs = self._plan.epoch(0)
        numbers = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
        first_pack[packs.rows[::-1]] = numbers[::-1]
        for start in range(0, len(self._table), _CHUNK):
            stop = min(start + _CHUNK, len(self._table))
            columns: dict[str, Any] = dict(self._table.rows(("id", "source", *NUMBERS), np.arange(start, stop)))
            pack = first_pack[start:stop]
            yield SampleChunk(**columns, pack=pack, why=self._reasons(start, stop, np.flatnonzero(pack < 0)))

    def _reasons(self, start: int, stop: int, missing: np.ndarray) -> dict[int, str]:
        if not len(missing):
            return {}
        pieces = fit_pieces(*samples_of(self._table, start, stop), self._plan.config)
        dropped = {one.row: f"{one.reason}: {one.detail}" for one in pieces.dropped}
        return {row: dropped.get(row, "not drawn in the first epoch") for row in missing.tolist()}
