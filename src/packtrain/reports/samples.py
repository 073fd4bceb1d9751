"""sample_stats.jsonl: one line for each sample, written from chunks of columns, so that it may have 100 million."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NUMBERS = (
    *("tokens", "text_tokens", "image_tokens", "video_tokens", "images", "frames", "objects", "patches"),
    "supervised_tokens",
)
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_ESCAPE = json.JSONEncoder(ensure_ascii=True).encode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleChunk:
    """Some samples in dataset order, column by column, all of one length."""

    id: Sequence[str]
    source: Sequence[str]
    tokens: np.ndarray
    text_tokens: np.ndarray
    image_tokens: np.ndarray
    video_tokens: np.ndarray
    images: np.ndarray
    frames: np.ndarray
    objects: np.ndarray
    patches: np.ndarray
    supervised_tokens: np.ndarray
    pack: np.ndarray  # number of the first pack that holds the sample in the recommended packing, or -1
    why: Mapping[int, str] = field(default_factory=dict)  # position in the chunk -> why it is in no pack

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("id", "source", *NUMBERS, "pack")}
        assert len(set(lengths.values())) == 1, f"columns of different lengths: {lengths}"
        missing = np.flatnonzero(np.asarray(self.pack) < 0)
        assert set(missing.tolist()) == set(self.why), "every sample in no pack has a reason, and no other has one"


class SampleTable(Protocol):
    """What can give every sample of the dataset, a chunk at a time."""

    def chunks(self) -> Iterator[SampleChunk]:
        """Chunks in dataset order; each is used before the next is asked for."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SampleChunks:
    """A sample table over chunks that are there already."""

    parts: Sequence[SampleChunk]

    def chunks(self) -> Iterator[SampleChunk]:
        """One after the other."""
        return iter(self.parts)


def write_samples(path: Path, chunks: Iterable[SampleChunk]) -> int:
    """Write the lines and return how many there are. The caller makes the file appear whole."""
    lines = 0
    with path.open("wb") as file:
        for chunk in chunks:
            for start in range(0, len(chunk.id), _ROWS):
                file.write(_lines(chunk, start, min(start + _ROWS, len(chunk.id))))
            lines += len(chunk.id)
    return lines


_ROWS = 1 << 16  # formatted at once: some 20 MB of text, and offsets stay in 32 bits even for long names


def _lines(chunk: SampleChunk, start: int, stop: int) -> pa.Buffer:
    """Lines as one buffer. Only names go through Python; numbers are formatted and joined by column."""
    known: dict[str, bytes] = {}
    sources = [known.get(name) or known.setdefault(name, _string(name)) for name in chunk.source[start:stop]]
    packs = np.asarray(chunk.pack[start:stop])
    why = [b""] * (stop - start)
    for position in np.flatnonzero(packs < 0).tolist():
        why[position] = b', "why": ' + _string(chunk.why[start + position])
    pieces: list[object] = [
        b'{"id": ',
        pa.array([_string(name) for name in chunk.id[start:stop]], pa.large_binary()),
        b', "source": ',
        pa.array(sources, pa.large_binary()),
    ]
    for name in NUMBERS:
        pieces += [f', "{name}": '.encode(), _digits(getattr(chunk, name)[start:stop])]
    pack = pc.fill_null(_digits(packs, packs < 0), pa.scalar(b"null", pa.large_binary()))
    pieces += [b', "pack": ', pack, pa.array(why, pa.large_binary()), b"}\n"]
    pieces = [pa.scalar(piece, pa.large_binary()) if isinstance(piece, bytes) else piece for piece in pieces]
    lines = pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.large_binary()))
    return lines.buffers()[2] or pa.py_buffer(b"")


def _digits(values: np.ndarray, mask: np.ndarray | None = None) -> pa.Array:
    whole = pa.array(np.asarray(values).astype(np.int64, copy=False), mask=mask)
    return whole.cast(pa.large_string()).cast(pa.large_binary())


def _string(text: str) -> bytes:
    # Not only line ends of JSON: some readers end lines at U+2028 as well, and half a surrogate pair is no UTF-8.
    return (_ENCODE if text.isprintable() else _ESCAPE)(text).encode()
