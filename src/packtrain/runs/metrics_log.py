"""metrics.jsonl: one line for every step, evaluation and warning of a run, and reading them back.

    {"kind": "metrics", "version": 1}
    {"kind": "step", "step": 1, "loss": 5.1, ...}
    {"kind": "warning", "step": 1, "warning": "data_bound", "message": ..., "advice": ...}
    {"kind": "eval", "step": 1, "eval_loss": 5.0, ...}

JSON has no sign for numbers that are not finite: they are the strings "NaN", "Infinity" and "-Infinity". What is not
known is null.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from packtrain.core.dataclass_json import as_count, lenient_from_json
from packtrain.core.errors import ArtifactError
from packtrain.runs.early_warnings import EarlyWarning
from packtrain.runs.step_metrics import (
    EvalMetrics,
    StepMetrics,
    named_numbers,
    numbers_of_names,
    step_from_plain,
    to_plain,
)

METRICS = "metrics.jsonl"
VERSION = 1
_HEADER = {"kind": "metrics", "version": VERSION}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The content of metrics.jsonl, as far as it can be read.

    A step that was trained again after a crash counts as it was trained last.
    """

    lines: tuple[Mapping[str, object], ...] = ()  # of steps, in their order; they may lack some numbers
    evaluations: tuple[EvalMetrics, ...] = ()
    warnings: tuple[EarlyWarning, ...] = ()
    unreadable: int = 0  # finished lines that are no lines of ours

    @property
    def steps(self) -> tuple[StepMetrics, ...]:
        """The steps that lack nothing."""
        steps = map(_step, self.lines)
        return tuple(step for step in steps if step is not None)


class MetricsLog:
    """The one writer of a run's metrics. Without a path nothing is written, as on every rank but the first.

    A line is with the system when its method returns, so that a killed process loses none; `sync` brings it to the
    disk. Lines are in the order of steps. A file that is there already is continued by `resume` only.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = Path(path) if path is not None else None
        self._stream: BinaryIO | None = None
        self._begun = False
        self._last = 0  # step

    def resume(self, step: int, *, evaluated: bool = True) -> StepMetrics | None:
        """Go on after that step: lines of later ones, and an unfinished one of a killed writer, are cut away.

        So is an evaluation of that step where it is still to be made: a run that went on from here before has made it.
        The last step that is kept, or None. It is an earlier one than asked for where the system itself went down.
        """
        if self._path is None:
            return None
        self.close()
        last: StepMetrics | None = None
        if self._path.exists():
            kept, last = _kept_length(self._path, step, evaluated)
            os.truncate(self._path, kept)
        self._last = last.step if last is not None else 0
        self._open()
        self.sync()
        return last

    def written(self) -> Metrics:
        """Everything that is in the file now."""
        return read_metrics(self._path) if self._path is not None else Metrics()

    def step(self, metrics: StepMetrics) -> None:
        """Write a step."""
        assert self._path is None or metrics.step > self._last, f"step {metrics.step} after step {self._last}"
        self._write({"kind": "step", **to_plain(metrics)})
        self._last = metrics.step

    def evaluation(self, metrics: EvalMetrics) -> None:
        """Write an evaluation."""
        self._write({"kind": "eval", **to_plain(metrics)})

    def warning(self, warning: EarlyWarning) -> None:
        """Write an early warning."""
        plain = asdict(warning)
        self._write({"kind": "warning", "step": plain.pop("step"), "warning": plain.pop("kind"), **plain})

    def sync(self) -> None:
        """Bring everything to the disk: before a checkpoint that is to go on from here."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Nothing more is coming, or only after `resume`."""
        if self._stream is not None:
            self.sync()
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> BinaryIO:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stream, self._begun = open(self._path, "ab"), True  # noqa: SIM115 - open as long as the run
        if self._stream.tell() == 0:
            self._append(_line(_HEADER))
        return self._stream

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        if self._stream is None:
            if not self._begun and self._path.exists() and self._path.stat().st_size:
                raise ArtifactError(
                    str(self._path),
                    got="metrics of another run",
                    expected="none, or a run that is resumed",
                    fix="resume that run, or train into another folder",
                )
            self._open()
        self._append(_line(values))

    def _append(self, line: bytes) -> None:
        assert self._stream is not None
        self._require_place()
        before = self._stream.tell()
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            _cut(self._stream, before)  # half a line would spoil the next
            self._stream = None
            raise ArtifactError(
                str(self._path), got=str(error), expected="a disk with room for metrics", fix="make room, and resume"
            ) from error

    def _require_place(self) -> None:
        """Writing on into a file that was deleted or moved away would lose the metrics."""
        assert self._stream is not None
        assert self._path is not None
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._stream.fileno()), os.stat(self._path)):
                return
        self._stream.close()
        self._stream = None
        raise ArtifactError(
            str(self._path),
            got="a file that was deleted, moved or replaced while the run was writing it",
            expected="the folder of the run in place until the run ends",
            fix="bring the folder back and resume, or start a new run",
        )


