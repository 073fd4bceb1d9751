"""Which charts the page has: the study's numbers handed to the drawing functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from packtrain.core.numbers import GIB, count, counted, decimal, duration, gib, percent, shown, tick, times
from packtrain.planning.study_values import PaddedRun, Simulation, Study
from packtrain.predicting.memory import Part
from packtrain.reports.charts import (
    BarSpan,
    Line,
    Point,
    balance_chart,
    histogram_chart,
    line_chart,
    stacked_bar,
)
from packtrain.reports.compared import limit_sets, other_limits, padded_name, words
from packtrain.reports.picture import MOST_PACKS, LegendKey, packs_picture, picture_keys
from packtrain.reports.study_content import headline_memory

_PARTS = (
    *("weights", "gradients", "optimizer states", "language activations", "vision activations", "attention"),
    *("logits and loss", "inputs", "communication buffers", "framework"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Titled:
    """A chart under its title."""

    title: str
    unit: str
    svg: Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A bar and whose it is."""

    name: str
    svg: Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class Charts:
    """Everything that is drawn on the page."""

    histograms: tuple[Titled, ...]
    several: bool  # more than one simulation: a line can be drawn
    limited: bool  # some have further limits
    lines: tuple[str, ...]  # names of the sweep's lines
    sweep: tuple[Titled, ...]
    waste: tuple[Named, ...]
    memory_small: Markup
    memory: tuple[Named, ...]
    balance: Markup
    packs: Markup | None
    packs_keys: tuple[LegendKey, ...]
    packs_drawn: int


def draw(study: Study, colours: Mapping[str, str]) -> Charts:
    """All charts of a study."""
    chosen = study.simulations[study.recommendation.simulation]
    picture = study.picture[:MOST_PACKS]
    return Charts(
        histograms=_histograms(study),
        several=len({one.packing_length for one in study.simulations}) > 1,
        limited=any(one.limits for one in study.simulations),
        lines=tuple(other_limits(dict(limits)) for limits in limit_sets(study.simulations)),
        sweep=_sweep(study, chosen),
        waste=_waste(study.padded, chosen),
        memory_small=_used(study),
        memory=_memory(study),
        balance=balance_chart(study.balance),
        packs=packs_picture(picture, chosen.packing_length, colours) if picture else None,
        packs_keys=picture_keys(picture, colours),
        packs_drawn=len(picture),
    )


def part_css(parts: Sequence[Part]) -> dict[str, str]:
    """The colour of each part of the memory; the known ones always have the same."""
    return {
        part.name: f"m{_PARTS.index(part.name) if part.name in _PARTS else at % 10}" for at, part in enumerate(parts)
    }


def _histograms(study: Study) -> tuple[Titled, ...]:
    found = []
    for name, histogram in study.dataset.histograms.items():
        if name != "tokens" and sum(number > 0 for number in histogram.counts) < 2:
            continue  # all samples have as many, which the table says
        statistics = histogram.without_zeros or study.dataset.statistics.get(name, {})
        marks = {
            f"{word} {decimal(statistics[key])}": statistics[key]
            for word, key in (("median", "median"), ("95 %", "p95"))
            if key in statistics
        }
        unit = words(name).lower()
        svg = histogram_chart(histogram, name=unit, marks=marks)
        title = f"{words(name)} per sample{' that has any' if histogram.without_zeros else ''}"
        found.append(Titled(title=title, unit="samples", svg=svg))
    return tuple(found)


def _sweep(study: Study, chosen: Simulation) -> tuple[Titled, ...]:
    gpu = study.memory.usable_bytes / GIB
    most = max([gpu, *(one.memory_bytes / GIB for one in study.simulations)])
    top = min(most, 1.5 * gpu)  # one length that is far too long would flatten all others
    fills = [one.fill for one in study.simulations]
    marked = f"{'' if study.recommendation.packing else 'the '}{study.recommendation.mark}"
    drawn: tuple[tuple[str, str, Callable[[Simulation], float], Callable[[float], str], dict[str, object]], ...] = (
        ("Speed", "real tokens per second, over all GPUs", lambda one: one.tokens_per_second, tick, {}),
        (
            "Fill",
            "share of a pack that is real tokens",
            lambda one: one.fill,
            lambda share: f"{100 * share:g} %",
            {"from_zero": min(fills) < 0.5, "top": 1.0},
        ),
        (
            "Memory",
            "GiB of one GPU at its peak" + ("; at the upper edge: more than shown" if most > top else ""),
            lambda one: one.memory_bytes / GIB,
            lambda size: f"{size:g}",
            {"limit": (gpu, f"{shown(study.memory.gpu, 20)}: {gib(study.memory.usable_bytes)} usable"), "top": top},
        ),
    )
    return tuple(
        Titled(
            title=title,
            unit=unit,
            svg=line_chart(
                _lines(study.simulations, value),
                label=f"{title} by packing length: {unit}; {count(chosen.packing_length)} is {marked}",
                write=write,
                chosen=chosen.packing_length,
                **options,  # type: ignore[arg-type]
            ),
        )
        for title, unit, value, write, options in drawn
    )


def _lines(simulations: Sequence[Simulation], value: Callable[[Simulation], float]) -> list[Line]:
    lines = []
    for limits in limit_sets(simulations):
        of_limits = [one for one in simulations if tuple(sorted(one.limits.items())) == limits]
        points = tuple(
            Point(x=one.packing_length, y=value(one), tip=_simulation_tip(one), hollow=not one.fits)
            for one in sorted(of_limits, key=lambda one: one.packing_length)
        )
        lines.append(Line(name=other_limits(dict(limits)), points=points))
    return lines


def _simulation_tip(one: Simulation) -> str:
    fits = "fits" if one.fits else "does not fit"
    limits = f" ({other_limits(one.limits)})" if one.limits else ""
    return (
        f"{count(one.packing_length)} tokens{limits}: {counted(one.packs, 'pack')}, {percent(one.fill)} filled, "
        f"{gib(one.memory_bytes)}, {fits}, {duration(one.seconds)} an epoch, {times(one.speedup)}"
    )


def _named(run: PaddedRun) -> str:
    return padded_name(run.order, run.batch_size, run.kernels)


def _waste(padded: Sequence[PaddedRun], chosen: Simulation) -> tuple[Named, ...]:
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
        Named(
            name=name,
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


def _memory(study: Study) -> tuple[Named, ...]:
    """The chosen packing, and the setups beside it, against one GPU."""
    setups = [
        (study.recommendation.mark, study.memory.estimate),
        *((one.name, one.estimate) for one in study.memory.beside),
    ]
    size, whole = study.memory.gpu_bytes, max(study.memory.gpu_bytes, *(estimate.total for _, estimate in setups))
    found = []
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
        found.append(Named(name=f"{name.capitalize()}: {gib(estimate.total)}", svg=bar))
    return tuple(found)


def _used(study: Study) -> Markup:
    """How much of a GPU the recommended packing uses, as one bar."""
    used, size = headline_memory(study), study.memory.gpu_bytes
    return stacked_bar(
        [BarSpan(size=used, css="c0", tip=gib(used))],
        label=f"{gib(used)} of {gib(size)}",
        whole=max(used, size),
        limit=size,
        height=10,
    )
