"""Keys of other systems that are no other name of one of ours: what they mean here, or why they cannot be.

Plain other names stand with the key they mean, in `sections`; lists of datasets in `their_data`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packtrain.config.their_data import datasets_of


@dataclass(frozen=True, slots=True)
class Means:
    """Settings of ours, or none where a key changes nothing here; and what else there is to know."""

    settings: Mapping[str, object] = field(default_factory=dict)
    why: str = ""
    mixture: tuple[Mapping[str, object], ...] = ()  # several datasets, which are a file of their own


# A text says why it cannot be; None: the key means here what it says.
Meaning = Means | str | None
Meant = Callable[[Any, Mapping[str, object]], Meaning]  # of a value and of all that the file says beside it
_ATTENTION = {
    **{"auto": "auto", "fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"},
    **{"flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2", "eager": "eager"},
    **{"flash_attention_3": "flash_attention_3", "flex": "flex"},
}
# Names of templates that stand for the template of a model family; any other is a text of its own.
_FAMILY_TEMPLATE = re.compile(
    "(qwen|llama[34]|mllama|gemma|paligemma|intern|mistral|ministral|pixtral|smol|idefics|phi|llava|glm4|tokenizer_default)"
)
_OFF = (None, False, "", 0, 0.0, "no", "none", "None", "false", "False")


def _nothing(why: str) -> Meant:
    return lambda value, beside: Means(why=why)


def _refused(why: str) -> Meant:
    return lambda value, beside: why


def _only_off(why: str, off: str = "it is off") -> Meant:
    """A switch, a list, or a section with `enabled`, that has to be off."""

    def meaning(value: Any, beside: Mapping[str, object]) -> Meaning:
        on = value.get("enabled", bool(value)) if isinstance(value, Mapping) else value
        empty = on in _OFF if isinstance(on, str | int | float | None) else not on
        return Means(why=off) if empty else why

    return meaning


def _only(usual: Any, why: str, said: str = "as it is here") -> Meant:
    """A setting of which only one value is known."""
    return lambda value, beside: Means(why=said) if value == usual or not value else why


def _switch(on: Mapping[str, object], off: Mapping[str, object] | None = None, why: str = "") -> Meant:
    def meaning(value: Any, beside: Mapping[str, object]) -> Meaning:
        if not isinstance(value, bool):
            return f"{value!r:.100} instead of true or false"
        settings = on if value else off or {}
        return Means(settings, why if settings or (value and why) else "it is off")

    return meaning


def _flag(why: str) -> Meant:
    """A switch that changes nothing here, either way."""
    return lambda value, beside: Means(why=why) if isinstance(value, bool) else None


def _among(known: Mapping[Any, Mapping[str, object]], otherwise: str) -> Meant:
    def meaning(value: Any, beside: Mapping[str, object]) -> Meaning:
        if not isinstance(value, str | int | None) or value not in known:
            return otherwise
        return Means(known[value], "" if known[value] else "as it is here")

    return meaning


def _template(value: Any, beside: Mapping[str, object]) -> Meaning:
    """A name of a chat template; a file of one is ours."""
    if isinstance(value, str) and (os.path.exists(value) or value.endswith((".jinja", ".j2", ".txt"))):
        return Means({"chat_template": value})
    if isinstance(value, str) and _FAMILY_TEMPLATE.match(value):
        return Means(why="chats are written with the model's own chat template; data.chat_template names another file")
    way = "leave it out to use the model's own, or name a file with a Jinja template as data.chat_template"
    return f"{value!r:.100} is not the template of a model: {way}"


def _per_epoch(kind: str) -> Meant:
    """Once an epoch, or a share of the run, as axolotl computes it."""

    def meaning(value: Any, beside: Mapping[str, object]) -> Meaning:
        if value in (0, 1) and not isinstance(value, bool):
            return Means({f"{kind}_strategy": "epoch" if value else "no"})
        epochs = beside.get("num_epochs") or 1
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            return f"{value!r:.100} instead of a number of times"
        if not isinstance(epochs, int | float) or beside.get("max_steps"):
            return f"needs num_epochs beside it; {kind}_steps below 1 is a share of the run"
        return Means({f"{kind}_strategy": "steps", f"{kind}_steps": round(1 / (value * epochs), 8)})

    return meaning


def _frozen(*parts: str) -> Meant:
    """Which parts learn. What is not frozen learns in full training; adapters are of the decoder alone."""

    def meaning(value: Any, beside: Mapping[str, object]) -> Meaning:
        if not isinstance(value, bool):
            return f"{value!r:.100} instead of true or false"
        method = next((beside[name] for name in ("finetuning_type", "train_type", "tuner_type") if name in beside), "")
        if value or method == "full":
            return Means(dict.fromkeys(parts, not value))
        if parts == ("train_language",):
            return Means(why="it learns")
        return Means(why=f"beside adapters, which are of the decoder, a part learns with {' or '.join(parts)}: true")

    return meaning


# Names of modules, and the parts that they are.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "visual": ("train_vision", "train_projector"),  # of Qwen: the merger is inside
    **dict.fromkeys(("vision_tower", "vision_model", "vision_encoder", "vision"), ("train_vision",)),
    **dict.fromkeys(
        ("multi_modal_projector", "connector", "merger", "visual.merger", "mm_projector", "mlp1"), ("train_projector",)
    ),
    **dict.fromkeys(("language_model", "model", "llm"), ("train_language",)),
}


def _freeze_modules(value: Any, beside: Mapping[str, object]) -> Meaning:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or any(name not in _MODULES for name in names):
        return (
            f"{value!r:.100} instead of {', '.join(_MODULES)}; train_vision, train_projector and train_language say it"
        )
    return Means({part: False for name in names for part in _MODULES[name]})


def _liger(value: Any, beside: Mapping[str, object]) -> Meaning:
    return Means(why="already covered by chunked_loss, which keeps logits small") if value is True else None


def _fsdp(value: Any, beside: Mapping[str, object]) -> Meaning:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return Means({"fsdp": " ".join(map(str, value))}) if value else Means(why="it is off")
    return None


def _deepspeed(value: Any, beside: Mapping[str, object]) -> Meaning:
    if not isinstance(value, Mapping) or "enabled" not in value:
        return None
    on = value.get("enabled") and value.get("config")
    return Means({"deepspeed": value["config"]}) if on else Means(why="it is off")


def _folder_of_runs(value: Any, beside: Mapping[str, object]) -> Meaning:
    if beside.get("output_dir"):
        return Means(why="output_dir names the run's folder")
    return Means({"output_dir": os.path.join(str(value), str(beside.get("run_name") or "run"))})


def _subsets(value: Any, beside: Mapping[str, object]) -> Meaning:
    names = list(value) if isinstance(value, list) else [value]
    if names in (["all"], ["default"]):
        return Means(why="the dataset as it is")
    if len(names) == 1 and isinstance(names[0], str):
        return Means({"subset": names[0]})
    return "several configurations are a mixture: a YAML file with `path` and `subset` of each, as data.dataset_path"


def _evaluated_split(value: Any, beside: Mapping[str, object]) -> Meaning:
    """TRL's scripts evaluate the test split of the same dataset, if anything is evaluated."""
    if value in ("no", False) or beside.get("eval_dataset") or not beside.get("dataset_name"):
        return None
    split = beside.get("dataset_test_split", "test")
    return Means({"eval_strategy": value, "eval_path": beside["dataset_name"], "eval_split": split})


