"""The table of families: entries load, pickle and keep the protocol; what no rule covers is left to the processor."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys

import pytest

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.family import ProcessorSettings, Rule, TextOnly
from packtrain.families.registry import BUILT_IN, all_families, load_rule

IMAGE = MediaHeader(kind="image", width=640, height=480)
VIDEO = MediaHeader(kind="video", width=640, height=480, frames=40, fps=8.0, seconds=5.0)
RULES = {name: family.rule for name, family in all_families().items() if family.rule is not None}
WITH_IMAGES = sorted(name for name, rule in RULES.items() if rule is not TextOnly)


def settings(model_type: str, **parts: object) -> ProcessorSettings:
    return ProcessorSettings(folder="", model_type=model_type, **parts)  # type: ignore[arg-type]


NO_LIMITS = MediaLimits()


def load(model_type: str, limits: MediaLimits = NO_LIMITS, **parts: object) -> Rule:
    family = load_rule(settings(model_type, **parts), limits)
    assert family is not None
    return family


@pytest.mark.parametrize("model_type", RULES)
def test_entries_load_and_keep_the_protocol(model_type: str) -> None:
    family = RULES[model_type]
    for verb in ("__init__", "image", "video", "processor_kwargs"):
        expected = list(inspect.signature(getattr(Rule, verb)).parameters)
        assert list(inspect.signature(getattr(family, verb)).parameters) == expected, verb
    made = load(model_type)
    assert isinstance(made.processor_kwargs(), dict)
    assert set(made.placeholders) <= {"image", "video"}


@pytest.mark.parametrize("model_type", WITH_IMAGES)
def test_names_are_model_types(model_type: str) -> None:
    assert load(model_type).name == model_type


@pytest.mark.parametrize("model_type", WITH_IMAGES)
def test_families_pickle_small_and_answer_the_same(model_type: str) -> None:
    family = load(model_type)
    data = pickle.dumps(family)
    again = pickle.loads(data)
    assert len(data) < 4000
    assert again.image(IMAGE, 1) == family.image(IMAGE, 1)
    if "video" in family.placeholders:
        assert again.video(VIDEO) == family.video(VIDEO)


@pytest.mark.parametrize("model_type", WITH_IMAGES)
def test_images_without_pixels_are_refused(model_type: str) -> None:
    with pytest.raises(RecordError, match="image without pixels"):
        load(model_type).image(MediaHeader(kind="image", width=0, height=5), 1)


@pytest.mark.parametrize("model_type", WITH_IMAGES)
def test_arguments_for_the_processor_are_fresh_each_time(model_type: str) -> None:
    """A caller that adds to them changes no later call."""
    family = load(model_type)
    family.processor_kwargs().setdefault("videos_kwargs", {})["num_frames"] = 99
    assert "99" not in str(family.processor_kwargs())


def test_text_models_take_no_media() -> None:
    for model_type in ("llama", "gemma3_text", "qwen2_5_vl_text", "text", "a_model_of_next_year"):
        family = load(model_type)
        assert isinstance(family, TextOnly)
        with pytest.raises(RecordError, match="takes no image"):
            family.image(IMAGE, 1)
        with pytest.raises(RecordError, match="takes no video"):
            family.video(VIDEO)
    with pytest.raises(ConfigError, match="max_pixels"):
        load("llama", MediaLimits(max_pixels=5))


def test_processors_without_a_rule_are_left_to_the_processor() -> None:
    unknown = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}}
    assert load_rule(settings("pixtral", image=unknown), MediaLimits()) is None
    assert load_rule(settings("some_audio_model", image={"feature_extractor_type": "Whisper"}), MediaLimits()) is None
    assert load_rule(settings("llava", image=unknown), MediaLimits()) is None
    assert load_rule(settings("qwen2_vl", image={"do_resize": False}), MediaLimits()) is None


def test_fast_and_slow_image_processors_share_the_rule() -> None:
    for name in ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"):
        assert load("qwen2_vl", image={"image_processor_type": name}).image(IMAGE, 1).patches == 34 * 46


def test_older_pixel_names_win_over_size() -> None:
    """Checkpoints from before `size` had pixel bounds carry min_pixels and max_pixels."""
    size = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    small = load("qwen2_vl", image={"size": size, "max_pixels": 50_176}).image(IMAGE, 1)
    assert small.patches * 14 * 14 <= 50_176
    assert load("qwen2_vl", image={"size": size}).image(IMAGE, 1).patches > small.patches


def test_patch_side_comes_from_processor_config_or_publication() -> None:
    vision = {"model_type": "siglip_vision_model"}
    assert load("llava").image(IMAGE, 1).patches == (224 // 14) ** 2
    assert load("llava", config={"vision_config": vision}).image(IMAGE, 1).patches == (224 // 16) ** 2
    assert load("llava", config={"vision_config": {"patch_size": 28}}).image(IMAGE, 1).patches == (224 // 28) ** 2
    both = load("llava", config={"vision_config": {"patch_size": 28}}, processor={"patch_size": 7})
    assert both.image(IMAGE, 1).patches == (224 // 7) ** 2
    assert load("internvl", config={"vision_config": {"patch_size": [16, 16]}}).image(IMAGE, 1).max_patches == 24**2


def test_a_video_without_settings_borrows_the_images() -> None:
    """As transformers does for folders that have one preprocessor file only."""
    borrowed = load("qwen2_vl", image={"max_pixels": 100_352, "min_pixels": 3136})
    own = load("qwen2_vl", image={"max_pixels": 100_352}, video={"fps": 2})
    assert borrowed.video(VIDEO).patches < own.video(VIDEO).patches


def test_no_family_imports_torch_or_transformers() -> None:
    code = "import sys; from packtrain.families.registry import all_families as f; print(len(f()), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *loaded = done.stdout.split()
    assert int(count) == len(all_families())
    assert set(BUILT_IN) <= set(loaded)
    assert not {"torch", "transformers"} & set(loaded)


def test_every_listed_model_type_is_described_where_its_line_says() -> None:
    for path, names in BUILT_IN.items():
        assert set(importlib.import_module(path).FAMILIES) == set(names)
    for name, family in all_families().items():
        assert family.model_type == name
        assert not (family.contract and family.contract.media) or family.small_image is not None
