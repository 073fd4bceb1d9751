"""Every video family's rule samples, sizes and writes as the real processor does, and refuses what it refuses."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

import numpy as np
import transformers
from packaging.version import Version
from rule_checks import (
    REFUSED,
    Case,
    by_rule,
    differences,
    internvl,
    real_video,
    video_headers,
    views_of,
    whole_video_call,
    written,
)

from packtrain.core.errors import ConfigError, PacktrainError, RecordError
from packtrain.core.values import MediaHeader, MediaLimits

pytestmark = pytest.mark.contract

# case, limits; together every way in which a family chooses its frames
RUNS = [
    ("qwen2_vl", MediaLimits()),
    ("qwen2_vl", MediaLimits(fps=1.5)),
    ("qwen2_5_vl", MediaLimits(num_frames=9)),
    ("qwen2_5_vl", MediaLimits(max_frames=31)),
    ("qwen2_vl-capped", MediaLimits()),
    ("qwen2_vl-capped", MediaLimits(num_frames=6)),
    ("qwen3_vl", MediaLimits()),
    ("qwen3_vl", MediaLimits(num_frames=7)),
    ("qwen3_vl", MediaLimits(fps=4.0)),
    ("qwen3_vl-capped", MediaLimits()),
    ("smolvlm", MediaLimits()),
    ("smolvlm-limit", MediaLimits(max_img_size=728)),
    ("smolvlm", MediaLimits(num_frames=10, fps=0.3)),
    ("llava_onevision", MediaLimits()),
    ("llava_onevision", MediaLimits(num_frames=8)),
    ("llava_onevision", MediaLimits(fps=1.0)),
    ("internvl", MediaLimits()),
    ("internvl-bare", MediaLimits(num_frames=5)),
    ("internvl", MediaLimits(fps=0.5)),
]
PIXELS = ("pixel_values_videos", "pixel_values")
WHOLE_CALLS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "internvl"]


def label(run: Any) -> str:
    return "-".join(f"{name}={value}" for name, value in run.given().items()) if isinstance(run, MediaLimits) else run


def compare(case: Case, count: int, seed: int) -> None:
    processor = case.make()
    family = case.rule(processor)
    pairs = []
    for header in video_headers(count, seed):
        rule = by_rule(lambda h=header: family.video(h))
        pairs.append((header, rule, real_video(case, processor, family, header)))
    if case.family == "llava_onevision" and Version(transformers.__version__) < Version("5.22"):
        pairs = [pair for pair in pairs if pair[2] != REFUSED]  # its older sampling fails on some videos
    overrun = [pair for pair in pairs if case.family.startswith("qwen2") and pair[2] == REFUSED != pair[1]]
    assert all(overruns(header, rule) for header, rule, _ in overrun)
    assert differences([pair for pair in pairs if pair not in overrun]) == []
    assert len(overrun) < count / 5
    assert sum(rule != REFUSED for _, rule, _ in pairs) > count / 2, "most were refused, so little was compared"


def overruns(header: MediaHeader, rule: Any) -> bool:
    """Does the processor's float arithmetic take a frame behind the last one for some even number of frames?"""
    steps = [header.frames / wanted for wanted in range(2, header.frames + 1, 2)]
    return any(math.ceil(header.frames / step) > round(header.frames / step) for step in steps)


@pytest.mark.parametrize(("name", "limits"), RUNS, ids=label)
def test_rule_equals_processor(name: str, limits: MediaLimits, cases: dict[str, Any]) -> None:
    compare(replace(cases[name], limits=limits), 50, seed=1)


@pytest.mark.more
@pytest.mark.parametrize(("name", "limits"), RUNS, ids=label)
def test_rule_equals_processor_on_many_videos(name: str, limits: MediaLimits, cases: dict[str, Any]) -> None:
    compare(replace(cases[name], limits=limits), 150, seed=2)


@pytest.mark.parametrize("name", WHOLE_CALLS)
def test_whole_call_writes_what_the_rule_says(name: str, cases: dict[str, Any]) -> None:
    """Pixels, tokenizer and all; decoding gives back the exact text."""
    case = cases[name]
    processor = case.make()
    family = case.rule(processor)
    pairs = []
    for frames, fps, width, height in (
        *((1, 30.0, 40, 30), (2, 24.0, 36, 36), (5, 12.5, 50, 20), (9, 8.0, 64, 48), (17, 2.43, 40, 40)),
        *((31, 29.97, 45, 60), (16, 1.0, 32, 24), (48, 24.0, 30, 30), (70, 23.976, 24, 32), (8, 60.0, 300, 20)),
    ):
        header = video(frames, fps, width, height)
        made = whole_video_call(processor, family, header)
        truth = made if isinstance(made, str) else (made[0], views_of(case, made[1], *PIXELS))
        pairs.append((header, by_rule(lambda h=header: family.video(h)), truth))
    if name.startswith("qwen2"):
        pairs = [pair for pair in pairs if pair[2] != REFUSED or not overruns(pair[0], pair[1])]
    assert differences(pairs) == []
    assert sum(truth != REFUSED for *_, truth in pairs) >= 5


