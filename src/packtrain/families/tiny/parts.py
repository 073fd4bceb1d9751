"""What a tiny model is made of, and the pieces of data that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packtrain.families.tiny.templates import TemplateSpec


@dataclass(frozen=True, slots=True)
class Id:
    """Stands in a config for the id of a token, known only once the tokenizer is made."""

    token: str


@dataclass(frozen=True, slots=True)
class VocabularySize:
    """Stands in a config for the number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySpec:
    """Everything that makes the folder of one tiny model."""

    tokens: Mapping[str, str]  # special tokens by the name that processors know them by
    special: tuple[str, ...] = ()  # further special tokens, without a name
    added: tuple[str, ...] = ()  # tokens that are never split, yet are not special
    adds_bos: bool = False  # the tokenizer itself puts bos in front
    template: TemplateSpec
    config: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)  # empty: a model of text only


def _mean_std(mean: list[float], std: list[float]) -> dict[str, Any]:
    return {"image_mean": mean, "image_std": std}


CLIP_PIXELS = _mean_std([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF_PIXELS = _mean_std([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
IMAGENET_PIXELS = _mean_std([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
QWEN_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
THINK = ("<think>", "</think>")

WIDTH = 64
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# Weights five times as large as usual: at this width attention is otherwise nearly uniform, and a sample that wrongly
# sees its neighbour would hardly show it.
WEIGHTS = {"initializer_range": 0.1}
_TEXT = {
    "vocab_size": VocabularySize(),
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    **_HEADS,
    **WEIGHTS,
    "max_position_embeddings": 32768,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **WEIGHTS}


def token_ids(tokens: Mapping[str, str], *names: str) -> dict[str, Any]:
    """The config entries for the ids of some named tokens: bos -> bos_token_id."""
    return {f"{name}_token_id": Id(tokens[f"{name}_token"]) for name in names}


def text_config(model_type: str, tokens: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """The config of a small decoder."""
    absent = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}
    present = [name for name in ("bos", "eos", "pad") if f"{name}_token" in tokens]
    return {
        "model_type": model_type,
        **_TEXT,
        "head_dim": 16,
        "rope_parameters": _ROPE,
        **absent,
        **token_ids(tokens, *present),
        "tie_word_embeddings": False,
        **more,
    }
