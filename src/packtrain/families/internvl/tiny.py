"""The tiny InternVL."""

from __future__ import annotations

from packtrain.families.tiny.parts import IMAGENET_PIXELS, QWEN_TOKENS, VISION, Id, TinySpec, text_config
from packtrain.families.tiny.templates import CHATML, TemplateSpec

_TOKENS = {
    **QWEN_TOKENS,
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_SQUARE_448 = {"size": {"height": 448, "width": 448}, "resample": 3}
INTERNVL = TinySpec(
    tokens=_TOKENS,
    special=("<|im_start|>",),
    template=TemplateSpec(dialect=CHATML, image="<IMG_CONTEXT>\n", video="<video>\n"),
    config={
        "model_type": "internvl",
        "image_token_id": Id("<IMG_CONTEXT>"),
        "image_seq_length": 256,
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": text_config("qwen2", _TOKENS),
        "vision_config": {
            "model_type": "internvl_vision",
            **VISION,
            "image_size": [448, 448],
            "patch_size": [14, 14],
        },
    },
    processor={
        "processor_class": "InternVLProcessor",
        "image_seq_length": 256,
        "image_processor": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
            **_SQUARE_448,
            **IMAGENET_PIXELS,
        },
        "video_processor": {"video_processor_type": "InternVLVideoProcessor", **_SQUARE_448, **IMAGENET_PIXELS},
    },
)
