"""Mixtures: every problem is said at once, and nothing that is unclear is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.core.errors import ConfigError
from packtrain.records.mixture import KEYS
from packtrain.records.open import iter_units, open_sources, read_unit, recognise


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sub", "pictures"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "sub/a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(f'{{"from": "{name}"}}\n')
    return tmp_path


def mixture(folder: Path, text: str) -> str:
    path = folder / "mix.yaml"
    path.write_text(text)
    return str(path)


FULL = """
datasets:
  - path: a.jsonl
    weight: 0.5
  - dataset_path: sub/a.jsonl
    dataset_format: jsonl
    media_dir: pictures
    repeats: 2
    split: val
  - {path: b.jsonl, name: a, media_root: /usr}
  - org/name
"""


def test_a_mixture_is_its_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mixture(folder, FULL)
    monkeypatch.chdir("/")  # paths are relative to the file, not to where we stand
    assert recognise(path) == "mixture"
    specs = open_sources(path)
    assert [spec.name for spec in specs] == ["a", "a-2", "a-3", "name"]
    assert [spec.path for spec in specs[:3]] == [str(folder / name) for name in ("a.jsonl", "sub/a.jsonl", "b.jsonl")]
    assert [spec.format for spec in specs] == ["jsonl"] * 3 + ["hf_dataset"]
    assert [spec.media_root for spec in specs[:3]] == [str(folder), str(folder / "pictures"), "/usr"]
    assert [(spec.weight, spec.repeats) for spec in specs] == [(0.5, None), (None, 2), (None, None), (None, None)]
    assert [spec.split for spec in specs] == ["train", "val", "train", "train"]
    entries = [entry for unit in iter_units(specs[:3]) for entry in read_unit(specs, unit)]
    assert [entry.value for entry in entries] == [{"from": n} for n in ("a.jsonl", "sub/a.jsonl", "b.jsonl")]


def _grown(first: str, more: str) -> str:
    """Nine levels, each nine times the one before."""
    lines = [f"- &l0 {first}", *(f"- &l{n} {more.replace('*', f'*l{n - 1}')}" for n in range(1, 10))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        _grown("{k0: 1, k1: 1}", "{<<: [" + ",".join("*" * 9) + "]}"),
        _grown("{path: x, name: [" + ",".join("x" * 9) + "]}", "{path: [" + ",".join("*" * 9) + "]}"),
        "- &a {path: [*a]}",
        "[" * 5000,
        "- path: !!python/object/apply:os.getcwd []",
        "- {path: a, path: b}",
    ],
)
def test_texts_that_grow_or_do_anything_are_refused(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sources(mixture(folder, text))
    assert len(str(caught.value)) < 3000


def test_a_list_at_the_top_and_defaults_from_outside(folder: Path) -> None:
    specs = open_sources(
        mixture(folder, "- path: a.jsonl\n- path: b.jsonl\n  split: test"), media_root="/usr", split="val"
    )
    assert [(spec.media_root, spec.split) for spec in specs] == [("/usr", "val"), ("/usr", "test")]


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    text = """
datasets:
  - {path: a.jsonl, wieght: 2}
  - {path: a.jsonl, weight: 1, repeats: 2}
  - {path: a.jsonl, weight: -1}
  - {path: a.jsonl, repeats: true}
  - {path: a.jsonl, weight: .nan}
  - {path: other.yaml}
  - {path: a.jsonl, format: jsnl}
  - {name: nothing}
  - {path: a.jsonl, dataset_path: b.jsonl}
  - {path: 3}
  - [a.jsonl]
"""
    with pytest.raises(ConfigError) as caught:
        open_sources(mixture(folder, text))
    message = str(caught.value)
    for number, words in enumerate(
        [
            "did you mean 'weight'",
            "exclude each other",
            "-1 instead of a number above 0",
            "True instead of a number above 0",
            "nan instead of a number above 0",
            "mixture inside a mixture",
            "did you mean 'jsonl'",
            "no path",
            "given twice",
            "3 instead of text",
            "list instead of a dataset",
        ]
    ):
        line = [line for line in message.splitlines() if f"datasets[{number}]" in line]
        assert len(line) == 1
        assert words in line[0]


def test_all_missing_files_are_reported_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sources(mixture(folder, "- none.jsonl\n- a.jsonl\n- sub/none.parquet\n"))
    assert "none.jsonl" in str(caught.value)
    assert "sub/none.parquet" in str(caught.value)
    assert "datasets[1]" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "datasets:", "datasets: []", "a: b", "3", "[", "datasets: {a: b}", "dataset: [a]"]
)
def test_what_is_no_mixture_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="datasets"):
        open_sources(mixture(folder, text))


def test_yaml_cannot_make_objects(folder: Path) -> None:
    marker = folder / "made"
    with pytest.raises(ConfigError):
        open_sources(mixture(folder, f"datasets: !!python/object/apply:os.mkdir ['{marker}']"))
    assert not marker.exists()
    with pytest.raises(ConfigError, match="nothing is there"):
        open_sources(str(folder / "none.yaml"))


def test_the_keys_of_an_item_are_public() -> None:
    assert KEYS == ("path", "name", "format", "media_root", "split", "subset", "weight", "repeats")
