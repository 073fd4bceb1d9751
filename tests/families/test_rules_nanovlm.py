"""nanoVLM's rule against an implementation that really resizes an image and cuts it into tiles."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from PIL import Image

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.family import Expansion, ProcessorSettings, Run
from packtrain.families.nanovlm.rule import NanoVLM

NO_LIMITS = MediaLimits()


def rule(limits: MediaLimits = NO_LIMITS, **config: object) -> NanoVLM:
    return NanoVLM(ProcessorSettings(folder="", model_type="nanovlm", config=config), limits)


def header(width: int, height: int) -> MediaHeader:
    return MediaHeader(kind="image", width=width, height=height)


def cut(image: Image.Image, p: int, m: int, forced: bool) -> list[tuple[str, np.ndarray]]:
    """Marker and pixels of every tile, made by resizing and cutting the image itself."""
    width, height = image.size
    long, short = (width, height) if width >= height else (height, width)
    new_long = m if forced else min(m, math.ceil(long / p) * p)
    scale = new_long / long
    new_short = max(math.ceil(short * scale / p) * p, p)
    new_size = (new_long, new_short) if width >= height else (new_short, new_long)
    pixels = np.asarray(image.resize(new_size, Image.Resampling.NEAREST))  # what is in the tiles does not matter
    tiles = []
    for row in range(0, pixels.shape[0], p):
        for column in range(0, pixels.shape[1], p):
            tile = pixels[row : row + p, column : column + p]
            assert tile.shape == (p, p)
            tiles.append((f"<row_{row // p + 1}_col_{column // p + 1}>", tile))
    view = ("<|global_image|>", np.asarray(image.resize((p, p), Image.Resampling.NEAREST)))
    return [view] if len(tiles) == 1 else [view, *tiles]


def expected(size: tuple[int, int], p: int, m: int, forced: bool, tokens: int) -> str:
    marks = [mark for mark, _ in cut(Image.new("L", size), p, m, forced)]
    return "".join(mark + "<|image|>" * tokens for mark in marks)


def written(expansion: Expansion) -> str:
    return "".join(piece.token * piece.count if isinstance(piece, Run) else piece for piece in expansion.pieces)


def sizes(count: int, p: int, m: int, seed: int, longest: int = 4000) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    found = [(1, 1), (4000, 1), (1, 4000), (364, 273), (273, 364), (p, p), (p + 1, p), (m, m), (m + 1, 3)]
    while len(found) < count:
        near = max(1, draw.randint(1, 8) * p // draw.choice((1, 2, 3)) + draw.choice((-1, 0, 1)))
        found.append(
            draw.choice(
                ((draw.randint(1, longest), draw.randint(1, longest)), (near, near), (near, draw.randint(1, 900)))
            )
        )
    return found


# The rule scales with p, so small tiles test the same arithmetic with little to resize.
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(("p", "m"), [(8, 32), (16, 48), (7, 35)])
def test_tiles_are_those_of_a_real_cut(p: int, m: int, forced: bool) -> None:
    family = rule(
        vit_img_size=p, max_img_size=m, vit_patch_size=1, mp_image_token_length=3, resize_to_max_side_len=forced
    )
    for size in sizes(250, p, m, seed=p, longest=1000):
        expansion = family.image(header(*size), 1)
        assert written(expansion) == expected(size, p, m, forced, 3), size
        assert expansion.patches == expansion.tiles * p * p, size
        assert expansion.media_tokens == expansion.tiles * 3, size


@pytest.mark.full
@pytest.mark.parametrize("forced", [True, False])
def test_tiles_of_the_published_size(forced: bool) -> None:
    family = rule(resize_to_max_side_len=forced)
    for size in sizes(1000, 512, 2048, seed=9):
        expansion = family.image(header(*size), 1)
        assert written(expansion) == expected(size, 512, 2048, forced, 64), size


def test_float_order_decides_a_row() -> None:
    """273 * (2048 / 364) is a little more than 1536, so a fourth row of tiles is made."""
    expansion = rule().image(header(364, 273), 1)
    assert expansion.tiles == 4 * 4 + 1
    assert expansion.patches == 17 * 1024
    assert expansion.max_patches == 1024
    assert expansion.media_tokens == 17 * 64
    assert "<row_4_col_4>" in written(expansion)


def test_single_tile_is_its_own_global_view() -> None:
    expansion = rule(resize_to_max_side_len=False).image(header(300, 200), 1)
    assert expansion.pieces == ("<|global_image|>", Run("<|image|>", 64))


def test_several_images_are_numbered_from_zero() -> None:
    texts = [written(rule().image(header(64, 64), 3, number)) for number in (1, 2, 3)]
    assert [text[: text.index(">") + 1] for text in texts] == ["<image: 0>", "<image: 1>", "<image: 2>"]
    assert written(rule().image(header(64, 64), 1)).startswith("<|global_image|>")


def test_limit_is_the_longest_side() -> None:
    limited = rule(MediaLimits(max_img_size=1024))
    assert limited.image(header(900, 900), 1).tiles == 2 * 2 + 1
    assert limited.processor_kwargs() == {"images_kwargs": {"max_img_size": 1024}}
    assert rule().processor_kwargs() == {}


def test_sides_that_are_no_whole_tiles_are_refused() -> None:
    for side in (1000, 100):
        with pytest.raises(ConfigError, match="multiple of the tile's side"):
            rule(MediaLimits(max_img_size=side))
    with pytest.raises(ConfigError, match="num_frames"):
        rule(MediaLimits(num_frames=4))
    with pytest.raises(RecordError, match="takes no video"):
        rule().video(header(5, 5))
