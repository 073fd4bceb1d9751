"""Compares a family's rule with the real processor: the text it writes and the patches it makes, or its refusal.

The real preprocessing runs on meta tensors, which have sizes and no pixels, so thousands of large images are cheap.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.video_utils import VideoMetadata

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.family import Expansion, ProcessorSettings, Rule, Run
from packtrain.families.registry import load_rule

REFUSED = "refused"
Outcome = tuple[str, int] | str  # the text and the patches, or REFUSED
TRANSFORMER_REFUSALS = (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One real processor, and the settings and limits with which the rule has to agree with it."""

    family: str
    make: Callable[[], Any]
    processor_values: Mapping[str, Any] = field(default_factory=dict)
    patch: int = 14
    limits: MediaLimits = field(default_factory=MediaLimits)
    bare: bool = False  # leave the settings empty, so that the rule has to fill in the class defaults
    longest: int = 4000

    def rule(self, processor: Any) -> Rule:
        """The family under test, with the settings the processor would be saved with."""
        video = getattr(processor, "video_processor", None)
        settings = ProcessorSettings(
            folder="",
            model_type=self.family,
            processor=self.processor_values,
            image={} if self.bare else json.loads(processor.image_processor.to_json_string()),
            video={} if self.bare or video is None else json.loads(video.to_json_string()),
            config={"vision_config": {"patch_size": self.patch}},
            special_tokens={name: getattr(processor.tokenizer, name) for name in SPECIAL[self.family]},
        )
        family = load_rule(settings, self.limits)
        assert family is not None, f"no rule for {self.family}"
        return family


SPECIAL: dict[str, dict[str, str]] = {
    "qwen2_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "idefics3": {},
    "smolvlm": {"image_token": "<image>", "video_token": "<video>", "fake_image_token": "<fake_token_around_image>"},
    "llava": {"image_token": "<image>"},
    "llava_onevision": {"image_token": "<image>", "video_token": "<video>"},
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
}
SPECIAL["qwen2_5_vl"] = SPECIAL["qwen3_vl"] = SPECIAL["qwen2_vl"]
SPECIAL["llava_next"] = SPECIAL["llava"]


def tokenizer(family: str) -> Any:
    """A tokenizer that knows single bytes and the family's special tokens: decoding gives back the exact text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, extra_special_tokens=dict(SPECIAL[family]))


def qwen(number: str, video: Mapping[str, Any] | None = None, **image: Any) -> Callable[[], Any]:
    """A Qwen-VL processor of generation "2", "2_5" or "3"."""

    def make() -> Any:
        videos = transformers.Qwen3VLVideoProcessor if number == "3" else transformers.Qwen2VLVideoProcessor
        name = {"2": "Qwen2VLProcessor", "2_5": "Qwen2_5_VLProcessor", "3": "Qwen3VLProcessor"}[number]
        family = {"2": "qwen2_vl", "2_5": "qwen2_5_vl", "3": "qwen3_vl"}[number]
        image_processor = transformers.Qwen2VLImageProcessor(**image)
        return getattr(transformers, name)(image_processor, tokenizer(family), videos(**(video or {})))

    return make


def idefics3(tokens: int = 169, **image: Any) -> Callable[[], Any]:
    """An Idefics3 processor."""
    return lambda: transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(**image), tokenizer("idefics3"), image_seq_len=tokens
    )


def smolvlm(tokens: int = 169, video: Mapping[str, Any] | None = None, **image: Any) -> Callable[[], Any]:
    """A SmolVLM processor."""
    return lambda: transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(**image),
        tokenizer("smolvlm"),
        transformers.SmolVLMVideoProcessor(**(video or {})),
        image_seq_len=tokens,
    )


def llava(image_processor: str, values: Mapping[str, Any], **image: Any) -> Callable[[], Any]:
    """A LLaVA processor around one of the image processors it is used with."""
    return lambda: transformers.LlavaProcessor(
        getattr(transformers, image_processor)(**image), tokenizer("llava"), **values
    )


def llava_next(values: Mapping[str, Any], **image: Any) -> Callable[[], Any]:
    """A LLaVA-NeXT processor."""
    return lambda: transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(**image), tokenizer("llava_next"), **values
    )


def onevision(values: Mapping[str, Any], **image: Any) -> Callable[[], Any]:
    """A LLaVA-OneVision processor."""
    return lambda: transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(**image),
        tokenizer("llava_onevision"),
        transformers.LlavaOnevisionVideoProcessor(),
        **values,
    )


def internvl(tokens: int = 256, video: Mapping[str, Any] | None = None, **image: Any) -> Callable[[], Any]:
    """An InternVL processor."""
    return lambda: transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(**image),
        tokenizer("internvl"),
        transformers.InternVLVideoProcessor(**(video or {})),
        image_seq_length=tokens,
    )


def gemma3(tokens: int = 256, **image: Any) -> Callable[[], Any]:
    """A Gemma 3 processor."""
    return lambda: transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(**image), tokenizer("gemma3"), image_seq_length=tokens
    )


def written(expansion: Expansion) -> str:
    """The text that an expansion stands for."""
    return "".join(piece.token * piece.count if isinstance(piece, Run) else piece for piece in expansion.pieces)


def by_rule(call: Callable[[], Expansion]) -> Outcome:
    """What the rule says."""
    try:
        expansion = call()
    except RecordError:
        return REFUSED
    assert 0 < expansion.max_patches <= expansion.patches
    return written(expansion), expansion.patches


def image_kwargs(processor: Any, family: Rule, part: str) -> dict[str, Any]:
    """The arguments that a call of the whole processor hands to its image or video processor."""
    merged = processor._merge_kwargs(
        processor.valid_processor_kwargs,
        tokenizer_init_kwargs=processor.tokenizer.init_kwargs,
        **family.processor_kwargs(),
    )
    return {**merged[part], "return_tensors": "pt"}


def real_images(case: Case, processor: Any, family: Rule, sizes: Sequence[tuple[int, int]]) -> list[Outcome]:
    """What the image processor makes of one sample's images, without pixels."""
    images = [torch.empty(3, height, width, dtype=torch.uint8, device="meta") for width, height in sizes]
    try:
        made = processor.image_processor([images], **image_kwargs(processor, family, "images_kwargs"))
        if case.family == "llava":  # its processor looks at the pixels as numpy, which meta tensors cannot give
            made["pixel_values"] = [np.broadcast_to(np.float32(0), tuple(view.shape)) for view in made["pixel_values"]]
        texts = [processor.replace_image_token(made, image_idx=index) for index in range(len(sizes))]
    except TRANSFORMER_REFUSALS:
        return [REFUSED] * len(sizes)
    return list(zip(texts, patches_of(case, made, len(sizes)), strict=True))


