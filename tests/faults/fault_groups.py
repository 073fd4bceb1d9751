"""Groups of real processes that are started, watched, killed and looked for when they should be gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_ledgers import Attempt, read_attempts

from packtrain.records.shards.shard_cache import ShardCache

PROGRAM = Path(__file__).with_name("rank.py")
MARKER = "PACKTRAIN_TEST_MARKER"
TEMPORARY = (".tmp", ".part", ".member", ".journal")  # endings of files that nobody may find after an orderly end


def wait_until(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    """Wait for something that must happen; its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.005)
    return found


class Nursery:
    """One process that has imported everything, from which ranks are forked."""

    def __init__(self, folder: Path) -> None:
        self.marker = uuid.uuid4().hex
        self._folder = folder
        temporary = folder / "tmp"  # where Python keeps the sockets of its own processes
        temporary.mkdir()
        settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary), MARKER: self.marker}
        self._environment = {**os.environ, **settings}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            bufsize=0,
        )

    def start(self, job: Path, log: Path, environment: dict[str, str]) -> int:
        """The process id of a new rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"job": str(job), "log": str(log), "env": environment}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return int(self._process.stdout.readline())

    def living(self) -> list[int]:
        """Ranks and their workers; the dead that nobody has asked after yet do not count."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self._process.pid:
                try:
                    marked = f"{MARKER}={self.marker}".encode() in Path(f"/proc/{name}/environ").read_bytes()
                except OSError:
                    continue
                if marked:
                    found.append(int(name))
        return found

    def close(self) -> None:
        """End it, and whatever is left of its ranks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


@dataclass
class Run:
    """One training run: a folder of ledgers and a state, worked on by one group after the other."""

    nursery: Nursery
    folder: Path
    kind: str
    config: dict[str, Any]
    attempts: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)

    def start(self, world_size: int = 1, *, broken: str = "", **job: Any) -> Group:
        """A group that goes on from the last state."""
        self.attempts += 1
        given = {"kind": self.kind, "config": self.config, "run": str(self.folder), "attempt": self.attempts, **job}
        path = self.folder / f"job-{self.attempts}.json"
        path.write_text(json.dumps(given))
        pids = []
        for rank in range(world_size):
            log = self.folder / f"log-{self.attempts}-{rank}.txt"
            environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
            pids.append(self.nursery.start(path, log, {**environment, "PACKTRAIN_TEST_BREAK": broken}))
        return Group(self, self.attempts, pids)

    def finish(self, world_size: int = 1, **job: Any) -> None:
        """A group that comes to the end of the run."""
        group = self.start(world_size, **job)
        assert group.wait() == [0] * world_size, group.said()
        self.assert_nothing_left()

    def ledgers(self) -> list[Attempt]:
        return read_attempts(self.folder)

    def skipped(self) -> list[str]:
        """The samples in the ledger of failures, by their ids."""
        path = self.folder / "skipped.jsonl"
        return [json.loads(line)["id"] for line in path.read_text().splitlines()] if path.exists() else []

    def assert_nothing_left(self) -> None:
        """No process, and after the next start no file that was only meant for a while, in the run or in its cache."""
        wait_until(lambda: not self.nursery.living(), f"the end of {self.nursery.living()}", 20)
        ShardCache(Path(self.config["cache_dir"]) / "shards", 1 << 30)
        for folder in (self.folder, Path(self.config["cache_dir"])):
            left = [str(path) for path in folder.rglob("*") if path.name.endswith(TEMPORARY)]
            assert left == [], left


MakeRun = Callable[..., Run]


@dataclass
class Group:
    """The ranks of one attempt."""

    run: Run
    attempt: int
    pids: list[int]

    def lines(self, rank: int = 0) -> int:
        """Batches that a rank has been given so far."""
        path = self.run.folder / f"ledger-{self.attempt:03d}-{rank}.jsonl"
        return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0

    def parked(self, rank: int = 0, seconds: float = 90) -> str:
        """Wait until a rank stands where the job asked it to."""
        path = self.run.folder / f"parked-{self.attempt}-{rank}"
        wait_until(lambda: (path.exists() and path.read_text()) or self._ended(), "a parked rank", seconds)
        assert path.exists(), f"ended before it was parked: {self.said()}"
        return path.read_text()

    def go(self) -> None:
        """Let those who wait go on."""
        (self.run.folder / f"go-{self.attempt}").touch()

    def kill(self, *, workers: bool = True) -> None:
        """SIGKILL to all ranks at once, with their workers or without."""
        self._kill({*self.pids, *(self.run.nursery.living() if workers else ())})
        codes = self.wait()
        assert -signal.SIGKILL in codes, f"nobody was killed: {codes} {self.said()}"
        if workers:
            self._kill(self.run.nursery.living())  # those that a rank was about to start
        wait_until(lambda: not self.run.nursery.living(), "the end of the workers", 30)

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, seconds: float = 120) -> list[int]:
        """The exit codes of all ranks; a group that does not end is killed, and that is an error."""
        try:
            wait_until(self._ended, f"the end of attempt {self.attempt}", seconds)
        except AssertionError:
            for pid in self.pids:
                if not self._code(self.pids.index(pid)):
                    os.killpg(pid, signal.SIGKILL)
            raise
        return [int(self._code(rank)) for rank in range(len(self.pids))]

    def said(self) -> str:
        """What all ranks wrote."""
        logs = [self.run.folder / f"log-{self.attempt}-{rank}.txt" for rank in range(len(self.pids))]
        return "\n".join(f"rank {rank}: {log.read_text()}" for rank, log in enumerate(logs) if log.exists())

    def _ended(self) -> bool:
        return all(self._code(rank) for rank in range(len(self.pids)))

    def _code(self, rank: int) -> str:
        path = self.run.folder / f"log-{self.attempt}-{rank}.ended"
        return path.read_text() if path.exists() else ""
