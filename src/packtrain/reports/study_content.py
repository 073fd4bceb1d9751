"""The numbers of a study as JSON, computed once here, and the words for them: what files, figures and page share."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.core.numbers import count, shown
from packtrain.planning.study_values import Group, PaddedRun, Simulation, Study

Content = dict[str, Any]  # JSON: what is written, embedded and looked up by path
SHOWN_SOURCES, SHOWN_REASONS, SHOWN_IDS = 12, 24, 12  # on the page; files have all
LONGEST = 600  # characters of a sentence; only a hostile name makes one longer


def json_value(value: Any) -> Any:
    """A value as JSON has it: mappings, lists, numbers, strings; numbers that are not finite become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return json_value(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(inner) for inner in value]
    if isinstance(value, np.generic):
        return json_value(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def study_content(study: Study) -> Content:
    """Everything that files and page show, and the few numbers derived from it. The picture of packs is drawn only."""
    chosen = study.simulations[study.recommendation.simulation]
    return {
        "about": study_about(study),
        "headline": _headline(study, chosen),
        "dataset": {**json_value(study.dataset), "modality_shares": _shares(study.dataset.modality_tokens)},
        "padded": [{**json_value(run), **_padded_values(run, study.padded[0], study.epochs)} for run in study.padded],
        "simulations": [{**json_value(one), **_simulation_values(one, study.epochs)} for one in study.simulations],
        "recommendation": json_value(study.recommendation),
        "memory": _memory(study),
        "balance": json_value(study.balance),
        "ledger": json_value(study.ledger),
        "notes": json_value(study.notes),
    }


def study_about(study: Study) -> Content:
    """The subject of the study."""
    names = ("costs", "model", "model_type", "parameters", "gpu", "gpus", "epochs", "setup", "baseline")
    return {name: json_value(getattr(study, name)) for name in names}


def files_content(content: Content) -> dict[str, Content]:
    """The JSON files: every part of the content is in one of them, and each says what was studied."""
    parts = {
        "dataset_stats.json": ("dataset", "ledger"),
        "packing_simulations.json": ("padded", "simulations", "balance"),
        "recommendations.json": ("headline", "recommendation", "memory", "notes"),
    }
    assert {name for names in parts.values() for name in names} == set(content) - {"about"}
    return {file: {name: content[name] for name in ("about", *names)} for file, names in parts.items()}


def page_content(content: Content) -> Content:
    """The content with what grows with the data cut to what a page shows, and names made safe to read."""
    dataset, memory = content["dataset"], content["memory"]
    ids = memory["worst_samples"]
    pruned = {
        **content,
        "dataset": {
            **dataset,
            "by_source": _largest(dataset["by_source"]),
            "more_sources": _rest(dataset["by_source"]),
            "by_modality": [_short(group) for group in dataset["by_modality"]],
            "measured_ledger": most_frequent(dataset["measured_ledger"]),
        },
        "memory": {
            **memory,
            "worst_samples": [shown(name, 60) for name in ids[:SHOWN_IDS]],
            "more_samples": max(0, len(ids) - SHOWN_IDS),
        },
        "ledger": most_frequent(content["ledger"]),
    }
    return {name: _readable(part) for name, part in pruned.items()}


def _readable(value: Any) -> Any:
    """The same with long texts shortened; a config is copied from the page and stays as it is."""
    if isinstance(value, dict):
        return {key: inner if key == "config" else _readable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_readable(inner) for inner in value]
    return shown(value, LONGEST) if isinstance(value, str) else value


def sources_by_size(groups: Sequence[Group]) -> list[Group]:
    """Sources as pages and figures list them: the largest first, names in order where they are equal."""
    return sorted(groups, key=lambda group: (-group.tokens, group.name))


def headline_memory(study: Study) -> int:
    """The peak of what is recommended: the packing, or the fastest padded run where packing does not help."""
    padded = min(study.padded, key=lambda run: (run.kernels != "packs", run.seconds), default=None)
    if study.recommendation.packing or padded is None:
        return int(study.simulations[study.recommendation.simulation].memory_bytes)
    return int(padded.memory_bytes)


def _headline(study: Study, chosen: Simulation) -> Content:
    """The three numbers that matter, for what is recommended."""
    used = headline_memory(study)
    return {
        "packing": study.recommendation.packing,
        "mark": study.recommendation.mark,
        "packing_length": chosen.packing_length,
        "gain": json_value(study.gain),
        "speedup": json_value(chosen.speedup),
        "baseline": study.baseline.name,
        "fill": json_value(chosen.fill),
        "packs": chosen.packs,
        "of_bound": json_value(chosen.of_bound),
        "memory_bytes": used,
        "gpu_bytes": int(study.memory.gpu_bytes),
        "memory_share": json_value(used / study.memory.gpu_bytes) if study.memory.gpu_bytes else None,
        "seconds": json_value(chosen.seconds),
        "waste": json_value(max((run.waste for run in study.padded), default=0.0)),
        "packed": int(chosen.samples_packed),
        "left_out": int(sum(study.ledger.values())),
        "accounted": int(chosen.samples_packed + sum(study.ledger.values())),
    }


def _shares(tokens: Mapping[str, int]) -> dict[str, float]:
    return {kind: number / sum(tokens.values()) for kind, number in tokens.items()}


def _over_time(run: PaddedRun | Simulation, samples: int, tokens: int, epochs: int) -> Content:
    """Speeds, and all epochs together."""
    is_known = run.seconds > 0
    return {
        "samples_per_second": json_value(samples / run.seconds) if is_known else None,
        "seconds_per_step": json_value(run.seconds / run.steps) if is_known and run.steps else None,
        "total_steps": epochs * run.steps,
        "total_samples": epochs * samples,
        "total_tokens": epochs * tokens,
        "total_seconds": json_value(epochs * run.seconds),
    }


def _padded_values(run: PaddedRun, baseline: PaddedRun, epochs: int) -> Content:
    """Speeds and sizes of a padded run, as a packed one has them."""
    is_known = run.seconds > 0
    return {
        "tokens_per_second": json_value(run.tokens_per_second) if is_known else None,
        "samples_per_step": json_value(run.samples / run.steps) if run.steps else None,
        "speedup": json_value(run.tokens_per_second / baseline.tokens_per_second) if is_known else None,
        **_over_time(run, run.samples, run.real_tokens, epochs),
    }


def _simulation_values(one: Simulation, epochs: int) -> Content:
    capacity = one.packs * one.packing_length
    real = round(one.fill * capacity)
    return {
        "real_tokens": real,
        "unused_tokens": capacity - real,
        "unused": json_value(1 - one.fill),
        "dropped_share": json_value(one.dropped_share),
        **_over_time(one, one.samples_packed, real, epochs),
    }


def _memory(study: Study) -> Content:
    report = study.memory
    estimate, size = report.estimate, report.gpu_bytes
    content: Content = json_value(report)
    for one, other in zip(content["beside"], report.beside, strict=True):
        one["estimate"]["total"] = other.estimate.total
    content["vision_total"] = {name: report.vision_layers * size for name, size in report.vision_layer.items()}
    content["estimate"] |= {
        "total": estimate.total,
        "states": estimate.states,
        "activations": estimate.activations,
        "other": estimate.total - estimate.states - estimate.activations,
        "free": size - estimate.total,
        "missing": max(0, estimate.total - size),
        "share": json_value(estimate.total / size) if size else None,
    }
    host = report.host
    content["host"] = {
        "memory": {"total": host.memory_bytes, "parts": json_value((*host.memory, *host.shared_memory))},
        "shared_memory": {"total": host.shared_memory_bytes, "parts": json_value(host.shared_memory)},
        "disk": {"total": host.disk_bytes, "parts": json_value(host.disk)},
    }
    return content


def _short(group: Content) -> Content:
    """A group with the statistics of its tokens only."""
    return {
        **group,
        "name": shown(group["name"], 60),
        "statistics": {name: group["statistics"][name] for name in ("tokens",) if name in group["statistics"]},
    }


def _largest(groups: list[Content]) -> list[Content]:
    ordered = sorted(groups, key=lambda group: (-group["tokens"], group["name"]))
    return [_short(group) for group in ordered[:SHOWN_SOURCES]]


def _rest(groups: list[Content]) -> Content:
    rest = sorted(groups, key=lambda group: (-group["tokens"], group["name"]))[SHOWN_SOURCES:]
    return {
        "groups": len(rest),
        "samples": sum(group["samples"] for group in rest),
        "tokens": sum(group["tokens"] for group in rest),
        "share_of_tokens": sum(group["share_of_tokens"] for group in rest),
    }


def most_frequent(ledger: Mapping[str, int]) -> dict[str, int]:
    """The most frequent reasons; the others under one name, so that the sum stays."""
    ordered = sorted(ledger.items(), key=lambda item: (-item[1], item[0]))
    counts: Counter[str] = Counter()
    for reason, number in ordered[:SHOWN_REASONS]:
        counts[shown(reason, 120)] += number
    if rest := ordered[SHOWN_REASONS:]:
        counts[f"{len(rest):,} other reasons"] = sum(number for _, number in rest)
    return dict(counts)


# ---- which numbers are shown side by side, and under which words: on the page, in Markdown and in figures

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
    "vision_tokens": "Vision tokens",
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
    """One number of every simulation: its title, format and field, and a share in brackets after it."""

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
    Column(title="Lower bound", kind="count", name="bound"),
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
    ComparedRow(name="Step time", kind="duration", padded="seconds_per_step", packed="seconds_per_step"),
    ComparedRow(name="Speedup over the first column", kind="times", padded="speedup", packed="speedup"),
    ComparedRow(name="Peak memory of a GPU", kind="gib", padded="memory_bytes", packed="memory_bytes"),
    ComparedRow(name="Fits the GPU", kind="fits", padded="fits", packed="fits"),
)


def compared_tables(epochs: int) -> tuple[tuple[str, tuple[ComparedRow, ...]], ...]:
    """Padding and packing side by side: what an epoch is, what all of them are, and what a run should show."""
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
    "Padded, by length, 4 per batch, with packing's kernels"
    """
    same = ", with packing's kernels" if kernels == "packs" else ""
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


def by_limits(simulations: Sequence[Simulation]) -> dict[str, list[Simulation]]:
    """The packings by their further limits, each list by length: a line of a chart each."""
    lines: dict[str, list[Simulation]] = {}
    for one in simulations:
        lines.setdefault(other_limits(dict(sorted(one.limits.items()))), []).append(one)
    return {limits: sorted(tried, key=lambda one: one.packing_length) for limits, tried in lines.items()}


def other_limits(limits: Mapping[str, int]) -> str:
    """Further limits of a packing; empty where there are none.

    >>> other_limits({"max_images_per_pack": 8}), other_limits({})
    ('max_images_per_pack 8', '')
    """
    return ", ".join(f"{name} {count(value)}" for name, value in limits.items())
