"""A config to begin with: every setting with its meaning and default as a comment, from the fields themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from packtrain.config.section import Key
from packtrain.config.sections import SECTIONS
from packtrain.records.yaml_text import Dumper

_WIDTH = 110
# What most people set, first in its section.
_FIRST = (
    *("model_name_or_path", "method", "dataset_path", "eval_path", "packing", "packing_length", "cutoff_len"),
    *("output_dir", "effective_batch_size", "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type"),
    *("warmup_steps", "weight_decay", "save_steps", "eval_steps", "report_to"),
)
_HEAD = """\
# A run of packtrain: packtrain train FILE. Settings that begin with # are not set; their defaults stand beside them.
# Any of them may also be set on the command line: packtrain train FILE training.learning_rate=1e-5
"""
_TAIL = "Every setting of transformers.TrainingArguments can be set here too."


def sample_config(given: Mapping[str, object]) -> str:
    """The text of a config in which these settings are set."""
    parts = [_HEAD]
    for name, section in SECTIONS.items():
        lines = [f"{name}:"]
        known = section.known()
        for key in (*(key for key in _FIRST if key in known), *(key for key in known if key not in _FIRST)):
            if known[key].help:
                lines += _setting(key, known[key], given)
        if name == "training":
            lines += ["", f"  # {_TAIL}"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _setting(name: str, one: Key, given: Mapping[str, object]) -> Iterator[str]:
    default = f"Default: {one.shown}." if one.shown else ""
    said = " ".join(filter(None, (one.help, default)))
    yield ""
    yield from textwrap.wrap(said, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
    if name in given:
        yield f"  {name}: {_written(given[name])}"
    else:
        yield f"  #{name}:" + ("" if one.default is None or one.shown else f" {_written(one.default)}")


def _written(value: Any) -> str:
    return (
        yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    )
