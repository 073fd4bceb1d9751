"""The demo: make a small dataset and run every stage on it, up to one model trained packed and padded, compared."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.app.measure import measure_outcome
from packtrain.app.pack import PackOutcome, pack_outcome
from packtrain.app.plan import Planned, plan
from packtrain.app.report import Reported, report
from packtrain.config.run_config import RunConfig
from packtrain.core.artifacts import atomic_path
from packtrain.measuring.measurement import MeasureOutcome, MeasureProgress
from packtrain.packing.packing_config import PackingConfig
from packtrain.records.synthetic import write_dataset
from packtrain.runs.run_folder import RUN
from packtrain.runs.training_run import read_run

if TYPE_CHECKING:
    from packtrain.verifying.check_result import CheckReport

MODEL = "tiny:qwen2_5_vl"
GPU, GPUS = "h100", 4
MODES = ("packed", "padded")
LENGTH, SAMPLES = 4096, 8  # tokens of a pack, samples of a step: those of one pack
PIXELS = 224 * 224  # of a picture at most: a minute is short
_HELD_OUT = 8  # one picture for so many of the training's is drawn for evaluation
_LEARNING_RATE = 5e-3  # a tiny model with random weights has everything to learn
_PACKAGES = ("torch", "transformers", "accelerate", "peft")
_LOOK = 0.5  # seconds between two looks at what the runs have logged
# The published sizes of a Qwen2.5-VL with three billion parameters.
SHAPE: dict[str, object] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStanding:
    """How far one of the two runs is."""

    mode: str
    step: int
    steps: int
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoTraining:
    """Two runs, the packing check before them, and the page that compares them."""

    check_report: CheckReport
    folders: tuple[Path, ...]  # of MODES
    reused: bool  # trained by an earlier demo, and nothing has changed since
    reported: Reported


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
        baseline={"effective_batch_size": 32, "num_train_epochs": 2},
        out=folder / "report",
        overwrite=True,
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


def write_shape(folder: Path) -> Path:
    """A model folder with nothing but the config: enough to plan for."""
    with atomic_path(folder / "config.json") as path:
        path.write_text(json.dumps(SHAPE, indent=2) + "\n", encoding="utf-8")
    return folder


def can_train() -> bool:
    """Are the packages there that training needs?"""
    return all(find_spec(name) is not None for name in _PACKAGES)


def train_demo(
    data: Path,
    folder: Path,
    *,
    model: str,
    pictures: int,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[RunStanding], None] = lambda _: None,
) -> DemoTraining:
    """Prove packing for the model, train it packed and padded, and compare at equal samples."""
    from packtrain.app.verify import verify

    say(f"Checking that packed samples do not attend to each other in {model}")
    check_report = verify(model, attn_implementation="varlen", device="cpu", dtype="fp32")
    held_out = write_dataset(folder / "held-out", max(pictures // _HELD_OUT, 4), seed=1)
    name = f"{pictures} pictures"  # other pictures lie in the same files
    configs = {mode: demo_config(data, held_out, folder, model=model, mode=mode, name=name) for mode in MODES}
    reused = all(_complete(config) for config in configs.values())
    if not reused:  # both: one alone would have the machine for itself
        say(f"Training packed ({LENGTH:,} tokens) and padded runs on the same samples")
        _train_all(configs, progress)
    folders = tuple(_run_folder(config) for config in configs.values())
    reported = report(folders, folder / "report.html")
    return DemoTraining(check_report=check_report, folders=folders, reused=reused, reported=reported)


def demo_config(data: Path, held_out: Path, folder: Path, *, model: str, mode: str, name: str) -> RunConfig:
    """The config of one of the two runs: the same data, seed and learning rate, and the same samples in each step."""
    training = {
        "output_dir": str(folder / "runs" / mode),
        "run_name": name,
        "effective_batch_size": SAMPLES,
        "learning_rate": _LEARNING_RATE,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "num_train_epochs": 1,
        "gradient_checkpointing": False,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "seed": 0,
        # Without a GPU a dense mask costs as much as padding saves: each sample is attended to by itself.
        "attn_implementation": "varlen",
    }
    packing = {"packing": True} if mode == "packed" else {"packing": False, "pad_packs": True}
    sections: dict[str, dict[str, object]] = {
        "model": {"model_name_or_path": model, "dtype": "fp32"},
        "data": {
            "dataset_path": str(data),
            "eval_path": str(held_out),
            **packing,
            "packing_length": LENGTH,
            # Samples come together as they are drawn, as in usual padded batches: best_fit seeks similar lengths.
            "packing_strategy": "first_fit",
            "processor_config": {"max_pixels": PIXELS},
            "max_failure_rate": 0.9,  # the faults are planted
            "cache_dir": str(folder / "cache"),
            "cache_tokens": True,  # for both: only padded runs keep them by themselves
        },
        "training": training,
    }
    return RunConfig.of(sections)


def _train_all(configs: Mapping[str, RunConfig], progress: Callable[[RunStanding], None]) -> None:
    """Train at the same time, so that whatever else the machine does slows all of them alike."""
    from packtrain.app.train.train import train

    steps = {}
    for mode, config in configs.items():
        shutil.rmtree(_run_folder(config), ignore_errors=True)  # a demo's own run, of other settings or not complete
        # What both need is measured here, once.
        steps[mode] = train(config, dry_run=True).ready.numbers.steps
    with _threads(len(configs)), ProcessPoolExecutor(len(configs), mp_context=get_context("spawn")) as pool:
        futures = {mode: pool.submit(_train_one, config) for mode, config in configs.items()}
        _follow(configs, steps, futures, progress)
        for future in futures.values():
            future.result()


def _train_one(config: RunConfig) -> None:
    from packtrain.app.train.train import train

    train(config)


def _follow(
    configs: Mapping[str, RunConfig],
    steps: Mapping[str, int],
    futures: Mapping[str, Future[None]],
    progress: Callable[[RunStanding], None],
) -> None:
    """Tell how far the runs are, from what they log, until all have ended."""
    done = False
    while not done:
        done = all(future.done() for future in futures.values())
        for mode, config in configs.items():
            step, loss = _last_step(_run_folder(config))
            progress(RunStanding(mode=mode, step=step, steps=steps[mode], loss=loss))
        time.sleep(0 if done else _LOOK)


def _last_step(run: Path) -> tuple[int, float | None]:
    if not (run / RUN).is_file():
        return 0, None
    logged = read_run(run).steps
    if not len(logged):
        return 0, None
    loss = float(logged["loss"][-1])
    return int(logged["step"][-1]), None if math.isnan(loss) else loss


@contextmanager
def _threads(processes: int) -> Iterator[None]:
    """An equal share of the cores for each process that is started here, unless the user has chosen."""
    given = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = given or str(max(1, (os.cpu_count() or 1) // processes))
    try:
        yield
    finally:
        if given is None:
            del os.environ["OMP_NUM_THREADS"]


def _run_folder(config: RunConfig) -> Path:
    return Path(str(config.training.output_dir))


def _complete(config: RunConfig) -> bool:
    """Was this very config trained to the end?"""
    run = _run_folder(config)
    try:
        facts = json.loads((run / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    sections = config.sections("model", "data", "training")
    return facts.get("written") == json.loads(json.dumps(sections)) and read_run(run).status == "complete"
