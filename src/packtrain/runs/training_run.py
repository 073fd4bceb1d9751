"""A run as its folder tells it, also while it is written, after a crash, or when parts of it are missing.

The run's notes name what could not be read. Only a folder that is not a run at all is an error.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packtrain.core.artifacts import is_held, open_own
from packtrain.core.errors import ConfigError, PathError
from packtrain.runs.early_warnings import EarlyWarning
from packtrain.runs.metrics_log import METRICS
from packtrain.runs.run_folder import CONFIG, LEDGER, LOCK, RUN
from packtrain.runs.step_metrics import LEARNING_RATES, NOT_FINITE, STEP_KEYS, EvalMetrics

Scalar = str | int | float | bool | None

_LONGEST = 1 << 20  # characters of a config that is shown
_BEGINNING, _SLOW = 10, 3.0  # see Steps.warm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """The metrics of every optimizer step, in order; NaN where one is missing."""

    columns: Mapping[str, np.ndarray]  # by the names of STEP_KEYS
    rates: Mapping[str, np.ndarray] = field(default_factory=dict)  # learning rates by part

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def known(self, name: str) -> bool:
        """Does any step say it?"""
        return bool(np.isfinite(self.columns[name]).any())

    @property
    def warm(self) -> np.ndarray:
        """Which steps warm up: workers start in them, or layers are compiled. No speed counts them.

        The first step, and single ones among the first ten that take three times their median: a shape that is
        compiled later, or a process that resumes. Where half of the ten are slow, the machine was, and they count. A
        run of one step has none.
        """
        seconds = np.nan_to_num(self.columns["step_seconds"])
        mask = np.zeros(len(seconds), bool)
        if len(seconds) < 2:
            return mask
        beginning = seconds[:_BEGINNING]
        mask[: len(beginning)] = beginning > _SLOW * np.median(beginning)
        mask[0], mask[len(seconds) // 2 :] = True, False  # at least half of a short run counts
        return mask

    @property
    def elapsed(self) -> np.ndarray:
        """Seconds of training up to each step; steps that warm up count as if they were as fast as the others.

        So the time for some samples is their tokens over the run's tokens per second. Pauses between processes do not
        count.
        """
        seconds, tokens = (np.nan_to_num(self.columns[name]) for name in ("step_seconds", "tokens"))
        warm = self.warm
        if warm.any() and seconds[~warm].sum() > 0 and tokens[~warm].sum() > 0:
            seconds[warm] = tokens[warm] * seconds[~warm].sum() / tokens[~warm].sum()
        return np.cumsum(seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The content of run.json; None for what is missing."""

    model: str | None = None
    mode: str | None = None  # packed or padded
    plan: str | None = None
    packs_per_step: int | None = None
    rows_per_batch: int = 1
    seed: int = 0
    balance: str = "sorted"
    world: int = 1
    derived: Mapping[str, Scalar] = field(default_factory=dict)  # names of inner values are joined by dots
    outcome: Mapping[str, Scalar] = field(default_factory=dict)
    other: Mapping[str, Scalar] = field(default_factory=dict)
    printed: tuple[str, ...] = ()  # what was printed before training: notes, what was reused and what was made


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingRun:
    """Everything a page shows of one run."""

    folder: Path
    name: str
    about: About
    steps: Steps
    evaluations: tuple[EvalMetrics, ...] = ()
    warnings: tuple[EarlyWarning, ...] = ()
    ledger: Mapping[str, int] = field(default_factory=dict)  # samples by stage and reason
    config: str = ""  # the text of run.yaml
    notes: tuple[str, ...] = ()  # what could not be read
    is_held: bool = False  # a process is at work in its folder

    @property
    def is_training(self) -> bool:
        """Is it still trained? A process that has recorded how the run ended holds its folder a little longer."""
        return self.is_held and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Has it recorded how it ended?"""
        return self.status not in ("running", "started", "not started")

    @property
    def status(self) -> str:
        """How it ended, as far as it is known."""
        recorded = self.about.outcome.get("status")
        if recorded:
            return str(recorded)
        return "started" if len(self.steps) else "not started"


# ---- reading


def read_run(folder: str | Path) -> TrainingRun:
    """A run from its folder."""
    folder = Path(folder)
    _check(folder)
    notes: list[str] = []
    facts = _object(folder / RUN, notes)
    title = facts.get("title")
    steps, evaluations, warnings = _metrics(folder / METRICS, notes)
    return TrainingRun(
        folder=folder,
        name=(title.strip() if isinstance(title, str) else "") or folder.resolve().name or str(folder),
        about=_about(facts),
        steps=steps,
        evaluations=evaluations,
        warnings=warnings,
        ledger=_ledger(folder / LEDGER, notes),
        config=_text(folder / CONFIG, notes)[:_LONGEST],
        notes=tuple(notes),
        is_held=is_held(folder / LOCK),
    )


def _check(folder: Path) -> None:
    if (folder / RUN).exists() or (folder / METRICS).exists():
        return
    where, expected = str(folder), "the folder of a run, as packtrain train leaves it"
    if not folder.is_dir():
        raise ConfigError(where, got="a file" if folder.exists() else "no such folder", expected=expected)
    if (folder / "recommendations.json").exists():
        fix = f"open {folder / 'report.html'}: packtrain plan has written it already"
        raise ConfigError(where, got="a study", expected="the folder of a training run", fix=fix)
    raise PathError(where, got=f"neither {RUN} nor {METRICS}", expected=expected)


def _open(path: Path, notes: list[str]) -> BinaryIO:
    """A file that may be missing: then an empty one. A link is refused: the folder may be another user's."""
    try:
        return os.fdopen(open_own(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        notes.append(f"{path.name} is not there.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}.")
    return io.BytesIO()


def _text(path: Path, notes: list[str]) -> str:
    with _open(path, notes) as file:
        return file.read().decode("utf-8", "replace")


def _object(path: Path, notes: list[str]) -> Mapping[str, object]:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} is no JSON: {error}.")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds no object.")
        return {}
    return value


