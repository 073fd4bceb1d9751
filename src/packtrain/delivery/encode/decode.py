"""Media decoded to pixels, upright, in RGB and on white, as the processors expect them; always within bounds.

What is wrong with a medium for good (missing, empty, cut off, not an image at all) is a RecordError. What is wrong with
the machine (a disk or a network that fails) stays an OSError, because trying again may help.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.numbers import GIB
from packtrain.core.values import Media, MediaHeader, MediaRef, PartLimits
from packtrain.families.part_limits import with_limits
from packtrain.records.images import IMAGE_FORMATS, decode_rgb, to_rgb
from packtrain.records.media import FORMATS, MediaStore

MAX_DECODED_BYTES = 4 * GIB  # of one video's sampled frames
# Errors of the system that stay the same however often a file is opened; any other is the machine's.
_PERMANENT = frozenset(
    (
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
        *(errno.ENXIO, errno.EACCES, errno.EPERM),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decoded:
    """One medium as pixels, and the header that its tokens are computed from. Pixels may also be synthetic."""

    header: MediaHeader
    pixels: Image.Image | np.ndarray[Any, Any] | None = (
        None  # RGB; (frames, height, width, 3) of a video; None: not read
    )
    indices: tuple[int, ...] = ()  # of a video's frames: which they are
    name: str = ""

    @classmethod
    def image(
        cls, pixels: Image.Image | np.ndarray[Any, Any], name: str = "", limits: PartLimits | None = None
    ) -> Decoded:
        """An image, also from an array (height, width, 3) of bytes."""
        shown = to_rgb(pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels))
        header = MediaHeader(kind="image", width=shown.width, height=shown.height, limits=limits)
        return cls(header=header, pixels=shown, name=name)


def decode_image(store: MediaStore, ref: MediaRef) -> Image.Image:
    """One image, EXIF orientation applied, in RGB, transparency on white."""
    with _faults("image cannot be decoded", ref), store.open(ref) as stream:
        # Pillow knows more: it would hand PostScript, whatever the file is called, to an interpreter.
        image = Image.open(stream, formats=IMAGE_FORMATS)
        if image.width * image.height > store.max_image_pixels:
            size = f"{image.width}x{image.height}"
            raise RecordError("decode", "image too large", f"{size}, the limit is {store.max_image_pixels} pixels")
        return decode_rgb(image)


def decode_frames(store: MediaStore, ref: MediaRef, indices: Sequence[int]) -> np.ndarray[Any, Any]:
    """The frames at these positions (sorted, repeats allowed), shape (frames, height, width, 3)."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            "decoding video", got="PyAV is not installed", expected="the package av", fix="pip install av"
        ) from error
    positions = sorted(set(indices))
    frames_at: dict[int, np.ndarray[Any, Any]] = {}
    size = 0
    with _faults("video cannot be decoded", ref):
        options = {"format_whitelist": FORMATS}
        with store.open(ref) as stream, av.open(stream, options=options, metadata_errors="replace") as container:
            for at, frame in enumerate(container.decode(video=0)):
                if len(frames_at) == len(positions):
                    break
                if at == positions[len(frames_at)]:
                    frames_at[at] = frame.to_ndarray(format="rgb24")
                    size += frames_at[at].nbytes
                    if size > MAX_DECODED_BYTES:
                        raise RecordError("decode", "video too large", f"{size:,} bytes")
        if len(frames_at) < len(positions):
            detail = f"{len(frames_at)} of {len(positions)} found"
            raise RecordError("decode", "video has fewer frames than its header says", detail)
        return np.stack([frames_at[index] for index in indices])


def media_header(store: MediaStore, medium: Media) -> MediaHeader:
    """Read the header of a medium."""
    with _faults("media cannot be read", medium.ref):
        return with_limits(store.header(medium.kind, medium.ref), medium)


@contextmanager
def _faults(reason: str, ref: MediaRef) -> Iterator[None]:
    """Sorts what goes wrong: the machine's faults stay OSErrors, all others become the record's."""
    outside = sys.exception()  # what a caller that tries again is handling; no fault of this medium
    try:
        yield
    except (MemoryError, ConfigError):
        raise
    except RecordError as error:
        fault = _machine_fault(error, outside)
        if fault is not None:
            raise fault from None
        if error.stage == "decode":
            raise RecordError("decode", error.reason, f"{ref.name}: {error.detail}") from None
        raise
    except Exception as error:  # decoders of damaged files raise anything
        fault = _machine_fault(error, outside)
        if fault is not None:
            raise fault from None
        raise RecordError("decode", reason, f"{ref.name}: {type(error).__name__}: {error}"[:300]) from None


def _machine_fault(error: BaseException | None, outside: BaseException | None) -> OSError | None:
    """The system's error at the bottom of an error, unless it says that the file itself is wrong.

    Opening a medium turns every such error into a RecordError, whose cause is the original.
    """
    while isinstance(error, RecordError):
        error = error.__context__
    if error is outside or not isinstance(error, OSError) or error.errno is None or error.errno in _PERMANENT:
        return None
    # FFmpeg gives its own verdicts on a file as numbered errors, too; those of the system come through as they are.
    return None if any(kind.__name__ == "FFmpegError" for kind in type(error).__mro__) else error
