"""report.html of a training run: its losses, how fast, what it cost; and several runs side by side."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packtrain.core.artifacts import atomic_path
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import format_number, gib, shown
from packtrain.reports.charts import BarSpan, share_bar, stacked_bar
from packtrain.reports.html import render, yaml_lines
from packtrain.reports.markdown import markdown_table
from packtrain.reports.run_charts import RunCharts, draw_runs, line_css
from packtrain.reports.run_content import MOST_RUNS, runs_content
from packtrain.reports.run_words import run_labels
from packtrain.reports.study_content import Content
from packtrain.runs.training_run import TrainingRun, read_run

PAGE = "report.html"
_LINE = 2000  # characters of a line of the config
_NAME = 120  # characters of a comparison's name


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One line of a table of runs: its name, format, and the number."""

    name: str
    kind: str
    key: str  # in the run's summary, or in its place in the comparison
    equal: bool = False  # in the comparison at equal samples
    beyond: bool = False  # says more only where a run went further than that


_EQUAL = (
    RunRow(name="Training loss", kind="loss", key="loss", equal=True),
    RunRow(name="Evaluation loss", kind="loss", key="eval_loss", equal=True),
    RunRow(name="Real tokens per second", kind="count", key="tokens_per_second", equal=True),
    RunRow(name="Speedup over the baseline", kind="times", key="speedup", equal=True),
    RunRow(name="Time, first step excluded", kind="elapsed", key="seconds", equal=True),
    RunRow(name="Time to the lowest loss reached by every run", kind="elapsed", key="to_target", equal=True),
    RunRow(name="Optimizer steps", kind="count", key="steps", equal=True),
)
_WHOLE = (
    RunRow(name="Samples seen", kind="count", key="samples"),
    RunRow(name="Final loss", kind="loss", key="loss_end", beyond=True),
    RunRow(name="Last evaluation loss", kind="loss", key="eval_end", beyond=True),
    RunRow(name="Real tokens per second", kind="count", key="tokens_per_second", beyond=True),
    RunRow(name="Samples per second", kind="decimal", key="samples_per_second"),
    RunRow(name="Training time", kind="elapsed", key="seconds"),
    RunRow(name="of which warm-up", kind="elapsed", key="warm_seconds"),
    RunRow(name="MFU", kind="percent", key="mfu"),
    RunRow(name="Padding", kind="percent", key="padding"),
    RunRow(name="Samples per step", kind="decimal", key="samples_per_step"),
    RunRow(name="Median step time", kind="duration", key="step_seconds"),
    RunRow(name="Waiting for data", kind="percent", key="wait_share"),
    RunRow(name="Slowest rank / mean", kind="ratio", key="spread"),
    RunRow(name="Peak memory", kind="gib", key="memory"),
)


def write_run_report(run_folder: str | Path, *, others: Sequence[str | Path] = (), out: Path | None = None) -> Path:
    """Write the page of a run, compared with others if any are given; into the run's folder unless told otherwise.

    A comparison has a name of its own there: the run's own page stays.
    """
    folders = [run_folder, *others]
    if len(folders) > MOST_RUNS:
        raise ConfigError("runs", got=f"{len(folders)} runs", expected=f"at most {MOST_RUNS} on one page")
    runs = [read_run(folder) for folder in folders]
    page = out if out is not None else Path(run_folder) / (_compared_with(folders) if others else PAGE)
    if page.is_dir():
        raise ConfigError(str(page), got="a folder", expected="a file to write the page to")
    text = run_markdown(runs_content(runs)) if page.suffix == ".md" else render_runs(runs)
    with atomic_path(page) as path:
        path.write_bytes(text.encode("utf-8", "replace"))
    return page


def _compared_with(folders: Sequence[str | Path]) -> str:
    """The name of a comparison, by the other runs.

    >>> _compared_with(["runs/packed", "runs/padded"]), _compared_with(["a/run", "b/run", "c/run"])
    ('comparison-padded.html', 'comparison-b-run-c-run.html')
    """
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    above = os.path.commonpath([path.parent for path in paths])
    name = "-".join(os.path.relpath(path, above) for path in paths[1:])
    return f"comparison-{re.sub(r'[^A-Za-z0-9._]+', '-', name)[:_NAME]}.html"


