"""Where a loader stands in its schedule: what it has handed out, where it begins again, and its state as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.delivery.loader.sampler import PackSampler, Turn
from packtrain.packing.schedule import LoaderState


class LoaderProgress:
    """How far one iteration has come."""

    def __init__(self, sampler: PackSampler) -> None:
        self.position = (sampler.epoch, sampler.next_pack)
        self._turns = sampler.turns()
        self.next: Turn | None = next(self._turns, None)

    @property
    def complete(self) -> bool:
        """Has all of it been handed out?"""
        return self.next is None

    def advance(self) -> None:
        """One more batch was handed out."""
        assert self.next is not None, "one batch per turn"
        self.position = (self.next.epoch, self.next.next_pack)
        self.next = next(self._turns, None)

    def ahead(self, number: int) -> list[PackKey]:
        """The keys of the next batches; only for messages, since it uses the turns up."""
        turns = (self.next, *islice(self._turns, number - 1))
        return [key for turn in turns if turn is not None for key in turn.keys]


class Standing:
    """Where iterations begin, and how far the newest has come.

    At first that is the beginning, after `load` the place that was saved, and once an iteration has handed out
    everything the next epoch; the only epoch of a plan comes again, as data of validation have to. An iteration that
    is given up changes nothing: the next begins where it began.
    """

    def __init__(self, sampler: PackSampler) -> None:
        self.sampler = sampler
        self._start = sampler.schedule.start()
        self._newest: LoaderProgress | None = None
        self.over = False  # has the last epoch been delivered?

    def set_epoch(self, epoch: int) -> None:
        """Deliver this epoch next, from its start; the epoch of a loaded state continues from there."""
        epochs = self.sampler.schedule.plan.num_epochs
        if not 0 <= epoch < epochs:
            raise _no_such_epoch(epoch, epochs)
        if self._newest is not None and self._newest.complete:
            self.end(self._newest)
        if self.over and self.sampler.span == "epoch":
            self.sampler.seek(epoch, 0)  # it was delivered to its end: once more
        if epoch != self.sampler.epoch:
            self._newest = None
        self.over = False
        self.sampler.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """The LoaderState as plain values: after the last delivered batch."""
        here = (self.sampler.epoch, self.sampler.next_pack)
        epoch, next_pack = self._newest.position if self._newest is not None else here
        return asdict(replace(self._start, epoch=epoch, next_pack=next_pack))

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same schedule, saved on any number of ranks and workers."""
        found = LoaderState.from_plain(state)
        self.sampler.schedule.check(found)
        self._newest, self.over = None, False
        self.sampler.seek(found.epoch, found.next_pack)

    def begin(self) -> LoaderProgress:
        """A new iteration; where the last one handed out everything without being asked for its end, it has ended."""
        if self._newest is not None and self._newest.complete:
            self.end(self._newest)
        epochs = self.sampler.schedule.plan.num_epochs
        if self.over and epochs == 1 and self.sampler.span == "epoch":
            self.set_epoch(0)
        if self.over:
            raise _no_such_epoch(epochs, epochs)
        self._newest = LoaderProgress(self.sampler)
        return self._newest

    def end(self, ended: LoaderProgress) -> None:
        """An iteration came to its end: the next one is the next epoch."""
        if ended is not self._newest:
            return
        epoch, next_pack = ended.position
        self._newest = None
        self.over = epoch + 1 == self.sampler.schedule.plan.num_epochs
        self.sampler.seek(*((epoch, next_pack) if self.over else (epoch + 1, 0)))


def _no_such_epoch(epoch: int, epochs: int) -> ConfigError:
    return ConfigError(
        "epochs",
        got=f"epoch {epoch}, counted from 0",
        expected=f"a plan for it; this one has {epochs}",
        fix="pack for more epochs",
    )
