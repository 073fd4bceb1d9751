"""A training run before its first step and after its end, and its model card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from packtrain.app.train.resolve import ResolvedRun
from packtrain.core.numbers import counted
from packtrain.core.secrets import without_secrets
from packtrain.families.model_folder import PREFIX
from packtrain.runs.derived import Adapters, Course, Derived, PredictedRun, RunNumbers
from packtrain.runs.run_folder import RunOutcome, versions

if TYPE_CHECKING:
    from packtrain.delivery.collate.batch_values import BatchInfo
    from packtrain.modeling.adapters import TrainedPart
    from packtrain.verifying.check_result import CheckReport


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlace:
    """The rank of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Does this process print and write for all?"""
        return self.rank == 0

    @classmethod
    def here(cls) -> ProcessPlace:
        """From the environment of torchrun or accelerate launch; one process without them."""
        rank, world_size, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(rank=rank, world_size=max(world_size, 1), local_rank=local)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadyRun:
    """A run before its first step."""

    run: ResolvedRun
    numbers: RunNumbers
    done: tuple[str, ...]  # what was reused, and what was made
    notes: tuple[str, ...]
    attn_implementation: str  # that really runs
    parts: tuple[TrainedPart, ...]
    dtype: str
    masters: bool  # the optimizer keeps fp32 copies of the trained half-precision weights
    compiled: bool
    packing_check: CheckReport | None  # None where rows are padded, or the check is off
    course: Course
    expected: PredictedRun | None  # None without a data sheet of the GPU
    batches: tuple[tuple[BatchInfo, ...], ...] = ()  # the first of each rank, if requested
    warnings: tuple[str, ...] = ()  # what is not as the user asked for
    risks: tuple[str, ...] = ()  # why the run may fail later
    resumed: int = 0  # the step to continue from

    def derived(self) -> Derived:
        """The derived numbers of run.json."""
        model = self.run.model
        adapters = Adapters(rank=model.lora_rank, alpha=model.scale, targets=model.lora_target_modules)
        return Derived(
            **asdict(self.numbers),
            attn_implementation=self.attn_implementation,
            dtype=self.dtype,
            master_weights=self.masters,
            compiled=self.compiled,
            trainable={part.name: part.trained for part in self.parts},
            weights={part.name: part.weights for part in self.parts},
            method=model.method,
            course=self.course,
            sharding=self.run.setup.sharding,
            packing_check=None if self.packing_check is None else not self.packing_check.failures,
            lora=adapters if model.has_adapters else None,
            expected=self.expected,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainOutcome:
    """How a run ended."""

    folder: Path
    ready: ReadyRun
    outcome: RunOutcome
    report: Path | None = None
    final: Path | None = None
    problems: tuple[str, ...] = ()  # after training, with the report

    @property
    def interrupted(self) -> bool:
        """Was it stopped, and can be resumed?"""
        return self.outcome.status == "interrupted"


def model_card(ready: ReadyRun, outcome: RunOutcome, *, merged: bool) -> str:
    """README.md of a model's folder; of local data and models it has names, not paths."""
    run = ready.run
    base, data = run.model.name, str(run.data.dataset_path)
    adapters = run.model.has_adapters and not merged
    head: dict[str, object] = {"library_name": "peft" if adapters else "transformers"}
    if _is_on_hub(base):
        head |= {"base_model": base, "base_model_relation": "adapter" if adapters else "finetune"}
    if _is_on_hub(data):
        head["datasets"] = [data]
    sees = any(part.name == "vision" for part in ready.parts)
    head |= {"pipeline_tag": "image-text-to-text" if sees else "text-generation", "tags": ["packtrain", "sft"]}
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(ready, outcome))
    sentence = f"`{_name(base)}`, fine-tuned on `{_name(data)}` with packtrain."
    front = yaml.safe_dump(head, sort_keys=False)
    return f"---\n{front}---\n\n# {run.folder.name}\n\n{sentence}\n\n| | |\n|---|---|\n{rows}\n"


def _rows(ready: ReadyRun, outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    run, numbers, course = ready.run, ready.numbers, ready.course
    yield "Method", run.model.method + (f", rank {run.model.lora_rank}" if run.model.has_adapters else "")
    yield "Trained parts", ", ".join(part.name for part in ready.parts if part.trained)
    steps = f"{outcome.step:,} of about {numbers.samples_per_step:.0f} samples"
    if numbers.looked_at is None:
        yield "Samples", f"{numbers.samples:,} ({numbers.tokens:,} tokens, {numbers.supervised_tokens:,} supervised)"
        yield "Steps", f"{steps}; {_epochs(numbers.epochs)}"
    else:
        yield "Samples", "a stream, packed as it was read"
        yield "Steps", steps
    length = f"packed to {numbers.packing_length:,} tokens" if run.data.packing else "padded"
    yield "Rows", length
    if given := run.data.media_limits().given():
        yield "Media limits", ", ".join(f"{name} {value}" for name, value in given.items())
    rates = ", ".join(f"{part} {rate:g}" for part, rate in course.rates.items())
    yield "Learning rate", f"{rates}; {course.schedule}, {counted(course.warmup_steps, 'warm-up step')}"
    yield "Optimizer", f"{course.optimizer}, {course.precision}"
    if outcome.loss is not None:
        mean = f" (mean of the last {counted(outcome.loss_samples, 'sample')})" if outcome.loss_samples else ""
        yield "Final loss", f"{outcome.loss:.4f}{mean}"
    if outcome.eval_loss is not None:
        yield "Evaluation loss", f"{outcome.eval_loss:.4f}"
    yield "Seed", str(run.data.seed)
    yield "Versions", ", ".join(f"{name} {version}" for name, version in versions().items())


def _epochs(number: float) -> str:
    return counted(1, "epoch") if number == 1 else f"{number:.3g} epochs"


def _is_on_hub(name: str) -> bool:
    """An OWNER/NAME that is not a local path."""
    return name.count("/") == 1 and ":" not in name and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _name(source: str) -> str:
    if _is_on_hub(source) or source.startswith(PREFIX):
        return source
    return Path(str(without_secrets(source))).name.partition("?")[0]
