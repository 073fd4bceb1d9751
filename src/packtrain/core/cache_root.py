"""Where packtrain keeps what it can make again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from packtrain.core.errors import ConfigError


def cache_dir() -> Path:
    """$PACKTRAIN_CACHE, or the user's cache folder."""
    folder = os.environ.get("PACKTRAIN_CACHE")
    if folder:
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "packtrain"


def make_cache(root: Path) -> Path:
    """The root of a run's cache, or why there can be none; one that is only read may be complete."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        return root
    except OSError as error:
        if error.errno == errno.EROFS:
            return root
        raise ConfigError(
            "data.cache_dir",
            got=f"{root}: {'a file' if root.is_file() else error.strerror}",
            expected="a writable folder",
            fix="set another one, here or in the environment variable PACKTRAIN_CACHE",
        ) from None
    return root
