"""A config from model and data alone: they are measured, and a study recommends settings for the available GPU."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import packtrain
from packtrain.app.measure import measure_outcome
from packtrain.app.plan import plan
from packtrain.app.train.outcome import ProcessPlace
from packtrain.app.train.prepare import data_errors_named
from packtrain.app.train.resolve import RUNS, ResolvedRun, resolve_run, with_template_date
from packtrain.config.run_config import RunConfig, absolute_paths, load_config
from packtrain.config.steps import PackedStep, configured_samples, in_packs
from packtrain.core.artifacts import alone
from packtrain.core.cache_root import cache_dir, make_cache
from packtrain.core.errors import ConfigError, PacktrainError
from packtrain.core.fingerprint import digest
from packtrain.core.secrets import without_secrets
from packtrain.families.model_folder import resolve_model
from packtrain.measuring.measurement import MeasureOutcome
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import plan_inputs
from packtrain.predicting.calibration import coefficients_for
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.shapes import context_length

STUDIES = "studies"
STUDY_PAGE, RECOMMENDED = "report.html", "recommended.yaml"
_STEP, _LENGTH = 16, 4096  # on a CPU: samples per step, and tokens per pack unless a sample is longer
# Settings of the step size: where one is set, no other is chosen.
_SIZES = (
    *("effective_batch_size", "packs_per_step", "per_device_train_batch_size", "gradient_accumulation_steps"),
    "effective_batch_unit",
)
_SHOWN = ("data", "training")
Sections = dict[str, dict[str, Any]]  # of a config


def config_from_data(
    given: RunConfig, here: ProcessPlace, progress: Callable[[Any], None] = lambda _: None
) -> tuple[RunConfig, MeasureOutcome]:
    """The config of a run, where little more than model and data are given; given settings stay; and its measurement.

    One process per machine measures and plans, the others reuse its results.
    """
    given = absolute_paths(given)
    needed = {"--model": given.model.model_name_or_path, "--data": given.data.dataset_path}
    if missing := [option for option, value in needed.items() if not value]:
        raise ConfigError(
            "packtrain train",
            got="no config" if len(missing) == 2 else f"no config, and no {missing[0]}",
            expected="CONFIG, or --model and --data",
            fix="packtrain train --help shows both; packtrain train --resume RUN continues a run",
        )
    run = with_template_date(resolve_run(given, world_size=here.world_size))
    root = make_cache(run.data.cache_root)
    with (
        alone(root / "locks" / f"{digest(run.data.measured_by())}.lock"),
        data_errors_named(given, "dataset_path", str(run.data.dataset_path)),
    ):
        streaming = None if run.config.data.streaming else False
        measured = measure_outcome(run.data, streaming=streaming, progress=progress)
    table = measured.table
    chosen: Sections = {}
    if given.data.plan is not None:
        why = "packs come from data.plan"
    elif (gpu := _gpu(run, here)) is not None:
        chosen, why = _for_gpu(run, table, gpu, root)
    else:
        chosen, why = _for_cpu(run, table)
    sections = _with_given(chosen, given.sections())
    if given.training.output_dir is None:
        sections["training"]["output_dir"] = str(Path(RUNS) / _name(given, here))
    config = RunConfig.of(sections, "the chosen settings")
    return replace(config, notes=(*given.notes, f"{why}: {_chosen_note(sections, given.sections())}")), measured


def _gpu(run: ResolvedRun, here: ProcessPlace) -> str | None:
    """The GPU that this process trains on, if it has a data sheet."""
    import torch

    if run.arguments.get("use_cpu") or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(here.local_rank)
    try:
        return find_gpu(name).name
    except PacktrainError:
        return None


def _for_gpu(run: ResolvedRun, table: CostTable, gpu: str, root: Path) -> tuple[Sections, str]:
    """The recommendation of a study, which is kept for the other processes and for the user."""
    given = without_secrets(run.config.sections())
    fitted = repr(coefficients_for(find_gpu(gpu), compiled=True))
    about = {"inputs": plan_inputs(table), "gpu": gpu, "gpus": run.world_size, "said": given, "fitted": fitted}
    folder = root / STUDIES / digest({**about, "packtrain": packtrain.__version__})
    with alone(root / "locks" / f"study-{folder.name}.lock"):
        if not (folder / STUDY_PAGE).is_file():
            config = RunConfig.of(given, "the given settings")
            plan(table, out=folder, model=run.model.name, gpu=gpu, gpus=run.world_size, config=config, overwrite=True)
    return load_config(
        folder / RECOMMENDED
    ).sections(), f"planned for {run.world_size} x {gpu} (see {folder / STUDY_PAGE})"


def _for_cpu(run: ResolvedRun, table: CostTable) -> tuple[Sections, str]:
    """The fewest packs that hold the samples of a step; the longest sample fits."""
    tokens = table.column("tokens")
    # a padded run has the same step
    given = None if in_packs(run.config) else configured_samples(run.config, run.world_size)
    samples, mean, longest = given or min(_STEP, len(tokens)), float(tokens.mean()), int(tokens.max())
    step = PackedStep(
        wanted=samples,
        world_size=run.world_size,
        samples_per_pack=_LENGTH / mean,
        tokens_per_sample=mean,
        longest=longest,
    )
    context = context_length(resolve_model(run.model.name, cache_dir() / "models"))
    data = {"packing_length": min(step.kept_length, context)}
    kept = replace(step, samples_per_pack=data["packing_length"] / mean).is_kept
    if not kept and run.config.data.packing_length is None:  # packs are long for the longest sample alone
        data["max_samples_per_pack"] = max(1, samples // step.fewest_packs)
    return {"data": data, "training": {"effective_batch_size": samples}}, "no known GPU, defaults for CPU"


def _with_given(chosen: Sections, given: Sections) -> Sections:
    """The chosen settings, overridden by the given ones."""
    sections = {name: {**chosen.get(name, {}), **values} for name, values in given.items()}
    if any(name in given["training"] for name in _SIZES):
        sizes = [name for name in _SIZES if name not in given["training"]]
        sections["training"] = {name: value for name, value in sections["training"].items() if name not in sizes}
    if given["data"].get("packing") is False:  # there are no packs to limit
        sections["data"] = {name: value for name, value in sections["data"].items() if not name.endswith("_per_pack")}
    return sections


def _chosen_note(sections: Sections, given: Sections) -> str:
    chosen = [
        f"{name} {str(value).lower() if isinstance(value, bool) else value}"
        for section in _SHOWN
        for name, value in sections[section].items()
        if name not in given[section] and not (name == "packing_length" and given["data"].get("packing") is False)
    ]
    return ", ".join(chosen) or "no other setting is chosen"


def _name(given: RunConfig, here: ProcessPlace) -> str:
    """MODEL-DATA-TIME; all processes of a launcher use the time of its start."""
    began = time.time()
    if here.world_size > 1:
        import psutil

        if int(os.environ.get("LOCAL_WORLD_SIZE", here.world_size)) != here.world_size:
            raise ConfigError("--output-dir", got="none, on several machines", expected="the folder of the run")
        began = psutil.Process(os.getppid()).create_time()
    parts = (Path(str(given.model.model_name_or_path)).name, Path(str(given.data.dataset_path)).stem)
    words = (re.sub(r"[^\w.]+", "-", part).strip("-.")[:60] for part in parts)
    return "-".join((*words, time.strftime("%Y%m%d-%H%M%S", time.localtime(began))))
