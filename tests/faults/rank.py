"""A rank that trains nothing: it consumes batches, writes down each of them, and saves its place after every step.

    python rank.py JOB         one rank; RANK and WORLD_SIZE say which
    python rank.py --nursery   imports everything once and forks a rank for every line of JSON on its input

Every line of a ledger is on the disk before the next batch is asked for. The state is saved by the first rank, behind
a barrier, at the end of an optimizer step; what was consumed behind it is what a trainer would do again.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import multiprocessing.util
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import packtrain.app.verify
import packtrain.delivery.collate.collators
import packtrain.delivery.encode.encode
import packtrain.delivery.encode.pack_source
import packtrain.delivery.loader.pack_loader
import packtrain.records.shards.data_files  # noqa: F401  what a dataset would import when it is built
from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.core import retries
from packtrain.core.artifacts import atomic_path, remove_leftovers
from packtrain.core.errors import PacktrainError
from packtrain.delivery.loader.failures import FailureCounter
from packtrain.delivery.loader.sampler import MicroBatch
from packtrain.delivery.trainers.watch import RankWatchdog

BREAK = "PACKTRAIN_TEST_BREAK"  # which fault the loader has: a key of BREAKS
STATE, SKIPPED = "state.json", "skipped.jsonl"
UNEXPECTED = 3  # exit code of an error that is not one of ours
DEADLINE = 20.0  # seconds within which ranks notice that one is gone
PRELOADED = (
    *("torchvision.transforms.v2.functional", "accelerate", "transformers.modeling_utils", "torch._dynamo"),
    *("transformers.models.auto.processing_auto", "transformers.models.auto.modeling_auto"),
    *("transformers.models.qwen2_vl.image_processing_qwen2_vl", "transformers.models.qwen3_vl.processing_qwen3_vl"),
    *("transformers.models.qwen2_vl.image_processing_qwen2_vl_fast", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
    *("transformers.models.qwen3_vl.video_processing_qwen3_vl", "pandas"),
)
KINDS: dict[str, Any] = {
    "map": MultiModalDataset,
    "stream": MultiModalIterableDataset,
    "iterated": MultiModalIterableDataset,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of one group are to do."""

    kind: str
    config: dict[str, Any]
    run: str  # the folder of ledgers and state
    attempt: int
    workers: int = 0
    pace: float = 0.0  # seconds that a batch takes
    parks: list[tuple[int, str]] = field(default_factory=list)  # rank and point at which to wait for what comes
    quick_retries: bool = False
    full_disk: bool = False
    max_failure_rate: float = 0.5
    context: str | None = None  # how workers are started


# ---- consuming


