"""report.html of a study: which charts it has, and every number looked up in the study's content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from packtrain.core.numbers import (
    GIB,
    count,
    counted,
    decimal,
    duration,
    exact_percent,
    gib,
    percent,
    shown,
    tick,
    times,
)
from packtrain.planning.study_values import PaddedRun, Simulation, Study
from packtrain.predicting.memory import MemoryPart
from packtrain.reports.charts import (
    MOST_PACKS,
    BarSpan,
    Drawing,
    Line,
    Point,
    balance_chart,
    histogram_chart,
    line_chart,
    packs_picture,
    picture_keys,
    share_bar,
    source_colours,
    stacked_bar,
)
from packtrain.reports.html import changes, render, yaml_lines
from packtrain.reports.recommended import ChecklistItem
from packtrain.reports.study_content import (
    SIMULATED,
    STATISTICS,
    Content,
    by_limits,
    compared_tables,
    described_columns,
    headline_memory,
    other_limits,
    padded_name,
    page_content,
    sources_by_size,
    words,
)

_SECTIONS = (
    *(("data", "Data"), ("sweep", "Sweep"), ("config", "Config"), ("padding", "Padding"), ("memory", "Memory")),
    *(
        ("trouble", "Troubleshooting"),
        ("todo", "Next steps"),
        ("balance", "Balance"),
        ("packs", "Packs"),
        ("ledger", "Ledger"),
    ),
    *(("host", "Machine"), ("notes", "Notes")),
)


_PARTS = (
    *("weights", "gradients", "optimizer states", "language activations", "vision activations", "attention"),
    *("logits and loss", "inputs", "communication buffers", "framework"),
)


def render_page(study: Study, content: Content, yaml: str, tasks: Sequence[ChecklistItem] = ()) -> str:
    """The page. `yaml` is the text of recommended.yaml."""
    shown_content, advice = page_content(content), content["recommendation"]
    colours = source_colours([group.name for group in sources_by_size(study.dataset.by_source)])
    return render(
        "report.html.jinja",
        shown_content,
        headline=_headline(study),
        sections=[section for section in _SECTIONS if _has(study, section[0])],
        charts=_charts(study, colours),
        tags=_tags(study),
        changes=[changes(advice["config"], other["config"]) for other in advice["alternatives"]],
        columns=described_columns(shown_content["dataset"]["statistics"]),
        statistics=STATISTICS,
        simulation_columns=SIMULATED,
        comparison=compared_tables(study.epochs),
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
    tags = {study.recommendation.simulation: [(study.recommendation.mark, False)]}
    for other in study.recommendation.alternatives:
        tags.setdefault(other.simulation, []).append((other.name, True))
    return tags


# ---- charts


def _charts(study: Study, colours: Mapping[str, str]) -> dict[str, object]:
    """Everything that is drawn, by its name in the template."""
    chosen = study.simulations[study.recommendation.simulation]
    picture = study.picture[:MOST_PACKS]
    return {
        "histograms": _histograms(study),
        "several": len({one.packing_length for one in study.simulations}) > 1,  # a line can be drawn
        "limited": any(one.limits for one in study.simulations),
        "lines": [limits or "no further limits" for limits in by_limits(study.simulations)],
        "sweep": sweep_charts(study),
        "waste": _waste(study.padded, chosen),
        "memory_small": _memory_bar(study),
        "memory": _memory(study),
        "balance": balance_chart(study.balance),
        "packs": packs_picture(picture, chosen.packing_length, colours) if picture else None,
        "packs_keys": picture_keys(picture, colours),
        "packs_drawn": len(picture),
    }


def part_css(parts: Sequence[MemoryPart]) -> dict[str, str]:
    """The colour of each part of the memory; the known ones always have the same."""
    return {
        part.name: f"m{_PARTS.index(part.name) if part.name in _PARTS else at % 10}" for at, part in enumerate(parts)
    }


def _histograms(study: Study) -> tuple[Drawing, ...]:
    """Numbers that are the same for all samples are left to the table."""
    several = [
        name
        for name, histogram in study.dataset.histograms.items()
        if name == "tokens" or sum(number > 0 for number in histogram.counts) > 1
    ]
    return tuple(_histogram(study, name) for name in several)


def _histogram(study: Study, name: str) -> Drawing:
    histogram, marks = study.dataset.histograms[name], histogram_marks(study, name)
    labels = {f"{word} {decimal(value)}": value for word, value in marks.items()}
    svg = histogram_chart(histogram, name=words(name).lower(), marks=labels)
    return Drawing(title=histogram_title(study, name), unit="samples", svg=svg)


def histogram_title(study: Study, name: str) -> str:
    """The title of a histogram."""
    return f"{words(name)} per sample{_only_those(study, name)}"


def _only_those(study: Study, name: str) -> str:
    """Where a histogram leaves out samples that have none."""
    return f" (samples with {words(name).lower()})" if study.dataset.histograms[name].without_zeros else ""


def histogram_marks(study: Study, name: str, *, all_of_them: bool = False) -> dict[str, float]:
    """The usual and the large values of a number, in their order."""
    statistics = study.dataset.histograms[name].without_zeros or study.dataset.statistics.get(name, {})
    marks = [("median", "median"), ("95 %", "p95"), *([("mean", "mean"), ("99 %", "p99")] if all_of_them else [])]
    values = sorted((statistics[key], word) for word, key in marks if key in statistics)
    return {word: value for value, word in values}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One number of every packing, over the packing length."""

    title: str
    unit: str
    value: Callable[[Simulation], float]
    write: Callable[[float], str]  # at the axis
    from_zero: bool = True
    top: float | None = None  # values above it are drawn at the edge
    limit: tuple[float, str] | None = None