def _datasets(value: Any, beside: Mapping[str, object]) -> Meaning:
    if beside.get("train_jsonl"):
        return Means(why="train_jsonl names the data")
    found = datasets_of(value, beside)
    if isinstance(found, str):
        return found
    if len(found.items) > 1:
        return Means(why=found.why, mixture=found.items)
    return Means(found.items[0], found.why)


def _evaluated(value: Any, beside: Mapping[str, object]) -> Meaning:
    """Datasets of which only one can be evaluated."""
    if beside.get("val_jsonl"):
        return Means(why="val_jsonl names the data")
    if not value:
        return Means(why="there are none")
    found = datasets_of(value, beside)
    names = {"dataset_path": "eval_path", "split": "eval_split", "max_samples": "max_eval_samples"}
    if isinstance(found, str) or len(found.items) > 1 or found.items[0].keys() - names.keys():
        return "one file, folder or hub dataset is evaluated: data.eval_path, data.eval_split"
    return Means({names[name]: given for name, given in found.items[0].items()}, found.why)


def _to(name: str) -> Meant:
    """Another name of a setting, where not every system has it."""
    return lambda value, beside: Means({name: value})


def _without_effect(reason: str, names: Iterable[str]) -> dict[str, Meant]:
    return dict.fromkeys(names, _nothing(reason))


