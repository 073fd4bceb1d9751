"""What the tests of shards share: a remote file system that cannot seek, and processes that use one cache."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from packtrain.records.shards.cache_folder import CacheFolder
from packtrain.records.shards.shard_cache import ShardCache
from packtrain.records.span import Span

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": lambda data: gzip.compress(data, 1),
    "two gzip members": lambda data: gzip.compress(data[:1000], 1) + gzip.compress(data[1000:], 1),
    "zstd": zstandard.ZstdCompressor(level=1, write_checksum=True).compress,
    "two zstd frames": lambda data: b"".join(
        zstandard.ZstdCompressor(level=1, write_checksum=True).compress(part) for part in (data[:1000], data[1000:])
    ),
}
SETTINGS = ".settings"  # beside a file: how its remote copy behaves
OPENS = ".opens"  # beside a file: one line for each time it was opened


class ForwardSystem(fsspec.AbstractFileSystem):
    """Local files as a remote source that can only be read forward; slow and with faults where that is asked for."""

    protocol = "forward"
    cachable = False

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        state = os.stat(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": state.st_size, "type": kind, "mtime": state.st_mtime_ns}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        names = [os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.endswith((SETTINGS, OPENS))]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **options: Any) -> ForwardFile:
        assert mode == "rb"
        return ForwardFile(path)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:  # type: ignore[override]
        return "/" + path.removeprefix("forward://").strip("/")


class ForwardFile:
    """Reads forward. Settings: `latency` seconds a read, `fail_at` a byte, so many `times`, `seekable` claims."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._path = path
        with open(path + OPENS, "a") as log:
            log.write("open\n")
        settings = Path(path + SETTINGS)
        self._settings = json.loads(settings.read_text()) if settings.exists() else {}

    def __enter__(self) -> ForwardFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def seekable(self) -> bool:
        return bool(self._settings.get("seekable"))

    def seek(self, position: int, whence: int = 0) -> int:
        if self._settings.get("seekable") == "really":
            return self._file.seek(position)
        raise OSError(errno.ESPIPE, "this source cannot seek")

    def tell(self) -> int:
        raise OSError(errno.ESPIPE, "this source cannot seek")

    def read(self, size: int) -> bytes:
        time.sleep(self._settings.get("latency", 0))
        here, fail_at = self._file.tell(), self._settings.get("fail_at", 1 << 60)
        if here < fail_at:
            return self._file.read(min(size, self._settings.get("chunk", 1 << 16), fail_at - here))
        if self._settings.get("times", 0) > 0:
            self._settings["times"] -= 1
            Path(self._path + SETTINGS).write_text(json.dumps(self._settings))
            raise OSError(errno.EIO, "a fault that was asked for")
        return self._file.read(min(size, self._settings.get("chunk", 1 << 16)))


def register() -> None:
    """Make the file system known as forward://."""
    fsspec.register_implementation("forward", ForwardSystem, clobber=True)


def url(path: Path) -> str:
    """The remote name of a local file."""
    register()
    return f"forward://{path}"


def behave(path: Path, **settings: Any) -> None:
    """How the remote copy of a file behaves from now on."""
    Path(f"{path}{SETTINGS}").write_text(json.dumps(settings))


def opens(path: Path) -> int:
    """How often the remote copy of a file was opened."""
    log = Path(f"{path}{OPENS}")
    return len(log.read_text().splitlines()) if log.exists() else 0


