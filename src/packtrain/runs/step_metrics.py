"""What is known of one optimizer step over all ranks: one line of metrics.jsonl, and what loggers are told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

Plain = str | int | float | None | list[float] | dict[str, float]  # what one value of a line can be

# The names that users know from elsewhere, where they are no names of Python.
_KEYS = {f"seq_len_{name}": f"perf/global_seq_len_{name}" for name in ("avg", "min", "max")}
_NOT_LOGGED = ("step", "epoch", "rank_seconds", "learning_rates")  # Trainer adds the first two itself


# How a number of the step is made of those of its ranks; fields without it are computed or passed by the meter.
_SUM, _MIN, _MAX = ({"over_ranks": how} for how in ("sum", "min", "max"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step of all ranks. None: not known, as a time that nobody predicted or a GPU that is not there."""

    step: int  # counted from 1, over the whole run
    epoch: float  # passes over the data
    loss: float | None  # of the step: sum over its tokens divided by their number; None: no token carries loss
    grad_norm: float | None  # before clipping
    learning_rates: Mapping[str, float]  # by part of the model
    # What it saw. Batches that only fill up a step are not among them.
    batches: int = field(metadata=_SUM)
    samples: int = field(metadata=_SUM)
    tokens: int = field(metadata=_SUM)  # real ones
    supervised_tokens: int = field(metadata=_SUM)
    images: int = field(metadata=_SUM)
    patches: int | None = field(metadata=_SUM)  # rows of the vision encoder
    seq_len_avg: float  # real tokens of a batch: over all batches of all ranks
    seq_len_min: int = field(metadata=_MIN)
    seq_len_max: int = field(metadata=_MAX)
    fill: float  # real tokens, as a share of what the packs could hold
    padding_share: float  # of the positions that were computed
    # How fast it was.
    step_seconds: float = field(metadata=_MAX)  # of the slowest rank
    tokens_per_second: float  # real ones, of all ranks together; so are the others
    samples_per_second: float
    images_per_second: float
    patches_per_second: float | None
    data_wait_seconds: float = field(metadata=_MAX)  # of the rank that waited longest for its batches
    data_wait_share: float  # of the step
    rank_seconds: tuple[float, ...]  # of every rank until its own work was done
    spread: float  # slowest rank over their mean
    work_spread: float | None  # the same of their FLOPs, for which the plan is responsible
    flops: float | None = field(metadata=_SUM)  # useful ones, of all ranks
    mfu: float | None  # those, as a share of what the GPUs' data sheet says
    memory_bytes: int | None  # the most that torch had allocated on any rank
    memory_limit: int | None  # of that rank's GPU
    # Since the beginning of the run.
    samples_seen: int
    tokens_seen: int
    predicted_seconds: float | None = field(default=None, metadata=_MAX)
    predicted_memory_bytes: int | None = field(default=None, metadata=_MAX)
    videos: int = field(default=0, metadata=_SUM)
    frames: int = field(default=0, metadata=_SUM)  # of them, that the model sees

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


def over_ranks(shares: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The fields that follow from the same numbers of every rank, where NaN is what is not known."""
    return {
        one.name: _over_ranks(one, [share[one.name] for share in shares])
        for one in fields(StepMetrics)
        if "over_ranks" in one.metadata
    }


def _over_ranks(one: Field[Any], values: list[float]) -> float | None:
    how = one.metadata["over_ranks"]
    if how == "sum":
        total = sum(values)
    else:
        known = [value for value in values if not math.isnan(value)]
        total = (min if how == "min" else max)(known, default=math.nan)
    if math.isnan(total):
        return None if "None" in str(one.type) else 0
    return int(total) if "int" in str(one.type) else total


SUMMED = frozenset(one.name for one in fields(StepMetrics) if one.metadata == _SUM)


_SEVERAL = ("learning_rates", "rank_seconds")  # of which a step has more than one
# The numbers that a step of metrics.jsonl says, by their keys there; the columns of a run have the same names.
STEP_KEYS = tuple(_KEYS.get(one.name, one.name) for one in fields(StepMetrics) if one.name not in _SEVERAL)
NOT_FINITE: Mapping[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_plain(metrics: StepMetrics | EvalMetrics) -> dict[str, Plain]:
    """The values of a line, by their names in it."""
    return {_KEYS.get(one.name, one.name): _plain(getattr(metrics, one.name)) for one in fields(metrics)}


def step_from_plain(line: Mapping[str, object]) -> StepMetrics:
    """The step that a line is about; KeyError where it is not one. Names of later versions are passed over."""
    values: dict[str, object] = {}
    for one in fields(StepMetrics):
        name = _KEYS.get(one.name, one.name)
        if name in line or one.default is MISSING:  # lines of earlier versions do not have all of them
            values[one.name] = line[name]
    values["rank_seconds"] = tuple(values["rank_seconds"])  # type: ignore[arg-type]
    return StepMetrics(**values)  # type: ignore[arg-type]


def eval_from_plain(line: Mapping[str, object]) -> EvalMetrics:
    """The evaluation that a line is about; lines of earlier versions have no failures."""
    values = {"eval_failures": 0, **line}
    return EvalMetrics(**{one.name: values[one.name] for one in fields(EvalMetrics)})  # type: ignore[arg-type]


def flat(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a step for `Trainer.log`, which TensorBoard and W&B take them from; what is not known is left out.

    Names are those of metrics.jsonl. `learning_rate` is that of the language model, or the first where it is frozen;
    with several, each part's own stands beside it.
    """
    rates = metrics.learning_rates
    found: dict[str, float] = {}
    for name, value in to_plain(metrics).items():
        if name not in _NOT_LOGGED and isinstance(value, int | float):
            found[name] = value
    if rates:
        found["learning_rate"] = rates.get("language", next(iter(rates.values())))
    if len(rates) > 1:
        found |= {f"learning_rate/{part}": rate for part, rate in rates.items()}
    if (share := metrics.memory_share) is not None and math.isfinite(share):
        found["memory_share"] = share
    return found


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
