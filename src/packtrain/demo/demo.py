"""The demo: make a small dataset and run every stage on it, from measuring to a trained model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packtrain.app.measure import measure_outcome
from packtrain.app.pack import PackOutcome, pack_outcome
from packtrain.app.plan import Planned, plan
from packtrain.core.artifacts import atomic_path
from packtrain.demo.model import write_shape
from packtrain.demo.train import DemoTraining, RunStanding, can_train, train_demo
from packtrain.measuring.measurement import MeasureOutcome, MeasureProgress
from packtrain.packing.packing_config import PackingConfig
from packtrain.records.synthetic import write_dataset

MODEL = "tiny:qwen2_5_vl"
GPU, GPUS = "h100", 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """What the demo made and where it is."""

    folder: Path
    data: Path
    measured: MeasureOutcome
    planned: Planned
    packed: PackOutcome
    trained: DemoTraining | None  # None: not asked for, or the packages are not there


def run_demo(
    folder: Path,
    *,
    pictures: int = 320,
    model: str = MODEL,
    workers: int | None = None,
    train: bool = True,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[MeasureProgress], None] = lambda _: None,
    training: Callable[[RunStanding], None] = lambda _: None,
) -> DemoResult:
    """Make the data, measure it, plan for it, pack it, check the packing and train on it."""
    say(f"Drawing {pictures} images of objects, and a few broken records, into {folder / 'data'}")
    data = write_dataset(folder / "data", pictures)
    say(f"Measuring what each record costs for {model}")
    measured = measure_outcome(
        data,
        model=model,
        out=folder / "costs",
        workers=workers,
        max_failure_rate=0.5,  # the faults are planted, and in a small demo they are many
        content_hash=True,  # the same data are written again by every run
        progress=progress,
    )
    say(f"Planning for {GPUS} x {GPU} and a 3B model")
    shape = str(write_shape(folder / "model"))
    planned = plan(
        measured.table,
        model=shape,
        gpu=GPU,
        gpus=GPUS,
        baseline={"effective_batch_size": 32, "epochs": 2},
        out=folder / "report",
    )
    _trained_here(planned.files["recommended.yaml"], shape, model)
    chosen = planned.study.simulations[planned.study.recommendation.simulation]
    say(f"Packing with the recommended packing_length {chosen.packing_length:,}")
    config = PackingConfig(packing_length=chosen.packing_length, epochs=2).limited(chosen.limits)
    packed = pack_outcome(measured.table, config, folder / "plan")
    able = train and can_train()
    if train and not able:
        say("Skipping training: it needs pip install 'packtrain[train]'")
    trained = None
    if able:
        trained = train_demo(data, folder, model=model, pictures=pictures, say=say, progress=training)
    return DemoResult(folder=folder, data=data, measured=measured, planned=planned, packed=packed, trained=trained)


def _trained_here(config: Path, shape: str, model: str) -> None:
    """Name the demo's own model in the recommended config: the one that is planned for has no weights."""
    note = f"  # planned for the shape in {shape}, which has no weights: the demo's own model\n"
    lines = [
        line for line in config.read_text(encoding="utf-8").splitlines(keepends=True) if f"# was {model}" not in line
    ]
    at = next(number for number, line in enumerate(lines) if line.lstrip().startswith("model_name_or_path:"))
    lines[at] = f"{note}  model_name_or_path: {model}\n"
    with atomic_path(config) as path:
        path.write_text("".join(lines), encoding="utf-8")
