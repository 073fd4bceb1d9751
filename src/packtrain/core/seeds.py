"""Named random streams: one seed for a run, one independent stream for each purpose."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *names: object) -> np.random.Generator:
    """A generator that depends on the seed and the names alone, not on who asked before.

    >>> int(stream(0, "limit").integers(1000)) == int(stream(0, "limit").integers(1000))
    True
    """
    key = hashlib.sha256("\x1f".join([str(seed), *map(str, names)]).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "little")))
