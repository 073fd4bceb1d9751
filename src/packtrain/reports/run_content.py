"""The numbers of runs as JSON: computed once here, embedded in the page and looked up by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packtrain.core.numbers import shown
from packtrain.records.yaml_text import load_yaml
from packtrain.reports.html import changes, setting
from packtrain.reports.run_setup import setup_rows
from packtrain.reports.run_words import ended, headline, labels_of, lead, same_loss, too_few, why_apart
from packtrain.reports.study_content import LONGEST, Content, json_value
from packtrain.runs.run_summary import Comparison, Summary, along, compare_runs, summarise_run
from packtrain.runs.run_values import About, Scalar, TrainingRun

SHOWN_WARNINGS, SHOWN_REASONS, SHOWN_SETTINGS, SHOWN_CHANGES, SHOWN_NOTES = 40, 24, 60, 24, 40
_PLACES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the samples, at which losses stand in a table
MOST_RUNS = 8  # as many as there are colours
# Settings of a config that a loss does not depend on, or of which the page says it in words of their own.
_NO_CAUSE = frozenset(
    (
        *("model_name_or_path", "name", "attn_implementation", "packing", "pad_packs", "packing_length"),
        "packing_strategy",
        *("packs_per_step", "effective_batch_size", "per_device_train_batch_size", "balance", "output_dir", "run_name"),
        *("cache_dir", "costs", "plan", "cache_tokens", "eval_packing", "logging_steps", "logging_dir", "report_to"),
        *("save_steps", "save_strategy", "save_delay_steps", "save_total_limit", "eval_steps", "eval_strategy"),
        *("compile", "gradient_checkpointing", "vision_checkpointing", "vision_batch_patches", "quick_check"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "streaming"),
    )
)


def runs_content(runs: Sequence[TrainingRun]) -> Content:
    """Everything that the page shows, beside the curves."""
    labels, both = labels_of(runs), compare_runs(runs)
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
    reasons = sorted(run.ledger.items(), key=lambda item: (-item[1], item[0]))
    kept = {shown(reason, 120): number for reason, number in reasons[:SHOWN_REASONS]}
    if len(reasons) > SHOWN_REASONS:
        kept[f"{len(reasons) - SHOWN_REASONS:,} other reasons"] = sum(number for _, number in reasons[SHOWN_REASONS:])
    return {
        "folder": shown(run.folder, LONGEST),
        "name": shown(run.name, 80),
        "about": {name: _short(getattr(about, name)) for name in ("model", "mode", "world")},
        "status": shown(run.status, 80),
        "ended": ended(run),
        "complete": run.status == "complete",
        "warnings": [
            {
                "step": one.step,
                "kind": shown(one.kind.replace("_", " "), 60),
                "found": shown(one.found, LONGEST),
                "advice": shown(one.advice, LONGEST),
            }
            for one in run.warnings[-SHOWN_WARNINGS:]
        ],
        "earlier_warnings": max(0, len(run.warnings) - SHOWN_WARNINGS),
        "ledger": kept,
        "left_out": sum(run.ledger.values()),
        "notes": [shown(note, LONGEST) for note in (*run.notes, *about.said[:SHOWN_NOTES])],
    }


def _along(runs: Sequence[TrainingRun], summaries: Sequence[Summary]) -> list[Content]:
    """The loss of every run at a few places, the last of which all of them have reached."""
    end = min(one.samples or 0.0 for one in summaries)
    found = []
    for share in _PLACES if end else ():
        losses = [along(run.steps, share * end, one.loss_window) for run, one in zip(runs, summaries, strict=True)]
        found.append({"samples": share * end, "losses": losses})
    return found


def _comparison(runs: Sequence[TrainingRun], both: Comparison) -> Content:
    """The comparison, and how the other runs were set differently from the first."""
    configs = [_config(run) for run in runs]
    differ = [changes(configs[0], config) if configs[0] and config else [] for config in configs]
    names = dict.fromkeys(line.partition(":")[0] for lines in differ for line in lines)
    others = [name for name in names if name.split(".")[0] != "report" and name.split(".")[-1] not in _NO_CAUSE]
    labels = labels_of(runs)
    return {
        **json_value(both),
        "same_loss": same_loss(both),
        "too_few": too_few(labels, both),
        "why": why_apart(runs, labels, both.apart, others),
        "changes": [lines[:SHOWN_CHANGES] for lines in differ],
    }


def _config(run: TrainingRun) -> Mapping[str, object]:
    """What run.yaml says; nothing where it is no config."""
    try:
        found = load_yaml(run.config)
    except ValueError:
        return {}
    return json_value(found) if isinstance(found, dict) else {}


def _groups(runs: Sequence[TrainingRun]) -> list[Content]:
    """What run.json says, one line for each setting with the values of all runs."""
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
    """What at least one run says; the names of the first one's order."""
    said = [name for one in values for name, value in one.items() if value not in (None, "")]
    names = list(dict.fromkeys(said))[:SHOWN_SETTINGS]
    rows = [(shown(name, 80), [_short(one.get(name)) for one in values]) for name in names]
    return [{"name": name, "values": row, "differ": len({setting(one) for one in row}) > 1} for name, row in rows]


def _own(about: About) -> dict[str, Scalar]:
    names = ("model", "mode", "plan", "packs_per_step", "rows_per_batch", "balance", "seed", "world")
    return {name: getattr(about, name) for name in names}


def _short(value: Scalar) -> Any:
    large = isinstance(value, int | float) and abs(value) >= 1e18  # no count of anything
    return shown(value, 200) if isinstance(value, str) or large else json_value(value)
