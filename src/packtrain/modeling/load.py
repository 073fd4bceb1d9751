"""A model with its weights: from a folder or the hub as safetensors, or random for a tiny one; in 4 bits on request.

Transformers' `from_pretrained` is lenient: a weight that a folder lacks would be drawn at random. `Trainer` resumes by
`load_state_dict(strict=False)`, and some models are saved under other names than their modules have (those of the
model's first release), so that nearly every weight would stay as it was, without a word; and it ignores what peft says
about missing adapters. Here all weights are loaded, or it is an error.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from packtrain.core import cache_root as places
from packtrain.core.errors import ArtifactError, ConfigError, in_one_line
from packtrain.families.model_folder import PREFIX, resolve_model
from packtrain.families.registry import find_family
from packtrain.modeling.model_parts import decoder_layers
from packtrain.modeling.patches import is_on, put

ADAPTER_CONFIG = "adapter_config.json"  # of peft: its folder has adapters
_ADAPTERS = "adapter_model.safetensors"
_MAIN_ADAPTER = "default"  # peft saves others in folders of their names
# Of a peft config: what decides which numbers there are and what is computed with them.
_COMPARED = (
    *("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "use_dora"),
    *("use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules"),
)
_RESUME_ELSEWHERE = "resume from another checkpoint, or start without resuming"
_REPACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' layers
_REPACKED = "packing_format_for_cpu"  # of what describes their weights


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
        made = build_model(resolve_model(name_or_path, cache_dir), seed).to(dtype)
        return quantize_random(made, cache_dir, dtype) if quantize else made
    if folder.is_dir():
        require_weights(folder)
    else:
        resolve_model(name_or_path, cache_dir)  # says what is wrong with a name that is none
    return _from_pretrained(str(folder) if folder.is_dir() else name_or_path, name_or_path, dtype, quantize)


def _from_pretrained(source: str, name: str, dtype: torch.dtype, quantize: bool) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        auto = auto_class(config.model_type)
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


def auto_class(model_type: str) -> Any:
    """The class of transformers that makes models of this type."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    sees = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


class WeightsError(Exception):
    """What is wrong with saved weights, in one line."""


def from_pretrained(loader: Any, source: str, *, unused: bool, **options: Any) -> Any:
    """A model with all of its weights as they were saved. `unused`: weights that it has no place for may lie beside."""
    try:
        model, report = loader.from_pretrained(
            source, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise WeightsError(in_one_line(error)) from error
    wrong = {kind: names for kind, names in report.items() if names and not (unused and kind == "unexpected_keys")}
    if wrong:
        raise WeightsError("; ".join(in_words(kind, sorted(map(str, names))) for kind, names in wrong.items()))
    return model


def in_words(kind: str, names: list[str]) -> str:
    """What is wrong with weights of these names; the first ones stand for all."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{kind.replace('_', ' ')}: {', '.join(names[:3])}{more}"


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
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError("building a model", got=str(error), fix="pip install 'packtrain[train]'") from error
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config.model_type).from_config(config, dtype=torch.float32).eval()
        # Some matrices start at zero and wait for a checkpoint (Gemma3's projector: it would hide every image).
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():
                torch.nn.init.normal_(weight, std=0.1)
        return model


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
        llm_int8_skip_modules=_modules_kept_whole(auto, config),
    )
    # Ranks of one machine that have not chosen their GPU yet would all take the first one.
    place = int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.is_available() else "cpu"
    return {"quantization_config": settings, "device_map": {"": place}}


def _modules_kept_whole(auto: Any, config: Any) -> list[str]:
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


def keep_four_bits(model: Any) -> None:
    """Stop bitsandbytes from storing weights in another form when a model is run in evaluation mode on a CPU.

    It does so on CPUs with avx512_bf16. That form is for inference alone: it rounds to bf16, and backward passes read
    it as if it were the usual one.
    """
    for name, module in model.named_modules():
        if not hasattr(module, _REPACKS):
            continue
        if getattr(getattr(module.weight, "quant_state", None), _REPACKED, False):
            raise ConfigError(
                f"4-bit weights of {name}",
                got="weights that bitsandbytes has rounded for inference on this CPU",
                expected="unchanged 4-bit weights",
                fix="load the model again, and call prepare_model before running it",
            )
        if not is_on(module, "four_bits"):
            put(module, "four_bits", partial(setattr, module, _REPACKS, getattr(module, _REPACKS)))
        setattr(module, _REPACKS, False)


# ---- weights into a model that is there already


def reload_weights(model: Any, folder: Path) -> None:
    """Set every weight of a model to what `save_pretrained` wrote into a folder."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ArtifactError(
            str(folder),
            got=f"adapters ({ADAPTER_CONFIG}) of a run that trained only them",
            expected="the weights of this model, all of them",
            fix="resume with that run's method, or start without resuming",
        )
    own = copy.deepcopy(model.config)  # that of the folder could ask for a model of any size
    try:
        saved = from_pretrained(
            type(model), str(folder), config=own, unused=False, dtype=_common_dtype(model), local_files_only=True
        )
        model.load_state_dict(saved.state_dict(), strict=True)
    except (WeightsError, RuntimeError) as error:
        raise ArtifactError(
            str(folder),
            got=" ".join(str(error).split()),
            expected="the weights of this model, all of them",
            fix=_RESUME_ELSEWHERE,
        ) from error


