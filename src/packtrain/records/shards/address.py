"""Where a data file is, what it is, and its raw bytes from the beginning: a local path or a URL that fsspec knows."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

from packtrain.core.errors import ConfigError, PacktrainError, RecordError
from packtrain.records.formats.compression import CANNOT_OPEN

READ = 1 << 20  # bytes asked for at once
AHEAD = 4 << 20  # bytes that a file system may fetch in one request
PAUSES = (0.1, 0.5, 2.0, 8.0)  # seconds before each new attempt after a fault that may pass
NOT_A_FILE = "not a regular file"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_FILE = "file://"
# What file systems call the version of a file; a modification time is one where there is nothing better.
_STAMPS = ("ETag", "etag", "md5Hash", "md5", "sha256", "checksum", "version_id", "generation")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
Answer = TypeVar("Answer")
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What tells one content of a file from another, as far as its file system says."""

    size: int | None  # as stored, so compressed where the file is
    stamp: str


class _Changed(OSError):
    """The source is not what it was when reading began."""


def is_remote(path: str) -> bool:
    """Is this a URL, and not a local file?

    >>> is_remote("s3://bucket/a.tar"), is_remote("simplecache::s3://b/a"), is_remote("file:///a"), is_remote("a.tar")
    (True, True, False, False)
    """
    return _SCHEME.match(path) is not None and not path.startswith(_FILE)


def local_path(path: str) -> str:
    """A local file's path without its scheme."""
    return path.removeprefix(_FILE)


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Settings and credentials are those that fsspec finds."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            url, got="no module named 'fsspec'", expected="fsspec", fix="pip install 'packtrain[remote]'"
        ) from None
    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        raise ConfigError(url, got=str(error), expected="a URL that an installed file system can read") from error


def identify(path: str, pauses: Sequence[float] = PAUSES) -> Identity:
    """The identity of a file. RecordError where it is not there, OSError where that cannot be found out."""
    return with_retries(path, lambda: _identify(path), pauses)


def remote_state(url: str, pauses: Sequence[float] = PAUSES) -> dict[str, object]:
    """What identifies a remote file, for fingerprints; one that is not there is a state too."""
    try:
        found = identify(url, pauses)
    except RecordError:
        return {"missing": True}
    return {"size": found.size, "version": found.stamp}


def with_retries(path: str, ask: Callable[[], Answer], pauses: Sequence[float]) -> Answer:
    """What a file system answers, through faults that pass. RecordError for those that do not, OSError at last."""
    for pause in (*pauses, None):
        try:
            return ask()
        except (PacktrainError, RecordError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, _PERMANENT):
                raise gone(path, error) from error
            if pause is None:
                raise unreachable(path, error) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _identify(path: str) -> Identity:
    if not is_remote(path):
        state = os.stat(local_path(path))
        if not stat.S_ISREG(state.st_mode):
            raise RecordError("read", NOT_A_FILE, path)
        return _identity_of(state)
    system, inner = file_system(path)
    try:
        found = system.info(inner)
    except NotImplementedError:
        return Identity(size=None, stamp="")  # a source that can only be read
    if found.get("type") == "directory":
        raise RecordError("read", NOT_A_FILE, path)
    size = found.get("size")
    size = int(size) if isinstance(size, (int, float)) else None
    names = [name for name in _STAMPS if found.get(name)] or [name for name in _TIMES if found.get(name)]
    text = json.dumps([size, {name: str(found[name]) for name in names}])
    return Identity(size=size, stamp=hashlib.sha256(text.encode()).hexdigest()[:24])


def _identity_of(state: os.stat_result) -> Identity:
    return Identity(size=state.st_size, stamp=f"{state.st_size}-{state.st_mtime_ns}-{state.st_ino}")


def identity_of_open(file: BinaryIO) -> Identity:
    """The identity of a local file that is open."""
    return _identity_of(os.fstat(file.fileno()))


def open_raw(path: str) -> BinaryIO:
    """A file from its beginning, to be read forward. A pipe or a device is refused: it could make us wait for ever."""
    if is_remote(path):
        system, inner = file_system(path)
        try:
            return cast(BinaryIO, system.open(inner, "rb", block_size=AHEAD, cache_type="readahead"))
        except TypeError:  # a file system without these settings
            return cast(BinaryIO, system.open(inner, "rb"))
    fd = os.open(local_path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecordError("read", NOT_A_FILE, path)
    return cast(BinaryIO, io.FileIO(fd, "rb"))


def raw_chunks(path: str, identity: Identity, pauses: Sequence[float] = PAUSES) -> Iterator[bytes]:
    """The bytes of a file as stored, each exactly once, through faults that pass.

    After a fault the file is opened again and followed from the same byte, by a seek where the source can, otherwise
    by reading up to there. RecordError where the file is gone, OSError where it cannot be reached or has changed.
    """
    position = failures = 0
    while True:
        try:
            with _open_at(path, position) as file:
                while chunk := file.read(READ):
                    position, failures = position + len(chunk), 0
                    if identity.size is not None and position > identity.size:
                        break
                    yield chunk
            if identity.size is None or position == identity.size:
                return
            if position > identity.size:
                raise _changed(path)
            raise OSError(f"the source delivered {position:,} of {identity.size:,} bytes")
        except (PacktrainError, RecordError, MemoryError, _Changed):
            raise
        except Exception as error:
            if isinstance(error, _PERMANENT):
                raise gone(path, error) from error
            if failures >= len(pauses):
                raise unreachable(path, error) from error
            time.sleep(pauses[failures])
            failures += 1
        if identify(path, pauses) != identity:
            raise _changed(path)


def _open_at(path: str, position: int) -> BinaryIO:
    """A file at some byte of it; only a source that says it can seek is asked to."""
    file = open_raw(path)
    if position == 0:
        return file
    try:
        if file.seekable():
            file.seek(position)
            return file
    except (OSError, ValueError, NotImplementedError):
        file.close()
        file = open_raw(path)
    while position > 0:
        passed = len(file.read(min(READ, position)))
        if not passed:
            raise OSError("the source has become shorter")
        position -= passed
    return file


def _changed(path: str) -> _Changed:
    return _Changed(f"{path}: the file has changed while it was read")


def gone(path: str, error: Exception) -> RecordError:
    """A file that is not there, or that we may not read."""
    return RecordError("read", CANNOT_OPEN, f"{path}: {getattr(error, 'strerror', None) or type(error).__name__}")


def unreachable(path: str, error: Exception) -> OSError:
    """A file that could not be read however often it was tried."""
    return OSError(f"{path}: {type(error).__name__}: {error}")
