"""The settings of a run, by section. Loader, command-line options, documentation and the check of a resumed run follow
from these fields; a new setting is one field here and the code that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packtrain.config.data_section import MEDIA_LIMITS, DataSection
from packtrain.config.keys import (
    AMOUNT,
    BELOW_ONE,
    COUNT,
    FLAG,
    WORD,
    WORDS,
    Key,
    Section,
    either,
    key,
    nearest_key,
)
from packtrain.config.training_section import StepSection, TrainingSection

_MEASURE, _DATA = ("measure",), ("measure", "verify")  # commands


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection(Section):
    """The model, and which of its parts are trained."""

    model_name_or_path: str | None = key(
        WORD,
        "A model folder, a hub name, or tiny:FAMILY for a small random model. `model: NAME` is enough.",
        aliases=("model_name", "name", "model", "load_from_pretrained_path", "base_model"),
        resume="place",
    )
    method: str | None = key(
        WORD,
        "Fine-tuning method: full (all weights), lora, dora or qlora (adapters).",
        default="full",
        aliases=("finetuning_type", "train_type", "tuner_type", "adapter"),
        resume="refused",
    )
    lora_rank: int | None = key(COUNT, "Rank of the LoRA matrices.", default=16, aliases=("lora_r",), resume="refused")
    lora_alpha: float | None = key(AMOUNT, "Alpha of the LoRA scaling.", shown="twice the rank", resume="refused")
    lora_dropout: float | None = key(BELOW_ONE, "Dropout of the LoRA layers.", default=0.0)
    lora_target_modules: str | list[str] | None = key(
        either(WORD, WORDS),
        "Modules that get adapters, by the end of their names.",
        shown="every linear layer of the decoder",
        aliases=("lora_target", "target_modules"),
        resume="refused",
    )
    train_vision: bool | None = key(
        FLAG, "Train the vision encoder.", shown="true in full training, false with adapters", resume="refused"
    )
    train_projector: bool | None = key(
        FLAG, "Train the projector.", shown="true in full training, false with adapters", resume="refused"
    )
    train_language: bool | None = key(
        FLAG, "Train the language model, or its adapters.", default=True, resume="refused"
    )
    dtype: str | None = key(
        WORD,
        "Dtype of the weights: bf16, fp32, or fp16 for weights frozen under adapters. auto is bf16 on a GPU that "
        "supports it, else fp32; with training.fp16 it is fp32. training.bf16 only matters for fp32 weights: it "
        "computes in bf16.",
        default="auto",
        aliases=("torch_dtype",),
    )
    quantization_bit: int | None = key(COUNT, "4 is the same as method: qlora.", resume="refused")
    use_dora: bool | None = key(FLAG, "true is the same as method: dora.", resume="refused")
    merge_adapters: bool | None = key(FLAG, "Merge the adapters into the weights saved in `final`.", default=False)
    plugins: list[str] | None = key(
        WORDS,
        "Your own modules that register model families (docs/guides/extending.md). They are imported and run.",
        shown="none",
        verbs=_DATA,
        options=("--plugins",),
        resume="plan",
    )
    vit_img_size: int | None = key(COUNT, "Checked against the model's tile size; a different value is an error.")
    mp_image_token_length: int | None = key(
        COUNT, "Checked against the model's own value; a different one is an error."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSection(Section):
    """The report of a run."""

    out: str | None = key(WORD, "File of the report.", shown="report.html in the run's folder")
    title: str | None = key(WORD, "Title of the report.")


SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "training": TrainingSection,
    "report": ReportSection,
}
SECTION_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("dataset", "dataset_config", "custom", "template"), "data"),
    **dict.fromkeys(("TrainConfig", "train_config", "trainer_args"), "training"),
    **dict.fromkeys(("VLMConfig", "vlm_config", "model_config", "tuner"), "model"),
}
HOMES: Mapping[str, str] = {name: section for section, cls in SECTIONS.items() for name in cls.known()}
KEYS: Mapping[str, Key] = {name: one for cls in SECTIONS.values() for name, one in cls.known().items()}
# Other systems' names: the name here, and the settings that they imply.
ALIASES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    alias: (name, brings) for name, one in {**KEYS, **MEDIA_LIMITS}.items() for alias, brings in one.aliases.items()
}
TRAINER_KEYS = tuple(name for name in TrainingSection.known() if name not in StepSection.known())
# A processor_config may hold, besides media limits, the model's name and its class (ignored: the model knows it).
PROCESSOR_NAMES, PROCESSOR_CLASS = ("processor_name", "model"), "processor_type"


def names_model(given: object) -> bool:
    """Whether the class of a processor is in fact a model's name: a hub name or path; a class is a single word."""
    return isinstance(given, str) and any(mark in given for mark in "/:")


