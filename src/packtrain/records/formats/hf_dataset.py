"""Hugging Face datasets: folders made by `save_to_disk`, read with arrow alone, and anything `load_dataset` loads.

A dataset on the hub that is streamed is read from its files at one commit, where these are of a format of ours.

Media are never decoded: they arrive as {"bytes", "path"}.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packtrain.core.errors import ConfigError, PacktrainError, RecordError
from packtrain.records.formats.source_files import Format, expand_braces, kind_of_name
from packtrain.records.formats.splits import STATE_FILE, check_split, is_saved_dataset, saved_files, split_folder
from packtrain.records.formats.tables import Arrow
from packtrain.records.source import Entry, SourceSpec, Unit
from packtrain.records.span import Plain

STREAM_BROKE = "stream broke, the rest of the dataset is missing"
NO_ROW = "the dataset has no such row"
# What a builder's config has beside settings of how its files are read.
_NO_SETTINGS = frozenset({"name", "version", "data_dir", "data_files", "description", "features", "columns"})
_SCHEME = "hf://"
_NUMBERED = re.compile(r"(.*-)(\d+)(-of-\d+\D*)")


class HFDataset(Format):
    """Reads Hugging Face datasets."""

    rows_per_unit = 256
    bytes_per_unit = 16 << 20

    def __init__(self) -> None:
        self._arrow = Arrow()
        self._loaded: dict[SourceSpec, Any] = {}  # datasets that are read at single places
        self._cursors: dict[SourceSpec, tuple[int, Iterator[Any]]] = {}  # streams, and the row that comes next
        self._lock = threading.Lock()

    def units(self, spec: SourceSpec) -> Iterator[Unit]:
        """Ranges of rows of saved arrow files, or the rows themselves where they can only be streamed."""
        if not is_saved_dataset(spec.path):
            yield from self._streamed_units(spec)
            return
        folder = split_folder(spec)
        try:
            files = saved_files(folder)
        except RecordError as error:
            yield Unit(file=os.path.join(folder, STATE_FILE), payload=error)
            return
        for file in files:
            yield from self._arrow.units_of_file(file)

    def read(self, spec: SourceSpec, unit: Unit) -> Iterator[Entry]:
        if not isinstance(unit.payload, list):
            yield from self._arrow.read(spec, unit)
            return
        for row, value in enumerate(unit.payload, start=unit.first):
            yield _row_entry(f"{unit.file}:{row}", row, value)

    def read_at(self, spec: SourceSpec, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The row of that number. A stream moves forward to it, and begins again where it has passed it."""
        if in_files(spec):
            return self._arrow.read_at(spec, file, plain, at, origin)
        try:
            with self._lock:
                return _row_entry(
                    origin, at, self._streamed_row(spec, at) if spec.streaming else self._random_row(spec, at)
                )
        except PacktrainError:
            raise
        except Exception as error:  # the library raises whatever its many readers and the network raise
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _random_row(self, spec: SourceSpec, at: int) -> Any:
        """A row of a dataset that `load_dataset` keeps in files of its own."""
        if spec not in self._loaded:
            self._loaded[spec] = _split(spec).with_format("arrow")  # so that no medium is decoded
        rows = self._loaded[spec]
        return rows[at].to_pylist()[0] if 0 <= at < len(rows) else RecordError("read", NO_ROW, str(at))

    def _streamed_row(self, spec: SourceSpec, at: int) -> Any:
        """A row of a stream."""
        position, rows = self._cursors.pop(spec, (0, iter(())))  # taken away while in use: a fault ends it
        if spec not in self._loaded:
            self._loaded[spec] = _stream(spec)
        if position == 0 or position > at:
            position, rows = 0, iter(self._loaded[spec])
        for row in rows:
            position += 1
            if position > at:
                self._cursors[spec] = position, rows
                return row
        return RecordError("read", NO_ROW, str(at))

    def count(self, spec: SourceSpec, unit: Unit) -> int:
        return len(unit.payload) if isinstance(unit.payload, list) else self._arrow.count(spec, unit)

    def _streamed_units(self, spec: SourceSpec) -> Iterator[Unit]:
        """Units of streamed rows; a fault takes the place of the row at which the stream broke."""
        name = f"{os.path.basename(spec.path.rstrip('/')) if os.path.exists(spec.path) else spec.path}[{spec.split}]"
        rows: list[Any] = []
        size, first = 0, 0
        for row in _until_fault(iter(_stream(spec))):
            rows.append(row)
            size += _size(row)
            if len(rows) >= self.rows_per_unit or size >= self.bytes_per_unit:
                yield Unit(file=name, first=first, payload=rows)
                first += len(rows)
                rows, size = [], 0
        if rows:
            yield Unit(file=name, first=first, payload=rows)


