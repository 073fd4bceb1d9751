"""The loader delivers each pack once, in the order of the schedule, and goes on from any state as if never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from made_packs import BROKEN, GONE, KILLER, content, loader_of, plan_of, reads, source_of

from packtrain.core.errors import ArtifactError, ConfigError, DataError, MemoryLimitError
from packtrain.delivery.loader import workers as processes_of
from packtrain.delivery.loader.pack_loader import PackLoader, PackStream
from packtrain.delivery.loader.sampler import PackSampler, rank_and_world
from packtrain.packing.schedule import EMPTY_PACK, Schedule

WORKERS = [0, 2]


def contents(batches: Any) -> list[tuple[Any, ...]]:
    return [content(batch) for batch in batches]


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """As it is after a file."""
    return json.loads(json.dumps(state))


def assert_resumes_exactly(make: Any) -> int:
    """A state saved before every batch leads to the batches behind it, in a loader of its own."""
    whole, states, loader = [], [], make()
    delivery = iter(loader)
    while True:
        states.append(plain(loader.state_dict()))
        try:
            whole.append(content(next(delivery)))
        except StopIteration:
            break
    assert whole, "nothing was produced, so nothing was tested"
    for step, state in enumerate(states):
        again = make()
        again.load_state_dict(state)
        assert again.state_dict() == state
        begin = step
        if again.batch_sampler.span == "run":  # there, micro-batches in which no rank has a pack are no progress
            begin = states.index(state)
            assert all(keys[0].pack == EMPTY_PACK for keys, _ in whole[begin:step])
        assert contents(again) == whole[begin:], f"resume at step {step} diverges"
    return len(whole)


# ---- delivery


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_pack_is_delivered_once_in_each_epoch(world_size: int, workers: int) -> None:
    plan = plan_of(10, 7)
    ranks = [loader_of(plan, rank=rank, world_size=world_size, num_workers=workers) for rank in range(world_size)]
    for epoch in range(2):
        delivered = [[batch.info.keys[0] for batch in rank] for rank in ranks]
        assert len({len(keys) for keys in delivered}) == 1, "ranks have as many micro-batches as each other"
        packs = [key.pack for keys in delivered for key in keys if key.pack != EMPTY_PACK]
        assert sorted(packs) == list(range(plan.epoch(epoch).num_packs))
        assert {key.epoch for keys in delivered for key in keys} == {epoch}
        schedule = ranks[0].schedule
        for number in range(schedule.num_steps(epoch)):
            mine = [[key for key in keys if key.step == number] for keys in delivered]
            wanted = schedule.micro_batches(epoch, number, world_size)
            wanted = wanted[(wanted != EMPTY_PACK).any(axis=1)]
            assert [[key.pack for key in keys] for keys in mine] == wanted.T.tolist()
            for keys in mine:
                until = schedule.accumulation(world_size)
                assert [key.micro_batch for key in keys] == list(range(until - len(keys), until))
                assert [key.last for key in keys] == [False] * (len(keys) - 1) + [True]


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    plan = plan_of(9, 5)
    streams = [
        [contents(loader) for _ in range(2)]
        for loader in (loader_of(plan, rank=1, world_size=2, num_workers=workers) for workers in (0, 1, 3))
    ]
    assert streams[0][0] != streams[0][1]
    assert streams[0] == streams[1] == streams[2]


def test_lengths_and_steps_are_known_before() -> None:
    loader = loader_of(plan_of(10, 3), packs_per_step=4, rank=0, world_size=3)
    assert (loader.accumulation, loader.num_steps) == (2, 4)
    for epoch, micro_batches in ((0, 5), (1, 1)):
        loader.set_epoch(epoch)
        assert len(loader) == micro_batches == len(list(loader))
    run = loader_of(plan_of(10, 3), packs_per_step=4, rank=0, world_size=3, span="run")
    assert len(run) == 8 == len(list(run))


def test_a_run_is_its_epochs_one_after_the_other_in_whole_steps() -> None:
    plan = plan_of(10, 3, 6)
    run, epochs = (list(loader_of(plan, rank=1, world_size=2, span="run")), loader_of(plan, rank=1, world_size=2))
    keys = [batch.info.keys[0] for batch in run]
    assert Counter((key.epoch, key.step) for key in keys) == dict.fromkeys(
        [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)], 2
    )
    assert [key.micro_batch for key in keys] == [0, 1] * 6
    whole = [one for _ in range(3) for one in contents(epochs)]
    assert [one for one in contents(run) if one in whole] == whole
    assert all(key.pack == EMPTY_PACK for key, one in zip(keys, contents(run), strict=True) if one not in whole)


@pytest.mark.parametrize("workers", WORKERS)
def test_nothing_is_drawn_from_the_global_generators(workers: int) -> None:
    loader = loader_of(plan_of(6), num_workers=workers)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert len(list(loader)) == 6
    assert torch.equal(torch.get_rng_state(), before)
    plain_loader = torch.utils.data.DataLoader(range(3), num_workers=workers)
    list(plain_loader)
    assert not torch.equal(torch.get_rng_state(), before), "a plain loader would have drawn a seed"


def test_an_iteration_that_is_given_up_changes_nothing() -> None:
    loader = loader_of(plan_of(6, 6))
    first = content(next(iter(loader)))
    assert contents(loader)[0] == first, "looking at one batch does not lose it"
    delivery = iter(loader)
    second_epoch = [content(next(delivery)) for _ in range(len(loader))]  # all of it, without asking for its end
    assert second_epoch[0][0][0].epoch == 1
    loader.set_epoch(0)
    assert contents(loader)[0] == first


def test_all_batches_without_asking_for_the_end_are_an_epoch() -> None:
    loader = loader_of(plan_of(6, 6))
    delivery = iter(loader)
    for _ in range(len(loader)):
        next(delivery)
    assert next(iter(loader)).info.keys[0].epoch == 1


def test_more_epochs_than_the_plan_has_are_refused() -> None:
    loader = loader_of(plan_of(3, 3))
    assert len(list(loader)) == len(list(loader)) == 3
    with pytest.raises(ConfigError, match="this one has 2"):
        iter(loader)
    with pytest.raises(ConfigError, match="pack for more epochs"):
        loader.set_epoch(2)
    loader.set_epoch(0)
    assert len(list(loader)) == 3


@pytest.mark.parametrize("workers", WORKERS)
def test_a_plan_of_one_epoch_is_delivered_again_and_again(workers: int) -> None:
    """As data of validation are; a state is a place in the iteration that it was taken in."""

    def make(**options: Any) -> PackLoader:
        return loader_of(plan_of(5), 3, rank=1, world_size=2, num_workers=workers, **options)

    loader = make()
    first = contents(loader)
    end = plain(loader.state_dict())
    delivery = iter(loader)
    assert [content(next(delivery)) for _ in first] == first  # without asking for its end
    assert contents(loader) == first
    assert loader.state_dict() == end
    delivery = iter(loader)
    next(delivery)
    for state, rest in ((loader.state_dict(), first[1:]), (end, [])):
        again = make()
        again.load_state_dict(state)
        assert contents(again) == rest
        assert contents(again) == first
    run = make(span="run")
    list(run)
    with pytest.raises(ConfigError, match="pack for more epochs"):
        iter(run)


@pytest.mark.parametrize("asked_for_the_end", [True, False])
def test_an_epoch_that_was_delivered_is_delivered_again_when_asked_for(asked_for_the_end: bool) -> None:
    loader = loader_of(plan_of(3, 3))
    for epoch in (1, 1, 0, 0, 1):
        loader.set_epoch(epoch)
        delivery = iter(loader)
        found = [next(delivery) for _ in range(len(loader))]
        if asked_for_the_end:
            assert next(delivery, None) is None
        assert [batch.info.keys[0].epoch for batch in found] == [epoch] * 3


# ---- states


@pytest.mark.parametrize("span", ["epoch", "run"])
@pytest.mark.parametrize(("world_size", "size"), [(1, 4), (2, 5), (3, 4), (4, 9)])
def test_resumes_exactly_at_every_step(span: Any, world_size: int, size: int) -> None:
    plan = plan_of(14, 11)
    for rank in range(world_size):
        assert assert_resumes_exactly(
            lambda rank=rank: loader_of(plan, size, rank=rank, world_size=world_size, span=span)
        ) == len(loader_of(plan, size, rank=rank, world_size=world_size, span=span))


def test_resumes_exactly_with_workers() -> None:
    plan = plan_of(7)
    assert_resumes_exactly(lambda: loader_of(plan, 3, rank=1, world_size=2, num_workers=2))


def test_what_workers_have_prefetched_does_not_count() -> None:
    plan = plan_of(20)
    loader = loader_of(plan, num_workers=2, prefetch_factor=4)
    delivery = iter(loader)
    for given_out in range(1, 4):
        next(delivery)
        assert loader.state_dict()["next_pack"] == given_out


def test_the_next_epoch_begins_at_its_beginning() -> None:
    plan = plan_of(6, 6, 6)
    loader = loader_of(plan)
    whole = [contents(loader) for _ in range(3)]
    state = Schedule(plan, packs_per_step=4, seed=3).state_after(3)
    again = loader_of(plan)
    again.load_state_dict({"schedule": state.schedule, "epoch": 1, "next_pack": 4})
    again.set_epoch(1)  # as a loop over epochs does; it is the epoch that is under way
    assert contents(again) == whole[1][4:]
    again.set_epoch(2)
    assert contents(again) == whole[2]


@pytest.mark.parametrize("workers", WORKERS)
def test_going_on_reads_nothing_that_is_done(tmp_path: Path, workers: int) -> None:
    plan = plan_of(30)
    order = loader_of(plan).schedule.order(0)
    for position in (0, 10, 29):
        log = tmp_path / f"{position}"
        loader = loader_of(plan, log=log, num_workers=workers)
        loader.load_state_dict({**loader.state_dict(), "next_pack": position})
        list(loader)
        assert sorted(reads(log)) == sorted(order[position:].tolist())


@settings(max_examples=150, deadline=None)
@given(
    packs=st.integers(1, 40),
    size=st.integers(1, 12),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=2, max_size=4),
    data=st.data(),
)
def test_each_pack_once_on_any_number_of_ranks_and_rows(
    packs: int, size: int, worlds: list[tuple[int, int]], data: st.DataObject
) -> None:
    plan = plan_of(packs)
    schedule = Schedule(plan, packs_per_step=size)
    epoch, next_pack, trained = 0, 0, Counter[int]()
    for number, (world_size, rows) in enumerate(worlds):
        samplers = [PackSampler(schedule, rank, world_size, rows_per_batch=rows) for rank in range(world_size)]
        for sampler in samplers:
            sampler.seek(epoch, next_pack)
        turns = list(zip(*(sampler.micro_batches() for sampler in samplers), strict=True))
        stop = data.draw(st.integers(0, len(turns))) if number < len(worlds) - 1 else len(turns)
        for ranks in turns[:stop]:
            assert len({turn.next_pack for turn in ranks}) == 1, "the state is the same on every rank"
            next_pack = ranks[0].next_pack
            keys = [key for turn in ranks for key in turn.keys]
            assert len(keys) == world_size * rows
            assert len({key[2:] for key in keys}) == 1, "step, micro-batch and the end of the step, too"
            trained.update(key.pack for key in keys if key.pack != EMPTY_PACK)
    assert trained == Counter(range(packs))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 8), (3, 1)])
def test_saved_on_some_ranks_and_continued_on_others(before: int, after: int) -> None:
    plan = plan_of(29)
    for stop in range(1, 5):
        loaders = [loader_of(plan, 8, rank=rank, world_size=before) for rank in range(before)]
        deliveries = [iter(loader) for loader in loaders]
        packs = [next(delivery).info.keys[0].pack for delivery in deliveries for _ in range(stop)]
        states = [plain(loader.state_dict()) for loader in loaders]
        assert all(state == states[0] for state in states)
        for rank in range(after):
            loader = loader_of(plan, 8, rank=rank, world_size=after)
            loader.load_state_dict(states[0])
            packs += [batch.info.keys[0].pack for batch in loader]
        assert sorted(pack for pack in packs if pack != EMPTY_PACK) == list(range(29))


def test_a_state_of_another_schedule_is_refused() -> None:
    plan = plan_of(8)
    state = loader_of(plan).state_dict()
    for other in (loader_of(plan, 5), loader_of(plan, seed=4), loader_of(plan_of(8, shuffle=False))):
        with pytest.raises(ArtifactError, match="packs per step, seed and balance"):
            other.load_state_dict(state)
    for wrong in ({}, {**state, "next_pack": -1}, {**state, "next_pack": 9}, {**state, "more": 1}, [state], None):
        with pytest.raises(ArtifactError, match="loader state"):
            loader_of(plan).load_state_dict(wrong)  # type: ignore[arg-type]


# ---- other code that wraps loaders


@pytest.mark.contract
@pytest.mark.parametrize("workers", WORKERS)
def test_batches_that_accelerate_skips_are_not_read(tmp_path: Path, workers: int) -> None:
    plan = plan_of(10, 10)
    whole = [contents(loader) for loader in [loader_of(plan)] for _ in range(2)]
    log = tmp_path / "log"
    loader = loader_of(plan, log=log, num_workers=workers)
    loader.set_epoch(1)
    assert contents(skip_first_batches(loader, 7)) == whole[1][7:]
    assert len(reads(log)) == 3


# ---- what goes wrong


def test_a_worker_that_dies_is_said_with_its_packs() -> None:
    loader = loader_of(plan_of(12, shuffle=False), num_workers=2, wrong={7: KILLER})
    with pytest.raises(DataError, match="worker process was lost") as caught:
        list(loader)
    assert " 7" in caught.value.got
    assert "SIGKILL" in caught.value.got
    assert caught.value.got.endswith("from data.jsonl")
    assert "memory" in caught.value.fix
    assert "epoch 0" in str(caught.value)


@pytest.mark.parametrize(("how", "said"), [(signal.SIGKILL, "out of memory"), (signal.SIGSEGV, "on these files")])
def test_a_worker_killed_between_two_batches_is_noticed(how: signal.Signals, said: str) -> None:
    loader = loader_of(plan_of(40), num_workers=1, prefetch_factor=1)
    delivery = iter(loader)
    next(delivery)

    worker = loader._iterator._workers[0]
    os.kill(worker.pid, how)
    worker.join()
    for _ in range(200):  # wherever the signal of the death arrives, it is not the caller's fault
        time.sleep(0.001)
    with pytest.raises(DataError, match=rf"(?s)a worker process was lost \({how.name}\).*{said}"):
        next(delivery)


def test_the_death_of_others_is_still_raised_by_torch() -> None:
    loader = loader_of(plan_of(4), num_workers=1)
    delivery = iter(loader)
    next(delivery)
    assert not processes_of._is_deferred("DataLoader worker (pid 1) is killed by signal: Killed.")
    pid = loader._iterator._workers[0].pid
    assert processes_of._is_deferred(f"DataLoader worker (pid {pid}) is killed by signal: Killed.")
    list(delivery)


def test_batches_of_workers_are_in_memory_without_a_name() -> None:
    """What is killed leaves nothing in /dev/shm, and a small one is no limit."""
    before = set(os.listdir("/dev/shm"))
    loader = loader_of(plan_of(6), num_workers=1)
    batches = list(loader)
    shared = [value for batch in batches for value in batch.values() if isinstance(value, torch.Tensor)]
    assert shared
    assert all(value.is_shared() for value in shared)
    links = {os.readlink(f"/proc/self/fd/{value.untyped_storage()._share_fd_cpu_()[0]}") for value in shared}
    assert links == {"/memfd:packtrain-batch (deleted)"}
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")]


@pytest.mark.parametrize(
    "words",
    [
        "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)",
        "unable to mmap 4096 bytes from file </torch_1_2_3>: unable to write to file </torch_1_2_3>",
    ],
)
def test_a_small_dev_shm_is_said_with_the_ways_out(words: str) -> None:
    def collate(rows: Any) -> Any:
        raise RuntimeError(words)

    schedule = Schedule(plan_of(4), packs_per_step=4)
    for workers in (0, 1):
        loader = PackLoader(source_of(plan_of(4)), schedule, collate, num_workers=workers)
        with pytest.raises(MemoryLimitError, match=r"(?s)/dev/shm.*--shm-size.*num_workers=0"):
            next(iter(loader))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_changed_data_stops_the_run_and_names_the_pack(workers: int) -> None:
    loader = loader_of(plan_of(6, shuffle=False), num_workers=workers, wrong={4: GONE})
    with pytest.raises(DataError) as caught:
        list(loader)
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "what was measured" in said
    assert said.startswith("sample sample-4\n")
    assert "sample-4 of pack 4" in said


@pytest.mark.parametrize("workers", WORKERS)
def test_what_stands_behind_an_error_is_not_delivered_in_its_place(workers: int) -> None:
    loader = loader_of(plan_of(6, shuffle=False), 1, num_workers=workers, wrong={4: GONE})
    delivery = iter(loader)
    assert [next(delivery).info.keys[0].pack for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="what was measured"):
        next(delivery)
    with pytest.raises(DataError, match="next batch requested after an error"):
        next(delivery)
    assert loader.state_dict()["next_pack"] == 4, "the batch of the error was not handed out"
    mended = loader_of(plan_of(6, shuffle=False), 1)
    mended.load_state_dict(loader.state_dict())
    assert [batch.info.keys[0].pack for batch in mended] == [4, 5]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_broken_sample_is_left_out_and_said(workers: int) -> None:
    loader = loader_of(plan_of(6, shuffle=False), num_workers=workers, wrong={4: BROKEN})
    batches = {batch.info.keys[0].pack: batch for batch in loader}
    assert [entry.id for batch in batches.values() for entry in batch.info.failures] == ["sample-4"]
    assert batches[4].info.supervised_tokens == 0
    assert batches[4]["labels"].ne(-100).sum() == 0
    assert batches[3].info.supervised_tokens > 0


def test_a_stream_counts_no_pack_that_could_not_be_read() -> None:
    plan = plan_of(6, shuffle=False)
    schedule = Schedule(plan, packs_per_step=1)
    stream = PackStream(source_of(plan, wrong={4: GONE}), schedule)
    rows = iter(stream)
    assert [next(rows).key.pack for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(DataError):
        next(rows)
    mended = PackStream(source_of(plan), schedule)
    mended.load_state_dict(plain(stream.state_dict()))
    assert [row.key.pack for row in mended] == [4, 5]


# ---- ranks


def test_rank_and_world_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rank_and_world() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = loader_of(plan_of(9), 3)
    assert (loader.batch_sampler.rank, loader.batch_sampler.world_size) == (2, 3)
    assert loader_of(plan_of(9), 3, rank=1).batch_sampler.rank == 1


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0)])
def test_ranks_that_cannot_be_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        PackSampler(Schedule(plan_of(2), packs_per_step=1), rank, world_size)


def test_unknown_spans_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'epoch'"):
        loader_of(plan_of(2), span="epochs")


SIGNALLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from made_packs import content, loader_of, plan_of
from torch.utils.data._utils import signal_handling

def signal_all():
    for number in numbers:
        os.killpg(os.getpgrp(), number)

if __name__ == "__main__":
    method, begun = {method!r}, []
    os.setpgid(0, 0)
    caught, numbers = [], [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        signal.signal(number, lambda found, _: caught.append(found))
    plan = plan_of(12, 1)
    loader = loader_of(plan, num_workers=2, multiprocessing_context=method)
    start = loader.multiprocessing_context.Process.start
    if method == "fork":  # the worker is signalled when torch's handlers are in place, and nothing else is
        (ready, is_ready), (sent, is_sent), handlers = os.pipe(), os.pipe(), signal_handling._set_worker_signal_handlers
        def set_and_wait():
            handlers()
            os.write(is_ready, b".")
            os.read(sent, 1)
        signal_handling._set_worker_signal_handlers = set_and_wait
    def start_and_signal(process):
        start(process)
        begun.append(process)
        if method == "fork":
            os.read(ready, 1)
        signal_all()
        if method == "fork":
            os.write(is_sent, b".")
    loader.multiprocessing_context.Process.start = start_and_signal
    delivery = iter(loader)
    found = [content(next(delivery))]
    signal_all()
    found += [content(batch) for batch in delivery]
    assert set(caught) == set(numbers)
    assert len(begun) == 2 and all(worker.is_alive() for worker in begun)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert found == [content(batch) for batch in loader_of(plan)]
    print("whole")
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_signal_to_all_processes_of_a_run_leaves_its_workers(method: str) -> None:
    """Launchers and terminals end a run so; the process that trains has yet to save."""
    script = SIGNALLED.format(path=[str(Path(__file__).parent)], method=method)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "whole\n", done.stderr
