"""Image bytes -> upright width and height from headers alone; an opened image -> upright RGB of eight bits, on white.

Pillow's lazy open reads the size. A walk over markers or chunks then tells whether the file is complete, and bounds the
canvas of a WebP file before its decoder allocates it. Where that cannot tell, always for GIF and TIFF, or where values
of more than eight bits may have no form in eight, one real decode decides. Measuring and delivery decode alike.

What no header shows: damage in the middle of compressed data, and in tables that only a decoder reads. JPEG decodes
most of it anyway; other formats fail later, and their samples are then left out by name.

Pillow clips what has more than eight bits instead of scaling it, so that a 16-bit grey image would come out white and a
floating-point one black. Where a file does not say what its largest value means, the image is refused.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaHeader
from packtrain.records.span import Span

if TYPE_CHECKING:
    from PIL.Image import Exif, Image
    from PIL.ImageFile import ImageFile

_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
_TAIL = 65536  # how far before its end a file may stop being an image (padding, trailers)
_HEAD = 32
_MAX_CHUNKS = 1_000_000
# Lazy paths; only these parsers ever see the user's bytes.
_OPENERS: Mapping[str, str] = {
    "JPEG": "PIL.JpegImagePlugin:jpeg_factory",
    "PNG": "PIL.PngImagePlugin:PngImageFile",
    "WEBP": "PIL.WebPImagePlugin:WebPImageFile",
    "GIF": "PIL.GifImagePlugin:GifImageFile",
    "BMP": "PIL.BmpImagePlugin:BmpImageFile",
    "TIFF": "PIL.TiffImagePlugin:TiffImageFile",
}
IMAGE_FORMATS = tuple(_OPENERS)
_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_warnings_lock = threading.Lock()


def read_image_header(span: Span, max_pixels: int) -> MediaHeader:
    """The header of one image. Raises RecordError for what the training pipeline could not decode."""
    head = span.read_at(0, _HEAD)
    kind = _image_format(head)
    if kind is None:
        raise RecordError("media", "not a supported image", f"begins with {head[:8].hex()}")
    size = _webp_size(span, head, max_pixels) if kind == "WEBP" else None
    if size is None:
        size = _careful_size(span, kind, max_pixels)
    return MediaHeader(kind="image", width=size[0], height=size[1])


def _image_format(head: bytes) -> str | None:
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(_TIFF_MAGIC):
        return "TIFF"
    return "BMP" if head.startswith(b"BM") else None


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RecordError("media", "image without pixels", f"{width}x{height}")
    if width * height > max_pixels:
        raise RecordError("media", "image too large", f"{width}x{height}, the limit is {max_pixels} pixels")


def _jpeg_complete(image: ImageFile, span: Span) -> bool:
    """Is there an end marker after the start of the scan, where opening stops? Compressed data never look like one."""
    assert image.fp is not None, "opened a moment ago"
    scan = image.fp.tell()
    if span.size - 2 >= scan and span.read_at(span.size - 2, 2) == b"\xff\xd9":
        return True
    start = max(scan, span.size - _TAIL)
    return b"\xff\xd9" in span.read_at(start, span.size - start)


def _webp_size(span: Span, head: bytes, max_pixels: int) -> tuple[int, int] | None:
    """The size of a WebP file without extras, or None; bounds the canvas before a decoder would allocate it."""
    if int.from_bytes(head[4:8], "little") + 8 > span.size or len(head) < 30:
        raise RecordError("media", "truncated image", f"{span.size} bytes of WebP")
    chunk = head[12:16]
    if chunk == b"VP8 " and head[23:26] == b"\x9d\x01\x2a" and not head[20] & 1:
        size = int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF
    elif chunk == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif chunk == b"VP8X":
        canvas = int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
        _check_size(canvas, max_pixels)
        return None
    else:
        raise RecordError("media", "broken image", "WebP without an image")
    _check_size(size, max_pixels)
    return size if _webp_regular(span) else None


def _webp_regular(span: Span) -> bool:
    """Do the chunks fill the file as its sizes say, with a bitstream that begins as decoders want it?"""
    end = 8 + int.from_bytes(span.read_at(4, 4), "little")
    position = 12
    for _ in range(_MAX_CHUNKS):
        head = span.read_at(position, 18)
        name, length = head[:4], int.from_bytes(head[4:8], "little")
        if len(head) < 8 or position + 8 + length > end:
            return False
        tag = int.from_bytes(head[8:11], "little")
        if name == b"VP8 " and (tag & 1 or (tag >> 1 & 7) > 3 or not tag >> 4 & 1 or tag >> 5 >= length):
            return False
        if name == b"VP8L" and (head[8:9] != b"\x2f" or int.from_bytes(head[9:13], "little") >> 29):
            return False
        position += 8 + length + length % 2
        if position >= end:
            return position == end
    return False


def _careful_size(span: Span, kind: str, max_pixels: int) -> tuple[int, int]:
    """The size by Pillow's lazy open; by a real decode where the file may be cut or has metadata after its pixels."""
    file = span.file()
    complete = True
    try:
        with _quiet():
            image = _opener(kind)(file, "")
            _check_size(image.size, max_pixels)
            complete = kind in _COMPLETE and _COMPLETE[kind](image, span)
            if not complete or is_deep(image) or not _converts_to_rgb(image.mode):
                return decode_rgb(image).size
            return _upright_size(image)
    except RecordError as error:
        raise RecordError("media", error.reason, error.detail) from None
    except Exception as error:  # Pillow raises nearly everything on hostile bytes
        if type(error).__name__ == "DecompressionBombError":
            raise RecordError("media", "image too large", str(error)[:200]) from None
        reason = "broken image" if complete and "runcated" not in str(error) else "truncated image"
        raise RecordError("media", reason, f"{kind}: {type(error).__name__}: {error}"[:200]) from None
    finally:
        file.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about damaged metadata: what matters becomes a ledger line. One at a time, filters are global."""
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _opener(kind: str) -> Callable[..., ImageFile]:
    module, _, name = _OPENERS[kind].partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


@functools.cache
def _converts_to_rgb(mode: str) -> bool:
    from PIL import Image

    try:
        Image.new(mode, (1, 1)).convert("RGB")
    except (ValueError, KeyError):
        return False
    return True


def _upright_size(image: ImageFile) -> tuple[int, int]:
    """The size after `ImageOps.exif_transpose`, which also fails where it cannot write the metadata back."""
    exif = _read_exif(image)
    orientation = exif.get(_ORIENTATION, 1)
    width, height = image.size
    if orientation in (2, 3, 4, *_TURNED) and "exif" in image.info:
        del exif[_ORIENTATION]
        exif.tobytes()
    turned = orientation in _TURNED
    tags = getattr(image, "tag_v2", None)
    if tags is not None and tags.get(_ORIENTATION) in _TURNED:
        turned = False  # Pillow's TIFF size is upright already
    return (height, width) if turned else (width, height)


def _read_exif(image: ImageFile) -> Exif:
    """The metadata without decoding: PNG's own method decodes, in case some follows the pixels."""
    from PIL import Image

    return Image.Image.getexif(image)


