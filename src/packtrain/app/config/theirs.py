"""Keys of other systems that are no other name of one of ours: what they mean here, or why they cannot be.

Plain other names stand with the key they mean, in `sections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Settings of ours, none where it changes nothing here, or a text: why it cannot be.
Meaning = Mapping[str, Any] | str
_ATTENTION = {
    "auto": "auto",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "sdpa": "sdpa",
    "disabled": "eager",
}


def _nothing(value: Any) -> Meaning:
    return {}


def _refused(why: str) -> Callable[[Any], Meaning]:
    return lambda value: why


def _only_off(why: str) -> Callable[[Any], Meaning]:
    """A switch, or a section with `enabled`, that has to be off."""
    return lambda value: why if (value.get("enabled") if isinstance(value, Mapping) else value) else {}


def _switch(on: Mapping[str, Any], off: Mapping[str, Any] | None = None) -> Callable[[Any], Meaning]:
    def meaning(value: Any) -> Meaning:
        if not isinstance(value, bool):
            return f"{value!r:.100} instead of true or false"
        return on if value else off or {}

    return meaning


def _among(known: Mapping[Any, Mapping[str, Any]], otherwise: str) -> Callable[[Any], Meaning]:
    return lambda value: known.get(value, otherwise) if isinstance(value, str | int | None) else otherwise


def _one_dataset(value: Any) -> Meaning:
    """A list of datasets, of which one can stand in a run's config."""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], Mapping) or "path" not in value[0]:
        return "several datasets are a mixture: name its YAML file as data.dataset_path"
    names = {"path": "dataset_path", "split": "split", "name": "subset", "type": ""}  # chats are recognised
    strange = [str(name) for name in value[0] if name not in names]
    if strange:
        return f"{', '.join(strange)[:100]}: data.columns names columns, data.formatting a function of your own"
    return {names[name]: given for name, given in value[0].items() if names[name] and given is not None}


def _named_dataset(value: Any) -> Meaning:
    """A file, a folder or a hub name; single words are names in a registry, whose file is to be named."""
    if isinstance(value, str) and any(mark in value for mark in "/."):
        return {"dataset_path": value}
    way = "data.dataset_path: data/dataset_info.json and data.sources: [NAME, ...] name datasets of LLaMA-Factory"
    return f"{value!r:.100} is no file, folder or hub dataset; {way}"


def _per_epoch(kind: str) -> Callable[[Any], Meaning]:
    known = {0: {f"{kind}_strategy": "no"}, 1: {f"{kind}_strategy": "epoch"}}
    return _among(known, f"only 0 and 1 are known; {kind}_steps below 1 is a share of the run")


