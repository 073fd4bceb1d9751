"""What a run says about its data before it trains: how much is left out, and what its processor files will not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs_data import write_config

from packtrain.app.config.load import load_config
from packtrain.app.measure import measure_outcome
from packtrain.app.train.prepare import Prepared, prepare
from packtrain.app.train.settings import resolve_run
from packtrain.costs.statistics import data_notes
from packtrain.models import tiny


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return write_config(tmp_path)


def prepared(config: Path, *overrides: str) -> Prepared:
    return prepare(resolve_run(load_config(config), overrides=overrides))


def said(found: Prepared, words: str) -> list[str]:
    return [note for note in found.run.notes if words in note]


def test_samples_that_fit_no_pack_are_counted_and_said(config: Path) -> None:
    whole, short = prepared(config), prepared(config, "data.packing_length=48")
    assert (whole.numbers.too_large, said(whole, "usable samples")) == (0, [])
    lost = short.numbers.too_large
    assert lost == 40 - short.numbers.samples > 2
    assert short.numbers.left_out == lost
    (note,) = said(short, "usable samples")
    assert f"{lost} of 40 usable samples ({lost / 40:.0%}) are left out" in note
    assert "data.packing_length 48" in note
    assert prepared(config, "data.packing_length=48", "data.overlong=split").numbers.too_large == 0


def test_answers_that_do_not_end_or_are_shortened_are_said(config: Path, tmp_path: Path) -> None:
    assert not said(prepared(config), "end token")
    model = tiny.write("llama", tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>so {{ m.content.replace('red', '') }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = prepared(config, f"model.model_name_or_path={model}")
    (note,) = said(found, "end token")
    assert "nothing that carries loss in any sample ends" in note
    (note,) = said(found, "leaves out")
    assert "of 40 samples" in note
    outcome = measure_outcome(tmp_path / "train.jsonl", model=str(model), out=tmp_path / "costs", workers=1, check=0)
    counts = outcome.table.summary["counts"]
    assert outcome.notes
    assert (counts["without_end"], counts["shortened"] > 0) == (40, True)
    assert set(data_notes(outcome.table.summary)) <= set(outcome.notes) & set(found.run.notes)
    ended = prepared(config, f"model.model_name_or_path={model}", "data.add_eos=true")
    assert not said(ended, "end token")


def test_limits_that_processor_files_do_not_know_are_said(config: Path) -> None:
    model = "model.model_name_or_path=tiny:qwen2_vl"
    assert not said(prepared(config, model), "processor")
    assert not said(prepared(config, model, "data.processor_config={max_pixels: 6272}"), "processor"), "final has it"
    model = "model.model_name_or_path=tiny:smolvlm"
    (note,) = said(prepared(config, model, "data.processor_config={num_frames: 3}"), "processor")
    assert "num_frames 3" in note
