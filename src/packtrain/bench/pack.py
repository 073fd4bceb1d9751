"""How well and how fast samples are packed: against the bound, against other projects' packers, and as sets grow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from packtrain.bench.host import time_work
from packtrain.bench.lengths import MIXTURES, lvis_shape, mixture, read_lengths
from packtrain.bench.other_packers import NOT_RUN, OTHERS, OtherPacker
from packtrain.bench.printing import column
from packtrain.bench.scaling import Growth, What, scaling
from packtrain.core.errors import ConfigError, DataError
from packtrain.core.seeds import stream
from packtrain.families.registry import known_config
from packtrain.packing.arrays import STRATEGIES, Effort, Packing, pack_arrays
from packtrain.packing.greedy import first_fit
from packtrain.packing.multi_resource import lower_bound
from packtrain.packing.multi_resource_kernels import best_fit_by_sum
from packtrain.packing.pack_plan import (
    ENTRY_SCHEMA,
    PACK_SCHEMA,
    PACKER_VERSION,
    EpochCounts,
    EpochPacks,
    PackPlan,
    PlanSummary,
)
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES, Samples, Tails
from packtrain.packing.schedule import BalanceLine, balance_table
from packtrain.packing.windows import LARGEST_WINDOW, pack_windows
from packtrain.predicting.flops import WorkModel, work_model
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.values import TrainingSetup

GENERATED = "generated, LVIS-shaped (synthetic)"
SCALING_CAPACITY = WORK_CAPACITY = 8_192
WORK_MODEL = "Qwen3-VL-2B"  # whose work is shared out
# wrapped cuts samples, and module:function is the user's own.
WHOLE = tuple(name for name in STRATEGIES if name not in ("wrapped", "module:function"))
LIMITED = ("tokens", "vision_tokens", "images")
LIMITS = ((8_192, 4_096, 8), (16_384, 8_192, 16), (16_384, 6_144, 24))
_WARM = 2_000  # samples packed before the clock starts, so that nothing is compiled under it
_QUADRATIC = 20_000  # samples for what is quadratic


@dataclass(frozen=True, kw_only=True, slots=True)
class OneResource:
    """Packs of one strategy, the bound, and the time of the whole call."""

    strategy: str = column("strategy", "{}")
    capacity: int = column("capacity")
    samples: int = column("samples that fit")  # that fit
    dropped: int
    bound: int = column("bound")
    packs: int = column("packs")
    of_bound: float = column("of bound", "{:.4f}")
    seconds: float = column("seconds", "{:.4f}")
    samples_per_second: float = column("samples /s", "{:,.0f}")
    nanoseconds_per_sample: float = column("ns a sample", "{:,.0f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategies:
    """Every strategy at one capacity."""

    capacity: int
    rows: tuple[OneResource, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRow:
    """A packer of another project beside ours, on the very same lengths."""

    packer: str = column("packer", lambda row: f"{row.packer} ({row.version})")
    version: str
    capacity: int = column("capacity")
    samples: int = column("samples")
    bound: int = column("bound")
    packs: int = column("packs")
    our_packs: int = column("ours")
    seconds: float = column("seconds", "{:.4f}")
    our_seconds: float = column("ours", "{:.4f}")
    times_our_packs: float = column("packs x", "{:.4f}")
    times_our_seconds: float = column("seconds x", "{:,.1f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """Every other packer that is installed, and why the rest was not run."""

    rows: tuple[OtherRow, ...] = ()
    notes: tuple[str, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeveralRow:
    """A mixture under several limits: shares of the bound that each way reaches, each at most 1."""

    mixture: str = column("mixture", "{}")
    limits: tuple[int, ...] = column(
        "tokens / vision tokens / images", lambda row: " / ".join(f"{limit:,}" for limit in row.limits)
    )
    samples: int
    bound: int
    fast: float = column("fast", "{:.4f}")
    best: float = column("best", "{:.4f}")
    first_fit_random: float = column("first fit, random order", "{:.4f}")
    first_fit_decreasing: float = column("first fit, decreasing", "{:.4f}")
    best_fit_decreasing: float = column("best fit, decreasing", "{:.4f}")
    fast_seconds_per_million: float = column("fast, s per million", "{:.1f}")
    best_seconds_per_million: float = column("best, s per million", "{:.1f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSet:
    """One set whose packs are dealt to ranks in each order."""

    set: str
    limits: Mapping[str, int]
    samples: int
    packs: int
    work_spread: float
    lines: tuple[BalanceLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualWork:
    """Sets, and the model whose work is shared out."""

    model: str
    sets: tuple[WorkSet, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackResult:
    """All comparisons of `packtrain bench pack`."""

    set: str
    samples: int
    tokens: int
    cores: int | None
    load: float
    one_resource: tuple[OneResource, ...]
    strategies: Strategies
    others: Others
    several: tuple[SeveralRow, ...]
    equal_work: EqualWork
    scaling: tuple[Growth, ...]


def bench_pack(
    lengths: Path | None,
    capacities: Sequence[int],
    sizes: Sequence[int],
    others: bool,
    progress: Callable[[str], None] = lambda _: None,
    *,
    several: int = 200_000,
    work: int = 1_000_000,
) -> PackResult:
    """All comparisons. `several` and `work`: samples of the mixtures, and of the sets whose work is shared out.

    Seconds are the smaller of elapsed and processor time, compilation apart; every packer uses one core.
    """
    _check_counts("--capacities", capacities)
    _check_counts("--sizes", sizes, optional=True)
    samples = lvis_shape() if lengths is None else read_lengths(lengths)
    tokens = samples["tokens"]
    if tokens.min() > min(capacities):
        got, least = f"no sample of at most {min(capacities):,} tokens", f"{tokens.min():,}"
        raise DataError(str(lengths), got=got, expected="at least one", fix=f"use --capacities of at least {least}")
    main = WORK_CAPACITY if WORK_CAPACITY in capacities else capacities[0]
    name = GENERATED if lengths is None else lengths.name
    progress("one resource")
    sets = {name: lvis_shape(work) if lengths is None else samples, "mixture with video": mixture("video", work)}
    return PackResult(
        set=name,
        samples=len(tokens),
        tokens=int(tokens.sum()),
        cores=os.cpu_count(),
        load=os.getloadavg()[0],
        one_resource=tuple(_one_resource(tokens, capacity) for capacity in capacities),
        strategies=Strategies(
            capacity=main,
            # windows are of 1,000 samples
            rows=tuple(_one_resource(tokens, main, name.replace("window_N", "window_1000")) for name in WHOLE),
        ),
        others=_others(tokens, capacities, progress) if others else Others(),
        several=tuple(_several(several, progress)),
        equal_work=_equal_work(sets, main, progress),
        scaling=tuple(_scaling(sizes, progress)),
    )


def _check_counts(where: str, counts: Sequence[int], *, optional: bool = False) -> None:
    bad = [count for count in counts if isinstance(count, bool) or not isinstance(count, int) or count < 1]
    if bad or not (counts or optional):
        raise ConfigError(where, got=bad[0] if bad else "none", expected="positive integers, separated by commas")


# ---- one resource


def _one_resource(tokens: np.ndarray, capacity: int, strategy: str = "best_fit") -> OneResource:

    def pack() -> Packing:
        return pack_arrays({"tokens": tokens}, {"tokens": capacity}, strategy)

    pack_arrays({"tokens": tokens[:_WARM]}, {"tokens": capacity}, strategy)
    packing, seconds = time_work(pack)
    fitting = len(tokens) - len(packing.dropped)
    bound = -(-int(tokens[tokens <= capacity].sum()) // capacity)
    return OneResource(
        strategy=strategy,
        capacity=capacity,
        samples=fitting,
        dropped=len(packing.dropped),
        packs=packing.num_packs,
        bound=bound,
        of_bound=bound / packing.num_packs,
        seconds=seconds,
        samples_per_second=len(tokens) / seconds,
        nanoseconds_per_sample=seconds / len(tokens) * 1e9,
    )


# ---- other projects


def _others(tokens: np.ndarray, capacities: Sequence[int], progress: Callable[[str], None]) -> Others:
    here = [other for other in OTHERS if other.installed]
    rows = []
    for capacity in capacities:
        fitting = tokens[tokens <= capacity]
        shuffled = stream(0, "other packers").permutation(len(fitting))
        for other in here:
            progress(f"{other.name} at {capacity:,}")
            rows.append(_beside(other, fitting[np.sort(shuffled[: other.most])], capacity))
    missing = {other.name: f"{other.package} is not installed" for other in OTHERS if not other.installed}
    notes = tuple(f"{other.name}: {other.note}" for other in here if other.note)
    return Others(rows=tuple(rows), notes=notes, not_run={**missing, **NOT_RUN})


def _beside(other: OtherPacker, lengths: np.ndarray, capacity: int) -> OtherRow:
    """One other packer and ours; its packs are checked as ours are in the tests."""
    other.prepare(lengths[:200], capacity).pack()  # imports and compiles
    run = other.prepare(lengths, capacity)
    packed, seconds = time_work(run.pack)
    loads = run.loads(packed)
    if loads.sum() != lengths.sum() or loads.max() > capacity:
        raise RuntimeError(f"{other.name} lost tokens or overfilled a pack of {capacity}")
    ours = _one_resource(lengths, capacity)
    return OtherRow(
        packer=other.name,
        version=other.version,
        capacity=capacity,
        samples=len(lengths),
        bound=ours.bound,
        packs=len(loads),
        our_packs=ours.packs,
        seconds=seconds,
        our_seconds=ours.seconds,
        times_our_packs=len(loads) / ours.packs,
        times_our_seconds=seconds / ours.seconds,
    )


# ---- several resources


def _several(count: int, progress: Callable[[str], None]) -> Iterator[SeveralRow]:
    """Every mixture under every set of limits."""
    for name in MIXTURES:
        samples = mixture(name, count)
        for limits in LIMITS:
            progress(f"several resources: {name}, {' / '.join(map(str, limits))}")
            yield _several_row(name, samples.matrix(LIMITED), limits)


def _several_row(name: str, sizes: np.ndarray, limits: tuple[int, ...]) -> SeveralRow:
    capacities = np.array(limits, np.int64)
    sizes = sizes[(sizes <= capacities).all(axis=1)]
    bound = lower_bound(sizes, capacities)
    shuffled = stream(0, "first fit").permutation(len(sizes))
    few = sizes[:_QUADRATIC]
    falling = np.argsort(-(sizes / capacities).sum(axis=1), kind="stable")
    fast, best = (_search(sizes, limits, effort) for effort in ("fast", "best"))
    return SeveralRow(
        mixture=name,
        limits=limits,
        samples=len(sizes),
        bound=bound,
        first_fit_random=bound / first_fit(sizes, shuffled, capacities)[1],
        first_fit_decreasing=bound / first_fit(sizes, falling, capacities)[1],
        best_fit_decreasing=lower_bound(few, capacities) / best_fit_decreasing(few, capacities),
        fast=bound / fast[0],
        fast_seconds_per_million=fast[1] / len(sizes) * 1e6,
        best=bound / best[0],
        best_seconds_per_million=best[1] / len(sizes) * 1e6,
    )


def _search(sizes: np.ndarray, limits: tuple[int, ...], effort: Effort) -> tuple[int, float]:
    """Packs and seconds of our own packer."""
    pack = partial(pack_arrays, capacities=dict(zip(LIMITED, limits, strict=True)), strategy="best_fit", effort=effort)
    pack({name: column[:_WARM] for name, column in zip(LIMITED, sizes.T, strict=True)})
    packing, seconds = time_work(partial(pack, dict(zip(LIMITED, sizes.T, strict=True))), rounds=1)
    return packing.num_packs, seconds


def best_fit_decreasing(sizes: np.ndarray, capacities: np.ndarray) -> int:
    """Packs, when samples come by decreasing sum of shares, each to the pack that it leaves the least room in.

    As textbooks have it: a yardstick, quadratic in the samples.

    >>> best_fit_decreasing(np.array([[6, 1], [4, 1], [5, 5], [5, 5]]), np.array([10, 10]))
    2
    """
    order = np.argsort(-(sizes / capacities).sum(axis=1), kind="stable")
    return int(best_fit_by_sum(sizes, capacities, order)[1])


# ---- equal work of ranks


def _equal_work(sets: Mapping[str, Samples], capacity: int, progress: Callable[[str], None]) -> EqualWork:
    rows = []
    for name, samples in sets.items():
        progress(f"equal work: {name}")
        rows.append(equal_work(name, samples, {"packing_length": capacity}))
    return EqualWork(model=WORK_MODEL, sets=tuple(rows))


class _MemoryRows:
    """Samples in memory as the rows of a cost table."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        part = Samples({name: column[start:stop] for name, column in self._samples.columns.items()})
        return part, Tails(part["tokens"] - part["vision_tokens"])


