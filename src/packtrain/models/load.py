"""A model with its weights: from a folder or the hub as safetensors, or random for a tiny one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from packtrain.core import places
from packtrain.core.errors import ConfigError
from packtrain.models.tiny import PREFIX, build_model, resolve


def load_model(
    name_or_path: str,
    *,
    cache_dir: Path | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    random_weights: bool = False,
) -> Any:
    """The model in evaluation mode on the CPU. Tiny models are random; others only with `random_weights`."""
    folder = Path(name_or_path).expanduser()
    cache_dir = places.cache_dir() / "models" if cache_dir is None else cache_dir
    if name_or_path.startswith(PREFIX) or random_weights:
        return build_model(resolve(name_or_path, cache_dir), seed).to(dtype)
    if folder.is_dir():
        _require_weights(folder)
    else:
        resolve(name_or_path, cache_dir)  # says what is wrong with a name that is none
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    source = str(folder) if folder.is_dir() else name_or_path
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = auto.from_pretrained(source, dtype=dtype, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model {name_or_path!r}",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}",
            expected="a model that transformers can load without remote code",
        ) from error
    return model.eval()


def _require_weights(folder: Path) -> None:
    """Only safetensors: other formats can run code while they are read."""
    if any(folder.glob("*.safetensors")):
        return
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    raise ConfigError(
        str(folder),
        got=f"weights as {others[0]}" if others else "no weights",
        expected="*.safetensors",
        fix="save the model with save_pretrained(safe_serialization=True)"
        if others
        else "name a folder with weights, or tiny:FAMILY for a random model",
    )
