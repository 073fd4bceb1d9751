"""A run has one date for its chat template: that of its first start, which its config keeps from then on."""

from __future__ import annotations

from dataclasses import replace

from packtrain.app.datasets.config import DatasetConfig
from packtrain.app.train.settings import ResolvedRun
from packtrain.core.places import cache_dir
from packtrain.families.settings import read_settings
from packtrain.families.template_date import date_for, unused_note
from packtrain.models.tiny import resolve

_KEY = "template_date"


def with_template_date(run: ResolvedRun) -> ResolvedRun:
    """The run with the date that its samples have, or without one where the model's chat template writes none."""
    template = read_settings(resolve(run.model.name, cache_dir() / "models")).chat_template
    given = run.config.data.get(_KEY)
    chosen = date_for(template, given)
    if chosen is not None and given is None:
        notes: tuple[str, ...] = (f"the chat template writes the date: every sample has data.{_KEY} {chosen}",)
    else:
        notes = unused_note(f"data.{_KEY}", given, template)
    if chosen == given:
        return run
    data = {name: value for name, value in run.config.data.items() if name != _KEY}
    if chosen is not None:
        data[_KEY] = chosen
    return replace(
        run,
        config=replace(run.config, data=data),
        data=_dated(run.data, chosen),
        evaluation=_dated(run.evaluation, chosen) if run.evaluation is not None else None,
        notes=(*run.notes, *notes),
    )


def _dated(config: DatasetConfig, chosen: str | None) -> DatasetConfig:
    others = {name: value for name, value in config.measuring.items() if name != _KEY}
    return replace(config, measuring={**others, _KEY: chosen} if chosen is not None else others)
