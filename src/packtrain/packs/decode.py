"""Media decoded to pixels, upright and in RGB, as the processors expect them; always within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import av
import numpy as np
from PIL import Image, ImageOps

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaRef
from packtrain.records.media import MediaStore

MAX_DECODED_BYTES = 4 << 30  # of one video's sampled frames


def decode_image(store: MediaStore, ref: MediaRef) -> Image.Image:
    """One image, EXIF orientation applied, in RGB."""
    try:
        with store.open(ref) as stream, Image.open(stream) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RecordError("decode", "image cannot be decoded", f"{ref.name}: {error}") from None


def decode_frames(store: MediaStore, ref: MediaRef, indices: Sequence[int]) -> np.ndarray[Any, Any]:
    """The frames at these positions (sorted, repeats allowed), shape (frames, height, width, 3)."""
    wanted = sorted(set(indices))
    found: dict[int, np.ndarray[Any, Any]] = {}
    size = 0
    try:
        with store.open(ref) as stream, av.open(stream) as container:
            for at, frame in enumerate(container.decode(video=0)):
                if len(found) == len(wanted):
                    break
                if at == wanted[len(found)]:
                    found[at] = frame.to_ndarray(format="rgb24")
                    size += found[at].nbytes
                    if size > MAX_DECODED_BYTES:
                        raise RecordError("decode", "video too large", f"{ref.name}: {size:,} bytes")
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise RecordError("decode", "video cannot be decoded", f"{ref.name}: {error}") from None
    if len(found) < len(wanted):
        raise RecordError("decode", "video has fewer frames than its header says", f"{ref.name}: {len(found)}")
    return np.stack([found[index] for index in indices])
