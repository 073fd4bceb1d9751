"""A cost table -> packs: packers, limits, the plan as files, and the order in which packs are trained."""
