"""Which packs one rank trains, micro-batch by micro-batch, from any position of a schedule, and that position."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

from torch.utils.data import Sampler

from packtrain.core.errors import ConfigError, nearest
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.packing.schedule import EMPTY_PACK, LoaderState, Schedule

LoaderSpan = Literal["epoch", "run"]


class MicroBatch(NamedTuple):
    """One micro-batch of one rank, and the position in the schedule after it."""

    keys: tuple[PackKey, ...]  # one for each row of the batch
    epoch: int
    next_pack: int


class PackSampler(Sampler[list[PackKey]]):
    """The packs of each micro-batch of this rank: one, or `rows_per_batch` of them where a batch is padded.

    Knows nothing of what is in the packs, and draws no random numbers. How many rows a batch has is no part of the
    position: a run may continue with another number.

    epoch  the micro-batches of one epoch. The last step of an epoch may have fewer than others, and so may a step that
           continues with another number of ranks: `PackKey.last` says where a step ends.
    run    all epochs, one after the other, for callers that count: every step has `accumulation` micro-batches, filled
           up with some in which no rank has a pack. Those are no progress: a state saved among them leads back to the
           first of them.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int = 0,
        world_size: int = 1,
        *,
        span: LoaderSpan = "epoch",
        rows_per_batch: int = 1,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                "rank, world_size", got=f"{rank}, {world_size}", expected="a rank from 0 to world_size - 1"
            )
        if span not in get_args(LoaderSpan):
            names = get_args(LoaderSpan)
            raise ConfigError("span", got=span, expected=", ".join(names), fix=nearest(str(span), names))
        if isinstance(rows_per_batch, bool) or not isinstance(rows_per_batch, int) or rows_per_batch < 1:
            raise ConfigError("rows_per_batch", got=rows_per_batch, expected="a positive integer")
        self.schedule, self.rank, self.world_size, self.span = schedule, rank, world_size, span
        self.rows_per_batch = rows_per_batch
        self.epoch = 0
        self.next_pack = 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.schedule.accumulation(self.world_size, self.rows_per_batch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; the current one is not restarted."""
        if self.span == "epoch" and epoch != self.epoch:
            self.seek(epoch, 0)

    def seek(self, epoch: int, next_pack: int) -> None:
        """The next iteration begins here."""
        self.epoch, self.next_pack = epoch, next_pack

    def __len__(self) -> int:
        """Micro-batches of the whole epoch, or of the whole run, whatever has been done of them."""
        if self.span == "run":
            return self.schedule.num_steps() * self.accumulation
        whole, rest = divmod(self.schedule.plan.epoch(self.epoch).num_packs, self.schedule.packs_per_step)
        return whole * self.accumulation + -(-rest // (self.world_size * self.rows_per_batch))

    def __iter__(self) -> Iterator[list[PackKey]]:
        return (list(micro_batch.keys) for micro_batch in self.micro_batches())

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The micro-batches from the position on; moving the position does not change an iteration that has started."""
        epoch, next_pack = self.epoch, self.next_pack
        yield from self._epoch(epoch, next_pack)
        if self.span == "run":
            for later in range(epoch + 1, self.schedule.plan.num_epochs):
                yield from self._epoch(later, 0)

    def _epoch(self, epoch: int, next_pack: int) -> Iterator[MicroBatch]:
        size = self.schedule.packs_per_step
        first, done = divmod(next_pack, size)
        if next_pack >= self.schedule.plan.epoch(epoch).num_packs:
            return
        for number in range(first, self.schedule.num_steps(epoch)):
            yield from self._step(epoch, number, done)
            done = 0

    def _step(self, epoch: int, number: int, done: int) -> Iterator[MicroBatch]:
        rows = self.rows_per_batch
        packs = self.schedule.micro_batches(epoch, number, self.world_size, done, rows_per_batch=rows)
        if self.span == "epoch":
            packs = packs[(packs != EMPTY_PACK).any(axis=1)]
        mine = packs[:, self.rank * rows : (self.rank + 1) * rows].tolist()
        counts = (packs != EMPTY_PACK).sum(axis=1).tolist()
        trained = number * self.schedule.packs_per_step + done
        before = self.accumulation - len(mine)
        for at, (batch, count) in enumerate(zip(mine, counts, strict=True)):
            trained += count
            key = PackKey(epoch=epoch, pack=EMPTY_PACK, step=number, micro_batch=before + at, last=at == len(mine) - 1)
            yield MicroBatch(tuple(key._replace(pack=pack) for pack in batch), epoch, trained)


def rank_and_world() -> tuple[int, int]:
    """Rank and world size from the process group, else from the launcher's environment, else 0 and 1."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def check_ranks(rank: int, world_size: int) -> None:
    """Refuse a trainer that counts other ranks than were started: each process would train a model of its own."""
    there = rank_and_world()
    if (rank, world_size) != there:
        raise ConfigError(
            "ranks",
            got=f"rank {rank} of {world_size} in the trainer, rank {there[0]} of {there[1]} as launched",
            expected="the same in both",
            fix="without GPUs, set it: TrainingArguments(use_cpu=True), Accelerator(cpu=True), "
            "lightning.Trainer(accelerator='cpu', strategy='ddp', devices=...); or start one process",
        )


class LoaderProgress:
    """How far one iteration has come."""

    def __init__(self, sampler: PackSampler) -> None:
        self.position = (sampler.epoch, sampler.next_pack)
        self._micro_batches = sampler.micro_batches()
        self.next: MicroBatch | None = next(self._micro_batches, None)

    @property
    def complete(self) -> bool:
        """Has all of it been handed out?"""
        return self.next is None

    def advance(self) -> None:
        """One more batch was handed out."""
        assert self.next is not None, "a batch for each micro-batch"
        self.position = (self.next.epoch, self.next.next_pack)
        self.next = next(self._micro_batches, None)

    def ahead(self, number: int) -> list[PackKey]:
        """The keys of the next batches; only for messages, since they are used up by it."""
        micro_batches = (self.next, *islice(self._micro_batches, number - 1))
        return [key for micro_batch in micro_batches if micro_batch is not None for key in micro_batch.keys]


class LoaderPosition:
    """Where iterations begin, and how far the newest has come.

    At first that is the beginning, after `load` the place that was saved, and once an iteration has handed out
    everything the next epoch; the only epoch of a plan comes again, as data of validation have to. An iteration that
    is given up changes nothing: the next begins where it began.
    """

    def __init__(self, sampler: PackSampler) -> None:
        self.sampler = sampler
        self._start = sampler.schedule.start()
        self._latest: LoaderProgress | None = None
        self.over = False  # has the last epoch been delivered?

    def set_epoch(self, epoch: int) -> None:
        """Deliver this epoch next, from its start; the epoch of a loaded state continues from there."""
        epochs = self.sampler.schedule.plan.num_epochs
        if not 0 <= epoch < epochs:
            raise _no_such_epoch(epoch, epochs)
        if self._latest is not None and self._latest.complete:
            self.end(self._latest)
        if self.over and self.sampler.span == "epoch":
            self.sampler.seek(epoch, 0)  # it was delivered to its end: once more
        if epoch != self.sampler.epoch:
            self._latest = None
        self.over = False
        self.sampler.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """The LoaderState as plain values: after the last delivered batch."""
        here = (self.sampler.epoch, self.sampler.next_pack)
        epoch, next_pack = self._latest.position if self._latest is not None else here
        return asdict(replace(self._start, epoch=epoch, next_pack=next_pack))

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same schedule, saved on any number of ranks and workers."""
        position = LoaderState.from_plain(state)
        self.sampler.schedule.check(position)
        self._latest, self.over = None, False
        self.sampler.seek(position.epoch, position.next_pack)

    def begin(self) -> LoaderProgress:
        """A new iteration; where the last one handed out everything without being asked for its end, it has ended."""
        if self._latest is not None and self._latest.complete:
            self.end(self._latest)
        epochs = self.sampler.schedule.plan.num_epochs
        if self.over and epochs == 1 and self.sampler.span == "epoch":
            self.set_epoch(0)
        if self.over:
            raise _no_such_epoch(epochs, epochs)
        self._latest = LoaderProgress(self.sampler)
        return self._latest

    def end(self, ended: LoaderProgress) -> None:
        """An iteration came to its end: the next one is the next epoch."""
        if ended is not self._latest:
            return
        epoch, next_pack = ended.position
        self._latest = None
        self.over = epoch + 1 == self.sampler.schedule.plan.num_epochs
        self.sampler.seek(*((epoch, next_pack) if self.over else (epoch + 1, 0)))


def _no_such_epoch(epoch: int, epochs: int) -> ConfigError:
    return ConfigError(
        "epochs",
        got=f"epoch {epoch}, counted from 0",
        expected=f"a plan for it; this one has {epochs}",
        fix="pack for more epochs",
    )
