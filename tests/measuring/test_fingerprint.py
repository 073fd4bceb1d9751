"""What counts as a change: exactly the inputs that decide the result, each by its name."""

from __future__ import annotations

import linecache
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measuring import chats, hashes, write_image, write_lines

from packtrain.app.measure import measure_outcome
from packtrain.measuring.measurement import MeasureOutcome

FORMATTING = '''"""A formatting function of a user."""


def to_messages(record):
    return [{"role": "user", "content": record["question"]}, {"role": "assistant", "content": "Yes."}]
'''


class Place:
    """A dataset, a model and a result that one test may change."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.data = write_lines(folder / "data.jsonl", chats(30, images=("a.png", "b.png")))
        write_image(folder / "a.png", 200, 150)
        write_image(folder / "b.png", 90, 310)
        self.model = folder / "model"
        shutil.copytree(model, self.model)
        self.out = folder / "out"

    def measure(self, **options: Any) -> MeasureOutcome:
        return measure_outcome(
            self.data, **{"model": str(self.model), "out": self.out, "workers": 1, "check": 0, **options}
        )

    def times(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.out.iterdir()}


@pytest.fixture
def place(tmp_path: Path, qwen: Path) -> Place:
    return Place(tmp_path, qwen)


def names(outcome: MeasureOutcome) -> set[str]:
    """The changed inputs without their values."""
    assert not outcome.reused
    return {change.split(": ")[0] for change in outcome.changed}


def test_unchanged_inputs_measure_nothing(place: Place) -> None:
    first = place.measure()
    assert (first.reused, first.changed) == (False, [])
    before = place.times()
    assert set(before) == {"costs.parquet", "media.parquet", "ledger.jsonl", "measure.json"}
    second = place.measure(workers=2)
    assert second.reused
    assert place.times() == before
    assert place.measure(on_error="fail", max_failure_rate=0.5).reused, "how it is measured is not an input"
    assert len(second.table) == len(first.table) == 30


def test_a_table_follows_the_rules_and_not_the_release(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.measure()
    monkeypatch.setattr("packtrain.__version__", "99.0")
    assert place.measure().reused
    monkeypatch.setattr("packtrain.measuring.request.RULES_VERSION", 99)
    assert names(place.measure()) == {"rules"}


def test_touched_data_are_measured_again(place: Place) -> None:
    place.measure()
    before = hashes(place.out)
    os.utime(place.data, ns=(1, 1))
    assert names(place.measure()) == {"data.data.jsonl.mtime_ns"}
    assert hashes(place.out) == before


def test_content_hash_looks_at_content_alone(place: Place) -> None:
    place.measure(content_hash=True)
    os.utime(place.data, ns=(1, 1))
    assert place.measure(content_hash=True).reused
    state = place.data.stat()
    text = place.data.read_text()
    place.data.write_text(text.replace('"user"', '"tool"', 1))  # the same size
    os.utime(place.data, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert names(place.measure(content_hash=True)) == {"data.data.jsonl.sha256"}


def test_an_edited_chat_template_is_used_by_the_process_that_used_the_old_one(place: Place) -> None:
    first = place.measure().table.column("tokens")
    template = place.model / "chat_template.jinja"
    template.write_text("{{ '<|im_start|>' }}" + template.read_text())
    again = place.measure()
    assert names(again) == {"settings.chat_template"}
    assert (again.table.column("tokens") > first).all(), "measured with the template of before"


def test_an_edited_processor_setting(place: Place) -> None:
    first = place.measure().table.column("patches")
    assert first.any()
    config = place.model / "processor_config.json"
    text = config.read_text()
    assert '"merge_size": 2' in text
    config.write_text(text.replace('"merge_size": 2', '"merge_size": 4'))
    assert {name.rpartition(".")[2] for name in names(place.measure())} == {"merge_size"}


def test_an_edited_tokenizer(place: Place) -> None:
    place.measure()
    path = place.model / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert {name.rpartition(".")[0] for name in names(place.measure())} == {"settings.tokenizer"}


@pytest.mark.parametrize(
    ("first", "second", "changed"),
    [
        ({}, {"processor_config": {"max_pixels": 20_000}}, {"request.limits.max_pixels"}),
        ({"max_samples": 10}, {"max_samples": 10, "seed": 1}, {"request.seed"}),
        ({"max_samples": 10}, {"max_samples": 11}, {"request.filters.limit"}),
        ({}, {"loss_on": "all"}, {"request.loss_on"}),
        ({}, {"max_sample_length": 40}, {"request.filters.max_sample_length"}),
        ({}, {"allow_outside_root": True}, {"request.allow_outside_root"}),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, dict) else "",
)
def test_every_setting_by_its_name(place: Place, first: dict, second: dict, changed: set[str]) -> None:
    place.measure(**first)
    assert names(place.measure(**second)) == changed
    assert place.measure(**second).reused


def test_new_and_missing_data_files(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    write_lines(folder / "a.jsonl", chats(5))
    place.data = folder
    place.measure()
    added = write_lines(folder / "b.jsonl", chats(5, seed=1))
    again = place.measure()
    assert again.changed == ["data.b.jsonl: new"]
    assert len(again.table) == 10
    added.unlink()
    assert place.measure().changed == ["data.b.jsonl: gone"]


def test_the_source_of_a_formatting_function(
    tmp_path: Path, place: Place, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two sources of one second
    place.data = write_lines(tmp_path / "raw.jsonl", [{"question": f"How many {n}?"} for n in range(5)])
    module = tmp_path / "their_format.py"
    module.write_text(FORMATTING)
    arguments = ("measure", place.data, "-m", place.model, "-o", place.out, "-w", 1, "--check", 0, "--json")
    arguments = (*arguments, "--formatting-func", "their_format:to_messages")
    changed = []
    for source in (FORMATTING, FORMATTING, FORMATTING.replace("Yes.", "Certainly, why not?"), "# moved\n" + FORMATTING):
        module.write_text(source)
        sys.modules.pop("their_format", None)  # Python does not read a module twice
        linecache.clearcache()
        code, out, err = run(*arguments)
        assert code == 0, err
        changed.append([line for line in out.splitlines() if '"formatting_func: ' in line or '"reused"' in line])
    assert [len(lines) for lines in changed] == [1, 1, 2, 2]
    assert "true" in changed[1][0]


def test_the_inputs_themselves_are_in_the_result(place: Place) -> None:
    summary = place.measure(max_samples=7, seed=3).table.summary
    assert summary.inputs["request"]["filters"]["limit"] == 7
    assert summary.inputs["request"]["seed"] == 3
    assert list(summary.inputs["data"]) == ["data.jsonl"]