@functools.lru_cache(maxsize=1024)
def in_files(spec: SourceSpec) -> bool:
    """Are the entries of a source in data files that we read, rather than in what `load_dataset` makes?"""
    return spec.format != "hf_dataset" or is_saved_dataset(spec.path)


@functools.cache
def hub_revision(spec: SourceSpec) -> str | None:
    """The commit of a dataset on the hub, asked once per process; None for local data, and where it cannot be asked."""
    if spec.format != "hf_dataset" or os.path.exists(spec.path):
        return None
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(spec.path).sha)
    except Exception:  # offline, or no such dataset, which loading it will say
        return None


def _row_entry(origin: str, row: int, value: Any) -> Entry:
    """A row of what `load_dataset` makes. Streamed it may have other Python types than at random: so no checksum."""
    if isinstance(value, RecordError):
        return Entry(origin=origin, error=value, at=row)
    return Entry(origin=origin, value=value, at=row, padded=True)


def hub_files(spec: SourceSpec) -> str | None:
    """The files of one split of a dataset on the hub, as a pattern of URLs that name the commit.

    None where `load_dataset` makes the rows of something else than files of one format that we read as they are.
    """
    builder = _call_datasets(spec, "load_dataset_builder")
    splits = builder.config.data_files or {}
    settings = [field for field in dataclasses.fields(builder.config) if field.name not in _NO_SETTINGS]
    changed = [field.name for field in settings if getattr(builder.config, field.name) != field.default]
    names = [str(name) for files in splits.values() for name in files]
    kinds = {kind_of_name(name) for name in names}
    if changed or len(kinds) != 1 or None in kinds or not all(re.fullmatch(r"hf://[^*?\[\]{},]+", n) for n in names):
        return None
    check_split(spec, [str(split) for split in splits])
    return _pattern([str(name) for name in splits[spec.split]])


def _pattern(names: Sequence[str]) -> str:
    """These names in their order.

    >>> _pattern(["hf://d/a-08-of-11.x", "hf://d/a-09-of-11.x", "hf://d/a-10-of-11.x"])
    'hf://d/a-{08..10}-of-11.x'
    >>> _pattern(["hf://d/b.x", "hf://d/c/a.x"])
    'hf://d/{b.x,c/a.x}'
    """
    first, last = _NUMBERED.fullmatch(names[0]), _NUMBERED.fullmatch(names[-1])
    if len(names) == 1:
        return names[0]
    if first and last:
        pattern = f"{first[1]}{{{first[2]}..{last[2]}}}{first[3]}"
        if expand_braces(pattern) == list(names):
            return pattern
    inside = [os.path.dirname(name.removeprefix(_SCHEME)) for name in names]
    folder = f"{_SCHEME}{os.path.commonpath(inside)}/"
    return folder + "{" + ",".join(name.removeprefix(folder) for name in names) + "}"


def _call_datasets(spec: SourceSpec, function: str, **options: Any) -> Any:
    """Call a function of the datasets package on a dataset."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"dataset {spec.path}",
            got="no module named 'datasets'",
            expected="the datasets package",
            fix="pip install packtrain[train]",
        ) from error
    try:
        return getattr(datasets, function)(spec.path, spec.subset, revision=hub_revision(spec), **options)
    except Exception as error:  # the library raises whatever its many readers and the network raise
        raise ConfigError(
            f"dataset {spec.path}",
            got=f"{type(error).__name__}: {error}",
            expected="a folder, or a Hugging Face hub dataset without a loading script",
            fix="check the name, the network and, for a private dataset, your login",
        ) from error


def _split(spec: SourceSpec) -> Any:
    """Load one split with `load_dataset`."""
    splits = _call_datasets(spec, "load_dataset", streaming=spec.streaming)
    check_split(spec, [str(split) for split in splits])
    return splits[spec.split]


def _stream(spec: SourceSpec) -> Any:
    """The rows that `load_dataset` streams, or downloads first; decoding is switched off."""
    split = _split(spec)
    stream = split if spec.streaming else split.to_iterable_dataset()
    # Where the features are not declared they are inferred from the first rows, and then hold no media to decode.
    return stream.decode(False) if stream.features else stream


def _until_fault(rows: Iterator[Any]) -> Iterator[Any]:
    """Rows, and a RecordError in the place of the one that could not be had."""
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # as above
            yield RecordError("read", STREAM_BROKE, f"{type(error).__name__}: {error}"[:300])
            return
        yield row


def _size(value: Any) -> int:
    """Approximate memory of a row in bytes."""
    if isinstance(value, str | bytes):
        return 48 + len(value)
    if isinstance(value, Mapping):
        return 64 + sum(_size(item) for item in value.values())
    if isinstance(value, list | tuple):
        return 64 + sum(_size(item) for item in value)
    return 32