class Consumer:
    """One rank."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self.job, self.rank, self.world_size = job, rank, world_size
        self.run = Path(job.run)
        self.failures = FailureCounter(job.max_failure_rate, self.run / SKIPPED)

    def point(self, name: str) -> None:
        """A place at which the job may ask this rank to wait until it is killed or told to go on."""
        if [self.rank, name] not in [list(park) for park in self.job.parks]:
            return
        (self.run / f"parked-{self.job.attempt}-{self.rank}").write_text(name)
        parent = os.getppid()
        while not (self.run / f"go-{self.job.attempt}").exists():
            if os.getppid() != parent:  # the tests are gone: nobody would ever say so
                sys.exit(UNEXPECTED)
            time.sleep(0.005)

    def consume(self) -> None:
        dataset = KINDS[self.job.kind](DatasetConfig(**self.job.config))
        dataset.build()
        if self.job.quick_retries:
            _retry_quickly()
        self.point("built")
        if self.world_size > 1:
            self._meet()
            with RankWatchdog.of_group(deadline=DEADLINE, start_deadline=60) as watch:
                self._deliver(dataset, watch)
            dist.destroy_process_group()
        else:
            self._deliver(dataset, None)

    def _meet(self) -> None:
        """Join the group through a store whose port the first rank writes down."""
        place = self.run / f"meeting-{self.job.attempt}"
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.world_size, is_master=True, wait_for_workers=False)
            with atomic_path(place) as temporary:
                temporary.write_text(str(store.port))
        else:
            while not place.exists():
                time.sleep(0.005)
            store = dist.TCPStore("127.0.0.1", int(place.read_text()), self.world_size, is_master=False)
        limit = timedelta(seconds=90)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=limit)

    def _deliver(self, dataset: Any, watch: RankWatchdog | None) -> None:
        batches = Iterated(dataset) if self.job.kind == "iterated" else self._loader(dataset)
        if self.rank == 0:
            remove_leftovers(self.run, [STATE])
        if (self.run / STATE).exists():
            saved = json.loads((self.run / STATE).read_text())
            batches.load_state_dict(saved["loader"])
            self.failures.load_state_dict(saved["failures"])
        begin = batches.state_dict()
        name = f"ledger-{self.job.attempt:03d}-{self.rank}.jsonl"
        self._ledger = os.open(self.run / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND)
        self._write(epoch=begin["epoch"], next_pack=begin["next_pack"], world_size=self.world_size)
        number = 0
        for _ in range(begin["epoch"], self.job.config["epochs"]):
            for batch in batches:
                if watch is not None:
                    watch.beat(number)
                number += 1
                self._take(batch, batches)
        self.failures.finish()
        self._write(end=True)

    def _loader(self, dataset: Any) -> Any:
        options = {"multiprocessing_context": self.job.context} if self.job.workers else {}
        loader = dataset.loader(num_workers=self.job.workers, **options)
        if os.environ.get(BREAK):
            BREAKS[os.environ[BREAK]](loader)
        return loader

    def _take(self, batch: Any, batches: Any) -> None:
        info = batch.info
        key = info.keys[0]
        self.failures.take(info)
        self._write(
            epoch=key.epoch,
            step=key.step,
            micro_batch=key.micro_batch,
            pack=key.pack,
            ids=list(info.ids),
            failed=[entry.id for entry in info.failures],
            checksum=checksum(batch),
        )
        self.point(f"line:{key.epoch}:{key.step}")
        time.sleep(self.job.pace)
        if key.last:
            self.failures.decide()
            self._save(batches, f"{key.epoch}:{key.step}")

    def _save(self, batches: Any, step: str) -> None:
        if self.world_size > 1:
            dist.barrier()
        if self.rank == 0:
            with atomic_path(self.run / STATE) as temporary:
                state = {"loader": batches.state_dict(), "failures": self.failures.state_dict()}
                temporary.write_text(json.dumps(state))
                self.point(f"save:{step}")
            self.point(f"saved:{step}")
        if self.world_size > 1:
            dist.barrier()

    def _write(self, **line: Any) -> None:
        os.write(self._ledger, json.dumps(line).encode() + b"\n")
        os.fsync(self._ledger)


class Iterated:
    """A streaming dataset iterated as it is, without a loader."""

    def __init__(self, dataset: MultiModalIterableDataset) -> None:
        self._dataset, self._collator = dataset, dataset.get_collator()
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return (self._collator([row]) for row in self._dataset)


def checksum(batch: Any) -> str:
    """Over all that a model would get."""
    found = hashlib.sha256()
    for name in sorted(batch):
        value = batch[name]
        found.update(f"{name} ".encode())
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
            found.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:24]


def _retry_quickly() -> None:
    """As many attempts as ever, with short pauses; for workers, which are forked, too."""
    retries.sleep = lambda seconds: time.sleep(min(seconds, 0.02))


# ---- faults that a loader might have


def _broken_order(loader: Any, change: Any) -> None:
    micro_batches = loader.batch_sampler.micro_batches
    loader.batch_sampler.micro_batches = lambda: iter(change(list(micro_batches())))


def _drop_last(loader: Any) -> None:
    """The last pack of an epoch is never handed out, though the state says so."""

    def change(turns: list[MicroBatch]) -> list[MicroBatch]:
        last = turns[-2]._replace(next_pack=turns[-1].next_pack)
        return [*turns[:-2], last._replace(keys=tuple(key._replace(last=True) for key in last.keys))]

    _broken_order(loader, change)


def _duplicate(loader: Any) -> None:
    """One pack comes twice."""
    _broken_order(loader, lambda turns: [*turns[:2], turns[1], *turns[2:]])


def _swap(loader: Any) -> None:
    """Two packs of one step change places."""

    def change(turns: list[MicroBatch]) -> list[MicroBatch]:
        (first,), (second,) = turns[0].keys, turns[1].keys
        return [
            turns[0]._replace(keys=(first._replace(pack=second.pack),)),
            turns[1]._replace(keys=(second._replace(pack=first.pack),)),
            *turns[2:],
        ]

    _broken_order(loader, change)


def _change(loader: Any) -> None:
    """One token of one batch is another."""
    collate = loader.collate_fn

    def broken(rows: Any) -> Any:
        batch = collate(rows)
        if rows[0].key[2:4] == (1, 0):
            batch["input_ids"][0, 0] += 1
        return batch

    loader.collate_fn = broken


def _count_ahead(loader: Any) -> None:
    """The state counts a pack that has only been prepared."""
    real = loader.state_dict

    def state() -> dict[str, Any]:
        found = real()
        return {**found, "next_pack": found["next_pack"] + (found["next_pack"] > 0)}

    loader.state_dict = state


BREAKS = {"drop": _drop_last, "duplicate": _duplicate, "swap": _swap, "change": _change, "ahead": _count_ahead}


# ---- processes


def run_rank(job: Job) -> int:
    """One rank to its end; the exit code is the one that the command line would have."""
    if job.full_disk:
        _fill_disk()
    if "://" in job.config["dataset_path"]:
        sys.path.append(str(Path(__file__).parents[1] / "records"))
        import shard_checks

        shard_checks.register()
    torch.set_num_threads(1)
    try:
        Consumer(job, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).consume()
    except PacktrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        print(f"unexpected {type(error).__name__}: {error}", file=sys.stderr)
        return UNEXPECTED
    return 0


def _fill_disk() -> None:
    """From now on nothing can be written into the shard cache."""
    from packtrain.records.shards import cache_folder as folder

    def no_space(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder.write_all = no_space


def read_job(path: str) -> Job:
    return Job(**json.loads(Path(path).read_text()))


def preload() -> None:
    """Import what a rank would import when it meets its first picture; a version may not have all of it."""
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)


def nursery() -> str | None:
    """Fork a rank for every request until the input ends. Returns in each rank, with its job."""
    preload()
    logs: dict[int, str] = {}
    pending = b""
    while True:
        _report_ended(logs)
        if not select.select([0], [], [], 0.02)[0]:
            continue
        if not (read := os.read(0, 1 << 16)):
            return None
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if (pid := os.fork()) == 0:
                _become_rank(request)
                return str(request["job"])
            with suppress(OSError):  # whoever of the two comes first: the group is there when its number is known
                os.setpgid(pid, pid)
            logs[pid] = request["log"]
            os.write(1, f"{pid}\n".encode())


def _report_ended(logs: dict[int, str]) -> None:
    """Beside each log, how its process ended."""
    while logs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        ended = Path(logs.pop(pid)).with_suffix(".ended")
        with atomic_path(ended) as temporary:
            temporary.write_text(str(os.waitstatus_to_exitcode(status)))


def _become_rank(request: dict[str, Any]) -> None:
    os.setpgid(0, 0)  # a group of its own, so that it can be killed with all its workers
    log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.update(request["env"])


if __name__ == "__main__":
    which = nursery() if sys.argv[1] == "--nursery" else sys.argv[1]
    code = run_rank(read_job(which)) if which is not None else 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The last breath of gloo takes seconds. What multiprocessing does at the end it does here, too.
        multiprocessing.util._exit_function()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
