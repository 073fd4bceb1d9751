"""The sweep: every length and every set of limits really packed, with memory, time and what is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.errors import ConfigError, DataError, PacktrainError, nearest
from packtrain.measuring.table import CostTable
from packtrain.packing.packing_config import LIMITS, PackingConfig
from packtrain.packing.resources import Samples
from packtrain.packing.windows import Tail, first_packs, loads_of, pack_windows
from packtrain.planning.clock import PassColumns, pack_passes
from packtrain.planning.padding import baseline_run
from packtrain.planning.question import MOST_ROWS, Question, read_rows
from packtrain.planning.study_values import Simulation

LENGTHS = (8_000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000, 22_000, 24_000)
POWERS = (4_096, 8_192, 16_384, 32_768)
SHORT = (256, 512, 1_024, 2_048)  # for data of short samples
_PASSES = 4  # packs of each GPU in a step: lengths for 1 to this many are tried beside round ones
_MULTIPLE = 8  # of which those are
KEPT = 0.10  # how far the samples of a step may move to give every GPU the same number of packs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """One packing of the rows: every pack, and the samples in them."""

    passes: PassColumns
    loads: Mapping[str, np.ndarray]
    samples: Samples  # in packs, pieces of rows where they are cut
    whole: int  # samples that they come from
    dropped: int  # samples of an epoch that fit no pack
    tokens_drawn: int  # of an epoch, packed or not


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """How packs make up an optimizer step."""

    packs: int
    samples: float
    micro_batches: int


def default_lengths(
    tokens: np.ndarray, context_length: int, *, samples_per_step: int = 0, gpus: int = 1
) -> tuple[int, ...]:
    """The lengths to try: those that hold at least half of the samples, that the model can read and the data can fill,
    and between them those at which a few packs for every GPU have the samples of a step.

    >>> default_lengths(np.array([100, 200, 300, 200, 400]), 2048)
    (512, 1024, 2048)
    >>> default_lengths(np.full(100, 300), 4096, samples_per_step=8, gpus=1)
    (512, 600, 800, 1024, 1200, 2048, 2400, 4096)
    """
    middle, most = np.percentile(tokens, [50, 95])
    tried = {*LENGTHS, *POWERS, context_length} | {length for length in SHORT if length >= most}
    lengths = sorted(length for length in tried if middle <= length <= context_length) or [context_length]
    enough = next((length for length in lengths if length >= tokens.sum()), lengths[-1])
    lengths = [length for length in lengths if length <= enough]
    for passes in range(1, _PASSES + 1):
        length = math.ceil(samples_per_step * tokens.mean() / (gpus * passes) / _MULTIPLE) * _MULTIPLE
        apart = all(abs(length / other - 1) > KEPT for other in lengths)  # near ones have about as many samples a step
        if apart and most <= length < min(lengths[-1], POWERS[-1]):
            lengths.append(length)
    return tuple(sorted(lengths))


def pack_rows(question: Question, config: PackingConfig) -> Packed:
    """Pack in memory, as `pack` would."""
    packed = pack_windows(question.rows, config, 0, question.rows.counts(config))
    windows = list(first_packs(packed, Tail(config), 0))
    names = windows[0].entries.samples.columns
    samples = Samples({name: np.concatenate([w.entries.samples[name] for w in windows]) for name in names})
    starts = np.cumsum([0, *(len(window.entries) for window in windows)])
    ends = [window.offsets[1:] + start for window, start in zip(windows, starts[:-1], strict=True)]
    offsets = np.concatenate([np.zeros(1, np.int64), *ends])
    loads = loads_of(samples, offsets)
    return Packed(
        passes=pack_passes(loads),
        loads=loads,
        samples=samples,
        whole=sum(int(window.entries.firsts.sum()) for window in windows),
        tokens_drawn=sum(window.counts.tokens_drawn for window in windows),
        dropped=sum(window.counts.dropped for window in windows),
    )


def step_shape(wanted: int, samples_per_pack: float, gpus: int) -> StepShape:
    """As many packs as have the wanted number of samples; the same number for every GPU where that changes little.

    >>> step_shape(128, 15.3, 4)
    StepShape(packs=8, samples=122.4, micro_batches=2)
    """
    packs = max(1, round(wanted / samples_per_pack))
    even = max(gpus, gpus * round(wanted / samples_per_pack / gpus))
    if abs(even * samples_per_pack / wanted - 1) < KEPT:
        packs = even
    return StepShape(packs=packs, samples=packs * samples_per_pack, micro_batches=-(-packs // gpus))


def simulate(question: Question, config: PackingConfig) -> Simulation | None:
    """Pack once: what that needs and gains; None when no sample fits."""
    packed = pack_rows(question, config)
    count, scale, passes = len(packed.passes), question.rows.scale, packed.passes
    if not count:
        return None
    capacities = config.capacities()
    bound = max(-(-int(packed.loads[name].sum()) // limit) for name, limit in capacities.items())
    tokens, samples = int(passes["tokens"].sum()), packed.whole
    packs, gpus = round(count * scale), question.setup.gpus
    step = step_shape(question.samples_per_step, samples / count, gpus)
    if step.packs > packs:  # an epoch of less than a step
        step = StepShape(packs=packs, samples=samples * scale, micro_batches=-(-packs // gpus))
    seconds = question.epoch_of_packs(passes, config.packing_length, step.packs) * scale
    worst = passes.worst()
    memory = question.memory_of(worst).total
    padded = baseline_run(question, packed.samples)
    return Simulation(
        packing_length=config.packing_length,
        limits={name: getattr(config, name) for name in LIMITS if name != "packing_length" and getattr(config, name)},
        packs=packs,
        bound=round(bound * scale),
        of_bound=bound / count,
        fill=tokens / (count * config.packing_length),
        samples_packed=round(samples * scale),
        samples_dropped=round(packed.dropped * scale),
        tokens_dropped=round((packed.tokens_drawn - tokens) * scale),
        samples_per_pack=samples / count,
        packs_per_step=step.packs,
        samples_per_step=step.samples,
        micro_batches=step.micro_batches,
        steps=-(-packs // step.packs),
        worst=worst,
        memory_bytes=memory,
        fits=memory <= question.usable_bytes,
        seconds=seconds,
        tokens_per_second=tokens * scale / seconds,
        speedup=tokens * scale / seconds / padded.tokens_per_second,
        fullest=_fullest(packed.loads, capacities),
        idle=1 - step.packs / (step.micro_batches * gpus),
    )


def sweep(
    question: Question,
    lengths: Sequence[int],
    limits: Sequence[Mapping[str, int]],
    progress: Callable[[int, int, str], None],
) -> tuple[Simulation, ...]:
    """Every length alone, then every set of limits at every length; a set may name its own length."""
    tried = list(dict.fromkeys(_key(question, one) for one in _sets(lengths, limits)))
    simulations = []
    for number, one in enumerate(tried):
        progress(number, len(tried), ", ".join(f"{name} {value:,}" for name, value in one))
        simulations.append(simulate(question, question.packing.limited(dict(one))))
    kept = tuple(simulation for simulation in simulations if simulation is not None)
    if not kept:
        shortest = int(question.rows.samples["tokens"].min())
        raise DataError(
            "the sweep",
            got=f"no sample fits any of {len(tried)} settings; the shortest has {shortest:,} tokens",
            expected="at least one sample within the limits",
            fix="try longer lengths, or fewer limits",
        )
    return kept


def _sets(lengths: Sequence[int], limits: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    for one in limits:
        for name in one:
            if name not in LIMITS:
                raise ConfigError(f"limits.{name}", got=name, expected=", ".join(LIMITS), fix=nearest(name, LIMITS))
    alone = [{"packing_length": length} for length in sorted(set(lengths))]
    return alone + [{**length, **one} for one in limits for length in alone]


def _key(question: Question, one: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """What makes two settings the same: the limits in force, those that are always there included."""
    config = question.packing.limited(one)
    return tuple((name, value) for name in LIMITS if (value := getattr(config, name)) is not None)


def _fullest(loads: Mapping[str, np.ndarray], capacities: Mapping[str, int]) -> dict[str, float]:
    """For each resource the share of packs in which it is nearest to its limit."""
    used = np.stack([loads[name] / limit for name, limit in capacities.items()])
    counts = np.bincount(used.argmax(axis=0), minlength=len(capacities))
    return {name: float(count / used.shape[1]) for name, count in zip(capacities, counts, strict=True)}


_MOST_MEDIA = 1_000_000  # computed one by one; more would take minutes
_NOTICEABLE = 0.8  # of the patches: a limit that changes less is not worth showing
_SHARES = (2, 4, 8)
_ROUND_PIXELS = 28 * 28  # several families count in patches of this size


@dataclass(frozen=True, slots=True)
class MediaOption:
    """One media limit and what packing looks like with it."""

    setting: str
    value: int
    simulation: Simulation

    @property
    def label(self) -> str:
        """As it is shown."""
        return f"{self.setting} {self.value:,}"


def smaller_media(
    question: Question, table: CostTable, config: PackingConfig, before: Simulation
) -> tuple[MediaOption, ...]:
    """Limits that make a difference, for images and for videos, the mildest first; none where the family has none."""
    kinds = table.media("kind")
    if not before.worst.patches or not 0 < len(kinds) <= _MOST_MEDIA or len(table) > MOST_ROWS:
        return ()
    width, height = table.media("width").astype(np.int64), table.media("height").astype(np.int64)
    images = kinds == "image"
    tried: list[tuple[str, float]] = []
    if images.any():
        tried.append(("max_pixels", float(np.percentile((width * height)[images], 95))))
        tried.append(("max_img_size", float(np.maximum(width, height)[images].max())))
    if (kinds == "video").any():
        tried.append(("max_frames", float(table.column("frames").max())))
        tried.append(("num_frames", float(table.column("frames").max())))
    options_by_kind: dict[bool, list[MediaOption]] = {}
    for setting, size in tried:
        video = setting.endswith("frames")
        if not options_by_kind.get(video):
            options_by_kind[video] = list(_options(question, table, config, setting, size))
    return tuple(option for options in options_by_kind.values() for option in options)


def _options(
    question: Question, table: CostTable, config: PackingConfig, setting: str, size: float
) -> Iterator[MediaOption]:
    patches = _NOTICEABLE * question.rows.samples["patches"].sum()
    for share in _SHARES:
        value = int(size / share)
        if setting == "max_pixels":
            value = value // _ROUND_PIXELS * _ROUND_PIXELS
        if value < 1:
            return
        try:
            limited = table.with_limits(**{setting: value})  # type: ignore[arg-type]
        except PacktrainError:  # this family has no such limit, or the model is no longer there
            return
        if len(limited) < len(table):
            return
        rows = read_rows(limited, config.seed)
        if rows.samples["patches"].sum() <= patches:
            patches = _NOTICEABLE * rows.samples["patches"].sum()
            simulation = simulate(replace(question, rows=rows), config)
            if simulation is not None:
                yield MediaOption(setting, value, simulation)
