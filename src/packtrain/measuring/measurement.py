"""A measurement from beginning to end: continue or start, measure the units in any order, write them in theirs."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from packtrain.core.artifacts import remove_leftovers
from packtrain.core.checksums import file_sums
from packtrain.core.errors import ArtifactError, ConfigError, DataError
from packtrain.core.fingerprint import differences, digest
from packtrain.measuring.drift import Reference, check_drift, others_there
from packtrain.measuring.engines import Engine
from packtrain.measuring.failure_budget import FailureBudget, FailureJudge, Remedies, remedies_of
from packtrain.measuring.journal import Journal, UnitResult
from packtrain.measuring.measure_summary import (
    DriftCheck,
    EntryCounts,
    JsonObject,
    MeasureSummary,
    UserConfig,
    count_copies,
    table_statistics,
)
from packtrain.measuring.request import measure_inputs
from packtrain.measuring.table import (
    COSTS,
    JOURNAL,
    LEDGER,
    MEDIA,
    SUMMARY,
    CostTable,
    read_summary,
    write_summary,
)
from packtrain.measuring.work import FAMILY_RULE, Task, WorkItem, work_items
from packtrain.measuring.writer import write_ledger, write_table

_OURS = (COSTS, MEDIA, LEDGER, SUMMARY)
_NAMED = 5  # settings that have changed
_NOTHING: UserConfig = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a run behaves; nothing here changes what a table contains."""

    budget: FailureBudget = field(default_factory=FailureBudget)
    check: int = 32  # records for the drift check
    content_hash: bool = False  # identify data files by content instead of size and time

    def __post_init__(self) -> None:
        if self.check < 0:
            raise ConfigError("check", got=self.check, expected="a number of records", fix="0 turns the check off")


@dataclass(slots=True)
class MeasureProgress:
    """How far a run is; handed to the caller after every unit."""

    entries: int = 0
    rows: int = 0
    skipped: int = 0
    units: int = 0
    total_units: int | None = None
    resumed_units: int = 0
    checking: int = 0  # records that are being compared with the real processor, when all is measured
    changed: tuple[str, ...] = ()  # why an older result could not be used

    def take(self, result: UnitResult) -> None:
        """Count one finished unit."""
        self.units += 1
        self.entries += result.entries
        self.rows += result.rows
        self.skipped += result.entries - result.rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOutcome:
    """What a run did."""

    table: CostTable
    reused: bool  # nothing had changed, so nothing was measured
    changed: list[str] = field(default_factory=list)  # why an older result could not be used
    resumed_units: int = 0
    notes: tuple[str, ...] = ()  # what was asked for and changes nothing; what training will say


def run_measurement(
    task: Task,
    out: Path,
    engine: Engine,
    policy: Policy,
    reference: Callable[[], Reference | str],
    report: Callable[[MeasureProgress], None],
    *,
    user_config: UserConfig = _NOTHING,
    again: bool = True,
) -> MeasureOutcome:
    """Measure, or find that it has been done. `reference` gives the real processor, or a note why there is none.

    `user_config` has the settings as the user gave them, for later stages. Without `again` a table that does not fit is
    an error.
    """
    started = time.monotonic()
    if again:
        _refuse_others(out)
    by_processor = task.rule != FAMILY_RULE
    inputs = measure_inputs(task.request, content_hash=policy.content_hash, by_processor=by_processor)
    task = replace(task, inputs=digest(inputs))
    places = task.request.places()
    finished, changed = _finished_before(out, inputs, task, user_config if again else None)
    if finished is not None:
        return MeasureOutcome(table=finished, reused=True)
    if not again:
        raise ArtifactError(
            f"data.costs {out}",
            got="; ".join(changed[:_NAMED]) if changed else "no complete cost table",
            expected="a cost table of this data, model and settings",
            fix="measure again with the same settings, or leave it out",
        )
    journal, stale = Journal.open(out / JOURNAL, {**inputs, "places": places.plain()})  # its units name their files
    remove_leftovers(out, (COSTS, MEDIA, LEDGER, SUMMARY))
    (out / SUMMARY).unlink(missing_ok=True)
    remedies = remedies_of(task.request, out / LEDGER, user_config.get("model", {}).get("model_name_or_path"))
    progress = MeasureProgress(changed=tuple(changed or stale))
    try:
        try:
            _measure_units(task, engine, FailureJudge(policy.budget, remedies), journal, progress, report)
        except DataError:
            write_ledger(out, journal)  # so that the user sees which records are meant
            raise
        written = write_table(out, journal)
        counts = written.counts
        if counts.rows == 0:
            raise _nothing_left(counts, remedies, [str(spec.path) for spec in task.request.specs])
        table = CostTable(out, MeasureSummary(inputs=inputs, counts=counts))
        seconds = round(time.monotonic() - started, 3)
        if policy.check and not by_processor:
            progress.checking = min(policy.check, counts.rows)
            report(progress)
        check = _check(task, table, written.unit_entries, policy, reference)
        summary = MeasureSummary(
            inputs=inputs,
            places=places,
            mixture=task.request.mixture(),
            user_config=user_config,
            counts=counts,
            unread=written.unread,
            schemas=written.schemas,
            content=written.content,
            files=tuple((file.source, places.sources[file.source].name_of(file.file)) for file in written.files),
            statistics=table_statistics(table),
            copies=count_copies(table.column("check"), table.column("tokens")),
            measured_by="rule" if task.rule == FAMILY_RULE else "processor",
            check=check,
            versions=_versions(),
            seconds=seconds,
            sums=file_sums(out, (COSTS, MEDIA)),
        )
        write_summary(out, summary)
        journal.remove()
    finally:
        journal.close()
    return MeasureOutcome(
        table=CostTable.load(out), reused=False, changed=list(progress.changed), resumed_units=progress.resumed_units
    )


