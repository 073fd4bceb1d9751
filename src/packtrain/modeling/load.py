"""A model with its weights: from a folder or the hub as safetensors, or random for a tiny one; in 4 bits on request."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packtrain.core import cache_root as places
from packtrain.core.errors import ConfigError, in_one_line
from packtrain.families.model_folder import PREFIX, resolve
from packtrain.modeling.four_bits import keep_four_bits
from packtrain.modeling.model_parts import decoder_layers
from packtrain.modeling.pretrained import ADAPTER_CONFIG, WeightsError, from_pretrained
from packtrain.modeling.random_model import build_model


def load_model(
    name_or_path: str,
    *,
    cache_dir: Path | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    random_weights: bool = False,
    quantize: bool = False,
) -> Any:
    """The model in evaluation mode on the CPU. Tiny models are random; others only with `random_weights`.

    `quantize` loads the matrices of the decoder's layers in 4 bits, as QLoRA trains them, on the GPU where there is
    one; everything else of the model has `dtype`.
    """
    if quantize:
        _require_bitsandbytes()
    folder = Path(name_or_path).expanduser()
    cache_dir = places.cache_dir() / "models" if cache_dir is None else cache_dir
    if name_or_path.startswith(PREFIX) or random_weights:
        made = build_model(resolve(name_or_path, cache_dir), seed).to(dtype)
        return quantize_random(made, cache_dir, dtype) if quantize else made
    if folder.is_dir():
        require_weights(folder)
    else:
        resolve(name_or_path, cache_dir)  # says what is wrong with a name that is none
    return _from_pretrained(str(folder) if folder.is_dir() else name_or_path, name_or_path, dtype, quantize)


def _from_pretrained(source: str, name: str, dtype: torch.dtype, quantize: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        more = _four_bits(auto, config, dtype) if quantize else {}
        model = from_pretrained(auto, source, unused=True, dtype=dtype, **more)
    except (WeightsError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model {name!r}",
            got=str(error) if isinstance(error, WeightsError) else in_one_line(error),
            expected="a model that transformers can load without remote code, with all weights",
        ) from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _with_adapters(name)
    keep_four_bits(model)
    return model.eval()


def require_weights(folder: Path) -> None:
    """Refuse a folder without weights to load. Only safetensors: other formats can run code while they are read."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise _with_adapters(str(folder))
    if any(folder.glob("*.safetensors")):
        return
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    raise ConfigError(
        str(folder),
        got=f"weights as {others[0]}" if others else "no weights",
        expected="*.safetensors",
        fix="save the model with save_pretrained(safe_serialization=True)"
        if others
        else "use a folder with weights, or tiny:FAMILY for a random model",
    )


def _with_adapters(name: str) -> ConfigError:
    """Transformers would add the adapters to the model, and save them alone, whatever of it is trained."""
    return ConfigError(
        name,
        got=f"adapters ({ADAPTER_CONFIG})",
        expected="a model without adapters",
        fix="merge them into their model (PeftModel.from_pretrained(MODEL, ADAPTERS).merge_and_unload(), then "
        "save_pretrained; a run does it with merge_adapters: true) and use the merged model; if they do not belong "
        f"here, remove {ADAPTER_CONFIG}",
    )


# ---- in 4 bits


def _require_bitsandbytes() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.method qlora",
            got="bitsandbytes is not installed",
            expected="the package that stores weights in 4 bits",
            fix="pip install 'packtrain[qlora]', or use the method lora",
        )


def _four_bits(auto: Any, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of from_pretrained for weights in 4 bits."""
    from transformers import BitsAndBytesConfig

    if getattr(config, "quantization_config", None):
        raise ConfigError(
            "model.method qlora",
            got="already quantized weights",
            expected="a checkpoint in bf16, fp16 or fp32",
            fix="use the original model; it is quantized while loading",
        )
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=_kept_whole(auto, config),
    )
    # Ranks of one machine that have not chosen their GPU yet would all take the first one.
    place = int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.is_available() else "cpu"
    return {"quantization_config": settings, "device_map": {"": place}}


def _kept_whole(auto: Any, config: Any) -> list[str]:
    """Patterns for every linear map outside the decoder's layers: encoder, projector and head."""
    with torch.device("meta"):
        model = auto.from_config(config)
    layers = {id(module) for module in decoder_layers(model).modules()}
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in layers
    ]
    return sorted({re.escape(name) + "$" for name in names})


def quantize_random(model: Any, cache_dir: Path, dtype: torch.dtype) -> Any:
    """Weights are quantised while they are loaded, so a random model is saved first."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=".quantize-", dir=cache_dir)
    try:
        model.should_save_on_this_rank = lambda _: True  # each has a folder of its own, not only the first
        model.save_pretrained(folder)
        return _from_pretrained(folder, model.config.model_type, dtype, quantize=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
