"""Video and audio bytes -> size, frames, rate and length, from the container alone, without decoding a frame.

Width and height are those of the decoded frame arrays: PyAV does not apply rotation metadata, so neither does this.
The number of frames is what the container says, as transformers' PyAV reader takes it; where the container does not say
it (Matroska, WebM, transport streams) the packets of the video stream are counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaKind

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
        said = getattr(error, "strerror", None) or error  # not the number of the open file, which differs by process
        raise RecordError("media", f"not a readable {kind}", f"{type(error).__name__}: {said}"[:200]) from None


def _count_frames(container: InputContainer, stream: VideoStream, size: int, max_packets: int) -> int:
    """The number of frames, having made sure as cheaply as possible that all of them are in the file."""
    frames = int(stream.frames)
    if frames > max_packets:
        raise RecordError("media", "video too long", f"{frames} frames, the limit is {max_packets}")
    if frames > 0 and len(stream.index_entries) >= frames:
        _check_index(stream, size, "video")
        return frames
    counted = 0
    for packet in container.demux(stream):
        counted += packet.size > 0
        if counted > max_packets:
            raise RecordError("media", "video too long", f"more than {max_packets} packets")
    if counted < frames:
        raise RecordError("media", "truncated video", f"{counted} of {frames} frames")
    if counted == 0:
        raise RecordError("media", "video without frames", "no packets")
    return frames or counted


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
