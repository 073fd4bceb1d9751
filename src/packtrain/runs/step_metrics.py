"""Metrics of one optimizer step over all ranks: one line of metrics.jsonl, and the values for loggers.

A metric is declared once: its key in the log, its row in the documentation, the column of a run that is read back and
its chart on the page follow from that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

Plain = str | int | float | None | list[float] | dict[str, float]  # what one value of a line can be


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """How a metric is drawn over the samples of a run."""

    title: str
    unit: str
    group: Literal["learning", "speed", "other"] = "other"  # the section of the page
    format: str = "decimal"  # of core.numbers.FORMATS
    from_zero: bool = True
    bottom: float | None = None
    top: float | None = None
    cut: bool = False  # end the scale early where few values are far larger than the others
    predicted: str | None = None  # the metric that predicts this one


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One number of a step."""

    name: str  # in metrics.jsonl, for loggers, and as a column of a run
    help: str
    chart: Chart | None
    logged: bool


def _metric(
    help: str,
    chart: Chart | None = None,
    *,
    over_ranks: Literal["sum", "min", "max"] | None = None,
    key: str | None = None,
    logged: bool = True,
    default: Any = None,
) -> Any:
    """A field of StepMetrics; `key` is its name in the log where that is not a Python identifier.

    `over_ranks`: how it is made of the same number of every rank; without it the meter computes it.
    """
    metadata = {"help": help, "chart": chart, "over_ranks": over_ranks, "key": key, "logged": logged}
    return field(default=default, metadata=metadata)


