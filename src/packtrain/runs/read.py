"""Reading a run's folder, also while it is written, after a crash, or when parts of it are missing.

What cannot be read is said in the run's notes. Only a folder that is no run at all is an error.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from packtrain.core.artifacts import is_held, open_own
from packtrain.core.errors import ConfigError, PathError
from packtrain.runs.metrics_log import METRICS
from packtrain.runs.run_folder import CONFIG, LEDGER, LOCK, RUN
from packtrain.runs.run_values import LEARNING_RATES, About, Evaluation, Scalar, Steps, TrainingRun, Warned
from packtrain.runs.step_metrics import NOT_FINITE, STEP_KEYS

_LONGEST = 1 << 20  # characters of a config that is shown


def read_run(folder: str | Path) -> TrainingRun:
    """A run from its folder."""
    folder = Path(folder)
    _check(folder)
    notes: list[str] = []
    found = _object(folder / RUN, notes)
    steps, evaluations, warnings = _metrics(folder / METRICS, notes)
    return TrainingRun(
        folder=folder,
        name=_title(found) or folder.resolve().name or str(folder),
        about=_about(found),
        steps=steps,
        evaluations=evaluations,
        warnings=warnings,
        ledger=_ledger(folder / LEDGER, notes),
        config=_text(folder / CONFIG, notes)[:_LONGEST],
        notes=tuple(notes),
        is_held=is_held(folder / LOCK),
    )


def _title(found: Mapping[str, object]) -> str:
    """What the user calls the run."""
    title = found.get("title")
    return title.strip() if isinstance(title, str) else ""


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            str(folder),
            got="a file" if folder.exists() else "no such folder",
            expected="the folder of a run, as packtrain train leaves it",
        )
    if (folder / RUN).exists() or (folder / METRICS).exists():
        return
    if (folder / "recommendations.json").exists():
        raise ConfigError(
            str(folder),
            got="a study",
            expected="the folder of a training run",
            fix=f"open {folder / 'report.html'}: packtrain plan has written it already",
        )
    raise PathError(
        str(folder),
        got=f"neither {RUN} nor {METRICS}",
        expected="the folder of a run, as packtrain train leaves it",
    )


def _text(path: Path, notes: list[str]) -> str:
    """A file that may be missing."""
    try:
        with _opened(path) as file:
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is not there.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}.")
    return ""


def _opened(path: Path) -> BinaryIO:
    """The folder may be somebody else's: a link in it is refused, and a pipe does not hold us up."""
    return os.fdopen(open_own(path, os.O_RDONLY), "rb")


def _object(path: Path, notes: list[str]) -> Mapping[str, object]:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} is no JSON: {error}.")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} holds no object.")
        return {}
    return found


def _lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, object]]:
    """The objects of a file of lines. A last line that is not finished belongs to a writer that is still at work."""
    try:
        file = _opened(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is not there.")
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}.")
        return
    broken = 0
    with file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n") and bool(line.strip())
                continue
            if isinstance(found, dict):
                yield found
            else:
                broken += 1
    if broken:
        notes.append(f"{broken:,} lines of {path.name} could not be read and are left out.")


def _metrics(path: Path, notes: list[str]) -> tuple[Steps, tuple[Evaluation, ...], tuple[Warned, ...]]:
    steps: dict[int, Mapping[str, object]] = {}
    evaluations: dict[int, Evaluation] = {}
    warnings: list[Warned] = []
    for line in _lines(path, notes):
        step = _whole(line.get("step"))
        kind = line.get("kind", "step")
        if step is None:
            continue  # the first line, which says the format's version
        if kind == "step":
            steps[step] = line  # a step that was trained again after a crash counts as it was trained last
        elif kind == "eval":
            loss, samples = (_number(line.get(key)) for key in ("eval_loss", "samples_seen"))
            evaluations[step] = Evaluation(step=step, loss=loss, samples=samples)
        elif kind == "warning":
            warnings.append(_warning(step, line))
    ordered = [steps[step] for step in sorted(steps)]
    whole = [line for line in ordered if _whole(line.get("samples_seen")) is not None]
    if len(whole) < len(ordered):
        notes.append(f"{len(ordered) - len(whole):,} steps of {path.name} do not say what was seen and are left out.")
    return _columns(whole), tuple(evaluations[step] for step in sorted(evaluations)), tuple(warnings)


def _warning(step: int, line: Mapping[str, object]) -> Warned:
    kind, found, advice = (str(line.get(key, "")) for key in ("warning", "found", "advice"))
    return Warned(step=step, kind=kind or str(line.get("name", "")), found=found, advice=advice)


def _columns(lines: list[Mapping[str, Any]]) -> Steps:
    columns = {key: np.array([_number(line.get(key)) for line in lines], np.float64) for key in STEP_KEYS}
    parts: dict[str, None] = {}
    rates = [_mapping(line.get(LEARNING_RATES)) for line in lines]
    for rate in rates:
        parts.update(dict.fromkeys(rate))
    return Steps(columns=columns, rates={part: np.array([_number(rate.get(part)) for rate in rates]) for part in parts})


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float:
    """A number as metrics.jsonl has it; those that JSON has no sign for are strings."""
    if isinstance(value, bool) or value is None:
        return math.nan
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 else math.inf if value > 0 else -math.inf
    return NOT_FINITE.get(value, math.nan) if isinstance(value, str) else math.nan


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _about(found: Mapping[str, object]) -> About:
    model = found.get("model")
    if isinstance(model, dict):
        model = model.get("name")
    own = ("title", "model", "mode", "plan", "packs_per_step", "rows_per_batch", "seed", "balance", "world")
    # What the user's config said is in run.yaml too, resolved; what was measured, and weights, are for resuming.
    apart = ("derived", "outcome", "notes", "prepared", "written", "measured", "frozen", "kind", "version")
    return About(
        model=_string(model),
        mode=_string(found.get("mode")),
        plan=_string(found.get("plan")),
        packs_per_step=_whole(found.get("packs_per_step")),
        rows_per_batch=_whole(found.get("rows_per_batch")) or 1,
        seed=_whole(found.get("seed")) or 0,
        balance=_string(found.get("balance")) or "sorted",
        world=_whole(found.get("world")) or 1,
        derived=_flat(found.get("derived")),
        outcome=_flat(found.get("outcome")),
        other=_flat({key: value for key, value in found.items() if key not in (*own, *apart)}),
        said=tuple(str(line) for key in ("prepared", "notes") for line in _list(found.get(key))),
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _string(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _flat(value: object, path: str = "") -> dict[str, Scalar]:
    """Inner values by their path; lists of plain values as one text."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, Scalar] = {}
    for key, inner in value.items():
        name = f"{path}{key}"
        if isinstance(inner, dict):
            found |= _flat(inner, f"{name}.")
        elif isinstance(inner, list):
            found[name] = ", ".join(str(one) for one in inner[:20]) + ("…" if len(inner) > 20 else "")
        else:
            found[name] = inner
    return found


def _ledger(path: Path, notes: list[str]) -> dict[str, int]:
    if not path.exists():
        return {}
    counts = Counter(f"{line.get('stage', '?')}: {line.get('reason', '?')}" for line in _lines(path, notes))
    return dict(counts.most_common())