def _lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, object]]:
    """The objects of a file of lines. A last line that is not finished belongs to a writer that is still at work."""
    broken = 0
    with _open(path, notes) as file:
        for line in file:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n") and bool(line.strip())
                continue
            if isinstance(value, dict):
                yield value
            else:
                broken += 1
    if broken:
        notes.append(f"{broken:,} lines of {path.name} could not be read and are left out.")


def _metrics(path: Path, notes: list[str]) -> tuple[Steps, tuple[EvalMetrics, ...], tuple[EarlyWarning, ...]]:
    steps: dict[int, Mapping[str, object]] = {}
    evaluations: dict[int, EvalMetrics] = {}
    warnings: list[EarlyWarning] = []
    for line in _lines(path, notes):
        step, kind = _whole(line.get("step")), line.get("kind", "step")
        if step is None:
            continue  # the first line, which says the format's version
        if kind == "step":
            steps[step] = line  # a step that was trained again after a crash counts as it was trained last
        elif kind == "eval":
            loss, epoch = (_number(line.get(key)) for key in ("eval_loss", "epoch"))
            samples, failures = (_whole(line.get(key)) or 0 for key in ("samples_seen", "eval_failures"))
            evaluations[step] = EvalMetrics(
                step=step, epoch=epoch, eval_loss=loss, samples_seen=samples, eval_failures=failures
            )
        elif kind == "warning":
            of, finding, advice = (str(line.get(key, "")) for key in ("warning", "message", "advice"))
            warnings.append(EarlyWarning(step=step, kind=of, message=finding, advice=advice))
    ordered = [steps[step] for step in sorted(steps)]
    whole = [line for line in ordered if _whole(line.get("samples_seen")) is not None]
    if len(whole) < len(ordered):
        notes.append(f"{len(ordered) - len(whole):,} steps of {path.name} do not say what was seen and are left out.")
    return _columns(whole), tuple(evaluations[step] for step in sorted(evaluations)), tuple(warnings)


def _columns(lines: list[Mapping[str, object]]) -> Steps:
    columns = {key: np.array([_number(line.get(key)) for line in lines], np.float64) for key in STEP_KEYS}
    rates = [by_group if isinstance(by_group := line.get(LEARNING_RATES), dict) else {} for line in lines]
    parts = dict.fromkeys(part for rate in rates for part in rate)
    return Steps(columns=columns, rates={part: np.array([_number(rate.get(part)) for rate in rates]) for part in parts})


def _number(value: object) -> float:
    """A number as metrics.jsonl has it; those that JSON has no sign for are strings."""
    if isinstance(value, bool) or value is None:
        return math.nan
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 else math.inf if value > 0 else -math.inf
    return NOT_FINITE.get(value, math.nan) if isinstance(value, str) else math.nan


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _about(facts: Mapping[str, object]) -> About:
    own = ("title", "model", "mode", "plan", "packs_per_step", "rows_per_batch", "seed", "balance", "world")
    # What the user's config said is in run.yaml too, resolved; what was measured, and weights, are for resuming.
    apart = ("derived", "outcome", "notes", "prepared", "written", "measured", "frozen", "kind", "version")
    return About(
        model=_string(facts.get("model")),
        mode=_string(facts.get("mode")),
        plan=_string(facts.get("plan")),
        packs_per_step=_whole(facts.get("packs_per_step")),
        rows_per_batch=_whole(facts.get("rows_per_batch")) or 1,
        seed=_whole(facts.get("seed")) or 0,
        balance=_string(facts.get("balance")) or "sorted",
        world=_whole(facts.get("world")) or 1,
        derived=_flat(facts.get("derived")),
        outcome=_flat(facts.get("outcome")),
        other=_flat({key: value for key, value in facts.items() if key not in (*own, *apart)}),
        printed=tuple(str(line) for key in ("prepared", "notes") for line in _list(facts.get(key))),
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _string(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _flat(value: object, path: str = "") -> dict[str, Scalar]:
    """Inner values by their path; lists of plain values as one text."""
    if not isinstance(value, dict):
        return {}
    flat: dict[str, Scalar] = {}
    for key, inner in value.items():
        name = f"{path}{key}"
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{name}.")
        elif isinstance(inner, list):
            flat[name] = ", ".join(str(one) for one in inner[:20]) + ("…" if len(inner) > 20 else "")
        else:
            flat[name] = inner
    return flat


def _ledger(path: Path, notes: list[str]) -> dict[str, int]:
    if not path.exists():
        return {}
    counts = Counter(f"{line.get('stage', '?')}: {line.get('reason', '?')}" for line in _lines(path, notes))
    return dict(counts.most_common())
