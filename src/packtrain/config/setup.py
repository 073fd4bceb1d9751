"""The model and training settings of a config, as the values that estimating and training share.

`plan` estimates with what `train` does: both read a config through these functions, defaults included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from packtrain.config.keys import Raw
from packtrain.config.run_config import RunConfig
from packtrain.config.sections import ModelSection
from packtrain.config.systems import detect_systems
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError, nearest
from packtrain.core.values import MediaLimits
from packtrain.families.family import ProcessorSettings
from packtrain.families.model_folder import resolve_model
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings
from packtrain.modeling.model_settings import ModelSettings
from packtrain.predicting.values import CHOICES, TrainingSetup
from packtrain.training.step_settings import StepSettings

MULTIMODAL = "multimodal"  # another system's name for AdamW with a learning rate for each part
# What an optimizer keeps of every parameter, by the trainer's names.
OPTIMIZERS = {
    **dict.fromkeys(
        (
            *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit"),
            *("stable_adamw", MULTIMODAL),
        ),
        "adamw",
    ),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "adafactor": "adafactor",
    "sgd": "sgd",
}
# Those that step fp32 copies of half-precision weights; others have their own way, and stay as they are.
WITH_MASTERS = ("adamw_torch", "adamw_torch_fused", MULTIMODAL, "adafactor", "sgd")
# Kernels that skip padding and keep no scores, whatever their names.
ATTENTION = dict.fromkeys(("auto", "flash_attention_2", "flash_attention_3", "flex"), "varlen")
ZERO = ("zero1", "zero2", "zero3")
_EVERY_MATRIX = ("all", "all-linear")  # of the decoder, as other systems say it
_NAME = re.compile(r"[\w.-]+")  # of a module, or the end of one
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MODEL = ("lora_rank", "lora_alpha", "lora_dropout", "train_language", "train_vision", "train_projector")
_STEP = tuple(one.name for one in fields(StepSettings))
_OF_MODEL = ("method", "lora_rank", "train_vision", "train_projector")  # of a TrainingSetup
_MEANS = {"vit_img_size": "the side of a tile", "mp_image_token_length": "the tokens of a tile"}


def model_settings(config: RunConfig) -> ModelSettings:
    """Which model, and which parts are trained. A part with its own rate is trained, rate 0 freezes it."""
    model, training = config.model, config.training
    settings = model.given(*_MODEL)
    for part, rate in (("train_vision", "vit_lr"), ("train_projector", "aligner_lr"), ("train_language", "")):
        given = getattr(training, rate) if rate else 0.0 if training.learning_rate == 0 else None
        if given is not None and part not in settings:
            settings[part] = given > 0
    dtype = model.dtype or "auto"
    if dtype == "auto" and training.fp16:
        dtype = "fp32"  # what loss scaling is for
    return ModelSettings(
        name=model.model_name_or_path or "",
        method=_method(model),  # type: ignore[arg-type]  # the settings check it themselves
        lora_target_modules=_targets(model.lora_target_modules),
        dtype=_DTYPES.get(dtype, dtype),  # type: ignore[arg-type]
        attn_implementation=training.attn_implementation or "auto",
        **settings,
    )


def step_settings(config: RunConfig) -> StepSettings:
    """How a step is computed, without the rates of frozen parts."""
    training, model = config.training, model_settings(config)
    settings = training.given(*_STEP)
    for rate, trained in (("vit_lr", model.trains_vision), ("aligner_lr", model.trains_projector)):
        if not trained:
            settings.pop(rate, None)
    if "save_delay_steps" in settings:
        settings["save_delay_steps"] = int(settings["save_delay_steps"])
    return StepSettings(**settings)


def training_setup(config: RunConfig, *, gpus: int, given: Raw | None = None) -> TrainingSetup:
    """How the run is trained, as far as memory and time depend on it; `given` overrides the config."""
    names = [one.name for one in fields(TrainingSetup)]
    for name in given or {}:
        if name not in names:
            raise ConfigError(f"setup.{name}", got=name, expected=", ".join(names), fix=nearest(name, names))
    overrides = {name: value for name, value in (given or {}).items() if value is not None}
    own = {name: value for name, value in overrides.items() if name in _OF_MODEL}
    flags = {} if "method" not in own else {"use_dora": None, "quantization_bit": None}
    model = model_settings(replace(config, model=replace(config.model, **flags, **own)))
    training, step = config.training, step_settings(config)
    kernels = (*ATTENTION, *CHOICES["attn_implementation"])
    if model.attn_implementation not in kernels:
        fix = nearest(model.attn_implementation, kernels)
        raise ConfigError(
            "training.attn_implementation", got=model.attn_implementation, expected=", ".join(kernels), fix=fix
        )
    checkpointing = checkpoints(config)
    values: dict[str, Any] = {
        "method": model.method,
        "lora_rank": model.lora_rank,
        "train_vision": model.trains_vision,
        "train_projector": model.trains_projector,
        "weights_dtype": "fp32" if model.dtype == "fp32" else "bf16",
        "optimizer": optimizer(optim := training.optim or "adamw_torch"),
        "master_weights": step.master_weights is not False and optim in WITH_MASTERS and model.dtype != "fp16",
        "sharding": sharding(config),
        "gpus": gpus,
        "gradient_checkpointing": checkpointing,
        "vision_checkpointing": checkpointing if step.vision_checkpointing is None else step.vision_checkpointing,
        "vision_batch_patches": step.vision_batch_patches,
        "chunked_loss": step.chunked_loss,
        "loss_chunk": step.loss_chunk,
        "attn_implementation": ATTENTION.get(model.attn_implementation, model.attn_implementation),
        "compiled": bool(step.compile),
    }
    return TrainingSetup(**{**values, **overrides})


def compiles(config: RunConfig, *, packing: bool) -> bool:
    """Whether layers are compiled on a GPU. Default: with packing, since padded rows have no static shapes."""
    chosen = step_settings(config).compile
    return packing if chosen is None else chosen


def checkpoints(config: RunConfig) -> bool:
    """Are the decoder's layers checkpointed? They are unless the config says otherwise: rows are long."""
    chosen = config.training.gradient_checkpointing
    return TrainingSetup().gradient_checkpointing if chosen is None else chosen


