"""Whether a small model of an unlisted type works: it loads, sees its images, and takes text alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.bench.unlisted_models import CannotBuild, unlisted_types, write_unlisted
from packtrain.bench.unlisted_specs import NEEDS_IMAGES

SIZES = ((120, 80), (100, 160))  # width and height of the two images of the chat
_MOST_PARAMETERS = 5_000_000
_LEAST_EFFECT = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What was found out about one small model."""

    parameters: int
    image_tokens: int  # of the chat with both images
    effect: float  # the largest change of a logit when the pixels are others
    finite: bool  # all logits, also those of a chat without images where the processor takes one
    counts_image_tokens: bool  # refuses a row with one image token too few, but not one with less text
    has_rope_index: bool
    shapes: Mapping[str, tuple[int, ...]]  # of what the processor returned for the chat with both images

    @property
    def problem(self) -> str:
        """What is wrong, or nothing."""
        if self.parameters >= _MOST_PARAMETERS:
            return f"it has {self.parameters} parameters"
        if not self.finite:
            return "its logits are not finite"
        return "" if self.effect > _LEAST_EFFECT else "its logits do not depend on the pixels"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A processor and a model with random weights, from a folder."""

    processor: Any
    model: Any

    def encode(self, images: Sequence[Any]) -> Any:
        """A chat about these images as the model takes it; numbers in the model's own type, as its users make them."""
        chat = self.processor.apply_chat_template(
            conversation(images), tokenize=True, return_dict=True, return_tensors="pt"
        )
        return chat.to(dtype=self.model.dtype)

    def logits(self, inputs: Any) -> Any:
        """The logits of one forward pass."""
        import torch

        with torch.no_grad():
            return self.model(**inputs, use_cache=False).logits


def load_unlisted(folder: Path) -> Loaded:
    """Load a folder as any user of transformers would."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
        _open_gates(model)
    return Loaded(processor=processor, model=model)


def conversation(images: Sequence[Any]) -> list[dict[str, Any]]:
    """A question about images, and its answer."""
    shown = [{"type": "image", "image": image} for image in images]
    question = {"type": "text", "text": "What is in the picture?"}
    answer = {"type": "text", "text": "A red circle."}
    return [{"role": "user", "content": [*shown, question]}, {"role": "assistant", "content": [answer]}]


def try_unlisted(model_type: str, folder: Path) -> Trial:
    """Write a small model, load it and use it; raises CannotBuild, or whatever goes wrong on the way."""
    import torch

    loaded = load_unlisted(write_unlisted(model_type, folder))
    inputs, others = (loaded.encode([_noise(*size, seed=seed) for size in SIZES]) for seed in (0, 1))
    logits = loaded.logits(inputs)
    alone = loaded.logits(loaded.encode([] if model_type not in NEEDS_IMAGES else [_noise(*SIZES[0], seed=2)]))
    is_image = inputs["input_ids"][0] == image_token_id(loaded.model.config)
    return Trial(
        parameters=sum(weight.numel() for weight in loaded.model.parameters()),
        image_tokens=int(is_image.sum()),
        effect=float((logits - loaded.logits(others)).abs().max()),
        finite=bool(torch.isfinite(logits).all() and torch.isfinite(alone).all()),
        counts_image_tokens=_refuses(loaded, _without(inputs, int(is_image.nonzero()[0])))
        and not _refuses(loaded, _without(inputs, len(is_image) - 1)),
        has_rope_index=any(hasattr(module, "get_rope_index") for module in loaded.model.modules()),
        shapes={name: tuple(np.shape(value)) for name, value in inputs.items()},
    )


def image_token_id(config: Any) -> int:
    """The id of the token in whose place the model puts image features."""
    for name in ("image_token_id", "image_token_index", "image_patch_id"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    return int(config.vocabulary_map["<image>"])


def build_report() -> list[tuple[str, bool, str]]:
    """Of every unlisted type: its name, whether a small model builds and works, and if not, why."""
    report = []
    for model_type in unlisted_types():
        with tempfile.TemporaryDirectory() as folder:
            try:
                reason = try_unlisted(model_type, Path(folder)).problem
            except CannotBuild as error:
                reason = str(error)
            except Exception as error:  # of transformers, of any kind
                reason = f"{type(error).__name__}: {error}"
        report.append((model_type, not reason, reason))
    return report


def _noise(width: int, height: int, *, seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _open_gates(model: Any) -> None:
    """Gates that start at zero hide the images until training has opened them."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate") and not weight.any():
                weight.fill_(1.0)


def _without(inputs: Any, place: int) -> dict[str, Any]:
    """A row less the token at one place."""
    length = inputs["input_ids"].shape[1]
    keep = [index for index in range(length) if index != place]
    return {
        name: value[:, keep] if tuple(np.shape(value)[:2]) == (1, length) else value for name, value in inputs.items()
    }


def _refuses(loaded: Loaded, inputs: Mapping[str, Any]) -> bool:
    try:
        loaded.logits(inputs)
    except (ValueError, RuntimeError, IndexError):
        return True
    return False
