"""Prepares a run before its first step: measured and packed data, and every number that follows from them.

This happens before the process group is initialised: how long it takes depends on the data, and one process per
machine does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from packtrain.app.datasets import MultiModalDataset, MultiModalIterableDataset
from packtrain.app.measure import make_request
from packtrain.app.train.resolve import ResolvedRun
from packtrain.app.train.run_numbers import (
    Dataset,
    StreamStart,
    limits_note,
    packed_step,
    plan_numbers,
    run_warnings,
    stream_numbers,
    too_large_note,
)
from packtrain.config.dataset_config import DatasetConfig
from packtrain.config.run_config import RunConfig
from packtrain.core.errors import DataError, PacktrainError
from packtrain.core.values import LedgerEntry
from packtrain.delivery.encode.token_cache import TokenProgress
from packtrain.measuring.measurement import MeasureOutcome, MeasureProgress
from packtrain.packing.cutting import UNFIT
from packtrain.packing.plan_builder import PackProgress
from packtrain.runs.derived import RunNumbers

if TYPE_CHECKING:
    from packtrain.delivery.encode.token_cache import TokenTable


_OPTIONS = {  # options of `measure`, and the same settings in a config
    f"--{name.replace('_', '-')}": f"data.{name}"
    for name in (
        "max_failure_rate",
        "media_root",
        "allow_outside_root",
        "chat_template",
        "on_error",
        "schema",
        "packing_length",
    )
}
_REASONS = 5  # why something was made again
_STREAM_PACKS = 32  # of a stream that are read before it is trained


@contextmanager
def data_errors_named(config: RunConfig, key: str, path: str) -> Iterator[None]:
    """Errors about data name this key of section data, as the user wrote it, and its value."""
    try:
        yield
    except PacktrainError as error:
        if not (isinstance(error, DataError) or error.where.startswith("dataset")):
            raise  # about the model, or the cache
        is_setting = error.where == "packing_length" and key == "dataset_path"
        key = f"data.{error.where if is_setting else key}"
        if theirs := dict(config.called).get(key):  # another system's name for it
            key = f"{theirs} ({key})"
        is_path = error.where.split(" ")[0] == "dataset_path"
        where = f"{key} {path}: {error.where}"
        if is_path or is_setting:
            where = key + error.where.removeprefix("dataset_path" if is_path else error.where)
        fix = error.fix
        for option, setting in _OPTIONS.items():
            fix = fix.replace(option, setting)
        raise type(error)(where, got=error.got, expected=error.expected, fix=fix) from error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A run with its data."""

    run: ResolvedRun
    dataset: Dataset
    evaluation: Dataset | None
    numbers: RunNumbers
    done: tuple[str, ...]  # what was reused, and what was made and why
    warnings: tuple[str, ...] = ()  # what is not as the user asked for


def prepare(
    run: ResolvedRun, progress: Callable[[Any], None] = lambda _: None, *, measured: MeasureOutcome | None = None
) -> Prepared:
    """Measure and pack what is missing or stale, and count; `measured` is what the same command measured before."""
    builder = _Builder(
        config=run.config, progress=progress, streams=bool(run.config.data.streaming), packs=run.data.has_packs
    )
    if measured is not None and not measured.reused:
        builder.measured[str(measured.table.folder)] = tuple(measured.changed)
    if run.evaluation is not None:  # a wrong path is refused before the data are measured
        with builder.errors_named(run.evaluation, "evaluation data"):
            make_request(run.evaluation, streaming=None if builder.streams else False)
    if run.data.online:
        start = builder.stream_start(replace(run.data, packs_per_step=1))
        run = run.counted(samples_per_pack=start.samples_per_pack, packs_per_epoch=1)
        run = replace(run, data=replace(run.data, epochs=1))
    elif run.size.packs is None or run.length.max_steps is not None:
        first = builder.build(_first_epoch(run), "data", counting=True)
        run, first = _with_shorter_packs(run, first, builder)
        packs = first.plan.epoch(0)
        run = run.counted(samples_per_pack=packs.num_samples / packs.num_packs, packs_per_epoch=packs.num_packs)
    else:
        run = run.counted(samples_per_pack=1.0, packs_per_epoch=1)
    dataset = builder.build(run.data, "data")
    steps = run.length.max_steps if not run.data.online else None
    while steps is not None and dataset.schedule.num_steps() < steps:  # later epochs may have fewer packs
        run = replace(run, data=replace(run.data, epochs=run.data.epochs + 1))
        dataset = builder.build(run.data, "data")
    evaluation = builder.build(run.evaluation, "evaluation data") if run.evaluation is not None else None
    numbers = stream_numbers(run, dataset, start) if run.data.online else plan_numbers(run, dataset, evaluation)
    return Prepared(
        run=replace(run, notes=(*run.notes, *dataset.notes, *too_large_note(numbers), *limits_note(run))),
        dataset=dataset,
        evaluation=evaluation,
        numbers=numbers,
        done=tuple(dict.fromkeys(builder.done)),
        warnings=run_warnings(run, dataset, numbers),
    )


