"""The keys of a run's config, by section, and the names that other systems have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from packtrain.core.values import MediaLimits
from packtrain.families.template_date import A_DAY
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
# The names of transformers.TrainingArguments, which are passed on; a test compares them with the class.
TRAINER_KEYS = (
    *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "optim_target_modules", "gradient_accumulation_steps"),
    *("average_tokens_across_devices", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "bf16_full_eval"),
    *("fp16_full_eval", "tf32", "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile"),
    *("torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache"),
    *("neftune_noise_alpha", "torch_empty_cache_steps", "auto_find_batch_size", "logging_strategy", "logging_steps"),
    *("logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level"),
    *("log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
    *("trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size"),
    *("prediction_loss_only", "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object"),
    *("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "save_only_model", "save_strategy"),
    *("save_steps", "save_on_each_node", "save_total_limit", "enable_jit_checkpoint", "push_to_hub", "hub_token"),
    *("hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end"),
    *("metric_for_best_model", "greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    *("full_determinism", "seed", "data_seed", "use_cpu", "accelerator_config", "parallelism_config"),
    *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("remove_unused_columns", "label_names", "train_sampling_strategy", "length_column_name"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("ddp_timeout", "fsdp", "fsdp_config", "deepspeed", "debug", "skip_memory_metrics", "do_train", "do_eval"),
    *("do_predict", "resume_from_checkpoint", "local_rank"),
)
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
# What a value must be. Keys that are not named here are checked by the stage that uses them.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("packing", "pad_packs", "eval_packing", "packing_drop_last", "shuffle", "add_eos", "repack_each_epoch"),
            *("train_vision", "train_connector", "train_language", "gradient_checkpointing", "group_by_length"),
            *("vision_checkpointing", "chunked_loss", "use_dora", "merge_adapters", "streaming", "allow_outside_root"),
            *("compile", "master_weights", "quick_check", "cache_tokens", "content_hash"),
        ),
        "true or false",
    ),
    **dict.fromkeys(
        (
            *LIMITS,
            *("packing_window", "packing_buffer", "max_sample_length", "max_images_per_sample", "max_samples"),
            *("max_eval_samples", "lora_rank", "per_device_train_batch_size", "per_device_eval_batch_size"),
            *("gradient_accumulation_steps", "effective_batch_size", "packs_per_step", "loss_chunk"),
            *("vision_batch_patches", "quantization_bit", "vit_img_size", "mp_image_token_length", "cache_bytes"),
            "early_stopping_patience",
        ),
        "a positive whole number",
    ),
    **dict.fromkeys(
        (
            *("learning_rate", "vit_lr", "aligner_lr", "weight_decay", "warmup_ratio", "warmup_steps", "eval_steps"),
            *("save_steps", "save_delay_steps", "logging_steps", "num_train_epochs", "packing_min_fill_ratio", "seed"),
            *("lora_alpha", "lora_dropout", "early_stopping_threshold", "max_failure_rate"),
        ),
        "a number of at least 0",
    ),
    **dict.fromkeys(
        (
            *("model_name_or_path", "method", "dtype", "packing_strategy", "effort", "overlong", "balance", "loss_on"),
            *("object_ordering", "emit_norm", "optim", "sharding", "attention", "effective_batch_unit"),
            *("loss_weighting", "cache_dir", "dataset_path", "eval_path", "output_dir", "formatting", "schema"),
            *("dataset_type", "dataset_format", "media_root", "split", "subset", "object_prompt", "object_template"),
        ),
        "a word",
    ),
    "template_date": A_DAY,
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
