"""Batches in the order of a schedule, with a state that is a position: a DataLoader over packs, and a stream of packs.

The state says which packs the caller has been given. What workers have prepared beyond that does not count, and going
from a state reads nothing before it, so it takes as long at the end of an epoch as at its start.

    for batch in loader:
        model(**batch).loss.backward()
        if batch.info.keys[0].last:  # the last micro-batch of its optimizer step
            optimizer.step()
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from packtrain.core.errors import DataError, PacktrainError, describe_exits, in_one_line
from packtrain.delivery.collate.shared_memory import SharedBatches
from packtrain.delivery.encode.encoded_sample import PackedRow
from packtrain.delivery.encode.pack_source import PackSource
from packtrain.delivery.loader.sampler import LoaderPosition, LoaderProgress, LoaderSpan, PackSampler, rank_and_world
from packtrain.delivery.loader.workers import (
    WORKER_DIED,
    advice,
    defer_worker_deaths,
    exit_codes,
    leave_group,
    shared_memory_full,
    signals_blocked,
)
from packtrain.packing.schedule import EMPTY_PACK, Schedule

Collate = Callable[[Sequence[PackedRow]], Any]
MOST_FILES = 5  # named where a worker has died
_STREAM = "stream"  # in a state
_RAISED_BY_WORKER = "Caught "  # how errors begin that a worker has raised


class PackLoader(DataLoader):
    """This rank's batches, an epoch at a time or the whole run; see `LoaderPosition` for where each iteration begins.

    A batch is one pack, or `rows_per_batch` of them for a collator that makes a row of each.
    """

    batch_sampler: PackSampler

    def __init__(
        self,
        source: PackSource,
        schedule: Schedule,
        collator: Collate,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        span: LoaderSpan = "epoch",
        rows_per_batch: int = 1,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        multiprocessing_context: str | None = None,
    ) -> None:
        detected = rank_and_world()
        rank, world_size = (
            default if value is None else value for value, default in zip((rank, world_size), detected, strict=True)
        )
        sampler = PackSampler(schedule, rank, world_size, span=span, rows_per_batch=rows_per_batch)
        self._position = LoaderPosition(sampler)
        self._stream: Mapping[str, Any] | None = None  # of packs that were not measured: from where to read on
        super().__init__(
            source,  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=SharedBatches(collator),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            # Workers that stay spare the start of processes in every epoch.
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=leave_group,
            # DataLoader draws a seed whenever it is iterated. From the global generator it would change dropout.
            generator=torch.Generator().manual_seed(schedule.seed),
        )

    def __repr__(self) -> str:
        sampler = self.batch_sampler
        rank = f"rank {sampler.rank} of {sampler.world_size}"
        return f"PackLoader({self.schedule!r}, {rank}, epoch {self.epoch}, {self.num_workers} workers)"

    # ---- position

    @property
    def schedule(self) -> Schedule:
        """The order of packs."""
        return self.batch_sampler.schedule

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.schedule.num_steps()

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step; the last of an epoch may have fewer, see `PackKey.last`."""
        return self.batch_sampler.accumulation

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers or continues."""
        return self.batch_sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Deliver this epoch next, from its start; the epoch of a loaded state continues from there."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The LoaderState as plain values: after the last delivered batch."""
        return self._position.state() | ({} if self._stream is None else {_STREAM: self._stream})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same schedule, saved on any number of ranks and workers."""
        stream = state.get(_STREAM) if isinstance(state, Mapping) else None
        self._position.load(state if stream is None else {key: state[key] for key in state if key != _STREAM})
        if stream is not None:
            self.dataset.load_state_dict(stream)
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress = self._position.begin()
        if not self.num_workers:
            return _Delivery(self, super().__iter__(), progress)
        forks = self._forks()
        if forks:
            self.dataset.warm_up()  # seconds in every worker otherwise
        with signals_blocked(forks=forks):
            return _Delivery(self, super().__iter__(), progress)

    def _forks(self) -> bool:
        """Do workers begin with what this process has loaded?"""
        context = self.multiprocessing_context or multiprocessing
        return context.get_start_method() == "fork"


class _Delivery:
    """One iteration over the batches of a loader."""

    def __init__(self, loader: PackLoader, batches: Iterator[Any], progress: LoaderProgress) -> None:
        self._loader, self._batches, self._progress = loader, batches, progress
        self._broken = self._ended = self.waiting = False
        self._workers = tuple(getattr(batches, "_workers", ()))
        self.pids = frozenset(worker.pid for worker in self._workers)
        if self._workers:
            defer_worker_deaths(self)

    def __iter__(self) -> _Delivery:
        return self

    def __next__(self) -> Any:
        if self._broken:  # torch would continue after the failed batch, which then is lost
            raise DataError(
                f"loader of rank {self._loader.batch_sampler.rank}",
                got="next batch requested after an error",
                expected="a new iteration; the failed batch was not delivered",
                fix="pass state_dict() to load_state_dict(), and iterate again",
            )
        self._broken = True  # until there is a batch, or the end
        batch = self._next()
        self._broken = False
        if (stream := getattr(getattr(batch, "info", None), "stream", None)) is not None:
            self._loader._stream = stream
        self._progress.advance()
        return batch

    def _next(self) -> Any:
        try:
            self.waiting = True
            if not self._ended and (codes := exit_codes(self._workers)):
                raise RuntimeError(f"DataLoader worker (died between two batches: {describe_exits(codes)})")
            return next(self._batches)
        except StopIteration:
            self._broken, self._ended = False, True
            self._loader._position.end(self._progress)
            if self._loader._position.over:
                self._loader.dataset.close()
            raise
        except PacktrainError as error:
            original = _original_error(error)
            if original is error:
                raise
            raise original from error
        except (RuntimeError, OSError, EOFError) as error:
            if (full := shared_memory_full(error)) is not None:
                raise full from error
            if not self._is_loss(error):
                raise
            raise self._worker_lost_error(error) from error
        finally:
            self.waiting = False

    def _is_loss(self, error: Exception) -> bool:
        """Does this error say that a worker is gone, and not that one has raised it?"""
        if isinstance(error, RuntimeError):
            return WORKER_DIED.match(str(error)) is not None
        # The connection to a worker that died in the middle of handing over a batch.
        return self._loader.num_workers > 0 and not str(error).startswith(_RAISED_BY_WORKER)

    def _worker_lost_error(self, error: Exception) -> DataError:
        """The error for a dead worker: where, and which packs it was building."""
        loader = self._loader
        # When the signal of the death comes, torch raises its own error, wherever we are: let it be here.
        with suppress(RuntimeError):
            time.sleep(0.2)
        keys = self._progress.ahead(max(1, loader.num_workers * (loader.prefetch_factor or 1)))
        packs = ", ".join(str(key.pack) for key in keys if key.pack != EMPTY_PACK)
        files, codes = loader.dataset.data_files(keys), exit_codes(self._workers)
        more = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
        return DataError(
            f"loader of rank {loader.batch_sampler.rank}"
            + (f", epoch {keys[0].epoch}, step {keys[0].step}" if keys else ""),
            got=f"a worker process was lost ({describe_exits(codes) or in_one_line(error)}) while packs {packs}"
            f" were being built, from {', '.join(files[:MOST_FILES])}{more}",
            expected="workers that live as long as the loader",
            fix=advice(codes),
        )


def _original_error(error: PacktrainError) -> PacktrainError:
    """An error of a worker as the worker said it: torch hands it over with a traceback in place of its first line."""
    text, name = str(error), f"{type(error).__module__}.{type(error).__qualname__}: "
    if not text.startswith(_RAISED_BY_WORKER) or name not in text:
        return error
    return type(error)(text[text.rindex(name) + len(name) :].rstrip())


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
        world_size: int | None = None,
        rows_per_batch: int = 1,
    ) -> None:
        detected = rank_and_world()
        rank, world_size = (
            default if value is None else value for value, default in zip((rank, world_size), detected, strict=True)
        )
        self._source = source
        self._position = LoaderPosition(PackSampler(schedule, rank, world_size, rows_per_batch=rows_per_batch))

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Rank, world size, and the epoch and pack that the next iteration begins with: what a copy elsewhere needs."""
        sampler = self._position.sampler
        return sampler.rank, sampler.world_size, sampler.epoch, sampler.next_pack

    @classmethod
    def at(
        cls, source: PackSource, schedule: Schedule, place: tuple[int, int, int, int], *, rows_per_batch: int = 1
    ) -> PackStream:
        """A stream at the position of another one."""
        rank, world_size, epoch, next_pack = place
        stream = cls(source, schedule, rank=rank, world_size=world_size, rows_per_batch=rows_per_batch)
        stream._position.sampler.seek(epoch, next_pack)
        return stream

    def __len__(self) -> int:
        """Packs of the epoch for this rank, with those that fill up."""
        return len(self._position.sampler) * self._position.sampler.rows_per_batch

    def set_epoch(self, epoch: int) -> None:
        """Deliver this epoch next, from its start; the epoch of a loaded state continues from there."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The LoaderState as plain values: after the last delivered pack."""
        return self._position.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same schedule, saved on any number of ranks."""
        self._position.load(state)

    def __iter__(self) -> Iterator[PackedRow]:
        progress = self._position.begin()
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        number = 0
        while (micro_batch := progress.next) is not None:
            *before, last = micro_batch.keys
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
        self._position.end(progress)
        if self._position.over:
            self._source.close()
