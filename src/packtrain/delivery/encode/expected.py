"""What a sample was measured and planned with, and the error that says why it is now something else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.core.errors import DriftError
from packtrain.core.fingerprint import differences
from packtrain.core.values import MediaHeader, Record
from packtrain.delivery.encode.decode import Decoded
from packtrain.families.family import ProcessorSettings
from packtrain.measuring.request import settings_state

_COUNTS = ("tokens", "patches", "supervised_tokens", "images", "videos")
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A whole sample's row of the cost table."""

    tokens: int
    patches: int
    supervised_tokens: int
    images: int = 0
    videos: int = 0
    headers: tuple[MediaHeader, ...] | None = None  # of its media, where they are at hand


def require_as_planned(
    record: Record,
    *,
    found: Expected,
    planned: Expected,
    media: Sequence[Decoded],
    settings: ProcessorSettings,
    measured_settings: Mapping[str, Any] | None,
) -> None:
    """Raise DriftError where a sample does not have the counts that its pack was planned with."""
    changed = [
        f"{name} {getattr(found, name)} found, {getattr(planned, name)} planned"
        for name in _COUNTS
        if getattr(found, name) != getattr(planned, name)
    ]
    if not changed:
        return
    now = json.loads(json.dumps(settings_state(settings), default=str))  # as it was written
    named = differences(measured_settings, now) if measured_settings is not None else []
    again = "measure and pack again"
    if named:
        shown = "; ".join(named[:_MOST_NAMED]) + (f"; {len(named) - _MOST_NAMED} more" if named[_MOST_NAMED:] else "")
        fix = f"these settings have changed since measuring: {shown}. Restore them, or {again}"
    else:
        known = (
            "no setting has changed since measuring, so the sample has"
            if measured_settings is not None
            else ("the sample or the model's settings have")
        )
        fix = f"{known} changed: restore it, or {again}"
    sizes = _sizes(media, planned.headers)
    raise DriftError(
        f"sample {record.id} ({record.origin})",
        got="; ".join(changed) + (f". Media now: {sizes}" if sizes else ""),
        expected="the counts that its pack was planned with",
        fix=fix,
    )


def _sizes(media: Sequence[Decoded], measured: tuple[MediaHeader, ...] | None) -> str:
    """Each medium with its size; where the sizes measured are known, only those that differ."""
    if measured is None or len(measured) != len(media):
        shown = [f"{medium.name} {_size(medium.header)}" for medium in media]
    else:
        pairs = zip(media, measured, strict=True)
        shown = [f"{m.name} {_size(m.header)}, was {_size(old)}" for m, old in pairs if _size(m.header) != _size(old)]
    more = f" and {len(shown) - _MOST_NAMED} more" if shown[_MOST_NAMED:] else ""
    return "; ".join(shown[:_MOST_NAMED]) + more


def _size(header: MediaHeader) -> str:
    size = f"{header.width}x{header.height}"
    return size if header.kind == "image" else f"{size}, {header.frames} frames at {header.fps:g} fps"
