"""Keys of other systems that are no other name of one of ours: what they mean here, or why they cannot be.

Each is a row of a table. Plain other names are listed with the key they mean, in `sections`; the rows of one dataset of
a list are in `foreign_values`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packtrain.config.foreign_values import (
    Meaning,
    Means,
    Meant,
    among,
    default,
    each,
    flag,
    nothing,
    only,
    only_off,
    read_datasets,
    refused,
    rows,
    switch,
    to,
)
from packtrain.config.keys import Raw

_ATTENTION = {
    **{"auto": "auto", "fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"},
    **{"flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2", "eager": "eager"},
    **{"flash_attention_3": "flash_attention_3", "flex": "flex"},
}
# Names of templates that mean the template of a model family; any other is a text of its own.
_FAMILY_TEMPLATE = re.compile(
    "(qwen|llama[34]|mllama|gemma|paligemma|intern|mistral|ministral|pixtral|smol|idefics|phi|llava|glm4|tokenizer_default)"
)
_ZERO_FILE = re.compile(r"(?:ds_z|zero)([0-3])")  # files of settings that LLaMA-Factory and axolotl bring along
# Names of modules, and the parts that they are.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "visual": ("train_vision", "train_projector"),  # of Qwen: the merger is inside
    **dict.fromkeys(("vision_tower", "vision_model", "vision_encoder", "vision"), ("train_vision",)),
    **dict.fromkeys(
        ("multi_modal_projector", "connector", "merger", "visual.merger", "mm_projector", "mlp1"), ("train_projector",)
    ),
    **dict.fromkeys(("language_model", "model", "llm"), ("train_language",)),
}


def _template(value: Any, beside: Raw) -> Meaning:
    """A name of a chat template; a file of one is ours."""
    if isinstance(value, str) and (os.path.exists(value) or value.endswith((".jinja", ".j2", ".txt"))):
        return Means({"chat_template": value})
    if isinstance(value, str) and _FAMILY_TEMPLATE.match(value):
        return Means(why="chats use the model's chat template; data.chat_template takes another file")
    way = "leave it out to use the model's own, or set data.chat_template to a Jinja file"
    return f"{value!r:.100} is not a model's template: {way}"


def _per_epoch(kind: str) -> Meant:
    """Once an epoch, or a share of the run, as axolotl computes it."""

    def meaning(value: Any, beside: Raw) -> Meaning:
        if value in (0, 1) and not isinstance(value, bool):
            return Means({f"{kind}_strategy": "epoch" if value else "no"})
        epochs = beside.get("num_epochs") or 1
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            return f"{value!r:.100} instead of a number of times"
        if not isinstance(epochs, int | float) or beside.get("max_steps"):
            return f"needs num_epochs as well; {kind}_steps below 1 is a share of the run"
        return Means({f"{kind}_strategy": "steps", f"{kind}_steps": round(1 / (value * epochs), 8)})

    return meaning


def _frozen(part: str) -> Meant:
    """Which parts are trained. What is not frozen is, in full training; adapters are in the decoder alone."""

    def meaning(value: Any, beside: Raw) -> Meaning:
        if not isinstance(value, bool):
            return f"{value!r:.100} instead of true or false"
        method = next((beside[name] for name in ("finetuning_type", "train_type", "tuner_type") if name in beside), "")
        if value or method == "full":
            return Means({part: not value})
        if part == "train_language":
            return Means(why="it is trained")
        return Means(why=f"adapters are in the decoder; to train a part as a whole, set {part}: true")

    return meaning


def _freeze_modules(value: Any, beside: Raw) -> Meaning:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or any(name not in _MODULES for name in names):
        way = "use train_vision, train_projector and train_language"
        return f"{value!r:.100} instead of {', '.join(_MODULES)}; {way}"
    return Means({part: False for name in names for part in _MODULES[name]})


def _liger(value: Any, beside: Raw) -> Meaning:
    return Means(why="already covered by chunked_loss, which keeps logits small") if value is True else None


def _fsdp(value: Any, beside: Raw) -> Meaning:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return Means({"fsdp": " ".join(value)}) if value else Means(why="it is off")
    return None


def _deepspeed(value: Any, beside: Raw) -> Meaning:
    """A section with a switch, or a file that other systems bring along and that is not here: its name says it."""
    if isinstance(value, Mapping) and "enabled" in value:
        on = value.get("enabled") and value.get("config")
        return Means({"deepspeed": value["config"]}) if on else Means(why="it is off")
    named = _ZERO_FILE.match(Path(value).name) if isinstance(value, str) and value.endswith(".json") else None
    if named is None or os.path.exists(value):
        return None
    if "offload" in value:
        return f"{value:.100} is not supported, and neither is CPU offload: use training.sharding, or your own file"
    if named[1] == "0":
        return Means(why="stage 0 shards nothing")
    return Means({"deepspeed": f"zero{named[1]}"}, "the file is not here; its name gives the stage")


def _folder_of_runs(value: Any, beside: Raw) -> Meaning:
    if beside.get("output_dir"):
        return Means(why="output_dir is the run's folder")
    return Means({"output_dir": os.path.join(str(value), str(beside.get("run_name") or "run"))})


def _subsets(value: Any, beside: Raw) -> Meaning:
    names = list(value) if isinstance(value, list) else [value]
    if names in (["all"], ["default"]):
        return Means(why="the dataset unchanged")
    if len(names) == 1 and isinstance(names[0], str):
        return Means({"subset": names[0]})
    return "several configurations are a mixture: a YAML file with `path` and `subset` of each, as data.dataset_path"


def _eval_split(value: Any, beside: Raw) -> Meaning:
    """TRL's scripts evaluate the test split of the same dataset, if anything is evaluated."""
    if value in ("no", False) or beside.get("eval_dataset") or not beside.get("dataset_name"):
        return None
    split = beside.get("dataset_test_split", "test")
    return Means({"eval_strategy": value, "eval_path": beside["dataset_name"], "eval_split": split})