def read_metrics(path: str | Path) -> Metrics:
    """Its content now; while it is written, everything but the line in progress."""
    path = Path(path)
    lines = [line for _, line in _lines(path)]
    if lines:
        _check_version(path, _parse(lines[0]))
    return parse_metrics(lines)


def parse_metrics(lines: Iterable[bytes]) -> Metrics:
    """Everything that lines of any version say; a last one that is not finished is passed over."""
    steps: dict[int, Mapping[str, object]] = {}
    evaluations: dict[int, EvalMetrics] = {}
    warnings: list[EarlyWarning] = []
    unreadable = 0
    for values in parse_lines(lines):
        step, kind = as_count(values.get("step")), values.get("kind", "step")
        if kind == "metrics":
            continue
        if step is None:
            unreadable += 1
        elif kind == "step" and as_count(values.get("samples_seen")) is not None:
            steps[step] = values
        elif kind == "eval":
            evaluations[step] = lenient_from_json(EvalMetrics, values)
        elif kind == "warning":
            warnings.append(lenient_from_json(EarlyWarning, {**values, "kind": values.get("warning")}))
        else:
            unreadable += 1
    return Metrics(
        lines=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        warnings=tuple(warnings),
        unreadable=unreadable,
    )


def parse_lines(lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    """The objects of JSON lines; empty ones in place of those that are none.

    A last line that is not finished belongs to a writer that is still at work.
    """
    for line in lines:
        values = _parse(line)
        if values or (line.endswith(b"\n") and line.strip()):
            yield values


def _kept_length(path: Path, step: int, evaluated: bool) -> tuple[int, StepMetrics | None]:
    """Where the first line of a later step or evaluation begins, and the last step before it."""
    kept, last = 0, None
    for number, (end, line) in enumerate(_lines(path)):
        values = _parse(line)
        if number == 0:
            _check_version(path, values)
        at = values.get("step", 0)
        if isinstance(at, int) and (at > step or (at == step and values.get("kind") == "eval" and not evaluated)):
            break
        if values.get("kind") == "step":
            last = _step(values) or last  # a line that cannot be read stays where it is: readers pass it over
        kept = end
    return kept, last


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Finished lines, each with the offset of its end."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise ArtifactError(str(path), got=error.strerror or str(error), expected="the metrics of a run") from None
    end = 0
    with stream:
        for line in stream:
            end += len(line)
            if line.endswith(b"\n"):
                yield end, line


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # also bytes that are no text
        return {}
    return value if isinstance(value, dict) else {}


def _check_version(path: Path, values: Mapping[str, Any]) -> None:
    if (values.get("kind"), values.get("version")) != ("metrics", VERSION):
        raise ArtifactError(
            str(path),
            got=f"kind {values.get('kind')!r}, format version {values.get('version')!r} in the first line",
            expected=f"kind 'metrics', format version {VERSION}",
            fix="train into another folder, or with the version of packtrain that wrote it",
        )


def _step(values: Mapping[str, object]) -> StepMetrics | None:
    try:
        return step_from_plain(numbers_of_names(values))
    except (KeyError, TypeError):
        return None


def _line(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(named_numbers(values), ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def _cut(stream: BinaryIO, size: int) -> None:
    """Leave only the first `size` bytes; what waits in the buffer is given up."""
    descriptor = os.dup(stream.fileno())
    try:
        with suppress(OSError):
            stream.close()
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