def sweeps(study: Study) -> tuple[Sweep, ...]:
    """Speed, fill, packs and memory over the packing length."""
    gpu = study.memory.usable_bytes / GIB
    most = max([gpu, *(one.memory_bytes / GIB for one in study.simulations)])
    top = min(most, 1.5 * gpu)  # one length that is far too long would flatten all others
    return (
        Sweep(
            title="Speed",
            unit="real tokens per second, over all GPUs",
            value=lambda one: one.tokens_per_second,
            write=tick,
        ),
        Sweep(
            title="Fill",
            unit="share of a pack that is real tokens",
            value=lambda one: one.fill,
            write=exact_percent,
            from_zero=min(one.fill for one in study.simulations) < 0.5,
            top=1.0,
        ),
        Sweep(title="Packs", unit="in an epoch", value=lambda one: one.packs, write=tick),
        Sweep(
            title="Memory",
            unit=f"GiB of one GPU at its peak{'; at the upper edge: more than shown' if most > top else ''}",
            value=lambda one: one.memory_bytes / GIB,
            write=lambda size: f"{size:g}",
            limit=(gpu, f"{shown(study.memory.gpu, 20)}: {gib(study.memory.usable_bytes)} usable"),
            top=top,
        ),
    )


def sweep_charts(study: Study) -> tuple[Drawing, ...]:
    """The sweeps as charts of the page."""
    chosen = study.simulations[study.recommendation.simulation]
    marked = f"{'' if study.recommendation.packing else 'the '}{study.recommendation.mark}"
    return tuple(
        Drawing(
            title=one.title,
            unit=one.unit,
            svg=line_chart(
                _lines(study.simulations, chosen, one.value),
                label=f"{one.title} by packing length: {one.unit}; {count(chosen.packing_length)} is {marked}",
                write=one.write,
                chosen=chosen.packing_length,
                from_zero=one.from_zero,
                top=one.top,
                limit=one.limit,
            ),
        )
        for one in sweeps(study)
    )


def _lines(simulations: Sequence[Simulation], chosen: Simulation, value: Callable[[Simulation], float]) -> list[Line]:
    return [
        Line(
            name=limits,
            points=tuple(
                Point(
                    x=one.packing_length,
                    y=value(one),
                    tip=_simulation_tip(one),
                    hollow=not one.fits,
                    ring=one is chosen,
                )
                for one in tried
            ),
        )
        for limits, tried in by_limits(simulations).items()
    ]


def _simulation_tip(one: Simulation) -> str:
    fits = "fits" if one.fits else "does not fit"
    limits = f" ({other_limits(one.limits)})" if one.limits else ""
    return (
        f"{count(one.packing_length)} tokens{limits}: {counted(one.packs, 'pack')}, {percent(one.fill)} filled, "
        f"{gib(one.memory_bytes)}, {fits}, {duration(one.seconds)} an epoch, {times(one.speedup)}"
    )


def _waste(padded: Sequence[PaddedRun], chosen: Simulation) -> tuple[Drawing, ...]:
    capacity = chosen.packs * chosen.packing_length
    bars = [
        (
            f"{padded_name(run.order, run.batch_size, run.kernels)}: {percent(run.waste)} wasted",
            run.real_tokens,
            run.computed_tokens,
        )
        for run in padded
    ]
    real = round(chosen.fill * capacity)
    bars.append((f"Packed at {count(chosen.packing_length)}: {percent(1 - chosen.fill)} wasted", real, capacity))
    whole = max(computed for _, _, computed in bars)
    return tuple(
        Drawing(
            title=name,
            svg=stacked_bar(
                (
                    BarSpan(size=real, css="c0", tip=f"{count(real)} real tokens"),
                    BarSpan(size=computed - real, css="c1", tip=f"{count(computed - real)} wasted positions"),
                ),
                label=f"{name}; {count(real)} real tokens of {count(computed)} positions",
                whole=whole,
                height=22,
            ),
        )
        for name, real, computed in bars
    )


def _memory(study: Study) -> tuple[Drawing, ...]:
    """The chosen packing and the setups compared with it, against one GPU."""
    setups = [
        (study.recommendation.mark, study.memory.estimate),
        *((one.name, one.estimate) for one in study.memory.beside),
    ]
    size, whole = study.memory.gpu_bytes, max(study.memory.gpu_bytes, *(estimate.total for _, estimate in setups))
    bars = []
    for name, estimate in setups:
        css = part_css(estimate.parts)
        label = f"{gib(estimate.total)} of {gib(size)}: " + ", ".join(
            f"{part.name} {gib(part.bytes)}" for part in estimate.parts
        )
        spans = [
            BarSpan(size=part.bytes, css=css[part.name], tip=f"{words(part.name)}: {gib(part.bytes)}")
            for part in estimate.parts
            if part.bytes
        ]
        bar = stacked_bar(spans, label=label, whole=whole, limit=study.memory.usable_bytes, height=30)
        bars.append(Drawing(title=f"{name.capitalize()}: {gib(estimate.total)}", svg=bar))
    return tuple(bars)


def _memory_bar(study: Study) -> Markup:
    """How much of a GPU the recommended packing uses, as one bar."""
    used, size = headline_memory(study), study.memory.gpu_bytes
    return stacked_bar(
        [BarSpan(size=used, css="c0", tip=gib(used))],
        label=f"{gib(used)} of {gib(size)}",
        whole=max(used, size),
        limit=size,
        height=10,
    )
