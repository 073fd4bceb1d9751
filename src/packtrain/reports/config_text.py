"""recommended.yaml: the recommended config as text, every derived value under the reason for it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from packtrain.core.numbers import shown
from packtrain.planning.configs import left_out
from packtrain.planning.study_values import Reason, Recommendation
from packtrain.records.yaml_text import Dumper
from packtrain.reports.study_content import json_value

_WIDTH = 100


def config_text(recommendation: Recommendation, title: Sequence[str] = ()) -> str:
    """Commented YAML that loads back to exactly the recommended config."""
    config, base = json_value(recommendation.config), json_value(recommendation.base)
    remarks = _remarks(config, base, recommendation.reasons)
    warning = f"WARNING: {recommendation.warning}" if recommendation.warning else ""
    lines = [line for text in (*title, warning, recommendation.verdict) for line in _comment(text, "")]
    gone = [f"{name} {_scalar(value)}" for name, value in left_out(config, base).items()]
    lines += _comment(f"Left out, since others stand for it: {', '.join(gone)}", "") if gone else []
    for key, value in config.items():
        lines += ["", *_entry(key, value, (str(key),), remarks)]
    text = "\n".join(lines) + "\n"
    assert yaml.safe_load(text) == (config or None), "the commented config must load back to what it was made from"
    return text


def _remarks(
    config: Mapping[str, Any], base: Mapping[str, Any], reasons: Sequence[Reason]
) -> dict[tuple[str, ...], str]:
    """What is said above a line: the old value of one that was changed, and why it is so."""
    why = {reason.parameter: reason.reason for reason in reasons}
    found: dict[tuple[str, ...], str] = {}
    for section, values in config.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            had = base.get(section, {}).get(key)
            reason = why.get(f"{section}.{key}") or why.get(key, "")
            if had is None and reason:
                found[section, str(key)] = reason
            elif had is not None and had != value:
                found[section, str(key)] = f"was {_scalar(had)}" + (f": {reason}" if reason else "")
    return found


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
