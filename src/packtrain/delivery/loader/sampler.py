"""Which packs one rank trains, micro-batch by micro-batch, from any position of a schedule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from torch.utils.data import Sampler

from packtrain.core.errors import ConfigError, nearest
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.packing.schedule import EMPTY, Schedule

Span = Literal["epoch", "run"]


class Turn(NamedTuple):
    """One micro-batch of one rank, and where the schedule stands once it is done."""

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
        self, schedule: Schedule, rank: int = 0, world: int = 1, *, span: Span = "epoch", rows_per_batch: int = 1
    ) -> None:
        if world < 1 or not 0 <= rank < world:
            raise ConfigError("rank, world", got=f"{rank}, {world}", expected="a rank from 0 to world - 1")
        if span not in get_args(Span):
            names = get_args(Span)
            raise ConfigError("span", got=span, expected=", ".join(names), fix=nearest(str(span), names))
        if isinstance(rows_per_batch, bool) or not isinstance(rows_per_batch, int) or rows_per_batch < 1:
            raise ConfigError("rows_per_batch", got=rows_per_batch, expected="a positive whole number")
        self.schedule, self.rank, self.world, self.span = schedule, rank, world, span
        self.rows_per_batch = rows_per_batch
        self.epoch = 0
        self.next_pack = 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.schedule.accumulation(self.world, self.rows_per_batch)

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
        return whole * self.accumulation + -(-rest // (self.world * self.rows_per_batch))

    def __iter__(self) -> Iterator[list[PackKey]]:
        return (list(turn.keys) for turn in self.turns())

    def turns(self) -> Iterator[Turn]:
        """What is left from the position on; moving the position does not change an iteration that has started."""
        epoch, next_pack = self.epoch, self.next_pack
        yield from self._epoch(epoch, next_pack)
        if self.span == "run":
            for later in range(epoch + 1, self.schedule.plan.num_epochs):
                yield from self._epoch(later, 0)

    def _epoch(self, epoch: int, next_pack: int) -> Iterator[Turn]:
        size = self.schedule.packs_per_step
        first, done = divmod(next_pack, size)
        if next_pack >= self.schedule.plan.epoch(epoch).num_packs:
            return
        for number in range(first, self.schedule.num_steps(epoch)):
            yield from self._step(epoch, number, done)
            done = 0

    def _step(self, epoch: int, number: int, done: int) -> Iterator[Turn]:
        rows = self.rows_per_batch
        packs = self.schedule.micro_batches(epoch, number, self.world, done, rows_per_batch=rows)
        if self.span == "epoch":
            packs = packs[(packs != EMPTY).any(axis=1)]
        mine = packs[:, self.rank * rows : (self.rank + 1) * rows].tolist()
        counts = (packs != EMPTY).sum(axis=1).tolist()
        trained = number * self.schedule.packs_per_step + done
        before = self.accumulation - len(mine)
        for at, (batch, count) in enumerate(zip(mine, counts, strict=True)):
            trained += count
            key = PackKey(epoch=epoch, pack=EMPTY, step=number, micro_batch=before + at, last=at == len(mine) - 1)
            yield Turn(tuple(key._replace(pack=pack) for pack in batch), epoch, trained)


def rank_and_world() -> tuple[int, int]:
    """Of the process group, else of the launcher's environment, else of a process alone."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def check_ranks(rank: int, world: int) -> None:
    """Refuse a trainer that counts other ranks than were started: each process would train a model of its own."""
    there = rank_and_world()
    if (rank, world) != there:
        raise ConfigError(
            "ranks",
            got=f"rank {rank} of {world} in the trainer, rank {there[0]} of {there[1]} as launched",
            expected="the same in both",
            fix="without GPUs, set it: TrainingArguments(use_cpu=True), Accelerator(cpu=True), "
            "lightning.Trainer(accelerator='cpu', strategy='ddp', devices=...); or start one process",
        )
