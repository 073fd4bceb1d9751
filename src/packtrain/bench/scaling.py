"""Time and memory for each sample as sets grow: every size is packed in a process of its own, window by window."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from packtrain.bench.host import in_new_process, peak_memory
from packtrain.bench.lengths import lvis_shape, lvis_tokens
from packtrain.bench.printing import column
from packtrain.core.numbers import GIB
from packtrain.packing.arrays import pack_arrays
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES, Samples, Tails
from packtrain.packing.windows import LARGEST_WINDOW, pack_windows

# Alone: lengths in, packs out. Plan: all that a plan needs of a window, which is all columns of costs, packs that are
# alike, and what every pack holds.
What = Literal["alone", "plan"]
_WHAT = {"alone": "lengths to packs", "plan": "costs to a plan"}
_BLOCK = 1 << 17  # rows made at once


class GeneratedRows:
    """Rows that are made when they are read, block by block to need no memory beside them, and how long that took."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.seconds = 0.0

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        """Costs and tails of these rows."""
        begun = time.process_time()
        columns = {name: np.empty(stop - start, np.int64) for name in (*RESOURCES, *EXTRAS)}
        tails = np.empty(stop - start, np.int64)
        for at in range(start, stop, _BLOCK):
            block = lvis_shape(min(_BLOCK, stop - at), seed=at)
            rows = slice(at - start, at - start + len(block))
            for name, values in columns.items():
                values[rows] = block[name]
            tails[rows] = block["tokens"] - block["vision_tokens"]
        self.seconds += time.process_time() - begun
        return Samples(columns), Tails(tails)


def _lengths(start: int, stop: int) -> np.ndarray:
    """The tokens of these rows."""
    tokens = np.empty(stop - start, np.int64)  # filled in place: what is made here must not need more than packing
    for at in range(start, stop, _BLOCK):
        tokens[at - start : at - start + _BLOCK] = lvis_tokens(min(_BLOCK, stop - at), seed=at)[0]
    return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Packing one number of samples; bytes are those beyond a process that makes the same samples only."""

    what: str = column("what", lambda row: _WHAT[row.what])
    samples: int = column("samples")
    window: int = column("at once")
    capacity: int
    packs: int = column("packs")
    bound: int
    of_bound: float = column("of bound", "{:.4f}")
    seconds: float = column("seconds", "{:,.2f}")
    nanoseconds_per_sample: float = column("ns a sample", "{:,.0f}")
    peak_gib: float = column("peak GiB", "{:.2f}")
    extra_bytes_per_sample_of_a_window: float = column("extra bytes per sample", "{:,.0f}")


def scaling(size: int, capacity: int, what: What, window: int = LARGEST_WINDOW) -> Growth:
    """Time and memory for each sample."""
    packs, bound, seconds, peak = in_new_process(_pack, size, capacity, what, window)
    extra = max(peak - in_new_process(_generate, size, capacity, what, window), 0)
    return Growth(
        samples=size,
        window=min(window, size),
        what=what,
        capacity=capacity,
        packs=packs,
        bound=bound,
        of_bound=bound / packs,
        seconds=seconds,
        nanoseconds_per_sample=seconds / size * 1e9,
        peak_gib=peak / GIB,
        extra_bytes_per_sample_of_a_window=extra / min(window, size),
    )


def _pack(size: int, capacity: int, what: What, window: int) -> tuple[int, int, float, int]:
    """Packs are counted and let go, as a plan that is written to disk lets go of them; and the most memory."""
    measure = _pack_alone if what == "alone" else _pack_plan
    measure(2_000, capacity, window)  # loads what is compiled
    return *measure(size, capacity, window), peak_memory()


def _pack_alone(size: int, capacity: int, window: int) -> tuple[int, int, float]:
    """Packs, their bound, and seconds."""
    packs, tokens, seconds = 0, 0, 0.0
    for start in range(0, size, window):
        lengths = _lengths(start, min(start + window, size))
        begun = time.process_time()
        packing = pack_arrays({"tokens": lengths}, {"tokens": capacity})
        seconds += time.process_time() - begun
        packs += packing.num_packs
        tokens += int(lengths.sum() - lengths[packing.dropped].sum())
    return packs, -(-tokens // capacity), seconds


def _pack_plan(size: int, capacity: int, window: int) -> tuple[int, int, float]:
    rows = GeneratedRows(size)
    config = PackingConfig(packing_length=capacity, packing_window=window)
    packs, tokens, begun = 0, 0, time.process_time()
    for window_packs in pack_windows(rows, config, 0, None):
        packs += len(window_packs.offsets) - 1
        tokens += int(window_packs.loads["tokens"].sum())
        del window_packs  # before the next one is made
    return packs, -(-tokens // capacity), time.process_time() - begun - rows.seconds


def _generate(size: int, capacity: int, what: What, window: int) -> int:
    """The most memory of the same process without packing anything of that size."""
    (_pack_alone if what == "alone" else _pack_plan)(2_000, capacity, window)
    rows = GeneratedRows(size)
    for start in range(0, size, window):
        stop = min(start + window, size)
        _ = _lengths(start, stop) if what == "alone" else rows.read(start, stop)
    return peak_memory()
