"""What a run says about its data before it trains: how much is left out, and what its processor files will not know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from made_runs_data import write_config

from packtrain.app.measure import measure_outcome
from packtrain.app.train.prepare import Prepared, prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.config.run_config import load_config
from packtrain.core.errors import DataError
from packtrain.core.numbers import percent
from packtrain.families import tiny
from packtrain.measuring.measure_summary import data_notes


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return write_config(tmp_path)


def prepared(config: Path, *overrides: str) -> Prepared:
    return prepare(resolve_run(load_config(config), overrides=overrides))


def said(found: Prepared, words: str) -> list[str]:
    return [note for note in found.run.notes if words in note]


def test_a_stream_of_samples_that_fit_no_pack(config: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepared(config, "data.online=true", "training.max_steps=2", "data.packing_length=8")
    assert re.search(r"no usable sample in the first 32 packs: 40 x pack: fits no pack \(such as ", str(caught.value))
    assert "tokens, packing_length 8" in str(caught.value)
    assert "packtrain measure" not in str(caught.value)


def test_a_length_that_fits_no_sample_is_named(config: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.packing_length\n") as caught:
        prepared(config, "data.packing_length=8")
    length = re.search(r"use data\.packing_length (\d+) or more", str(caught.value))
    assert length is not None
    assert prepared(config, f"data.packing_length={length[1]}").numbers.too_large == 0
    assert prepared(config, f"data.packing_length={int(length[1]) - 1}").numbers.too_large == 1


def test_samples_that_fit_no_pack_are_counted_and_said(config: Path) -> None:
    whole, short = prepared(config), prepared(config, "data.packing_length=48")
    assert (whole.numbers.too_large, said(whole, "usable samples")) == (0, [])
    lost = short.numbers.too_large
    assert lost == 40 - short.numbers.samples > 2
    assert short.numbers.left_out == lost
    (note,) = said(short, "usable samples")
    assert f"{lost} of 40 usable samples ({percent(lost / 40)}) are left out" in note
    assert "data.packing_length 48" in note
    assert prepared(config, "data.packing_length=48", "data.overlong=split").numbers.too_large == 0


class TestSamplesOfAStep:
    """They are kept: by the length of packs where nobody said it, else it is said what would keep them."""

    def test_packs_are_as_long_as_they_need(self, config: Path) -> None:
        size = ("data.packing_length=null", "training.packs_per_step=null", "training.gradient_accumulation_steps=3")
        found = prepared(config, *size, "training.per_device_train_batch_size=2")
        assert found.numbers.samples_per_step == pytest.approx(6, rel=0.1)
        assert found.numbers.packing_length < 2_000
        assert said(found, "so that a step has its 6 samples")
        assert (found.warnings, found.numbers.too_large) == ((), 0)

    def test_a_step_that_changes_is_said_before_the_notes(self, config: Path) -> None:
        long = ("data.packing_length=1024", "training.effective_batch_size=6")
        (warning,) = prepared(config, *long).warnings
        length = re.search(r"data\.packing_length: (\d+) would keep", warning)
        assert "samples instead of 6 (+" in warning
        assert length is not None
        assert prepared(config, f"data.packing_length={length[1]}", long[1]).warnings == ()

    def test_a_step_of_more_packs_than_an_epoch(self, config: Path) -> None:
        (warning,) = prepared(config, "training.packs_per_step=99").warnings
        assert "a step of 99 packs is more than an epoch has" in warning

    def test_a_tail_that_is_much_of_an_epoch(self, config: Path) -> None:
        packs = prepared(config).numbers.packs
        half = (f"training.packs_per_step={packs // 2 + 1}", "data.packing_drop_last=true")
        found = prepared(config, *half)
        (warning,) = found.warnings
        lost = 40 - found.numbers.samples
        assert f"packing_drop_last leaves out {lost} of 40 samples ({percent(lost / 40)})" in warning, "about half"
        assert prepared(config, half[0]).warnings == ()

    def test_the_setting_that_leaves_out_samples_is_named(self, config: Path) -> None:
        found = prepared(config, "training.packs_per_step=1", "data.max_packs=2")
        (warning,) = found.warnings
        lost = 40 - found.numbers.samples
        assert lost > 2
        assert f"max_packs 2 leaves out {lost} of 40 samples" in warning

    @pytest.mark.parametrize(
        ("names", "system"),
        [
            ("micro_batch_size: 4\nsequence_len: 96\nsample_packing: true", "axolotl"),
            ("per_device_train_batch_size: 4\nmax_length: 96\npacking: true", "TRL"),
            ("per_device_train_batch_size: 4\nmax_length: 96\npacking: true\neffective_batch_unit: packs", ""),
            ("micro_batch_size: 4\nsequence_len: 96", ""),
        ],
        ids=["axolotl", "TRL", "packs", "not packed"],
    )
    def test_a_batch_that_counts_packs_elsewhere(self, config: Path, tmp_path: Path, names: str, system: str) -> None:
        path = tmp_path / "theirs.yaml"
        path.write_text(f"model: tiny:llama\ndataset_path: {tmp_path / 'train.jsonl'}\n{names}\n")
        warnings = [one for one in prepared(path).warnings if "batch size counts packs" in one]
        assert [f"in {system}, " in one and "effective_batch_unit: packs" in one for one in warnings] == [True] * bool(
            system
        )

    def test_packing_is_shown_to_be_on(self, config: Path) -> None:
        numbers = prepared(config, "data.packing_length=256", "training.packs_per_step=1").numbers
        packs = numbers.first_packs
        assert all(samples > 1 and 0.5 < fill <= 1 for samples, fill in packs[:2])
        fewest, most = numbers.step_samples
        assert fewest <= min(packs)[0] <= max(packs)[0] <= most
        assert fewest < numbers.samples_per_step < most
        assert prepared(config, "data.packing=false").numbers.first_packs == ()

    def test_both_modes_are_told_apart_in_the_cache(self, config: Path, tmp_path: Path) -> None:
        prepared(config), prepared(config, "data.packing=false")
        for kind, names in (
            ("plans", {"train-packed-192", "train-padded"}),
            ("measure", {"train"}),
            ("tokens", {"train"}),
        ):
            found = {path.name.rpartition("-")[0] for path in (tmp_path / "cache" / kind).iterdir()}
            assert found == names


def test_answers_that_do_not_end_or_are_shortened_are_said(config: Path, tmp_path: Path) -> None:
    assert not said(prepared(config), "EOS token")
    model = tiny.write("llama", tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>so {{ m.content.replace('red', '') }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = prepared(config, f"model.model_name_or_path={model}")
    (note,) = said(found, "EOS token")
    assert "no supervised text in any sample ends" in note
    (note,) = said(found, "drops part")
    assert "of 40 samples" in note
    outcome = measure_outcome(tmp_path / "train.jsonl", model=str(model), out=tmp_path / "costs", workers=1, check=0)
    counts = outcome.table.summary.counts
    assert outcome.notes
    assert (counts.without_end, counts.shortened > 0) == (40, True)
    assert set(data_notes(outcome.table.summary)) <= set(outcome.notes) & set(found.run.notes)
    ended = prepared(config, f"model.model_name_or_path={model}", "data.add_eos=true")
    assert not said(ended, "EOS token")


def test_limits_that_processor_files_do_not_know_are_said(config: Path) -> None:
    model = "model.model_name_or_path=tiny:qwen2_vl"
    assert not said(prepared(config, model), "processor")
    assert not said(prepared(config, model, "data.processor_config={max_pixels: 6272}"), "processor"), "final has it"
    model = "model.model_name_or_path=tiny:smolvlm"
    (note,) = said(prepared(config, model, "data.processor_config={num_frames: 3}"), "processor")
    assert "num_frames 3" in note
    model = "model.model_name_or_path=tiny:qwen2_vl"
    prepared(config, model, "data.processor_config={num_frames: 16}")  # more than the clips that are compared have
