"""The packers of other projects, as their packages have them, each run only where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_WINDOW = 1_000  # samples that trl and ms-swift pack together by default


@dataclass(frozen=True, kw_only=True, slots=True)
class PackerRun:
    """A packer that is ready to go: what is timed, and what the packs of its result hold."""

    pack: Callable[[], Any]
    loads: Callable[[Any], np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPacker:
    """One algorithm of another project."""

    name: str
    package: str  # as it is installed
    module: str  # as it is imported
    most: int  # samples that it is given, since some are slow
    prepare: Callable[[np.ndarray, int], PackerRun]  # lengths, each at most the capacity
    note: str = ""  # what a reader of its numbers should know

    @property
    def installed(self) -> bool:
        """Can it be run here?"""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Of the package, where it says one."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "?"


def _trl(lengths: np.ndarray, capacity: int, *, together: int | None = None) -> PackerRun:
    """`together` samples are packed at once, or all. trl moves token ids too, one byte each here, in the same time."""
    import datasets
    import trl

    # In chunks of 1,000, as datasets writes its files.
    chunks = [_ids(lengths[start : start + _WINDOW]) for start in range(0, len(lengths), _WINDOW)]
    dataset = datasets.Dataset(pa.table({"input_ids": pa.chunked_array(chunks)}))
    options = {"batch_size": together or len(lengths), "keep_in_memory": True, "load_from_cache_file": False}

    def pack() -> Any:
        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            return trl.pack_dataset(dataset, capacity, strategy="bfd", map_kwargs=options)
        finally:
            if shown:
                datasets.enable_progress_bars()

    def loads(packed: Any) -> np.ndarray:
        return np.asarray(pc.list_value_length(packed.data.column("input_ids")).to_numpy())

    return PackerRun(pack=pack, loads=loads)


def _ids(lengths: np.ndarray) -> pa.LargeListArray:
    """Sequences of these lengths; what they hold does not matter."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))


def _binpacking(lengths: np.ndarray, capacity: int) -> PackerRun:
    import binpacking

    items = lengths.tolist()
    return PackerRun(pack=lambda: binpacking.to_constant_volume(items, capacity), loads=_sums)


def _binpacking_windows(lengths: np.ndarray, capacity: int) -> PackerRun:
    """Windows of 1,000; the last pack of a window goes back into the next one, as ms-swift does it."""
    import binpacking

    items = lengths.tolist()

    def pack() -> list[list[int]]:
        packs: list[list[int]] = []
        for start in range(0, len(items), _WINDOW):
            packs += binpacking.to_constant_volume(
                (packs.pop() if packs else []) + items[start : start + _WINDOW], capacity
            )
        return packs

    return PackerRun(pack=pack, loads=_sums)


def _sums(packs: list[list[int]]) -> np.ndarray:
    return np.array([sum(pack) for pack in packs if pack])


def _axolotl(lengths: np.ndarray, capacity: int) -> PackerRun:
    """With its defaults for groups and samples of a pack, in one process."""
    pack_parallel = importlib.import_module("axolotl.utils.samplers.multipack").pack_parallel

    def pack() -> Any:
        return pack_parallel(lengths, capacity, group_size=100_000, bin_size=200, num_processes=1)

    return PackerRun(pack=pack, loads=lambda bins: np.array([lengths[list(pack)].sum() for pack in bins]))


def _llamafactory(lengths: np.ndarray, capacity: int) -> PackerRun:
    """The file that holds its packer is loaded alone: the package around it imports much that packing does not need."""
    spec = importlib.util.find_spec("llamafactory")
    assert spec is not None, "called only if installed"
    assert spec.origin is not None, "a package with its own file"
    file = Path(spec.origin).parent / "data/processor/processor_utils.py"
    knapsack = runpy.run_path(str(file), run_name=file.stem)["greedy_knapsack"]
    items = lengths.tolist()
    return PackerRun(pack=lambda: knapsack(items.copy(), capacity), loads=_sums)


_MOVES = "its seconds include moving token ids, one byte each, which it does while packing"
OTHERS = (
    OtherPacker(
        name="trl bfd, batches of 1,000",
        package="trl",
        module="trl",
        most=100_000,
        prepare=partial(_trl, together=_WINDOW),
        note=f"the default; {_MOVES}",
    ),
    OtherPacker(name="trl bfd, one batch", package="trl", module="trl", most=100_000, prepare=_trl, note=_MOVES),
    OtherPacker(
        name="binpacking in windows of 1,000",
        package="binpacking",
        module="binpacking",
        most=100_000,
        prepare=_binpacking_windows,
        note="as ms-swift calls it, the last pack of a window going into the next",
    ),
    OtherPacker(name="binpacking", package="binpacking", module="binpacking", most=20_000, prepare=_binpacking),
    OtherPacker(
        name="LLaMA-Factory knapsack",
        package="llamafactory",
        module="llamafactory",
        most=100_000,
        prepare=_llamafactory,
        note="the file of its packer alone, as installed",
    ),
    OtherPacker(
        name="axolotl multipack",
        package="axolotl",
        module="axolotl",
        most=100_000,
        prepare=_axolotl,
        note="groups of 100,000, at most 200 samples a pack, one process",
    ),
)
# Known packers that cannot be run from their package, and why.
NOT_RUN: Mapping[str, str] = {
    "ms-swift": "its packing module imports the whole trainer; what it calls is binpacking in windows of 1,000",
}
