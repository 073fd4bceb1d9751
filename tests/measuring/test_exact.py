"""Computed costs equal what transformers makes of the same records, for every family, record by record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import (
    TEXT_FAMILIES,
    TILED,
    VISION_FAMILIES,
    Message,
    as_strings,
    conversations,
    opened,
    shrink,
    write_images,
    write_jsonl,
    write_video,
)
from PIL import Image

import packtrain
from packtrain.app.measure import measure_outcome
from packtrain.core.errors import ConfigError, DriftError
from packtrain.core.values import MediaLimits
from packtrain.delivery.encode.processor import RealProcessor
from packtrain.families import tiny
from packtrain.families.encoder import RecordEncoder
from packtrain.families.family import Run
from packtrain.families.internvl.rule import InternVL
from packtrain.families.layout import Layouter
from packtrain.families.qwen_vl.rule import Qwen2VL
from packtrain.families.settings import read_settings
from packtrain.families.skeleton import Skeletons
from packtrain.measuring.measure_summary import DriftCheck
from packtrain.measuring.request import Request
from packtrain.measuring.table import CostTable
from packtrain.records.media import MediaStore
from packtrain.records.open import iter_units, open_sources, read_unit
from packtrain.records.schemas.converters import SchemaOptions, to_record

pytestmark = pytest.mark.contract
QUICK, MANY, TRUE_SIZE = 24, 120, 12


@pytest.fixture(autouse=True)
def _both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first record of a shape is laid out by running the template, the others by filling in."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(Skeletons, "patience", 1)


def load(folder: Path) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    return (AutoProcessor if (folder / "processor_config.json").exists() else AutoTokenizer).from_pretrained(folder)


def measured(tmp_path: Path, records: Sequence[list[Message]], model: Path, **options: Any) -> CostTable:
    data = write_jsonl(tmp_path / "data.jsonl", records)
    options = {"check": 0, "workers": 1, "max_failure_rate": 0.0, **options}
    table = packtrain.measure(data, model=str(model), out=tmp_path / "out", **options)
    assert table.column("id").tolist() == [f"r{n}" for n in range(len(records))]
    return table


def assert_columns(table: CostTable, truth: Sequence[dict[str, int]]) -> None:
    """Every row of every column that the truth knows."""
    for name in truth[0]:
        ours, theirs = table.column(name).tolist(), [row[name] for row in truth]
        wrong = [(n, a, b) for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        assert not wrong, f"{name}: {len(wrong)} of {len(ours)} rows differ, first (row, ours, real) {wrong[:3]}"


def token_id(folder: Path, kind: str) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get(f"{kind}_token_id", config.get(f"{kind}_token_index", -1)))


def patches(made: Any, folder: Path) -> int:
    """Rows that the vision encoder gets for one sample."""
    if "image_grid_thw" in made:
        rows = int(made["image_grid_thw"].prod(-1).sum())
        assert rows == made["pixel_values"].shape[0]
        return rows
    if "pixel_values" not in made:
        return 0
    side = json.loads((folder / "config.json").read_text())["vision_config"]["patch_size"]
    side = side[0] if isinstance(side, list) else side
    views = made["pixel_values"].flatten(0, -4)  # (views, channels, height, width)
    shown = int(views.flatten(1).any(1).sum())  # views of zeros only fill up samples whose images differ in number
    return shown * (views.shape[-2] // side) * (views.shape[-1] // side)


def reality(processor: Any, folder: Path, messages: list[Message], media: Path, **kwargs: Any) -> dict[str, int]:
    """What a direct call of the processor or tokenizer gives."""
    if not (folder / "processor_config.json").exists():
        ids = processor.apply_chat_template(as_strings(messages), tokenize=True, return_dict=True)["input_ids"]
        return {"tokens": len(ids), "text_tokens": len(ids), "tail_tokens": len(ids), "images": 0, "patches": 0}
    shown = opened(messages, media)
    made = processor.apply_chat_template(
        shown, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=kwargs
    )
    ids = made["input_ids"][0].tolist()
    image_tokens = ids.count(token_id(folder, "image"))
    behind_media = len(ids) - ids[::-1].index(token_id(folder, "image")) if image_tokens else 0
    return {
        "tokens": len(ids),
        "image_tokens": image_tokens,
        "text_tokens": len(ids) - image_tokens,
        "tail_tokens": len(ids) - behind_media,
        "images": sum(part["type"] == "image" for message in shown for part in message["content"]),
        "patches": patches(made, folder),
    }


def check(family: str, count: int, tmp_path: Path, *, seed: int = 0, shapes: int = 15, true_size: bool = False) -> None:
    folder = tiny.write(family, tmp_path / "model")
    if family in TILED and not true_size:
        shrink(folder)
    sees = family in VISION_FAMILIES
    names = write_images(tmp_path) if sees else []
    records = conversations(count, images=names, shapes=shapes, seed=seed)
    processor = load(folder)
    truth = [reality(processor, folder, messages, tmp_path) for messages in records]
    assert len({row["tokens"] for row in truth}) > count // 4, "the records hardly differ"
    assert {row["images"] for row in truth} == ({0, 1, 2, 3, 4} if sees else {0})
    assert_columns(measured(tmp_path, records, folder), truth)


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, "nanovlm", *VISION_FAMILIES])
def test_records(family: str, tmp_path: Path) -> None:
    check(family, QUICK, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("family", [*TEXT_FAMILIES, "nanovlm", *VISION_FAMILIES])
def test_many_records(family: str, tmp_path: Path) -> None:
    check(family, MANY, tmp_path, seed=1, shapes=60)


@pytest.mark.more
@pytest.mark.parametrize("family", TILED)
def test_records_in_tiles_of_true_size(family: str, tmp_path: Path) -> None:
    check(family, TRUE_SIZE, tmp_path, seed=2, true_size=True)


# ---- limits


LIMITS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "qwen2_5_vl, most pixels": (
        "qwen2_5_vl",
        {"max_pixels": 12_544},
        {"images_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 12_544}}},
    ),
    "qwen3_vl, fewest and most": (
        "qwen3_vl",
        {"min_pixels": 4096, "max_pixels": 16_384},
        {"images_kwargs": {"size": {"shortest_edge": 4096, "longest_edge": 16_384}}},
    ),
    "smolvlm, longest edge": ("smolvlm", {"max_img_size": 128}, {"images_kwargs": {"size": {"longest_edge": 128}}}),
    "idefics3, longest edge": ("idefics3", {"max_img_size": 100}, {"images_kwargs": {"size": {"longest_edge": 100}}}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str, tmp_path: Path) -> None:
    family, limits, kwargs = LIMITS[name]
    folder = tiny.write(family, tmp_path / "model")
    if family in TILED:
        shrink(folder)
    records = conversations(15, images=write_images(tmp_path), most_images=2, seed=3)
    processor = load(folder)
    truth = [reality(processor, folder, messages, tmp_path, **kwargs) for messages in records]
    table = measured(tmp_path, records, folder, processor_config=limits)
    assert_columns(table, truth)
    free = packtrain.measure(tmp_path / "data.jsonl", model=str(folder), out=tmp_path / "free", check=0, workers=1)
    assert (free.column("patches") > table.column("patches")).sum() > 3, "the limit changes hardly anything"


# ---- videos


VIDEOS: tuple[tuple[str, int, Fraction | int], ...] = (
    ("seventeen.mp4", 17, 24),
    ("slow.mkv", 40, 10),
    ("ntsc.mp4", 30, Fraction(30000, 1001)),
    ("short.mkv", 9, 5),
    ("long.mp4", 130, 25),
)


def video_records(names: Sequence[str], image: str, *, mixed: bool) -> list[list[Message]]:
    """Each video alone, between texts, in a second turn; with `mixed` also beside another video and an image."""

    def asked(*parts: str) -> Message:
        content = [{"type": "video", "video": p} if p in names else {"type": "text", "text": p} for p in parts]
        return {"role": "user", "content": content}

    answer = {"role": "assistant", "content": [{"type": "text", "text": "a red circle 🙂"}]}
    records = [[asked(name, "what?"), answer] for name in names]
    records += [[asked("look: ", name), answer, asked("and?"), answer] for name in names]
    records += [[asked("first"), answer, asked("é\n", name, " \u2028x"), answer] for name in names]
    if mixed:
        records += [[asked(one, "and", two), answer] for one, two in zip(names, reversed(names), strict=True)]
        both = asked(names[0], "beside")
        both["content"].append({"type": "image", "image": image})
        records.append([both, answer])
    return records


@pytest.mark.parametrize("limits", [{}, {"num_frames": 4}, {"fps": 3.0}], ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_videos(family: str, limits: dict[str, float], tmp_path: Path) -> None:
    folder = tiny.write(family, tmp_path / "model")
    if family in TILED:
        shrink(folder)
    names = [write_video(tmp_path / name, frames=frames, fps=fps) for name, frames, fps in VIDEOS]
    records = video_records(names, write_images(tmp_path)[0], mixed=family != "smolvlm")
    table = measured(tmp_path, records, folder, processor_config=limits)

    specs = tuple(open_sources(str(tmp_path / "data.jsonl")))
    request = Request(specs=specs, model=str(folder), limits=MediaLimits(**limits))  # type: ignore[arg-type]
    real = RealProcessor(request, read_settings(folder))
    store = MediaStore(specs[0].media_root)
    entries = [entry for unit in iter_units(specs) for entry in read_unit(specs, unit)]
    truth = []
    for entry in entries:
        found = real.encode(to_record(entry, source="s", options=SchemaOptions(), formatting=None), store)
        assert found.media_tokens is not None
        assert found.tail_tokens is not None
        truth.append(
            {
                "tokens": found.tokens,
                "text_tokens": found.tokens - found.media_tokens,
                "tail_tokens": found.tail_tokens,
                "patches": found.patches,
                "max_patches_per_image": found.max_patches_per_image,
            }
        )
    assert_columns(table, truth)
    assert table.column("videos").min() == 1
    assert (table.column("video_tokens") > 0).all()
    per_video = table.column("frames") / table.column("videos")
    if "num_frames" in limits:
        assert per_video.max() == 4
        assert family == "smolvlm" or per_video.min() == 4  # there it is the most, not the number
    else:
        assert len(np.unique(per_video)) > 2


# ---- drift


def small_dataset(tmp_path: Path) -> Path:
    write_images(tmp_path)
    picture = {"role": "user", "content": [{"type": "image", "image": "photo.jpg"}, {"type": "text", "text": "what?"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a circle"}]}
    question = {"role": "user", "content": [{"type": "text", "text": "who?"}]}
    return write_jsonl(tmp_path / "data.jsonl", [[question, answer], [picture, answer], [question, answer]])


def broken_by_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's rule with one token too many for every image."""
    right = Qwen2VL.image

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        expansion = right(self, *args, **kwargs)
        (run,) = expansion.pieces
        return replace(expansion, pieces=(Run(run.token, run.count + 1),))

    monkeypatch.setattr(Qwen2VL, "image", wrong)