def _png_complete(image: ImageFile, span: Span) -> bool:
    """Does the chain of chunks reach IEND, with no metadata that matters after the pixels?"""
    position, pixels = 8, False
    for _ in range(_MAX_CHUNKS):
        chunk = span.read_at(position, 8)
        if len(chunk) < 8:
            return False
        name = chunk[4:]
        if name == b"IHDR" and position != 8:
            return False
        if name == b"IEND":
            return pixels and position + 12 <= span.size
        if name == b"IDAT":
            pixels = True
        elif pixels and name in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            key = span.read_at(position + 8, 80).partition(b"\0")[0]
            if name == b"eXIf" or key in (b"exif", b"xmp", b"XML:com.adobe.xmp", b"Raw profile type exif"):
                return False
        position += 12 + int.from_bytes(chunk[:4], "big")
    return False


def _bmp_complete(image: ImageFile, span: Span) -> bool:
    """Do the rows that the header promises fit into the file? Run-length coded rows must be decoded to know."""
    if len(image.tile) != 1 or image.tile[0].codec_name != "raw" or not isinstance(image.tile[0].args, tuple):
        return False
    return bool(image.tile[0].offset + image.tile[0].args[1] * image.size[1] <= span.size)


_COMPLETE: Mapping[str, Callable[[ImageFile, Span], bool]] = {
    "JPEG": _jpeg_complete,
    "PNG": _png_complete,
    "BMP": _bmp_complete,
    # Where its sizes are as they should be, the decoder has walked the whole file when it was opened.
    "WEBP": lambda image, span: _webp_regular(span),
}


_BITS, _PHOTOMETRIC, _PLANAR = 258, 262, 284  # TIFF tags
_WHITE_IS_ZERO = 0
# A deep image in which nothing is brighter holds fewer bits than its file says: 12 bits of 16 reach just this value.
_DARKEST = 16
_REFUSED = "image values have no 8-bit form"


def decode_rgb(image: ImageFile) -> Image:
    """A file that was opened, decoded: upright, in RGB, transparency on white."""
    from PIL import ImageOps

    deep = is_deep(image)  # loading forgets it
    ImageOps.exif_transpose(image, in_place=True)
    image.load()
    return to_rgb(image, deep=deep)


def to_rgb(image: Image, *, deep: bool = False) -> Image:
    """The image in RGB. What is transparent becomes white: the colour stored there is often black, as is the text."""
    from PIL import Image as images

    if deep or image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def is_deep(image: ImageFile) -> bool:
    """Does the file have more than eight bits for a value? Asked of an image that is opened and not loaded."""
    tags = getattr(image, "tag_v2", None)
    if tags is not None:
        return max(tags.get(_BITS, (1,))) > 8
    return image.format == "PNG" and any(";16" in str(tile.args) for tile in image.tile)


def _eight_bits(image: Image) -> Image:
    """A deep image with eight bits a value; colour already has the upper ones."""
    tags = getattr(image, "tag_v2", {})
    if image.mode.startswith(("I", "F")):
        image = _grey(image, tags)
    elif tags.get(_PLANAR) == 2:
        raise RecordError("decode", _REFUSED, "Pillow misreads 16-bit TIFF with one plane for each colour")
    if image.mode in ("L", "LA", "RGB", "RGBA"):
        brightest = max(int(np.asarray(image.getchannel(band)).max()) for band in image.getbands() if band != "A")
        if brightest <= _DARKEST:
            detail = f"the brightest value is {brightest} of 255: scale the values to the whole range of 8 or 16 bits"
            raise RecordError("decode", _REFUSED, detail)
    return image


def _grey(image: Image, tags: dict[int, object]) -> Image:
    """Grey values of 16 bits (12 in some TIFF files) scaled to eight, with the transparent one as alpha."""
    from PIL import Image as images

    if not (image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")):
        detail = f"mode {image.mode}: the value range is unknown; scale the values to 8 or 16 bits"
        raise RecordError("decode", _REFUSED, detail)
    values = np.asarray(image).astype(np.int64)
    full = 4095 if tags.get(_BITS) == (12,) else 65535
    clear = image.info.get("transparency")
    shown = (values * 255 + full // 2) // full
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        shown = 255 - shown
    grey = images.fromarray(shown.astype(np.uint8))
    if clear is not None:
        grey.putalpha(images.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey
