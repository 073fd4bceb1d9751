"""A model of random weights for a config: what tiny models and tests are trained from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.families.registry import find_family


def build_model(folder: str | Path, seed: int = 0) -> Any:
    """A random model for the folder's config.json, in fp32 and evaluation mode; the same seed, the same weights."""
    path = Path(folder) / "config.json"
    try:
        model_type = json.loads(path.read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            str(path), got=str(error), expected="a model's config.json", fix="use a model folder"
        ) from error
    family = find_family(str(model_type))
    if family is not None and not family.in_transformers:
        raise ConfigError(
            str(path),
            got=f"model type {model_type!r}",
            expected="a model type known to transformers",
            fix="measure, plan and pack work without the model",
        )
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    except ImportError as error:
        raise ConfigError("building a model", got=str(error), fix="pip install 'packtrain[train]'") from error
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32).eval()
        # Some matrices start at zero and wait for a checkpoint (Gemma3's projector: it would hide every image).
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():
                torch.nn.init.normal_(weight, std=0.1)
        return model