class WebServer(ThreadingHTTPServer):
    """The files of a folder on the loopback, with faults: `faults[name]` are statuses for its next requests.

    "stall" in place of a status sends half of the body and then nothing, until `ended` is set; "stall at once" nothing.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _WebHandler)
        self.folder, self.ended = folder, threading.Event()
        self.faults: dict[str, list[int | str]] = {}
        self.requests: list[tuple[str, str]] = []

    def handle_error(self, *request: object) -> None:
        """A reader that has given up is no error."""

    def url(self, name: str) -> str:
        """Where a file of the folder is."""
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _WebHandler(BaseHTTPRequestHandler):
    server: WebServer

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        name = self.path.lstrip("/")
        self.server.requests.append((self.command, name))
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else 200
        path = self.server.folder / name
        if isinstance(fault, str) and "at once" in fault:
            self.server.ended.wait(60)
        status = fault if isinstance(fault, int) and fault >= 400 else 200 if path.is_file() else 404
        data = path.read_bytes() if status == 200 else b"no"
        part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if status == 200 else None
        if part:
            first, last = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        else:
            self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body and fault == "stall":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.server.ended.wait(60)
        elif body:
            self.wfile.write(data)


@contextmanager
def web_server(folder: Path) -> Iterator[WebServer]:
    """A server for the length of a block."""
    server = WebServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


def content(size: int, seed: int = 0) -> bytes:
    """Bytes that compress to about a half, and of which no two places are alike."""
    noise = random.Random(seed).randbytes(size // 2 + 1)
    return noise.hex().encode()[:size]


def content_plain(data: bytes) -> Span:
    """Bytes in memory, as a data file is read at a place."""
    return Span(data=data)


def make_files(folder: Path, number: int, size: int, kind: str = "plain") -> list[Path]:
    """Files of different content."""
    folder.mkdir(exist_ok=True)
    made = []
    for at in range(number):
        path = folder / f"shard-{at:03d}.bin"
        path.write_bytes(PACKERS[kind](content(size, seed=at)))
        made.append(path)
    return made


def hashes(paths: Sequence[Path]) -> list[str]:
    """The content of files."""
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def stored(folder: Path, state: str = "") -> list[str]:
    """The names of cached files."""
    return sorted(name for name in os.listdir(folder) if name.endswith(state or (".part", ".ready")))


class Watcher:
    """Looks at a quantity as often as it can while a block runs."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure
        self.most = self.looks = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self.most = max(self.most, self._measure())
            self.looks += 1
            time.sleep(0.0005)


def bytes_under_lock(folder: Path, budget: int) -> Callable[[], int]:
    """The bytes of all files at one moment: no file can be replaced by another between two looks."""
    cache = CacheFolder(str(folder), budget)

    def measure() -> int:
        with cache.locked(), os.scandir(folder) as found:
            total = 0
            for item in found:
                with suppress(FileNotFoundError):  # given up just now
                    total += item.stat().st_size if item.name.endswith((".part", ".ready")) else 0
        return total

    return measure


def start(job: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that does one of JOBS."""
    command = [sys.executable, __file__, job, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], timeout: float = 120) -> str:
    """What a process printed; it must have gone well."""
    out, error = process.communicate(timeout=timeout)
    assert process.returncode == 0, error
    return out


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait for something that must happen."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never seen: {what}"
        time.sleep(0.005)


def churn(folder: str, budget: str, seed: str, rounds: str, size: str, *files: str) -> None:
    """Read random places of random files, declare and withdraw interest, and check every byte."""
    cache, draw = ShardCache(folder, int(budget), pauses=(0.01,)), random.Random(int(seed))
    whole = {file: content(int(size), seed=at) for at, file in enumerate(files)}
    direct = 0
    for number in range(int(rounds)):
        if number % 4 == 0:
            cache.want(draw.sample(files, min(3, len(files))))
        file = draw.choice(files)
        with cache.open(file) as plain:
            direct += plain.path is None
            for _ in range(3):
                at = draw.randrange(int(size))
                assert plain.read_at(at, 5000) == whole[file][at : at + 5000], "other bytes"
        if number % 3 == 0:
            cache.done([file])
    print(direct)


def read(folder: str, budget: str, file: str) -> None:
    """Read one file whole."""
    cache = ShardCache(folder, int(budget))
    print("begins", flush=True)
    with cache.open(file) as plain:
        print(hashlib.sha256(plain.read_at(0, 1 << 40)).hexdigest(), plain.path is not None)


def hold(folder: str, budget: str, file: str) -> None:
    """Want a file and keep it pinned until killed."""
    cache = ShardCache(folder, int(budget))
    cache.want([file])
    with cache.open(file):
        print("held", flush=True)
        time.sleep(600)


JOBS = {"churn": churn, "read": read, "hold": hold}

if __name__ == "__main__":
    register()
    JOBS[sys.argv[1]](*sys.argv[2:])


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, so small; skips the test where mounting is not permitted."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
