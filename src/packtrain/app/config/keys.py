"""The keys of a run's config, by section, and the names that other systems have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from packtrain.app.config.kinds import (
    AMOUNT,
    BELOW_ONE,
    COUNT,
    DAY,
    FLAG,
    NAMES,
    PLACE,
    POSITIVE,
    RATE,
    SECTION,
    SEED,
    SHARE,
    STEPS,
    SWITCH,
    TEXT,
    WHOLE,
    WORD,
    WORDS,
    Kind,
    choice,
    either,
)
from packtrain.core.values import MediaLimits
from packtrain.plans.config import LIMITS, PackingConfig

# What a PackingConfig takes from elsewhere: epochs and steps are training's, one seed serves all.
_PACKING = tuple(f.name for f in fields(PackingConfig) if f.name not in ("epochs", "packs_per_step", "seed"))
MODEL_KEYS = (
    *("model_name_or_path", "method", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("train_vision", "train_connector", "train_language", "dtype", "quantization_bit", "use_dora", "merge_adapters"),
    *("vit_img_size", "mp_image_token_length"),
)
DATA_KEYS = (
    *("dataset_path", "eval_path", "dataset_type", "dataset_format", "media_root", "processor_config", "schema"),
    *("packing", "pad_packs", *_PACKING, "balance", "eval_packing", "max_sample_length", "max_images_per_sample"),
    *("max_samples", "max_eval_samples", "loss_on", "add_eos", "formatting", "object_ordering", "emit_norm"),
    *("object_prompt", "object_template", "coord_tokens", "columns", "split", "subset", "streaming"),
    *("allow_outside_root", "max_failure_rate", "content_hash", "cache_dir", "cache_bytes", "cache_tokens"),
    "template_date",
)
OWN_TRAINING_KEYS = (
    *("vit_lr", "aligner_lr", "effective_batch_size", "effective_batch_unit", "packs_per_step", "save_delay_steps"),
    *("warmup_ratio", "group_by_length", "vision_checkpointing", "vision_batch_patches", "chunked_loss", "loss_chunk"),
    *("loss_weighting", "sharding", "attention", "compile", "early_stopping_patience", "early_stopping_threshold"),
    *("master_weights", "quick_check"),
)
LOG_LEVEL = choice("passive", "detail", "debug", "info", "warning", "error", "critical")
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)
# The names of transformers.TrainingArguments, which are passed on, and what each may be: the class itself takes nearly
# anything, and looks at it when it is too late. A test compares names and types with the class.
TRAINER_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        (
            *("average_tokens_across_devices", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32"),
            *("gradient_checkpointing", "torch_compile", "use_liger_kernel", "use_cache", "auto_find_batch_size"),
            *("logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "disable_tqdm", "eval_on_start"),
            *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics"),
            *("save_only_model", "save_on_each_node", "enable_jit_checkpoint", "push_to_hub", "hub_private_repo"),
            *("hub_always_push", "load_best_model_at_end", "greater_is_better", "ignore_data_skip", "full_determinism"),
            *("restore_callback_states_from_checkpoint", "use_cpu", "dataloader_drop_last", "dataloader_pin_memory"),
            *("dataloader_persistent_workers", "dataloader_in_order", "remove_unused_columns", "skip_memory_metrics"),
            *("ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph", "do_train", "do_eval"),
            "do_predict",
        ),
        FLAG,
    ),
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("torch_empty_cache_steps", "eval_accumulation_steps", "save_total_limit", "dataloader_prefetch_factor"),
            *("ddp_bucket_cap_mb", "ddp_timeout"),
        ),
        COUNT,
    ),
    **dict.fromkeys(("seed", "data_seed"), SEED),
    **dict.fromkeys(("num_train_epochs", "weight_decay", "warmup_steps", "adam_epsilon", "max_grad_norm"), AMOUNT),
    **dict.fromkeys(("eval_delay", "neftune_noise_alpha"), AMOUNT),
    **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), POSITIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), BELOW_ONE),
    **dict.fromkeys(("output_dir", "optim"), WORD),
    **dict.fromkeys(
        (
            *("optim_args", "torch_compile_backend", "torch_compile_mode", "run_name", "project", "trackio_space_id"),
            *("trackio_bucket_id", "hub_token", "hub_model_id", "hub_revision", "metric_for_best_model"),
            *("train_sampling_strategy", "length_column_name", "ddp_backend", "fsdp", "resume_from_checkpoint"),
        ),
        TEXT,
    ),
    **dict.fromkeys(("logging_strategy", "eval_strategy"), choice("no", "steps", "epoch")),
    **dict.fromkeys(("log_level", "log_level_replica"), LOG_LEVEL),
    **dict.fromkeys(("report_to", "optim_target_modules", "debug"), either(TEXT, WORDS)),
    **dict.fromkeys(("include_for_metrics", "label_names"), WORDS),
    **dict.fromkeys(("lr_scheduler_kwargs", "accelerator_config", "gradient_checkpointing_kwargs"), SECTION),
    **dict.fromkeys(("liger_kernel_config", "parallelism_config"), SECTION),
    **dict.fromkeys(("deepspeed", "fsdp_config"), either(WORD, SECTION)),
    "learning_rate": RATE,
    "max_steps": STEPS,
    "dataloader_num_workers": WHOLE,
    "local_rank": PLACE,
    "save_strategy": choice("no", "steps", "epoch", "best"),
    "hub_strategy": choice("end", "every_save", "checkpoint", "all_checkpoints"),
    "lr_scheduler_type": choice(*SCHEDULES),
    "include_num_input_tokens_seen": either(FLAG, choice("no", "all", "non_padding")),
    "trackio_static_space_id": either(FLAG, TEXT),
    "dataloader_multiprocessing_context": choice("fork", "spawn", "forkserver"),
}
TRAINER_KEYS = tuple(TRAINER_KINDS)
REPORT_KEYS = ("out", "title")
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "model": MODEL_KEYS,
    "data": DATA_KEYS,
    "training": (*OWN_TRAINING_KEYS, *TRAINER_KEYS),
    "report": REPORT_KEYS,
}
SECTION_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("dataset", "dataset_config", "custom"), "data"),
    **dict.fromkeys(("TrainConfig", "trainer_args"), "training"),
    **dict.fromkeys(("VLMConfig", "model_config", "tuner"), "model"),
}
PROCESSOR_KEYS = MediaLimits.__slots__
# What may stand in a processor_config beside limits of media: the model's name, and its class, which it knows itself.
PROCESSOR_NAMES, PROCESSOR_CLASS = ("processor_name", "model"), "processor_type"
# What the value of each key must be. The limits of media in processor_config are checked one by one.
KINDS: Mapping[str, Kind] = {
    **TRAINER_KINDS,
    **dict.fromkeys(
        (
            *("packing", "pad_packs", "eval_packing", "packing_drop_last", "shuffle", "add_eos", "repack_each_epoch"),
            *("train_vision", "train_connector", "train_language", "group_by_length", "vision_checkpointing"),
            *("chunked_loss", "use_dora", "merge_adapters", "streaming", "allow_outside_root", "compile"),
            *("master_weights", "quick_check", "cache_tokens", "content_hash"),
        ),
        FLAG,
    ),
    **dict.fromkeys(
        (
            *LIMITS,
            *("packing_window", "packing_buffer", "max_sample_length", "max_images_per_sample", "max_samples"),
            *("max_eval_samples", "lora_rank", "effective_batch_size", "packs_per_step", "loss_chunk"),
            *("vision_batch_patches", "quantization_bit", "vit_img_size", "mp_image_token_length", "cache_bytes"),
            "early_stopping_patience",
        ),
        COUNT,
    ),
    **dict.fromkeys(("save_delay_steps", "lora_alpha", "early_stopping_threshold"), AMOUNT),
    **dict.fromkeys(("vit_lr", "aligner_lr"), RATE),
    **dict.fromkeys(("warmup_ratio", "lora_dropout"), BELOW_ONE),
    **dict.fromkeys(("packing_min_fill_ratio", "max_failure_rate"), SHARE),
    **dict.fromkeys(
        (
            *("model_name_or_path", "method", "dtype", "packing_strategy", "effort", "overlong", "balance", "loss_on"),
            *("object_ordering", "emit_norm", "sharding", "attention", "effective_batch_unit", "loss_weighting"),
            *("cache_dir", "dataset_path", "eval_path", "formatting", "schema", "dataset_type", "dataset_format"),
            *("media_root", "split", "subset", "object_prompt", "object_template", *REPORT_KEYS),
        ),
        WORD,
    ),
    "lora_target_modules": either(WORD, WORDS),
    "columns": NAMES,
    "coord_tokens": SWITCH,
    "template_date": DAY,
}
# Other systems' names: what they are called here, and what else they bring along.
ALIASES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "model_name": ("model_name_or_path", {}),
    "name": ("model_name_or_path", {}),
    "model": ("model_name_or_path", {}),  # inside a section
    "load_from_pretrained_path": ("model_name_or_path", {}),
    "finetuning_type": ("method", {}),
    "train_type": ("method", {}),
    "lora_r": ("lora_rank", {}),
    "global_max_length": ("packing_length", {"overlong": "drop"}),
    "cutoff_len": ("packing_length", {"overlong": "truncate"}),
    "max_seq_length": ("packing_length", {}),
    "lm_max_length": ("packing_length", {}),
    "max_images_per_knapsack": ("max_images_per_pack", {}),
    "max_images_per_example": ("max_images_per_sample", {}),
    "preprocessing_cache_dir": ("cache_dir", {}),
    "val_jsonl": ("eval_path", {}),
    "eval_dataset_path": ("eval_path", {}),
    "train_jsonl": ("dataset_path", {}),
    "batch_size": ("per_device_train_batch_size", {}),
    "lr_language_backbone": ("learning_rate", {}),
    "lr_vision_backbone": ("vit_lr", {}),
    "lr_mp": ("aligner_lr", {}),
    "optimizer": ("optim", {}),
    "attn_implementation": ("attention", {}),
    "formatting_func": ("formatting", {}),
    "max_train_samples": ("max_samples", {}),
}
