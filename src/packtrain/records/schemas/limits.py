"""Limits of one medium, as others write them beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaKind, PartLimits

# By the names of `PartLimits`.
PART_LIMITS: Mapping[MediaKind, Mapping[str, str]] = {
    "image": {name: name for name in ("min_pixels", "max_pixels", "resized_height", "resized_width")},
    "video": {name: name for name in ("min_pixels", "max_pixels", "fps", "num_frames", "max_frames")}
    | {"nframes": "num_frames"},
    "audio": {},
}
# Others, of which no processor here takes one for a single medium.
OTHER_LIMITS = (
    *("total_pixels", "min_frames", "video_start", "video_end", "sample_fps", "max_img_size", "longest_edge"),
    *("shortest_edge", "size", "do_resize", "max_dynamic_patch", "min_dynamic_patch", "max_num", "max_patches"),
)
LIMIT_KEYS = frozenset((*OTHER_LIMITS, *(name for known in PART_LIMITS.values() for name in known)))


def limits_of(part: Mapping[str, Any], kind: MediaKind) -> PartLimits | None:
    """The limits that a part of a message, or an item of a media column, gives its medium."""
    if LIMIT_KEYS.isdisjoint(part):
        return None
    found: dict[str, Any] = {}
    for key in LIMIT_KEYS.intersection(part):
        value = part[key]
        if value is None:
            continue
        name = PART_LIMITS[kind].get(key)
        if name is None:
            known = ", ".join(PART_LIMITS[kind]) or "none"
            raise RecordError("schema", "an unknown limit in a part", f"{key} of {a_kind(kind)}; known are {known}")
        whole = isinstance(value, int) or (isinstance(value, float) and (name == "fps" or value.is_integer()))
        if not whole or isinstance(value, bool) or not 0 < value < 1e12 or found.get(name, value) != value:
            raise RecordError("schema", "a limit in a part is not a usable number", f"{key}: {ascii(value)[:60]}")
        found[name] = value if name == "fps" else int(value)
    resized = ("resized_height" in found) + ("resized_width" in found)
    if resized == 1 or (resized and len(found) > 2) or {"fps", "num_frames"} <= found.keys():
        detail = f"{', '.join(sorted(found))}: resized_height goes only with resized_width, and fps excludes nframes"
        raise RecordError("schema", "limits in a part contradict each other", detail)
    return PartLimits(**found) if found else None


def a_kind(kind: MediaKind) -> str:
    """The kind with its article."""
    return f"{'a' if kind == 'video' else 'an'} {kind}"
