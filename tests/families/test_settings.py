"""Processor files are read as transformers reads them, in the nested and in the older layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import ConfigError
from packtrain.families import settings as settings_module
from packtrain.families import tiny
from packtrain.families.settings import read_settings

MINIMAL = "{% for m in messages %}{{ m.role }}{% endfor %}"


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def edit(folder: Path, name: str, **changes: Any) -> None:
    put(folder, name, {**json.loads((folder / name).read_text(encoding="utf-8")), **changes})


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A folder in the layout of transformers 5."""
    return tiny.write("qwen2_5_vl", tmp_path / "nested")


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    """The same model in the layout of transformers 4: one file per part."""
    folder = tiny.write("qwen2_5_vl", tmp_path / "legacy")
    parts = json.loads((folder / "processor_config.json").read_text())
    put(folder, "preprocessor_config.json", {**parts["image_processor"], "processor_class": parts["processor_class"]})
    put(folder, "video_preprocessor_config.json", parts["video_processor"])
    put(folder, "chat_template.json", {"chat_template": (folder / "chat_template.jinja").read_text()})
    for name in ("processor_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    return folder


def test_both_layouts_say_the_same(nested: Path, legacy: Path) -> None:
    new, old = read_settings(nested), read_settings(legacy)
    assert new.model_type == old.model_type == "qwen2_5_vl"
    assert new.image["patch_size"] == 14
    assert {**old.image} == {**new.image, "processor_class": "Qwen2_5_VLProcessor"}
    assert old.video == new.video
    assert new.video["video_processor_type"] == "Qwen2VLVideoProcessor"
    assert new.processor == {"processor_class": "Qwen2_5_VLProcessor"}
    assert old.processor == {}
    assert old.chat_template == new.chat_template
    assert "<|image_pad|>" in str(new.chat_template)
    assert new.config["vision_config"]["patch_size"] == 14
    assert new.special_tokens["image_token"] == "<|image_pad|>"


def test_older_files_give_way_to_nested_parts(nested: Path) -> None:
    put(nested, "preprocessor_config.json", {"patch_size": 99})
    put(nested, "video_preprocessor_config.json", {"patch_size": 98})
    assert read_settings(nested).image["patch_size"] == 14
    assert read_settings(nested).video["patch_size"] == 14


def test_video_falls_back_to_the_image_file(legacy: Path) -> None:
    (legacy / "video_preprocessor_config.json").unlink()
    found = read_settings(legacy)
    assert found.video == found.image
    assert found.image


# Every place that can hold a template, as (file, content); the letter says which one was taken.
PLACES: dict[str, tuple[str, Any]] = {
    "processor": ("processor_config.json", None),
    "json": ("chat_template.json", {"chat_template": "J" + MINIMAL}),
    "jinja": ("chat_template.jinja", "R" + MINIMAL),
    "tokenizer": ("tokenizer_config.json", None),
}
COMBINATIONS = [
    ("jinja",),
    ("json",),
    ("tokenizer",),
    ("json", "jinja"),
    ("jinja", "tokenizer"),
    ("json", "tokenizer"),
    ("processor", "json", "jinja", "tokenizer"),
    (),
]


def place_templates(folder: Path, names: tuple[str, ...]) -> None:
    (folder / "chat_template.jinja").unlink()
    for name in names:
        file, content = PLACES[name]
        if name == "processor":
            edit(folder, file, chat_template="P" + MINIMAL)
        elif name == "tokenizer":
            named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "T" + MINIMAL}]
            edit(folder, file, chat_template=named)
        else:
            put(folder, file, content)


@pytest.mark.contract
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_the_template_is_the_one_the_processor_takes(nested: Path, names: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    place_templates(nested, names)
    taken = transformers.AutoProcessor.from_pretrained(nested).chat_template
    ours = read_settings(nested).chat_template
    if taken is None and names == ("tokenizer",):
        assert ours == "T" + MINIMAL, "a processor without a template uses its tokenizer's"
    else:
        assert ours == taken
        assert (ours is None) == (not names)


@pytest.mark.contract
@pytest.mark.parametrize("names", [c for c in COMBINATIONS if "processor" not in c], ids="+".join)
def test_the_template_is_the_one_a_lone_tokenizer_takes(tmp_path: Path, names: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tiny.write("llama", tmp_path / "llama")
    place_templates(folder, names)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    taken = tokenizer.get_chat_template() if tokenizer.chat_template is not None else None
    assert read_settings(folder).chat_template == taken


def test_a_list_without_a_default_template_is_no_template(nested: Path) -> None:
    (nested / "chat_template.jinja").unlink()
    edit(nested, "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": MINIMAL}])
    assert read_settings(nested).chat_template is None


