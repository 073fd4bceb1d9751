"""report.html: the study as one page without any request, every number looked up in the study's content."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from packtrain import __version__
from packtrain.advice.values import Study
from packtrain.reports.charts import share_bar
from packtrain.reports.compared import (
    COLUMNS,
    COMPARED,
    SIMULATED,
    STATISTICS,
    limits_text,
    modality,
    padded_name,
    words,
)
from packtrain.reports.content import LONGEST, Content, page_content, sources_by_size
from packtrain.reports.drawn import draw, part_css
from packtrain.reports.numbers import count, decimal, formatted, shown
from packtrain.reports.picture import source_colours

_SECTIONS = (
    *(("data", "Data"), ("sweep", "Sweep"), ("config", "Config"), ("padding", "Padding"), ("memory", "Memory")),
    *(("balance", "Balance"), ("packs", "Packs"), ("ledger", "Ledger"), ("host", "Machine"), ("notes", "Notes")),
)


def render_page(study: Study, content: Content, yaml: str) -> str:
    """The page. `yaml` is the text of recommended.yaml; what follows the scripts is data, never markup."""
    environment = _environment()
    shown_content = page_content(content)
    colours = source_colours([group.name for group in sources_by_size(study.dataset.by_source)])
    style, script = (
        Markup(environment.get_template(name).render()) for name in ("report.css.jinja", "report.js.jinja")
    )
    return environment.get_template("report.html.jinja").render(
        c=shown_content,
        n=_Numbers(shown_content),
        headline=_headline(study),
        sections=[section for section in _SECTIONS if _has(study, section[0])],
        charts=draw(study, colours),
        tags=_tags(study),
        changes=[changes(content["recommendation"]["config"], plan) for plan in _configs(content)],
        columns=_ordered(shown_content["dataset"]["statistics"]),
        statistics=STATISTICS,
        simulation_columns=SIMULATED,
        comparison=COMPARED,
        part_css=part_css(study.memory.estimate.parts),
        source_css=list(colours.values()),
        share_bar=share_bar,
        padded_name=padded_name,
        yaml_lines=[(line.lstrip().startswith("#"), line) for line in yaml.splitlines()],
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=embedded(shown_content),
        version=__version__,
    )


class _Numbers:
    """Shows a number of the content, together with where it stands and its exact value."""

    def __init__(self, content: Content) -> None:
        self._content = content

    def __call__(self, kind: str, *path: str | int) -> Markup:
        value: Any = self._content
        for key in path:
            value = value[key]
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
        exact = "" if value is None else json.dumps(value)
        return Markup('<data value="{}" data-at="{}" data-as="{}">{}</data>').format(
            exact, pointer, kind, formatted(kind, value)
        )

    def of(self, noun: str, *path: str | int) -> Markup:
        """A count with its noun."""
        number = self("count", *path)
        return number + f" {noun}" + ("" if 'value="1"' in number else "s")


def embedded(content: Content) -> Markup:
    """JSON that no HTML parser can take for markup: plain ASCII without brackets."""
    text = json.dumps(content)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def changes(config: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """What another config has differently, one setting a line.

    >>> changes({"data": {"packing_length": 20000, "packing": True}}, {"data": {"packing_length": 8192}})
    ['data.packing_length: 8192', 'data.packing: (left out)']
    """
    found = []
    for key in (*config, *(key for key in other if key not in config)):
        here, there, name = config.get(key), other.get(key), f"{path}{key}"
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += changes(here, there, f"{name}.")
        elif key not in other:
            found.append(f"{name}: (left out)")
        elif here != there or key not in config:
            found.append(f"{shown(name, 80)}: {shown(json.dumps(there, ensure_ascii=False), 120)}")
    return found


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("packtrain.reports", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "text": _text,
        "sentence": _sentence,
        "words": words,
        "modality": modality,
        "setting": _setting,
        "limits": limits_text,
    }
    return environment


def _text(text: object, limit: int = LONGEST) -> str:
    """Text of a study as it is, on one line."""
    return shown(text, limit)


def _sentence(text: str) -> str:
    """A name of ours at the start of a line."""
    return shown(text if "_" in text.split(" ")[0] else text[:1].upper() + text[1:], 120)


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 0.01 else decimal(value)
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 120)


def _headline(study: Study) -> str:
    if not study.recommendation.packing:
        return "Packing will not help here"
    return f"Pack at {count(study.simulations[study.recommendation.simulation].packing_length)} tokens"


def _ordered(statistics: Mapping[str, Content]) -> list[str]:
    """Columns that have numbers, the usual ones first."""
    names = [*COLUMNS, *(name for name in statistics if name not in COLUMNS)]
    return [name for name in names if statistics.get(name)]


def _has(study: Study, section: str) -> bool:
    """Is there anything to show in a section?"""
    empty = {"padding": not study.padded, "balance": not study.balance, "packs": not study.picture}
    return not empty.get(section, False)


def _tags(study: Study) -> dict[int, list[tuple[str, bool]]]:
    """Labels of simulations: (text, is it a quiet one)."""
    found = {study.recommendation.simulation: [("recommended" if study.recommendation.packing else "best", False)]}
    for other in study.recommendation.alternatives:
        found.setdefault(other.simulation, []).append((other.name, True))
    return found


def _configs(content: Content) -> list[Mapping[str, Any]]:
    return [other["config"] for other in content["recommendation"]["alternatives"]]


def _hash(text: str) -> str:
    """The hash by which a content security policy knows an inline text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
