"""Where packtrain keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$PACKTRAIN_CACHE, or the user's cache folder."""
    given = os.environ.get("PACKTRAIN_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "packtrain"