# Names of older versions and of other libraries that lead to a key, but are not read as it: they may mean another unit.
_LEADS: Mapping[str, str] = {
    "attn_implementation": "attention attn backend attention_backend attention_implementation kernel",
    "formatting_func": "formatting format_func formatter preprocess_fn map_fn",
    "learning_rate": "lr max_lr peak_lr",
    "vit_lr": "vision_lr vision_tower_lr mm_vision_tower_lr",
    "aligner_lr": "projector_lr connector_lr merger_lr mm_projector_lr",
    "num_train_epochs": "epochs n_epochs max_epochs",
    "warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "lr_scheduler_type": "scheduler scheduler_type lr_schedule",
    "max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping",
    "effective_batch_size": "global_batch_size total_batch_size train_batch_size",
    "per_device_train_batch_size": "bs per_gpu_batch_size per_device_batch_size train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "grad_accum accumulation_steps accumulate_grad_batches",
    "gradient_checkpointing": "activation_checkpointing recompute",
    "sharding": "parallelism distributed distributed_strategy",
    "output_dir": "output out_dir save_dir default_root_dir",
    "save_total_limit": "keep_checkpoints max_checkpoints",
    "report_to": "logger loggers",
    "seed": "random_seed random_state",
    "dtype": "precision weights_dtype",
    "train_vision": "train_vit tune_vision tune_mm_vision",
    "train_projector": "train_connector train_aligner train_merger tune_mm_mlp tune_mm_mlp_adapter",
    "train_language": "train_llm tune_mm_llm",
    "lora_rank": "rank r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "dataset_path": "data_path data_dir train_file train_data train_path",
    "eval_path": "eval_data val_data val_path valid_path validation_file",
    "media_root": "image_dir image_folder image_root media_dir video_folder",
    "max_samples": "limit max_records num_samples",
    "workers": "num_workers num_proc",
    "loss_on": "train_on mask_prompt",
    "packing": "pack packed",
    "packing_length": "max_len max_tokens seq_len seq_length sequence_length block_size model_max_length",
    "packing_strategy": "packer packing_algorithm",
}
LEADS: Mapping[str, str] = {name: key for key, names in _LEADS.items() for name in names.split()}


def key_hint(name: str, known: Iterable[str]) -> str:
    """Where a key leads that is none of the `known`: a name of another library, a misspelt one, or words of its help.

    >>> key_hint("lr", ()), key_hint("packing_lenght", ["packing_length"]), key_hint("format", ())
    ('did you mean training.learning_rate?', "did you mean 'packing_length'?", 'did you mean data.dataset_format?')
    >>> key_hint("of", ())
    ''
    """
    words = name.casefold().replace("_", " ")
    starts = (f"{words} ", f"{words}.", f"{words}:")
    described = next((key for key, one in KEYS.items() if one.help.casefold().startswith(starts)), None)
    key = LEADS.get(name.casefold()) or (None if nearest_key(name, known) else described)
    return f"did you mean {HOMES[key]}.{key}?" if key else nearest_key(name, known)


def keys_with(resume: str) -> tuple[str, ...]:
    """Settings that a changed value of in a resumed run is treated this way."""
    return tuple(name for name, one in KEYS.items() if one.resume == resume)
