"""Text models: no media at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from packtrain.core.values import MediaHeader, MediaKind, MediaLimits
from packtrain.families.family import Expansion, ProcessorSettings, refuse_limits, unsupported


class TextOnly:
    """Any decoder-only text model; a record with media is refused."""

    name: ClassVar[str] = "text"

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        refuse_limits(self.name, limits, ())
        self.placeholders: Mapping[MediaKind, str] = {}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """Always refused."""
        raise unsupported(self.name, "image")

    def video(self, header: MediaHeader) -> Expansion:
        """Always refused."""
        raise unsupported(self.name, "video")

    def processor_kwargs(self) -> dict[str, Any]:
        """There is no processor."""
        return {}