def render_runs(runs: Sequence[TrainingRun]) -> str:
    """The page of one run or more; the first is the one it is about."""
    content, charts = runs_content(runs), draw_runs(runs, run_labels(runs))
    several = len(runs) > 1
    return render(
        "run.html.jinja",
        content,
        styles=("report.css.jinja", "run.css.jinja"),
        sections=_sections(runs, content, charts),
        charts=charts,
        looks=[line_css(at) for at in range(len(runs))],
        several=several,
        equal_rows=_known(_EQUAL, content),
        whole_rows=_known(_WHOLE, content),
        memory_bar=_memory_bar(content),
        markdown=run_markdown(content),
        share_bar=share_bar,
        yaml_lines=[(remark, shown(line, _LINE)) for remark, line in yaml_lines(runs[0].config)],
    )


def run_markdown(content: Content) -> str:
    """The headline, what led to it and the table of numbers, to be pasted elsewhere."""
    labels = [run["label"] for run in content["runs"]]
    ends = [f"- {run['label']}: {run['ended']}" for run in content["runs"] if not run["complete"] and len(labels) > 1]
    head = ["", *labels] if len(labels) > 1 else ["", "value"]
    lines = [[row.name, *(cell(content, row, at) for at in range(len(labels)))] for row in compared_rows(content)]
    lines += [[row["name"], *row["values"]] for row in content["setup"] if row["differ"] or len(labels) == 1]
    cells = [[str(value).replace("|", "\\|") for value in line] for line in (head, *lines)]
    table = markdown_table("l" * len(head), cells[0], cells[1:])
    text = "\n".join([f"**{content['headline']}**", "", content["lead"], *ends, "", table, ""])
    return text.translate(dict.fromkeys((0x2068, 0x2069)))


def cell(content: Content, row: RunRow, at: int) -> str:
    """The value of a run in a row."""
    where = content["comparison"]["runs"][at] if row.equal else content["runs"][at]["summary"]
    return format_number(row.kind, where[row.key])


def compared_rows(content: Content) -> list[RunRow]:
    """The lines of a table of runs, those at equal samples first."""
    return [*_known(_EQUAL, content), *_known(_WHOLE, content)]


def _known(rows: Sequence[RunRow], content: Content) -> list[RunRow]:
    """Lines in which at least one run has a number."""
    both = content["comparison"]
    if rows is _EQUAL and both is None:
        return []
    summaries = [run["summary"] for run in content["runs"]]
    where = both["runs"] if rows is _EQUAL and both else summaries
    if all(run["about"]["world_size"] == 1 for run in content["runs"]):
        rows = [row for row in rows if row.key != "spread"]
    even = both is not None and all(one["samples"] == both["samples"] for one in summaries)
    return [row for row in rows if any(one[row.key] is not None for one in where) and not (row.beyond and even)]


def _sections(runs: Sequence[TrainingRun], content: Content, charts: RunCharts) -> list[tuple[str, str]]:
    there = (
        ("compare", "Comparison", content["comparison"] is not None),
        ("setup", "Setup", bool(content["setup"])),
        ("learning", "Learning", charts.loss is not None),
        ("speed", "Speed", bool(charts.speed)),
        ("memory", "Memory", bool(charts.memory)),
        ("metrics", "Other metrics", bool(charts.other)),
        ("warnings", "Warnings", True),
        ("ledger", "Ledger", True),
        ("config", "Config", bool(runs[0].config)),
        ("paste", "Markdown summary", True),
        ("notes", "Notes", True),
    )
    return [(anchor, name) for anchor, name, yes in there if yes]


def _memory_bar(content: Content) -> object:
    summary = content["runs"][0]["summary"]
    used, limit = summary["memory"], summary["memory_limit"]
    if not used or not limit:
        return ""
    bar = [BarSpan(size=used, css="c0", tip=gib(used))]
    return stacked_bar(bar, label=f"{gib(used)} of {gib(limit)}", whole=max(used, limit), limit=limit, height=10)
