"""The forward passes of an epoch as columns (packs, or padded batches), and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from packtrain.core.seeds import stream
from packtrain.packing.schedule import arrange, reverse_odd_rows
from packtrain.predicting.gpus import Gpu
from packtrain.predicting.time import (
    Coefficients,
    default_coefficients,
    launch_seconds,
    step_time,
    waiting_seconds,
    waits,
    with_launches,
    work_seconds,
)
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

FIELDS = tuple(field.name for field in fields(Load))
_FROM_PLANS = {"squared_tokens": "attention"}  # where a plan has another name for it


@dataclass(frozen=True, slots=True, eq=False)
class PassColumns:
    """One array for each field of a Load, one number for each pass."""

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["tokens"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def load(self, number: int) -> Load:
        """One pass."""
        return self._load(lambda column: column[number])

    def worst(self) -> Load:
        """The largest of every number: no pass needs more, and usually none needs all of it at once."""
        return self._load(np.max)

    def mean(self) -> Load:
        """An average pass."""
        return self._load(np.mean)

    def _load(self, number_of: Callable[[np.ndarray], float]) -> Load:
        return Load(**{name: round(float(number_of(self.columns[name]))) for name in FIELDS})

    def filled(self, length: int) -> PassColumns:
        """Rows of one length, as compiled layers compute them: what a pack leaves free is one more sample."""
        free = np.maximum(length - self.columns["tokens"], 0)
        more = {
            "tokens": self.columns["tokens"] + free,
            "squared_tokens": self.columns["squared_tokens"] + free * free,
            "longest": np.maximum(self.columns["longest"], free),
        }
        return PassColumns({**self.columns, **more})

    def take(self, order: np.ndarray) -> PassColumns:
        """Some of the passes, in another order."""
        return PassColumns({name: column[order] for name, column in self.columns.items()})


def pack_passes(loads: Mapping[str, np.ndarray]) -> PassColumns:
    """Packs are rows of their own; a pack's numbers come under the names that plans have for them."""
    columns = {name: loads[_FROM_PLANS.get(name, name)] for name in FIELDS if name != "rows"}
    return PassColumns({**columns, "rows": np.ones_like(columns["tokens"])})


def padded_batches(columns: Mapping[str, np.ndarray], starts: np.ndarray) -> PassColumns:
    """Padded batches of consecutive rows: each begins at one of `starts` and is padded to its longest row."""
    rows, longest = np.add.reduceat(columns["samples"], starts), np.maximum.reduceat(columns["longest"], starts)
    sums = ("supervised_tokens", "vision_tokens", "patches", "squared_patches", "images", "frames")
    return PassColumns(
        {
            "tokens": rows * longest,
            "squared_tokens": rows * longest * longest,
            "longest": longest,
            "samples": rows,
            "rows": rows,
            "largest_patches": np.maximum.reduceat(columns["largest_patches"], starts),
            **{name: np.add.reduceat(columns[name], starts) for name in sums},
        }
    )


def one_pass(load: Load) -> PassColumns:
    """A single pass as columns."""
    return PassColumns({name: np.array([getattr(load, name)]) for name in FIELDS})


