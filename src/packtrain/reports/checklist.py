"""From a study to a trained model: the commands in order."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from packtrain.planning.study_values import Study

TRIAL = 1_000  # samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecklistItem:
    """One thing to do, and how."""

    name: str
    command: str


def train_command(study: Study, yaml: Path, *more: str) -> str:
    """How the recommended config is trained on the GPUs of the study."""
    command = ["packtrain", "train", str(yaml), *more]
    if study.gpus > 1:
        command = ["torchrun", "--nproc-per-node", str(study.gpus), "-m", "packtrain.cli", *command[1:]]
    return shlex.join(command)


def checklist(study: Study, out: Path) -> tuple[ChecklistItem, ...]:
    """A trial, the proof, the run itself, the padded run to compare with, and the comparison."""
    yaml, packing, config = out / "recommended.yaml", study.recommendation.packing, study.recommendation.config
    data, runs = config.get("data", {}).get("dataset_path"), f"runs/{out.resolve().name}"
    best = next((run for run in study.padded if run.kernels == "packs"), None)
    padded = ["data.packing=false", *([f"training.per_device_train_batch_size={best.batch_size}"] if best else [])]
    padded += ["training.group_by_length=true"] if best and best.order == "by_length" else []
    verify = ["packtrain", "verify", "--model", study.model, *(["--data", data] if isinstance(data, str) else [])]
    trial = train_command(study, yaml, f"--max-samples={TRIAL}", "-o", f"{runs}-trial")
    whole = "packed" if packing else "padded"
    tasks = [
        ChecklistItem(
            name="See what will be trained, without training", command=train_command(study, yaml, "--dry-run")
        ),
        ChecklistItem(name="Check that packed samples do not see each other", command=shlex.join(verify)),
        *([ChecklistItem(name=f"Try {TRIAL:,} samples", command=trial)] if study.dataset.samples > TRIAL else []),
        ChecklistItem(name="Train", command=train_command(study, yaml, "-o", f"{runs}-{whole}")),
    ]
    if not packing:
        return tuple(task for task in tasks if not task.command.startswith("packtrain verify"))
    return (
        *tasks,
        ChecklistItem(
            name="Train without packing", command=train_command(study, yaml, *padded, "-o", f"{runs}-padded")
        ),
        ChecklistItem(name="Compare", command=shlex.join(["packtrain", "report", f"{runs}-packed", f"{runs}-padded"])),
    )
