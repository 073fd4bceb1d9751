"""Files and folders that appear whole or not at all, JSON that says its format version, locks between processes."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packtrain.core.errors import ArtifactError, PathError, in_one_line
from packtrain.core.fingerprint import digest

_CHECKSUM = "checksum"  # of a JSON artifact without this one
_NOT_FOR_US = (errno.EROFS, errno.EACCES, errno.EPERM)  # a folder that we may only read


class DiskFull(OSError):
    """No room for a file: what libraries say of it names neither the file nor a way out."""

    def __str__(self) -> str:
        folder = os.path.dirname(os.path.abspath(self.filename))
        fix = "free some space there, or use another folder; then run the same command again: finished work is kept"
        got = f"{self.strerror}: {free_bytes(Path(folder)):,} bytes are free in {folder}"
        return str(ArtifactError(self.filename, got=got, fix=fix))


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder, which may not exist yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Name the file that is being written where its disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, DiskFull):
            raise
        raise DiskFull(error.errno, os.strerror(error.errno), str(path)) from error


def share_files(folder: Path) -> None:
    """Give all files of a new folder the mode that the umask gives: some libraries let only the owner read theirs."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            with suppress(PermissionError):  # of a disk without modes
                path.chmod(mode)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that becomes `path` when the block ends without an error.

    A crash at any moment leaves either the old file or the new one, never a part of it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by process id: on a shared disk another machine may have a process of the same one.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().int}.tmp")
    try:
        with room_for(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Delete what a killed process left of these files; only for the one process that writes into the folder."""
    for name in names:
        for path in leftovers(folder, name):
            path.unlink(missing_ok=True)


def leftovers(folder: Path, name: str, ending: str = "tmp") -> list[Path]:
    """Temporary files or folders for this name: being written, or left by killed processes."""
    paths = folder.glob(f".{glob.escape(name)}.*.{ending}")
    return [path for path in paths if path.name.split(".")[-2].isdecimal()]


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a file that only we make; it is never emptied, and a link in its place is never followed."""
    try:
        descriptor = os.open(
            path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )  # a pipe must not hold us up
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _link_error(path) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise (
        IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if stat.S_ISDIR(mode)
        else _link_error(path)
    )


def refuse_links(folder: Path) -> None:
    """Refuse a folder with anything but files and folders in it: a link leads out of it."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                refuse_links(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise _link_error(Path(entry.path))


def _link_error(path: Path) -> ArtifactError:
    got = f"a link to {os.readlink(path)!a}" if path.is_symlink() else "a pipe, a socket or a device"
    return ArtifactError(
        str(path),
        got=got,
        expected="only files and folders: a link could make packtrain read or write elsewhere",
        fix="remove it, or replace it with a copy of its target (cp -rL), if you trust it",
    )


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- folders


@contextmanager
def work_folder(folder: Path, *, only_writer: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder`, and so on its disk, that is gone afterwards.

    What killed processes have left is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder, only_writer=only_writer)
    # Not by process id: on a shared disk another machine may have a process of the same one.
    work = folder.with_name(f".{folder.name}.{uuid.uuid4().int}.tmp")
    work.mkdir()
    alive = os.open(work, os.O_RDONLY)
    try:
        lock(alive)
        with room_for(folder):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(alive)


@contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends without an error.

    A folder that is there and not empty is an OSError then; with `replace`, which is for the only process that writes
    there, it stays until then.
    """
    with work_folder(folder, only_writer=replace) as work:
        yield work
        for path in (*work.rglob("*"), work):
            sync(path)
        if replace:
            _exchange(work, folder)
        else:
            os.replace(work, folder)
        sync(folder.parent)


def remove_folder(folder: Path, *, ignore_errors: bool = False) -> None:
    """Delete a folder, under another name first: what is half deleted must not look whole."""
    hidden = folder.with_name(f".{folder.name}.removing")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=ignore_errors)


