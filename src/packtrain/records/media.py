"""MediaRef -> bytes or header: finds media under one root and never follows a path out of it."""

from __future__ import annotations

import errno
import os
import stat
import urllib.parse
from pathlib import Path
from typing import BinaryIO, NoReturn

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaHeader, MediaKind, MediaRef
from packtrain.records.image_header import read_image_header
from packtrain.records.inside import allowed_places
from packtrain.records.span import Span
from packtrain.records.video_header import read_audio_header, read_video_header

MAX_IMAGE_PIXELS = 178_956_970  # where Pillow itself refuses to open an image
_MAX_CACHED_FOLDERS = 100_000
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NOT_THE_RECORDS_FAULT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))


class MediaStore:
    """The media of one dataset. Opens regular files only, so that a pipe or a device can never make it wait.

    The real place of each folder is looked up once; a file is opened without following a link, and looked at closely
    only if it is one.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        allow_outside_root: bool = False,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        max_video_packets: int = 10_000_000,
    ) -> None:
        self.root = os.path.realpath(root)
        self._places = allowed_places(self.root)
        self.allow_outside_root = allow_outside_root
        self.max_image_pixels = max_image_pixels
        self.max_video_packets = max_video_packets
        self._folders: dict[str, str] = {}  # folder as written -> its real path, known to be allowed

    def header(self, kind: MediaKind, ref: MediaRef) -> MediaHeader:
        """What the header of a medium says; RecordError where it could not be decoded later."""
        if kind == "image":
            span = self._span(ref)
            try:
                return read_image_header(span, self.max_image_pixels)
            except RecordError as error:
                raise _named(error, ref) from None
            except OSError as error:  # a disk or a network that fails while reading
                _refuse(error, ref.name)
            finally:
                span.close()
        span = self._span(ref)
        size = span.size
        with span.into_file() as file:
            try:
                if kind == "audio":
                    return read_audio_header(file, size, self.max_video_packets)
                return read_video_header(file, size, self.max_image_pixels, self.max_video_packets)
            except RecordError as error:
                raise _named(error, ref) from None

    def open(self, ref: MediaRef) -> BinaryIO:
        """The bytes of a medium as a seekable file; the caller closes it."""
        return self._span(ref).into_file()

    def _span(self, ref: MediaRef) -> Span:
        if ref.data is not None:
            if not ref.data:
                raise RecordError("media", "empty file", _shown(ref.name))
            return Span(data=ref.data)
        if ref.archive is not None:
            return self._archive_span(ref.archive, ref)
        if ref.path is None:
            raise RecordError("media", "not a usable path", f"{_shown(ref.name)} has neither path nor bytes")
        fd = self._open_path(ref.path)
        return Span(fd=fd, size=_regular_size(fd, ref.path))

    def _archive_span(self, archive: str, ref: MediaRef) -> Span:
        """A member of a tar file; the archive is part of the dataset itself, so it may lie anywhere."""
        try:
            fd = os.open(archive, _FLAGS & ~os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            _refuse(error, archive)
        size = _regular_size(fd, archive)
        if ref.size <= 0 or ref.offset < 0 or ref.offset + ref.size > size:
            os.close(fd)
            reason = "empty file" if ref.size == 0 else "archive ends before the file"
            raise RecordError("media", reason, f"{_shown(ref.name)}: bytes {ref.offset}+{ref.size} of {size}")
        return Span(fd=fd, start=ref.offset, size=ref.size)

    def _open_path(self, path: str) -> int:
        if path.startswith("file:"):
            path = _from_file_url(path)
        folder, name = os.path.split(path)
        try:
            real = self._folders.get(folder)
            if real is None:
                real = self._admit(folder, path)
            if name in ("", ".", ".."):
                raise RecordError("media", "not a regular file", _shown(path))
            try:
                return os.open(f"{real}/{name}", _FLAGS)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
            target = os.path.realpath(f"{real}/{name}")
            self._require_inside(target, path)
            return os.open(target, _FLAGS)
        except (OSError, ValueError) as error:
            _refuse(error, path)

    def _admit(self, folder: str, path: str) -> str:
        """The real place of a folder, if records may read there."""
        real = os.path.realpath(os.path.join(self.root, folder))
        self._require_inside(real, path)
        if len(self._folders) >= _MAX_CACHED_FOLDERS:
            self._folders.clear()
        self._folders[folder] = real
        return real

    def _require_inside(self, real: str, path: str) -> None:
        if self.allow_outside_root or f"{real}/".startswith(self._places):
            return
        raise RecordError("media", "path outside the media root", _shown(path))


def _from_file_url(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        raise RecordError("media", "not a usable path", _shown(url)) from None
    if parts.netloc not in ("", "localhost"):
        raise RecordError("media", "remote media are not fetched", _shown(parts.netloc))
    return urllib.parse.unquote(parts.path)


def _regular_size(fd: int, path: str) -> int:
    """The size of an open regular file; closes what is none."""
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_size > 0:
        return state.st_size
    os.close(fd)
    reason = "empty file" if stat.S_ISREG(state.st_mode) else "not a regular file"
    raise RecordError("media", reason, _shown(path))


def _refuse(error: OSError | ValueError, path: str) -> NoReturn:
    """The ledger's words for a path that cannot be opened."""
    code = error.errno if isinstance(error, OSError) else None
    if code in _NOT_THE_RECORDS_FAULT:
        raise error
    if code in (errno.ENOENT, errno.ENOTDIR):
        reason = "file not found"
    elif code == errno.ENXIO:
        reason = "not a regular file"
    elif code in (None, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
        reason = "not a usable path"
    else:
        reason = "unreadable file"
    raise RecordError("media", reason, _shown(path)) from None


def _shown(name: str) -> str:
    return name if name.isascii() and name.isprintable() and len(name) <= 200 else ascii(name)[:200]


def _named(error: RecordError, ref: MediaRef) -> RecordError:
    """The same error with the medium's name, which the header readers do not know."""
    return RecordError(error.stage, error.reason, f"{_shown(ref.name)}: {error.detail}".rstrip(": "))
