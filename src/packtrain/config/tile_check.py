"""Settings that belong to the model: tiles are compared with its own; limits of media are those that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packtrain.config.run_config import RunConfig
from packtrain.config.systems import systems_of
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.core.values import MediaLimits
from packtrain.families.family import ProcessorSettings
from packtrain.families.model_folder import resolve
from packtrain.families.registry import load_rule
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
            fix="leave these out, or use the model that they belong to",
        )
    return tuple(
        f"{key} {value} is {_MEANS[key]}, which the model decides: "
        + ("it agrees" if key in known else "it does not define it, so this has no effect")
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


def own_limits(config: RunConfig, settings: ProcessorSettings) -> tuple[RunConfig, tuple[str, ...]]:
    """Configs of other systems have one set of limits for every model: without those that this one has not."""
    gone = unknown_limits(config, settings) if systems_of(config.written_as) else {}
    if not gone:
        return config, ()
    said = ", ".join(f"{name} {value}" for name, value in gone.items())
    return without_limits(config, gone), (f"{settings.model_type} has no such media limit, ignored: {said}",)


def unknown_limits(config: RunConfig, settings: ProcessorSettings) -> dict[str, Any]:
    """Limits of media that a config has and the model's family has not."""

    def takes(**limits: Any) -> bool:
        try:
            load_rule(settings, MediaLimits(**limits))
        except ConfigError:
            return False
        return True

    given = config.data.processor_config or {}
    return {name: value for name, value in given.items() if takes() and not takes(**{name: value})}


def without_limits(config: RunConfig, gone: Mapping[str, Any]) -> RunConfig:
    """The config without these limits of media."""
    kept = {name: value for name, value in (config.data.processor_config or {}).items() if name not in gone}
    return replace(config, data=replace(config.data, processor_config=kept or None))