def make_folder_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """A folder that is written where it is not there yet; another process may be faster."""
    if not folder.is_dir():
        try:
            with whole_folder(folder) as fresh:
                write(fresh)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _remove_abandoned(folder: Path, *, only_writer: bool) -> None:
    """Only a living process holds the lock on its folder; on a disk without locks, the only writer knows.

    An empty one may be about to be locked.
    """
    for path in leftovers(folder.parent, folder.name):
        with suppress(OSError):  # locked, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if (lock(descriptor, wait=False) or only_writer) and any(path.iterdir()):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _exchange(work: Path, folder: Path) -> None:
    before = work.with_suffix(".old")
    if folder.exists():
        os.rename(folder, before)
    try:
        os.rename(work, folder)
    except OSError:
        if before.exists():
            os.rename(before, folder)
        raise
    for path in leftovers(folder.parent, folder.name, "old"):
        shutil.rmtree(path, ignore_errors=True)


# ---- JSON


@contextmanager
def whole_content(path: Path, *, fix: str) -> Iterator[None]:
    """Name the JSON artifact whose content is made into values here, where something is missing or of another kind."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        got = f"no {error.args[0]}" if isinstance(error, KeyError) else in_one_line(error)
        raise ArtifactError(str(path), got=got, expected=f"a complete {path.name}", fix=fix) from None


def write_json(path: Path, kind: str, version: int, content: Mapping[str, object], *, checked: bool = False) -> None:
    """Write a JSON artifact with its kind and format version; a checked one also has a checksum of its content."""
    body = {"kind": kind, "version": version, **content}
    if checked:
        body[_CHECKSUM] = digest({name: value for name, value in body.items() if name != _CHECKSUM})
    with atomic_path(path) as temporary:
        text = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
        # a lone surrogate, as in a file name that is not UTF-8, becomes the escape that JSON has for it
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def read_json(
    path: Path,
    kind: str,
    version: int,
    *,
    checked: bool = False,
    fix: str = "create it again with this version of packtrain",
) -> dict[str, Any]:
    """Read a JSON artifact; another kind or version is refused, and a checked one that is not as it was written."""
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PathError(str(path), got="no such file", expected=f"a {kind} file", fix="run that stage first") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(str(path), got=str(error), expected=f"a {kind} file", fix=fix) from None
    header = (body.get("kind"), body.get("version")) if isinstance(body, dict) else (type(body).__name__, None)
    if header != (kind, version):
        older = header[0] == kind and isinstance(header[1], int) and header[1] < version
        raise ArtifactError(
            str(path),
            got=f"kind {header[0]!r}, format version {header[1]!r}"
            + (", made by an older version of packtrain" if older else ""),
            expected=f"kind {kind!r}, format version {version}",
            fix=fix,
        )
    if checked and body.pop(_CHECKSUM, None) != digest(body):
        got = "content that does not match its checksum"
        raise ArtifactError(str(path), got=got, expected=f"an unchanged {kind} file", fix=fix)
    return dict(body)


# ---- locks


@contextmanager
def alone(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Wait until no other process is in a block with this path, or raise BlockingIOError where that is not wanted.

    False where the disk has no locks, or where the lock file can be neither made nor opened: then there is no waiting.
    What is complete there can still be used, and writing fails with its own error.
    """
    file = _open_lock_file(path)
    held = False
    try:
        held = file is not None and lock(file, wait=wait)
        yield held
    finally:
        if file is not None:
            if held:  # closing would leave it to processes that were forked meanwhile
                unlock(file)
            os.close(file)


def is_held(path: Path) -> bool:
    """Is a process in a block with this path? False where that cannot be known."""
    try:
        file = open_own(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(file, shared=True)
    except OSError:
        return False
    finally:
        os.close(file)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; False where another process holds it, OSError where the disk has no locks.

    The system releases it when the process ends, however it ends.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed; False where the disk has no locks, BlockingIOError instead of waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def share(descriptor: int) -> None:
    """Let others share the lock that this process holds on an open file."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def unlock(descriptor: int) -> None:
    """Give up the lock on an open file, in all processes that have a copy of it."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open_lock_file(path: Path) -> int | None:
    """The file of a lock, made where it is not there; without leave to write, one that a writer has made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in _NOT_FOR_US:
            raise
    try:
        return open_own(path, os.O_RDONLY)
    except OSError:
        return None
