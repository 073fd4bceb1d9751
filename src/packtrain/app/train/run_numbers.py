"""Every number that follows from a run's config and its data, and the warnings that follow from these numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.app.datasets import MultiModalDataset, MultiModalIterableDataset
from packtrain.app.train.resolve import ResolvedRun
from packtrain.config.steps import PackedStep, counted_in_packs_by
from packtrain.core.cache_root import cache_dir
from packtrain.core.numbers import counted, decimal, percent, signed_percent
from packtrain.families.model_folder import resolve_model
from packtrain.families.settings import read_settings
from packtrain.measuring.work import NOT_DRAWN, OTHER_PART
from packtrain.packing.schedule import Schedule
from packtrain.planning.sweep import KEPT
from packtrain.runs.derived import RunNumbers

Dataset = MultiModalDataset | MultiModalIterableDataset
_MATTERS = 0.05  # share of the samples; if more are left out, there is a warning
_FIRST_PACKS = 4  # that are shown


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStart:
    """The first packs of a stream."""

    packs: int
    samples: int
    tokens: int
    longest: int
    first: tuple[tuple[int, int], ...]  # samples and tokens of the first few

    @classmethod
    def of(cls, packs: list[list[int]]) -> StreamStart:
        """From the lengths of the samples of each pack."""
        return cls(
            packs=len(packs),
            samples=sum(map(len, packs)),
            tokens=sum(map(sum, packs)),
            longest=max(max(lengths, default=0) for lengths in packs),
            first=tuple((len(lengths), sum(lengths)) for lengths in packs[:_FIRST_PACKS]),
        )

    @property
    def samples_per_pack(self) -> float:
        return self.samples / self.packs


def stream_numbers(run: ResolvedRun, dataset: Dataset, start: StreamStart) -> RunNumbers:
    """The numbers of a run over a stream: samples and tokens are estimated from its first packs, for the whole run."""
    schedule, packs = dataset.schedule, run.data.packs_per_step
    steps, length = schedule.num_steps(), dataset.plan.config.packing_length
    each = start.samples_per_pack
    return RunNumbers(
        mode=run.mode,
        samples=round(each * packs * steps),
        **dict.fromkeys(("left_out", "too_large", "unlabelled", "cut", "cut_tokens", "cut_supervised"), 0),
        **dict.fromkeys(("not_drawn", "held_out", "waiting", "supervised_tokens", "images", "videos", "frames"), 0),
        packs=packs * steps,
        packing_length=length,
        fill=start.tokens / (start.packs * length),
        samples_per_pack=each,
        packs_per_step=packs,
        samples_per_step=packs * each,
        step_samples=(round(packs * each),) * 2,
        rows_per_batch=1,
        micro_batches=schedule.accumulation(run.world_size),
        steps=steps,
        steps_per_epoch=steps,
        epochs=1.0,
        tokens=round(start.tokens / start.packs * packs * steps),
        longest=start.longest,
        world_size=run.world_size,
        first_packs=tuple((samples, tokens / length) for samples, tokens in start.first),
        looked_at=start.packs,
    )


def plan_numbers(run: ResolvedRun, dataset: Dataset, evaluation: Dataset | None) -> RunNumbers:
    """The numbers of a run over a plan."""
    plan, schedule, config = dataset.plan, dataset.schedule, run.data
    counts, reasons = plan.summary.epochs[0], dataset.measured.reasons
    steps_by_epoch = [schedule.num_steps(epoch) for epoch in range(plan.num_epochs)]
    samples, steps = plan.epoch(0).num_samples, run.length.steps_of(steps_by_epoch)
    return RunNumbers(
        mode=run.mode,
        samples=samples,
        left_out=_left_out_samples(dataset),
        too_large=counts.dropped - counts.unlabelled,
        unlabelled=counts.unlabelled,
        cut=counts.cut_rows,
        cut_tokens=counts.tokens_lost,
        cut_supervised=counts.supervised_lost,
        not_drawn=int(reasons.get(NOT_DRAWN, 0)),
        held_out=int(reasons.get(OTHER_PART, 0)),
        waiting=counts.waiting,
        packs=counts.packs,
        packing_length=plan.config.packing_length,
        fill=counts.fill
        if config.packing
        else 1 - schedule.padding_share(config.rows_per_batch, world_size=run.world_size),
        samples_per_pack=samples / counts.packs,
        packs_per_step=config.packs_per_step,
        samples_per_step=config.packs_per_step * samples / counts.packs,
        step_samples=_step_samples(schedule),
        rows_per_batch=config.rows_per_batch,
        micro_batches=schedule.accumulation(run.world_size, config.rows_per_batch),
        steps=steps,
        steps_per_epoch=steps_by_epoch[0],
        epochs=run.length.epochs if run.length.epochs is not None else steps / steps_by_epoch[0],
        **{name: counts.totals[name] for name in ("tokens", "supervised_tokens", "images", "videos", "frames")},
        longest=counts.most["longest"],
        world_size=run.world_size,
        first_packs=_first_packs(schedule) if config.has_packs else (),
        evaluation_samples=evaluation.plan.epoch(0).num_samples if evaluation is not None else 0,
        evaluation_left_out=_left_out_samples(evaluation) if evaluation is not None else 0,
        evaluation_batches=-(-evaluation.plan.epoch(0).num_packs // evaluation.rows_per_batch)
        if evaluation is not None
        else 0,
    )


def _left_out_samples(dataset: Dataset) -> int:
    summary, reasons = dataset.plan.summary, dataset.measured.reasons
    chosen = sum(int(reasons.get(reason, 0)) for reason in (NOT_DRAWN, OTHER_PART))
    return summary.epochs[0].ledger + summary.ledger.measured - chosen


def _step_samples(schedule: Schedule) -> tuple[int, int]:
    """The fewest and the most samples of a step, without a last one that is not whole."""
    each, size = schedule.plan.epoch(0).load("samples")[schedule.order(0)], schedule.packs_per_step
    steps = np.add.reduceat(each, np.arange(0, len(each), size))[: max(1, len(each) // size)]
    return int(steps.min()), int(steps.max())


def _first_packs(schedule: Schedule) -> tuple[tuple[int, float], ...]:
    first, packs = schedule.order(0)[:_FIRST_PACKS], schedule.plan.epoch(0)
    fills = packs.load("tokens")[first] / schedule.plan.config.packing_length
    return tuple(zip(packs.load("samples")[first].tolist(), fills.tolist(), strict=True))


def packed_step(run: ResolvedRun, dataset: Dataset) -> PackedStep | None:
    """A step of these packs, where the config says its samples and an epoch has as many."""
    if run.data.online or run.size.samples is None or not run.data.has_packs:
        return None
    packs, counts = dataset.plan.epoch(0), dataset.plan.summary.epochs[0]
    if packs.num_samples < run.size.samples:
        return None
    return PackedStep(
        wanted=run.size.samples,
        world_size=run.world_size,
        samples_per_pack=packs.num_samples / packs.num_packs,
        tokens_per_sample=counts.totals["tokens"] / packs.num_samples,
        longest=counts.most["longest"],
        samples=packs.num_samples,
    )


def run_warnings(run: ResolvedRun, dataset: Dataset, numbers: RunNumbers) -> tuple[str, ...]:
    """Warnings about numbers that are not as the user asked."""
    return (*_unit_warning(run), *_step_warning(run, dataset, numbers), *_tail_warning(dataset))


def _unit_warning(run: ResolvedRun) -> tuple[str, ...]:
    """The batch size counts packs in the system that the config comes from."""
    system, samples = counted_in_packs_by(run.config), run.size.samples
    if not (system and samples and run.data.packing):
        return ()
    fix = f"training.effective_batch_unit: packs makes a step of {counted(samples, 'pack')}"
    return (f"a step has {counted(samples, 'sample')}, packed or not; in {system}, batch size counts packs: {fix}",)


def _step_warning(run: ResolvedRun, dataset: Dataset, numbers: RunNumbers) -> tuple[str, ...]:
    """A step is not the one that was asked for; how to keep it."""
    unit = "pack" if run.data.has_packs else "sample"
    if numbers.packs_per_step > numbers.packs:
        return (
            f"a step of {counted(numbers.packs_per_step, unit)} is more than an epoch has ({numbers.packs:,}): every "
            f"epoch is one step of {counted(numbers.samples, 'sample')}",
        )
    step = packed_step(run, dataset)
    if step is None or step.is_kept:
        return ()
    problems = []
    if abs(step.moved) > KEPT:
        problems.append(
            f"a step has about {decimal(step.shape.samples)} samples instead of {step.wanted:,} "
            f"({signed_percent(step.moved)}): a pack of {numbers.packing_length:,} tokens holds "
            f"{step.samples_per_pack:.1f}"
        )
    if step.idle:
        slots = step.shape.micro_batches * step.world_size
        problems.append(f"{step.idle} of {counted(slots, 'micro-batch', 'micro-batches')} of a step are idle")
    each = " and give every process a pack" if step.world_size > 1 else ""
    fix = f"data.packing_length: {step.kept_length} would keep the samples{each}"
    if step.kept_length >= numbers.packing_length:  # the longest sample has to fit
        most = max(1, step.wanted // step.fewest_packs)
        fix = f"data.max_samples_per_pack: {most} would keep them; shorter packs would drop long samples"
    return (f"{'; '.join(problems)}. {fix}",)


def _tail_warning(dataset: Dataset) -> tuple[str, ...]:
    """The user's settings leave out a large part of an epoch."""
    if dataset.config.online:
        return ()
    counts, config = dataset.plan.summary.epochs[0], dataset.plan.config
    samples = counts.tail + dataset.plan.epoch(0).num_samples
    left_out = (
        (counts.beyond, f"max_packs {config.max_packs}", "", "a larger data.max_packs trains on them"),
        (
            counts.tail - counts.beyond,
            "packing_drop_last",
            ", its incomplete last step",
            "data.packing_drop_last: false trains on them, fewer samples per step drop fewer",
        ),
    )
    return tuple(
        f"{setting} leaves out {number:,} of {samples:,} samples ({percent(number / samples)}) "
        f"of an epoch{which}: {fix}"
        for number, setting, which, fix in left_out
        if number >= max(1, _MATTERS * samples)
    )


def too_large_note(numbers: RunNumbers) -> tuple[str, ...]:
    """Many usable samples are left out because they are long."""
    usable = numbers.samples + numbers.too_large
    if numbers.too_large < _MATTERS * usable:
        return ()
    share = f"{numbers.too_large:,} of {usable:,} usable samples ({percent(numbers.too_large / usable)})"
    limits = f"longer than data.packing_length {numbers.packing_length:,}, or above another limit of a pack"
    return (f"{share} are left out: {limits}. Raise it, or set data.overlong: split or truncate",)


def limits_note(run: ResolvedRun) -> tuple[str, ...]:
    """Media limits of the run that the processor files in `final` cannot express."""
    from packtrain.modeling.export import limited_parts

    limits = run.data.media_limits()
    folder = resolve_model(run.model.name, cache_dir() / "models")
    if not limits.given() or limited_parts(read_settings(folder), limits) is not None:
        return ()
    settings = ", ".join(f"{name} {value}" for name, value in limits.given().items())
    return (f"the processor in {run.folder}/final has the model's own limits: set {settings} wherever it is used",)