def _datasets(value: Any, beside: Raw) -> Meaning:
    return Means(why="train_jsonl is the data") if beside.get("train_jsonl") else read_datasets(value, beside)


def _eval_datasets(value: Any, beside: Raw) -> Meaning:
    """Datasets of which only one can be evaluated."""
    if beside.get("val_jsonl"):
        return Means(why="val_jsonl is the data")
    if not value:
        return Means(why="there are none")
    datasets = read_datasets(value, beside)
    names = {"dataset_path": "eval_path", "split": "eval_split", "max_samples": "max_eval_samples"}
    if isinstance(datasets, str) or datasets.mixture or datasets.settings.keys() - names.keys():
        return "one file, folder or hub dataset can be evaluated: data.eval_path, data.eval_split"
    return Means({names[name]: given for name, given in datasets.settings.items()}, datasets.why)


def _frame_num(value: Any, beside: Raw) -> Meaning:
    counted = beside.get("video_sampling_strategy") == "frame_num"
    return Means({"num_frames": value}) if counted else Means(why="frames are sampled by fps")


def _use_peft(value: Any, beside: Raw) -> Meaning:
    return switch({} if beside.get("method") else {"method": "lora"})(value, beside)


def _debug(value: Any, beside: Raw) -> Meaning:
    is_switch = isinstance(value, Mapping) and "enabled" in value
    return only_off("leave it out")(value, beside) if is_switch else None


def _pad_only(value: Any, beside: Raw) -> Meaning:
    """Tokens may be named, none is added; how rows are padded is of no influence."""
    if not value or (isinstance(value, Mapping) and set(value) <= {"pad_token"}):
        return Means(why="tokenizers are not changed here; padding carries no loss")
    return "tokenizers are not changed here: the template ends chats, and the model's files define its tokens"


def _use_chat_template(value: Any, beside: Raw) -> Meaning:
    way = "plain text is read unchanged: prompt and completion as strings, or dataset_type: fineweb_edu"
    return Means(why="the same here") if value is True else f"{value!r:.100}: chats use it; {way}"


_KERNEL_CHOICE = "kernels are set by training.attn_implementation and training.compile, and change no result"


