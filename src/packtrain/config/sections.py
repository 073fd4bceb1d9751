"""The settings of a run, by section. Loader, command-line options, documentation and the check of a resumed run follow
from these fields; a new setting is one field here and the code that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from packtrain.config.keys import (
    AMOUNT,
    BELOW_ONE,
    COUNT,
    DAY,
    FLAG,
    FOLDER,
    HELD,
    LIMITS,
    NAMES,
    PLACE,
    POSITIVE,
    RATE,
    SECONDS,
    SECTION,
    SEED,
    SHARE,
    STEPS,
    SWITCH,
    TEXT,
    WHOLE,
    WORD,
    WORDS,
    Key,
    Kind,
    Section,
    choice,
    either,
    key,
)
from packtrain.records.media import MAX_IMAGE_PIXELS
from packtrain.runs.history import MAY_BE_ZERO, MonitorLimits

KEPT_CHECKPOINTS = 2
_MONITORED = ((COUNT, WHOLE), (POSITIVE, AMOUNT))
MONITOR_LIMITS: Mapping[str, Key] = {
    one.name: Key(
        kind=_MONITORED[isinstance(one.default, float)][one.name in MAY_BE_ZERO],
        help=one.metadata["help"],
        default=one.default,
    )
    for one in fields(MonitorLimits)
}
MONITORS = Kind("a section of limits", (dict,), inside={name: one.kind for name, one in MONITOR_LIMITS.items()})
_MEASURE, _PACK = ("measure",), ("pack",)
_LOG_LEVEL = choice("passive", "detail", "debug", "info", "warning", "error", "critical")
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)


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
        verbs=_MEASURE,
        options=("--plugins",),
        resume="plan",
    )
    vit_img_size: int | None = key(COUNT, "Checked against the model's tile size; a different value is an error.")
    mp_image_token_length: int | None = key(
        COUNT, "Checked against the model's own value; a different one is an error."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSection(Section):
    """A dataset: where it is, how its records are read, and how samples are packed."""

    dataset_path: str | None = key(
        WORD,
        "A file or folder (jsonl, json, csv, tsv, parquet, arrow, tar shards), HF dataset, YAML mixture or hub name.",
        aliases=("train_jsonl", "dataset_name", "train_dataset_path"),
        resume="plan",
    )
    dataset_type: str | None = key(
        WORD,
        "Kind of records: vision (text, images, video) or fineweb_edu (plain text).",
        default="vision",
        verbs=_MEASURE,
    )
    dataset_format: str | None = key(
        WORD,
        "Format of the files: json, jsonl, csv, tsv, parquet, arrow, hf_dataset, webdataset, yaml.",
        shown="detected",
        verbs=_MEASURE,
    )
    media_root: str | None = key(
        WORD, "Folder that relative media paths start from.", shown="the data file's folder", verbs=_MEASURE
    )
    split: str | None = key(
        WORD,
        "Split of a Hugging Face dataset, or of a folder whose files are named after splits.",
        default="train",
        aliases=("dataset_train_split",),
        verbs=_MEASURE,
    )
    subset: str | None = key(WORD, "Configuration of a Hugging Face dataset that has several.", verbs=_MEASURE)
    sources: list[str] | None = key(
        WORDS, "Use only these sources of a mixture.", shown="all", verbs=_MEASURE, options=("--source",)
    )
    schema: str | None = key(WORD, "Chat schema of the records.", shown="detected for each record", verbs=_MEASURE)
    columns: dict[str, str] | None = key(
        NAMES,
        "Column mapping: {name in the data: name here}; on the command line query=question,response=answer.",
        verbs=_MEASURE,
    )
    strict_columns: bool | None = key(
        FLAG, "Refuse records with unused columns or keys.", default=False, verbs=_MEASURE
    )
    formatting_func: str | None = key(
        WORD,
        "Your own module:function, or FILE.py:function, that maps a raw record to messages. It is imported and run.",
        verbs=_MEASURE,
    )
    object_ordering: str | None = key(
        WORD, "Order of annotated objects: sorted, random or as_is.", default="sorted", verbs=_MEASURE
    )
    emit_norm: str | None = key(
        WORD, "Coordinates of objects: none (unchanged), norm100, norm1000.", default="none", verbs=_MEASURE
    )
    object_template: str | None = key(
        WORD, "Your own Jinja template for objects; on the command line, a file that holds it.", verbs=_MEASURE
    )
    object_prompt: str | None = key(TEXT, "What the user message asks about the image; empty for the image alone.")
    coord_tokens: bool | dict[str, object] | None = key(SWITCH, "Not supported: must be false.", default=False)
    loss_on: str | None = key(
        WORD,
        "Tokens that carry loss: assistant, completion (only the last answer) or all.",
        shown="assistant for chats, all for plain text",
        verbs=_MEASURE,
    )
    add_eos: bool | None = key(
        FLAG,
        "Append the EOS token unless the text already ends with it.",
        shown="true for plain text",
        verbs=_MEASURE,
        options=("--add-eos/--no-add-eos",),
    )
    template_date: str | None = key(
        DAY,
        "Date, YYYY-MM-DD, for chat templates that write today's date (`strftime_now`, at midnight); saved in "
        "run.yaml, so that a resumed run has the same texts.",
        shown="today",
        verbs=_MEASURE,
    )
    chat_template: str | None = key(
        WORD,
        "File with your own chat template (Jinja), used instead of the model's and saved in `final`.",
        shown="the model's own",
        verbs=_MEASURE,
    )
    processor_config: dict[str, float] | None = key(
        LIMITS,
        "Media limits: min_pixels, max_pixels, video_min_pixels, video_max_pixels, max_img_size, num_frames, fps, "
        "max_frames.",
        shown="the model's own",
    )
    max_samples: int | None = key(
        COUNT,
        "Use this many records, drawn at random with the seed.",
        shown="all",
        aliases=("max_train_samples",),
        verbs=_MEASURE,
        options=("--max-samples", "--limit"),
    )
    eval_size: float | None = key(
        HELD,
        "Share (below 1) or number of records to hold out for evaluation, drawn at random with the seed.",
        shown="none",
        aliases=("val_size", "val_set_size", "split_dataset_ratio", "val_ratio"),
        verbs=_MEASURE,
        resume="plan",
    )
    min_seconds: float | None = key(SECONDS, "Drop records with shorter videos.", verbs=_MEASURE)
    max_seconds: float | None = key(SECONDS, "Drop records with longer videos.", verbs=_MEASURE)
    max_images_per_sample: int | None = key(
        COUNT, "Drop records with more images.", aliases=("max_images_per_example",), verbs=_MEASURE
    )
    max_sample_length: int | None = key(COUNT, "Drop records with more tokens.", verbs=_MEASURE)
    allow_outside_root: bool | None = key(
        FLAG, "Allow media outside the media root (absolute paths, symlinks).", default=False, verbs=_MEASURE
    )
    max_image_pixels: int | None = key(COUNT, "Refuse larger images before they are decoded.", default=MAX_IMAGE_PIXELS)
    on_error: str | None = key(
        choice("skip", "fail"),
        "Unusable records: skip (and list in the ledger), or fail at the first.",
        default="skip",
        verbs=_MEASURE,
    )
    max_failure_rate: float | None = key(
        SHARE,
        "Stop when more than this share of records is unusable: while measuring, and again while decoding for "
        "training (checked after 1,000 samples and at the end of each epoch and of the run).",
        default=0.05,
        verbs=_MEASURE,
    )
    check: int | None = key(
        WHOLE,
        "Records of the drift check: encoded again with the real processor and compared; 0 turns it off.",
        default=32,
        verbs=_MEASURE,
    )
    content_hash: bool | None = key(
        FLAG, "Detect changed data files by content, not by size and modification time.", default=False, verbs=_MEASURE
    )
    workers: int | None = key(
        COUNT,
        "Worker processes for measuring and tokenizing. The result does not depend on their number.",
        shown="one per core",
        aliases=("preprocessing_num_workers", "dataset_num_proc", "dataset_processes"),
        verbs=_MEASURE,
        options=("--workers", "-w"),
    )
    costs: str | None = key(
        WORD,
        "Output of packtrain measure for this data; an error if it does not match.",
        shown="found in the cache, or measured",
        resume="place",
    )
    plan: str | None = key(
        WORD,
        "Output of packtrain pack to train on; settings that it was made with may be left out.",
        shown="found in the cache, or packed",
        resume="plan",
    )
    packing: bool | None = key(
        FLAG,
        "Sequence packing (padding-free). false: one sample per row, padded to the longest of its batch.",
        default=True,
        shown="true; false in configs of systems that do not pack by default",
        aliases=("sample_packing",),
        resume="plan",
    )
    packing_length: int | None = key(
        COUNT,
        "Most tokens in a pack.",
        shown="per_device_train_batch_size x cutoff_len, or the model's context length, up to 32,000; shorter if the "
        "samples of a step need less",
        aliases={
            "global_max_length": {"overlong": "drop"},
            "sequence_len": {"overlong": "drop"},
            "max_seq_length": {"overlong": "truncate"},
            "max_length": {"overlong": "truncate"},
            "lm_max_length": {},
        },
        verbs=_PACK,
        options=("--packing-length", "-n"),
        resume="plan",
    )
    packing_strategy: str | None = key(
        WORD,
        "Packing algorithm: best_fit, first_fit, next_fit, window_N, knapsack (packs most alike), none, "
        "wrapped (texts are cut where a pack is full), or your own module:function, which is imported and run.",
        default="best_fit",
        verbs=_PACK,
        resume="plan",
    )
    effort: str | None = key(
        WORD, "With several limits: fast, or best (fewer packs, takes longer).", default="fast", verbs=_PACK
    )
    max_images_per_pack: int | None = key(
        COUNT, "Most images in a pack.", shown="no limit", aliases=("max_images_per_knapsack",), verbs=_PACK
    )
    max_patches_per_pack: int | None = key(
        COUNT,
        "Most vision patches in a pack; they determine the vision encoder's memory.",
        shown="no limit",
        verbs=_PACK,
    )
    max_vision_tokens_per_pack: int | None = key(
        COUNT, "Most image and video tokens in a pack.", shown="no limit", verbs=_PACK
    )
    max_videos_per_pack: int | None = key(COUNT, "Most videos in a pack.", shown="no limit", verbs=_PACK)
    max_frames_per_pack: int | None = key(COUNT, "Most video frames in a pack.", shown="no limit", verbs=_PACK)
    max_samples_per_pack: int | None = key(COUNT, "Most samples in a pack.", shown="no limit", verbs=_PACK)
    max_attention_per_pack: int | None = key(
        COUNT, "Most attention work in a pack: the sum of squared sample lengths.", shown="no limit", verbs=_PACK
    )
    pack_alignment: int | None = key(
        COUNT, "Pad each sample in a pack to a multiple of this many tokens.", default=1, verbs=_PACK, resume="plan"
    )
    max_packs: int | None = key(
        COUNT,
        "Most packs in an epoch; samples of the rest go to the ledger.",
        shown="all packs",
        verbs=_PACK,
        resume="plan",
    )
    cutoff_len: int | None = key(
        COUNT,
        "Truncate samples to this many tokens before packing; never inside an image or a video.",
        shown="no truncation",
        verbs=_PACK,
        resume="plan",
    )
    truncate_side: str | None = key(
        WORD,
        "Side that is truncated: right keeps the beginning; left keeps the end, only of samples without media.",
        default="right",
        verbs=_PACK,
        resume="plan",
    )
    overlong: str | None = key(
        WORD,
        "Samples too long for a pack: drop (and list in the ledger), truncate, split, or error.",
        default="drop",
        verbs=_PACK,
        resume="plan",
    )
    packing_window: int | None = key(
        COUNT, "Pack within windows of this many consecutive samples.", shown="the whole epoch", verbs=_PACK
    )
    packing_min_fill_ratio: float | None = key(
        SHARE, "Packs with a lower fill are packed again with the next window.", default=0.0, verbs=_PACK
    )
    online: bool | None = key(
        FLAG,
        "Pack a stream while it is read, without measuring it first, through a buffer of packing_buffer samples; needs "
        "max_steps. For data too large to measure first, or that keep growing: docs/guides/streaming.md",
        default=False,
        resume="plan",
    )
    packing_buffer: int | None = key(COUNT, "With online: samples in the packing buffer.", default=1024, resume="plan")
    packing_drop_last: bool | None = key(
        FLAG, "Drop the last packs of an epoch that do not fill a step.", default=False, verbs=_PACK
    )
    repack_each_epoch: bool | None = key(
        FLAG,
        "Pack each epoch anew, or reuse the same packs.",
        default=True,
        verbs=_PACK,
        options=("--repack-each-epoch/--same-packs",),
    )
    shuffle: bool | None = key(
        FLAG,
        "Shuffle samples, or keep the dataset's order.",
        default=True,
        verbs=_PACK,
        options=("--shuffle/--no-shuffle",),
        resume="plan",
    )
    balance: str | None = key(
        WORD,
        "Order of packs: sorted (even work within a step), strict or random; without packing: random or length.",
        shown="sorted for packs, random for padded batches; as packed with shuffle: false",
        resume="plan",
    )
    pad_packs: bool | None = key(
        FLAG,
        "With packing: false, a padded batch holds the samples of one pack, so steps have the same samples as packed.",
        default=False,
        resume="plan",
    )
    cache_dir: str | None = key(
        FOLDER,
        "Cache folder of cost tables, plans, rows and tokens.",
        shown="the user's cache folder",
        aliases=("preprocessing_cache_dir", "dataset_prepared_path"),
        resume="place",
    )
    cache_bytes: int | None = key(
        COUNT, "Disk budget for copies of compressed or remote data files.", default=10 << 30, shown="10 GiB"
    )
    cache_tokens: bool | None = key(
        FLAG, "Tokenize once before training and keep the result.", shown="true without packing"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection(DatasetSection):
    """The training and evaluation data of a run."""

    eval_path: str | None = key(
        WORD,
        "Evaluation data, as in dataset_path.",
        aliases=("val_jsonl", "eval_dataset_path", "eval_dataset"),
        resume="place",
    )
    eval_split: str | None = key(
        WORD, "Split of the evaluation data.", shown="same as split", aliases=("dataset_test_split",)
    )
    eval_packing: bool | None = key(
        FLAG,
        "Pack the evaluation data; the evaluation loss is the same either way.",
        shown="same as packing",
        aliases=("eval_sample_packing",),
    )
    max_eval_samples: int | None = key(COUNT, "max_samples of the evaluation data.", shown="all")
    streaming: bool | None = key(
        FLAG, "Read data files, also those of a hub dataset, through a cache of cache_bytes.", default=False
    )


def _limit(help: str, *aliases: str, kind: Kind = COUNT) -> Key:
    return Key(kind=kind, help=help, aliases={name: {} for name in aliases})


MEDIA_LIMITS: Mapping[str, Key] = {
    "min_pixels": _limit("Smallest image, in pixels (Qwen-VL).", "image_min_pixels", "MIN_PIXELS"),
    "max_pixels": _limit("Largest image, in pixels (Qwen-VL).", "image_max_pixels", "MAX_PIXELS"),
    "video_min_pixels": _limit("Smallest video frame, in pixels (Qwen2-VL, Qwen2.5-VL).", "VIDEO_MIN_PIXELS"),
    "video_max_pixels": _limit("Largest video frame, in pixels (Qwen2-VL, Qwen2.5-VL).", "VIDEO_MAX_PIXELS"),
    "max_img_size": _limit("Longest edge of an image (Idefics3, SmolVLM, nanoVLM)."),
    "num_frames": _limit("Frames sampled from a video.", "NFRAMES"),
    "fps": _limit("Frames sampled per second of video.", "video_fps", "FPS", kind=POSITIVE),
    "max_frames": _limit("Most frames sampled from a video.", "video_maxlen", "video_max_frames", "FPS_MAX_FRAMES"),
}


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
        verbs=_PACK,
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
    loss_weighting: str | None = key(WORD, "What is weighted equally in the loss: token or sample.", default="token")
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
    logging_dir: str | None = key(
        WORD, "Folder of TensorBoard logs.", shown="runs/ in the run's folder", resume="place"
    )
    num_gpus: int | None = key(
        COUNT,
        "Number of GPUs that the config is for: `plan` uses it; `train` warns if it runs on another number.",
        aliases=("NPROC_PER_NODE",),
    )
    quick_check: bool | None = key(FLAG, "Run the packing check on the model before the first step.", default=True)


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


def described_key(name: str) -> str:
    """A hint for a key whose name says what another one's help begins with.

    >>> described_key("attention"), described_key("format"), described_key("of")
    ('did you mean training.attn_implementation?', 'did you mean data.dataset_format?', '')
    """
    words = name.casefold().replace("_", " ")
    fits = (key for key, one in KEYS.items() if one.help.casefold().startswith((f"{words} ", f"{words}.", f"{words}:")))
    key = next(fits, "")
    return f"did you mean {HOMES[key]}.{key}?" if key else ""


def keys_with(resume: str) -> tuple[str, ...]:
    """Settings that a changed value of in a resumed run is treated this way."""
    return tuple(name for name, one in KEYS.items() if one.resume == resume)
