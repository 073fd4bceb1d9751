"""How much of padded batches only fills up, in the order of a schedule."""

from __future__ import annotations

import numpy as np

from packtrain.packing.schedule import Schedule


def padding_share(schedule: Schedule, rows_per_batch: int, *, world: int = 1) -> float:
    """The share of padding in all tokens of the first epoch's batches, each padded to its longest sample.

    A batch has the samples of `rows_per_batch` packs, one in each with the strategy `none`.
    """
    packs, order = schedule.plan.epoch(0), schedule.order(0)
    lengths, samples = packs.load("longest")[order], packs.load("samples")[order]
    size, together = schedule.packs_per_step, world * rows_per_batch
    step_of = np.arange(len(lengths)) // size
    filled = schedule.accumulation(world, rows_per_batch) * together
    # What fills up a step stands before its packs, the incomplete one's too, so batches are counted from its end.
    last = np.minimum((step_of + 1) * size, len(lengths))
    place = step_of * filled + filled - (last - np.arange(len(lengths)))
    longest, rows = np.zeros((2, schedule.num_steps(0) * filled), np.int64)
    longest[place], rows[place] = lengths, samples
    batches = longest.reshape(-1, rows_per_batch).max(axis=1) * rows.reshape(-1, rows_per_batch).sum(axis=1)
    computed = int(batches.sum())
    return 1 - int(packs.load("tokens").sum()) / computed if computed else 0.0
