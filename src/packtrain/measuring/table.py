"""The cost table: what every record of a dataset will occupy, column by column, as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packtrain.core.artifacts import read_json, whole_content, write_json
from packtrain.core.checksums import checks_here, require_sums
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import ArtifactError, ConfigError, PathError, nearest
from packtrain.core.numbers import counted
from packtrain.core.values import MediaLimits
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA
from packtrain.measuring.measure_summary import MeasureSummary, Places, UserConfig

if TYPE_CHECKING:
    from packtrain.measuring.request import Request

KIND, VERSION = "cost-table", 9
COSTS, MEDIA, SUMMARY, LEDGER = "costs.parquet", "media.parquet", "measure.json", "ledger.jsonl"
JOURNAL = ".measure.journal"  # of an incomplete measurement
_TABLE = "a folder written by packtrain measure"


@dataclass(frozen=True, slots=True)
class SourceCodes:
    """The source of every row as a small integer."""

    names: tuple[str, ...]
    codes: np.ndarray


class DataFile(NamedTuple):
    """A file that rows are in."""

    source: int  # number of its source in the request
    file: str


class CostTable:
    """Costs of a measured dataset. Columns are read when they are asked for."""

    def __init__(
        self,
        folder: Path,
        summary: MeasureSummary,
        *,
        columns: Mapping[str, np.ndarray] | None = None,  # those that are not as in the file
        rows: np.ndarray | None = None,  # positions kept of the file's rows; None keeps all
        limits: MediaLimits | None = None,
        dropped: Mapping[int, str] | None = None,
    ) -> None:
        self.folder, self.summary = folder, summary
        self._columns, self._rows = columns or {}, rows
        self.limits = limits or MediaLimits()  # what `with_limits` has set on top of those measured with
        self.dropped = dropped or {}  # index -> reason, of rows that `with_limits` and `filtered` leave out

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Open a measured folder, or the costs.parquet inside it."""
        folder = Path(path)
        if folder.name == COSTS:
            folder = folder.parent
        if not (folder / SUMMARY).is_file():
            raise _not_measured(folder)
        summary = read_summary(folder)
        for name, schema in ((COSTS, COST_SCHEMA), (MEDIA, MEDIA_SCHEMA)):
            rows = _check_columns(folder / name, schema)
            if name == COSTS and rows != summary.counts.rows:
                raise ArtifactError(
                    str(folder / name),
                    got=f"{rows:,} rows",
                    expected=f"the {summary.counts.rows:,} rows of {SUMMARY}",
                    fix="measure again",
                )
        if checks_here():  # pages have checksums of their own, but what describes them has none
            require_sums(folder, {name: summary.sums.get(name) for name in (COSTS, MEDIA)}, fix="measure again")
        return cls(folder, summary)

    def __repr__(self) -> str:
        ledger = self.summary.counts.ledger
        return f"CostTable({str(self.folder)!r}: {counted(len(self), 'sample')}, {ledger:,} in the ledger)"

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return self.summary.counts.rows

    def column(self, name: str) -> np.ndarray:
        """One column; strings as an object array."""
        if name not in COST_SCHEMA.names:
            raise ConfigError(
                "column", got=name, expected=", ".join(COST_SCHEMA.names), fix=nearest(name, COST_SCHEMA.names)
            )
        if name in self._columns:
            return self._columns[name]
        values = _numpy(self.folder / COSTS, name)
        return values if self._rows is None else values[self._rows]

    def rows(self, names: Sequence[str], positions: np.ndarray) -> dict[str, np.ndarray]:
        """Some columns of some rows, given by increasing position; only the row groups that hold them are read."""
        fresh = [name for name in names if name not in self._columns]
        columns = {name: self._columns[name][positions] for name in names if name in self._columns}
        if fresh:
            read = _take(self.folder / COSTS, fresh, positions if self._rows is None else self._rows[positions])
            columns |= {name: np.asarray(read[name].to_numpy()) for name in fresh}
        return {name: columns[name] for name in names}

    def positions_of(self, file_rows: np.ndarray) -> np.ndarray:
        """Where rows of the file are in this table; those that `with_limits` dropped are left out."""
        return file_rows if self._rows is None else np.flatnonzero(np.isin(self._rows, file_rows))

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The data files that the `file` column numbers, in reading order."""
        places = self.places.sources
        if not places:  # a table that was not measured
            return tuple(DataFile(*file) for file in self.summary.files)
        return tuple(DataFile(source, places[source].file(name)) for source, name in self.summary.files)

    @property
    def user_config(self) -> UserConfig:
        """The settings that it was measured with, as a config says them, by section."""
        return self.summary.user_config

    @property
    def places(self) -> Places:
        """Where model and data lay when the table was last measured or found unchanged."""
        return self.summary.places

    @property
    def plugins(self) -> tuple[str, ...]:
        """Modules that register the family of the model that was measured for."""
        return tuple(self.summary.inputs.get("request", {}).get("plugins", ()))

    def request(self) -> Request:
        """What was asked of the measurement, with the shares and the limits that hold now: the way back to the data."""
        from packtrain.measuring.request import Request

        described, mixture = self.summary.inputs["request"], self.summary.mixture
        measured = Request.from_description(described, self.places, mixture)
        return replace(measured, limits=self.limits.over(measured.limits))

    def source_codes(self) -> SourceCodes:
        """The source column as names and integers."""
        with _whole(self.folder / COSTS):
            column = _read(self.folder / COSTS, "source").combine_chunks()
        if self._rows is not None:
            column = column.take(pa.array(self._rows))
        encoded = pc.dictionary_encode(column)
        encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        return SourceCodes(tuple(encoded.dictionary.to_pylist()), encoded.indices.to_numpy(zero_copy_only=False))

    def media(self, name: str) -> np.ndarray:
        """One column of what the media headers said; `record` refers to the `index` column."""
        return _numpy(self.folder / MEDIA, name)

    def with_limits(
        self,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        video_min_pixels: int | None = None,
        video_max_pixels: int | None = None,
        max_img_size: int | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        max_frames: int | None = None,
    ) -> CostTable:
        """The costs under other media limits, equal to measuring again, without touching the data."""
        from packtrain.measuring.relimit import relimit

        limits = MediaLimits(
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            video_min_pixels=video_min_pixels,
            video_max_pixels=video_max_pixels,
            max_img_size=max_img_size,
            num_frames=num_frames,
            fps=fps,
            max_frames=max_frames,
        )
        # Always from what was measured: the limits of an earlier call are applied again together with these.
        limits = limits.over(self.limits)
        columns, rows, dropped = relimit(CostTable(self.folder, self.summary), limits)
        return CostTable(self.folder, self.summary, columns=columns, rows=rows, limits=limits, dropped=dropped)

    def largest_image(self) -> int | None:
        """Patches of the largest image, all its tiles together; None where they cannot be told from headers."""
        from packtrain.measuring.relimit import largest_image

        return largest_image(self)

    def filtered(self, *, max_images_per_sample: int | None = None, max_sample_length: int | None = None) -> CostTable:
        """The rows that measuring with these filters would have kept."""
        keep, dropped = np.ones(len(self), bool), dict(self.dropped)
        index = self.column("index")
        for column, most, reason in (
            ("images", max_images_per_sample, "more images than max_images_per_sample"),
            ("tokens", max_sample_length, "longer than max_sample_length"),
        ):
            above = keep & (self.column(column) > most) if most is not None else np.zeros(len(self), bool)
            dropped |= {int(one): f"filter: {reason}" for one in index[above]}
            keep &= ~above
        columns = {name: values[keep] for name, values in self._columns.items()}
        rows = (np.arange(len(self)) if self._rows is None else self._rows)[keep]
        return CostTable(self.folder, self.summary, columns=columns, rows=rows, limits=self.limits, dropped=dropped)


def read_summary(folder: Path) -> MeasureSummary:
    """measure.json of a folder, as it was written."""
    body = read_json(folder / SUMMARY, KIND, VERSION, checked=True, fix="measure again")
    with whole_content(folder / SUMMARY, fix="measure again"):
        return from_json(MeasureSummary, body, ignore=("kind", "version"))


def write_summary(folder: Path, summary: MeasureSummary) -> None:
    """measure.json of a folder, with a checksum of itself."""
    write_json(folder / SUMMARY, KIND, VERSION, summary.to_json(), checked=True)


def _numpy(path: Path, name: str) -> np.ndarray:
    with _whole(path):
        return np.asarray(_read(path, name).to_numpy())


def _read(path: Path, name: str) -> pa.ChunkedArray:
    """One column, its pages compared with the checksums that parquet keeps of them."""
    return pq.read_table(path, columns=[name], page_checksum_verification=True)[name]


def _take(path: Path, names: Sequence[str], positions: np.ndarray) -> pa.Table:
    """Rows of a parquet file by increasing position, row group by row group."""
    with _whole(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        edges = np.searchsorted(positions, starts)
        parts = [
            file.read_row_group(group, columns=list(names)).take(pa.array(positions[a:b] - starts[group]))
            for group, (a, b) in enumerate(pairwise(edges.tolist()))
            if b > a
        ]
        empty = file.schema_arrow.empty_table().select(list(names))
    return pa.concat_tables(parts) if parts else empty


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """What reading a damaged file raises, with its name."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ArtifactError(str(path), got=str(error), expected="a parquet file", fix="measure again") from None


