"""Which numbers stand side by side, and under which words: shared by page, Markdown and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packtrain.core.numbers import count, shown
from packtrain.planning.study_values import Simulation

COLUMNS = (
    *("tokens", "text_tokens", "vision_tokens", "image_tokens", "video_tokens", "audio_tokens", "supervised_tokens"),
    *("images", "tiles", "videos", "frames", "patches", "objects"),
)
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
class Column:
    """One number of every simulation: its title, format and field, and a share that stands in brackets behind it."""

    title: str
    kind: str
    name: str
    share: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRow:
    """One line of padding versus packing: a format, and the field of a padded run and of a simulation."""

    name: str
    kind: str
    padded: str | None
    packed: str | None


SIMULATED = (
    Column(title="Packs", kind="count", name="packs"),
    Column(title="Of the bound", kind="percent", name="of_bound"),
    Column(title="Fill", kind="percent", name="fill"),
    Column(title="Samples packed", kind="count", name="samples_packed"),
    Column(title="Dropped", kind="count", name="samples_dropped", share="dropped_share"),
    Column(title="Packs per step", kind="count", name="packs_per_step"),
    Column(title="Samples per step", kind="decimal", name="samples_per_step"),
    Column(title="GPUs idle", kind="percent", name="idle"),
    Column(title="Steps", kind="count", name="steps"),
    Column(title="Memory", kind="gib", name="memory_bytes"),
    Column(title="Fits", kind="fits", name="fits"),
    Column(title="Epoch", kind="duration", name="seconds"),
    Column(title="Real tokens/s", kind="count", name="tokens_per_second"),
    Column(title="Speed-up", kind="times", name="speedup"),
)
_ONE_EPOCH = (
    ComparedRow(name="Micro-batches (batches or packs)", kind="count", padded="batches", packed="packs"),
    ComparedRow(name="Optimizer steps", kind="count", padded="steps", packed="steps"),
    ComparedRow(name="Samples per step", kind="decimal", padded="samples_per_step", packed="samples_per_step"),
    ComparedRow(name="Samples trained on", kind="count", padded="samples", packed="samples_packed"),
    ComparedRow(name="Samples dropped", kind="count", padded="dropped", packed="samples_dropped"),
    ComparedRow(name="Real tokens", kind="count", padded="real_tokens", packed="real_tokens"),
    ComparedRow(name="Waste", kind="percent", padded="waste", packed="unused"),
    ComparedRow(name="Time, predicted", kind="duration", padded="seconds", packed="seconds"),
)
_ALL_EPOCHS = (
    ComparedRow(name="Optimizer steps", kind="count", padded="total_steps", packed="total_steps"),
    ComparedRow(name="Samples", kind="count", padded="total_samples", packed="total_samples"),
    ComparedRow(name="Real tokens", kind="count", padded="total_tokens", packed="total_tokens"),
    ComparedRow(name="Time, predicted", kind="duration", padded="total_seconds", packed="total_seconds"),
)
_EXPECTED = (
    ComparedRow(name="Samples per second", kind="decimal", padded="samples_per_second", packed="samples_per_second"),
    ComparedRow(name="Real tokens per second", kind="count", padded="tokens_per_second", packed="tokens_per_second"),
    ComparedRow(name="Step time", kind="seconds", padded="seconds_per_step", packed="seconds_per_step"),
    ComparedRow(name="Speedup over the first column", kind="times", padded="speedup", packed="speedup"),
    ComparedRow(name="Peak memory of a GPU", kind="gib", padded="memory_bytes", packed="memory_bytes"),
    ComparedRow(name="Fits the GPU", kind="fits", padded="fits", packed="fits"),
)


def compared(epochs: int) -> tuple[tuple[str, tuple[ComparedRow, ...]], ...]:
    """Padding beside packing: what an epoch is, what all of them are, and what a run should show."""
    whole = ((f"All {epochs} epochs", _ALL_EPOCHS),) if epochs > 1 else ()
    return ("One epoch", _ONE_EPOCH), *whole, ("What you should see", _EXPECTED)


def described_columns(statistics: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Columns that have numbers, the usual ones first; media tokens only where they are of several kinds.

    >>> described_columns({"tokens": {"max": 9, "total": 9}, "video_tokens": {"max": 0}, "images": {}})
    ['tokens']
    """
    names = [*COLUMNS, *(name for name in statistics if name not in COLUMNS)]
    totals = {name: values.get("total") for name, values in statistics.items()}
    one_kind = totals.get("vision_tokens") in (totals.get("image_tokens"), totals.get("video_tokens"))
    return [
        name for name in names if statistics.get(name, {}).get("max") and not (name == "vision_tokens" and one_kind)
    ]


def padded_name(order: str, batch_size: int, kernels: str = "own") -> str:
    """A padded run in words.

    >>> padded_name("by_length", 4, "packs")
    'Padded, by length, 4 per batch, kernels of packs'
    """
    same = ", kernels of packs" if kernels == "packs" else ""
    return f"Padded, {words(order).lower()}, {count(batch_size)} per batch{same}"


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


def limit_sets(simulations: Sequence[Simulation]) -> list[tuple[tuple[str, int], ...]]:
    """The sets of further limits that were tried, each of them one line of a chart."""
    return list(dict.fromkeys(tuple(sorted(one.limits.items())) for one in simulations))


def other_limits(limits: Mapping[str, int]) -> str:
    """Further limits of a packing; empty where there are none.

    >>> other_limits({"max_images_per_pack": 8}), other_limits({})
    ('max_images_per_pack 8', '')
    """
    return ", ".join(f"{name} {count(value)}" for name, value in limits.items())