def test_a_rule_that_is_wrong_by_one_token_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = small_dataset(tmp_path), tiny.write("qwen2_5_vl", tmp_path / "model")
    right = packtrain.measure(data, model=str(folder), out=tmp_path / "right", workers=1)
    assert right.summary.check == DriftCheck(records=3)
    broken_by_one_token(monkeypatch)
    with pytest.raises(DriftError, match=r"(?s)record r1 .*data\.jsonl:2.*tokens = \d+ from the real processor"):
        packtrain.measure(data, model=str(folder), out=tmp_path / "wrong", workers=1)
    with pytest.raises(packtrain.PacktrainError):
        CostTable.load(tmp_path / "wrong")
    unchecked = packtrain.measure(data, model=str(folder), out=tmp_path / "unchecked", workers=1, check=0)
    assert unchecked.summary.check == DriftCheck(note="turned off")
    assert (unchecked.column("tokens") - right.column("tokens")).tolist() == [0, 1, 0]


def test_media_that_end_elsewhere_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing marker before its image: all numbers of tokens are right, and the tail is one too short."""
    data, folder = small_dataset(tmp_path), shrink(tiny.write("internvl", tmp_path / "model"))
    right = packtrain.measure(data, model=str(folder), out=tmp_path / "right", workers=1)
    expand = InternVL.image

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        expansion = expand(self, *args, **kwargs)
        opening, run, end = expansion.pieces
        return replace(expansion, pieces=(opening, end, run))

    monkeypatch.setattr(InternVL, "image", wrong)
    with pytest.raises(DriftError, match=r"(?s)record r1 .*tail_tokens = \d+ from the real processor"):
        packtrain.measure(data, model=str(folder), out=tmp_path / "wrong", workers=1)
    unchecked = packtrain.measure(data, model=str(folder), out=tmp_path / "unchecked", workers=1, check=0)
    assert (unchecked.column("tail_tokens") - right.column("tail_tokens")).tolist() == [0, -1, 0]
    assert unchecked.column("tokens").tolist() == right.column("tokens").tolist()


def test_other_tokens_of_the_same_number_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image on the other side of its markers, and a text with other words: every count is right."""
    data, folder = small_dataset(tmp_path), tiny.write("internvl", tmp_path / "model")
    expand, expanded = InternVL.image, Layouter.expanded

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        expansion = expand(self, *args, **kwargs)
        opening, run, end = expansion.pieces
        return replace(expansion, pieces=(end, run, opening))

    def other_words(self: Any, *args: Any, **kwargs: Any) -> Any:
        layout = expanded(self, *args, **kwargs)
        return replace(layout, text=layout.text.replace("who?", "who!"))

    with monkeypatch.context() as patch:
        patch.setattr(InternVL, "image", swapped)
        with pytest.raises(DriftError, match=r"(?s)record r1 .*token \d+ is \d+ from the real processor"):
            packtrain.measure(data, model=str(folder), out=tmp_path / "wrong", workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(Layouter, "expanded", other_words)
        with pytest.raises(DriftError, match=r"(?s)record r0 .*token \d+ is \d+ from the real processor"):
            packtrain.measure(data, model=str(folder), out=tmp_path / "words", workers=1)
    monkeypatch.setattr(RecordEncoder, "token_ids", lambda *_: None)
    counted = packtrain.measure(data, model=str(folder), out=tmp_path / "counted", workers=1)
    note = "the token ids of 3 could not be compared, only their numbers"
    assert counted.summary.check == DriftCheck(records=3, note=note)


# ---- families without a rule


def without_a_rule(folder: Path) -> Path:
    """A Qwen2.5-VL whose pictures keep their size, which its rule does not cover."""
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["do_resize"] = False
    path.write_text(json.dumps(config))
    return folder


def whole_patches(tmp_path: Path) -> list[str]:
    draw = np.random.default_rng(0)
    names = []
    for width, height in ((56, 56), (84, 112), (28, 140)):
        names.append(f"{width}x{height}.png")
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / names[-1])
    return names


