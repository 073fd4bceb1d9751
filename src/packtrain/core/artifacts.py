"""Files that appear whole or not at all, and say which version of the format they are."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packtrain.core.errors import ArtifactError, PathError, in_one_line
from packtrain.core.fingerprint import digest

_CHECKSUM = "checksum"  # of a JSON artifact without this one


class DiskFull(OSError):
    """No room for a file: what libraries say of it names neither the file nor a way out."""

    def __str__(self) -> str:
        folder = os.path.dirname(os.path.abspath(self.filename))
        fix = "free some space there, or use another folder; then run the same command again: finished work is kept"
        got = f"{self.strerror}: {free_bytes(Path(folder)):,} bytes are free in {folder}"
        return str(ArtifactError(self.filename, got=got, fix=fix))


def free_bytes(folder: Path) -> int:
    """On the disk of a folder that may not be there yet."""
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
    """What processes write, or have left, under a temporary name for a file or a folder of this one."""
    found = folder.glob(f".{glob.escape(name)}.*.{ending}")
    return [path for path in found if path.name.split(".")[-2].isdecimal()]


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a file that only we make; it is never emptied, and a link in its place is never followed."""
    try:
        opened = os.open(
            path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )  # a pipe must not hold us up
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _linked(path) from None
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return opened
    os.close(opened)
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path)) if stat.S_ISDIR(mode) else _linked(path)


def refuse_links(folder: Path) -> None:
    """Refuse a folder with anything but files and folders in it: a link leads out of it, whoever reads or writes."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                refuse_links(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise _linked(Path(entry.path))


def _linked(path: Path) -> ArtifactError:
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
    found = (body.get("kind"), body.get("version")) if isinstance(body, dict) else (type(body).__name__, None)
    if found != (kind, version):
        older = found[0] == kind and isinstance(found[1], int) and found[1] < version
        raise ArtifactError(
            str(path),
            got=f"kind {found[0]!r}, format version {found[1]!r}"
            + (", made by an older version of packtrain" if older else ""),
            expected=f"kind {kind!r}, format version {version}",
            fix=fix,
        )
    if checked and body.pop(_CHECKSUM, None) != digest(body):
        got = "content that does not match its checksum"
        raise ArtifactError(str(path), got=got, expected=f"an unchanged {kind} file", fix=fix)
    return dict(body)
