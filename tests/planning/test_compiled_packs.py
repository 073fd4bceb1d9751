"""Packs with compiled layers beside padded batches with eager ones: each is predicted as it is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from asking import ask
from made_tables import detection

from packtrain.planning.clock import FIELDS, one_pass
from packtrain.planning.configs import ConfigDraft, packed_config, padded_config
from packtrain.planning.padding import baseline_run, padded_runs
from packtrain.planning.question import Baseline
from packtrain.planning.sweep import pack_rows, simulate
from packtrain.predicting.calibration import Fit
from packtrain.predicting.memory import MemoryCoefficients
from packtrain.predicting.time import Coefficients, default_coefficients
from packtrain.predicting.values import Load, TrainingSetup


def test_only_packs_change_where_only_packs_are_compiled(tmp_path: Path) -> None:
    eager = ask(tmp_path / "t", detection(600), setup=TrainingSetup(gradient_checkpointing=False))
    compiled = replace(eager, setup=replace(eager.setup, compiled=True))
    config = replace(eager.packing, packing_length=8_000)
    packed = pack_rows(eager, config)
    one, other = simulate(eager, config), simulate(compiled, config)
    assert one is not None
    assert other is not None
    assert other.packs == one.packs
    assert other.seconds < 0.95 * one.seconds
    assert other.memory_bytes < one.memory_bytes
    padded = [baseline_run(question, packed.samples) for question in (eager, compiled)]
    assert padded[0] == padded[1], "the padded run is the same"
    both = replace(compiled, baseline=Baseline(compiled=True))
    assert baseline_run(both, packed.samples).seconds < padded[0].seconds


def test_padded_batches_have_coefficients_of_their_own(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", detection(300), setup=TrainingSetup(compiled=True))
    packed = pack_rows(question, replace(question.packing, packing_length=8_000))
    slow = Coefficients(layer_seconds=1.0)
    fitted = replace(question, padded_fit=Fit(time=slow, memory=MemoryCoefficients()))
    usual, own = (padded_runs(one, packed.samples)[0] for one in (question, fitted))
    assert own.seconds > 2 * usual.seconds
    assert fitted.clock.coefficients is None, "packs keep theirs"
    known = replace(question, time=default_coefficients(compiled=True))
    assert padded_runs(known, packed.samples)[0] == usual, "those of compiled layers are not for these"


def test_compiled_rows_cost_their_whole_length(tmp_path: Path) -> None:
    """So that limits which leave packs half empty are not taken for free."""
    load = Load(tokens=6_000, squared_tokens=6_000_000, longest=2_000, samples=6, patches=100)
    passes = one_pass(load)
    filled = passes.filled(8_000).load(0)
    assert (filled.tokens, filled.squared_tokens, filled.longest) == (8_000, 6_000_000 + 2_000**2, 2_000)
    same = [name for name in FIELDS if name not in ("tokens", "squared_tokens", "longest")]
    assert all(getattr(filled, name) == getattr(load, name) for name in same)
    assert passes.filled(5_000).load(0) == load
    question = ask(tmp_path / "t", detection(400), setup=TrainingSetup(compiled=True))
    emptier = replace(question.packing, packing_length=16_000, max_samples_per_pack=4)
    found = simulate(question, emptier)
    assert found is not None
    assert found.fill < 0.5
    packed = pack_rows(question, emptier)
    at_least = question.clock.epoch_of_packs(packed.passes, found.packs_per_step, question.seed)
    assert found.seconds > 1.3 * at_least


@pytest.mark.parametrize(
    ("packs", "rows", "written"),
    [(True, False, (None, None)), (False, False, (False, None)), (True, True, (None, True))],
)
def test_configs_say_it_where_training_would_do_otherwise(
    tmp_path: Path, packs: bool, rows: bool, written: tuple[bool | None, bool | None]
) -> None:
    question = ask(
        tmp_path / "t", detection(200), setup=TrainingSetup(compiled=packs), baseline=Baseline(compiled=rows)
    )
    config = replace(question.packing, packing_length=8_000)
    packed = pack_rows(question, config)
    simulation = simulate(question, config)
    assert simulation is not None
    padded = baseline_run(question, packed.samples)
    draft = ConfigDraft(question=question, simulation=simulation, padded=padded)
    found = packed_config(draft), padded_config(draft, padded)
    assert tuple(one["training"].get("compile") for one in found) == written