def _common_dtype(model: Any) -> torch.dtype:
    """In which nothing is rounded: what all weights have, or else fp32."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else torch.float32


# ---- adapters into a model that has them


def reload_adapters(model: Any, folder: Path) -> None:
    """Set every adapter of a peft model, and what is trained whole beside them, to what its `save_pretrained` wrote.

    The parameters stay the same objects, in their precision.
    """
    for name, config in model.peft_config.items():
        place = folder if name == _MAIN_ADAPTER else folder / name
        _require_same_adapters(place, config)
        try:
            report = model.load_adapter(str(place), name, is_trainable=True, torch_device="cpu")
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise _other_adapters(place, in_one_line(error)) from error
        wrong = {"missing": report.missing_keys, "unexpected": report.unexpected_keys}
        if any(wrong.values()):
            raise _other_adapters(
                place, "; ".join(in_words(kind, sorted(names)) for kind, names in wrong.items() if names)
            )


def _require_same_adapters(place: Path, config: Any) -> None:
    """Before anything is read into the model: adapters are there, and made as its own are."""
    for name in (ADAPTER_CONFIG, _ADAPTERS):
        if not (place / name).is_file():
            whole = any(place.glob("model*.safetensors"))
            raise _other_adapters(place, "whole weights, of a run without adapters" if whole else f"no {name}")
    try:
        saved = json.loads((place / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _other_adapters(place, f"{ADAPTER_CONFIG}: {error}") from error
    if other := list(_differences(saved, config.to_dict())):
        raise _other_adapters(place, f"adapters with {', '.join(other)}")


def _differences(saved: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    for name in _COMPARED:
        before, now = _comparable(saved.get(name)), _comparable(own.get(name))
        if name in saved and before != now:
            yield f"{name} {before} instead of {now}"


def _comparable(value: Any) -> Any:
    """As JSON has it; the order of names does not matter, and no names are none."""
    if isinstance(value, (set, list, tuple)):
        value = sorted(value)
    return getattr(value, "value", value) or None


def _other_adapters(place: Path, got: str) -> ArtifactError:
    expected = "the adapters of this model, all of them"
    return ArtifactError(str(place), got=" ".join(got.split()), expected=expected, fix=_RESUME_ELSEWHERE)


def quiet_libraries() -> None:
    """To be called before Trainer or peft are imported: both import bitsandbytes."""
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    # On some CPUs it looks for a kernel that needs another package, which nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
