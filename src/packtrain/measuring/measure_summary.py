"""measure.json as values: what was measured from what, what became of every entry, and how the columns are spread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from packtrain.core.numbers import percent
from packtrain.core.values import MediaLimits

if TYPE_CHECKING:
    from packtrain.measuring.table import CostTable


JsonObject = Mapping[str, Any]  # an object of a JSON file: what is not a value of ours, and is compared or hashed whole
UserConfig = Mapping[str, JsonObject]  # the user's config, by section


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlace:
    """Where one source is."""

    path: str
    media_root: str
    root: str | None = None  # what names in it are relative to; None for what is remote or on the hub
    in_files: bool = True  # its rows are in files that packtrain reads itself

    def name_of(self, file: str) -> str:
        """A file of it as it is called wherever the source lies."""
        return os.path.relpath(file, self.root) if self.root is not None and self.in_files else file

    def file(self, name: str) -> str:
        """The file of such a name."""
        moves = self.root is not None and self.in_files
        return os.path.normpath(os.path.join(str(self.root), name)) if moves else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Folders of model and tokenizer, the file of the user's function, every source in the order of the request."""

    model: str = ""
    tokenizer: str | None = None
    formatting_func: str | None = None
    sources: tuple[SourcePlace, ...] = ()

    def plain(self) -> JsonObject:
        """For a JSON file."""
        return {**asdict(self), "sources": [asdict(source) for source in self.sources]}


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryCounts:
    """How many entries were read, and what became of them."""

    entries: int
    rows: int
    ledger: int = 0
    failed: int = 0
    filtered: int = 0
    cut_short: int = 0  # ledger lines that stand for a whole file, or for the rest of one
    without_end: int = 0  # rows in which nothing that carries loss ends in an end token
    shortened: int = 0  # rows with an answer of which the chat template leaves something out
    reasons: Mapping[str, int] = field(default_factory=dict)  # "stage: reason" -> ledger lines


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadName:
    """A column or key of the data that nothing reads."""

    records: int
    example: str  # the first record that has it


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTotals:
    """What one source has in the table."""

    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStatistics:
    """How the columns are spread, and the shares of the sources."""

    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, SourceTotals] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftCheck:
    """How many records were compared with the real processor, and why no more."""

    records: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableContent:
    """A hash of every row, and how many rows have no checksum of their text in it."""

    digest: str
    unchecked: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSummary:
    """Everything that measure.json says."""

    inputs: JsonObject  # only compared, hashed, and read by the properties below
    places: Places = field(default_factory=Places)
    mixture: Mapping[str, Mapping[str, float | None]] | None = None
    user_config: UserConfig = field(default_factory=dict)
    counts: EntryCounts
    unread: Mapping[str, UnreadName] = field(default_factory=dict)
    schemas: Mapping[str, int] = field(default_factory=dict)  # what records were read as
    content: TableContent | None = None
    files: tuple[tuple[int, str], ...] = ()  # number of the source, name of the file
    statistics: TableStatistics = field(default_factory=TableStatistics)
    copies: int = 0  # rows with the very text of another one
    measured_by: str = "rule"  # or processor
    check: DriftCheck = field(default_factory=DriftCheck)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    sums: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)  # size and checksum of each file

    @property
    def settings(self) -> JsonObject:
        """The processor's settings that it was measured with, as `settings_state` gives them."""
        return self.inputs.get("settings", {})  # type: ignore[no-any-return]

    @property
    def model_type(self) -> str | None:
        """The family that it was measured for."""
        return self.settings.get("model_type")

    @property
    def data(self) -> JsonObject:
        """What identifies each data file."""
        return self.inputs["data"]  # type: ignore[no-any-return]

    @property
    def limits(self) -> MediaLimits:
        """The media limits that it was measured with."""
        return MediaLimits(**self.inputs.get("request", {}).get("limits", {}))

    @property
    def max_sample_length(self) -> int | None:
        """The filter by length that it was measured with."""
        return self.inputs["request"]["filters"]["max_sample_length"]  # type: ignore[no-any-return]

    def to_json(self) -> JsonObject:
        """The content of measure.json."""
        return asdict(self)


DESCRIBED = (
    "tokens",
    "text_tokens",
    "image_tokens",
    "video_tokens",
    "images",
    "videos",
    "frames",
    "objects",
    "patches",
    "supervised_tokens",
)


_FEW_SUPERVISED = 0.02  # of all tokens: less is said
_NAMED = 8  # columns and keys that nothing reads
_MANY_COPIES = 0.01  # of all records: more are said


def describe(values: np.ndarray) -> dict[str, float]:
    """Mean, spread and percentiles of one column.

    >>> describe(np.array([1, 2, 3]))["median"]
    2.0
    """
    if len(values) == 0:
        return {}
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return {
        "mean": float(values.mean()),
        "median": float(p50),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        "p95": float(p95),
        "p99": float(p99),
        "total": float(values.sum()),
    }


def unread_note(unread: Mapping[str, UnreadName]) -> tuple[str, ...]:
    """Which columns and keys of the data nothing reads.

    >>> unread_note({"mood": UnreadName(records=2, example="a7")})[0].partition(";")[0]
    'unused columns or keys in the data: mood (2 records, first a7)'
    """
    if not unread:
        return ()
    named = [f"{name} ({one.records:,} records, first {one.example})" for name, one in unread.items()]
    more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
    return (
        f"unused columns or keys in the data: {', '.join(named[:_NAMED])}{more}; "
        "--columns maps them, --strict-columns refuses records that have any",
    )


def data_notes(summary: MeasureSummary) -> tuple[str, ...]:
    """What a user should know about what is trained."""
    counts, columns, copies = summary.counts, summary.statistics.columns, summary.copies
    rows, notes = counts.rows, []
    supervised, tokens = columns["supervised_tokens"]["total"], columns["tokens"]["total"]
    if supervised < _FEW_SUPERVISED * tokens:
        notes.append(
            f"only {percent(supervised / tokens)} of all tokens are supervised ({supervised:,.0f} of {tokens:,.0f}): "
            "answers are short compared to prompts and media"
        )
    if copies > _MANY_COPIES * rows:
        notes.append(f"{copies:,} of {rows:,} records have the same text as another one")
    if number := counts.without_end:
        whose = "any sample" if number == rows else f"{number:,} of {rows:,} samples"
        notes.append(
            f"no supervised text in {whose} ends with an EOS token, so the model is not trained to stop: "
            "add_eos appends one, except to input_ids"
        )
    if number := counts.shortened:
        notes.append(
            f"the chat template drops part of the answer (usually reasoning) in {number:,} of {rows:,} samples: "
            "that part is not trained"
        )
    return (*notes, *unread_note(summary.unread))


def table_statistics(table: CostTable) -> TableStatistics:
    """Statistics of every described column, one column in memory at a time, and the sources' shares."""
    tokens = table.column("tokens")
    sources = table.source_codes()
    by_source = {
        name: SourceTotals(rows=int((sources.codes == code).sum()), tokens=int(tokens[sources.codes == code].sum()))
        for code, name in enumerate(sources.names)
    }
    return TableStatistics(columns={name: describe(table.column(name)) for name in DESCRIBED}, sources=by_source)


def count_copies(checks: np.ndarray, tokens: np.ndarray) -> int:
    """Rows whose text another one has, by their checksums of 32 bits and their tokens; some have no checksum.

    >>> count_copies(np.array([7, 7, 9, 7, 0, 0]), np.array([5, 5, 5, 6, 5, 5]))
    1
    """
    known = (checks + (tokens.astype(np.int64) << 32))[checks != 0]
    return len(known) - len(np.unique(known))
