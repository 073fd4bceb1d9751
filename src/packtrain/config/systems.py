"""Which system a config is written for, and what its unset settings mean there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packtrain.config.sections import SECTION_ALIASES

# Sections, and keys without a section, by which systems are known.
_MARKS: Mapping[str, tuple[str, ...]] = {
    "LLaMA-Factory": (
        *("cutoff_len", "preprocessing_cache_dir", "finetuning_type", "stage", "lora_target", "dataset_dir"),
        *("preprocessing_num_workers", "overwrite_cache", "plot_loss", "neat_packing", "flash_attn"),
        *("freeze_vision_tower", "freeze_multi_modal_projector", "val_size"),
    ),
    "axolotl": (
        *("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter", "dataset_prepared_path"),
        "val_set_size",
    ),
    "ms-swift": (
        *("custom", "tuner", "train_type", "tuner_type", "attn_impl", "split_dataset_ratio", "truncation_strategy"),
        *("freeze_vit", "freeze_aligner", "freeze_llm", "model_author", "val_dataset"),
    ),
    "lmms-engine": ("dataset", "dataset_config", "trainer_type", "trainer_args"),
    "nanoVLM": ("TrainConfig", "VLMConfig", "train_config", "vlm_config"),
    "TRL": (
        *("max_seq_length", "max_length", "assistant_only_loss", "completion_only_loss", "dataset_num_proc"),
        *("use_peft", "dataset_name", "dataset_train_split", "dataset_test_split", "dataset_text_field"),
    ),
}
# Marks that a config of packtrain may have too: they tell what `packing` means where it is left out, and no more.
_COMMON = (
    *("cutoff_len", "preprocessing_cache_dir", "preprocessing_num_workers", "sequence_len", "sample_packing"),
    *("custom", "dataset", "max_seq_length", "max_length", "dataset_num_proc", "val_size"),
)
SYSTEMS: Mapping[str, str] = {mark: system for system, marks in _MARKS.items() for mark in marks}
BATCHES_OF_PACKS = tuple(_MARKS)  # whose batch size counts packs, where they pack
# What an unset setting means in the system that the config comes from; a table has it by method.
THEIR_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    **{system: {"packing": False} for system in _MARKS if system != "nanoVLM"},
    "LLaMA-Factory": {
        **{"packing": False, "cutoff_len": 2048, "method": "lora", "lora_rank": 8},
        **{"train_vision": False, "train_projector": False, "per_device_train_batch_size": 8, "num_train_epochs": 3},
    },
    "ms-swift": {
        **{"packing": False, "method": "lora", "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05},
        **{"train_vision": False, "train_projector": False, "num_train_epochs": 3, "effective_batch_size": 16},
        **{"learning_rate": {"full": 1e-5, "": 1e-4}, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
        **{"adam_beta2": 0.95, "per_device_train_batch_size": 1},
    },
    "axolotl": {
        **{"packing": False, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "per_device_train_batch_size": 1},
    },
    "TRL": {
        **{"packing": False, "learning_rate": 2e-5, "per_device_train_batch_size": 8, "num_train_epochs": 3},
        **{"lora_alpha": 32, "lora_dropout": 0.05},
    },
    "lmms-engine": {
        **{"packing": False, "packing_length": 32_000, "packing_strategy": "first_fit"},
        **{"per_device_train_batch_size": 8, "num_train_epochs": 3},
    },
    "nanoVLM": {
        **{"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "lr_scheduler_type": "cosine_with_min_lr"},
        **{"warmup_ratio": 0.03, "weight_decay": 0.01},
    },
}
# What says a default already in another way, so that it is not taken.
UNLESS: Mapping[str, tuple[str, ...]] = {
    "per_device_train_batch_size": ("effective_batch_size", "packs_per_step"),
    "num_train_epochs": ("max_steps",),
    "effective_batch_size": ("gradient_accumulation_steps", "packs_per_step"),
    "warmup_ratio": ("warmup_steps",),
    "lr_scheduler_kwargs": ("lr_scheduler_type",),
    "train_vision": ("vit_lr",),
    "train_projector": ("aligner_lr",),
    "method": ("use_dora", "quantization_bit"),
    "packing_length": ("cutoff_len",),
}
# Settings with another default here: what to know when they are not set.
UNSAID: Mapping[str, Mapping[str, str]] = {
    "TRL": {
        "loss_on": "TRL trains every token of a chat without assistant_only_loss; here only answers carry loss: "
        "data.loss_on: all trains every token here too",
        "lora_target_modules": "TRL leaves the default of lora_target_modules to peft, often q_proj and v_proj;"
        " here every linear layer of the decoder gets an adapter",
        "packing_length": "TRL truncates to max_length 1024 by default; samples are kept whole here",
    },
    "LLaMA-Factory": {
        "processor_config": "LLaMA-Factory limits images to image_max_pixels 589824 by default; the model's own limit "
        "holds here",
    },
}
# Settings with another meaning here, by system: what to know.
OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "LLaMA-Factory": {
        "max_samples": "max_samples {} are drawn at random from all records; LLaMA-Factory takes the first of each "
        "dataset",
    },
}


def system_marks(content: Mapping[Any, Any]) -> list[str]:
    """Names of sections and of keys without a section by which a system is known."""
    return [
        str(key)
        for key, value in content.items()
        if key in SYSTEMS and (key not in SECTION_ALIASES or isinstance(value, Mapping))
    ]


def detect_systems(marks: Iterable[str], *, sure: bool = False) -> list[str]:
    """The systems that have these names; TRL's are those of many. `sure`: by names that only they have."""
    systems = list(dict.fromkeys(SYSTEMS[name] for name in marks if name in SYSTEMS and not (sure and name in _COMMON)))
    return [name for name in systems if name != "TRL"] if len(systems) > 1 else systems
