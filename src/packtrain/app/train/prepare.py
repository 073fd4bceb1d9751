"""What a run needs before its first step: measured and packed data, and every number that follows from them.

It happens before processes find each other: how long it takes depends on the data, and one of a machine does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packtrain.app.datasets import MultiModalDataset, MultiModalIterableDataset
from packtrain.app.measure import request_of
from packtrain.app.train.resolve import ResolvedRun
from packtrain.config.dataset_config import DatasetConfig
from packtrain.config.run_config import RunConfig
from packtrain.config.steps import PackedStep, counted_in_packs_by
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import DataError, PacktrainError
from packtrain.core.numbers import about, counted, signed_percent
from packtrain.delivery.encode.token_cache import TokenProgress as Tokenizing
from packtrain.families.model_folder import resolve
from packtrain.families.settings import read_settings
from packtrain.measuring.measurement import MeasureOutcome
from packtrain.measuring.measurement import MeasureProgress as Measuring
from packtrain.measuring.work import NOT_DRAWN, OTHER_PART
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.plan_builder import PackProgress as Packing
from packtrain.packing.schedule import Schedule
from packtrain.planning.sweep import KEPT

if TYPE_CHECKING:
    from packtrain.delivery.encode.token_cache import TokenTable


_SETTING = "dataset_path"  # what whoever opens data calls them
_OPTIONS = {  # of `measure`, and the keys that say them in a config
    f"--{name.replace('_', '-')}": f"data.{name}"
    for name in ("max_failure_rate", "media_root", "allow_outside_root", "chat_template", "on_error", "schema")
}


@contextmanager
def data_of(config: RunConfig, key: str, path: str) -> Iterator[None]:
    """Errors inside name this key of section data, as the user wrote it, and the data that it stands for."""
    try:
        yield
    except PacktrainError as error:
        if not (isinstance(error, DataError) or error.where.startswith("dataset")):
            raise  # about the model, or the cache
        raise _renamed(error, _written(config, f"data.{key}"), path) from error


def _renamed(error: PacktrainError, key: str, path: str) -> PacktrainError:
    named = error.where.split(" ")[0] == _SETTING
    where = key + error.where.removeprefix(_SETTING) if named else f"{key} {path}: {error.where}"
    fix = error.fix
    for option, setting in _OPTIONS.items():
        fix = fix.replace(option, setting)
    return type(error)(where, got=error.got, expected=error.expected, fix=fix)


def _written(config: RunConfig, key: str) -> str:
    """The key by the name that the config has for it, where that is another system's."""
    name = dict(config.called).get(key)
    return f"{name} ({key})" if name else key


