"""recommended.yaml: the recommended config as text, each derived value under its reason; and the commands to run."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from packtrain.core.numbers import shown
from packtrain.planning.configs import left_out
from packtrain.planning.study_values import Reason, Recommendation, Study
from packtrain.records.yaml_text import Dumper
from packtrain.reports.study_content import json_value

TRIAL = 1_000  # samples
_WIDTH = 100


def config_text(recommendation: Recommendation, title: Sequence[str] = ()) -> str:
    """Commented YAML that loads back to exactly the recommended config."""
    config, base = json_value(recommendation.config), json_value(recommendation.base)
    remarks = _remarks(config, base, recommendation.reasons)
    warning = f"WARNING: {recommendation.warning}" if recommendation.warning else ""
    lines = [line for text in (*title, warning, recommendation.verdict) for line in _comment(text, "")]
    gone = [f"{name} {_scalar(value)}" for name, value in left_out(config, base).items()]
    lines += _comment(f"Left out, since others replace it: {', '.join(gone)}", "") if gone else []
    for key, value in config.items():
        lines += ["", *_entry(key, value, (str(key),), remarks)]
    text = "\n".join(lines) + "\n"
    assert yaml.safe_load(text) == (config or None), "the commented config must load back to what it was made from"
    return text


def _remarks(
    config: Mapping[str, Any], base: Mapping[str, Any], reasons: Sequence[Reason]
) -> dict[tuple[str, ...], str]:
    """The comment above a line: the old value of a changed one, and the reason."""
    why = {reason.parameter: reason.reason for reason in reasons}
    remarks: dict[tuple[str, ...], str] = {}
    for section, values in config.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            had = base.get(section, {}).get(key)
            reason = why.get(f"{section}.{key}") or why.get(key, "")
            if had is None and reason:
                remarks[section, str(key)] = reason
            elif had is not None and had != value:
                remarks[section, str(key)] = f"was {_scalar(had)}" + (f": {reason}" if reason else "")
    return remarks


def _entry(key: Any, value: Any, path: tuple[str, ...], remarks: Mapping[tuple[str, ...], str]) -> list[str]:
    indent = "  " * (len(path) - 1)
    lines = _comment(remarks[path], indent) if path in remarks else []
    name = _scalar(key)
    # YAML ends short keys after 1,024 characters; longer ones are announced.
    start = f"{indent}{name}:" if len(name) < 1000 else f"{indent}? {name}\n{indent}:"
    if isinstance(value, dict) and value:
        lines.append(start)
        for inner, below in value.items():
            lines += _entry(inner, below, (*path, str(inner)), remarks)
        return lines
    return [*lines, f"{start} {_scalar(value)}"]


def _comment(text: str, indent: str) -> list[str]:
    """Comment lines; characters that YAML would take for a line end or refuse are replaced."""
    clean = shown(" ".join(text.split()), limit=2000)
    return [f"{indent}# {line}" for line in textwrap.wrap(clean, _WIDTH - len(indent) - 2)]


class _OneLine(Dumper):
    """Writes strings that are not one printable line with escapes."""

    def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> yaml.ScalarNode:
        escaped = isinstance(value, str) and not value.isprintable()
        return super().represent_scalar(tag, value, '"' if escaped else style)


def _scalar(value: Any) -> str:
    """A value on one line."""
    readable = json.dumps(value, ensure_ascii=False).isprintable()
    # An endless width: folded lines would need the indentation of their place.
    text = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=10**9, allow_unicode=readable)
    return text.removesuffix("\n").removesuffix("\n...").strip()


# ---- the commands


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecklistItem:
    """One thing to do, and how."""

    name: str
    command: str


def train_command(study: Study, yaml: Path, *more: str) -> str:
    """How the recommended config is trained on the GPUs of the study."""
    command = ["packtrain", "train", str(yaml), *more]
    if study.gpus > 1:
        command = ["torchrun", "--nproc-per-node", str(study.gpus), "-m", "packtrain.cli", *command[1:]]
    return shlex.join(command)


def checklist(study: Study, out: Path) -> tuple[ChecklistItem, ...]:
    """A trial, the packing check, the run itself, the padded run to compare with, and the comparison."""
    yaml, packing, config = out / "recommended.yaml", study.recommendation.packing, study.recommendation.config
    data, runs = config.get("data", {}).get("dataset_path"), f"runs/{out.resolve().name}"
    best = next((run for run in study.padded if run.kernels == "packs"), None)
    padded = ["data.packing=false", *([f"training.per_device_train_batch_size={best.batch_size}"] if best else [])]
    padded += ["training.group_by_length=true"] if best and best.order == "by_length" else []
    verify = ["packtrain", "verify", "--model", study.model, *(["--data", data] if isinstance(data, str) else [])]
    trial = train_command(study, yaml, f"--max-samples={TRIAL}", "-o", f"{runs}-trial")
    whole = "packed" if packing else "padded"
    tasks = [
        ChecklistItem(
            name="See what will be trained, without training", command=train_command(study, yaml, "--dry-run")
        ),
        ChecklistItem(name="Check that packed samples do not see each other", command=shlex.join(verify)),
        *([ChecklistItem(name=f"Try {TRIAL:,} samples", command=trial)] if study.dataset.samples > TRIAL else []),
        ChecklistItem(name="Train", command=train_command(study, yaml, "-o", f"{runs}-{whole}")),
    ]
    if not packing:
        return tuple(task for task in tasks if not task.command.startswith("packtrain verify"))
    return (
        *tasks,
        ChecklistItem(
            name="Train without packing", command=train_command(study, yaml, *padded, "-o", f"{runs}-padded")
        ),
        ChecklistItem(name="Compare", command=shlex.join(["packtrain", "report", f"{runs}-packed", f"{runs}-padded"])),
    )
