"""A run as its folder tells it, also while it is written, after a crash, or when parts of it are missing.

The run's notes name what could not be read. Only a folder that is not a run at all is an error.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packtrain.core.artifacts import is_held, open_own
from packtrain.core.dataclass_json import as_float
from packtrain.core.errors import ConfigError, PathError
from packtrain.core.numbers import counted
from packtrain.runs.early_warnings import EarlyWarning
from packtrain.runs.metrics_log import METRICS, parse_lines, parse_metrics
from packtrain.runs.run_folder import CONFIG, LEDGER, LOCK, RUN, RunFacts
from packtrain.runs.step_metrics import LEARNING_RATES, STEP_KEYS, EvalMetrics

Scalar = str | int | float | bool | None

_LONGEST = 1 << 20  # characters of a config that is shown
_BEGINNING, _SLOW = 10, 3.0  # see Steps.warm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """The metrics of every optimizer step, in order; NaN where one is missing."""

    columns: Mapping[str, np.ndarray]  # by the names of STEP_KEYS
    rates: Mapping[str, np.ndarray] = field(default_factory=dict)  # learning rates by part

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, object]]) -> Steps:
        """From lines of metrics.jsonl."""
        columns = {key: np.array([as_float(line.get(key)) for line in lines], np.float64) for key in STEP_KEYS}
        given = [line.get(LEARNING_RATES) for line in lines]
        rates = [by_part if isinstance(by_part, dict) else {} for by_part in given]
        parts = dict.fromkeys(part for rate in rates for part in rate)
        return cls(
            columns=columns, rates={part: np.array([as_float(one.get(part)) for one in rates]) for part in parts}
        )

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingRun:
    """Everything a page shows of one run."""

    folder: Path
    name: str
    facts: RunFacts
    steps: Steps
    evaluations: tuple[EvalMetrics, ...] = ()
    warnings: tuple[EarlyWarning, ...] = ()
    recorded: Mapping[str, Scalar] = field(default_factory=dict)  # all of run.json; names of inner values have dots
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
        return "not started" if self.facts.status == "started" and not len(self.steps) else self.facts.status


# ---- reading


def read_run(folder: str | Path) -> TrainingRun:
    """A run from its folder."""
    folder = Path(folder)
    _check(folder)
    notes: list[str] = []
    body = _object(folder / RUN, notes)
    facts = RunFacts.from_json(body)
    with _open(folder / METRICS, notes) as file:
        metrics = parse_metrics(file)
    _note_unreadable(METRICS, metrics.unreadable, notes)
    return TrainingRun(
        folder=folder,
        name=(facts.title or "").strip() or folder.resolve().name or str(folder),
        facts=facts,
        steps=Steps.of(metrics.lines),
        evaluations=metrics.evaluations,
        warnings=metrics.warnings,
        recorded=_flat(body),
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


def _note_unreadable(name: str, count: int, notes: list[str]) -> None:
    if count:
        notes.append(f"{counted(count, 'unreadable line')} of {name} left out.")


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
    with _open(path, notes) as file:
        entries = list(parse_lines(file))
    counts = Counter(f"{entry.get('stage', '?')}: {entry.get('reason', '?')}" for entry in entries if entry)
    _note_unreadable(path.name, len(entries) - counts.total(), notes)
    return dict(counts.most_common())