def _refuse_others(out: Path) -> None:
    """A folder with files of others is not ours to write into."""
    if out.exists() and not out.is_dir():
        raise ConfigError("out", got=f"{out}, which is a file", expected="a folder, or a path that does not exist")
    if not out.is_dir() or (out / SUMMARY).exists() or (out / JOURNAL).exists():
        return
    others = sorted(path.name for path in out.iterdir() if path.name not in _OURS and not path.name.startswith("."))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            "out",
            got=f"{out}, which holds other files: {', '.join(others[:3])}{more}",
            expected="a new or empty folder, or one that packtrain measure wrote",
            fix="use another folder",
        )


def _finished_before(
    out: Path, inputs: JsonObject, task: Task, user_config: UserConfig | None
) -> tuple[CostTable | None, list[str]]:
    """An earlier result from the same inputs, or what has changed since.

    Other shares need no other costs, and neither do data and models that have been moved. Without `user_config` the
    result keeps the one it was measured with.
    """
    request = task.request
    if not (out / SUMMARY).exists():
        return None, []
    try:
        summary = read_summary(out)
        changed = differences(summary.inputs, inputs)
        if changed:
            return None, changed
        table = CostTable.load(out)
        if changed := others_there(task, table):
            return None, changed
        now = replace(summary, mixture=request.mixture(), places=request.places())
        now = replace(now, user_config=user_config) if user_config is not None else now
        if now != summary:
            with suppress(OSError):  # a table that may only be read; ours knows it
                write_summary(out, now)
        return CostTable(table.folder, now), []
    except ArtifactError as error:
        return None, [f"{Path(error.where).name}: {error.got}"]


def _measure_units(
    task: Task,
    engine: Engine,
    judge: FailureJudge,
    journal: Journal,
    progress: MeasureProgress,
    report: Callable[[MeasureProgress], None],
) -> None:
    """Bring every unit into the journal."""
    items, progress.total_units = work_items(task.request)
    report(progress)

    def account(result: UnitResult) -> None:
        progress.take(result)
        report(progress)
        judge.take(result)

    def missing() -> Iterator[WorkItem]:
        for item in items:
            known = journal.read(item.unit.number) if item.unit.number in journal else None
            if known is None or _failed_by_media(known):
                yield item
                continue
            progress.resumed_units += 1
            account(known)

    for result in engine.run(task, missing()):
        journal.append(result)
        account(result)
    judge.finish()
    journal.sync()


def _failed_by_media(unit: UnitResult) -> bool:
    """Did media fail that may be there by now? The inputs of a table say nothing of them, so they are tried again."""
    return any(reason.startswith("media: ") for reason in unit.reasons)


def _check(
    task: Task,
    table: CostTable,
    unit_entries: Sequence[int],
    policy: Policy,
    reference: Callable[[], Reference | str],
) -> DriftCheck:
    """How many records were compared with the real processor, and why none were."""
    if policy.check == 0:
        return DriftCheck(note="turned off")
    if task.rule != FAMILY_RULE:
        return DriftCheck(note="not needed: every record was measured with the real processor")
    processor = reference()
    if isinstance(processor, str):
        return DriftCheck(note=processor)
    if measure_inputs(task.request, content_hash=policy.content_hash)["data"] != table.summary.data:
        raise DataError("the data", got="files that changed while they were measured", fix="measure again")
    compared = check_drift(task, table, unit_entries, processor, policy.check)
    broken = min(policy.check, len(table)) - compared.records
    notes = (f"{broken} more could not be decoded" if broken else "", _by_counts(compared.by_counts))
    return DriftCheck(records=compared.records, note="; ".join(filter(None, notes)))


def _by_counts(records: int) -> str:
    return f"the token ids of {records} could not be compared, only their numbers" if records else ""


def _nothing_left(counts: EntryCounts, remedies: Remedies, paths: Sequence[str]) -> DataError:
    worst = Counter(counts.reasons).most_common(3)
    reasons = "; ".join(f"{count:,} x {reason}" for reason, count in worst)
    helps = dict.fromkeys((*(remedies.to_do(reason) for reason, _ in worst), remedies.listed()))
    return DataError(
        "no usable record",
        got=reasons or f"an empty dataset: {', '.join(paths[:3])}{' and more' * (len(paths) > 3)}",
        expected="at least one usable record",
        fix="; ".join(filter(None, helps)) if reasons else "check that the path is that of the data",
    )


def _versions() -> dict[str, str]:
    names = ("packtrain", "numpy", "pyarrow", "tokenizers", "jinja2", "pillow", "av", "transformers", "torch")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
