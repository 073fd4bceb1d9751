"""Lengths of samples to pack: generated sets in the shape of real multimodal data, and lengths from a user's file."""

from __future__ import annotations

import csv
import itertools
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.core.errors import ConfigError, DataError, nearest
from packtrain.core.seeds import stream
from packtrain.measuring.table import COSTS
from packtrain.packing.resources import Samples

LVIS_SAMPLES = 99_388
PATCHES_PER_TOKEN = 4  # of the model whose work is predicted: 2 x 2 patches become one token

# Text tokens of an instruction set about photographs: (share of samples below, tokens). Half of the texts are under 520
# tokens, one in twenty is above 3,300, one in a thousand above 19,000. Between the points the logarithm is linear.
_TEXT = (
    *((0.0, 54), (0.125, 54), (0.15, 75), (0.25, 150), (0.35, 250), (0.5, 520), (0.65, 800), (0.75, 1_180)),
    *((0.85, 1_780), (0.9, 2_260), (0.95, 3_320), (0.97, 4_470), (0.98, 5_540), (0.99, 7_680), (0.995, 10_600)),
    *((0.998, 15_700), (0.999, 19_700), (0.9995, 24_100), (0.9999, 35_700), (1.0, 66_000)),
)
# Tokens of its photographs: a broad hump around 350. Thumbnails come with the shortest texts.
_PHOTO = ((0.0, 95), (0.01, 197), (0.05, 243), (0.2, 297), (0.5, 352), (0.8, 408), (0.95, 460), (1.0, 534))
_SHORTEST = 0.125
_THUMBNAIL = ((0.0, 14), (0.05, 30), (0.1, 51), (0.2, 126), (0.3, 244), (0.5, 342), (0.8, 379), (1.0, 534))