Dataset = MultiModalDataset | MultiModalIterableDataset
_MATTERS = 0.05  # of the samples: if so many are left out, it is said
_FIRST = 4  # packs that are shown
_NAMED = 5  # reasons why something was made again
_LOOKED_AT = 32  # packs of a stream, before it is trained


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNumbers:
    """Every number that follows from config and data."""

    mode: str  # packed or padded
    samples: int  # of an epoch; one that is split counts once
    left_out: int  # entries of the ledger, those not drawn aside: unusable, filtered out, or fitting no pack
    too_large: int  # of them, samples that fit no pack
    unlabelled: int  # of them, pieces of samples that were cut, in which nothing carries loss
    cut: int  # samples that were truncated or split
    cut_tokens: int  # behind the cut, and trained nowhere
    cut_supervised: int  # labels lost by cutting
    not_drawn: int  # records beyond max_samples
    held_out: int  # records that are evaluated instead, by eval_size
    waiting: int  # samples that this epoch does not use, because their source is used in part
    packs: int  # of the first epoch; padded: its samples, or their pieces where they are split
    packing_length: int
    fill: float  # of packs, or of padded batches: the share of tokens that is no padding
    samples_per_pack: float
    packs_per_step: int
    samples_per_step: float
    step_samples: tuple[int, int]  # the fewest and the most of a whole step of the first epoch
    rows_per_batch: int
    micro_batches: int  # forward passes of each process in a step
    steps: int
    steps_per_epoch: int
    epochs: float
    tokens: int  # of an epoch
    supervised_tokens: int
    longest: int
    images: int
    videos: int
    frames: int
    world: int
    first_packs: tuple[tuple[int, float], ...] = ()  # of the first steps: samples, and how full
    evaluation_samples: int = 0
    evaluation_left_out: int = 0
    evaluation_batches: int = 0  # over all processes
    looked_at: int | None = None  # packs of a stream, from which numbers of samples and tokens are estimated


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A run with its data at hand."""

    run: ResolvedRun
    dataset: Dataset
    evaluation: Dataset | None
    numbers: RunNumbers
    done: tuple[str, ...]  # what was reused, and what was made because of what
    warnings: tuple[str, ...] = ()  # what is not as it was asked for


def prepare(
    run: ResolvedRun, progress: Callable[[Any], None] = lambda _: None, *, measured: MeasureOutcome | None = None
) -> Prepared:
    """Measure and pack what is missing or stale, and count; `measured` is what the same command measured before."""
    builder = _Builder(
        config=run.config, progress=progress, streams=bool(run.config.data.streaming), packs=run.data.has_packs
    )
    if measured is not None and not measured.reused:
        builder.measured[str(measured.table.folder)] = tuple(measured.changed)
    if run.evaluation is not None:  # what is wrong with its path is said before the data are measured
        with builder.data_of(run.evaluation, "evaluation data"):
            request_of(run.evaluation, streaming=None if builder.streams else False)
    if run.data.online:
        seen = builder.look_ahead(replace(run.data, packs_per_step=1))
        run = run.counted(samples_per_pack=seen.samples / seen.packs, packs_per_epoch=1)
        run = replace(run, data=replace(run.data, epochs=1))
    elif run.size.packs is None or run.length.max_steps is not None:
        first = builder.build(_first_epoch(run), "data", counting=True)
        run, first = _keeping_samples(run, first, builder)
        packs = first.plan.epoch(0)
        run = run.counted(samples_per_pack=packs.num_samples / packs.num_packs, packs_per_epoch=packs.num_packs)
    else:
        run = run.counted(samples_per_pack=1.0, packs_per_epoch=1)
    dataset = builder.build(run.data, "data")
    wanted = run.length.max_steps if not run.data.online else None
    while wanted is not None and dataset.schedule.num_steps() < wanted:  # later epochs may have fewer packs
        run = replace(run, data=replace(run.data, epochs=run.data.epochs + 1))
        dataset = builder.build(run.data, "data")
    evaluation = builder.build(run.evaluation, "evaluation data") if run.evaluation is not None else None
    numbers = _numbers(run, dataset) if not run.data.online else _estimated(run, dataset, seen)
    if evaluation is not None:
        numbers = replace(
            numbers,
            evaluation_samples=evaluation.plan.epoch(0).num_samples,
            evaluation_left_out=_left_out(evaluation),
            evaluation_batches=_batches(evaluation),
        )
    return Prepared(
        run=replace(run, notes=(*run.notes, *dataset.notes, *_too_large_note(numbers), *_limits_note(run))),
        dataset=dataset,
        evaluation=evaluation,
        numbers=numbers,
        done=tuple(dict.fromkeys(builder.done)),
        warnings=(*_unit_warning(run), *_step_warnings(run, dataset, numbers), *_tail_warning(dataset)),
    )


def _first_epoch(run: ResolvedRun) -> DatasetConfig:
    """One epoch without a tail, which says how many samples a pack holds."""
    packs = 1 if run.data.has_packs else run.data.packs_per_step
    tail = run.data.packing_drop_last if run.data.plan is not None else False  # a given plan has it, or has it not
    return replace(run.data, epochs=1, packs_per_step=packs, packing_drop_last=tail)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """The first packs of a stream."""

    packs: int
    samples: int
    tokens: int
    longest: int
    first: tuple[tuple[int, int], ...]  # samples and tokens


def _packed_step(run: ResolvedRun, dataset: Dataset) -> PackedStep | None:
    """A step of these packs, where its samples are said and an epoch has as many."""
    if run.data.online:
        return None
    packs, counts = dataset.plan.epoch(0), dataset.plan.summary.epochs[0]
    wanted = run.size.samples
    if wanted is None or not run.data.has_packs or packs.num_samples < wanted:
        return None
    return PackedStep(
        wanted=wanted,
        world=run.world,
        samples_per_pack=packs.num_samples / packs.num_packs,
        tokens_per_sample=counts.totals["tokens"] / packs.num_samples,
        longest=counts.most["longest"],
        samples=packs.num_samples,
    )


def _keeping_samples(run: ResolvedRun, first: Dataset, builder: _Builder) -> tuple[ResolvedRun, Dataset]:
    """Shorter packs, where nobody said how long they are and a step could not keep its samples otherwise."""
    step, said, length = _packed_step(run, first), run.config.data, first.plan.config.packing_length
    if step is None or step.is_kept or said.packing_length is not None or said.plan is not None:
        return run, first
    evaluation = run.evaluation
    if evaluation is not None:
        evaluated = builder.build(evaluation, "evaluation data", counting=True).plan.summary.epochs[0]
        step = replace(step, longest=max(step.longest, evaluated.most["longest"]))
    if step.kept_length >= length:
        return run, first
    run = replace(
        run,
        data=replace(run.data, packing_length=step.kept_length),
        evaluation=None if evaluation is None else replace(evaluation, packing_length=step.kept_length),
        notes=(
            *run.notes,
            f"packs have {step.kept_length:,} tokens, not {length:,}, so that a step has its {step.wanted:,} samples; "
            "data.packing_length sets another length",
        ),
    )
    return run, builder.build(_first_epoch(run), "data", counting=True)


def _unit_warning(run: ResolvedRun) -> tuple[str, ...]:
    """A batch size that counts packs where the config comes from."""
    system, samples = counted_in_packs_by(run.config), run.size.samples
    if not (system and samples and run.data.packing):
        return ()
    way = f"training.effective_batch_unit: packs makes a step of {counted(samples, 'pack')}"
    return (f"a step has {counted(samples, 'sample')}, packed or not; in {system}, batch size counts packs: {way}",)


def _step_warnings(run: ResolvedRun, dataset: Dataset, numbers: RunNumbers) -> tuple[str, ...]:
    """A step that is not the one that was asked for, and what would keep it."""
    unit = "pack" if run.data.has_packs else "sample"
    if numbers.packs_per_step > numbers.packs:
        return (
            f"a step of {counted(numbers.packs_per_step, unit)} is more than an epoch has ({numbers.packs:,}): every "
            f"epoch is one step of {counted(numbers.samples, 'sample')}",
        )
    step = _packed_step(run, dataset)
    if step is None or step.is_kept:
        return ()
    found = []
    if abs(step.moved) > KEPT:
        found.append(
            f"a step has about {about(step.shape.samples)} samples instead of {step.wanted:,} "
            f"({signed_percent(step.moved)}): a pack of {numbers.packing_length:,} tokens holds "
            f"{step.samples_per_pack:.1f}"
        )
    if step.idle:
        places = step.shape.micro_batches * step.world
        found.append(f"{step.idle} of {counted(places, 'micro-batch', 'micro-batches')} of a step have no pack")
    most = max(1, step.wanted // step.fewest_packs)
    every = " and give every process a pack" if step.world > 1 else ""
    way = f"data.packing_length: {step.kept_length} would keep the samples{every}"
    if step.kept_length >= numbers.packing_length:  # the longest sample has to fit
        way = f"data.max_samples_per_pack: {most} would keep them; shorter packs would lose long samples"
    return (f"{'; '.join(found)}. {way}",)


def _tail_warning(dataset: Dataset) -> tuple[str, ...]:
    """A last step that is not whole is much of a short epoch."""
    if dataset.config.online:
        return ()
    tail = dataset.plan.summary.epochs[0].tail
    samples = tail + dataset.plan.epoch(0).num_samples
    if tail < _MATTERS * samples:
        return ()
    share = f"{tail:,} of {samples:,} samples ({tail / samples:.0%})"
    return (
        f"packing_drop_last leaves out {share} of an epoch, whose last step would not be whole: "
        "data.packing_drop_last: false trains them, fewer samples a step lose fewer",
    )


@dataclass(slots=True)
class _Builder:
    """Builds datasets and remembers what had to be made for them."""

    config: RunConfig
    progress: Callable[[Any], None]
    streams: bool
    packs: bool
    done: list[str] = field(default_factory=list)
    measured: dict[str, tuple[str, ...]] = field(default_factory=dict)  # cost tables made now, and because of what
    packed: set[str] = field(default_factory=set)  # plans made now
    tokenized: dict[str, Tokenizing] = field(default_factory=dict)  # tokens made now, by their cost table

    def build(self, config: DatasetConfig, name: str, *, counting: bool = False) -> Dataset:
        """One dataset; of a plan that only counts nothing is said."""
        dataset: Dataset = (MultiModalIterableDataset if self.streams or config.online else MultiModalDataset)(config)
        seen: dict[type, Any] = {}

        def watch(state: Any) -> None:
            seen[type(state)] = state
            self.progress(state)

        with self.data_of(config, name):
            dataset.build(watch)
        if config.online:
            self.done.append(f"{name}: packed as it is read, nothing is measured first")
            return dataset
        table, plan = str(dataset.plan.summary.cost_table), str(dataset.plan.folder)
        if Measuring in seen:
            self.measured[table] = seen[Measuring].changed
        if Packing in seen:
            self.packed.add(plan)
        if Tokenizing in seen:
            self.tokenized[table] = seen[Tokenizing]
        if not counting:
            self.done += [f"{name}: {self._of_table(table)}", f"{name}: {self._of_plan(plan)}"]
            if dataset.tokens is not None:
                self.done.append(f"{name}: {self._of_tokens(table, dataset.tokens)}")
        return dataset

    def look_ahead(self, config: DatasetConfig) -> _Seen:
        """What the first packs of a stream hold."""
        self.progress("reading the first packs")
        dataset = MultiModalIterableDataset(config)
        with data_of(self.config, "dataset_path", str(config.dataset_path)):
            dataset.build()
            packs = [dataset.source.lengths(number) for number in range(_LOOKED_AT)]  # type: ignore[attr-defined]
        if not any(packs):
            raise DataError(
                "data.online",
                got=f"no usable sample in the first {_LOOKED_AT} packs",
                expected="records that can be trained",
                fix="packtrain measure names what is wrong with each",
            )
        return _Seen(
            packs=len(packs),
            samples=sum(map(len, packs)),
            tokens=sum(map(sum, packs)),
            longest=max(max(lengths, default=0) for lengths in packs),
            first=tuple((len(lengths), sum(lengths)) for lengths in packs[:_FIRST]),
        )

    def data_of(self, config: DatasetConfig, name: str) -> AbstractContextManager[None]:
        """Errors inside name the key of the user's config that these data are of."""
        key = "eval_path" if name == "evaluation data" and self.config.data.eval_path else "dataset_path"
        return data_of(self.config, key, str(config.dataset_path))

    def _of_table(self, table: str) -> str:
        if table not in self.measured:
            return f"cost table reused, nothing it depends on has changed ({table})"
        why = self.measured[table]
        return f"measured again because {'; '.join(why[:_NAMED])}" if why else "measured now, no cached table fits"

    def _of_plan(self, plan: str) -> str:
        if plan not in self.packed:
            return f"plan reused ({plan})"
        return f"{'packed' if self.packs else 'batches planned'} now, no cached plan fits"

    def _of_tokens(self, table: str, tokens: TokenTable) -> str:
        late = f"; {tokens.not_kept:,} samples are tokenized when they are read" if tokens.not_kept else ""
        if table not in self.tokenized:
            return f"tokens reused ({tokens.folder}){late}"
        made = self.tokenized[table]
        if made.changed:
            return f"tokenized again because {'; '.join(made.changed[:_NAMED])}{late}"
        more = f", {made.resumed:,} samples were there from an interrupted run" if made.resumed else ""
        return f"tokenized now, no cached tokens fit{more}{late}"


