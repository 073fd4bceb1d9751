"""Where links in a folder may lead: into it, and in the hub's cache to where that keeps the files."""

from __future__ import annotations

import os
import re

# A snapshot is a folder of links: REPO/snapshots/COMMIT/data/a.parquet -> REPO/blobs/HASH
_SNAPSHOT = re.compile(r"(.*/(?:datasets|models|spaces)--[^/]+)/snapshots/[^/]+(?:/.*)?", re.DOTALL)


def hub_snapshots(folder: str) -> list[str]:
    """The snapshots in a folder of the hub's cache, the latest first; none in any other folder."""
    if not all(os.path.isdir(os.path.join(folder, name)) for name in ("blobs", "snapshots")):
        return []
    found = [entry for entry in os.scandir(os.path.join(folder, "snapshots")) if entry.is_dir()]
    return [entry.path for entry in sorted(found, key=lambda entry: -entry.stat().st_mtime)]


def allowed_places(folder: str) -> tuple[str, ...]:
    """The real folders that a file of this one may lie in, each with a slash at its end."""
    real = os.path.realpath(folder)
    snapshot = _SNAPSHOT.fullmatch(real)
    found = [real, *([f"{snapshot[1]}/blobs"] if snapshot else [])]
    return tuple(os.path.join(place, "") for place in found)
