"""Real processes and real signals: a run that is killed leaves nobody behind and continues to the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from measuring import chats, command, hashes, start_command, write_lines

from packtrain.app.measure import measure_outcome

FILES = 40
RECORDS = 60  # in each file, which is one unit


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of many units that takes a few seconds."""
    folder = tmp_path_factory.mktemp("data")
    made = chats(FILES * RECORDS, words=50)
    for part in range(FILES):
        lines = [*made[part * RECORDS : (part + 1) * RECORDS], {"id": f"bad{part}", "messages": []}]
        write_lines(folder / f"{part:03}.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, data: Path, qwen: Path) -> dict[str, str]:
    """The hashes of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    table = measure_outcome(data, model=str(qwen), out=folder, workers=1, check=0).table
    counts = table.summary.counts
    assert (counts.rows, counts.ledger) == (FILES * RECORDS, FILES)
    return hashes(folder)


def arguments(data: Path, model: Path, out: Path, workers: int) -> tuple[object, ...]:
    return ("measure", data, "-m", model, "-o", out, "-w", workers, "--check", 0, "--json")


def complete_units(journal: Path) -> int:
    """How many whole units stand in a journal that another process is writing."""
    try:
        content = journal.read_bytes()
    except FileNotFoundError:
        return 0
    at, units = content.find(b"\n") + 1, 0
    while at and at + 12 <= len(content):
        at += 12 + struct.unpack_from("<Q", content, at)[0]
        units += at <= len(content)
    return units


@contextmanager
def running(*command: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run whose processes are gone when the test is over, whatever happens."""
    process = start_command(*command, log=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for(condition: Any, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Wait until something is true of a process that is still running."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline, "the run never came so far"
        time.sleep(0.005)


def children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    """Orphans would go on using memory and cores with nobody to end them."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def assert_continues(run: tuple[object, ...], out: Path, expected: dict[str, str], log: Path, at_least: int) -> None:
    """The same command takes over what is complete and comes to the result of an undisturbed run."""
    code, printed, err = command(*run, log=log)
    assert code == 0, err
    said = json.loads(printed)
    assert not said["reused"]
    assert at_least <= said["resumed_units"] <= FILES
    assert hashes(out) == expected
    assert {path.name for path in out.iterdir()} == {"costs.parquet", "media.parquet", "ledger.jsonl", "measure.json"}


def kill_and_continue(
    data: Path, qwen: Path, expected: dict[str, str], folder: Path, workers: tuple[int, int], moments: list[int]
) -> None:
    """Kill -9 the parent, and only it, as soon as so many units are complete; then let the same command finish."""
    out = folder / "out"
    run = arguments(data, qwen, out, workers[0])
    for units in moments:
        with running(*run, log=folder / "log") as process:
            wait_for(lambda n=units: complete_units(out / ".measure.journal") >= n, process)
            others = children(process)
            assert workers[0] == 1 or others, "no worker process is running"
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert_gone(others)
        assert not (out / "measure.json").exists()
    assert_continues(arguments(data, qwen, out, workers[1]), out, expected, folder / "log", moments[-1])


@pytest.mark.parametrize(
    ("workers", "moments"),
    [
        pytest.param((2, 2), [2, 20], marks=pytest.mark.full),
        ((1, 2), [9]),
        pytest.param((2, 1), [24], marks=pytest.mark.full),
    ],
    ids=["twice", "alone", "late"],
)
def test_killed_run_continues(
    tmp_path: Path, data: Path, qwen: Path, expected: dict[str, str], workers: tuple[int, int], moments: list[int]
) -> None:
    kill_and_continue(data, qwen, expected, tmp_path, workers, moments)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_killed_at_random_moments(tmp_path: Path, data: Path, qwen: Path, expected: dict[str, str], seed: int) -> None:
    chosen = random.Random(seed)
    moments = sorted(chosen.sample(range(1, FILES - 12), 3))
    kill_and_continue(data, qwen, expected, tmp_path, (chosen.choice((1, 2, 3)), chosen.choice((1, 2, 3))), moments)


@pytest.mark.full
@pytest.mark.parametrize("delay", [0.05, 0.3, 0.6, 0.9, 1.2, 1.5])
def test_killed_while_it_starts(tmp_path: Path, data: Path, qwen: Path, expected: dict[str, str], delay: float) -> None:
    """Before, while and after workers come up; nothing may be left running, nothing may be in the way."""
    run = arguments(data, qwen, tmp_path / "out", 2)
    with running(*run, log=tmp_path / "log") as process:
        time.sleep(delay)
        others = children(process)
        process.kill()
    assert_gone(others)
    assert_continues(run, tmp_path / "out", expected, tmp_path / "log", 0)


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_run_says_that_it_continues(
    tmp_path: Path, data: Path, qwen: Path, expected: dict[str, str], workers: int
) -> None:
    """Ctrl-C reaches every process of the terminal."""
    run = arguments(data, qwen, tmp_path / "out", workers)
    with running(*run, log=tmp_path / "log") as process:
        wait_for(lambda: complete_units(tmp_path / "out" / ".measure.journal") >= 3, process)
        others = children(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 1
    said = (tmp_path / "log.err").read_text()
    assert "the same command continues" in said
    assert "Traceback" not in said
    assert (tmp_path / "log.out").read_text() == ""
    assert_gone(others)
    assert_continues(run, tmp_path / "out", expected, tmp_path / "log", 3)


def test_interrupted_while_workers_start(tmp_path: Path, data: Path, qwen: Path) -> None:
    """A worker that is only being started leaves Ctrl-C to its parent, too."""
    with running(*arguments(data, qwen, tmp_path / "out", 2), log=tmp_path / "log") as process:
        wait_for(lambda: len(children(process)) >= 2, process)
        others = children(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 1
    said = (tmp_path / "log.err").read_text()
    assert "the same command continues" in said
    assert "Traceback" not in said
    assert_gone(others)


@pytest.mark.full
def test_killed_worker_is_said_in_words(tmp_path: Path, data: Path, qwen: Path, expected: dict[str, str]) -> None:
    run = arguments(data, qwen, tmp_path / "out", 2)
    with running(*run, log=tmp_path / "log") as process:
        wait_for(lambda: complete_units(tmp_path / "out" / ".measure.journal") >= 3, process)
        others = children(process)
        workers = [child for child in others if "spawn_main" in " ".join(child.cmdline())]
        assert len(workers) == 2
        workers[0].kill()
        assert process.wait(timeout=60) == 1
    said = (tmp_path / "log.err").read_text()
    assert "a worker process ended with SIGKILL" in said  # with what it read, unless it was between two files
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert_gone(others)
    assert_continues(run, tmp_path / "out", expected, tmp_path / "log", 3)


def test_a_folder_that_cannot_be_made_is_bad_usage(tmp_path: Path, qwen: Path) -> None:
    """The error of the system, without a traceback."""
    data = write_lines(tmp_path / "data.jsonl", chats(3))
    code, out, err = command(*arguments(data, qwen, Path("/proc/none/out"), 1), log=tmp_path / "log")
    assert (code, out) == (2, "")
    assert "/proc/none" in err
    assert "Traceback" not in err