# Of keys without an effect: what is to be done instead of what they do elsewhere.
INSTEAD: Mapping[str, str] = {
    "overwrite_output_dir": "a folder that holds a run is refused: name another output_dir",
}
_OWN_TEMPLATE = "chats are written with the model's own template; leave it out, or name a file as data.chat_template"
_ALL, _ANSWERS, _COMPLETION = ({"loss_on": what} for what in ("all", "assistant", "completion"))
THEIRS: Mapping[str, Callable[[Any], Meaning]] = {
    "filter_overlong": _switch({"overlong": "drop"}, {"overlong": "error"}),
    "coord_offset": _only_off("an experiment that is not supported"),
    # LLaMA-Factory
    "stage": _among({"sft": {}}, "only supervised fine-tuning (sft) is here"),
    "template": _refused(_OWN_TEMPLATE),
    "dataset_dir": _nothing,  # of a registry: see `dataset`
    "dataset": _named_dataset,
    "val_size": _only_off("nothing is split off here; data.eval_path names the data that are evaluated"),
    "neat_packing": _switch({"packing": True}),
    "mask_history": _only_off("every answer of a chat carries loss; loss_on: completion takes the last one alone"),
    "train_on_prompt": _switch(_ALL),
    "freeze_vision_tower": _switch({"train_vision": False}),
    "freeze_multi_modal_projector": _switch({"train_connector": False}),
    "freeze_language_model": _switch({"train_language": False}),
    "flash_attn": _among({name: {"attention": ours} for name, ours in _ATTENTION.items()}, ", ".join(_ATTENTION)),
    "video_max_pixels": _nothing,
    **dict.fromkeys(("overwrite_cache", "overwrite_output_dir", "plot_loss", "trust_remote_code"), _nothing),
    **dict.fromkeys(("use_fast_tokenizer", "quantization_method", "include_num_input_tokens"), _nothing),
    # axolotl
    "datasets": _one_dataset,
    "val_set_size": _only_off("nothing is split off here; data.eval_path names the data that are evaluated"),
    "load_in_4bit": _switch({"quantization_bit": 4}),
    "load_in_8bit": _only_off("weights in eight bits are not trained; load_in_4bit is"),
    "lora_target_linear": _switch({"lora_target_modules": "all-linear"}),
    "train_on_inputs": _switch(_ALL),
    "flash_attention": _switch({"attention": "flash_attention_2"}),
    "sdp_attention": _switch({"attention": "sdpa"}),
    "eager_attention": _switch({"attention": "eager"}),
    "saves_per_epoch": _per_epoch("save"),
    "evals_per_epoch": _per_epoch("eval"),
    "special_tokens": _only_off("tokenizers are not changed here"),
    **dict.fromkeys(("lora_model_dir", "adapter_name_or_path"), _only_off("adapters begin anew; merge them first")),
    **dict.fromkeys(("xformers_attention", "s2_attention"), _only_off("not here; leave it out, or set attention")),
    **dict.fromkeys(("processor_type", "tokenizer_type", "model_type", "strict", "skip_prepare_dataset"), _nothing),
    **dict.fromkeys(("pad_to_sequence_len", "wandb_project", "wandb_entity", "wandb_watch"), _nothing),
    **dict.fromkeys(("wandb_log_model", "wandb_run_id", "sample_packing_eff_est", "total_num_tokens"), _nothing),
    # TRL
    "truncation_mode": _among({"keep_start": {}, "keep_end": {"truncate_side": "left"}}, "keep_start or keep_end"),
    "assistant_only_loss": _switch(_ANSWERS),
    "completion_only_loss": _switch(_COMPLETION),
    **dict.fromkeys(("dataset_text_field", "dataset_kwargs", "eos_token", "pad_token", "padding_free"), _nothing),
}
# What is part of the model and not of its training, by the beginnings of names in section VLMConfig.
OF_MODEL = ("vit_", "lm_", "mp_", "vlm_", "extra_token", "hf_repo")

# Systems that do not pack where `packing` is left out: sections and keys without a section by which they are known.
_MARKS: Mapping[str, tuple[str, ...]] = {
    "LLaMA-Factory": (
        *("cutoff_len", "preprocessing_cache_dir", "finetuning_type", "stage", "template", "lora_target"),
        *("preprocessing_num_workers", "overwrite_cache", "plot_loss", "neat_packing", "flash_attn"),
    ),
    "axolotl": (
        *("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter", "dataset_prepared_path"),
    ),
    "TRL": ("max_seq_length", "max_length", "assistant_only_loss", "completion_only_loss", "dataset_num_proc"),
    "ms-swift": ("custom", "tuner"),
    "lmms-engine": ("dataset", "dataset_config"),
}
SYSTEMS: Mapping[str, str] = {mark: system for system, marks in _MARKS.items() for mark in marks}
BATCHES_OF_PACKS = ("axolotl", "TRL")  # whose batch size counts packs, where they pack
THEIR_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **{system: {"packing": False} for system in _MARKS},
    "lmms-engine": {"packing": False, "packing_length": 32_000, "packing_strategy": "first_fit"},
}
