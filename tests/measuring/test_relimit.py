"""Costs under other limits equal measuring again under those limits: every column of every row."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import Message, conversations, write_images, write_jsonl, write_video
from PIL import Image

import packtrain
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.families import tiny
from packtrain.measuring.columns import COST_SCHEMA
from packtrain.measuring.table import CostTable


def measured(data: Path, model: Path, out: Path, **options: Any) -> CostTable:
    return packtrain.measure(
        data, model=str(model), out=out, **{"check": 0, "workers": 1, "max_failure_rate": 1.0, **options}
    )


def dataset(tmp_path: Path, *, videos: bool, own: bool = False) -> Path:
    """Conversations with zero to four pictures, and videos where the family takes them."""
    (tmp_path / "data").mkdir()
    Image.new("RGB", (1500, 700)).save(tmp_path / "data" / "large.png")
    records = conversations(40, images=[*write_images(tmp_path / "data"), "large.png"], seed=1)
    for number, (frames, fps) in enumerate(((17, 24), (40, 10), (90, Fraction(30000, 1001)), (9, 5))):
        name = f"v{number}.{('mp4', 'mkv')[number % 2]}"
        write_video(tmp_path / "data" / name, frames=frames, fps=fps)
        if videos:
            records += [video_record(name), video_record(name, name)]
    records += [picture_record(1, max_pixels=30_000), picture_record(2, max_pixels=9_000)] if own else []
    records += [picture_record(1, resized_height=90, resized_width=300), picture_record(1)] if own else []
    records += [video_record("v1.mkv", nframes=6), video_record("v2.mp4", "v1.mkv", fps=1)] if own and videos else []
    return write_jsonl(tmp_path / "data" / "data.jsonl", records)


def picture_record(count: int, **limits: int) -> list[Message]:
    """The same large picture, the first time under limits of its own."""
    shown = [{"type": "image", "image": "large.png", **(limits if number == 0 else {})} for number in range(count)]
    return [{"role": "user", "content": shown}, {"role": "assistant", "content": [{"type": "text", "text": "circles"}]}]


def video_record(*names: str, role: str = "user", **limits: int) -> list[Message]:
    shown = [{"type": "video", "video": name, **limits} for name in names]
    return [
        {"role": "user", "content": [{"type": "text", "text": "what?"}, *(shown if role == "user" else [])]},
        {"role": "assistant", "content": [*(shown if role != "user" else []), {"type": "text", "text": "circles"}]},
    ]


def assert_same(ours: CostTable, again: CostTable) -> None:
    """The same rows, except that measuring again also writes down what it refuses."""
    assert ours.column("index").tolist() == again.column("index").tolist()
    for name in COST_SCHEMA.names:
        different = np.flatnonzero(ours.column(name) != again.column(name))
        assert not len(different), f"{name}: rows {different[:5]} differ"


LIMITS: dict[str, tuple[dict[str, float], ...]] = {
    "qwen2_5_vl": ({"max_pixels": 12_544}, {"min_pixels": 50_000}, {"num_frames": 8}, {"fps": 6.0}, {"max_frames": 4}),
    "qwen3_vl": ({"max_pixels": 70_000}, {"num_frames": 9}, {"fps": 5.0}, {"max_pixels": 70_000, "num_frames": 6}),
    "smolvlm": ({"max_img_size": 1024}, {"num_frames": 2}, {"fps": 3.0}),
    "idefics3": ({"max_img_size": 728}, {"max_img_size": 300}),
    "nanovlm": ({"max_img_size": 1024}, {"max_img_size": 512}),
}
CASES = [(family, limits) for family, several in LIMITS.items() for limits in several]


@pytest.mark.parametrize(("family", "limits"), CASES, ids=str)
def test_new_limits_equal_measuring_again(family: str, limits: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.write(family, tmp_path / "model")
    data = dataset(tmp_path, videos=family not in ("idefics3", "nanovlm"), own=family.startswith("qwen"))
    before = measured(data, model, tmp_path / "before")
    ours = before.with_limits(**limits)
    assert (
        ours.column("tokens") != before.column("tokens")[np.isin(before.column("index"), ours.column("index"))]
    ).any()
    assert_same(ours, measured(data, model, tmp_path / "again", processor_config=limits))
    assert not ours.dropped
    assert 0 < (ours.column("tail_tokens") < ours.column("tokens")).sum() < len(ours), "with media and without"


def test_timestamps_are_text_and_change_with_the_frames(tmp_path: Path) -> None:
    """Qwen3-VL writes the time before each pair of frames, with more digits later in the video."""
    model = tiny.write("qwen3_vl", tmp_path / "model")
    write_video(tmp_path / "v.mp4", frames=260, fps=10)
    data = write_jsonl(tmp_path / "data.jsonl", [video_record("v.mp4"), video_record("v.mp4", role="assistant")])
    before = measured(data, model, tmp_path / "before", processor_config={"num_frames": 4})
    for frames in (8, 30, 2):
        ours = before.with_limits(num_frames=frames)
        text = ours.column("text_tokens") - before.column("text_tokens")
        assert (np.sign(text) == np.sign(frames - 4)).all()
        supervised = ours.column("supervised_tokens") - before.column("supervised_tokens")
        assert supervised.tolist() == [0, 0], "nor do the times of a video inside an answer carry loss"
        again = measured(data, model, tmp_path / f"again{frames}", processor_config={"num_frames": frames})
        assert_same(ours, again)


@pytest.mark.parametrize("loss_on", ["all", "completion"])
def test_whatever_carries_loss(loss_on: str, tmp_path: Path) -> None:
    model, data = tiny.write("smolvlm", tmp_path / "model"), dataset(tmp_path, videos=True)
    before = measured(data, model, tmp_path / "before", loss_on=loss_on)
    again = measured(data, model, tmp_path / "again", loss_on=loss_on, processor_config={"max_img_size": 512})
    assert_same(before.with_limits(max_img_size=512), again)


def test_limits_upon_limits(tmp_path: Path) -> None:
    model, data = tiny.write("qwen2_5_vl", tmp_path / "model"), dataset(tmp_path, videos=True)
    before = measured(data, model, tmp_path / "before", processor_config={"min_pixels": 10_000})
    both = before.with_limits(max_pixels=20_000).with_limits(num_frames=4)
    again = measured(
        data,
        model,
        tmp_path / "again",
        processor_config={"min_pixels": 10_000, "max_pixels": 20_000, "num_frames": 4},
    )
    assert_same(both, again)
    assert_same(both.with_limits(max_pixels=40_000).with_limits(max_pixels=20_000), again)


def test_what_new_limits_make_impossible_is_dropped_and_named(tmp_path: Path) -> None:
    model, data = tiny.write("qwen2_5_vl", tmp_path / "model"), dataset(tmp_path, videos=True)
    before = measured(data, model, tmp_path / "before")
    ours = before.with_limits(num_frames=20)
    again = measured(data, model, tmp_path / "again", processor_config={"num_frames": 20})
    assert_same(ours, again)
    refused = [json.loads(line) for line in (tmp_path / "again" / "ledger.jsonl").read_text().splitlines()]
    assert len(ours.dropped) == len(refused) == 4, "two videos are too short, each in two records"
    assert len(ours) + len(ours.dropped) == len(before)
    assert all("too few frames" in reason for reason in ours.dropped.values())
    assert_same(ours.with_limits(num_frames=4), before.with_limits(num_frames=4))


def test_a_sample_that_new_limits_make_impossible(tmp_path: Path) -> None:
    """SmolVLM takes several videos only if the same number of frames is sampled from each."""
    model = tiny.write("smolvlm", tmp_path / "model")
    names = [write_video(tmp_path / f"{frames}.mp4", frames=frames, fps=10) for frames in (10, 34)]
    data = write_jsonl(tmp_path / "data.jsonl", [video_record(*names), video_record(names[0], names[0])])
    before = measured(data, model, tmp_path / "before", processor_config={"num_frames": 1})
    assert len(before) == 2
    ours = before.with_limits(num_frames=8)
    assert_same(ours, measured(data, model, tmp_path / "again", processor_config={"num_frames": 8}))
    assert ours.column("id").tolist() == ["r1"]
    assert list(ours.dropped) == [0]


def test_records_that_old_limits_left_out(tmp_path: Path) -> None:
    """What is not in the table cannot come back, so the limits that might bring it back are refused."""
    model, data = tiny.write("qwen2_5_vl", tmp_path / "model"), dataset(tmp_path, videos=True)
    before = measured(data, model, tmp_path / "before", processor_config={"num_frames": 20})
    with pytest.raises(ConfigError, match=r"(?s)dropped records \(4 x .*measure again"):
        before.with_limits(num_frames=4)
    limits = {"num_frames": 20, "max_pixels": 20_000}
    assert_same(
        before.with_limits(max_pixels=20_000), measured(data, model, tmp_path / "again", processor_config=limits)
    )


def test_longest_sample(tmp_path: Path) -> None:
    model, data = tiny.write("qwen2_5_vl", tmp_path / "model"), dataset(tmp_path, videos=False)
    plain = measured(data, model, tmp_path / "plain")
    longest = int(plain.column("tokens").max())
    whole = measured(data, model, tmp_path / "whole", max_sample_length=longest)
    ours = whole.with_limits(min_pixels=100_000)
    again = measured(
        data, model, tmp_path / "again", max_sample_length=longest, processor_config={"min_pixels": 100_000}
    )
    assert 0 < len(ours) < len(whole)
    assert_same(ours, again)
    assert set(ours.dropped.values()) == {"longer than max_sample_length"}
    cut = measured(data, model, tmp_path / "cut", max_sample_length=longest // 2)
    with pytest.raises(ConfigError, match="max_sample_length"):
        cut.with_limits(max_pixels=20_000)


def test_errors(tmp_path: Path) -> None:
    model, data = tiny.write("qwen2_5_vl", tmp_path / "model"), dataset(tmp_path, videos=False)
    table = measured(data, model, tmp_path / "out")
    with pytest.raises(ConfigError, match="max_img_size"):
        table.with_limits(max_img_size=512)
    with pytest.raises(ConfigError, match="num_frames"):
        table.with_limits(num_frames=4, fps=2.0)
    path = model / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["size"]["longest_edge"] = 40_000
    path.write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"(?s)longest_edge.*measure again"):
        table.with_limits(max_pixels=20_000)


def test_a_text_model_has_no_limits(tmp_path: Path) -> None:
    model = tiny.write("llama", tmp_path / "model")
    data = write_jsonl(tmp_path / "data.jsonl", conversations(5))
    table = measured(data, model, tmp_path / "out")
    with pytest.raises(ConfigError, match="max_pixels"):
        table.with_limits(max_pixels=20_000)
    assert_same(table.with_limits(), table)
