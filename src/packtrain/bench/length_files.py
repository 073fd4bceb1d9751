"""Reads the lengths of a user's samples from whatever file holds them."""

from __future__ import annotations

import csv
import itertools
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.bench.lengths import samples_from
from packtrain.core.errors import ConfigError, DataError
from packtrain.measuring.table import COSTS
from packtrain.packing.resources import Samples

_MOST = 2**31 - 1  # of anything in one sample: squares must fit 64 bits
Columns = Mapping[str, np.ndarray]

# What we look for, and the columns that say it: the first that are all there, added up.
_SAID_BY: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "tokens": (
        *(("tokens",), ("total_tokens",), ("text_tokens", "image_tokens", "video_tokens")),
        *(("text_tokens", "image_tokens"), ("text_tokens",)),
    ),
    "vision_tokens": (("vision_tokens",), ("image_tokens", "video_tokens"), ("image_tokens",)),
    "patches": (("patches",),),
    "largest_patches": (("max_patches_per_image",),),
    "images": (("images",), ("n_media",)),
    "videos": (("videos",),),
    "frames": (("frames",), ("n_frames",)),
    "supervised_tokens": (("supervised_tokens",),),
}
_NAMES = {name for choices in _SAID_BY.values() for names in choices for name in names}


def read_lengths(path: Path) -> Samples:
    """The samples of a .npz, .npy, .csv or .parquet file, of a cost table's folder, or of a text of whole numbers."""
    if not path.exists():
        raise ConfigError("--lengths", got=f"{path} (not there)", expected="a file of lengths, or a cost table")
    file = path / COSTS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("--lengths", got=str(path), expected=f"a file of lengths, or a folder with {COSTS}")
    read = _READERS.get(file.suffix.lower(), _text)
    try:
        columns = read(file)
    except _BROKEN as error:
        raise DataError(
            str(file),
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected=f"lengths as {_KIND.get(file.suffix.lower(), 'whole numbers, one for each sample')}",
            fix="pickled objects are not loaded: save plain integer arrays" if "object" in str(error).lower() else "",
        ) from None
    return _samples(file, columns)


def _npz(path: Path) -> Columns:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files if name in _NAMES}


def _npy(path: Path) -> Columns:
    return {"tokens": np.load(path, allow_pickle=False, mmap_mode="r")}


def _csv(path: Path) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        wanted = [(at, name) for at, name in enumerate(header) if name in _NAMES]
        cells = [[row[at] for at, _ in wanted] for row in rows if row]
    return {name: np.array([float(row[k]) for row in cells]) for k, (_, name) in enumerate(wanted)}


def _parquet(path: Path) -> Columns:
    with pq.ParquetFile(path) as file:
        table = file.read(columns=[name for name in file.schema_arrow.names if name in _NAMES])
    return {name: table[name].to_numpy() for name in table.column_names}


def _text(path: Path) -> Columns:
    with path.open(encoding="utf-8") as file:
        words = itertools.chain.from_iterable(line.split() for line in file)
        return {"tokens": np.fromiter((int(word) for word in words), np.int64)}


_READERS: Mapping[str, Callable[[Path], Columns]] = {".npz": _npz, ".npy": _npy, ".csv": _csv, ".parquet": _parquet}
_KIND = {
    ".npz": "arrays called tokens, or text_tokens and image_tokens",
    ".npy": "one array of integers",
    ".csv": "a column called tokens or total_tokens",
    ".parquet": "a column called tokens",
}
# What a damaged or hostile file makes the readers raise.
_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, IndexError, OverflowError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, csv.Error, pa.ArrowException),
)


def _samples(path: Path, columns: Columns) -> Samples:
    checked = {name: _checked(f"{path}: {name}", column) for name, column in columns.items()}
    if len({len(column) for column in checked.values()}) > 1:
        counts = ", ".join(f"{name}: {len(column):,}" for name, column in checked.items())
        raise DataError(str(path), got=counts, expected="columns of equal length")
    found = {}
    for name, choices in _SAID_BY.items():
        said_by = next((names for names in choices if set(names) <= set(checked)), None)
        if said_by is not None:
            found[name] = np.sum([checked[column] for column in said_by], axis=0)
    if "tokens" not in found:
        names = ", ".join(checked) or "no length columns"
        raise DataError(str(path), got=names, expected="tokens, total_tokens, or text_tokens and image_tokens")
    tokens = found.pop("tokens")
    _refuse(f"{path}: tokens", tokens, (tokens < 1) | (tokens > _MOST), f"an integer from 1 to {_MOST:,}")
    if "vision_tokens" in found:
        _refuse(f"{path}: vision tokens", found["vision_tokens"], found["vision_tokens"] > tokens, "at most all tokens")
    return samples_from(tokens, **found)


def _checked(where: str, values: np.ndarray) -> np.ndarray:
    """Whole numbers of 64 bits, none negative."""
    if values.ndim != 1 or not len(values):
        raise DataError(where, got=f"an array of shape {values.shape}", expected="one number for each sample")
    if values.dtype.kind not in "iuf":
        raise DataError(where, got=f"values of type {values.dtype}", expected="whole numbers")
    good = (values >= 0) & (values <= _MOST)
    if values.dtype.kind == "f":
        good &= np.floor(values) == values
    _refuse(where, values, ~good, f"an integer from 0 to {_MOST:,}")
    return np.ascontiguousarray(values, dtype=np.int64)


def _refuse(where: str, values: np.ndarray, bad: np.ndarray, expected: str) -> None:
    rows = np.flatnonzero(bad)
    if len(rows):
        raise DataError(f"{where} of sample {rows[0]}", got=values[rows[0]], expected=expected)
