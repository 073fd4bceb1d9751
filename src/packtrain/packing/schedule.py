"""The order in which packs are trained: steps of G packs, the same for any number of ranks and workers.

A step is G packs drawn at random. Inside it packs are ordered by predicted work, so that the W that are trained at the
same time, one on each rank, are neighbours and take about equally long. Every other micro-batch runs the other way, so
that no rank has the heaviest of each, which would add up where ranks wait for each other only once a step. Where packs
are missing, it is the lightest that have no neighbours:

    step of G = 6, by work    a b c d e f        W = 3:  micro-batch 0  a b c     micro-batch 1  f e d
                                                 W = 4:  micro-batch 0  - - a b   micro-batch 1  f e d c   (- is empty)

Where a batch has B rows of one pack each, as padded ones have, W ranks take W x B packs at a time, every rank B that
are side by side:

                                       W = 2, B = 2:  micro-batch 0  - - | a b    micro-batch 1  f e | d c
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from packtrain.core.errors import ArtifactError, ConfigError, nearest
from packtrain.core.fingerprint import differences, digest
from packtrain.core.numbers import counted
from packtrain.core.seeds import stream
from packtrain.packing.pack_plan import PackPlan

# sorted: random steps, by work inside; strict: steps of packs with similar work; length: steps of packs with similar
# numbers of tokens, for padded batches; random: as shuffled
Balance = Literal["sorted", "strict", "random", "length"]
EMPTY_PACK = -1  # in place of a pack: nothing to train, no loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """The position of a run; `next_pack` counts packs of the epoch that are done, in the schedule's order."""

    schedule: str  # hash of the schedule
    epoch: int
    next_pack: int
    settings: Mapping[str, object] | None = field(
        default=None, compare=False
    )  # what it is a hash of, to name differences

    @classmethod
    def from_plain(cls, plain: object) -> LoaderState:
        """From plain values by name; anything else than a state is refused."""
        try:
            state = cls(**plain)  # type: ignore[arg-type]
            good = isinstance(state.settings, Mapping | None) and isinstance(state.schedule, str)
            good = good and all(
                isinstance(value, int) and not isinstance(value, bool) and value >= 0
                for value in (state.epoch, state.next_pack)
            )
        except TypeError:
            good = False
        if not good:
            shown = str(plain)[:200]
            raise ArtifactError("loader state", got=shown, expected="schedule, epoch and next_pack as JSON")
        return state


