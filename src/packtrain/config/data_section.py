"""The settings of data: where they are, how records are read, what is measured, and how samples are packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.config.keys import (
    COUNT,
    DAY,
    FLAG,
    FOLDER,
    HELD,
    LIMITS,
    MEASURING,
    NAMES,
    PACKING,
    POSITIVE,
    SECONDS,
    SHARE,
    SWITCH,
    TEXT,
    WHOLE,
    WORD,
    WORDS,
    Key,
    KeyKind,
    Section,
    choice,
    key,
    measured,
    pack_limit,
    packed,
)
from packtrain.core.numbers import GIB
from packtrain.records.media import MAX_IMAGE_PIXELS

_FORMAT = choice("json", "jsonl", "csv", "tsv", "parquet", "arrow", "hf_dataset", "webdataset", "yaml")
_MEASURE, _DATA = ("measure",), ("measure", "verify")  # commands


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSection(Section):
    """A dataset: where it is, how its records are read, and how samples are packed."""

    dataset_path: str | None = key(
        WORD,
        "A file or folder (jsonl, json, csv, tsv, parquet, arrow, tar shards), HF dataset, YAML mixture or hub name.",
        aliases=("train_jsonl", "dataset_name", "train_dataset_path"),
        resume="plan",
        costs=True,
    )
    dataset_type: str | None = measured(
        choice("vision", "vision_audio", "fineweb_edu"),
        "Kind of records: vision (text, images, video) or fineweb_edu (plain text).",
        default="vision",
    )
    dataset_format: str | None = measured(
        _FORMAT,
        "Format of the files: json, jsonl, csv, tsv, parquet, arrow, hf_dataset, webdataset, yaml.",
        shown="detected",
        verbs=_DATA,
    )
    media_root: str | None = measured(
        WORD, "Folder that relative media paths start from.", shown="the data file's folder", verbs=_DATA
    )
    split: str | None = measured(
        WORD,
        "Split of a Hugging Face dataset, or of a folder whose files are named after splits.",
        default="train",
        aliases=("dataset_train_split",),
    )
    subset: str | None = measured(WORD, "Configuration of a Hugging Face dataset that has several.")
    sources: list[str] | None = measured(
        WORDS, "Use only these sources of a mixture.", shown="all", options=("--source",)
    )
    schema: str | None = measured(WORD, "Chat schema of the records.", shown="detected for each record")
    columns: dict[str, str] | None = measured(
        NAMES, "Column mapping: {name in the data: name here}; on the command line query=question,response=answer."
    )
    strict_columns: bool | None = measured(FLAG, "Refuse records with unused columns or keys.", default=False)
    formatting_func: str | None = measured(
        WORD,
        "Your own module:function, or FILE.py:function, that maps a raw record to messages. It is imported and run.",
    )
    object_ordering: str | None = measured(
        WORD, "Order of annotated objects: sorted, random or as_is.", default="sorted"
    )
    emit_norm: str | None = measured(
        WORD, "Coordinates of objects: none (unchanged), norm100, norm1000.", default="none"
    )
    object_template: str | None = measured(
        WORD, "Your own Jinja template for objects; on the command line, a file that holds it."
    )
    object_prompt: str | None = key(
        TEXT, "What the user message asks about the image; empty for the image alone.", costs=True
    )
    coord_tokens: bool | dict[str, object] | None = key(
        SWITCH, "Not supported: must be false.", default=False, costs=True
    )
    loss_on: str | None = measured(
        choice("assistant", "completion", "all"),
        "Tokens that carry loss: assistant, completion (only the last answer) or all.",
        shown="assistant for chats, all for plain text",
        verbs=_DATA,
    )
    add_eos: bool | None = measured(
        FLAG,
        "Append the EOS token unless the text already ends with it.",
        shown="true for plain text",
        options=("--add-eos/--no-add-eos",),
    )
    template_date: str | None = measured(
        DAY,
        "Date, YYYY-MM-DD, for chat templates that write today's date (`strftime_now`, at midnight); saved in "
        "run.yaml, so that a resumed run has the same texts.",
        shown="today",
    )
    chat_template: str | None = measured(
        WORD,
        "File with your own chat template (Jinja), used instead of the model's and saved in `final`.",
        shown="the model's own",
    )
    processor_config: dict[str, float] | None = key(
        LIMITS,
        "Media limits: min_pixels, max_pixels, video_min_pixels, video_max_pixels, max_img_size, num_frames, fps, "
        "max_frames.",
        shown="the model's own",
        costs=True,
    )
    max_samples: int | None = measured(
        COUNT,
        "Use this many records, drawn at random with the seed.",
        shown="all",
        aliases=("max_train_samples",),
        options=("--max-samples", "--limit"),
        needs=MEASURING,
    )
    eval_size: float | None = measured(
        HELD,
        "Share (below 1) or number of records to hold out for evaluation, drawn at random with the seed.",
        shown="none",
        aliases=("val_size", "val_set_size", "split_dataset_ratio", "val_ratio"),
        resume="plan",
        needs=MEASURING,
    )
    min_seconds: float | None = measured(SECONDS, "Drop records with shorter videos.")
    max_seconds: float | None = measured(SECONDS, "Drop records with longer videos.")
    max_images_per_sample: int | None = measured(
        COUNT, "Drop records with more images.", aliases=("max_images_per_example",)
    )
    max_sample_length: int | None = measured(COUNT, "Drop records with more tokens.")
    allow_outside_root: bool | None = measured(
        FLAG, "Allow media outside the media root (absolute paths, symlinks).", default=False, verbs=_DATA
    )
    max_image_pixels: int | None = key(
        COUNT, "Refuse larger images before they are decoded.", default=MAX_IMAGE_PIXELS, costs=True
    )
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
        FLAG,
        "Detect changed data files by content, not by size and modification time.",
        default=False,
        verbs=_MEASURE,
        needs=MEASURING,
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
        needs=MEASURING,
    )
    plan: str | None = key(
        WORD,
        "Output of packtrain pack to train on; settings that it was made with may be left out.",
        shown="found in the cache, or packed",
        resume="plan",
        needs=MEASURING,
    )
    packing: bool | None = key(
        FLAG,
        "Sequence packing (padding-free). false: one sample per row, padded to the longest of its batch.",
        default=True,
        shown="true; false in configs of systems that do not pack by default",
        aliases=("sample_packing",),
        resume="plan",
    )
    packing_length: int | None = packed(
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
        options=("--packing-length", "-n"),
        resume="plan",
    )
    packing_strategy: str | None = packed(
        WORD,
        "Packing algorithm: best_fit, first_fit, next_fit, window_N, knapsack (packs most alike), none, "
        "wrapped (texts are cut where a pack is full), or your own module:function, which is imported and run.",
        default="best_fit",
        resume="plan",
        needs=MEASURING,
    )
    effort: str | None = packed(
        WORD,
        "With several limits: fast, or best (fewer packs, takes longer).",
        default="fast",
        needs=(
            "measuring",
            "packing",
        ),
    )
    max_images_per_pack: int | None = pack_limit("Most images in a pack.", aliases=("max_images_per_knapsack",))
    max_patches_per_pack: int | None = pack_limit(
        "Most vision patches in a pack; they determine the vision encoder's memory."
    )
    max_vision_tokens_per_pack: int | None = pack_limit("Most image and video tokens in a pack.")
    max_videos_per_pack: int | None = pack_limit("Most videos in a pack.")
    max_frames_per_pack: int | None = pack_limit("Most video frames in a pack.")
    max_samples_per_pack: int | None = pack_limit("Most samples in a pack.")
    max_attention_per_pack: int | None = pack_limit("Most attention work in a pack: the sum of squared sample lengths.")
    pack_alignment: int | None = packed(
        COUNT, "Pad each sample in a pack to a multiple of this many tokens.", default=1, resume="plan", needs=MEASURING
    )
    max_packs: int | None = packed(
        COUNT,
        "Most packs in an epoch; samples of the rest go to the ledger.",
        shown="all packs",
        resume="plan",
        needs=MEASURING,
    )
    cutoff_len: int | None = packed(
        COUNT,
        "Truncate samples to this many tokens before packing; never inside an image or a video.",
        shown="no truncation",
        resume="plan",
        needs=MEASURING,
    )
    truncate_side: str | None = packed(
        WORD,
        "Side that is truncated: right keeps the beginning; left keeps the end, only of samples without media.",
        default="right",
        resume="plan",
    )
    overlong: str | None = packed(
        WORD,
        "Samples too long for a pack: drop (and list in the ledger), truncate, split, or error.",
        default="drop",
        resume="plan",
    )
    packing_window: int | None = packed(
        COUNT,
        "Pack within windows of this many consecutive samples.",
        shown="the whole epoch",
        needs=(
            "measuring",
            "packing",
        ),
    )
    packing_min_fill_ratio: float | None = packed(
        SHARE,
        "Packs with a lower fill are packed again with the next window.",
        default=0.0,
        needs=(
            "measuring",
            "packing",
        ),
    )
    online: bool | None = key(
        FLAG,
        "Pack a stream while it is read, without measuring it first, through a buffer of packing_buffer samples; needs "
        "max_steps. For data too large to measure first, or that keep growing: docs/guides/streaming.md",
        default=False,
        resume="plan",
    )
    packing_buffer: int | None = key(
        COUNT, "With online: samples in the packing buffer.", default=1024, resume="plan", needs=PACKING
    )
    packing_drop_last: bool | None = packed(
        FLAG,
        "Drop the last packs of an epoch that do not fill a step.",
        default=False,
        needs=(
            "measuring",
            "packing",
        ),
    )
    repack_each_epoch: bool | None = packed(
        FLAG,
        "Repack each epoch, or reuse the same packs.",
        default=True,
        options=("--repack-each-epoch/--same-packs",),
        needs=MEASURING,
    )
    shuffle: bool | None = packed(
        FLAG,
        "Shuffle samples, or keep the dataset's order.",
        default=True,
        options=("--shuffle/--no-shuffle",),
        resume="plan",
    )
    balance: str | None = key(
        choice("sorted", "strict", "random", "length"),
        "Order of packs: sorted (even work within a step), strict or random; without packing: random or length.",
        shown="sorted for packs, random for padded batches; as packed with shuffle: false",
        resume="plan",
        needs=MEASURING,
    )
    pad_packs: bool | None = key(
        FLAG,
        "With packing: false, a padded batch holds the samples of one pack, so steps have the same samples as packed.",
        default=False,
        resume="plan",
        needs=MEASURING,
    )
    cache_dir: str | None = key(
        FOLDER,
        "Cache folder of cost tables, plans, rows and tokens.",
        shown="the user's cache folder",
        aliases=("preprocessing_cache_dir", "dataset_prepared_path"),
        resume="place",
    )
    cache_bytes: int | None = key(
        COUNT, "Disk budget for copies of compressed or remote data files.", default=10 * GIB, shown="10 GiB"
    )
    cache_tokens: bool | None = key(
        FLAG, "Tokenize once before training and keep the result.", shown="true without packing", needs=MEASURING
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


def _limit(help: str, *aliases: str, kind: KeyKind = COUNT) -> Key:
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
