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
from packtrain.runs.run_summary import Comparison, Summary, along, compare_runs, summarise_run
from packtrain.runs.training_run import About, Scalar, TrainingRun

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
_PARTS = ("language", "vision", "projector")
_VERSIONS = ("packtrain", "torch", "transformers", "python")
Derived = Mapping[str, Scalar]


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
    about = run.about
    return {
        "folder": shown(run.folder, LONGEST),
        "name": shown(run.name, 80),
        "about": {name: _short(getattr(about, name)) for name in ("model", "mode", "world")},
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
        "notes": [shown(note, LONGEST) for note in (*run.notes, *about.printed[:SHOWN_NOTES])],
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


def _comparison(runs: Sequence[TrainingRun], both: Comparison) -> Content:
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
    own = [_own(run.about) for run in runs]
    derived = [{name: value for name, value in run.about.derived.items() if name not in own[0]} for run in runs]
    groups = (
        ("What was trained", own),
        ("Derived before training", derived),
        ("Outcome", [run.about.outcome for run in runs]),
        ("Also recorded", [run.about.other for run in runs]),
    )
    return [{"title": title, "rows": rows} for title, values in groups if (rows := _rows(values))]


def _rows(values: Sequence[Mapping[str, Scalar]]) -> list[Content]:
    """Settings that at least one run has, in the order of the first."""
    present = [name for one in values for name, value in one.items() if value not in (None, "")]
    names = list(dict.fromkeys(present))[:SHOWN_SETTINGS]
    rows = [(shown(name, 80), [_short(one.get(name)) for one in values]) for name in names]
    return [{"name": name, "values": row, "differ": len({setting(one) for one in row}) > 1} for name, row in rows]


def _own(about: About) -> dict[str, Scalar]:
    names = ("model", "mode", "plan", "packs_per_step", "rows_per_batch", "balance", "seed", "world")
    return {name: getattr(about, name) for name in names}


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
    about, derived = run.about, run.about.derived
    if about.model:
        yield "Model", shown(about.model, LONGEST)
    if "origin.run" in about.other:
        yield "Began from", initial_weights(run)
    if (method := _text(derived.get("method"))) is not None:
        yield "Method", _method(method, derived)
    if (trained := _trained_parts(derived)) is not None:
        yield "Trained weights", trained
    if (data := _data(derived)) is not None:
        yield "Data", data
    if (rates := _rates(derived)) is not None:
        yield "Learning rate", rates
    if (optimizer := _optimizer(derived)) is not None:
        yield "Optimizer", optimizer
    if (step := _step(run)) is not None:
        yield "Step", step
    kernels = [_text(derived.get("attn_implementation")), "compiled layers" if derived.get("compiled") else None]
    kernels += [f"weights in {dtype}"] if (dtype := _text(derived.get("dtype"))) is not None else []
    if any(kernels):
        yield "Computed with", ", ".join(kernel for kernel in kernels if kernel)
    yield from _circumstances(run)


def _method(method: str, derived: Derived) -> str:
    if (rank := derived.get("lora.rank")) is None:
        return "full fine-tuning" if method == "full" else method
    targets = _text(derived.get("lora.targets")) or "every linear layer of the decoder"
    return f"{method}: rank {shown(rank, 20)}, alpha {shown(derived.get('lora.alpha'), 20)}, {targets}"


def _trained_parts(derived: Derived) -> str | None:
    parts = []
    for part in _PARTS:
        trained, whole = (derived.get(f"{name}.{part}") for name in ("trainable", "weights"))
        if not isinstance(trained, int):
            continue
        share = ""
        if isinstance(whole, int) and whole > trained:
            share = f" of {large(whole)} ({percent(trained / whole)})"
        parts.append(f"{part} {large(trained)}{share}" if trained else f"{part} frozen")
    return ", ".join(parts) or None


def _data(derived: Derived) -> str | None:
    samples = derived.get("samples")
    if not isinstance(samples, int):
        return None
    parts = [f"{count(samples)} samples"]
    for name in ("images", "videos", "frames", "tokens", "supervised_tokens"):
        if isinstance(number := derived.get(name), int) and number:
            parts.append(f"{count(number)} {name.replace('_', ' ')}")
    epochs = derived.get("epochs")
    passes = (
        f", each seen {epochs:,.4g} times" if isinstance(epochs, int | float) and epochs != 1 else ", each seen once"
    )
    return ", ".join(parts) + (passes if epochs is not None else "")


def _rates(derived: Derived) -> str | None:
    parts: dict[float, list[str]] = {}
    for part in _PARTS:
        if isinstance(value := derived.get(f"course.rates.{part}"), int | float):
            parts.setdefault(float(value), []).append(part)
    if not parts:
        return None
    rates = (
        rate(next(iter(parts)))
        if len(parts) == 1
        else ", ".join(f"{rate(value)} ({', '.join(names)})" for value, names in parts.items())
    )
    warmup = derived.get("course.warmup_steps")
    ramp = f"{count(warmup)} steps of warm-up" if isinstance(warmup, int) and warmup else "no warm-up"
    return f"{rates}; {_text(derived.get('course.schedule'))} schedule, {ramp}"


def _optimizer(derived: Derived) -> str | None:
    if (name := _text(derived.get("course.optimizer"))) is None:
        return None
    decay, clip = (derived.get(f"course.{key}") for key in ("weight_decay", "max_grad_norm"))
    clipped = f"gradients clipped at {clip:g}" if isinstance(clip, int | float) and clip else "gradients not clipped"
    return f"{name}, weight decay {decay or 0:g}, {clipped}, in {_text(derived.get('course.precision'))}"


def _step(run: TrainingRun) -> str | None:
    derived, mode = run.about.derived, run.about.mode
    samples, length = derived.get("samples_per_step"), derived.get("packing_length")
    if not isinstance(samples, int | float):
        return None
    packs = run.about.packs_per_step
    if mode == "packed" and packs is not None and isinstance(length, int):
        return f"{counted(packs, 'pack')} of up to {count(length)} tokens, about {count(samples)} samples"
    return f"{count(samples)} samples, padded"


def _circumstances(run: TrainingRun) -> Iterator[tuple[str, str]]:
    other = run.about.other
    when = [_text(other.get(name)) for name in ("began", "ended")]
    if when[0]:
        yield "When", " to ".join(time.replace("T", " ").replace("Z", " UTC") for time in when if time)
    machine = [_text(other.get("host")), _text(run.about.derived.get("expected.gpu"))]
    machine += [f"{run.about.world} process{'' if run.about.world == 1 else 'es'}"]
    yield "Where", ", ".join(part for part in machine if part)
    planned = other.get("planned_in")
    if isinstance(planned, str) and Path(planned).is_absolute() and len(planned) <= LONGEST:
        yield PLANNED, Path(planned).as_uri()
    if (command := _text(other.get("command"))) is not None:
        yield "Command", command
    if (commit := _text(other.get("commit"))) is not None:
        yield "Git commit", commit
    versions = [f"{name} {shown(other[f'versions.{name}'], 40)}" for name in _VERSIONS if f"versions.{name}" in other]
    if versions:
        yield "Versions", ", ".join(versions)


def _text(value: object) -> str | None:
    return shown(value, LONGEST) if isinstance(value, str) and value else None
