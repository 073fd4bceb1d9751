"""The defaults that rules fill in are those of transformers' classes, and processor_kwargs apply the same limits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

import numpy as np
import transformers
from PIL import Image
from rule_checks import Case, decoded, image_header, metadata_of, written

from packtrain.core.errors import ConfigError
from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.gemma3 import rule as gemma3
from packtrain.families.idefics3 import rule as idefics3
from packtrain.families.internvl import rule as internvl
from packtrain.families.llava import rule as llava
from packtrain.families.qwen_vl import rule as qwen_vl

pytestmark = pytest.mark.contract

ASSUMED: list[tuple[str, Mapping[str, Any]]] = [
    ("Qwen2VLImageProcessor", qwen_vl.IMAGE_DEFAULTS),
    ("Qwen2VLVideoProcessor", qwen_vl.QWEN2_VIDEO_DEFAULTS),
    ("Qwen3VLVideoProcessor", qwen_vl.QWEN3_VIDEO_DEFAULTS),
    ("Idefics3ImageProcessor", idefics3.IMAGE_DEFAULTS),
    ("SmolVLMImageProcessor", idefics3.IMAGE_DEFAULTS),
    ("SmolVLMVideoProcessor", idefics3.VIDEO_DEFAULTS),
    ("CLIPImageProcessor", llava.CLIP_DEFAULTS),
    ("LlavaImageProcessor", llava.LLAVA_PROCESSORS["LlavaImageProcessor"]),
    ("SiglipImageProcessor", llava.SIGLIP_DEFAULTS),
    ("LlavaNextImageProcessor", llava.NEXT_DEFAULTS),
    ("LlavaOnevisionImageProcessor", llava.ONEVISION_DEFAULTS),
    ("LlavaOnevisionVideoProcessor", llava.ONEVISION_VIDEO_DEFAULTS),
    ("GotOcr2ImageProcessor", internvl.IMAGE_DEFAULTS),
    ("InternVLVideoProcessor", internvl.VIDEO_DEFAULTS),
    ("Gemma3ImageProcessor", gemma3.IMAGE_DEFAULTS),
]


@pytest.mark.parametrize(("name", "assumed"), ASSUMED, ids=[name for name, _ in ASSUMED])
def test_assumed_defaults_are_the_class_attributes(name: str, assumed: Mapping[str, Any]) -> None:
    real = getattr(transformers, name)
    assert {key: plain(getattr(real, key, None) or False) for key in assumed} == {
        key: plain(value or False) for key, value in assumed.items()
    }


def plain(value: Any) -> Any:
    return [list(row) for row in value] if isinstance(value, list) else value


def test_classes_assumed_to_have_no_sampling_have_none() -> None:
    """Where they had, the rule's fallback would have to give way."""
    for name in ("Qwen2VLVideoProcessor", "SmolVLMVideoProcessor", "InternVLVideoProcessor"):
        made = getattr(transformers, name)()
        assert (made.fps, made.num_frames) == (None, None), name


def test_no_class_caps_pixels_by_default() -> None:
    for name in ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"):
        assert not getattr(getattr(transformers, name)(), "cap_pixels_per_frame", None), name


def test_sequence_lengths_and_call_defaults() -> None:
    from inspect import signature

    def default(processor: str, parameter: str) -> Any:
        return signature(getattr(transformers, processor).__init__).parameters[parameter].default

    assert default("Idefics3Processor", "image_seq_len") == idefics3.IMAGE_SEQ_LEN
    assert default("SmolVLMProcessor", "image_seq_len") == idefics3.IMAGE_SEQ_LEN
    assert default("InternVLProcessor", "image_seq_length") == internvl.IMAGE_SEQ_LENGTH
    assert default("Gemma3Processor", "image_seq_length") == gemma3.IMAGE_SEQ_LENGTH
    assert default("LlavaOnevisionProcessor", "vision_aspect_ratio") == "anyres_max_9"
    scan = transformers.Gemma3Processor.valid_processor_kwargs._defaults["images_kwargs"]
    assert {name: scan[name] for name in gemma3.CALL_DEFAULTS} == gemma3.CALL_DEFAULTS
    assert transformers.InternVLProcessor.valid_processor_kwargs._defaults["images_kwargs"]["crop_to_patches"] is True