def sharding(config: RunConfig) -> str:
    """How weights and states are shared out among GPUs."""
    training = config.training
    if (stage := zero_stage(config)) is not None:
        return stage if has_deepspeed() and stage != "zero3" else "fsdp"
    if training.sharding is not None:
        return training.sharding
    if training.fsdp:
        return "fsdp"
    given = str(training.deepspeed or "")
    return next((name for name in ZERO if name in given), "ddp")


def zero_stage(config: RunConfig) -> str | None:
    """The stage of DeepSpeed that a config names, by `sharding` or `deepspeed`; None: none, or a file of its own."""
    training = config.training
    if training.deepspeed:
        return str(training.deepspeed) if str(training.deepspeed) in ZERO else None
    return training.sharding if training.sharding in ZERO else None


def uses_deepspeed(config: RunConfig) -> bool:
    """Whether deepspeed trains the run."""
    own = config.training.deepspeed and zero_stage(config) is None
    return bool(own) or sharding(config) in ZERO


def sharding_notes(config: RunConfig) -> tuple[str, ...]:
    """Where weights are sharded in another way than the config says."""
    stage = zero_stage(config)
    if stage is None or sharding(config) == stage:
        return ()
    why = "which shards the same" if stage == "zero3" else "since deepspeed is not installed (packtrain[deepspeed])"
    return (f"{stage} runs as sharding: fsdp (FSDP2), {why}",)


def has_deepspeed() -> bool:
    """Whether deepspeed is installed."""
    return find_spec("deepspeed") is not None


def optimizer(name: str) -> str:
    """The kind of state that the optimizer keeps for every parameter."""
    if name not in OPTIMIZERS:
        raise ConfigError("training.optim", got=name, expected=", ".join(OPTIMIZERS), fix=nearest(name, OPTIMIZERS))
    return OPTIMIZERS[name]