def test_a_family_without_a_rule_is_measured_by_its_processor(tmp_path: Path) -> None:
    folder = without_a_rule(tiny.write("qwen2_5_vl", tmp_path / "model"))
    records = conversations(20, images=whole_patches(tmp_path), seed=4)
    table = measured(tmp_path, records, folder, check=32)
    assert table.summary.measured_by == "processor"
    assert json.loads((tmp_path / "out" / "measure.json").read_text())["measured_by"] == "processor"
    assert table.summary.check.records == 0
    processor = load(folder)
    truth = [reality(processor, folder, messages, tmp_path) for messages in records]
    assert len({row["patches"] for row in truth}) > 4
    assert_columns(table, truth)
    ruled = packtrain.measure(
        tmp_path / "data.jsonl",
        model=str(tiny.write("qwen2_5_vl", tmp_path / "ruled")),
        out=tmp_path / "by rule",
        workers=1,
        check=0,
    )
    assert ruled.summary.measured_by == "rule"
    assert table.column("supervised_tokens").tolist() == ruled.column("supervised_tokens").tolist()


def test_what_the_processor_cannot_measure_is_said(tmp_path: Path) -> None:
    folder = without_a_rule(tiny.write("qwen2_5_vl", tmp_path / "model"))
    good, *_ = conversations(1, seed=5)
    silent = [{"role": "user", "content": [{"type": "text", "text": "anyone?"}]}]
    data = write_jsonl(tmp_path / "data.jsonl", [good, silent])
    options: dict[str, Any] = {"model": str(folder), "workers": 1, "max_failure_rate": 1.0}
    outcome = measure_outcome(data, out=tmp_path / "out", **options)
    assert outcome.table.summary.counts.reasons == {"loss: no supervised tokens": 1}
    with pytest.raises(ConfigError, match="max_pixels"):
        packtrain.measure(data, out=tmp_path / "limited", processor_config={"max_pixels": 10_000}, **options)
    with pytest.raises(ConfigError, match="measure again"):
        outcome.table.with_limits(max_pixels=10_000)