def _plugins(value: Any, beside: Raw) -> Meaning:
    """Axolotl's own classes: those for kernels are covered, others change what is trained. The rest are the user's."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    theirs = [name for name in names if name.startswith("axolotl.")]
    others = [name for name in theirs if not re.search("liger|cut_cross_entropy", name)]
    if others:
        return f"{', '.join(others):.100} is not supported"
    return Means(why=_KERNEL_CHOICE) if theirs and len(theirs) == len(names) else None


def _tokenizer(value: Any, beside: Raw) -> Meaning:
    same = value in (None, beside.get("base_model"))
    return Means(why="the model defines it") if same else f"{value!r:.100}: the model's own tokenizer is used"


_ALL, _ANSWERS, _COMPLETION = ({"loss_on": what} for what in ("all", "assistant", "completion"))


_KERNELS = among({name: {"attn_implementation": ours} for name, ours in _ATTENTION.items()})
# Keys that act, or that have one value which is possible.
_ACT: Mapping[str, Meant] = {
    "filter_overlong": switch({"overlong": "drop"}, {"overlong": "error"}),
    "plugins": _plugins,
    "template": _template,
    **each("dataset datasets", _datasets),
    "use_liger_kernel": _liger,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
    "debug": _debug,
    **each("flash_attn attn_impl", _KERNELS),
    "load_in_4bit": switch({"quantization_bit": 4}),
    **each("quantization_method quant_method", only("bnb", "4-bit weights need bitsandbytes")),
    "lora_bias": only("none", "biases are not trained with adapters"),
    **each(
        "sp_ulysses_degree ep_degree sequence_parallel_size context_parallel_size",
        only(1, "packs are not split across GPUs"),
    ),
    **each(
        "special_tokens tokens resize_vocab eos_token added_tokens_overrides new_special_tokens",
        _pad_only,
    ),
    # LLaMA-Factory
    "stage": among(
        {"sft": {}}, "only supervised fine-tuning (sft) is supported; for plain text, dataset_type: fineweb_edu"
    ),
    "neat_packing": switch({"packing": True}),
    "train_on_prompt": switch(_ALL),
    "freeze_vision_tower": _frozen("train_vision"),
    "freeze_multi_modal_projector": _frozen("train_projector"),
    "freeze_language_model": _frozen("train_language"),
    "disable_gradient_checkpointing": switch({"gradient_checkpointing": False}),
    "pure_bf16": switch({"dtype": "bf16"}),
    **each("tokenizer_config base_model_config", _tokenizer),
    "mix_strategy": only("concat", "weights and repeats of a mixture set how much of each source is used"),
    # axolotl
    "test_datasets": _eval_datasets,
    "lora_target_linear": switch({"lora_target_modules": "all-linear"}),
    "train_on_inputs": switch(_ALL),
    "flash_attention": switch({"attn_implementation": "flash_attention_2"}),
    "sdp_attention": switch({"attn_implementation": "sdpa"}),
    "eager_attention": switch({"attn_implementation": "eager"}),
    "flex_attention": switch({"attn_implementation": "flex"}),
    "saves_per_epoch": _per_epoch("save"),
    "evals_per_epoch": _per_epoch("eval"),
    "excess_length_strategy": among({name: {"overlong": name} for name in ("drop", "truncate")}),
    "roles_to_train": only(["assistant"], "loss is on assistant answers only, or on all: data.loss_on"),
    "train_on_eos": only("turn", "the EOS token of every trained answer carries loss"),
    "chat_template_jinja": refused("save it to a file, and set data.chat_template to that"),
    # ms-swift, and trainers on top of it
    "val_dataset": _eval_datasets,
    "freeze_vit": _frozen("train_vision"),
    "freeze_aligner": _frozen("train_projector"),
    "freeze_llm": _frozen("train_language"),
    "loss_scale": among({"default": {}, "all": _ALL, "last_round": _COMPLETION}),
    "truncation_strategy": among(
        {
            "delete": {"overlong": "drop"},
            "right": {"overlong": "truncate"},
            "left": {"overlong": "truncate", "truncate_side": "left"},
            "split": {"overlong": "split"},
            "raise": {"overlong": "error"},
        }
    ),
    "output_root": _folder_of_runs,
    "use_chat_template": _use_chat_template,
    **each("task_type lora_task_type", among({"causal_lm": {}, "CAUSAL_LM": {}}, "only language models are trained")),
    "json_format": only("standard", "other object formats are not supported; convert them with data.formatting_func"),
    # lmms-engine
    "trainer_type": among({"hf_trainer": {}, "fsdp2_trainer": {"sharding": "fsdp"}}),
    "fsdp2": switch({"sharding": "fsdp"}),
    "freeze_modules": _freeze_modules,
    "video_sampling_strategy": among({"fps": {}, "frame_num": {}}),
    "frame_num": _frame_num,
    # TRL
    "use_peft": _use_peft,
    "dataset_config": to("subset"),
    "truncation_mode": among({"keep_start": {}, "keep_end": {"truncate_side": "left"}}),
    "assistant_only_loss": switch(_ANSWERS),
    "completion_only_loss": switch(_COMPLETION),
    "loss_type": only("nll", "the loss is the mean over supervised tokens"),
    # nanoVLM
    "train_dataset_name": _subsets,
    "data_cutoff_idx": refused("max_samples draws that many records at random"),
    **each(
        "relevance_min_rating image_correspondence_min_rating visual_dependency_min_rating formatting_min_rating",
        only(1, "records are not filtered by ratings; filter the data instead", "every record has it"),
    ),
}
# Keys that have to be off, by the reason.
_OFF: Mapping[str, str] = {
    "experimental, and not supported": "coord_offset",
    "8-bit weights are not supported; load_in_4bit is": "load_in_8bit",
    "every answer of a chat carries loss; loss_on: completion takes only the last": "mask_history",
    "adapters start from scratch; merge them first": "lora_model_dir adapter_name_or_path adapters",
    "not supported; leave it out, or set attn_implementation": "xformers_attention s2_attention shift_attn",
    "with adapters, train_vision and train_projector train whole parts": (
        "lora_modules_to_save modules_to_save additional_target unfrozen_parameters trainable_parameters"
    ),
    "only plain LoRA or DoRA": "use_rslora lora_fan_in_fan_out target_regex lora_plus_scale pissa_init",
    "not here": (
        "rope_scaling rl image_size default_system_message default_system system resume_from_vlm_checkpoint"
        " predict_with_generate compute_accuracy"
    ),
    "image augmentation is not supported": "augmentation augmentation_curriculum data_augment",
    "the loss is the mean over supervised tokens": "coord_soft_ce_w1 coord_loss",
    "not supported": "extra_kwargs overwrite_config load_from_config model_init_kwargs",
    "set training.optim, or leave it out": "use_unsloth use_muon use_swift_lora adafactor use_galore use_badam",
    "set by the weights of a mixture": "interleave_probs interleave_prob",
}
# Keys without an effect, by the reason.
_NO_EFFECT: Mapping[str, str] = {
    "where `dataset` is looked up": "dataset_dir",
    "packed rows have no padding; with packing: false samples are padded": "use_rmpad",
    "a folder that holds a run is never overwritten: use another output_dir": "overwrite_output_dir",
    "model code is never run": "trust_remote_code",
    "caches are keyed by what they were made from": (
        "overwrite_cache load_from_cache_file lazy_tokenize skip_prepare_dataset tokenized_path"
    ),
    "it is in the report and metrics.jsonl": (
        "plot_loss include_num_input_tokens include_tokens_per_second total_num_tokens enable_profiler profiler_config"
        " loss_watchdog_threshold loss_watchdog_patience eval_table_size logging_root eval_max_new_tokens"
        " use_lmms_eval lmms_eval_tasks lmms_eval_limit lmms_eval_batch_size lmms_eval_step"
        " print_batch_input_steps dump_conversation_path save_last_epoch"
    ),
    "report_to selects loggers; their environment variables configure them": (
        "wandb_project wandb_entity wandb_watch wandb_log_model wandb_run_id log_wandb use_swanlab swanlab_project"
        " swanlab_run_name mlflow_tracking_uri mlflow_experiment_name"
    ),
    "the model defines it": (
        "processor_type tokenizer_type model_type strict use_fast_tokenizer is_llama_derived_model use_hf"
        " check_model pad_token video_backend image_resize_algorithm"
    ),
    "defined by the model": (
        "vit_hidden_dim vit_inter_dim vit_patch_size vit_n_heads vit_dropout vit_n_blocks vit_ln_eps vit_cls_flag"
        " vit_model_type lm_hidden_dim lm_inter_dim lm_rms_eps lm_re_base lm_max_position_embeddings"
        " lm_base_vocab_size lm_vocab_size lm_n_heads lm_n_kv_heads lm_dropout lm_n_blocks lm_attn_scaling"
        " lm_use_tokens lm_tie_weights lm_model_type lm_tokenizer lm_chat_template lm_eos_token_id extra_token_amount"
        " mp_pixel_shuffle_factor hf_repo_name resize_to_max_side_len vlm_extra_tokens vlm_load_backbone_weights"
        " vlm_checkpoint_path"
    ),
    _KERNEL_CHOICE: (
        "monkey_patch_kwargs liger_rope liger_rms_norm liger_glu_activation liger_layer_norm"
        " liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy lora_mlp_kernel lora_qkv_kernel"
        " lora_o_kernel flash_attn_cross_entropy flash_attn_rms_norm activation_offloading reduce_dtype output_dtype"
        " use_reentrant_gc"
    ),
    "packing is set by data.packing and its settings": (
        "pad_to_sequence_len padding_free sample_packing_eff_est sample_packing_group_size sample_packing_bin_size"
        " filter_overlong_workers buffer_size pad_to_multiple_of"
    ),
    "columns are detected, or mapped by data.columns": "dataset_text_field dataset_kwargs",
    "folder names are used as given": "add_version artifact_subdir",
    "used only with ms-swift's self-cognition data": "model_author",
    "where the script runs": (
        "CUDA_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS HF_ENDPOINT object_storage bucket_name"
    ),
    "torchrun starts the processes: torchrun --nproc-per-node N -m packtrain.cli train": "launcher",
}
# Switches that change nothing here, on or off.
_FLAGS: Mapping[str, str] = {
    "batches are made by the collator, not by columns": "remove_unused_columns",
    "a loss that is not a number is always shown": "logging_nan_inf_filter",
    "evaluation is the loss over tokens": "prediction_loss_only eval_in_epochs",
}
# Arguments of older transformers, which published configs still have at their defaults.
_RETIRED: Mapping[str, object] = {
    **dict.fromkeys(("no_cuda", "use_mps_device", "jit_mode_eval", "tpu_metrics_debug", "use_ipex"), False),
    **dict.fromkeys(("use_legacy_prediction_loop", "include_inputs_for_metrics"), False),
    **{"fp16_opt_level": "O1", "half_precision_backend": "auto", "fp16_backend": "auto", "past_index": -1},
    **{"fsdp_min_num_params": 0, "mp_parameters": "", "ray_scope": "last", "save_safetensors": True},
}
# Values that are the default here, of keys that are ours too.
_AS_DEFAULT: Raw = {"bf16": "auto", "tf32": "auto", "chat_template": "tokenizer_default", "eval_size": 0}
THEIRS: Mapping[str, Meant] = {
    **_ACT,
    **{name: default(usual) for name, usual in _AS_DEFAULT.items()},
    **rows(only_off, _OFF),
    **rows(nothing, _NO_EFFECT),
    **rows(flag, _FLAGS),
    **{
        name: only(usual, "an argument that transformers no longer has", "its default")
        for name, usual in _RETIRED.items()
    },
}


def _swift_length(value: Any, beside: Raw) -> Meaning:
    longer = {} if beside.get("truncation_strategy") else {"overlong": "drop"}
    return Means({"packing_length": value, **longer})


def _lmms_format(value: Any, beside: Raw) -> Meaning:
    return Means(why="the datasets are listed here") if value == "yaml" and beside.get("datasets") else None


def _lmms_type(value: Any, beside: Raw) -> Meaning:
    iterable = ("vision_iterable", "qwen3_vl_iterable", "multimodal", "multimodal_iterable")
    return Means({"dataset_type": "vision"}) if value in iterable else None


_TRL_STRATEGIES: Mapping[str, Raw] = {
    **{name: {"packing_strategy": "best_fit"} for name in ("bfd", "ffd")},
    "bfd_split": {"packing_strategy": "best_fit", "overlong": "split"},
}


def _trl_strategy(value: Any, beside: Raw) -> Meaning:
    settings = _TRL_STRATEGIES.get(value) if isinstance(value, str) else None
    return None if settings is None else Means(settings)


# Keys that mean something else in one system.
OF_SYSTEM: Mapping[str, Mapping[str, Meant]] = {
    "LLaMA-Factory": {"eval_dataset": _eval_datasets},
    "axolotl": {"chat_template": _template},
    "ms-swift": {
        "max_length": _swift_length,
        "model_name": nothing("used only with ms-swift's self-cognition data"),
    },
    "lmms-engine": {
        "fsdp_config": nothing("decoder layers are always wrapped (FSDP2)"),
        "dataset_format": _lmms_format,
        "dataset_type": _lmms_type,
    },
    "TRL": {"eval_strategy": _eval_split, "packing_strategy": _trl_strategy},
}
