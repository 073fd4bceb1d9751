"""Best fit in decreasing order for several resources, as textbooks have it: a yardstick, quadratic in the samples."""

from __future__ import annotations

import numpy as np

from packtrain.plans.several_kernels import best_fit_by_sum


def best_fit_decreasing(sizes: np.ndarray, capacities: np.ndarray) -> int:
    """Packs, when samples come by decreasing sum of shares, each to the pack that it leaves the least room in.

    >>> best_fit_decreasing(np.array([[6, 1], [4, 1], [5, 5], [5, 5]]), np.array([10, 10]))
    2
    """
    order = np.argsort(-(sizes / capacities).sum(axis=1), kind="stable")
    return int(best_fit_by_sum(sizes, capacities, order)[1])
