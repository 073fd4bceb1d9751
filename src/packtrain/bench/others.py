"""The packers of other projects, run as their packages have them, each only where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def _trl(lengths: np.ndarray, capacity: int, together: int) -> PackerRun:
    """trl packs a dataset of token ids and moves the ids, one byte each here, so its time is not of packing alone."""
    import datasets
    import trl

    # In chunks of 1,000, as datasets writes its files.
    chunks = [_ids(lengths[start : start + _WINDOW]) for start in range(0, len(lengths), _WINDOW)]
    dataset = datasets.Dataset(pa.table({"input_ids": pa.chunked_array(chunks)}))
    options = {"batch_size": together, "keep_in_memory": True, "load_from_cache_file": False}

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


def _trl_windows(lengths: np.ndarray, capacity: int) -> PackerRun:
    return _trl(lengths, capacity, _WINDOW)


def _trl_whole(lengths: np.ndarray, capacity: int) -> PackerRun:
    return _trl(lengths, capacity, len(lengths))


def _binpacking(lengths: np.ndarray, capacity: int) -> PackerRun:
    import binpacking

    items = lengths.tolist()
    return PackerRun(
        pack=lambda: binpacking.to_constant_volume(items, capacity),
        loads=lambda bins: np.array([sum(found) for found in bins if found]),
    )


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

    return PackerRun(pack=pack, loads=lambda packs: np.array([sum(found) for found in packs if found]))


def _axolotl(lengths: np.ndarray, capacity: int) -> PackerRun:
    """With its defaults for groups and samples of a pack, in one process."""
    pack_parallel = importlib.import_module("axolotl.utils.samplers.multipack").pack_parallel

    def pack() -> Any:
        return pack_parallel(lengths, capacity, group_size=100_000, bin_size=200, num_processes=1)

    return PackerRun(pack=pack, loads=lambda bins: np.array([lengths[list(found)].sum() for found in bins]))


def _llamafactory(lengths: np.ndarray, capacity: int) -> PackerRun:
    """The file that holds its packer is loaded alone: the package around it imports much that packing does not need."""
    knapsack = _alone("llamafactory", "data/processor/processor_utils.py")["greedy_knapsack"]
    items = lengths.tolist()
    return PackerRun(pack=lambda: knapsack(items.copy(), capacity), loads=lambda bins: np.array([sum(f) for f in bins]))


def _alone(package: str, file: str) -> dict[str, Any]:
    """The names of one file of a package, without the package."""
    found = importlib.util.find_spec(package)
    assert found is not None, "called only if installed"
    assert found.origin is not None, "a package with its own file"
    return runpy.run_path(str(Path(found.origin).parent / file), run_name=Path(file).stem)


_MOVES = "its seconds include moving token ids, one byte each, which it does while packing"
OTHERS = (
    OtherPacker(
        name="trl bfd, batches of 1,000",
        package="trl",
        module="trl",
        most=100_000,
        prepare=_trl_windows,
        note=f"the default; {_MOVES}",
    ),
    OtherPacker(name="trl bfd, one batch", package="trl", module="trl", most=100_000, prepare=_trl_whole, note=_MOVES),
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