def samples_from(
    tokens: np.ndarray,
    *,
    vision_tokens: np.ndarray | None = None,
    patches: np.ndarray | None = None,
    largest_patches: np.ndarray | None = None,
    images: np.ndarray | None = None,
    videos: np.ndarray | None = None,
    frames: np.ndarray | None = None,
    supervised_tokens: np.ndarray | None = None,
) -> Samples:
    """All columns that packing reads. What is not given is 0, apart from these:

    patches are four to a vision token, the images of a sample are equally large, and half of its text is supervised.
    """
    none = np.zeros(len(tokens), np.int64)
    vision = none if vision_tokens is None else vision_tokens
    pictures = none if images is None else images
    rows = PATCHES_PER_TOKEN * vision if patches is None else patches
    largest = rows // np.maximum(pictures, 1) if largest_patches is None else largest_patches
    supervised = np.maximum((tokens - vision) // 2, 1) if supervised_tokens is None else supervised_tokens
    return Samples(
        {
            "tokens": tokens,
            "vision_tokens": vision,
            "samples": np.ones(len(tokens), np.int64),
            "attention": tokens * tokens,
            "patches": rows,
            "images": pictures,
            "videos": none if videos is None else videos,
            "frames": none if frames is None else frames,
            "supervised_tokens": supervised,
            "largest_patches": largest,
            "squared_patches": rows * largest,
            "longest": tokens,
        }
    )


def lvis_tokens(samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all samples, and how many of them are image tokens."""
    random = stream(seed, "lvis shape")
    # One text from each of `samples` equal shares, so that totals hardly depend on the seed.
    share = (random.permutation(samples) + 0.5) / samples
    text, chosen = _quantiles(_TEXT, share), random.random(samples)
    image = _quantiles(_PHOTO, chosen)
    shortest = share < _SHORTEST
    image[shortest] = _quantiles(_THUMBNAIL, chosen[shortest])
    return text + image, image


def lvis_shape(samples: int = LVIS_SAMPLES, seed: int = 0) -> Samples:
    """Instructions about one photograph each: most short, some very long.

    >>> tokens = lvis_shape()["tokens"]
    >>> round(int(tokens.sum()) / 1e6), int(np.percentile(tokens, 95)) // 100, int((tokens > 20_000).sum()) // 10
    (133, 36, 10)
    """
    tokens, image = lvis_tokens(samples, seed)
    return samples_from(tokens, vision_tokens=image, images=np.ones(samples, np.int64))


def _quantiles(points: tuple[tuple[float, int], ...], at: np.ndarray) -> np.ndarray:
    """Whole numbers of a distribution given by points of its quantile function."""
    shares, values = zip(*points, strict=True)
    return np.rint(np.exp(np.interp(at, shares, np.log(values)))).astype(np.int64)


# ---- mixtures


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """One kind of sample; ranges include both ends."""

    text: int  # median
    spread: float  # of the logarithm of text tokens
    images: tuple[int, int] = (0, 0)
    image_tokens: tuple[int, int] = (1, 1)  # each; the images of one sample are equally large
    steps: tuple[int, int] = (0, 0)  # of a video: pairs of frames, each as large as an image


_KINDS: Mapping[str, _Kind] = {
    "question": _Kind(text=150, spread=0.4),
    "text": _Kind(text=900, spread=0.9),
    "snapshot": _Kind(text=140, spread=0.2, images=(1, 1), image_tokens=(200, 400)),
    "photo": _Kind(text=110, spread=0.6, images=(1, 1), image_tokens=(200, 1_300)),
    "chart": _Kind(text=70, spread=0.7, images=(1, 1), image_tokens=(600, 1_500)),
    "document": _Kind(text=300, spread=0.7, images=(2, 8), image_tokens=(200, 800)),
    "video": _Kind(text=120, spread=0.6, steps=(4, 24), image_tokens=(70, 180)),
}
# Shares of samples. Balanced: tokens, vision tokens and images run out at about the same time.
MIXTURES: Mapping[str, Mapping[str, float]] = {
    "everyday": {"question": 0.15, "snapshot": 0.40, "chart": 0.12, "document": 0.10, "video": 0.01, "text": 0.22},
    "balanced": {"text": 0.40, "photo": 0.20, "chart": 0.15, "document": 0.20, "video": 0.05},
    "documents": {"text": 0.40, "photo": 0.10, "chart": 0.10, "document": 0.40},
    "video": {"text": 0.45, "photo": 0.20, "chart": 0.05, "document": 0.05, "video": 0.25},
}


def mixture(name: str, samples: int, seed: int = 0) -> Samples:
    """A mixture of texts, photographs, charts, documents of several pages and videos, shuffled.

    >>> samples = mixture("video", 1_000)
    >>> len(samples), bool((samples["vision_tokens"] < samples["tokens"]).all()), int(samples["videos"].sum())
    (1000, True, 250)
    """
    if name not in MIXTURES:
        raise ConfigError("mixture", got=name, expected=", ".join(MIXTURES), fix=nearest(name, MIXTURES))
    random = stream(seed, "mixture", name)
    shares = MIXTURES[name]
    ends = np.rint(np.cumsum(list(shares.values())) * samples).astype(np.int64)
    counts = np.diff(ends, prepend=0)
    parts = [_draw_kind(_KINDS[kind], int(count), random) for kind, count in zip(shares, counts, strict=True)]
    return Samples({name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns}).take(
        random.permutation(samples)
    )


def _draw_kind(kind: _Kind, count: int, random: np.random.Generator) -> Samples:
    text = np.maximum(np.rint(np.exp(random.normal(np.log(kind.text), kind.spread, count))), 8).astype(np.int64)
    images = random.integers(*kind.images, size=count, endpoint=True)
    steps = random.integers(*kind.steps, size=count, endpoint=True)
    low, high = np.log(kind.image_tokens)
    each = np.rint(np.exp(random.uniform(low, high, count))).astype(np.int64)
    vision = (images + steps) * each
    return samples_from(
        text + vision,
        vision_tokens=vision,
        largest_patches=np.where(vision > 0, PATCHES_PER_TOKEN * each, 0),
        images=images,
        videos=np.minimum(steps, 1),
        frames=2 * steps,
    )


# ---- files

_MOST = 2**31 - 1  # of anything in one sample: squares must fit 64 bits
Columns = Mapping[str, np.ndarray]

# What packing reads, and the columns that give it: the first that are all there, added up.
_COLUMNS_OF: Mapping[str, tuple[tuple[str, ...], ...]] = {
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
_NAMES = {name for choices in _COLUMNS_OF.values() for names in choices for name in names}


def read_lengths(path: Path) -> Samples:
    """The samples of a .npz, .npy, .csv or .parquet file, of a cost table's folder, or of a text of integers."""
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
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name in _NAMES}


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
    checked = {name: _check_column(f"{path}: {name}", column) for name, column in columns.items()}
    if len({len(column) for column in checked.values()}) > 1:
        counts = ", ".join(f"{name}: {len(column):,}" for name, column in checked.items())
        raise DataError(str(path), got=counts, expected="columns of equal length")
    given = {}
    for name, choices in _COLUMNS_OF.items():
        chosen = next((names for names in choices if set(names) <= set(checked)), None)
        if chosen is not None:
            given[name] = np.sum([checked[column] for column in chosen], axis=0)
    if "tokens" not in given:
        names = ", ".join(checked) or "no length columns"
        raise DataError(str(path), got=names, expected="tokens, total_tokens, or text_tokens and image_tokens")
    tokens = given.pop("tokens")
    _refuse(f"{path}: tokens", tokens, (tokens < 1) | (tokens > _MOST), f"an integer from 1 to {_MOST:,}")
    if "vision_tokens" in given:
        _refuse(f"{path}: vision tokens", given["vision_tokens"], given["vision_tokens"] > tokens, "at most all tokens")
    return samples_from(tokens, **given)


def _check_column(where: str, values: np.ndarray) -> np.ndarray:
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
