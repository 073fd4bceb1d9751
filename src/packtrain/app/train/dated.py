"""A run has one date for its chat template: that of its first start, which its config keeps from then on."""

from __future__ import annotations

from dataclasses import replace

from packtrain.app.train.resolved_run import ResolvedRun
from packtrain.core.cache_root import cache_dir
from packtrain.families.model_folder import resolve
from packtrain.families.settings import read_settings
from packtrain.families.template_date import date_for, unused_note

_KEY = "template_date"


def with_template_date(run: ResolvedRun) -> ResolvedRun:
    """The run with the date that its samples have, or without one where the model's chat template writes none."""
    own = run.data.own_template()
    template = own or read_settings(resolve(run.model.name, cache_dir() / "models")).templates
    given = run.config.data.template_date
    chosen = date_for(template, given)
    if chosen is not None and given is None:
        notes: tuple[str, ...] = (f"the chat template writes the date: every sample has data.{_KEY} {chosen}",)
    else:
        notes = unused_note(f"data.{_KEY}", given, template)
    if chosen == given:
        return run
    return replace(
        run,
        config=replace(run.config, data=replace(run.config.data, template_date=chosen)),
        data=replace(run.data, template_date=chosen),
        evaluation=replace(run.evaluation, template_date=chosen) if run.evaluation is not None else None,
        notes=(*run.notes, *notes),
    )
