"""Tiles: families that cut an image into pieces of one size have more patches than their images attend over."""

from __future__ import annotations

import numpy as np

from packtrain.packing.resources import Samples


def tiles_of(samples: Samples) -> np.ndarray | None:
    """Tiles of every sample; None where images are not cut.

    A cut image has more patches than what attends to itself, a whole one never.

    >>> one = {"images": np.array([1, 2]), "frames": np.array([0, 0]), "largest_patches": np.array([1024, 1024])}
    >>> tiles_of(Samples({**one, "patches": np.array([17 * 1024, 2 * 1024])})).tolist()
    [17, 2]
    >>> tiles_of(Samples({**one, "patches": np.array([1024, 1500])}))
    """
    patches, largest = samples["patches"], np.maximum(samples["largest_patches"], 1)
    cut = (samples["frames"] == 0) & (patches > samples["images"] * largest)
    return patches // largest if cut.any() else None


def largest_image_patches(samples: Samples) -> int:
    """Patches of the largest image at most, all tiles together: what one of several has if others have one tile."""
    patches, images = samples["patches"], samples["images"]
    alone = np.where(images > 1, patches - (images - 1) * samples["largest_patches"], patches)
    return int(np.maximum(alone, samples["largest_patches"])[images > 0].max(initial=0))
