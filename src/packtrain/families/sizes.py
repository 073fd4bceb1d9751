"""Reads sizes from a model's config over the defaults of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.core.errors import ConfigError


class Values:
    """A config's values over the defaults of its class; a size that neither gives is an error that names it."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._config, self._defaults, self._where = config, defaults, where

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        return self._config[key] if key in self._config else self._defaults.get(key)

    def size(self, *keys: str) -> int:
        """A positive whole number, by the first key that the config has; null means the default."""
        for source in (self._config, self._defaults):
            for key in keys:
                if source.get(key) is not None:
                    return self._whole(key, source[key])
        raise ConfigError(
            f"{self._where}.{keys[0]}",
            got="no such key",
            expected="the sizes of the model: " + ", ".join(keys),
            fix="use the config.json that came with the model",
        )

    def sides(self, key: str) -> tuple[int, int]:
        """Height and width, given as two numbers or as one for both."""
        value = self._config.get(key)
        value = self._defaults.get(key) if value is None else value
        if value is None:
            return self.size(key), 0  # raises
        both = value if isinstance(value, list | tuple) else (value, value)
        if len(both) != 2:
            raise ConfigError(f"{self._where}.{key}", got=value, expected="one number, or height and width")
        return self._whole(key, both[0]), self._whole(key, both[1])

    def flag(self, key: str) -> bool:
        """A switch; absent is off unless the defaults say otherwise."""
        return bool(self.get(key))

    def _whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._where}.{key}", got=value, expected="a positive whole number")
        return value
