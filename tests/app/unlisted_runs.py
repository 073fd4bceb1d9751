"""Runs of unlisted models over one small dataset: measured, checked and trained in two steps."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

import packtrain
from packtrain.app.train.outcome import TrainOutcome

sys.path.append(str(Path(__file__).parents[1] / "delivery"))  # small folders of unlisted models, and chats
from unlisted_data import shared, weights_of, write_chats

SAMPLES = 12
SMALL_IMAGES = ("glm4v", "mistral3")  # three packs of 256 tokens take all samples
OWN_CACHE = "PACKTRAIN_CACHE_OF_TEST"


def settings_of(model: str | Path, output: Path, *, packing: bool, **changed: Any) -> list[str]:
    """Every step takes all samples, in three packs or in batches of three; a name's two underscores are a dot."""
    settings = {
        "model": model if isinstance(model, Path) else weights_of(model),
        "data.dataset_path": write_chats(shared() / "data", SAMPLES),
        "data.packing": packing,
        "data.packing_length": 256,
        "data.check": 0,
        "data.workers": 1,
        "training.use_cpu": True,
        "training.max_steps": 2,
        "training.learning_rate": 1e-3,
        "training.lr_scheduler_type": "constant",
        "training.output_dir": output,
        **(
            {"training.packs_per_step": 3}
            if packing
            else {"training.effective_batch_size": SAMPLES, "training.per_device_train_batch_size": 3}
        ),
    }
    changed = {name.replace("__", "."): value for name, value in changed.items()}
    return [f"{name}={_written(value)}" for name, value in {**settings, **changed}.items() if value is not ...]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def run(
    model: str | Path, *, packing: bool, output: Path | None = None, dry_run: bool = False, **changed: Any
) -> TrainOutcome:
    """Train, or only check what would be trained."""
    output = output or Path(mkdtemp(prefix="run-", dir=shared())) / "run"
    with _cache():
        return packtrain.train(None, settings_of(model, output, packing=packing, **changed), dry_run=dry_run)


def go_on(folder: Path, *overrides: str) -> TrainOutcome:
    """Resume a run from its last checkpoint."""
    with _cache():
        return packtrain.train(folder, overrides, resume=True)


@contextmanager
def _cache() -> Iterator[None]:
    """One for all runs, so that data are measured once, except for tests that name their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", os.environ.get(OWN_CACHE, str(shared() / "cache")))
        yield


@functools.cache
def trained(model_type: str, *, packing: bool) -> TrainOutcome:
    """One run of two steps, made once; images that take many tokens need longer packs."""
    wide = {"data__packing_length": 2048, "training__packs_per_step": 1}
    return run(model_type, packing=packing, **(wide if packing and model_type not in SMALL_IMAGES else {}))


def steps(outcome: TrainOutcome) -> list[dict[str, Any]]:
    """What the run says of each of its steps."""
    lines = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]
