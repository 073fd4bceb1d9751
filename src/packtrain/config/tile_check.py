"""Settings that belong to the model where images are cut into tiles: they are compared with it, never applied to it."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.config.run_config import RunConfig
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.families.model_folder import resolve
from packtrain.families.settings import read_settings

_MEANS = {"vit_img_size": "the side of a tile", "mp_image_token_length": "the tokens of a tile"}


def check_tiles(config: RunConfig) -> tuple[str, ...]:
    """Refuse a tile that is not the model's own; say so where the model does not tell."""
    given = config.model.given(*_MEANS)
    if not given:
        return ()
    name = str(config.model.model_name_or_path)
    known = _tile(name)
    wrong = [
        f"{key} {value}, the model has {known[key]}" for key, value in given.items() if known.get(key, value) != value
    ]
    if wrong:
        raise ConfigError(
            "model",
            got="; ".join(wrong),
            expected="the model's own tiles: they are part of its weights",
            fix="leave these out, or name the model that they belong to",
        )
    return tuple(
        f"{key} {value} is {_MEANS[key]}, which the model decides: "
        + ("it agrees" if key in known else "it does not say, so this changes nothing")
        for key, value in given.items()
    )


def _tile(name: str) -> dict[str, object]:
    """What a model's own files say about its tiles."""
    settings = read_settings(str(resolve(name, cache_dir() / "models")))
    side = settings.image.get("max_image_size")
    found = {
        "vit_img_size": side.get("longest_edge") if isinstance(side, Mapping) else settings.config.get("vit_img_size"),
        "mp_image_token_length": settings.processor.get("image_seq_len", settings.config.get("mp_image_token_length")),
    }
    return {key: value for key, value in found.items() if value is not None}
