"""A user-defined packer: `packing_strategy: module:function`. Its packs are checked, its source is stored.

    def pack(sizes, capacities, seed): return [[0, 2], [1]]

`sizes` (samples, limits) and `capacities` (limits,) are whole numbers: tokens first, then the other limits that are
set, in the order of the documented table. `seed` is None where the order of the dataset is to be kept. What comes back
is the samples of each pack.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from packtrain.core.errors import ConfigError
from packtrain.core.fingerprint import digest
from packtrain.core.user_code import load_function, names_function

_EXAMPLE = "my_packer:pack"


def packer_source(strategy: str) -> str | None:
    """What a packer of the user's own is known by; None of the others."""
    return digest(load_function(strategy, where=_where(strategy), example=_EXAMPLE)[1]) if is_own(strategy) else None


def is_own(strategy: str) -> bool:
    """Whether it names a function."""
    return names_function(strategy)


def own_packs(
    strategy: str, sizes: np.ndarray, capacities: np.ndarray, seed: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Order and offsets of the packs that the function makes: every sample once, every pack within the limits."""
    function, _ = load_function(strategy, where=_where(strategy), example=_EXAMPLE)
    try:
        packs = [_samples(pack) for pack in function(sizes.copy(), capacities.copy(), seed)]
    except Exception as error:  # the user's code can fail in any way
        raise _wrong(strategy, f"it raised {type(error).__name__}: {error}") from error
    order = np.concatenate([np.empty(0, np.int64), *packs])
    lengths = np.array([len(pack) for pack in packs], np.int64)
    if (lengths == 0).any():
        raise _wrong(strategy, f"pack {np.flatnonzero(lengths == 0)[0]} is empty")
    strange = np.flatnonzero((order < 0) | (order >= len(sizes)))
    if len(strange):
        raise _wrong(strategy, f"sample {order[strange[0]]} of {len(sizes):,}")
    times = np.bincount(order, minlength=len(sizes))
    for at in np.flatnonzero(times != 1)[:1]:
        raise _wrong(strategy, f"sample {at} in {times[at] or 'no'} packs")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    loads = np.add.reduceat(sizes[order], offsets[:-1]) if len(packs) else sizes[:0]
    for pack, limit in np.argwhere(loads > capacities)[:1]:
        raise _wrong(strategy, f"pack {pack} holds {loads[pack, limit]:,}, the limit is {capacities[limit]:,}")
    return order, offsets


def _samples(pack: Iterable[int]) -> np.ndarray:
    found = np.array(list(pack))
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"a pack of {found.dtype}, not of integers")
    return found.astype(np.int64)


def _where(strategy: str) -> str:
    return f"packing_strategy {strategy}"


def _wrong(strategy: str, got: str) -> ConfigError:
    return ConfigError(
        _where(strategy),
        got=got,
        expected="lists of samples: each sample in exactly one pack, each pack within the limits",
        fix="see docs/guides/packing.md for the arguments and return value of the function",
    )
