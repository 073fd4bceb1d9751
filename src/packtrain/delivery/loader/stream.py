"""The packs of one rank as a stream: an IterableDataset in the order of a schedule, shared out over workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from packtrain.delivery.encode.encoded_sample import PackedRow
from packtrain.delivery.encode.pack_source import PackSource
from packtrain.delivery.loader.position import Standing
from packtrain.delivery.loader.sampler import PackSampler, rank_and_world
from packtrain.packing.schedule import Schedule


class PackStream(IterableDataset[PackedRow]):
    """This rank's packs of one epoch after the other, in the order in which a PackLoader delivers them.

    In a worker of a DataLoader it gives the packs of every n-th batch, and with a batch_size of `rows_per_batch`
    DataLoader puts them together in order again. Its state is that of the process it is iterated in: with workers this
    object stays where it was, and needs `set_epoch` before each epoch (workers that persist go on by themselves, and do
    not hear of it). Better take a PackLoader, which knows what was handed out.
    """

    def __init__(
        self,
        source: PackSource,
        schedule: Schedule,
        *,
        rank: int | None = None,
        world: int | None = None,
        rows_per_batch: int = 1,
    ) -> None:
        here = rank_and_world()
        rank, world = (found if given is None else given for given, found in zip((rank, world), here, strict=True))
        self._source = source
        self._standing = Standing(PackSampler(schedule, rank, world, rows_per_batch=rows_per_batch))

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Rank, world, and the epoch and pack with which the next iteration begins: what a copy elsewhere needs."""
        sampler = self._standing.sampler
        return sampler.rank, sampler.world, sampler.epoch, sampler.next_pack

    @classmethod
    def at(
        cls, source: PackSource, schedule: Schedule, place: tuple[int, int, int, int], *, rows_per_batch: int = 1
    ) -> PackStream:
        """A stream that stands where another one stood."""
        rank, world, epoch, next_pack = place
        stream = cls(source, schedule, rank=rank, world=world, rows_per_batch=rows_per_batch)
        stream._standing.sampler.seek(epoch, next_pack)
        return stream

    def __len__(self) -> int:
        """Packs of the epoch for this rank, with those that fill up."""
        return len(self._standing.sampler) * self._standing.sampler.rows_per_batch

    def set_epoch(self, epoch: int) -> None:
        """Deliver this epoch next, from its start; the epoch of a loaded state continues from there."""
        self._standing.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The LoaderState as plain values: after the last delivered pack."""
        return self._standing.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same schedule, saved on any number of ranks."""
        self._standing.load(state)

    def __iter__(self) -> Iterator[PackedRow]:
        progress = self._standing.begin()
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        number = 0
        while (turn := progress.next) is not None:
            *before, last = turn.keys
            mine = number % every == first
            for key in before if mine else ():  # a batch of which some were handed out begins again
                yield self._source[key]
            row = self._source[last] if mine else None
            # Before the pack is handed out: a state that is asked for while the caller has it counts it. Not before it
            # is there: one that could not be read has not been handed out.
            progress.advance()
            if row is not None:
                yield row
            number += 1
        self._standing.end(progress)
        if self._standing.over:
            self._source.close()