def test_a_processor_that_has_no_family_here(tmp_path: Path) -> None:
    """Aya Vision: known to transformers, unknown to packtrain."""
    folder = tiny.write("internvl", tmp_path / "model")
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 56, "patch_size": 14}
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    image_id = next(token["id"] for token in tokens if token["content"] == "<IMG_CONTEXT>")
    text = {"model_type": "cohere2", "hidden_size": 64, "vocab_size": 2000, "num_hidden_layers": 2}
    config = {"model_type": "aya_vision", "image_token_index": image_id, "vision_config": vision, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    square = {"height": 56, "width": 56}
    processor_config = {
        "processor_class": "AyaVisionProcessor",
        "patch_size": 14,
        "img_size": 56,
        "downsample_factor": 2,
        "image_token": "<IMG_CONTEXT>",
        "img_patch_token": "<IMG_CONTEXT>",
        "image_processor": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 6,
            "size": square,
        },
    }
    (folder / "processor_config.json").write_text(json.dumps(processor_config))
    records = conversations(12, images=write_images(tmp_path), most_images=2, seed=6)
    table = measured(tmp_path, records, folder)
    assert table.summary.measured_by == "processor"
    processor = load(folder)
    assert type(processor).__name__ == "AyaVisionProcessor"
    assert_columns(table, [reality(processor, folder, messages, tmp_path) for messages in records])
    assert table.column("image_tokens").max() > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_a_record_without_an_answer_is_in_the_ledger(family: str, tmp_path: Path) -> None:
    question = {"role": "user", "content": [{"type": "text", "text": "anyone?"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "me"}]}
    data = write_jsonl(
        tmp_path / "data.jsonl", [[question, answer], [question], [question, {**answer, "train": False}]]
    )
    model = tiny.write(family, tmp_path / "model")
    table = packtrain.measure(data, model=str(model), out=tmp_path / "out", workers=1, check=0, max_failure_rate=1.0)
    assert table.column("id").tolist() == ["r0"]
    ledger = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert [(entry["id"], entry["reason"]) for entry in ledger] == [(f"r{n}", "no supervised tokens") for n in (1, 2)]
