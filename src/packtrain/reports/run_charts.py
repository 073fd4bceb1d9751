"""Which curves the page of a run has, for one run or for several in the same charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.numbers import FORMATS, GIB, count, elapsed, exact_percent, gib, loss, shown, tick
from packtrain.reports.charts import Drawing, LegendKey
from packtrain.reports.curves import BUCKETS, Axes, Curve, Dot, Level, curve_chart, edges_for, thin
from packtrain.runs.run_summary import drawn_loss
from packtrain.runs.step_metrics import METRICS, Chart
from packtrain.runs.training_run import TrainingRun

COLOURS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCharts:
    """Everything that is drawn on the page."""

    loss: Drawing | None
    loss_by_time: Drawing | None  # only where runs are compared
    learning: tuple[Drawing, ...]
    speed: tuple[Drawing, ...]
    memory: tuple[Drawing, ...]
    other: tuple[Drawing, ...]  # metrics that have no look of their own


def draw_runs(runs: Sequence[TrainingRun], labels: Sequence[str]) -> RunCharts:
    """All charts; those of which no run knows a number are left out."""
    charts = _Charts(runs, labels)
    drawn: dict[str, list[Drawing | None]] = {"learning": [charts.rate_chart()], "speed": [], "other": []}
    declared = {one.name: one.chart for one in METRICS.values()}
    for name in dict.fromkeys(name for run in runs for name in run.steps.columns):
        # a metric of another version has no chart of its own
        look = declared.get(name, Chart(title=name.replace("_", " ").capitalize(), unit="by step"))
        if look is not None:
            drawn[look.group].append(charts.metric_chart(name, look))
    return RunCharts(
        loss=charts.loss_chart(by_time=False),
        loss_by_time=charts.loss_chart(by_time=True) if len(runs) > 1 else None,
        memory=_without_none([charts.memory_chart()]),
        **{group: _without_none(group_charts) for group, group_charts in drawn.items()},
    )


class _Charts:
    """Runs in the same charts, one colour for each, over the same buckets of samples."""

    def __init__(self, runs: Sequence[TrainingRun], labels: Sequence[str]) -> None:
        self.runs, self.labels = runs, labels
        # Few steps have a place each; two of them in one would look like an accident.
        self.buckets = BUCKETS * (1 if max(len(run.steps) for run in runs) > BUCKETS else 10)
        self.edges = edges_for(max(_end(run.steps["samples_seen"]) for run in runs), self.buckets)

    def loss_chart(self, *, by_time: bool) -> Drawing | None:
        """Loss over samples, or over the time of training; evaluations are dots."""
        longest = max(_end(run.steps.elapsed) for run in self.runs)
        edges = edges_for(longest, self.buckets) if by_time else self.edges
        curves: list[Curve] = []
        dots: list[Dot] = []
        for at, run in enumerate(self.runs):
            if not run.steps.known("loss") or (by_time and not run.steps.known("step_seconds")):
                continue
            x = run.steps.elapsed if by_time else run.steps["samples_seen"]
            points, trend = thin(x, run.steps["loss"], edges), thin(*drawn_loss(run.steps, x), edges)
            curves.append(Curve(name=self._name(at), css=line_css(at), points=points, trend=trend))
            dots += self._evaluations(at, x)
        if not curves:
            return None
        over = "training time, first step excluded" if by_time else "samples seen"
        unit = f"mean loss of a token, over the {over}; bold: smoothed"
        look = Chart(
            title=f"Loss over {'time' if by_time else 'samples'}",
            unit=unit + ("; dots: evaluation" if dots else ""),
            format="loss",
            from_zero=False,
            top=_readable_top(curves, 0.9, 10),
        )
        height = 240 if by_time else 320
        return self._chart(look, curves, edges=edges, by_time=by_time, dots=dots, height=height)

    def rate_chart(self) -> Drawing | None:
        """Learning rates: by part for one run, where equal ones are one curve; the first part's for several."""
        curves, one = [], len(self.runs) == 1
        for at, run in enumerate(self.runs):
            equal: dict[bytes, list[str]] = {}
            for part, values in run.steps.rates.items():
                equal.setdefault(values.tobytes(), []).append(part)
            for number, parts in enumerate(list(equal.values())[: None if one else 1]):
                points = thin(run.steps["samples_seen"], run.steps.rates[parts[0]], self.edges)
                name = ", ".join(shown(part, 40) for part in parts) if one else self._name(at)
                curves.append(Curve(name=name, css=line_css(at + number), points=points))
        kept = [curve for curve in curves if len(curve.points.x)]
        if not kept:
            return None
        unit = "of each part of the model" if one else "of the first trained part"
        drawn = self._chart(Chart(title="Learning rate", unit=unit, format="rate"), kept)
        return replace(drawn, keys=tuple(LegendKey(css=curve.css, name=curve.name) for curve in kept)) if one else drawn

    def memory_chart(self) -> Drawing | None:
        """The peak of the fullest GPU, what it has, and what was predicted."""
        curves = [curve for curve in self._curves("memory_bytes", unit=GIB) if curve.points.high.max() > 0]
        if not curves:
            return None
        limit, predicted = (
            max(_top(run.steps[name]) for run in self.runs) / GIB for name in ("memory_limit", "predicted_memory_bytes")
        )
        levels = [Level(y=limit, name=f"the GPU has {_gib(limit)}")] if limit else []
        if predicted:
            levels.append(Level(y=predicted, name=f"predicted {_gib(predicted)}", css="mark"))
        look = Chart(title="Peak memory", unit="GiB allocated on the fullest GPU", format="gib")
        return self._chart(look, curves, levels=levels)

    def metric_chart(self, column: str, look: Chart) -> Drawing | None:
        """One column of every run."""
        curves = self._curves(column)
        nothing = column == "padding_share" and all(curve.points.high.max() == 0 for curve in curves)
        if not curves or nothing or (column == "spread" and all(run.facts.world_size == 1 for run in self.runs)):
            return None
        if look.predicted is not None and (predicted := self._curves(look.predicted, predicted=True)):
            curves += predicted
            look = replace(look, unit=f"{look.unit}; dotted: predicted")
        if look.cut and (top := _readable_top(curves, 0.98, 4)) is not None:
            look = replace(look, top=top, unit=f"{look.unit}; at the upper edge: more than shown")
        return self._chart(look, curves)

    def _curves(self, column: str, *, predicted: bool = False, unit: float = 1.0) -> list[Curve]:
        curves = []
        for at, run in enumerate(self.runs):
            if column == "fill" and run.facts.mode == "padded":  # padded batches are full but for their padding
                continue
            points = thin(run.steps["samples_seen"], run.steps[column] / unit, self.edges)
            if len(points.x):
                name = " ".join(filter(None, (self._name(at), "predicted" if predicted else "")))
                curves.append(Curve(name=name, css=line_css(at) + (" predicted" if predicted else ""), points=points))
        return curves

    def _evaluations(self, at: int, x: np.ndarray) -> list[Dot]:
        steps, dots = self.runs[at].steps, []
        for one in self.runs[at].evaluations:
            if np.isfinite(one.eval_loss):
                place = float(np.interp(one.step, steps["step"], x))
                of = f"{self._name(at)}: " if self._name(at) else ""
                tip = f"{of}loss {loss(one.eval_loss)} in the evaluation after step {one.step:,}"
                dots.append(Dot(x=place, y=one.eval_loss, css=line_css(at), tip=tip))
        return dots

    def _chart(
        self,
        look: Chart,
        curves: Sequence[Curve],
        *,
        height: int = 190,
        edges: np.ndarray | None = None,
        by_time: bool = False,
        dots: Sequence[Dot] = (),
        levels: Sequence[Level] = (),
    ) -> Drawing:
        ends = [(curve.name, float((curve.trend or curve.points).mean[-1])) for curve in curves]
        write = _gib if look.format == "gib" else FORMATS[look.format]
        sentence = "; ".join(f"{name or 'it'} ends at {write(end)}" for name, end in ends)
        edges = self.edges if edges is None else edges
        unit, word = _time_unit(float(edges[-1])) if by_time else (1.0, "samples seen")
        axes = Axes(
            label=f"{look.title}: {look.unit}; {sentence}",
            edges=edges,
            write=write,
            write_x=elapsed if by_time else lambda x: f"{count(x)} samples",
            tick_x=(lambda x: f"{x / unit:g}") if by_time else _count_tick,
            title_x=word,
            unit_x=unit,
            tick=_TICKS.get(look.format, _short),
            from_zero=look.from_zero,
            bottom=look.bottom,
            top=look.top,
            height=height,
        )
        return Drawing(title=look.title, unit=look.unit, svg=curve_chart(curves, axes, dots, levels))

    def _name(self, at: int) -> str:
        return self.labels[at] if len(self.runs) > 1 else ""


