"""An opened image -> upright RGB with eight bits a channel, on white; the same for measuring and for delivery.

Pillow clips what has more than eight bits instead of scaling it, so that a 16-bit grey image would come out white and a
floating-point one black. Where a file does not say what its largest value means, the image is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from packtrain.core.errors import RecordError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

_BITS, _PHOTOMETRIC, _PLANAR = 258, 262, 284  # TIFF tags
_WHITE_IS_ZERO = 0
# A deep image in which nothing is brighter holds fewer bits than its file says: 12 bits of 16 reach just this value.
_DARKEST = 16
_REFUSED = "image values have no 8-bit form"


def decoded_rgb(image: ImageFile) -> Image:
    """A file that was opened, decoded: upright, in RGB, transparency on white."""
    from PIL import ImageOps

    deep = is_deep(image)  # loading forgets it
    ImageOps.exif_transpose(image, in_place=True)
    image.load()
    return in_colour(image, deep=deep)


def in_colour(image: Image, *, deep: bool = False) -> Image:
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