def _estimated(run: ResolvedRun, dataset: Dataset, seen: _Seen) -> RunNumbers:
    """The numbers of a run over a stream: those of samples and tokens from its first packs, for the whole run."""
    schedule, packs = dataset.schedule, run.data.packs_per_step
    steps, length = schedule.num_steps(), dataset.plan.config.packing_length
    each = seen.samples / seen.packs
    return RunNumbers(
        mode=run.mode,
        samples=round(each * packs * steps),
        **dict.fromkeys(("left_out", "too_large", "unlabelled", "cut", "cut_tokens", "cut_supervised"), 0),
        **dict.fromkeys(("not_drawn", "held_out", "waiting", "supervised_tokens", "images", "videos", "frames"), 0),
        packs=packs * steps,
        packing_length=length,
        fill=seen.tokens / (seen.packs * length),
        samples_per_pack=each,
        packs_per_step=packs,
        samples_per_step=packs * each,
        step_samples=(round(packs * each),) * 2,
        rows_per_batch=1,
        micro_batches=schedule.accumulation(run.world),
        steps=steps,
        steps_per_epoch=steps,
        epochs=1.0,
        tokens=round(seen.tokens / seen.packs * packs * steps),
        longest=seen.longest,
        world=run.world,
        first_packs=tuple((samples, tokens / length) for samples, tokens in seen.first),
        looked_at=seen.packs,
    )


def _numbers(run: ResolvedRun, dataset: Dataset) -> RunNumbers:
    plan, schedule, config = dataset.plan, dataset.schedule, run.data
    counts, totals = plan.summary.epochs[0], plan.summary.epochs[0].totals
    by_epoch = [schedule.num_steps(epoch) for epoch in range(plan.num_epochs)]
    samples = plan.epoch(0).num_samples
    samples_per_pack = samples / counts.packs
    steps = run.length.steps_of(by_epoch)
    return RunNumbers(
        mode=run.mode,
        samples=samples,
        left_out=_left_out(dataset),
        too_large=counts.dropped - counts.unlabelled,
        unlabelled=counts.unlabelled,
        cut=counts.cut_rows,
        cut_tokens=counts.tokens_lost,
        cut_supervised=counts.supervised_lost,
        not_drawn=_counted(dataset, NOT_DRAWN),
        held_out=_counted(dataset, OTHER_PART),
        waiting=counts.waiting,
        packs=counts.packs,
        packing_length=plan.config.packing_length,
        fill=counts.fill if config.packing else 1 - schedule.padding_share(config.rows_per_batch, world=run.world),
        samples_per_pack=samples_per_pack,
        packs_per_step=config.packs_per_step,
        samples_per_step=config.packs_per_step * samples_per_pack,
        step_samples=_step_samples(schedule),
        rows_per_batch=config.rows_per_batch,
        micro_batches=schedule.accumulation(run.world, config.rows_per_batch),
        steps=steps,
        steps_per_epoch=by_epoch[0],
        epochs=run.length.epochs if run.length.epochs is not None else steps / by_epoch[0],
        tokens=totals["tokens"],
        supervised_tokens=totals["supervised_tokens"],
        longest=counts.most["longest"],
        images=totals["images"],
        videos=totals["videos"],
        frames=totals["frames"],
        world=run.world,
        first_packs=_first_packs(schedule) if config.has_packs else (),
    )


def _step_samples(schedule: Schedule) -> tuple[int, int]:
    """The fewest and the most samples of a step; the last one is left aside where it is not whole."""
    each, size = schedule.plan.epoch(0).load("samples")[schedule.order(0)], schedule.packs_per_step
    steps = np.add.reduceat(each, np.arange(0, len(each), size))[: max(1, len(each) // size)]
    return int(steps.min()), int(steps.max())


def _first_packs(schedule: Schedule) -> tuple[tuple[int, float], ...]:
    """Samples and fill of the packs that are trained first."""
    packs, length = schedule.plan.epoch(0), schedule.plan.config.packing_length
    return tuple(
        (int(packs.load("samples")[pack]), float(packs.load("tokens")[pack] / length))
        for pack in schedule.order(0)[:_FIRST].tolist()
    )


def _left_out(dataset: Dataset) -> int:
    counts, ledger = dataset.plan.summary.epochs[0], dataset.plan.summary.ledger
    chosen = _counted(dataset, NOT_DRAWN) + _counted(dataset, OTHER_PART)
    return counts.ledger + ledger.measured - chosen


def _counted(dataset: Dataset, reason: str) -> int:
    return int(dataset.measured.reasons.get(reason, 0))


def _too_large_note(numbers: RunNumbers) -> tuple[str, ...]:
    """Good samples that are not trained because they are long: a share that matters is said."""
    usable = numbers.samples + numbers.too_large
    if numbers.too_large < _MATTERS * usable:
        return ()
    share = f"{numbers.too_large:,} of {usable:,} usable samples ({numbers.too_large / usable:.0%})"
    limits = f"longer than data.packing_length {numbers.packing_length:,}, or above another limit of a pack"
    return (f"{share} are left out: {limits}. Raise it, or set data.overlong: split or truncate",)


def _limits_note(run: ResolvedRun) -> tuple[str, ...]:
    """Where processor files cannot say what the limits of the run are, those of the final weights are the model's."""
    from packtrain.modeling.export import limited_parts

    limits = run.data.media_limits()
    folder = resolve(run.model.name, cache_dir() / "models")
    if not limits.given() or limited_parts(read_settings(folder), limits) is not None:
        return ()
    words = ", ".join(f"{name} {value}" for name, value in limits.given().items())
    return (f"the processor in {run.folder}/final is the model's own: where it is used, give it {words} again",)


def batch_rows(schedule: Schedule, rows: int, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Packs of an epoch in the order of training, and where each batch of them begins, on any number of processes."""
    order, per_step = schedule.order(epoch), schedule.packs_per_step
    firsts = np.arange(0, len(order), per_step)
    sizes = np.minimum(firsts + per_step, len(order)) - firsts
    # What fills up a step stands before its packs, so that its first batch is the one with fewer.
    within = ((first, np.arange(-(-size % rows), size, rows)) for first, size in zip(firsts, sizes, strict=True))
    return order, np.concatenate([first + starts.clip(min=0) for first, starts in within])


def _batches(dataset: Dataset) -> int:
    plan: PackPlan = dataset.plan
    return -(-plan.epoch(0).num_packs // dataset.config.rows_per_batch)