_ALL, _ANSWERS, _COMPLETION = ({"loss_on": what} for what in ("all", "assistant", "completion"))
_RANKS = "packs are not split over GPUs"
_RATINGS = "records are not chosen by their ratings; keep those that you want in the data"
THEIRS: Mapping[str, Meant] = {
    "filter_overlong": _switch({"overlong": "drop"}, {"overlong": "error"}),
    "coord_offset": _only_off("an experiment that is not supported"),
    "template": _template,
    "dataset": _datasets,
    "datasets": _datasets,
    "use_liger_kernel": _liger,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
    "flash_attn": _among({name: {"attention": ours} for name, ours in _ATTENTION.items()}, ", ".join(_ATTENTION)),
    "attn_impl": _among({name: {"attention": ours} for name, ours in _ATTENTION.items()}, ", ".join(_ATTENTION)),
    "load_in_4bit": _switch({"quantization_bit": 4}),
    "load_in_8bit": _only_off("weights in eight bits are not trained; load_in_4bit is"),
    # LLaMA-Factory
    "stage": _among({"sft": {}}, "only supervised fine-tuning (sft) is here"),
    "dataset_dir": _nothing("where `dataset` is looked for"),
    "neat_packing": _switch({"packing": True}),
    "mask_history": _only_off("every answer of a chat carries loss; loss_on: completion takes the last one alone"),
    "train_on_prompt": _switch(_ALL),
    "freeze_vision_tower": _frozen("train_vision"),
    "freeze_multi_modal_projector": _frozen("train_projector"),
    "freeze_language_model": _frozen("train_language"),
    "disable_gradient_checkpointing": _switch({"gradient_checkpointing": False}),
    "pure_bf16": _switch({"dtype": "bf16"}),
    "quantization_method": _only("bnb", "4-bit weights are those of bitsandbytes"),
    "mix_strategy": _only("concat", "weights and repeats of a mixture say how much of each source is used"),
    # axolotl
    "test_datasets": _evaluated,
    "lora_target_linear": _switch({"lora_target_modules": "all-linear"}),
    "train_on_inputs": _switch(_ALL),
    "flash_attention": _switch({"attention": "flash_attention_2"}),
    "sdp_attention": _switch({"attention": "sdpa"}),
    "eager_attention": _switch({"attention": "eager"}),
    "flex_attention": _switch({"attention": "flex"}),
    "saves_per_epoch": _per_epoch("save"),
    "evals_per_epoch": _per_epoch("eval"),
    "excess_length_strategy": _among(
        {"drop": {"overlong": "drop"}, "truncate": {"overlong": "truncate"}}, "drop or truncate"
    ),
    "roles_to_train": _only(["assistant"], "only answers of the assistant carry loss, or all: data.loss_on"),
    "train_on_eos": _only("turn", "the end token of every trained answer carries loss"),
    "chat_template_jinja": _refused("write it into a file, and name that as data.chat_template"),
    # ms-swift, and trainers on top of it
    "val_dataset": _evaluated,
    "freeze_vit": _frozen("train_vision"),
    "freeze_aligner": _frozen("train_projector"),
    "freeze_llm": _frozen("train_language"),
    "loss_scale": _among(
        {"default": {}, "all": _ALL, "last_round": _COMPLETION},
        "default, all or last_round; other weights are not known",
    ),
    "quant_method": _only("bnb", "4-bit weights are those of bitsandbytes"),
    "truncation_strategy": _among(
        {
            "delete": {"overlong": "drop"},
            "right": {"overlong": "truncate"},
            "left": {"overlong": "truncate", "truncate_side": "left"},
            "split": {"overlong": "split"},
            "raise": {"overlong": "error"},
        },
        "delete, left, right, split or raise",
    ),
    "output_root": _folder_of_runs,
    "json_format": _only("standard", "other forms of objects are not known; data.formatting takes your own"),
    # lmms-engine
    "trainer_type": _among(
        {"hf_trainer": {}, "fsdp2_trainer": {"sharding": "fsdp"}}, "only hf_trainer and fsdp2_trainer are known"
    ),
    "fsdp2": _switch({"sharding": "fsdp"}),
    "freeze_modules": _freeze_modules,
    "use_rmpad": _nothing("packed rows have no padding; with packing: false samples are padded"),
    "video_max_frames": _to("max_frames"),
    "video_sampling_strategy": _among({"fps": {}, "frame_num": {}}, "fps or frame_num"),
    "frame_num": lambda value, beside: (
        Means({"num_frames": value})
        if beside.get("video_sampling_strategy") == "frame_num"
        else Means(why="frames are sampled by fps")
    ),
    # TRL
    "use_peft": lambda value, beside: _switch({} if beside.get("method") else {"method": "lora"})(value, beside),
    "dataset_config": _to("subset"),
    "truncation_mode": _among({"keep_start": {}, "keep_end": {"truncate_side": "left"}}, "keep_start or keep_end"),
    "assistant_only_loss": _switch(_ANSWERS),
    "completion_only_loss": _switch(_COMPLETION),
    "loss_type": _only("nll", "the loss is the mean over supervised tokens"),
    # nanoVLM
    "train_dataset_name": _subsets,
    "data_cutoff_idx": _refused("max_samples draws so many records at random"),
    "stats_log_interval": _to("logging_steps"),
    **dict.fromkeys(
        ("relevance_min_rating", "image_correspondence_min_rating", "visual_dependency_min_rating"),
        _only(1, _RATINGS, "every record has it"),
    ),
    "formatting_min_rating": _only(1, _RATINGS, "every record has it"),
    # environment of a script
    "MAX_PIXELS": _to("max_pixels"),
    "MIN_PIXELS": _to("min_pixels"),
    "FPS_MAX_FRAMES": _to("max_frames"),
    "FPS": _to("fps"),
    "NFRAMES": _to("num_frames"),
    "NPROC_PER_NODE": _to("num_gpus"),
    # that have to be off
    **dict.fromkeys(
        ("lora_model_dir", "adapter_name_or_path", "adapters"), _only_off("adapters begin again; merge them first")
    ),
    **dict.fromkeys(
        ("xformers_attention", "s2_attention", "shift_attn"), _only_off("not here; leave it out, or set attention")
    ),
    **dict.fromkeys(
        ("special_tokens", "tokens", "resize_vocab", "eos_token", "added_tokens_overrides", "new_special_tokens"),
        lambda value, beside: _pad_only(value),
    ),
    **dict.fromkeys(
        ("lora_modules_to_save", "modules_to_save", "additional_target", "unfrozen_parameters", "trainable_parameters"),
        _only_off("beside adapters, train_vision and train_projector let whole parts learn"),
    ),
    **dict.fromkeys(
        ("use_rslora", "lora_fan_in_fan_out", "target_regex", "lora_plus_scale", "pissa_init"),
        _only_off("adapters are plain LoRA or DoRA"),
    ),
    "lora_bias": _only("none", "biases are not trained beside adapters"),
    **dict.fromkeys(
        ("rope_scaling", "rl", "image_size", "default_system_message", "default_system", "system"),
        _only_off("not here"),
    ),
    **dict.fromkeys(("augmentation", "augmentation_curriculum", "data_augment"), _only_off("images are not augmented")),
    **dict.fromkeys(("coord_soft_ce_w1", "coord_loss"), _only_off("the loss is the mean over supervised tokens")),
    "debug": lambda value, beside: (
        _only_off("leave it out")(value, beside) if isinstance(value, Mapping) and "enabled" in value else None
    ),
    **dict.fromkeys(
        ("sp_ulysses_degree", "ep_degree", "sequence_parallel_size", "context_parallel_size"), _only(1, _RANKS)
    ),
    **dict.fromkeys(
        ("extra_kwargs", "overwrite_config", "load_from_config", "model_init_kwargs"), _only_off("not known here")
    ),
    **dict.fromkeys(("resume_from_vlm_checkpoint", "predict_with_generate", "compute_accuracy"), _only_off("not here")),
    **dict.fromkeys(
        ("use_unsloth", "use_muon", "use_swift_lora", "adafactor", "use_galore", "use_badam"),
        _only_off("set training.optim, or leave it out"),
    ),
    **dict.fromkeys(("interleave_probs", "interleave_prob"), _only_off("weights of a mixture say it")),
    # Without an effect, by the reason.
    **_without_effect("a folder that holds a run is refused: name another output_dir", ("overwrite_output_dir",)),
    **_without_effect("no code of models is run", ("trust_remote_code",)),
    **_without_effect(
        "what is kept is found again by what it was made from",
        ("overwrite_cache", "load_from_cache_file", "lazy_tokenize", "skip_prepare_dataset", "tokenized_path"),
    ),
    **_without_effect(
        "the run's page and metrics.jsonl have it",
        (
            *(
                "plot_loss",
                "include_num_input_tokens",
                "include_tokens_per_second",
                "total_num_tokens",
                "enable_profiler",
            ),
            *(
                "profiler_config",
                "loss_watchdog_threshold",
                "loss_watchdog_patience",
                "eval_table_size",
                "logging_root",
            ),
            *("eval_max_new_tokens", "use_lmms_eval", "lmms_eval_tasks", "lmms_eval_limit", "lmms_eval_batch_size"),
            *("lmms_eval_step", "print_batch_input_steps", "dump_conversation_path", "save_last_epoch"),
        ),
    ),
    **_without_effect(
        "report_to names loggers, which are set up by their own environment",
        (
            *("wandb_project", "wandb_entity", "wandb_watch", "wandb_log_model", "wandb_run_id", "log_wandb"),
            *("use_swanlab", "swanlab_project", "swanlab_run_name", "mlflow_tracking_uri", "mlflow_experiment_name"),
        ),
    ),
    **_without_effect(
        "the model says it",
        (
            *(
                "processor_type",
                "tokenizer_type",
                "model_type",
                "strict",
                "use_fast_tokenizer",
                "is_llama_derived_model",
            ),
            *("base_model_config", "tokenizer_config", "use_hf", "task_type", "lora_task_type", "check_model"),
            *("use_chat_template", "pad_token", "video_backend", "image_resize_algorithm"),
        ),
    ),
    **_without_effect(
        "part of the model, which has its own",
        (
            *(f"vit_{name}" for name in ("hidden_dim", "inter_dim", "patch_size", "n_heads", "dropout", "n_blocks")),
            *(f"vit_{name}" for name in ("ln_eps", "cls_flag", "model_type")),
            *(f"lm_{name}" for name in ("hidden_dim", "inter_dim", "rms_eps", "re_base", "max_position_embeddings")),
            *(
                f"lm_{name}"
                for name in ("base_vocab_size", "vocab_size", "n_heads", "n_kv_heads", "dropout", "n_blocks")
            ),
            *(f"lm_{name}" for name in ("attn_scaling", "use_tokens", "tie_weights", "model_type", "tokenizer")),
            *("lm_chat_template", "lm_eos_token_id", "extra_token_amount", "mp_pixel_shuffle_factor", "hf_repo_name"),
            *("resize_to_max_side_len", "vlm_extra_tokens", "vlm_load_backbone_weights", "vlm_checkpoint_path"),
        ),
    ),
    **_without_effect(
        "kernels are chosen by training.attention and training.compile, and change no result",
        (
            *(
                "monkey_patch_kwargs",
                "plugins",
                "liger_rope",
                "liger_rms_norm",
                "liger_glu_activation",
                "liger_layer_norm",
            ),
            *("liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy", "lora_mlp_kernel"),
            *(
                "lora_qkv_kernel",
                "lora_o_kernel",
                "flash_attn_cross_entropy",
                "flash_attn_rms_norm",
                "activation_offloading",
            ),
            *("reduce_dtype", "output_dtype", "use_reentrant_gc"),
        ),
    ),
    **_without_effect(
        "how packs are made is said by data.packing and its settings",
        (
            *("pad_to_sequence_len", "padding_free", "sample_packing_eff_est", "sample_packing_group_size"),
            *("sample_packing_bin_size", "filter_overlong_workers", "buffer_size", "pad_to_multiple_of"),
        ),
    ),
    **_without_effect("columns are recognised, or named by data.columns", ("dataset_text_field", "dataset_kwargs")),
    **_without_effect(
        "videos have the pixels that the model's processor gives them", ("video_max_pixels", "video_min_pixels")
    ),
    "remove_unused_columns": _flag("batches are made by the collator, not by columns"),
    "logging_nan_inf_filter": _flag("a loss that is not a number is always shown"),
    **dict.fromkeys(("prediction_loss_only", "eval_in_epochs"), _flag("evaluation is the loss over tokens")),
    **_without_effect("names of the run's folder are as they are said", ("add_version", "artifact_subdir")),
    **_without_effect("said to a model that is taught its name, by data of ms-swift's own", ("model_author",)),
    **_without_effect(
        "where the script runs",
        ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "object_storage", "bucket_name"),
    ),
}
# Arguments of older transformers, which published configs still have at their defaults.
_RETIRED: Mapping[str, object] = {
    **dict.fromkeys(("no_cuda", "use_mps_device", "jit_mode_eval", "tpu_metrics_debug", "use_ipex"), False),
    **dict.fromkeys(("use_legacy_prediction_loop", "include_inputs_for_metrics"), False),
    **{"fp16_opt_level": "O1", "half_precision_backend": "auto", "fp16_backend": "auto", "past_index": -1},
    **{"fsdp_min_num_params": 0, "mp_parameters": "", "ray_scope": "last", "save_safetensors": True},
}
THEIRS = {
    **THEIRS,
    **{
        name: _only(usual, "an argument that transformers no longer has", "its default")
        for name, usual in _RETIRED.items()
    },
}
# Keys that mean something else in one system.
OF_SYSTEM: Mapping[str, Mapping[str, Meant]] = {
    "LLaMA-Factory": {"eval_dataset": _evaluated},
    "axolotl": {"chat_template": _template},
    "ms-swift": {
        "max_length": lambda value, beside: Means(
            {"packing_length": value, **({} if beside.get("truncation_strategy") else {"overlong": "drop"})}
        ),
        "model_name": _nothing("said to a model that is taught its name, by data of ms-swift's own"),
    },
    "lmms-engine": {
        "fsdp_config": _nothing("decoder layers are wrapped, as FSDP2 does here"),
        "dataset_format": lambda value, beside: (
            Means(why="the datasets are listed here") if value == "yaml" and beside.get("datasets") else None
        ),
        "dataset_type": lambda value, beside: (
            Means({"dataset_type": "vision"})
            if value in ("vision_iterable", "qwen3_vl_iterable", "multimodal", "multimodal_iterable")
            else None
        ),
    },
    "TRL": {
        "eval_strategy": _evaluated_split,
        "packing_strategy": lambda value, beside: (
            {"bfd": Means({"packing_strategy": "best_fit"}), "ffd": Means({"packing_strategy": "best_fit"})}.get(value)
            or (Means({"packing_strategy": "best_fit", "overlong": "split"}) if value == "bfd_split" else None)
        ),
    },
}


def _pad_only(value: Any) -> Meaning:
    """Tokens may be named, none is added; how rows are padded is of no influence."""
    if not value or (isinstance(value, Mapping) and set(value) <= {"pad_token"}):
        return Means(why="tokenizers are not changed here, and padding carries no loss")
    return "tokenizers are not changed here"
