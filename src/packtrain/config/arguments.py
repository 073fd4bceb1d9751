"""A config's settings of transformers.TrainingArguments: passed on, derived, or refused with a reason."""

from __future__ import annotations

import json
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from packtrain.config.run_config import RunConfig
from packtrain.config.sections import TRAINER_KEYS
from packtrain.config.setup import (
    MULTIMODAL,
    WITH_MASTERS,
    checkpoints,
    has_deepspeed,
    model_settings,
    sharding,
    sharding_notes,
    uses_deepspeed,
    zero_stage,
)
from packtrain.config.training_section import KEPT_CHECKPOINTS
from packtrain.core.errors import ConfigError
from packtrain.delivery.trainers.refused_arguments import NOT_IN_CONFIG, refused_settings

# What follows from the schedule, from other settings, or from how the command was started.
_DERIVED = (
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("per_device_eval_batch_size", "seed", "data_seed", "gradient_checkpointing", "fsdp", "fsdp_config", "deepspeed"),
    *("train_sampling_strategy", "length_column_name", "disable_tqdm", "do_train", "do_eval", "do_predict"),
    *("local_rank", "optim", "warmup_steps"),
)
_EVALUATION = ("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps")
_NEED_EVALUATION = ("load_best_model_at_end", "early_stopping_patience")
# Pairs of which one is left out; the others that contradict each other depend on values.
_ONE_OF = (
    ("training.warmup_ratio", "training.warmup_steps"),
    ("data.eval_path", "data.eval_size"),
    ("training.fp16", "training.bf16"),
)
_ADAPTERS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "merge_adapters")


def trainer_settings(config: RunConfig, *, world_size: int) -> tuple[dict[str, object], tuple[str, ...]]:
    """Arguments by name, and notes; raises one error with everything that is refused."""
    refused = refused_settings(config.training.given(*NOT_IN_CONFIG))
    problems = [
        *(f"training.{one}" for one in refused),
        *_contradictions(config),
        *_missing_packages(config),
        *_merge_problems(config, world_size),
    ]
    if problems:
        raise ConfigError("settings", problems=problems)
    training = config.training
    given = {
        name: value
        for name, value in training.given(*TRAINER_KEYS).items()
        if name not in _DERIVED and name not in NOT_IN_CONFIG
    }
    settings: dict[str, object] = {
        "report_to": "none",
        "logging_steps": 10,
        "save_total_limit": KEPT_CHECKPOINTS,
        **given,
        "seed": training.seed or 0,
        "gradient_checkpointing": checkpoints(config),
        "disable_tqdm": True,
        **_warmup(config),
        **_sharding_arguments(config, world_size),
    }
    if training.optim not in (None, MULTIMODAL):
        settings["optim"] = training.optim
    notes = [*_evaluation(config, settings), *_no_adapters(config), *_notes(config, world_size)]
    return settings, tuple(notes)


def _evaluation(config: RunConfig, settings: dict[str, object]) -> list[str]:
    """When evaluation happens; without data for it, never."""
    if config.evaluates:
        settings.setdefault("eval_strategy", "steps" if "eval_steps" in settings else "epoch")
        return []
    ignored = [name for name in _EVALUATION if settings.pop(name, None) is not None]
    if not ignored:
        return []
    return [
        f"there is no data.eval_path or data.eval_size, so nothing is evaluated: {', '.join(ignored)} has no effect"
    ]


def _no_adapters(config: RunConfig) -> list[str]:
    """Adapter settings in full training: the method may have been forgotten."""
    ignored = [name for name, value in config.model.given(*_ADAPTERS).items() if value is not False]
    if not ignored or model_settings(config).has_adapters:
        return []
    has = "has" if len(ignored) == 1 else "have"
    return [f"model.method is full, so {', '.join(ignored)} {has} no effect: set method: lora to train adapters"]


def _warmup(config: RunConfig) -> dict[str, object]:
    """Steps, or a share of all steps as the trainer takes it: a number below one."""
    training = config.training
    if training.warmup_ratio:
        return {"warmup_steps": float(training.warmup_ratio)}
    return training.given("warmup_steps")


def _sharding_arguments(config: RunConfig, world_size: int) -> dict[str, object]:
    """How weights are sharded; nothing with one process."""
    training, how = config.training, sharding(config)
    if uses_deepspeed(config):
        return {"deepspeed": _deepspeed(int(how[-1])) if zero_stage(config) else training.deepspeed}
    if how != "fsdp" or world_size == 1:
        return {}
    return {"fsdp": training.fsdp or "full_shard", "fsdp_config": training.fsdp_config or {"version": 2}}


def _deepspeed(stage: int) -> dict[str, object]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {**dict.fromkeys(names, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage}}