@pytest.mark.contract
@pytest.mark.parametrize("listed", [False, True], ids=["map file counts", "map file is superseded"])
def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path, listed: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tiny.write("internvl", tmp_path / "internvl")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = {
        token["content"]: token for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    config["extra_special_tokens"] = {
        name: config.pop(name) for name in ("start_image_token", "context_image_token", "end_image_token")
    }
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config["pad_token"] = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True, **flags}
    config["add_bos_token"] = False
    if listed:
        config["added_tokens_decoder"] = {
            str(token["id"]): {"content": text, "special": token["special"], **flags}
            for text, token in vocabulary.items()
        }
    put(folder, "tokenizer_config.json", config)
    put(folder, "special_tokens_map.json", {"eos_token": {"content": "<|im_start|>", **flags}})
    tokens = read_settings(folder).special_tokens
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokens) == 6
    assert "add_bos_token" not in tokens
    for name, text in tokens.items():
        assert getattr(tokenizer, name) == text
    assert tokens["eos_token"] == ("<|im_end|>" if listed else "<|im_start|>")


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "gemma3", "llama"])
def test_files_saved_by_transformers_read_the_same(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    before = tiny.write(family, tmp_path / "before")
    auto = transformers.AutoTokenizer if family == "llama" else transformers.AutoProcessor
    auto.from_pretrained(before).save_pretrained(tmp_path / "after")
    first, saved = read_settings(before), read_settings(tmp_path / "after")
    assert saved.model_type == ("text" if family == "llama" else family)
    assert saved.chat_template == first.chat_template
    assert saved.special_tokens == first.special_tokens
    for name in ("image", "video", "processor"):
        ours = getattr(first, name)
        assert {key: getattr(saved, name)[key] for key in ours} == ours


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"model_type": "qwen3_vl"}, "processor_config.json": {"processor_class": "X"}}, "qwen3_vl"),
        ({"processor_config.json": {"processor_class": "SmolVLMProcessor"}}, "smolvlm"),
        ({"preprocessor_config.json": {"processor_class": "Qwen2_5_VLProcessor"}}, "qwen2_5_vl"),
        ({"preprocessor_config.json": {"image_processor_type": "Idefics3ImageProcessorFast"}}, "idefics3"),
        ({"tokenizer_config.json": {"processor_class": "LlavaProcessor"}}, "llava"),
        ({"config.json": {"hidden_size": 8}, "tokenizer_config.json": {"eos_token": "x"}}, "text"),
        ({"tokenizer_config.json": {"eos_token": "x"}}, "text"),
        ({"tokenizer.json": {}}, "text"),
    ],
)
def test_model_type_is_found(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    for name, value in files.items():
        put(tmp_path, name, value)
    assert read_settings(tmp_path).model_type == expected


@pytest.mark.parametrize(
    "files",
    [
        {"processor_config.json": {"processor_class": "UnheardOfProcessor"}},
        {"preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"}},
    ],
    ids=["unknown", "shared by several families"],
)
def test_a_processor_that_names_no_family_is_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        put(tmp_path, name, value)
    with pytest.raises(ConfigError, match=r"(?s)Processor.*config\.json next to"):
        read_settings(tmp_path)


@pytest.mark.parametrize("content", ['{"a": ', "[1, 2]", "", "\xff", "[" * 100_000, '{"image_processor": 3}'])
def test_broken_files_are_named(nested: Path, content: str) -> None:
    (nested / "processor_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_settings(nested)
    assert caught.value.where == str(nested / "processor_config.json")
    assert "copy this file again" in caught.value.fix


def test_huge_files_are_refused_unread(nested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_MAX_BYTES", 20)
    with pytest.raises(ConfigError, match="at most 20 bytes"):
        read_settings(nested)


def test_the_tokenizer_file_is_never_opened(nested: Path) -> None:
    (nested / "tokenizer.json").write_bytes(b"\xff not JSON")
    assert read_settings(nested).model_type == "qwen2_5_vl"


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing there"):
        read_settings(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no model files"):
        read_settings(tmp_path)


def test_reading_needs_neither_torch_nor_transformers(nested: Path) -> None:
    program = (
        "import sys; from packtrain.families.settings import read_settings; read_settings(sys.argv[1]);"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(nested)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
