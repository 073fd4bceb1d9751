"""InternVL's sizes and parameters (its own ViT, squares of patches joined by two matrices), and a tiny one."""

from __future__ import annotations

from packtrain.core.errors import ConfigError
from packtrain.families.shape import (
    ENCODER_WHERE,
    Composition,
    Config,
    EncoderParts,
    Projector,
    Values,
    VisionEncoder,
    VisionTraits,
    vit_shape,
    vit_sizes,
)
from packtrain.families.tiny import (
    CHATML,
    IMAGENET_PIXELS,
    QWEN_TOKENS,
    TINY_VISION,
    Id,
    TemplateSpec,
    TinySpec,
    text_config,
)

_ENCODER = {
    **vit_sizes(1024, 4096, 24, 16, 448, 14),
    "norm_type": "layer_norm",
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}


def _encoder(config: Config) -> VisionEncoder:
    values = Values(config, _ENCODER, ENCODER_WHERE)
    shape, grid = vit_shape(values)
    parts = EncoderParts(
        patch_bias=True,
        positions=grid + 1 if values.flag("use_absolute_position_embeddings") else 0,
        extra_rows=1 + values.flag("use_mask_token"),
        query_bias=values.flag("attention_bias"),
        norm_size=1 if values.get("norm_type") == "rms_norm" else 2,
        layer_extras=2 + 2 * values.flag("use_qk_norm"),
        outer_norms=0 if values.flag("use_mean_pooling") else 1,
    )
    return VisionEncoder(shape=shape, parts=parts, grid=grid)


def _projector(config: Config, encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError("config.json: downsample_ratio", got=ratio, expected="a number above 0 and up to 1")
    merged = int(1 / ratio) ** 2
    inputs = encoder.shape.hidden * merged
    return Projector(matrices=((inputs, width, True), (width, width, True)), others=2 * inputs), merged


INTERNVL = Composition(
    text="qwen2",
    encoder="internvl_vision",
    encoders={"internvl_vision": _encoder},
    tied=True,
    projector=_projector,
    traits=VisionTraits(scaled=True, plain_softmax=True),
)

_TOKENS = {
    **QWEN_TOKENS,
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_SQUARE_448 = {"size": {"height": 448, "width": 448}, "resample": 3}
TINY_INTERNVL = TinySpec(
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
            **TINY_VISION,
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
