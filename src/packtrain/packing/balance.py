"""How equal the work of ranks is, and what the order of packs does to the composition of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.schedule import Schedule

RANKS = (2, 4, 8, 64, 512)
PACKS_PER_RANK = 8  # G / W of the table that is shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Evenness:
    """One order of packs on W ranks."""

    slowest: float  # mean over micro-batches of slowest rank / mean of all ranks
    length_spread: float  # standard deviation over whole steps of a step's mean sample length
    samples_spread: float  # standard deviation over whole steps of a step's number of samples


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceLine:
    """The three orders side by side."""

    ranks: int
    packs_per_step: int
    steps: int
    random: Evenness
    sorted: Evenness
    strict: Evenness


def evenness(schedule: Schedule, world: int) -> Evenness:
    """Measured on the micro-batches of whole steps of the first epoch, in which all ranks have a pack."""
    order = schedule.order(0)
    size = schedule.packs_per_step
    packs = schedule.plan.epoch(0)
    work = schedule.plan.predicted_work(0)[order]
    tokens, samples = packs.load("tokens")[order], packs.load("samples")[order]
    ratios = []
    for start in range(0, len(order) - size + 1, size):
        step = work[start : start + size]
        whole = step[: len(step) // world * world].reshape(-1, world)
        if len(whole):
            ratios.append(whole.max(axis=1) / whole.mean(axis=1))
    steps = len(order) // size
    step_tokens, step_samples = (
        column[: steps * size].reshape(steps, size).sum(axis=1) for column in (tokens, samples)
    )
    return Evenness(
        slowest=float(np.concatenate(ratios).mean()) if ratios else 1.0,
        length_spread=float((step_tokens / step_samples).std()) if steps else 0.0,
        samples_spread=float(step_samples.std()) if steps else 0.0,
    )


def balance_table(
    plan: PackPlan, ranks: tuple[int, ...] = RANKS, packs_per_step: int | None = None
) -> list[BalanceLine]:
    """Random order, the default order and strict balance, for several numbers of ranks that the plan can keep busy.

    Without `packs_per_step` a step has eight packs for each rank, or as many as the plan has.
    """
    found = []
    packs = plan.epoch(0).num_packs
    for world in ranks:
        if world > packs:
            continue
        size = packs_per_step or min(PACKS_PER_RANK * world, packs // world * world)
        lines = {
            balance: evenness(Schedule(plan, packs_per_step=size, seed=plan.config.seed, balance=balance), world)
            for balance in ("random", "sorted", "strict")
        }
        found.append(BalanceLine(ranks=world, packs_per_step=size, steps=-(-packs // size), **lines))
    return found