def _notes(config: RunConfig, world_size: int) -> list[str]:
    training, notes = config.training, [*sharding_notes(config)]
    if training.optim == MULTIMODAL:
        rates = ", ".join(training.given("learning_rate", "vit_lr", "aligner_lr"))
        notes.append(f"optimizer multimodal is AdamW with a learning rate for each part: {rates or 'learning_rate'}")
    if sharding(config) == "fsdp" and world_size == 1:
        notes.append("sharding fsdp: there is one process, so nothing is sharded")
    elif world_size == 1 and uses_deepspeed(config):
        notes.append(
            "deepspeed needs a launcher, even for one process: torchrun --nproc_per_node 1 -m packtrain.cli ..."
        )
    elif sharding(config) == "fsdp" and model_settings(config).method == "qlora":
        notes.append("sharding fsdp with qlora: 4-bit weights are not sharded; the others are")
    return notes


def _contradictions(config: RunConfig) -> list[str]:
    """Settings that cannot both hold."""
    model, training, data, problems = config.model, config.training, config.data, []
    for rate, part in (("vit_lr", "train_vision"), ("aligner_lr", "train_projector")):
        number = getattr(training, rate)
        if number and getattr(model, part) is False:
            problems.append(
                f"training.{rate} {number:g} and model.{part} false: leave the rate out, or train that part"
            )
    problems += [
        f"{one} and {other}: leave one of them out"
        for one, other in _ONE_OF
        if attrgetter(one)(config) and attrgetter(other)(config)
    ]
    if data.eval_size and data.max_eval_samples:
        problems.append("data.eval_size and data.max_eval_samples: eval_size may be a number of records")
    if not config.evaluates:
        problems += [
            f"training.{name} without data.eval_path or data.eval_size: nothing is evaluated"
            for name, value in training.given(*_NEED_EVALUATION).items()
            if value
        ]
    if training.neftune_noise_alpha and data.packing is not False:
        problems.append(
            "training.neftune_noise_alpha with packed rows: its noise shrinks with row length, so packed "
            "samples would get less of it: leave it out, or set data.packing: false"
        )
    metric = training.metric_for_best_model
    if metric not in (None, "loss", "eval_loss"):
        problems.append(f"training.metric_for_best_model {metric}: evaluation computes only the loss: eval_loss")
    if training.greater_is_better:
        problems.append("training.greater_is_better true: the metric is the loss: lower is better")
    if training.fp16 and model.dtype in ("bf16", "bfloat16"):
        problems.append(f"training.fp16 and model.dtype {model.dtype}: leave one of them out")
    optim = training.optim or MULTIMODAL
    if training.master_weights and optim not in WITH_MASTERS:
        problems.append(
            f"training.master_weights true and training.optim {optim}, which has its own format of weights and states: "
            f"use one of {', '.join(WITH_MASTERS)}, or leave it out"
        )
    how = training.sharding
    if how is not None and training.fsdp and how != "fsdp":
        problems.append(f"training.sharding {how} and training.fsdp: leave one of them out")
    if how in ("ddp", "fsdp") and training.deepspeed:
        problems.append(f"training.sharding {how} and training.deepspeed: leave one of them out")
    return problems


def _merge_problems(config: RunConfig, world_size: int) -> list[str]:
    """Refused before the run, not at its end."""
    if world_size == 1 or sharding(config) != "fsdp" or not config.model.merge_adapters:
        return []
    if model_settings(config).method != "qlora":
        return []
    return ["model.merge_adapters with qlora and sharding fsdp: save the adapters, and merge them into the base model"]


def _missing_packages(config: RunConfig) -> list[str]:
    problems = []
    try:
        method = model_settings(config).method
    except ConfigError:
        method = "full"  # it is reported where it is made
    if method == "qlora" and find_spec("bitsandbytes") is None:
        problems.append(
            "model.method qlora: bitsandbytes is not installed: pip install 'packtrain[qlora]', or method: lora"
        )
    training = config.training
    if training.deepspeed and zero_stage(config) is None and not has_deepspeed():
        problems.append(
            f"training.deepspeed {training.deepspeed}: deepspeed is not installed: pip install 'packtrain[deepspeed]',"
            " or leave it out and set training.sharding: fsdp, which shards weights and states without it"
        )
    if _own_stage(training.deepspeed) == 3:
        problems.append(
            "training.deepspeed with ZeRO stage 3: models are loaded and saved unsharded here; training.sharding: fsdp"
            " shards the same"
        )
    return problems


def _own_stage(given: str | dict[str, Any] | None) -> int | None:
    """The ZeRO stage in DeepSpeed's own config, where it can be read."""
    if isinstance(given, str) and Path(given).is_file():
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except ValueError:
            return None  # as DeepSpeed will say
    stage = given.get("zero_optimization", {}).get("stage") if isinstance(given, dict) else None
    return stage if isinstance(stage, int) else None
