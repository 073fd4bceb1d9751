"""Where data files are, what they are, and their raw bytes: local paths, or URLs that fsspec knows."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

from packtrain.core.errors import ConfigError, DataError, PacktrainError, RecordError, in_one_line
from packtrain.core.public import public
from packtrain.core.retries import PAUSES, Answer, Unreachable, retry
from packtrain.core.secrets import with_secrets

READ = 1 << 20  # bytes asked for at once
AHEAD = 4 << 20  # bytes that a file system may fetch in one request
READ_TIMEOUT = "PACKTRAIN_READ_TIMEOUT"  # environment variable: seconds for which a web server may send nothing
SECONDS = 30.0  # by default
NOT_A_FILE = "not a regular file"
CANNOT_OPEN = "file cannot be read"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_FILE = "file://"
# What file systems call the version of a file; a modification time is one where there is nothing better.
_STAMPS = (
    *("ETag", "etag", "md5Hash", "md5", "Content-MD5", "Digest", "sha256"),
    *("checksum", "version_id", "generation", "blob_id"),
)
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_OURS = (PacktrainError, RecordError, MemoryError)
_NOT_THERE = (404, 410)  # HTTP
_REFUSED = (401, 403)
_PASSING = (408, 425, 429)  # and all from 500 on


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Identifies the content of a file, as far as its file system can."""

    size: int | None  # as stored, so compressed where the file is
    stamp: str


class _Changed(OSError):
    """The source is not what it was when reading began."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: the file has changed while it was read")


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
    """The file system of a URL, and the path in it. Credentials are the URL's own, or those that fsspec finds."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            url, got="no module named 'fsspec'", expected="fsspec", fix="pip install 'packtrain[remote]'"
        ) from None
    try:
        return fsspec.core.url_to_fs(with_secrets(url), **_patience(url, fsspec.config.conf))  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        raise ConfigError(
            url, got=str(error), expected="a URL that an installed fsspec file system can read"
        ) from error


def identify(path: str, pauses: Sequence[float] = PAUSES) -> Identity:
    """The identity of a file. RecordError where it is not there, OSError where that cannot be found out."""
    return with_retries(path, lambda: _identify(path), pauses)


def remote_state(url: str, pauses: Sequence[float] = PAUSES) -> dict[str, object]:
    """The state of a remote file for fingerprints; a missing file is a state too."""
    try:
        with reaching(url):
            identity = identify(url, pauses)
    except RecordError:
        return {"missing": True}
    return {"size": identity.size, "version": identity.stamp}


def with_retries(path: str, ask: Callable[[], Answer], pauses: Sequence[float]) -> Answer:
    """Ask a file system, retrying transient faults. RecordError if there is no file, Unreachable in the end."""
    try:
        return retry(ask, pauses, passes=_may_pass)
    except (*_OURS, _Changed):
        raise
    except Exception as error:
        raise _lasting_fault(path, error, attempts=len(pauses) + 1 if _may_pass(error) else 1) from error


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """A server that cannot be reached ends the run, in words: what it has may not be taken for missing."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data file {url}",
            got=str(error),
            fix="check the server and your access to it; the same command continues from here",
        ) from error


def _may_pass(error: Exception) -> bool:
    """May the same question be answered when it is asked again?"""
    if isinstance(error, (*_OURS, _Changed, Unreachable)):
        return False
    if (status := _status(error)) is not None:
        return status in _PASSING or status >= 500
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return True  # what fsspec calls any failure of a web server, a connection that broke for one
    return not isinstance(error, _PERMANENT)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error or of its cause, where there is one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and status >= 100:
        return status
    return _status(error.__cause__) if error.__cause__ is not None else None


def _lasting_fault(path: str, error: Exception, attempts: int) -> RecordError | Unreachable:
    """A fault that stays, in words. Only a file that is not there is the file's own: others could be served again."""
    status, cause = _status(error), error.__cause__ if isinstance(error, FileNotFoundError) else None
    refused = is_remote(path) and isinstance(error, PermissionError)
    missing = status is None and cause is None and isinstance(error, _PERMANENT) and not refused
    if missing or status in _NOT_THERE:
        return missing_file(path, error)
    if status is not None:
        fault = ("access denied, " if status in _REFUSED else "") + f"HTTP {status}"
    elif isinstance(cause or error, TimeoutError):
        fault = f"the server sent nothing for {_read_timeout():g} s (${READ_TIMEOUT})"
    else:
        fault = in_one_line(cause or error)
    return Unreachable(f"{path}: {fault}" + (f", in each of {attempts} attempts" if attempts > 1 else ""))


def _read_timeout() -> float:
    text = os.environ.get(READ_TIMEOUT) or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(READ_TIMEOUT, got=text, expected="a number of seconds")
    return seconds


def _patience(url: str, settings: Any) -> dict[str, object]:
    """Settings with which a web server that stops sending is an error soon; the user's own for fsspec stay."""
    schemes = [scheme for scheme in ("http", "https") if re.search(rf"(^|::){scheme}://", url)]
    if not schemes:
        return {}
    from aiohttp import ClientTimeout

    seconds = _read_timeout()
    timeout = ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    client_kwargs: dict[str, Any] = {}
    for scheme in ("http", "https"):
        client_kwargs |= settings.get(scheme, {}).get("client_kwargs", {})
    return {scheme: {"client_kwargs": {"timeout": timeout, **client_kwargs}} for scheme in schemes}


