"""From a cost table to packs: packers, limits, plans as files, the order of packs, equal work. Numpy and numba."""
