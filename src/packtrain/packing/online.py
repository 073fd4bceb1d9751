"""Packing a stream that cannot be measured first: a bounded buffer in, packs out, with a state that can be saved.

A run over a stream has one epoch: as many packs as its steps have, in the order of the stream, whatever passes over it
that takes. So its position is a number, as that of a measured run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.core.fingerprint import digest
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.schedule import Schedule

_STATE = 1  # version of the saved state


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferedSample:
    """A sample in the buffer: whatever names it for the caller, and what it costs."""

    key: str
    sizes: tuple[int, ...]


class OnlinePacker:
    """Fills packs from the samples at hand. Everything it knows is in `state_dict`.

    When the buffer is full, one pack is made: the sample that waits longest, then again and again the largest one that
    still fits. So no sample waits for ever, and small ones stay for the gaps. What this gives up against packing with
    all costs known is the choice beyond the buffer.

    >>> packer = OnlinePacker({"tokens": 10}, buffer=3)
    >>> [pack for n in (6, 5, 4, 3) for pack in packer.push(str(n), {"tokens": n})]
    [['6', '4']]
    >>> list(packer.flush())
    [['5', '3']]
    """

    def __init__(self, capacities: Mapping[str, int], *, buffer: int) -> None:
        if not capacities or not all(_is_whole(limit) and limit >= 1 for limit in capacities.values()):
            raise ConfigError("capacities", got=dict(capacities), expected="at least one, positive integers")
        if not _is_whole(buffer) or buffer < 1:
            raise ConfigError("packing_buffer", got=buffer, expected="at least 1 sample")
        self._names = tuple(sorted(capacities))  # saved sizes follow it, so it must not depend on the caller's order
        self._capacities = np.array([capacities[name] for name in self._names], np.int64)
        self._buffer = buffer
        self._waiting: list[BufferedSample] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, key: str, costs: Mapping[str, int]) -> Iterator[list[str]]:
        """Take one sample; yields a pack as often as the buffer is over-full. The sample must fit a pack alone."""
        if not self._fits([costs.get(name) for name in self._names]):
            raise ConfigError(f"sample {key}", got=dict(costs), expected=f"whole numbers, at most {self._limits()}")
        self._waiting.append(BufferedSample(key=key, sizes=tuple(int(costs[name]) for name in self._names)))
        # A list, not a suspended generator: what is decided here is out of the buffer before the caller sees it.
        packs = []
        while len(self._waiting) > self._buffer:
            packs.append(self._pack())
        return iter(packs)

    def flush(self) -> Iterator[list[str]]:
        """The packs of what is left."""
        packs = []
        while self._waiting:
            packs.append(self._pack())
        return iter(packs)

    def state_dict(self) -> dict[str, object]:
        """Everything, as JSON."""
        return {
            "version": _STATE,
            "capacities": self._limits(),
            "buffer": self._buffer,
            "waiting": [[one.key, *one.sizes] for one in self._waiting],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; other limits are refused, and so is what is no state."""
        mine = {**self.state_dict(), "waiting": None}
        theirs = {**state, "waiting": None}
        if mine != theirs:
            raise ArtifactError("state of the online packer", got=theirs, expected=str(mine))
        waiting = state.get("waiting")
        if not isinstance(waiting, list) or not all(
            isinstance(one, list | tuple) and len(one) > 1 and isinstance(one[0], str) and self._fits(one[1:])
            for one in waiting
        ):
            raise ArtifactError(
                "state of the online packer", got=str(waiting)[:200], expected=f"waiting samples within {mine}"
            )
        self._waiting = [BufferedSample(key=key, sizes=tuple(sizes)) for key, *sizes in waiting]

    def _fits(self, sizes: Sequence[object]) -> bool:
        """Could a sample of these sizes be in a pack?"""
        if len(sizes) != len(self._names):
            return False
        pairs = zip(sizes, self._capacities.tolist(), strict=True)
        return all(isinstance(size, int | np.integer) and 0 <= size <= limit for size, limit in pairs)

    def _limits(self) -> dict[str, int]:
        return dict(zip(self._names, self._capacities.tolist(), strict=True))

    def _pack(self) -> list[str]:
        """One pack, taken out of the buffer."""
        sizes = np.array([one.sizes for one in self._waiting], np.int64)
        weight = (sizes / self._capacities).max(axis=1)
        left = self._capacities - sizes[0]
        chosen = [0]
        free = np.ones(len(sizes), bool)
        free[0] = False
        while True:
            fits = free & (sizes <= left).all(axis=1)
            if not fits.any():
                break
            best = int(np.argmax(np.where(fits, weight, -1.0)))
            chosen.append(best)
            free[best] = False
            left = left - sizes[best]
        keys = [self._waiting[number].key for number in chosen]
        self._waiting = [one for number, one in enumerate(self._waiting) if free[number]]
        return keys


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlinePlan:
    """What there is in place of a plan: packs have numbers, and what is in them is known once they are read."""

    config: PackingConfig
    num_packs: int
    inputs: Mapping[str, Any]  # data, settings and limits
    num_epochs: int = 1

    def epoch(self, number: int) -> OnlinePlan:
        """The only one."""
        if number:
            raise IndexError(f"epoch {number} of 1")
        return self

    def load(self, name: str) -> NoReturn:
        """Nothing is known before it is read."""
        raise ConfigError(
            "data.online",
            got=f"{name} of packs that are not measured",
            expected="a measured dataset",
            fix="leave online out",
        )


class OnlineSchedule(Schedule):
    """Packs in the order of their stream. How many steps a run has is no part of what it is known by."""

    def __init__(self, plan: OnlinePlan, *, packs_per_step: int) -> None:
        super().__init__(plan, packs_per_step=packs_per_step, balance="random")  # type: ignore[arg-type]

    @cached_property
    def hash(self) -> str:  # type: ignore[override]
        """Identifies the order; a state of another stream is refused."""
        return digest(self.settings)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the hash is of, by name."""
        inputs = {name: digest(value) for name, value in self.plan.inputs.items()}  # type: ignore[attr-defined]
        return {"packs_per_step": self.packs_per_step, "stream": inputs}

    def order(self, epoch: int) -> np.ndarray:
        """As they come."""
        return np.arange(self.plan.epoch(epoch).num_packs)

    def step(self, epoch: int, number: int) -> np.ndarray:
        """The packs of one optimizer step."""
        if not 0 <= number < self.num_steps(epoch):
            raise IndexError(f"step {number} of {self.num_steps(epoch)}")
        return np.arange(number * self.packs_per_step, (number + 1) * self.packs_per_step)

    def num_samples(self, first: int, last: int) -> None:  # type: ignore[override]
        """Nobody has counted them."""