def test_patch_sides_that_a_saved_config_leaves_out() -> None:
    side = {
        "Idefics3VisionConfig": idefics3.CONFIG_PATCH,
        "SmolVLMVisionConfig": idefics3.CONFIG_PATCH,
        "CLIPVisionConfig": llava.CONFIG_PATCH["clip_vision_model"],
        "SiglipVisionConfig": llava.CONFIG_PATCH["siglip_vision_model"],
        "InternVLVisionConfig": internvl.PATCH,
    }
    for name, assumed in side.items():
        module = {"Idefics3VisionConfig": "idefics3", "SmolVLMVisionConfig": "smolvlm"}.get(name)
        owner = getattr(transformers.models, module) if module else transformers
        real = getattr(owner, name)().patch_size
        assert (real[0] if isinstance(real, (list, tuple)) else real) == assumed, name
    assert side["SiglipVisionConfig"] == gemma3.CONFIG_PATCH


LIMITED = [
    ("qwen2_vl", MediaLimits(max_pixels=50_176, min_pixels=12_544, fps=1.0, max_frames=6)),
    ("qwen2_5_vl", MediaLimits(max_pixels=50_176, num_frames=4)),
    ("qwen3_vl", MediaLimits(min_pixels=200_000, num_frames=6)),
    ("idefics3", MediaLimits(max_img_size=728)),
    ("smolvlm", MediaLimits(max_img_size=512, num_frames=3)),
    ("smolvlm", MediaLimits(fps=0.5)),
    ("llava_onevision", MediaLimits(num_frames=3)),
    ("internvl", MediaLimits(fps=1.0)),
    ("gemma3-scan-small", MediaLimits()),
]


@pytest.mark.parametrize(("name", "limits"), LIMITED, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_chat_template_call_applies_the_limits(name: str, limits: MediaLimits, cases: dict[str, Any]) -> None:
    """The way training calls the processor: apply_chat_template with the family's processor_kwargs."""
    case = replace(cases[name], limits=limits)
    processor = case.make()
    family = case.rule(processor)
    assert chat(processor, family, "image", Image.new("RGB", (300, 200)), {}) == "say " + written(
        family.image(image_header(300, 200), 1)
    )
    if "video" in family.placeholders:
        header = MediaHeader(kind="video", width=40, height=30, frames=18, fps=4.0, seconds=4.5)
        frames = np.zeros((18, 30, 40, 3), dtype=np.uint8)
        found = chat(processor, family, "video", frames, {"video_metadata": [metadata_of(header)]})
        assert found == "say " + written(family.video(header))


def chat(processor: Any, family: Any, kind: str, medium: Any, videos: dict[str, Any]) -> str:
    kwargs = copy.deepcopy(family.processor_kwargs())
    if videos:
        kwargs.setdefault("videos_kwargs", {}).update(videos)
    content = [{"type": "text", "text": "say "}, {"type": kind, kind: medium}]
    mark = family.placeholders[kind]
    made = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=f"say {mark}",
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=kwargs,
    )
    return decoded(processor, made)


@pytest.mark.parametrize(("name", "limits"), LIMITED, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_limits_leave_no_trace_in_the_processor(name: str, limits: MediaLimits, cases: dict[str, Any]) -> None:
    """A limited call must not change what a later call without limits does."""
    free: Case = replace(cases[name], limits=MediaLimits())
    processor = free.make()
    before = [written(free.rule(processor).image(image_header(700, 300), 1))]
    limited = replace(free, limits=limits).rule(processor)
    chat(processor, limited, "image", Image.new("RGB", (700, 300)), {})
    after = chat(processor, free.rule(processor), "image", Image.new("RGB", (700, 300)), {})
    assert after == "say " + before[0]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("llava", MediaLimits(max_pixels=1000)),
        ("llava_next", MediaLimits(max_img_size=1000)),
        ("gemma3", MediaLimits(num_frames=3)),
        ("internvl", MediaLimits(max_pixels=1000)),
        ("idefics3", MediaLimits(fps=1.0)),
        ("qwen2_vl", MediaLimits(max_img_size=1000)),
    ],
)
def test_limits_without_a_setting_are_refused(name: str, limits: MediaLimits, cases: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="limit"):
        replace(cases[name], limits=limits).rule(cases[name].make())


def test_image_processors_own_pan_and_scan_is_ignored(cases: dict[str, Any]) -> None:
    """The processor switches it off at every call; only a call can switch it on."""
    case = cases["gemma3"]
    processor = case.make()
    assert processor.image_processor.do_pan_and_scan is True
    assert case.rule(processor).image(image_header(2000, 700), 1).tiles == 1
    assert case.rule(processor).processor_kwargs() == {}
