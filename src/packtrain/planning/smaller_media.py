"""The same packing with smaller images or fewer frames, from what the media headers said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.errors import PacktrainError
from packtrain.measuring.table import CostTable
from packtrain.packing.packing_config import PackingConfig
from packtrain.planning.question import Question
from packtrain.planning.rows import MOST_ROWS, read_rows
from packtrain.planning.study_values import Simulation
from packtrain.planning.sweep import simulate

_MOST_MEDIA = 1_000_000  # priced one by one; more would take minutes
_NOTICEABLE = 0.8  # of the patches: a limit that changes less is not worth showing
_SHARES = (2, 4, 8)
_ROUND_PIXELS = 28 * 28  # several families count in patches of this size


@dataclass(frozen=True, slots=True)
class MediaOption:
    """One media limit and what packing looks like with it."""

    setting: str
    value: int
    simulation: Simulation

    @property
    def label(self) -> str:
        """As it is shown."""
        return f"{self.setting} {self.value:,}"


def smaller_media(
    question: Question, table: CostTable, config: PackingConfig, before: Simulation
) -> tuple[MediaOption, ...]:
    """Limits that make a difference, for images and for videos, the mildest first; none where the family has none."""
    kinds = table.media("kind")
    if not before.worst.patches or not 0 < len(kinds) <= _MOST_MEDIA or len(table) > MOST_ROWS:
        return ()
    width, height = table.media("width").astype(np.int64), table.media("height").astype(np.int64)
    images = kinds == "image"
    tried: list[tuple[str, float]] = []
    if images.any():
        tried.append(("max_pixels", float(np.percentile((width * height)[images], 95))))
        tried.append(("max_img_size", float(np.maximum(width, height)[images].max())))
    if (kinds == "video").any():
        tried.append(("max_frames", float(table.column("frames").max())))
        tried.append(("num_frames", float(table.column("frames").max())))
    found: dict[bool, list[MediaOption]] = {}
    for setting, size in tried:
        video = setting.endswith("frames")
        if not found.get(video):
            found[video] = list(_options(question, table, config, setting, size))
    return tuple(option for options in found.values() for option in options)


def _options(
    question: Question, table: CostTable, config: PackingConfig, setting: str, size: float
) -> Iterator[MediaOption]:
    patches = _NOTICEABLE * question.rows.samples["patches"].sum()
    for share in _SHARES:
        value = int(size / share)
        if setting == "max_pixels":
            value = value // _ROUND_PIXELS * _ROUND_PIXELS
        if value < 1:
            return
        try:
            limited = table.with_limits(**{setting: value})  # type: ignore[arg-type]
        except PacktrainError:  # this family has no such limit, or the model is no longer there
            return
        if len(limited) < len(table):
            return
        rows = read_rows(limited, config.seed)
        if rows.samples["patches"].sum() <= patches:
            patches = _NOTICEABLE * rows.samples["patches"].sum()
            simulation = simulate(replace(question, rows=rows), config)
            if simulation is not None:
                yield MediaOption(setting, value, simulation)
