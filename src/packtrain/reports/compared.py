"""Which numbers stand side by side, and under which words: shared by page, Markdown and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.reports.numbers import count, shown

STATISTICS = ("mean", "median", "std", "min", "max", "p95", "p99", "total")
_WORDS = {
    "p95": "95th percentile",
    "p99": "99th percentile",
    "std": "Std. deviation",
    "min": "Smallest",
    "max": "Largest",
    "frames": "Video frames",
    "patches": "Vision patches",
    "vision_tokens": "Media tokens",
    "attention": "Attention work",
    "by_length": "By length",
    "random": "Random order",
}

_MODALITIES = {
    "text": "Text only",
    "image": "One image",
    "images": "Several images",
    "video": "Video",
    "mixed": "Images and video",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of padding versus packing: a format, and the field of a padded run and of a simulation."""

    name: str
    kind: str
    padded: str | None
    packed: str | None


# (format, field) of a simulation, in the order of the table's columns.
SIMULATED = (
    ("count", "packs"),
    ("percent", "of_bound"),
    ("percent", "fill"),
    ("decimal", "samples_per_pack"),
    ("count", "samples_dropped"),
    ("count", "packs_per_step"),
    ("decimal", "samples_per_step"),
    ("count", "micro_steps"),
    ("count", "steps"),
    ("gib", "memory_bytes"),
    ("fits", "fits"),
    ("duration", "seconds"),
    ("count", "tokens_per_second"),
    ("times", "speedup"),
)
COMPARED = (
    Row(name="Forward passes (batches or packs)", kind="count", padded="batches", packed="packs"),
    Row(name="Optimizer steps", kind="count", padded="steps", packed="steps"),
    Row(name="Samples per step", kind="decimal", padded="samples_per_step", packed="samples_per_step"),
    Row(name="Samples trained on", kind="count", padded="samples", packed="samples_packed"),
    Row(name="Samples dropped", kind="count", padded="dropped", packed="samples_dropped"),
    Row(name="Real tokens", kind="count", padded="real_tokens", packed="real_tokens"),
    Row(name="Waste", kind="percent", padded="waste", packed="unused"),
    Row(name="Time of an epoch, predicted", kind="duration", padded="seconds", packed="seconds"),
    Row(name="Real tokens per second", kind="count", padded="tokens_per_second", packed="tokens_per_second"),
    Row(name="Speed over the baseline", kind="times", padded="speedup", packed="speedup"),
    Row(name="Peak memory of a GPU", kind="gib", padded="memory_bytes", packed="memory_bytes"),
    Row(name="Fits the GPU", kind="fits", padded="fits", packed="fits"),
)


def words(name: str) -> str:
    """A field's name as people say it.

    >>> words("supervised_tokens"), words("p95")
    ('Supervised tokens', '95th percentile')
    """
    return _WORDS.get(name) or name.replace("_", " ").capitalize()


def modality(name: str) -> str:
    """A modality in words.

    >>> modality("image"), modality("text")
    ('One image', 'Text only')
    """
    return _MODALITIES.get(name) or shown(name, 60)


def limits_text(limits: Mapping[str, int]) -> str:
    """Further limits of a packing; empty where there are none.

    >>> limits_text({"max_images_per_pack": 8}), limits_text({})
    ('max_images_per_pack 8', '')
    """
    return ", ".join(f"{name} {count(value)}" for name, value in limits.items())
