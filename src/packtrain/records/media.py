"""MediaRef -> bytes or header: finds media under one root and never follows a path out of it.

Headers of videos and audio come from the container alone, without decoding a frame. Width and height are those of the
decoded frame arrays: PyAV does not apply rotation metadata, so neither does this. The number of frames is what the
container says, as transformers' PyAV reader takes it; where the container does not say it (Matroska, WebM, transport
streams) the packets of the video stream are counted.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaKind, MediaRef
from packtrain.records.formats.source_files import allowed_places
from packtrain.records.images import read_image_header
from packtrain.records.span import Span

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

# Playlists and text "formats" are left out: they would open other files or make a video of anything.
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,asf,gif,ivf,m4v,h264,hevc,"
    "wav,w64,mp3,flac,aac,aiff,amr,opus"
)
_UNSAID_DURATION = ("mp3", "aac", "amr")  # formats whose duration is guessed from the bit rate
_PCM = (0x0001, 0x0003, 0xFFFE)
_STREAMED = (0, 0x7FFFFFFF, 0xFFFFFFFF)  # data sizes written by programs that could not seek back


def read_video_header(file: BinaryIO, size: int, max_pixels: int, max_packets: int) -> MediaHeader:
    """The header of one video of `size` bytes."""
    with _container(file, "video") as container:
        if not container.streams.video:
            raise RecordError("media", "video without frames", "no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise RecordError("media", "not a readable video", "no decoder for its codec")
        width, height = stream.codec_context.width, stream.codec_context.height
        if width < 1 or height < 1:
            raise RecordError("media", "video without frames", f"{width}x{height}")
        if width * height > max_pixels:
            raise RecordError("media", "video frame too large", f"{width}x{height}, the limit is {max_pixels} pixels")
        frames = _count_frames(container, stream, size, max_packets)
        rate = stream.average_rate or stream.guessed_rate
        if not rate or rate <= 0:
            raise RecordError("media", "video without a frame rate")
        fps = float(rate)
        return MediaHeader(kind="video", width=width, height=height, frames=frames, fps=fps, seconds=frames / fps)


def read_audio_header(file: BinaryIO, size: int, max_packets: int) -> MediaHeader:
    """The header of one audio clip of `size` bytes."""
    seconds = _wav_seconds(file, size)
    if seconds is None:
        file.seek(0)
        with _container(file, "audio") as container:
            if not container.streams.audio:
                raise RecordError("media", "audio without samples", "no audio stream")
            seconds = _audio_seconds(container, container.streams.audio[0], size, max_packets)
    if seconds <= 0:
        raise RecordError("media", "audio without samples", f"{seconds} seconds")
    return MediaHeader(kind="audio", seconds=seconds)


@contextmanager
def _container(file: BinaryIO, kind: MediaKind) -> Iterator[InputContainer]:
    """An open container; whatever PyAV raises while it is in use means that the medium cannot be read."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"reading {kind}", got="PyAV is not installed", expected="the package av", fix="pip install av"
        ) from error
    try:
        with av.open(file, options={"format_whitelist": FORMATS}, metadata_errors="replace") as container:
            yield container
    except RecordError:
        raise
    # FFmpeg's errors are several of Python's own kinds; damaged headers also surface as impossible values
    except (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError, EOFError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error  # not the number of the open file, which differs by process
        raise RecordError("media", f"not a readable {kind}", f"{type(error).__name__}: {reason}"[:200]) from None


def _count_frames(container: InputContainer, stream: VideoStream, size: int, max_packets: int) -> int:
    """The number of frames, having made sure as cheaply as possible that all of them are in the file."""
    frames = int(stream.frames)
    if frames > max_packets:
        raise RecordError("media", "video too long", f"{frames} frames, the limit is {max_packets}")
    if frames > 0 and len(stream.index_entries) >= frames:
        _check_index(stream, size, "video")
        return frames
    packets = 0
    for packet in container.demux(stream):
        packets += packet.size > 0
        if packets > max_packets:
            raise RecordError("media", "video too long", f"more than {max_packets} packets")
    if packets < frames:
        raise RecordError("media", "truncated video", f"{packets} of {frames} frames")
    if packets == 0:
        raise RecordError("media", "video without frames", "no packets")
    return frames or packets


def _check_index(stream: VideoStream | AudioStream, size: int, kind: MediaKind) -> None:
    """Containers with an index say where each packet lies: the furthest must end inside the file."""
    end = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
    if end > size:
        raise RecordError("media", f"truncated {kind}", f"needs {end} bytes, the file has {size}")


def _audio_seconds(container: InputContainer, stream: AudioStream, size: int, max_packets: int) -> float:
    _check_index(stream, size, "audio")
    if stream.duration and stream.time_base and container.format.name not in _UNSAID_DURATION:
        return float(stream.duration * stream.time_base)
    if container.duration and container.format.name not in _UNSAID_DURATION:
        return container.duration / 1e6
    seconds = 0.0
    for number, packet in enumerate(container.demux(stream)):
        if number > max_packets:
            raise RecordError("media", "audio too long", f"more than {max_packets} packets")
        if packet.duration and packet.time_base:
            seconds += float(packet.duration * packet.time_base)
    return seconds


def _wav_seconds(file: BinaryIO, size: int) -> float | None:
    """The length of a plain PCM file from its two chunks; None for anything else."""
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return None
    position, block_rate = 12, 0.0
    while position + 8 <= size:
        file.seek(position)
        name, length = struct.unpack("<4sI", file.read(8))
        if name == b"fmt " and length >= 16:
            tag, _, rate, _, block, _ = struct.unpack("<HHIIHH", file.read(16))
            if tag not in _PCM or not rate or not block:
                return None
            block_rate = rate * block
        elif name == b"data":
            if not block_rate or length in _STREAMED:
                return None
            if position + 8 + length > size:
                raise RecordError("media", "truncated audio", f"{length} bytes expected, {size - position - 8} found")
            return length / block_rate
        position += 8 + length + length % 2
    return None


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
        """Read the header of a medium; RecordError if it could not be decoded later."""
        span = self._span(ref)
        try:
            if kind == "image":
                with closing(span):
                    return read_image_header(span, self.max_image_pixels)
            size = span.size
            with span.into_file() as file:
                if kind == "audio":
                    return read_audio_header(file, size, self.max_video_packets)
                return read_video_header(file, size, self.max_image_pixels, self.max_video_packets)
        except RecordError as error:
            raise _with_name(error, ref) from None
        except OSError as error:  # a disk or a network that fails while reading
            _refuse(error, ref.name)

    def open(self, ref: MediaRef) -> BinaryIO:
        """The bytes of a medium as a seekable file; the caller closes it."""
        return self._span(ref).into_file()

    def _span(self, ref: MediaRef) -> Span:
        if ref.data is not None:
            if not ref.data:
                raise RecordError("media", "empty file", _display_name(ref.name))
            return Span(data=ref.data)
        if ref.archive is not None:
            return self._archive_span(ref.archive, ref)
        if ref.path is None:
            raise RecordError("media", "not a usable path", f"{_display_name(ref.name)} has neither path nor bytes")
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
            raise RecordError("media", reason, f"{_display_name(ref.name)}: bytes {ref.offset}+{ref.size} of {size}")
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
                raise RecordError("media", "not a regular file", _display_name(path))
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
        raise RecordError("media", "path outside the media root", _display_name(path))


def _from_file_url(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        raise RecordError("media", "not a usable path", _display_name(url)) from None
    if parts.netloc not in ("", "localhost"):
        raise RecordError("media", "remote media are not fetched", _display_name(parts.netloc))
    return urllib.parse.unquote(parts.path)


def _regular_size(fd: int, path: str) -> int:
    """The size of an open regular file; closes what is none."""
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_size > 0:
        return state.st_size
    os.close(fd)
    reason = "empty file" if stat.S_ISREG(state.st_mode) else "not a regular file"
    raise RecordError("media", reason, _display_name(path))


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
    raise RecordError("media", reason, _display_name(path)) from None


def _display_name(name: str) -> str:
    return name if name.isascii() and name.isprintable() and len(name) <= 200 else ascii(name)[:200]


def _with_name(error: RecordError, ref: MediaRef) -> RecordError:
    """The same error with the medium's name, which the header readers do not know."""
    return RecordError(error.stage, error.reason, f"{_display_name(ref.name)}: {error.detail}".rstrip(": "))