def _identify(path: str) -> Identity:
    if not is_remote(path):
        state = os.stat(local_path(path))
        if not stat.S_ISREG(state.st_mode):
            raise RecordError("read", NOT_A_FILE, path)
        return _local_identity(state)
    system, inner = file_system(path)
    try:
        info = system.info(inner)
    except NotImplementedError:
        return Identity(size=None, stamp="")  # a source that can only be read
    if info.get("type") == "directory":
        raise RecordError("read", NOT_A_FILE, path)
    size = info.get("size")
    size = int(size) if isinstance(size, (int, float)) else None
    names = [name for name in _STAMPS if info.get(name)] or [name for name in _TIMES if info.get(name)]
    text = json.dumps([size, {name: str(info[name]) for name in names}])
    return Identity(size=size, stamp=hashlib.sha256(text.encode()).hexdigest()[:24])


def _local_identity(state: os.stat_result) -> Identity:
    return Identity(size=state.st_size, stamp=f"{state.st_size}-{state.st_mtime_ns}-{state.st_ino}")


def identity_of_open(file: BinaryIO) -> Identity:
    """The identity of a local file that is open."""
    return _local_identity(os.fstat(file.fileno()))


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
    followed = _Followed(path, identity)
    try:
        while chunk := with_retries(path, followed.read, pauses):
            yield chunk
    finally:
        followed.close()


class _Followed:
    """A file from its beginning; after a fault the next `read` continues after the last byte that came."""

    def __init__(self, path: str, identity: Identity) -> None:
        self._path, self._identity = path, identity
        self._file: BinaryIO | None = None
        self._position, self._failed = 0, False

    def read(self) -> bytes:
        """The next bytes; none at the end, where all have come."""
        try:
            if self._failed and _identify(self._path) != self._identity:
                raise _Changed(self._path)
            if self._file is None:
                self._file = _open_at(self._path, self._position)
            self._failed = False
            chunk = self._file.read(READ)
            size, end = self._identity.size, self._position + len(chunk)
            if size is not None and end > size:
                raise _Changed(self._path)
            if size is not None and not chunk and end < size:
                raise OSError(f"the source delivered {end:,} of {size:,} bytes")
        except BaseException:
            self._failed = True
            self.close()
            raise
        self._position = end
        return chunk

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


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
            raise OSError("the source has shrunk")
        position -= passed
    return file


def missing_file(path: str, error: Exception) -> RecordError:
    """A file that is not there, or that we may not read."""
    status = _status(error)
    problem = f"HTTP {status}" if status else getattr(error, "strerror", None) or type(error).__name__
    return RecordError("read", CANNOT_OPEN, f"{path}: {problem}")


def unreadable(error: OSError) -> RecordError:
    """The record error for a file that the system does not let us read."""
    return RecordError("read", CANNOT_OPEN, error.strerror or str(error))


def has_wildcards(url: str) -> bool:
    """Does a URL name several files? A question mark in a web address begins its query.

    >>> has_wildcards("s3://bucket/a-?.tar"), has_wildcards("https://host/a.tar?version=2")
    (True, False)
    """
    return any(mark in url for mark in ("*[" if url.startswith(("http://", "https://")) else "*?["))


def list_remote(names: Sequence[str], endings: tuple[str, ...]) -> list[str]:
    """The files that URLs name, in reading order.

    A name without wildcards stays even where nothing is there: a missing shard must be noticed, not left out.
    """
    files: list[str] = []
    for name in names:
        if has_wildcards(name):
            ask = partial(_matching, name)
        elif len(names) == 1 and not name.lower().endswith(endings):
            ask = partial(_list_folder, name, endings)
        else:
            files.append(name)
            continue
        try:
            with reaching(name):
                files.extend(with_retries(name, ask, PAUSES))
        except RecordError as error:  # what cannot be listed, as an archive that is not there, is no record's fault
            raise DataError(f"data file {name}", got=error.detail or error.reason, fix="check the URL") from None
    return files


def _matching(pattern: str) -> list[str]:
    system, inner = file_system(pattern)
    return [_url(pattern, name) for name in sorted(system.glob(inner))]


def _list_folder(name: str, endings: tuple[str, ...]) -> list[str]:
    """The files below a folder whose names end so, hidden ones left out; a file is itself."""
    system, inner = file_system(name)
    if not system.isdir(inner):
        return [name]
    below = [file for file in sorted(system.find(inner)) if file.lower().endswith(endings)]
    hidden = (any(part.startswith(".") for part in file.removeprefix(inner).split("/")) for file in below)
    return [_url(name, file) for file, skip in zip(below, hidden, strict=True) if not skip]


def _url(url: str, name: str) -> str:
    """A name that a file system has answered, as the URL of that file."""
    return public(name) if "://" in name else url.rpartition("://")[0] + "://" + name
