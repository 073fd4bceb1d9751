"""The numbers of runs as JSON: computed once here, embedded in the page and looked up by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packtrain.core.numbers import count, counted, large, percent, rate, shown
from packtrain.records.yaml_text import load_yaml
from packtrain.reports.html import changes, setting
from packtrain.reports.run_words import (
    end_text,
    headline,
    initial_weights,
    lead,
    run_labels,
    same_loss,
    too_few,
    why_apart,
)
from packtrain.reports.study_content import LONGEST, Content, json_value, most_frequent
from packtrain.runs.derived import Adapters, Course, Derived
from packtrain.runs.run_summary import RunComparison, Summary, along, compare_runs, summarise_run
from packtrain.runs.training_run import Scalar, TrainingRun

SHOWN_WARNINGS, SHOWN_SETTINGS, SHOWN_CHANGES, SHOWN_NOTES = 40, 60, 24, 40
_PLACES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the samples, at which the table has losses
MOST_RUNS = 8  # as many as there are colours
# Settings of a config that a loss does not depend on, or of which the page says it in words of their own.
_NO_CAUSE = frozenset(
    (
        *("model_name_or_path", "name", "attn_implementation", "packing", "pad_packs", "packing_length"),
        "packing_strategy",
        *("packs_per_step", "effective_batch_size", "per_device_train_batch_size", "balance", "output_dir", "run_name"),
        *("cache_dir", "costs", "plan", "cache_tokens", "eval_packing", "logging_steps", "logging_dir", "report_to"),
        *("save_steps", "save_strategy", "save_delay_steps", "save_total_limit", "eval_steps", "eval_strategy"),
        *("compile", "gradient_checkpointing", "vision_checkpointing", "vision_batch_patches", "packing_check"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "streaming"),
    )
)
PLANNED = "Planned in"  # the page of packtrain plan: its value is a link
_VERSIONS = ("packtrain", "torch", "transformers", "python")
# Of run.json: what the page says elsewhere, what is in run.yaml too, resolved, and what is for resuming.
_APART = ("derived", "outcome", "title", "notes", "prepared", "written", "measured", "frozen", "kind", "version")
_OWN = ("model", "mode", "plan", "packs_per_step", "rows_per_batch", "balance", "seed", "world_size")


def runs_content(runs: Sequence[TrainingRun]) -> Content:
    """Everything that the page shows except the curves."""
    labels, both = run_labels(runs), compare_runs(runs)
    summaries = [summarise_run(run, both.window if both is not None else None) for run in runs]
    return {
        "headline": headline(runs, summaries, labels, both),
        "lead": lead(runs, summaries, labels, both),
        "runs": [
            {**_run(run), "label": label, "summary": json_value(summary)}
            for run, label, summary in zip(runs, labels, summaries, strict=True)
        ],
        "setup": setup_rows(runs),
        "along": _along(runs, summaries),
        "settings": _groups(runs),
        "comparison": _comparison(runs, both) if both is not None else None,
    }


def _run(run: TrainingRun) -> Content:
    facts = run.facts
    return {
        "folder": shown(run.folder, LONGEST),
        "name": shown(run.name, 80),
        "about": {name: _short(getattr(facts, name)) for name in ("model", "mode", "world_size")},
        "status": shown(run.status, 80),
        "ended": end_text(run),
        "complete": run.status == "complete",
        "warnings": [
            {
                "step": one.step,
                "kind": shown(one.kind.replace("_", " "), 60),
                "message": shown(one.message, LONGEST),
                "advice": shown(one.advice, LONGEST),
            }
            for one in run.warnings[-SHOWN_WARNINGS:]
        ],
        "earlier_warnings": max(0, len(run.warnings) - SHOWN_WARNINGS),
        "ledger": most_frequent(run.ledger),
        "left_out": sum(run.ledger.values()),
        "notes": [shown(note, LONGEST) for note in (*run.notes, *(*facts.prepared, *facts.notes)[:SHOWN_NOTES])],
    }


def _along(runs: Sequence[TrainingRun], summaries: Sequence[Summary]) -> list[Content]:
    """The loss of every run at a few places after its first step, the last of which all of them have reached."""
    end = min(one.samples or 0.0 for one in summaries)
    first = max(run.steps["samples_seen"][0] for run in runs) if end else 0.0
    points = []
    for share in [one for one in _PLACES if end and one * end >= first]:
        losses = [along(run.steps, share * end, one.loss_window) for run, one in zip(runs, summaries, strict=True)]
        points.append({"samples": share * end, "losses": losses})
    return points


def _comparison(runs: Sequence[TrainingRun], both: RunComparison) -> Content:
    """The comparison, and how the other runs were set differently from the first."""
    configs = [_config(run) for run in runs]
    differ = [changes(configs[0], config) if configs[0] and config else [] for config in configs]
    names = dict.fromkeys(line.partition(":")[0] for lines in differ for line in lines)
    others = [name for name in names if name.split(".")[0] != "report" and name.split(".")[-1] not in _NO_CAUSE]
    labels = run_labels(runs)
    return {
        **json_value(both),
        "same_loss": same_loss(both),
        "too_few": too_few(labels, both),
        "why": why_apart(runs, labels, both.apart, others),
        "changes": [lines[:SHOWN_CHANGES] for lines in differ],
    }


def _config(run: TrainingRun) -> Mapping[str, object]:
    """The content of run.yaml; empty where it is not a config."""
    try:
        config = load_yaml(run.config)
    except ValueError:
        return {}
    return json_value(config) if isinstance(config, dict) else {}


def _groups(runs: Sequence[TrainingRun]) -> list[Content]:
    """run.json, one line for each setting with the values of all runs."""
    groups = (
        ("What was trained", [{name: getattr(run.facts, name) for name in _OWN} for run in runs]),
        ("Derived before training", [_inside(run, "derived") for run in runs]),
        ("Outcome", [_inside(run, "outcome") for run in runs]),
        ("Also recorded", [_others(run) for run in runs]),
    )
    return [{"title": title, "rows": rows} for title, values in groups if (rows := _rows(values))]


def _rows(values: Sequence[Mapping[str, Scalar]]) -> list[Content]:
    """Settings that at least one run has, in the order of the first."""
    present = [name for one in values for name, value in one.items() if value not in (None, "")]
    names = list(dict.fromkeys(present))[:SHOWN_SETTINGS]
    rows = [(shown(name, 80), [_short(one.get(name)) for one in values]) for name in names]
    return [{"name": name, "values": row, "differ": len({setting(one) for one in row}) > 1} for name, row in rows]


def _inside(run: TrainingRun, part: str) -> dict[str, Scalar]:
    """One part of run.json, without what is said above it."""
    inner = {
        name.removeprefix(f"{part}."): value for name, value in run.recorded.items() if name.startswith(f"{part}.")
    }
    return {name: value for name, value in inner.items() if name not in _OWN}


def _others(run: TrainingRun) -> dict[str, Scalar]:
    return {name: value for name, value in run.recorded.items() if name.split(".")[0] not in (*_OWN, *_APART)}


def _short(value: Scalar) -> Any:
    large = isinstance(value, int | float) and abs(value) >= 1e18  # no count of anything
    return shown(value, 200) if isinstance(value, str) or large else json_value(value)


# ---- how runs were set up: what readers look for first


def setup_rows(runs: Sequence[TrainingRun]) -> list[Content]:
    """One line for each thing that at least one run says, with the words of all of them."""
    setups = [dict(_lines(run)) for run in runs]
    names = dict.fromkeys(name for one in setups for name in one)
    rows = [(name, [one.get(name, "–") for one in setups]) for name in names]
    return [{"name": name, "values": row, "differ": len({*row}) > 1} for name, row in rows]


def _lines(run: TrainingRun) -> Iterator[tuple[str, str]]:
    facts = run.facts
    if facts.model:
        yield "Model", shown(facts.model, LONGEST)
    if facts.origin is not None and facts.origin.run is not None:
        yield "Began from", initial_weights(run)
    if facts.derived is not None:
        yield from _derived_lines(run, facts.derived)
    yield from _circumstances(run)


def _derived_lines(run: TrainingRun, derived: Derived) -> Iterator[tuple[str, str]]:
    if derived.method:
        yield "Method", _method(derived.method, derived.lora)
    if (trained := _trained_parts(derived)) is not None:
        yield "Trainable parameters", trained
    if derived.samples:
        yield "Data", _data(derived)
    if (rates := _rates(derived.course)) is not None:
        yield "Learning rate", rates
    if derived.course.optimizer:
        yield "Optimizer", _optimizer(derived.course)
    if derived.samples_per_step > 0:
        yield "Step", _step(run, derived)
    kernels = [_text(derived.attn_implementation), "compiled layers" if derived.compiled else None]
    kernels += [f"weights in {dtype}"] if (dtype := _text(derived.dtype)) is not None else []
    if any(kernels):
        yield "Computed with", ", ".join(kernel for kernel in kernels if kernel)


def _method(method: str, lora: Adapters | None) -> str:
    if lora is None:
        return "full fine-tuning" if method == "full" else shown(method, LONGEST)
    targets = ", ".join(lora.targets[:20]) if lora.targets else "every linear layer of the decoder"
    return f"{shown(method, LONGEST)}: rank {lora.rank}, alpha {lora.alpha}, {shown(targets, LONGEST)}"


def _trained_parts(derived: Derived) -> str | None:
    parts = []
    for part, trained in derived.trainable.items():
        whole = derived.weights.get(part, 0)
        share = f" of {large(whole)} ({percent(trained / whole)})" if whole > trained else ""
        name = shown(part, 80)
        parts.append(f"{name} {large(trained)}{share}" if trained else f"{name} frozen")
    return ", ".join(parts) or None


def _data(derived: Derived) -> str:
    parts = [f"{count(derived.samples)} samples"]
    for name in ("images", "videos", "frames", "tokens", "supervised_tokens"):
        if number := getattr(derived, name):
            parts.append(f"{count(number)} {name.replace('_', ' ')}")
    seen = f", each seen {derived.epochs:,.4g} times" if derived.epochs != 1 else ", each seen once"
    return ", ".join(parts) + (seen if derived.epochs > 0 else "")


def _rates(course: Course) -> str | None:
    parts: dict[float, list[str]] = {}
    for part, value in course.rates.items():
        parts.setdefault(value, []).append(shown(part, 80))
    if not parts:
        return None
    rates = (
        rate(next(iter(parts)))
        if len(parts) == 1
        else ", ".join(f"{rate(value)} ({', '.join(names)})" for value, names in parts.items())
    )
    ramp = f"{counted(course.warmup_steps, 'step')} of warm-up" if course.warmup_steps else "no warm-up"
    return f"{rates}; {_text(course.schedule)} schedule, {ramp}"


def _optimizer(course: Course) -> str:
    clip = course.max_grad_norm
    clipped = f"gradients clipped at {clip:g}" if clip > 0 else "gradients not clipped"
    decay = course.weight_decay if course.weight_decay > 0 else 0
    return f"{_text(course.optimizer)}, weight decay {decay:g}, {clipped}, in {_text(course.precision)}"


def _step(run: TrainingRun, derived: Derived) -> str:
    packs, samples = run.facts.packs_per_step, count(derived.samples_per_step)
    if run.facts.mode == "packed" and packs is not None and derived.packing_length:
        return f"{counted(packs, 'pack')} of up to {count(derived.packing_length)} tokens, about {samples} samples"
    return f"{samples} samples, padded"


def _circumstances(run: TrainingRun) -> Iterator[tuple[str, str]]:
    facts = run.facts
    when = [_text(facts.began), _text(facts.ended)]
    if when[0]:
        yield "When", " to ".join(time.replace("T", " ").replace("Z", " UTC") for time in when if time)
    expected = facts.derived.expected if facts.derived is not None else None
    machine = [_text(facts.invocation.host), _text(expected.gpu) if expected is not None else None]
    machine += [counted(facts.world_size, "process", "processes")]
    yield "Where", ", ".join(part for part in machine if part)
    planned = facts.invocation.planned_in
    if planned is not None and Path(planned).is_absolute() and len(planned) <= LONGEST:
        yield PLANNED, Path(planned).as_uri()
    if (command := _text(facts.invocation.command)) is not None:
        yield "Command", command
    if (commit := _text(facts.commit)) is not None:
        yield "Git commit", commit
    versions = [f"{name} {shown(facts.versions[name], 40)}" for name in _VERSIONS if name in facts.versions]
    if versions:
        yield "Versions", ", ".join(versions)


def _text(value: object) -> str | None:
    return shown(value, LONGEST) if isinstance(value, str) and value else None