def _check_columns(path: Path, schema: pa.Schema) -> int:
    """Refuse other columns and other types; the number of rows otherwise."""
    with _whole(path), pq.ParquetFile(path) as file:
        columns, footer = file.schema_arrow, file.metadata
    if columns.names != schema.names:
        raise ArtifactError(
            str(path), got=", ".join(columns.names), expected=", ".join(schema.names), fix="measure again"
        )
    for name in _missing(footer) if schema is COST_SCHEMA else ():
        raise ArtifactError(str(path), got=f"rows without {name}", expected="a value in every row", fix="measure again")
    for field in schema:
        kind = columns.field(field.name).type
        if kind != field.type:
            got, expected = f"{field.name} as {kind}", f"{field.name} as {field.type}"
            raise ArtifactError(str(path), got=got, expected=expected, fix="measure again")
    return int(footer.num_rows)


def _missing(footer: Any) -> Iterator[str]:
    """Columns in which some row has no value, by the statistics that parquet keeps."""
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.statistics is not None and column.statistics.null_count:
                yield column.path_in_schema


def _not_measured(path: Path) -> ArtifactError:
    """No cost table, and which command makes one."""
    if path.is_file():
        command = f"packtrain measure {path} --model MODEL --out costs"
        return PathError(str(path), got="a file", expected=_TABLE, fix=f"measure the data first: {command}")
    if not path.exists():
        got, fix = "no such folder", "measure first: packtrain measure DATA --model MODEL --out " + str(path)
    elif (path / JOURNAL).exists():
        fix = "the same packtrain measure command continues it"
        return ArtifactError(str(path), got="an incomplete measurement", expected=_TABLE, fix=fix)
    else:
        got, fix = f"no {SUMMARY}", "use the folder that packtrain measure wrote (--out)"
    return PathError(str(path), got=got, expected=_TABLE, fix=fix)