class Schedule:
    """Which packs make up each optimizer step. A pure function of plan, G, seed and balance."""

    def __init__(self, plan: PackPlan, *, packs_per_step: int, seed: int = 0, balance: Balance = "sorted") -> None:
        if isinstance(packs_per_step, bool) or not isinstance(packs_per_step, int) or packs_per_step < 1:
            raise ConfigError("packs_per_step", got=packs_per_step, expected="a positive integer")
        if balance not in get_args(Balance):
            names = get_args(Balance)
            raise ConfigError("balance", got=balance, expected=", ".join(names), fix=nearest(str(balance), names))
        self.plan = plan
        self.packs_per_step = packs_per_step
        self.seed = seed
        self.balance = balance
        self._cached: tuple[int, np.ndarray] | None = None

    def __repr__(self) -> str:
        steps = counted(self.num_steps(), "step")
        return f"Schedule({steps} of {counted(self.packs_per_step, 'pack')}, {self.balance}, seed {self.seed})"

    @property
    def hash(self) -> str:
        """Identifies the order; a state of another schedule is refused."""
        described = [self.plan.fingerprint, self.packs_per_step, self.seed, self.balance, asdict(self.plan.work)]
        return digest(described)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the hash is of, by name: settings that can be told, data and model as hashes."""
        config, inputs = self.plan.config.describe(), self.plan.summary.inputs
        own = {"packs_per_step": self.packs_per_step, "seed": self.seed, "balance": self.balance}
        known = {**inputs, **(inputs.get("measured") or {}), "work": asdict(self.plan.work)}
        hashes = {name: digest(value) for name, value in known.items() if name != "measured"}
        return dict(json.loads(json.dumps({**own, "packing": config, "inputs": hashes}, default=str)))

    def at(self, epoch: int, next_pack: int) -> LoaderState:
        """The state before this pack."""
        return LoaderState(schedule=self.hash, epoch=epoch, next_pack=next_pack, settings=self.settings)

    def num_steps(self, epoch: int | None = None) -> int:
        """Optimizer steps of one epoch, or of all; the last step of an epoch may have fewer packs than G."""
        if epoch is not None:
            return -(-self.plan.epoch(epoch).num_packs // self.packs_per_step)
        return sum(self.num_steps(number) for number in range(self.plan.num_epochs))

    def order(self, epoch: int) -> np.ndarray:
        """All packs of one epoch in the order of training."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._ordered(epoch))
        return self._cached[1]

    def step(self, epoch: int, number: int) -> np.ndarray:
        """The packs of one optimizer step."""
        if not 0 <= number < self.num_steps(epoch):
            raise IndexError(f"step {number} of {self.num_steps(epoch)}")
        return self.order(epoch)[number * self.packs_per_step : (number + 1) * self.packs_per_step]

    def num_samples(self, first: int, last: int) -> int:
        """Samples in these optimizer steps of the whole run, counted from 0, without the last."""
        samples = before = 0
        for epoch in range(self.plan.num_epochs):
            steps = self.num_steps(epoch)
            begin, end = (min(max(step - before, 0), steps) for step in (first, last))
            if begin < end:
                packs = self.order(epoch)[begin * self.packs_per_step : end * self.packs_per_step]
                samples += int(self.plan.epoch(epoch).load("samples")[packs].sum())
            before += steps
        return samples

    def accumulation(self, world_size: int, rows_per_batch: int = 1) -> int:
        """Micro-batches of one optimizer step on this many ranks, each with batches of this many packs."""
        return -(-self.packs_per_step // (world_size * rows_per_batch))

    def padding_share(self, rows_per_batch: int, *, world_size: int = 1) -> float:
        """The share of padding in all tokens of the first epoch's batches, each padded to its longest sample.

        A batch has the samples of `rows_per_batch` packs, one in each with the strategy `none`.
        """
        packs, order = self.plan.epoch(0), self.order(0)
        lengths, samples = packs.load("longest")[order], packs.load("samples")[order]
        step_of = np.arange(len(lengths)) // self.packs_per_step
        filled = self.accumulation(world_size, rows_per_batch) * world_size * rows_per_batch
        # What fills up a step comes before its packs, the incomplete one's too, so batches are counted from its end.
        last = np.minimum((step_of + 1) * self.packs_per_step, len(lengths))
        place = step_of * filled + filled - (last - np.arange(len(lengths)))
        longest, rows = np.zeros((2, self.num_steps(0) * filled), np.int64)
        longest[place], rows[place] = lengths, samples
        batches = longest.reshape(-1, rows_per_batch).max(axis=1) * rows.reshape(-1, rows_per_batch).sum(axis=1)
        computed = int(batches.sum())
        return 1 - int(packs.load("tokens").sum()) / computed if computed else 0.0

    def micro_batches(
        self, epoch: int, number: int, world_size: int, done: int = 0, *, rows_per_batch: int = 1
    ) -> np.ndarray:
        """The packs of one step by micro-batch and rank, filled up: (accumulation, world_size x rows_per_batch).

        Rank r has the columns from r x rows_per_batch on. The packs of the first micro-batches are always the first of
        the step's order, so the number of packs that are `done` is the position in a step. What is left after them
        takes the micro-batches that it would have had, if ranks and rows are still as many, and otherwise as few as it
        needs.
        """
        packs = self.step(epoch, number)
        if not 0 <= done <= len(packs):
            raise IndexError(f"{done} packs in a step of {len(packs)}")
        whole, together = self.accumulation(world_size, rows_per_batch), world_size * rows_per_batch
        rest = packs[done:]
        rows = -(-len(rest) // together) if done else whole
        filled = np.concatenate([np.full(rows * together - len(rest), EMPTY_PACK), rest]).reshape(rows, together)
        return reverse_odd_rows(filled, first=whole - rows)

    def state_after(self, steps: int) -> LoaderState:
        """The state after this many optimizer steps of the whole run."""
        if not 0 <= steps <= self.num_steps():
            raise IndexError(f"{steps} of {self.num_steps()} steps")
        left = steps
        for epoch in range(self.plan.num_epochs):
            here = self.num_steps(epoch)
            if left < here:
                return self.at(epoch, left * self.packs_per_step)
            left -= here
        last = self.plan.num_epochs - 1
        return self.at(last, self.plan.epoch(last).num_packs)

    def start(self) -> LoaderState:
        """The state before the first pack."""
        return self.at(0, 0)

    def check(self, state: LoaderState) -> None:
        """Refuse a state that another schedule saved, or that points past the end."""
        if state.schedule != self.hash:
            changed = differences(state.settings, self.settings) if state.settings is not None else []
            raise ArtifactError(
                "loader state",
                got=f"schedule {state.schedule}" + (f" of other settings: {'; '.join(changed[:5])}" if changed else ""),
                expected=f"schedule {self.hash}",
                fix="resume with the data, model, packs per step, seed and balance that the run was started with",
            )
        if state.epoch >= self.plan.num_epochs or state.next_pack > self.plan.epoch(state.epoch).num_packs:
            raise ArtifactError(
                "loader state",
                got=f"epoch {state.epoch}, pack {state.next_pack}",
                expected=f"one of {self.plan.num_epochs} epochs and its packs",
            )

    def _ordered(self, epoch: int) -> np.ndarray:
        packs = self.plan.epoch(epoch)
        shuffled = self._shuffled(epoch, packs.load("window"))
        if self.balance == "random":
            return shuffled
        random = stream(self.seed, "steps", epoch)
        work = packs.load("tokens") if self.balance == "length" else self.plan.predicted_work(epoch)
        return arrange(shuffled, work, self.packs_per_step, self.balance, random, packs.load("window"))

    def _shuffled(self, epoch: int, windows: np.ndarray) -> np.ndarray:
        """Packs in random order inside each window; windows keep the order in which they are read."""
        if not self.plan.config.shuffle:
            return np.arange(len(windows))
        key = stream(self.seed, "packs", epoch).random(len(windows))
        return np.lexsort((key, windows))


def reverse_odd_rows(rows: np.ndarray, first: int = 0) -> np.ndarray:
    """Every other row reversed; the last two axes are micro-batches, counted from `first`, and ranks.

    >>> reverse_odd_rows(np.array([[1, 2], [3, 4]])).tolist()
    [[1, 2], [4, 3]]
    """
    result = rows.copy()
    odd = 1 - first % 2
    result[..., odd::2, :] = rows[..., odd::2, ::-1]
    return result


def arrange(
    shuffled: np.ndarray,
    work: np.ndarray,
    packs_per_step: int,
    balance: Balance,
    random: np.random.Generator,
    windows: np.ndarray | None = None,
) -> np.ndarray:
    """Packs in step order: sorted by work inside each step; with `strict` and `length` similar ones share a step."""
    if balance in ("strict", "length"):
        windows = np.zeros(len(work), np.int32) if windows is None else windows
        shuffled = _similar_together(shuffled, work, packs_per_step, random, windows)
    step_of = np.arange(len(shuffled)) // packs_per_step
    return shuffled[np.lexsort((work[shuffled], step_of))]


def _similar_together(
    shuffled: np.ndarray, work: np.ndarray, packs_per_step: int, random: np.random.Generator, windows: np.ndarray
) -> np.ndarray:
    """Steps of similar packs in random order, window by window, so that a reader needs no window before its turn."""
    shuffled = shuffled[np.lexsort((work[shuffled], windows[shuffled]))]
    steps = len(shuffled) // packs_per_step  # the incomplete step stays at the end
    whole = shuffled[: steps * packs_per_step].reshape(steps, packs_per_step)
    first, last = windows[whole[:, 0]], windows[whole[:, -1]]
    order = np.lexsort((random.random(steps), first != last, first))  # a step of two windows stays between them
    return np.concatenate([whole[order].ravel(), shuffled[steps * packs_per_step :]])


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


def evenness(schedule: Schedule, world_size: int) -> Evenness:
    """Measured on the micro-batches of whole steps of the first epoch, in which all ranks have a pack."""
    order = schedule.order(0)
    size = schedule.packs_per_step
    packs = schedule.plan.epoch(0)
    work = schedule.plan.predicted_work(0)[order]
    tokens, samples = packs.load("tokens")[order], packs.load("samples")[order]
    ratios = []
    for start in range(0, len(order) - size + 1, size):
        step = work[start : start + size]
        whole = step[: len(step) // world_size * world_size].reshape(-1, world_size)
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
    table = []
    packs = plan.epoch(0).num_packs
    for world_size in ranks:
        if world_size > packs:
            continue
        size = packs_per_step or min(PACKS_PER_RANK * world_size, packs // world_size * world_size)
        lines = {
            balance: evenness(Schedule(plan, packs_per_step=size, seed=plan.config.seed, balance=balance), world_size)
            for balance in ("random", "sorted", "strict")
        }
        table.append(BalanceLine(ranks=world_size, packs_per_step=size, steps=-(-packs // size), **lines))
    return table
