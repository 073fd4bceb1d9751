"""report.html: the study as one page without any request, every number looked up in the study's content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packtrain.core.numbers import count
from packtrain.planning.study_values import Study
from packtrain.reports.charts import share_bar
from packtrain.reports.checklist import ChecklistItem
from packtrain.reports.compared import SIMULATED, STATISTICS, compared, described_columns, padded_name
from packtrain.reports.drawn import draw, part_css
from packtrain.reports.html import changes, render, yaml_lines
from packtrain.reports.picture import source_colours
from packtrain.reports.study_content import Content, page_content, sources_by_size

_SECTIONS = (
    *(("data", "Data"), ("sweep", "Sweep"), ("config", "Config"), ("padding", "Padding"), ("memory", "Memory")),
    *(("trouble", "Trouble"), ("todo", "To do"), ("balance", "Balance"), ("packs", "Packs"), ("ledger", "Ledger")),
    *(("host", "Machine"), ("notes", "Notes")),
)


def render_page(study: Study, content: Content, yaml: str, tasks: Sequence[ChecklistItem] = ()) -> str:
    """The page. `yaml` is the text of recommended.yaml."""
    shown_content = page_content(content)
    colours = source_colours([group.name for group in sources_by_size(study.dataset.by_source)])
    return render(
        "report.html.jinja",
        shown_content,
        headline=_headline(study),
        sections=[section for section in _SECTIONS if _has(study, section[0])],
        charts=draw(study, colours),
        tags=_tags(study),
        changes=[changes(content["recommendation"]["config"], plan) for plan in _configs(content)],
        columns=described_columns(shown_content["dataset"]["statistics"]),
        statistics=STATISTICS,
        simulation_columns=SIMULATED,
        comparison=compared(study.epochs),
        tasks=tasks,
        known_before=any(reason.baseline for reason in study.recommendation.reasons),
        part_css=part_css(study.memory.estimate.parts),
        source_css=list(colours.values()),
        share_bar=share_bar,
        padded_name=padded_name,
        yaml_lines=yaml_lines(yaml),
    )


def _headline(study: Study) -> str:
    if not study.recommendation.packing:
        return "Packing will not help here"
    return f"Pack at {count(study.simulations[study.recommendation.simulation].packing_length)} tokens"


def _has(study: Study, section: str) -> bool:
    """Is there anything to show in a section?"""
    empty = {
        **{"padding": not study.padded, "balance": not study.balance, "packs": not study.picture},
        "trouble": not study.recommendation.trouble,
    }
    return not empty.get(section, False)


def _tags(study: Study) -> dict[int, list[tuple[str, bool]]]:
    """Labels of simulations: (text, is it a quiet one)."""
    found = {study.recommendation.simulation: [(study.recommendation.mark, False)]}
    for other in study.recommendation.alternatives:
        found.setdefault(other.simulation, []).append((other.name, True))
    return found


def _configs(content: Content) -> list[Mapping[str, Any]]:
    return [other["config"] for other in content["recommendation"]["alternatives"]]