def video(frames: int, fps: float, width: int = 64, height: int = 48) -> MediaHeader:
    return MediaHeader(kind="video", width=width, height=height, frames=frames, fps=fps, seconds=frames / fps)


def test_qwen2_sampling_stays_inside_the_video(cases: dict[str, Any]) -> None:
    """14 of 17 frames: the processor counts in floats, takes 15 positions and fails; the rule takes the 14."""
    case = cases["qwen2_vl"]
    processor = case.make()
    family = case.rule(processor)
    header = video(17, 2.4)
    assert whole_video_call(processor, family, header) == REFUSED
    assert family.video(header).frames == 14


@pytest.mark.parametrize("frames", [3, 5, 7, 9])
def test_qwen3_rounds_odd_numbers_of_frames_at_the_budget(frames: int, cases: dict[str, Any]) -> None:
    """An odd number is rounded to even, half to even, only when the pixels are compared with the budget."""
    case = replace(cases["qwen3_vl"], limits=MediaLimits(num_frames=frames))
    processor = case.make()
    family = case.rule(processor)
    side = math.sqrt(32 * 32 * 768 / frames)
    headers = [video(40, 8.0, round(side * part), round(side)) for part in np.linspace(0.6, 1.6, 60)]
    pairs = [(h, by_rule(lambda h=h: family.video(h)), real_video(case, processor, family, h)) for h in headers]
    assert differences(pairs) == []
    assert len({rule for _, rule, _ in pairs}) > 5


def test_qwen3_writes_the_time_of_each_frame_pair(cases: dict[str, Any]) -> None:
    case = cases["qwen3_vl"]
    text = written(case.rule(case.make()).video(video(48, 24.0)))
    assert text.count("<|vision_start|>") == text.count("<|vision_end|>") == text.count(" seconds>") == 2
    assert text.startswith("<0.3 seconds><|vision_start|><|video_pad|>")


def test_smolvlm_counts_frames_in_words(cases: dict[str, Any]) -> None:
    case = cases["smolvlm"]
    expansion = case.rule(case.make()).video(video(630, 30.0))
    text = written(expansion)
    assert expansion.frames == 21
    assert "series of twenty-one frames from a 0:00:21 [H:MM:SS] video" in text
    assert "Frame from 00:20:" in text


def test_smolvlm_names_the_package_that_it_lacks(cases: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["smolvlm"]
    rule = case.rule(case.make())
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(PacktrainError, match="pip install num2words"):
        rule.video(video(630, 30.0))


def test_largest_span_of_a_video_is_one_step(cases: dict[str, Any]) -> None:
    for name in ("qwen2_vl", "qwen3_vl", "internvl", "llava_onevision", "smolvlm"):
        expansion = cases[name].rule(cases[name].make()).video(video(48, 4.0))
        assert expansion.frames > 1
        assert expansion.max_patches * expansion.tiles == expansion.patches


@pytest.mark.parametrize("name", ["idefics3", "llava", "llava_next", "gemma3"])
def test_families_without_video_say_so(name: str, cases: dict[str, Any]) -> None:
    family = cases[name].rule(cases[name].make())
    assert "video" not in family.placeholders
    with pytest.raises(RecordError, match="takes no video"):
        family.video(video(10, 5.0))


def test_limits_that_the_processor_would_ignore_are_refused(cases: dict[str, Any]) -> None:
    """Qwen3-VL reads max_frames from its settings only; a fixed number of frames wins over fps in most processors."""
    fixed = replace(cases["internvl"], make=internvl(video={"num_frames": 4}))
    for case, limits, said in (
        (cases["qwen3_vl"], MediaLimits(max_frames=8), "max_frames"),
        (cases["internvl"], MediaLimits(fps=1.0, num_frames=8), "one of the two"),
        (fixed, MediaLimits(fps=1.0), "which wins"),
    ):
        processor = case.make()
        with pytest.raises(ConfigError, match=said):
            replace(case, limits=limits).rule(processor)


def test_videos_without_frames_or_rate_are_refused(cases: dict[str, Any]) -> None:
    family = cases["qwen3_vl"].rule(cases["qwen3_vl"].make())
    for header in (MediaHeader(kind="video", width=8, height=8, frames=0, fps=3.0), video(9, 3.0, width=0)):
        with pytest.raises(RecordError, match="without frames"):
            family.video(header)
    with pytest.raises(RecordError, match="without a frame rate"):
        family.video(MediaHeader(kind="video", width=8, height=8, frames=9))
