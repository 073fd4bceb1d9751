"""Mixtures: every problem is said at once, and nothing that is unclear is guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtrain.core.errors import ConfigError
from packtrain.records.formats.source_files import list_files
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
            "mutually exclusive",
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
    with pytest.raises(ConfigError, match="which does not exist"):
        open_sources(str(folder / "none.yaml"))


FACTORY = {
    "alpaca": {"file_name": "a.jsonl"},
    "mllm": {
        "file_name": "sub/a.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "hub": {"hf_hub_url": "org/name", "ms_hub_url": "other/name", "subset": "en", "split": "held"},
}


def written(folder: Path, content: object, name: str = "dataset_info.json") -> str:
    (folder / name).write_text(json.dumps(content))
    return str(folder / name)


def test_the_registry_of_llama_factory_is_a_mixture(folder: Path) -> None:
    path = written(folder, FACTORY)
    assert recognise(path) == "mixture"
    specs = open_sources(path)
    assert [spec.name for spec in specs] == list(FACTORY)
    assert [spec.path for spec in specs] == [str(folder / "a.jsonl"), str(folder / "sub/a.jsonl"), "org/name"]
    assert [spec.media_root for spec in specs[:2]] == [str(folder)] * 2
    assert (specs[2].split, specs[2].subset) == ("held", "en")
    broken = written(
        folder, {**FACTORY, "gone": {"file_name": "gone.json"}, "dpo": {"file_name": "b.jsonl", "ranking": True}}
    )
    assert [spec.name for spec in open_sources(broken, sources=["mllm"])] == ["mllm"], "others are not looked at"
    with pytest.raises(ConfigError, match=r"dpo\.ranking: preference data"):
        open_sources(broken)
    with pytest.raises(ConfigError, match="did you mean 'mllm'"):
        open_sources(broken, sources=["mlm"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"columns": {"prompt": "article"}}, "a.columns.prompt: 'article' is not read as prompt; data.columns"),
        ({"tags": {"user_tag": "boss"}}, "a.tags.user_tag"),
        ({"columns": {"chosen": "good"}}, "a.columns.chosen"),
        ({"num_samples": "ten"}, "max_samples: 'ten' instead of a positive integer"),
        ({"formatting": "own"}, "a.formatting"),
        ({"strange": 1}, "a.strange: unknown key"),
    ],
)
def test_what_an_entry_asks_for_is_refused_by_name(folder: Path, more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sources(written(folder, {"a": {"file_name": "a.jsonl", **more}}))
    assert words in str(caught.value)


def test_the_meta_file_of_internvl_is_a_mixture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"root": "pictures/", "annotation": "a.jsonl", "data_augment": False, "repeat_time": 0.5, "length": 9}
    path = written(
        folder / "sub", {"one": entry, "two": {**entry, "root": "", "annotation": str(folder / "b.jsonl")}}, "m.json"
    )
    monkeypatch.chdir(folder)  # `annotation` is there both times: the one beside the meta file counts
    specs = open_sources(path)
    assert [(spec.name, spec.path, spec.repeats) for spec in specs] == [
        ("one", str(folder / "sub/a.jsonl"), 0.5),
        ("two", str(folder / "b.jsonl"), 0.5),
    ]
    assert specs[0].media_root.rstrip("/") == str(folder / "pictures")
    for key, value in (("max_dynamic_patch", 12), ("data_augment", True)):
        with pytest.raises(ConfigError, match=f"one.{key}"):
            open_sources(written(folder, {"one": {**entry, key: value}}, "n.json"))


@pytest.mark.parametrize("content", [{"a": {"x": 1}}, {"features": {"a": {}}}, {"a": 1}, [{"file_name": "x"}], {}])
def test_other_json_is_no_list_of_datasets(folder: Path, content: object) -> None:
    assert recognise(written(folder, content)) in ("json", "jsonl")


def test_the_items_of_lmms_engine(folder: Path) -> None:
    text = "datasets:\n- {json_path: a.jsonl, data_folder: pictures, data_type: json, sampling_strategy: all}\n"
    specs = open_sources(mixture(folder, text + "- {path: b.jsonl, data_folder: '', data_type: arrow}\n"))
    assert [(spec.format, spec.media_root) for spec in specs] == [
        ("jsonl", str(folder / "pictures")),
        ("jsonl", str(folder)),
    ]
    with pytest.raises(ConfigError, match="sampling_strategy: 'first:10%'"):
        open_sources(mixture(folder, text.replace("all", "'first:10%'")))


ENERGON = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ENERGON + "{train: {join: [{path: a}]}}", "a metadataset of Energon with join"),
        (ENERGON + "{val: {path: a.jsonl}}", "expected: the split train"),
        (ENERGON + "{train: {blend: [{path: sub, weight: 1}]}}", "split.yaml has no shards of the split train"),
        (ENERGON + "{train: {blend: [{path: a.jsonl, weight: 0}]}}", "weight: 0 instead of a number above 0"),
        (ENERGON + "{train: {blend: [{path: m.yaml}]}}", "a metadataset inside a metadataset"),
        (ENERGON + "{train: {path: a.jsonl, aux: {x: y}}}", "with aux"),
    ],
)
def test_lists_that_are_refused_by_name(folder: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sources(mixture(folder, text))
    assert words in str(caught.value)


def test_the_keys_of_an_item_are_public() -> None:
    assert KEYS == ("path", "name", "format", "media_root", "split", "subset", "weight", "repeats", "max_samples")


def test_a_metadataset_of_energon_is_a_mixture(folder: Path) -> None:
    coco = folder / "coco"
    (coco / ".nv-meta").mkdir(parents=True)
    for name in ("s_0.tar", "s_1.tar", "s_2.tar"):
        (coco / name).write_bytes(b"")
    parts = "split_parts: {train: ['s_{0..1}.tar'], val: [s_2.tar]}\nexclude: [s_0.tar]"
    (coco / ".nv-meta" / "split.yaml").write_text(parts)
    members = "[{path: ./coco, SHARE: 3}, {path: ./coco, SHARE: 1, split_part: val, subflavors: {x: y}}]"
    for kind, share, found in (
        ("blend", "weight", [(0.75, None), (0.25, None)]),
        ("blend_epochized", "repetitions", [(None, 3), (None, 1)]),
    ):
        text = f"{ENERGON}{{train: {{{kind}: {members.replace('SHARE', share)}}}}}"
        specs = open_sources(mixture(folder, text))
        assert [spec.path for spec in specs] == [str(coco / "s_1.tar"), str(coco / "s_2.tar")]
        assert [(spec.weight, spec.repeats) for spec in specs] == found
        assert [spec.name for spec in specs] == ["coco", "coco-2"]
    (coco / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [s_0.tar, s_2.tar]}")
    (spec,) = open_sources(mixture(folder, ENERGON + "{train: {path: coco}}"))
    assert list_files(spec.path, "webdataset") == [str(coco / "s_0.tar"), str(coco / "s_2.tar")]
    for text in ("split_parts: {train: [../a.tar]}", "split_parts: {train: [s_0.tar]}\nexclude: [s_0.tar/x]"):
        (coco / ".nv-meta" / "split.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"split\.yaml"):
            open_sources(mixture(folder, ENERGON + "{train: {path: coco}}"))
