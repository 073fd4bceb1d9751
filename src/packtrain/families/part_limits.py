"""A family's rule under the limits of its run, and under those that the data give single media.

run            max_pixels 200,000
{"type": "image", "image": "a.png"}                         200,000
{"type": "image", "image": "b.png", "max_pixels": 50000}     50,000, by a family made for it
{"type": "image", "image": "c.png", "resized_height": 280, "resized_width": 420}    resized first, then 200,000
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.modality import MODALITIES
from packtrain.core.values import Media, MediaHeader, MediaKind, PartLimits
from packtrain.families.family import Expansion, ProcessorSettings, Rule
from packtrain.families.registry import load_rule

_REFUSED = "a limit in a part that the model's processor does not support"
_MOST = 256  # rules that are kept


class MediaRules:
    """The rule for every medium; one instance for each set of limits."""

    def __init__(self, settings: ProcessorSettings, rule: Rule) -> None:
        self.rule = rule
        self._settings = settings
        self._made: dict[tuple[MediaKind, PartLimits], Rule] = {}

    def rule_for(self, kind: MediaKind, limits: PartLimits | None) -> Rule:
        """The rule for media with these limits. RecordError where the family does not have one of them."""
        if limits is None:
            return self.rule
        key = kind, limits
        if key not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            self._made[key] = self._make(kind, limits)
        return self._made[key]

    def resized(self, kind: MediaKind, limits: PartLimits | None) -> tuple[int, int] | None:
        """Height and width that a medium is brought to before the processor gets it."""
        if limits is None or limits.resized_height is None or limits.resized_width is None:
            return None
        sides = self.rule_for(kind, limits).presized(limits.resized_height, limits.resized_width)
        if sides is None:
            detail = f"resized_height, resized_width of {self.rule.name}: they are Qwen-VL's"
            raise RecordError("family", _REFUSED, detail)
        return sides

    def expansion(self, header: MediaHeader, images: int, number: int = 1) -> Expansion:
        """What the processor writes for one medium; `images` are in its sample, of which it is the `number`-th."""
        rule = self.rule_for(header.kind, header.limits)
        if (size := self.resized(header.kind, header.limits)) is not None:
            header = replace(header, height=size[0], width=size[1])
        return rule.video(header) if header.kind == "video" else rule.image(header, images, number)

    def expansions(self, headers: Sequence[MediaHeader]) -> list[Expansion]:
        """Those of a sample's media. RecordError where the family does not take them together."""
        images = sum([header.kind == "image" for header in headers])
        expansions, number = [], 0
        for header in headers:
            number += header.kind == "image"
            expansions.append(self.expansion(header, images, number))
        if len(headers) > 1:
            self.rule.check_sample(headers, expansions)
        return expansions

    def _make(self, kind: MediaKind, limits: PartLimits) -> Rule:
        try:
            rule = load_rule(self._settings, limits.over(self.rule.limits, kind))
        except ConfigError as error:
            own = [n.removeprefix("video_") for n in self.rule.limit_names if n in MODALITIES[kind].limits]
            where = error.where.removeprefix("limit ").removeprefix("video_")
            detail = f"{where} of {kind}; {self.rule.name} takes {', '.join(own) or 'none'}"
            raise RecordError("family", _REFUSED, detail) from None
        assert rule is not None, "only known limits change the family's rule"
        return rule


def with_limits(header: MediaHeader, medium: Media) -> MediaHeader:
    """The header of a medium with what the data say of it."""
    return header if medium.limits is None else replace(header, limits=medium.limits)
