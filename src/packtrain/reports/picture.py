"""The picture of packs: one bar per pack, one span per sample, coloured by source, text fainter than media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from packtrain.core.numbers import count, counted, isolated, percent, shown
from packtrain.planning.study_values import PicturePack, PictureSample
from packtrain.reports.svg import element, framed, percent_of

MOST_PACKS, MOST_SAMPLES = 40, 1600  # a page stays small whatever the data
COLOURS = 7  # sources with a colour of their own; the others share the last
_ROW, _BAR = 16, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class LegendKey:
    """A colour and what it stands for."""

    css: str
    name: str


def picture_keys(packs: Sequence[PicturePack], colours: Mapping[str, str]) -> tuple[LegendKey, ...]:
    """The legend: the sources that are in the picture, in the order of their colours."""
    names = {sample.source for pack in packs[:MOST_PACKS] for sample in pack.samples}
    own = [name for name in colours if name in names and colours[name] != f"c{COLOURS}"]
    keys = [LegendKey(css=colours[name], name=shown(name, 48) or "(no name)") for name in own]
    if len(names) > len(own):
        keys.append(LegendKey(css=f"c{COLOURS}", name=counted(len(names) - len(own), "other source")))
    return tuple(keys)


def source_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each source, the largest first; those after the first few share the last."""
    return {name: f"c{min(at, COLOURS)}" for at, name in enumerate(names)}


def packs_picture(packs: Sequence[PicturePack], packing_length: int, colours: Mapping[str, str]) -> Markup:
    """The bars; a full bar is a full pack."""
    packs = packs[:MOST_PACKS]
    each = max(4, MOST_SAMPLES // max(len(packs), 1))
    axis, plot = [], []
    for at, pack in enumerate(packs):
        y = at * _ROW
        axis.append(element("text", f"{pack.number:,}", x=44, y=y + 10, class_="tick", text_anchor="end"))
        tip = f"Pack {pack.number:,}: {count(pack.tokens)} of {count(packing_length)} tokens"
        tip += f" ({percent(pack.tokens / packing_length)}), {counted(len(pack.samples), 'sample')}"
        plot.append(element("rect", element("title", tip), x="0", y=y, width="100%", height=_BAR, class_="track"))
        plot += _spans(pack.samples, packing_length, y, each, colours)
    label = f"{counted(len(packs), 'pack')} of {count(packing_length)} tokens, drawn as bars that their samples fill"
    return framed(plot, axis=axis, label=label, height=max(len(packs) * _ROW, _ROW), css="packs")


def _spans(
    samples: Sequence[PictureSample], length: int, y: int, most: int, colours: Mapping[str, str]
) -> list[Markup]:
    """The largest samples one by one; the small ones of a crowded pack together."""
    ordered = sorted(samples, key=lambda sample: -sample.tokens)
    found, x = [], 0
    for sample in ordered[:most]:
        found.append(_span(sample, x / length, length, y, colours.get(sample.source, f"c{COLOURS}")))
        x += sample.tokens
    rest = ordered[most:]
    if rest:
        tokens = sum(sample.tokens for sample in rest)
        tip = f"{counted(len(rest), 'small sample')}: {count(tokens)} tokens together"
        place = {"x": percent_of(x / length), "width": percent_of(tokens / length)}
        found.append(element("rect", element("title", tip), **place, y=y, height=_BAR, class_="crowd"))
    return found


def _span(sample: PictureSample, x: float, length: int, y: int, css: str) -> Markup:
    tip = f"{isolated(sample.id, 60)}: {count(sample.tokens)} tokens"
    if sample.vision_tokens:
        tip += f", {count(sample.vision_tokens)} of them media"
    tip += f", {isolated(sample.source, 40)}"
    width, media = sample.tokens / length, min(sample.vision_tokens, sample.tokens) / length
    whole = element("rect", x=percent_of(x), y=y, width=percent_of(width), height=_BAR, class_=f"{css} text")
    if not media:
        return element("g", element("title", tip), whole)
    part = element("rect", x=percent_of(x), y=y, width=percent_of(media), height=_BAR, class_=css)
    return element("g", element("title", tip), whole, part)