def _method(model: ModelSection) -> str:
    """full, lora, dora or qlora, from the one word or from the flags that other systems have for it."""
    dora, bits, given = bool(model.use_dora), model.quantization_bit, model.method
    if bits is not None and bits != 4:
        raise ConfigError("model.quantization_bit", got=bits, expected="4 (QLoRA: adapters over 4-bit weights)")
    if dora and bits:
        raise ConfigError("model", got="use_dora and quantization_bit", expected="one of them", fix="leave one out")
    meant = "dora" if dora else "qlora" if bits else given or "full"
    if given not in (None, "lora", meant):
        flag = "use_dora" if dora else "quantization_bit"
        raise ConfigError("model.method", got=f"{given} and {flag}", expected=f"method {meant}, or no {flag}")
    return meant


def _targets(given: Any) -> tuple[str, ...] | None:
    """Names of adapted modules, from a list or from words with commas between; None is every matrix."""
    if given is None or (isinstance(given, str) and given.strip() in _EVERY_MATRIX):
        return None
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError("model.lora_target_modules", got=given, expected="module names")
    if not all(_NAME.fullmatch(name.strip()) for name in names):
        fix = "leave it out for every linear layer of the decoder"
        raise ConfigError("model.lora_target_modules", got=given, expected="module names, by their ends", fix=fix)
    return tuple(name.strip() for name in names)


def check_tiles(config: RunConfig) -> tuple[str, ...]:
    """Refuse a tile that is not the model's own; say so where the model does not tell."""
    settings = config.model.given(*_MEANS)
    if not settings:
        return ()
    name = str(config.model.model_name_or_path)
    tile = _tile(name)
    wrong = [
        f"{key} {value}, the model has {tile[key]}" for key, value in settings.items() if tile.get(key, value) != value
    ]
    if wrong:
        raise ConfigError(
            "model",
            got="; ".join(wrong),
            expected="the model's own tiles: they are part of its weights",
            fix="leave these out, or use the model that they belong to",
        )
    return tuple(
        f"{key} {value} is {_MEANS[key]}, which the model decides: "
        + ("it agrees" if key in tile else "it does not define it, so this has no effect")
        for key, value in settings.items()
    )


def _tile(name: str) -> dict[str, object]:
    """The tile settings in a model's own files."""
    settings = read_settings(str(resolve_model(name, cache_dir() / "models")))
    side = settings.image.get("max_image_size")
    sizes = {
        "vit_img_size": side.get("longest_edge") if isinstance(side, Mapping) else settings.config.get("vit_img_size"),
        "mp_image_token_length": settings.processor.get("image_seq_len", settings.config.get("mp_image_token_length")),
    }
    return {key: value for key, value in sizes.items() if value is not None}


def own_limits(config: RunConfig, settings: ProcessorSettings) -> tuple[RunConfig, tuple[str, ...]]:
    """Configs of other systems have one set of limits for every model: without those that this one has not."""
    gone = unknown_limits(config, settings) if detect_systems(config.written_as) else {}
    if not gone:
        return config, ()
    ignored = ", ".join(f"{name} {value}" for name, value in gone.items())
    return without_limits(config, gone), (f"{settings.model_type} has no such media limit, ignored: {ignored}",)


def unknown_limits(config: RunConfig, settings: ProcessorSettings) -> dict[str, float]:
    """Limits of media that a config has and the model's family has not."""

    def takes(**limits: Any) -> bool:
        try:
            load_rule(settings, MediaLimits(**limits))
        except ConfigError:
            return False
        return True

    given = config.data.processor_config or {}
    return {name: value for name, value in given.items() if takes() and not takes(**{name: value})}


def without_limits(config: RunConfig, gone: Raw) -> RunConfig:
    """The config without these limits of media."""
    kept = {name: value for name, value in (config.data.processor_config or {}).items() if name not in gone}
    return replace(config, data=replace(config.data, processor_config=kept or None))