def patches_of(case: Case, made: Mapping[str, Any], images: int) -> list[int]:
    """Rows of the vision encoder for each image; where only a sum is known, for a sample of one image."""
    if "image_grid_thw" in made:
        grids = [int(grid.prod()) for grid in made["image_grid_thw"]]
        assert sum(grids) == made["pixel_values"].shape[0]
        return grids
    pixels = made["pixel_values"]
    height, width = (pixels[0] if isinstance(pixels, list) else pixels).shape[-2:]
    per_view = (height // case.patch) * (width // case.patch)
    if "rows" in made:
        rows, columns = made["rows"][0], made["cols"][0]
        views = [row * column + 1 for row, column in zip(rows, columns, strict=True)]
        assert sum(views) == pixels.shape[1]
    elif "num_patches" in made:
        views = [int(number) for number in made["num_patches"]]
    elif "num_crops" in made:
        views = [int(number) + 1 for number in made["num_crops"]]
    elif "image_sizes" in made:
        views = [int(view.shape[0]) for view in pixels] if images == 1 else [1] * images
    else:
        views = [1] * images
    return [view * per_view for view in views]


def real_video(case: Case, processor: Any, family: Rule, header: MediaHeader) -> Outcome:
    """What the video processor makes of one video, without pixels."""
    video = torch.empty(header.frames, 3, header.height, header.width, dtype=torch.uint8, device="meta")
    kwargs = {**image_kwargs(processor, family, "videos_kwargs"), "return_metadata": True}
    try:
        made = processor.video_processor([video], video_metadata=[metadata_of(header)], **kwargs)
        indices = made["video_metadata"][0].frames_indices  # None where all frames are taken
        if indices is not None and max(indices) >= header.frames:  # meta tensors do not look; those with pixels raise
            return REFUSED
        text = processor.replace_video_token(made, video_idx=0)
    except TRANSFORMER_REFUSALS:
        return REFUSED
    return text, video_patches(case, made)


def video_patches(case: Case, made: Mapping[str, Any]) -> int:
    """Rows of the vision encoder for the only video."""
    if "video_grid_thw" in made:
        return int(made["video_grid_thw"][0].prod())
    pixels = made["pixel_values_videos"] if "pixel_values_videos" in made else made["pixel_values"]
    frames, (height, width) = pixels.shape[1], pixels.shape[-2:]
    return int(frames * (height // case.patch) * (width // case.patch))


def metadata_of(header: MediaHeader) -> VideoMetadata:
    """A header in transformers' words."""
    return VideoMetadata(
        total_num_frames=header.frames,
        fps=header.fps,
        width=header.width,
        height=header.height,
        duration=header.seconds,
    )


def image_header(width: int, height: int) -> MediaHeader:
    """The header of an image."""
    return MediaHeader(kind="image", width=width, height=height)


def differences(pairs: Iterable[tuple[object, Outcome, Outcome]]) -> list[str]:
    """One line for each (what, by rule, in truth) that does not agree."""
    return [f"{what}: rule {_short(rule)}, processor {_short(truth)}" for what, rule, truth in pairs if rule != truth]


def _short(outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return outcome
    text, patches = outcome
    return f"{patches} patches, {len(text)} characters {text[:60]!r}"


def image_sizes(count: int, longest: int = 4000, seed: int = 0) -> list[tuple[int, int]]:
    """Seeded (width, height): anything, extreme ratios, single pixels, edges of patches and tiles, squares."""
    draw = random.Random(seed)
    multiples = (14, 16, 28, 32, 224, 336, 364, 384, 512)
    fixed = [(1, 1), (1, 2), (2, 1), (longest, 1), (1, longest), (longest, longest), (364, 273), (200, 1), (201, 1)]
    fixed += [(1000, 400), (1050, 300), (1001, 400)]  # halves, where numbers of crops are rounded
    fixed += [(1000, 334), (334, 1000), (1000, 667), (667, 1000)]  # a tile's edge after rounding to even, then down

    def near() -> int:
        base = draw.choice(multiples)
        return min(longest, max(1, base * draw.randint(1, max(1, longest // base)) + draw.choice((-1, 0, 1))))

    def one() -> tuple[int, int]:
        kind = draw.randrange(5)
        if kind == 0:
            return draw.randint(1, longest), draw.randint(1, longest)
        if kind == 1:
            sides = (draw.randint(1, longest), draw.randint(1, 12))
            return sides if draw.random() < 0.5 else sides[::-1]
        if kind == 2:
            return near(), near()
        if kind == 3:
            side = draw.choice((near(), draw.randint(1, longest)))
            return side, side
        side = draw.randint(1, 800)
        return side, max(1, min(longest, round(side * draw.choice((0.4, 0.5, 0.75, 1.2, 1.5, 16 / 9, 2.5, 3.5)))))

    return fixed[:count] + [one() for _ in range(count - len(fixed))]


def video_headers(count: int, seed: int = 0) -> Iterator[MediaHeader]:
    """Seeded videos: one frame to some thousand, odd rates, small and large sides."""
    draw = random.Random(seed)
    for number in range(count):
        frames = draw.choice((draw.randint(1, 12), draw.randint(1, 200), draw.randint(1, 4000)))
        fps = draw.choice((1.0, 12.0, 15.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0, draw.uniform(0.5, 60)))
        width, height = draw.choice(((1920, 1080), (640, 480), (draw.randint(1, 2000), draw.randint(1, 2000))))
        seconds = frames / fps if number % 3 else frames / fps + draw.uniform(0, 0.1)
        yield MediaHeader(kind="video", width=width, height=height, frames=frames, fps=fps, seconds=seconds)


def whole_image_call(processor: Any, family: Rule, sizes: Sequence[tuple[int, int]]) -> tuple[str, Any] | str:
    """The decoded text and the tensors of a full call on black images."""
    images = [Image.new("RGB", size) for size in sizes]
    try:
        made = processor(
            text=[family.placeholders["image"] * len(sizes)],
            images=[images],
            return_tensors="pt",
            **family.processor_kwargs(),
        )
    except TRANSFORMER_REFUSALS:
        return REFUSED
    return decoded(processor, made), made


def whole_video_call(processor: Any, family: Rule, header: MediaHeader) -> tuple[str, Any] | str:
    """The decoded text and the tensors of a full call on black frames."""
    frames = np.zeros((header.frames, header.height, header.width, 3), dtype=np.uint8)
    kwargs = family.processor_kwargs()
    kwargs.setdefault("videos_kwargs", {})["video_metadata"] = [metadata_of(header)]
    try:
        made = processor(text=[family.placeholders["video"]], videos=[[frames]], return_tensors="pt", **kwargs)
    except TRANSFORMER_REFUSALS:
        return REFUSED
    return decoded(processor, made), made


def decoded(processor: Any, made: Mapping[str, Any]) -> str:
    """The exact text behind the only row of input_ids."""
    ids = made["input_ids"][0]
    return str(processor.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def views_of(case: Case, made: Mapping[str, Any], *names: str) -> int:
    """Rows of the vision encoder in the tensors of a full call."""
    pixels = next(made[name] for name in names if name in made)
    if pixels.ndim == 2:  # already one row per patch
        return int(pixels.shape[0])
    height, width = pixels.shape[-2:]
    return int(np.prod(pixels.shape[:-3])) * (height // case.patch) * (width // case.patch)