def _without_none(charts: Sequence[Drawing | None]) -> tuple[Drawing, ...]:
    return tuple(chart for chart in charts if chart is not None)


def line_css(at: int) -> str:
    """The line of a run: colours alone do not tell them apart, and a solid one would hide another that it equals."""
    return f"s{at % COLOURS}" + (f" dash{at % 4}" if at % 4 else "")


def _end(x: np.ndarray) -> float:
    good = x[np.isfinite(x)]
    return float(good[-1]) if len(good) else 0.0


def _top(values: np.ndarray) -> float:
    good = values[np.isfinite(values)]
    return float(good.max()) if len(good) else 0.0


def _readable_top(curves: Sequence[Curve], share: float, factor: float) -> float | None:
    """Where to end the scale when the largest value is many times what nearly all are; None: at the largest."""
    highs = np.concatenate([curve.points.high for curve in curves]) if curves else np.zeros(0)
    if len(highs) < 10:
        return None
    usual = float(np.quantile(highs, share))
    return 1.5 * usual if usual > 0 and highs.max() > factor * usual else None


def _short(value: float) -> str:
    return tick(value) if abs(value) >= 1000 else f"{value:g}"


def _gib(size: float) -> str:
    """A number that is drawn in GiB, so that ticks are round."""
    return gib(size * GIB)


def _count_tick(value: float) -> str:
    return tick(value) if value >= 10_000 else count(value)


def _time_unit(seconds: float) -> tuple[float, str]:
    """The unit of an axis over so much time: one for all of its ticks."""
    units = ((3600.0, "hours of training"), (60.0, "minutes of training"), (1.0, "seconds of training"))
    return next(((size, name) for size, name in units if seconds >= 3 * size), units[-1])


# How numbers of a format are written at an axis, where that is not as short as it gets.
_TICKS = {
    "large": tick,
    "count": tick,
    "percent": exact_percent,
    "duration": FORMATS["duration"],
    "rate": FORMATS["rate"],
}