def _first_epoch(run: ResolvedRun) -> DatasetConfig:
    """One epoch with all its samples, to count how many a pack holds."""
    packs = 1 if run.data.has_packs else run.data.packs_per_step
    drop_last = run.data.packing_drop_last if run.data.plan is not None else False  # a given plan is as it is
    return replace(run.data, epochs=1, packs_per_step=packs, packing_drop_last=drop_last)


def _with_shorter_packs(run: ResolvedRun, first: Dataset, builder: _Builder) -> tuple[ResolvedRun, Dataset]:
    """Shorter packs, where no length was set and a step could not keep its samples otherwise."""
    step, given, length = packed_step(run, first), run.config.data, first.plan.config.packing_length
    if step is None or step.is_kept or given.packing_length is not None or given.plan is not None:
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


@dataclass(slots=True)
class _Builder:
    """Builds datasets and remembers what had to be made for them."""

    config: RunConfig
    progress: Callable[[Any], None]
    streams: bool
    packs: bool
    done: list[str] = field(default_factory=list)
    measured: dict[str, tuple[str, ...]] = field(default_factory=dict)  # cost tables made now, and why
    packed: set[str] = field(default_factory=set)  # plans made now
    tokenized: dict[str, TokenProgress] = field(default_factory=dict)  # tokens made now, by their cost table

    def build(self, config: DatasetConfig, name: str, *, counting: bool = False) -> Dataset:
        """One dataset; a plan that is only made for `counting` is not mentioned."""
        dataset: Dataset = (MultiModalIterableDataset if self.streams or config.online else MultiModalDataset)(config)
        latest: dict[type, Any] = {}

        def watch(state: Any) -> None:
            latest[type(state)] = state
            self.progress(state)

        with self.errors_named(config, name):
            dataset.build(watch)
        if config.online:
            self.done.append(f"{name}: packed while it is read, without measuring it first")
            return dataset
        table, plan = str(dataset.plan.summary.cost_table), str(dataset.plan.folder)
        if MeasureProgress in latest:
            self.measured[table] = latest[MeasureProgress].changed
        if PackProgress in latest:
            self.packed.add(plan)
        if TokenProgress in latest:
            self.tokenized[table] = latest[TokenProgress]
        if not counting:
            self.done += [f"{name}: {self._table_note(table)}", f"{name}: {self._plan_note(plan)}"]
            if dataset.tokens is not None:
                self.done.append(f"{name}: {self._tokens_note(table, dataset.tokens)}")
        return dataset

    def stream_start(self, config: DatasetConfig) -> StreamStart:
        """Pack the beginning of a stream."""
        self.progress("reading the first packs")
        dataset = MultiModalIterableDataset(config)
        with self.errors_named(config, "data"):
            dataset.build()
            packs, left_out = [], []
            for number in range(_STREAM_PACKS):
                packs.append(dataset.source.lengths(number))  # type: ignore[attr-defined]
                left_out.append(dataset.source.left_out(number))  # type: ignore[attr-defined]
        if not any(packs):
            once = {entry.origin: entry for entries in left_out for entry in entries}  # a short stream comes again
            raise _no_sample([*once.values()])
        return StreamStart.of(packs)

    def errors_named(self, config: DatasetConfig, name: str) -> AbstractContextManager[None]:
        """Errors inside name the key of the user's config that these data come from."""
        key = "eval_path" if name == "evaluation data" and self.config.data.eval_path else "dataset_path"
        return data_errors_named(self.config, key, str(config.dataset_path))

    def _table_note(self, table: str) -> str:
        if table not in self.measured:
            return f"cost table reused, nothing it depends on has changed ({table})"
        why = self.measured[table]
        return f"measured again because {'; '.join(why[:_REASONS])}" if why else "measured now, no cached table fits"

    def _plan_note(self, plan: str) -> str:
        if plan not in self.packed:
            return f"plan reused ({plan})"
        return f"{'packed' if self.packs else 'batches planned'} now, no cached plan fits"

    def _tokens_note(self, table: str, tokens: TokenTable) -> str:
        late = f"; {tokens.not_kept:,} samples are tokenized when they are read" if tokens.not_kept else ""
        if table not in self.tokenized:
            return f"tokens reused ({tokens.folder}){late}"
        state = self.tokenized[table]
        if state.changed:
            return f"tokenized again because {'; '.join(state.changed[:_REASONS])}{late}"
        resumed = f", continuing from {state.resumed:,} samples of an interrupted run" if state.resumed else ""
        return f"tokenized now, no cached tokens fit{resumed}{late}"


def _no_sample(left_out: Sequence[LedgerEntry]) -> DataError:
    """The error for a stream whose first packs are empty."""
    reasons = Counter(f"{entry.stage}: {entry.reason}" for entry in left_out).most_common(_REASONS)
    unfit = next((entry for entry in left_out if entry.reason == UNFIT), None)
    got = "; ".join(f"{count:,} x {reason}" for reason, count in reasons)
    if unfit is not None:
        got += f" (such as {unfit.id}: {unfit.detail})"
    return DataError(
        "data.online",
        got=f"no usable sample in the first {_STREAM_PACKS} packs: {got}",
        expected="records that can be trained on",
        fix="raise the limit of a pack" if unfit is not None else "packtrain measure names what is wrong with each",
    )
