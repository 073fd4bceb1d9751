"""The settings of training: packtrain's own, and those of transformers.TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from packtrain.config.keys import (
    AMOUNT,
    BELOW_ONE,
    COUNT,
    FLAG,
    FOLDER,
    PLACE,
    POSITIVE,
    RATE,
    SECTION,
    SEED,
    STEPS,
    TEXT,
    WHOLE,
    WORD,
    WORDS,
    Key,
    KeyKind,
    Section,
    choice,
    either,
    key,
)
from packtrain.runs.early_warnings import MAY_BE_ZERO, MonitorLimits

KEPT_CHECKPOINTS = 2
RANK_TIMEOUT, STREAM_RANK_TIMEOUT = 120, 1800  # a stream may stop for minutes
_MONITORED = ((COUNT, WHOLE), (POSITIVE, AMOUNT))
MONITOR_LIMITS: Mapping[str, Key] = {
    one.name: Key(
        kind=_MONITORED[isinstance(one.default, float)][one.name in MAY_BE_ZERO],
        help=one.metadata["help"],
        default=one.default,
    )
    for one in fields(MonitorLimits)
}
MONITORS = KeyKind("a section of limits", (dict,), inside={name: one.kind for name, one in MONITOR_LIMITS.items()})
_LOG_LEVEL = choice("passive", "detail", "debug", "info", "warning", "error", "critical")
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSection(Section):
    """Training settings that are packtrain's own."""

    vit_lr: float | None = key(
        RATE,
        "Learning rate of the vision encoder. A part with its own rate is trained; rate 0 freezes it.",
        shown="learning_rate",
        aliases=("lr_vision_backbone",),
        resume="rate",
    )
    aligner_lr: float | None = key(
        RATE, "Learning rate of the projector.", shown="learning_rate", aliases=("lr_mp",), resume="rate"
    )
    effective_batch_size: int | None = key(
        COUNT, "Samples in an optimizer step over all processes, packed or not.", resume="plan"
    )
    effective_batch_unit: str | None = key(
        WORD,
        "Unit of effective_batch_size and of batch size x accumulation: samples or packs.",
        default="samples",
        resume="plan",
    )
    packs_per_step: int | None = key(
        COUNT,
        "Packs in an optimizer step over all processes.",
        shown="from the samples per step; one per process if no batch size is set",
        verbs=("pack",),
        resume="plan",
    )
    save_delay_steps: float | None = key(AMOUNT, "No checkpoint before this step.", default=0)
    warmup_ratio: float | None = key(BELOW_ONE, "Warm-up as a share of all steps; same as warmup_steps below 1.")
    group_by_length: bool | None = key(
        FLAG,
        "Batch padded samples of similar lengths: less padding, biased batches. For packs, use balance: strict.",
        default=False,
        resume="plan",
    )
    vision_checkpointing: bool | None = key(
        FLAG,
        "Gradient checkpointing in the vision encoder.",
        shown="same as gradient_checkpointing",
        aliases=("vit_gradient_checkpointing",),
    )
    vision_batch_patches: int | None = key(
        COUNT, "Most patches per forward pass of the vision encoder.", shown="all at once"
    )
    chunked_loss: bool | None = key(
        FLAG, "Compute logits at supervised positions only, in chunks; false: for the whole row.", default=True
    )
    loss_chunk: int | None = key(COUNT, "Tokens per chunk.", default=4096)
    loss_weighting: str | None = key(
        WORD, "What is weighted equally in the loss: token, sample, or sqrt (between the two).", default="token"
    )
    sharding: str | None = key(
        WORD,
        "Sharding: ddp (none), fsdp (FSDP2), or DeepSpeed's zero1 and zero2; zero3 runs as fsdp, and without "
        "deepspeed installed so do zero1 and zero2.",
        default="ddp",
    )
    attn_implementation: str | None = key(
        WORD,
        "Attention kernel: varlen, flash_attention_2, flash_attention_3, flex, sdpa, eager. auto picks the fastest "
        "that is exact for the model (eager with logit soft-capping or attention sinks).",
        default="auto",
    )
    compile: bool | None = key(
        FLAG, "Compile decoder layers (torch.compile), with static shapes.", shown="on a GPU, with packing"
    )
    early_stopping_patience: int | None = key(COUNT, "Stop after this many evaluations without a better loss.")
    early_stopping_threshold: float | None = key(AMOUNT, "Smallest improvement of the loss that counts.", default=0.0)
    monitors: dict[str, float] | None = key(
        MONITORS, "Thresholds of the early warnings, listed below.", shown="the defaults below"
    )
    master_weights: bool | None = key(
        FLAG, "Keep and update fp32 copies of the weights in the optimizer.", shown="true for bf16 trainable parameters"
    )
    rank_timeout: int | None = key(
        COUNT,
        "Seconds after which all processes end when one falls behind the others, such as while its data do not come.",
        shown=f"{RANK_TIMEOUT}; with data.online {STREAM_RANK_TIMEOUT}",
    )
    logging_dir: str | None = key(
        WORD, "Folder of TensorBoard logs.", shown="runs/ in the run's folder", resume="place"
    )
    num_gpus: int | None = key(
        COUNT,
        "Number of GPUs that the config is for: `plan` uses it; `train` warns if it runs on another number.",
        aliases=("NPROC_PER_NODE",),
    )
    packing_check: bool | None = key(FLAG, "Run the packing check on the model before the first step.", default=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSection(StepSection):
    """Training settings: packtrain's own, and those of transformers.TrainingArguments.

    That class accepts nearly anything and checks it too late; a test compares names and types.
    """

    learning_rate: float | None = key(
        RATE, "Peak learning rate.", default=5e-5, aliases=("lr_language_backbone",), resume="rate"
    )
    num_train_epochs: float | None = key(AMOUNT, "Epochs to train.", default=1, aliases=("num_epochs",), resume="plan")
    max_steps: int | None = key(
        STEPS, "Optimizer steps to train; overrides num_train_epochs.", aliases=("max_training_steps",), resume="plan"
    )
    per_device_train_batch_size: int | None = key(
        COUNT,
        "Samples per process in a micro-batch; with packing, it only sets the samples per step.",
        aliases=("batch_size", "micro_batch_size"),
        resume="plan",
    )
    gradient_accumulation_steps: int | None = key(
        COUNT, "Micro-batches per process in a step.", shown="from the step size", resume="plan"
    )
    output_dir: str | None = key(FOLDER, "Folder of the run.", shown="runs/ and the config's name", resume="place")
    optim: str | None = key(
        WORD,
        "Optimizer, by its name in transformers; multimodal means AdamW.",
        shown="AdamW",
        aliases=("optimizer",),
        resume="refused",
    )
    optim_args: str | None = key(TEXT, resume="refused")
    optim_target_modules: str | list[str] | None = key(either(TEXT, WORDS), resume="refused")
    weight_decay: float | None = key(AMOUNT, "Weight decay.", shown="0", resume="rate")
    adam_beta1: float | None = key(BELOW_ONE, resume="rate")
    adam_beta2: float | None = key(BELOW_ONE, resume="rate")
    adam_epsilon: float | None = key(AMOUNT, resume="rate")
    max_grad_norm: float | None = key(AMOUNT, "Clip gradients to this norm; 0: no clipping.", shown="1")
    lr_scheduler_type: str | None = key(
        choice(*SCHEDULES),
        f"Learning rate schedule: {', '.join(SCHEDULES)}.",
        shown="linear",
        aliases=("lr_scheduler",),
    )
    lr_scheduler_kwargs: dict[str, object] | None = key(SECTION)
    warmup_steps: float | None = key(AMOUNT, "Warm-up steps; below 1: a share of all steps.", shown="0")
    neftune_noise_alpha: float | None = key(AMOUNT)
    label_smoothing_factor: float | None = key(BELOW_ONE)
    gradient_checkpointing: bool | None = key(
        FLAG, "Recompute activations of decoder layers in the backward pass: less memory, slower.", default=True
    )
    gradient_checkpointing_kwargs: dict[str, object] | None = key(SECTION)
    seed: int | None = key(SEED, "Random seed.", default=0, resume="plan")
    data_seed: int | None = key(SEED, "Random seed of the data: packs and their order.", shown="seed", resume="plan")
    eval_strategy: str | None = key(
        choice("no", "steps", "epoch"),
        "When to evaluate data.eval_path or eval_size: no, steps or epoch.",
        shown="steps with eval_steps, else epoch",
        aliases=("evaluation_strategy",),
    )
    eval_steps: float | None = key(
        POSITIVE, "Steps between evaluations; below 1: a share of all steps.", aliases=("eval_interval",)
    )
    eval_delay: float | None = key(AMOUNT)
    eval_on_start: bool | None = key(FLAG)
    eval_accumulation_steps: int | None = key(COUNT)
    per_device_eval_batch_size: int | None = key(COUNT, aliases=("eval_batch_size",))
    save_strategy: str | None = key(
        choice("no", "steps", "epoch", "best"), "When to save checkpoints: no, steps, epoch or best.", shown="steps"
    )
    save_steps: float | None = key(POSITIVE, "Steps between checkpoints; below 1: a share of all steps.", shown="500")
    save_total_limit: int | None = key(
        COUNT, "Number of checkpoints to keep: the newest, and the best one.", default=KEPT_CHECKPOINTS
    )
    save_only_model: bool | None = key(FLAG)
    save_on_each_node: bool | None = key(FLAG)
    enable_jit_checkpoint: bool | None = key(FLAG)
    load_best_model_at_end: bool | None = key(FLAG)
    metric_for_best_model: str | None = key(TEXT)
    greater_is_better: bool | None = key(FLAG)
    logging_strategy: str | None = key(
        choice("no", "steps", "epoch"),
        "When to log to report_to: no, steps or epoch. metrics.jsonl has every step.",
        shown="steps",
    )
    logging_steps: float | None = key(
        POSITIVE, "Steps between logs to report_to.", default=10, aliases=("stats_log_interval",)
    )
    logging_first_step: bool | None = key(FLAG)
    logging_nan_inf_filter: bool | None = key(FLAG)
    log_level: str | None = key(_LOG_LEVEL)
    log_level_replica: str | None = key(_LOG_LEVEL)
    log_on_each_node: bool | None = key(FLAG)
    report_to: str | list[str] | None = key(
        either(TEXT, WORDS), "Loggers: none, tensorboard, wandb, or a list of them.", default="none"
    )
    run_name: str | None = key(TEXT, aliases=("wandb_name",))
    project: str | None = key(TEXT)
    trackio_space_id: str | None = key(TEXT)
    trackio_bucket_id: str | None = key(TEXT)
    trackio_static_space_id: bool | str | None = key(either(FLAG, TEXT))
    bf16: bool | None = key(FLAG, "Compute in bf16 over fp32 weights; see model.dtype.")
    fp16: bool | None = key(FLAG)
    bf16_full_eval: bool | None = key(FLAG)
    fp16_full_eval: bool | None = key(FLAG)
    tf32: bool | None = key(FLAG)
    torch_compile: bool | None = key(FLAG)
    torch_compile_backend: str | None = key(TEXT)
    torch_compile_mode: str | None = key(TEXT)
    torch_empty_cache_steps: int | None = key(COUNT)
    use_cpu: bool | None = key(FLAG)
    use_cache: bool | None = key(FLAG)
    use_liger_kernel: bool | None = key(FLAG, aliases=("enable_liger_kernel", "use_liger"))
    liger_kernel_config: dict[str, object] | None = key(SECTION)
    auto_find_batch_size: bool | None = key(FLAG)
    average_tokens_across_devices: bool | None = key(FLAG)
    full_determinism: bool | None = key(FLAG)
    skip_memory_metrics: bool | None = key(FLAG)
    debug: str | list[str] | None = key(either(TEXT, WORDS))
    disable_tqdm: bool | None = key(FLAG)
    do_train: bool | None = key(FLAG)
    do_eval: bool | None = key(FLAG)
    do_predict: bool | None = key(FLAG)
    prediction_loss_only: bool | None = key(FLAG)
    include_for_metrics: list[str] | None = key(WORDS)
    include_num_input_tokens_seen: bool | str | None = key(either(FLAG, choice("no", "all", "non_padding")))
    label_names: list[str] | None = key(WORDS)
    batch_eval_metrics: bool | None = key(FLAG)
    eval_do_concat_batches: bool | None = key(FLAG)
    eval_use_gather_object: bool | None = key(FLAG)
    ignore_data_skip: bool | None = key(FLAG)
    resume_from_checkpoint: str | None = key(TEXT)
    restore_callback_states_from_checkpoint: bool | None = key(FLAG)
    remove_unused_columns: bool | None = key(FLAG)
    train_sampling_strategy: str | None = key(TEXT)
    length_column_name: str | None = key(TEXT)
    dataloader_num_workers: int | None = key(WHOLE)
    dataloader_prefetch_factor: int | None = key(COUNT)
    dataloader_drop_last: bool | None = key(FLAG)
    dataloader_pin_memory: bool | None = key(FLAG)
    dataloader_persistent_workers: bool | None = key(FLAG)
    dataloader_in_order: bool | None = key(FLAG)
    dataloader_multiprocessing_context: str | None = key(choice("fork", "spawn", "forkserver"))
    accelerator_config: dict[str, object] | None = key(SECTION)
    parallelism_config: dict[str, object] | None = key(SECTION)
    deepspeed: str | dict[str, object] | None = key(either(WORD, SECTION))
    fsdp: str | None = key(TEXT)
    fsdp_config: str | dict[str, object] | None = key(either(WORD, SECTION))
    ddp_backend: str | None = key(TEXT)
    ddp_timeout: int | None = key(COUNT)
    ddp_bucket_cap_mb: int | None = key(COUNT)
    ddp_find_unused_parameters: bool | None = key(FLAG)
    ddp_broadcast_buffers: bool | None = key(FLAG)
    ddp_static_graph: bool | None = key(FLAG)
    local_rank: int | None = key(PLACE)
    push_to_hub: bool | None = key(FLAG)
    hub_model_id: str | None = key(TEXT)
    hub_token: str | None = key(TEXT)
    hub_revision: str | None = key(TEXT)
    hub_strategy: str | None = key(choice("end", "every_save", "checkpoint", "all_checkpoints"))
    hub_private_repo: bool | None = key(FLAG)
    hub_always_push: bool | None = key(FLAG)