def plan_of(samples: Samples, config: PackingConfig, work: WorkModel) -> PackPlan:
    """A plan of one epoch, without the cost table that plans are otherwise made from."""
    windows = list(pack_windows(_MemoryRows(samples), config, 0, None))
    counts = np.cumsum([0] + [len(window.entries) for window in windows])
    columns = {
        "end": [window.offsets[1:] + base for window, base in zip(windows, counts[:-1], strict=True)],
        "window": [np.full(len(window.offsets) - 1, n, np.int32) for n, window in enumerate(windows)],
        **{name: [window.loads[name] for window in windows] for name in (*RESOURCES, *EXTRAS)},
    }
    packs = pa.table({name: np.concatenate(parts) for name, parts in columns.items()}, schema=PACK_SCHEMA)
    rows = np.concatenate([window.entries.rows for window in windows])
    summary = PlanSummary(
        config=config,
        inputs={"rows": len(samples)},
        packer_version=PACKER_VERSION,
        cost_table="",
        work=work,
        files=1,
        epochs=(EpochCounts(packs=packs.num_rows, entries=len(rows)),),
    )
    return PackPlan(summary, [EpochPacks(pa.table({"row": rows}, schema=ENTRY_SCHEMA), packs)])


def equal_work(
    name: str, samples: Samples, limits: Mapping[str, int], ranks: tuple[int, ...] = (8, 64, 512)
) -> WorkSet:
    """One set under the three orders of packs, for several numbers of ranks, with eight packs a step for each rank."""
    config = PackingConfig(**limits)  # type: ignore[arg-type]
    work = work_model(
        shape_from_config(known_config(WORK_MODEL.lower())), TrainingSetup(), longest=int(samples["tokens"].max())
    )
    plan = plan_of(samples, config, work)
    predicted = plan.predicted_work(0)
    return WorkSet(
        set=name,
        limits=dict(limits),
        samples=plan.epoch(0).num_entries,
        packs=plan.num_packs,
        work_spread=float(predicted.std() / predicted.mean()),
        lines=tuple(balance_table(plan, ranks)),
    )


# ---- growth


def _scaling(sizes: Sequence[int], progress: Callable[[str], None]) -> Iterator[Growth]:
    """Packing alone at every size; all that a plan needs up to the largest window, since larger plans have several."""
    for size in sizes:
        whats: tuple[What, ...] = ("alone", "plan") if size <= LARGEST_WINDOW else ("alone",)
        for what in whats:
            progress(f"scaling: {size:,} samples, {what}")
            yield scaling(size, SCALING_CAPACITY, what)