_COUNTS = "of the step, over all ranks; real ones, without padding and without batches that only complete a step"
_RATES = "throughput: real ones of all ranks together, over `step_seconds`"
_WAIT = "of the rank that waited longest for its batches; as a share of the step"
_MEMORY = "the most that torch had allocated in this step on any rank, and what that GPU has; null without a GPU"
_LENGTHS = "real tokens of one micro-batch of one rank: mean, least and most over all that have samples"
_SEEN = "since the beginning of the run, also across restarts: compare packed and padded runs over `samples_seen`"
_PREDICTED = (
    "by the [time](../internals/time-model.md) and [memory](../internals/memory-model.md) models for the batches of "
    "this step; without CUDA context and fragmentation, which `memory_bytes` does not see either"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step of all ranks. None: not known, as a time that nobody predicted or a GPU that is not there."""

    step: int = _metric("counted from 1 over the whole run", logged=False)  # Trainer adds it itself, and the epoch
    epoch: float = _metric("passes over the data", logged=False)
    loss: float | None = _metric(
        "sum of the token losses of the step over all ranks, divided by the weight of its supervised tokens; null in a "
        "step that has none"
    )
    grad_norm: float | None = _metric(
        "before clipping; null where it is not computed",
        Chart(title="Gradient norm", unit="before clipping", group="learning", format="loss", cut=True),
    )
    learning_rates: Mapping[str, float] = _metric(
        "by part: `language`, `vision`, `projector`. Loggers get `learning_rate`, and `learning_rate/PART` where there "
        "are several",
        logged=False,
    )
    # What the step saw.
    batches: int = _metric(_COUNTS, over_ranks="sum")
    samples: int = _metric(_COUNTS, over_ranks="sum")
    tokens: int = _metric(_COUNTS, over_ranks="sum")
    supervised_tokens: int = _metric(_COUNTS, over_ranks="sum")
    images: int = _metric(_COUNTS, over_ranks="sum")
    videos: int = _metric(_COUNTS, over_ranks="sum", default=0)
    frames: int = _metric(_COUNTS, over_ranks="sum", default=0)
    patches: int | None = _metric(_COUNTS, over_ranks="sum")
    # How fast it was.
    tokens_per_second: float = _metric(
        _RATES, Chart(title="Speed", unit="real tokens per second, over all ranks", group="speed", format="large")
    )
    samples_per_second: float = _metric(_RATES)
    images_per_second: float = _metric(_RATES)
    patches_per_second: float | None = _metric(_RATES)
    padding_share: float = _metric(
        "share of all computed positions that are padding",
        Chart(title="Padding", unit="share of computed positions that are padding", group="speed", format="percent"),
    )
    fill: float = _metric(
        "real tokens over what the packs could hold (`packing_length` each); in padded mode over the positions of the "
        "batches",
        Chart(
            title="Fill",
            unit="real tokens as a share of what the packs could hold",
            group="speed",
            format="percent",
            from_zero=False,
            top=1.0,
        ),
    )
    step_seconds: float = _metric(
        "from asking for the first batch to the end of the optimizer step, on the slowest rank, without evaluating, "
        "saving and logging",
        Chart(
            title="Step time",
            unit="of the slowest rank",
            group="speed",
            format="duration",
            cut=True,
            predicted="predicted_seconds",
        ),
        over_ranks="max",
    )
    data_wait_seconds: float = _metric(_WAIT, over_ranks="max")
    data_wait_share: float = _metric(
        _WAIT, Chart(title="Waiting for data", unit="share of a step's time", group="speed", format="percent")
    )
    flops: float | None = _metric("useful FLOPs of the step, see below", over_ranks="sum")
    mfu: float | None = _metric(
        "those as a share of `step_seconds` x GPUs x peak",
        Chart(title="MFU", unit="MFU: language, vision and attention FLOPs", group="speed", format="percent"),
    )
    rank_seconds: tuple[float, ...] = _metric(
        "of each rank until its own work was done, waiting for data included", logged=False
    )
    spread: float = _metric(
        "slowest rank over the mean of `rank_seconds`",
        Chart(
            title="Equal work",
            unit="slowest rank / mean of ranks; 1 is ideal",
            group="speed",
            format="ratio",
            bottom=1.0,
        ),
    )
    work_spread: float | None = _metric("the same of the ranks' FLOPs: the part of the spread that is the plan's")
    seq_len_avg: float = _metric(
        _LENGTHS,
        Chart(title="Tokens per micro-batch", unit="real tokens, mean", group="speed", format="count"),
        key="perf/global_seq_len_avg",
    )
    seq_len_min: int = _metric(_LENGTHS, over_ranks="min", key="perf/global_seq_len_min")
    seq_len_max: int = _metric(_LENGTHS, over_ranks="max", key="perf/global_seq_len_max")
    memory_bytes: int | None = _metric(_MEMORY)  # drawn together with the limit and the prediction
    memory_limit: int | None = _metric(_MEMORY)
    samples_seen: int = _metric(_SEEN)
    tokens_seen: int = _metric(_SEEN)
    predicted_seconds: float | None = _metric(_PREDICTED, over_ranks="max")
    predicted_memory_bytes: int | None = _metric(_PREDICTED, over_ranks="max")

    @property
    def slowest_rank(self) -> int:
        """The rank that the others waited for."""
        return max(range(len(self.rank_seconds)), key=self.rank_seconds.__getitem__, default=0)

    @property
    def memory_share(self) -> float | None:
        """How much of the GPU was used, at most."""
        return self.memory_bytes / self.memory_limit if self.memory_bytes and self.memory_limit else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """One evaluation."""

    step: int  # after which it was made
    epoch: float
    eval_loss: float  # sum over all tokens divided by their number
    samples_seen: int  # in training, until then
    seconds: float | None = None
    eval_failures: int = 0  # samples that could not be decoded, so that the loss is that of the others


_DECLARED = {one.name: one for one in fields(StepMetrics)}
METRICS: Mapping[str, Metric] = {
    name: Metric(
        name=one.metadata["key"] or name,
        help=one.metadata["help"],
        chart=one.metadata["chart"],
        logged=one.metadata["logged"],
    )
    for name, one in _DECLARED.items()
}
LEARNING_RATES = "learning_rates"
_SEVERAL = (LEARNING_RATES, "rank_seconds")  # of which a step has more than one
# The numbers that a step of metrics.jsonl says, by their keys there; the columns of a run have the same names.
STEP_KEYS = tuple(one.name for name, one in METRICS.items() if name not in _SEVERAL)
NOT_FINITE: Mapping[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


SUMMED = frozenset(name for name, one in _DECLARED.items() if one.metadata["over_ranks"] == "sum")


def over_ranks(shares: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The fields that follow from the same numbers of every rank, where NaN is unknown."""
    return {
        name: _over_ranks(one, [share[name] for share in shares])
        for name, one in _DECLARED.items()
        if one.metadata["over_ranks"]
    }


def _over_ranks(one: Field[Any], values: list[float]) -> float | None:
    how = one.metadata["over_ranks"]
    if how == "sum":
        total = sum(values)
    else:
        numbers = [value for value in values if not math.isnan(value)]
        total = (min if how == "min" else max)(numbers, default=math.nan)
    if math.isnan(total):
        return None if "None" in str(one.type) else 0
    return int(total) if "int" in str(one.type) else total


def to_plain(metrics: StepMetrics | EvalMetrics) -> dict[str, Plain]:
    """The values of a line, by their names in it."""
    names = {name: one.name for name, one in METRICS.items()} if isinstance(metrics, StepMetrics) else {}
    return {names.get(one.name, one.name): _plain(getattr(metrics, one.name)) for one in fields(metrics)}


def step_from_plain(line: Mapping[str, object]) -> StepMetrics:
    """The step that a line is about; KeyError where it is not one.

    Names of later versions are passed over; what an earlier version did not write is None.
    """
    values: dict[str, Any] = {name: line.get(one.name, _DECLARED[name].default) for name, one in METRICS.items()}
    values |= {name: line[name] for name in ("step", "samples_seen")}
    rates, seconds = values[LEARNING_RATES] or {}, tuple(values["rank_seconds"] or ())
    return StepMetrics(**values | {LEARNING_RATES: rates, "rank_seconds": seconds})


def flat(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a step for `Trainer.log`, which TensorBoard and W&B take them from; unknown ones are left out.

    Names are those of metrics.jsonl. `learning_rate` is that of the language model, or the first where it is frozen;
    with several, each part's own is beside it.
    """
    rates = metrics.learning_rates
    values = to_plain(metrics)
    numbers = {one.name: values[one.name] for one in METRICS.values() if one.logged}
    logged: dict[str, float] = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    if rates:
        logged["learning_rate"] = rates.get("language", next(iter(rates.values())))
    if len(rates) > 1:
        logged |= {f"learning_rate/{part}": rate for part, rate in rates.items()}
    if (share := metrics.memory_share) is not None and math.isfinite(share):
        logged["memory_share"] = share
    return logged


def _plain(value: object) -> Plain:
    if isinstance(value, Mapping):
        return {str(name): float(number) for name, number in value.items()}
    if isinstance(value, tuple):
        return [float(number) for number in value]
    assert value is None or isinstance(value, str | int | float), type(value)
    return value


def named_numbers(value: Any) -> Any:
    """For JSON, which has no sign for numbers that are not finite: they get names."""
    if isinstance(value, Mapping):
        return {name: named_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [named_numbers(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def numbers_of_names(value: Any) -> Any:
    """The names back to numbers."""
    if isinstance(value, Mapping):
        return {name: numbers_of_names(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [numbers_of_names(inner) for inner in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value