_MEET_ONCE = ("ddp", "zero1")  # gradients are exchanged once a step
_PROBE = 1 << 12  # tokens; what is measured with it is linear, so that any number would do


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Predicts seconds for one model, one way to train it and one kind of GPU."""

    shape: ModelShape
    setup: TrainingSetup
    gpu: Gpu
    coefficients: Coefficients | None

    def seconds(self, passes: PassColumns) -> np.ndarray:
        """Every pass, forward and backward, without what happens once a step."""
        setup = replace(self.setup, attn_implementation="varlen")
        work = work_seconds(self.shape, setup, self.gpu, self.coefficients, longest=int(passes["longest"].max()))
        dense = self._dense(passes)
        busy = work.of(
            tokens=passes["tokens"].astype(np.float64),
            squared_tokens=np.where(dense, 0.0, passes["squared_tokens"]),
            patches=passes["patches"].astype(np.float64),
            squared_patches=passes["squared_patches"].astype(np.float64),
            supervised_tokens=passes["supervised_tokens"].astype(np.float64),
        )
        whole_rows = passes["tokens"].astype(np.float64) ** 2 / passes["rows"]
        busy = busy + np.where(dense, self._per_dense_pair() * whole_rows, 0.0)
        return self._launched(busy, passes["patches"] > 0, passes["images"])

    def epoch(self, passes: PassColumns, per_step: int, *, packs: bool = False) -> float:
        """All passes in this order, `per_step` in an optimizer step.

        GPUs wait for each other where they exchange something: once a step while each holds whole weights and
        gradients, else in every pass. Packs are given to GPUs as the schedule does it, batches in turn.
        """
        gpus = self.setup.gpus
        steps, micro_batches = -(-len(passes) // per_step), -(-per_step // gpus)
        seconds = self.seconds(passes)
        lanes = np.zeros((steps, micro_batches * gpus))
        for step, start in enumerate(range(0, len(seconds), per_step)):
            part = seconds[start : start + per_step]
            lanes[step, -len(part) if packs else 0 :][: len(part)] = part
        busy = lanes.reshape(steps, micro_batches, gpus)
        if packs:
            busy = reverse_odd_rows(busy)
        if self.setup.sharding in _MEET_ONCE:
            busy = busy.sum(axis=1, keepdims=True)
        return float(busy.max(axis=2).sum()) + steps * self._once(passes, micro_batches)

    def epoch_of_packs(self, passes: PassColumns, per_step: int, seed: int) -> float:
        """An epoch in the order in which packs are trained: random steps, sorted by work inside."""
        work, random = self.seconds(passes), stream(seed, "study", "steps")
        order = arrange(random.permutation(len(passes)), work, per_step, "sorted", random)
        return self.epoch(passes.take(order), per_step, packs=True)

    def _once(self, passes: PassColumns, micro_batches: int) -> float:
        """What a step needs beside its passes: gradients added up and exchanged, the optimizer."""
        mean = passes.mean()
        # Squares of passes that differ are more than rows of the mean length have: no dense mask would be seen then.
        mean = replace(mean, squared_tokens=min(mean.squared_tokens, mean.tokens**2 // mean.rows))
        step = step_time(self.shape, self.setup, mean, self.gpu, self.coefficients, micro_batches)
        return max(0.0, step.seconds - micro_batches * float(self.seconds(one_pass(mean))[0]))

    def _dense(self, passes: PassColumns) -> np.ndarray:
        """Which passes attend over whole rows with a mask; a row that is one sample needs none."""
        if self.setup.attn_implementation == "varlen":
            return np.zeros(len(passes), bool)
        alone = (passes["samples"] == 1) & (passes["rows"] == 1)
        return ~alone if self.setup.attn_implementation == "sdpa" else np.ones(len(passes), bool)

    def _per_dense_pair(self) -> float:
        """Seconds for each pair of positions in a row that is computed whole."""
        if self.setup.attn_implementation == "varlen":
            return 0.0
        row = Load(tokens=_PROBE, squared_tokens=0, longest=_PROBE, samples=2, rows=2)
        without = replace(self.setup, attn_implementation="varlen")
        dense, plain = (
            step_time(self.shape, setup, row, self.gpu, self.coefficients).compute for setup in (self.setup, without)
        )
        return (dense - plain) / (_PROBE * _PROBE / row.rows)

    def _launched(self, busy: np.ndarray, sees: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Passes with their kernel launches; those without patches launch no encoder and do not wait for it."""
        chosen = self.coefficients or default_coefficients(compiled=self.setup.compiled)
        text = Load(tokens=1, squared_tokens=1, longest=1)
        image = replace(text, patches=1)
        waited = waiting_seconds(self.shape, self.setup, image, chosen) if waits(self.shape) else 0.0
        loads = (text, image, replace(image, images=1))
        without, with_encoder, with_one = (launch_seconds(self.shape, self.setup, load, chosen) for load in loads)
        launches = np.where(sees, with_encoder + (with_one - with_encoder) * images, without)
        seconds = with_launches(busy - waited, launches)
        return np.asarray(seconds + np.where(sees, waited, 0.0))
