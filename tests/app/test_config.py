"""A run's config: names of other systems keep their meaning, and everything that is wrong is said at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from packtrain.app.train.resolve import ResolvedRun, resolve_run
from packtrain.config.data_section import MEDIA_LIMITS
from packtrain.config.foreign_keys import THEIRS
from packtrain.config.run_config import RunConfig, load_config, with_overrides
from packtrain.config.sections import ALIASES, HOMES, KEYS, LEADS, SECTIONS, TRAINER_KEYS
from packtrain.config.setup import OPTIMIZERS
from packtrain.core.errors import ConfigError
from packtrain.families.layout import LossOn
from packtrain.modeling.model_settings import ModelSettings
from packtrain.packing.packing_config import LIMITS, PackingConfig
from packtrain.packing.schedule import Balance
from packtrain.records.schemas.converters import SchemaOptions
from packtrain.records.source import FORMATS
from packtrain.records.yaml_text import read_value
from packtrain.training.step_settings import StepSettings

Load = Callable[[str], RunConfig]
# Other systems' names, what they are here, and what they bring along: the table of the design.
TABLE = {
    "global_max_length": ("data", "packing_length", 4096, {"overlong": "drop"}),
    "sequence_len": ("data", "packing_length", 4096, {"overlong": "drop"}),
    "max_seq_length": ("data", "packing_length", 4096, {"overlong": "truncate"}),
    "max_length": ("data", "packing_length", 4096, {"overlong": "truncate"}),
    "lm_max_length": ("data", "packing_length", 4096, {}),
    "max_images_per_knapsack": ("data", "max_images_per_pack", 18, {}),
    "max_images_per_example": ("data", "max_images_per_sample", 4, {}),
    "preprocessing_cache_dir": ("data", "cache_dir", "cache", {}),
    "val_jsonl": ("data", "eval_path", "val.jsonl", {}),
    "eval_dataset_path": ("data", "eval_path", "val.jsonl", {}),
    "train_jsonl": ("data", "dataset_path", "train.jsonl", {}),
    "batch_size": ("training", "per_device_train_batch_size", 4, {}),
    "lr_mp": ("training", "aligner_lr", 1e-4, {}),
    "lr_vision_backbone": ("training", "vit_lr", 1e-5, {}),
    "lr_language_backbone": ("training", "learning_rate", 1e-5, {}),
    "optimizer": ("training", "optim", "multimodal", {}),
    "model_name": ("model", "model_name_or_path", "org/name", {}),
    "name": ("model", "model_name_or_path", "org/name", {}),
    "finetuning_type": ("model", "method", "lora", {}),
    "lora_r": ("model", "lora_rank", 8, {}),
    "model": ("model", "model_name_or_path", "org/name", {}),
    "load_from_pretrained_path": ("model", "model_name_or_path", "org/name", {}),
    "train_type": ("model", "method", "lora", {}),
    "tuner_type": ("model", "method", "lora", {}),
    "vit_gradient_checkpointing": ("training", "vision_checkpointing", True, {}),
    "dataset_processes": ("data", "workers", 2, {}),
    "preprocessing_num_workers": ("data", "workers", 2, {}),
    "dataset_num_proc": ("data", "workers", 2, {}),
    "max_train_samples": ("data", "max_samples", 9, {}),
    "base_model": ("model", "model_name_or_path", "org/name", {}),
    "adapter": ("model", "method", "lora", {}),
    "lora_target": ("model", "lora_target_modules", "all", {}),
    "torch_dtype": ("model", "dtype", "bfloat16", {}),
    "dataset_name": ("data", "dataset_path", "org/name", {}),
    "train_dataset_path": ("data", "dataset_path", "org/name", {}),
    "dataset_train_split": ("data", "split", "train", {}),
    "dataset_test_split": ("data", "eval_split", "held", {}),
    "eval_dataset": ("data", "eval_path", "val.jsonl", {}),
    "sample_packing": ("data", "packing", True, {}),
    "eval_sample_packing": ("data", "eval_packing", True, {}),
    "dataset_prepared_path": ("data", "cache_dir", "cache", {}),
    "micro_batch_size": ("training", "per_device_train_batch_size", 4, {}),
    "eval_batch_size": ("training", "per_device_eval_batch_size", 4, {}),
    "num_epochs": ("training", "num_train_epochs", 2, {}),
    "max_training_steps": ("training", "max_steps", 9, {}),
    "lr_scheduler": ("training", "lr_scheduler_type", "cosine", {}),
    "evaluation_strategy": ("training", "eval_strategy", "epoch", {}),
    "eval_interval": ("training", "eval_steps", 9, {}),
    "wandb_name": ("training", "run_name", "mine", {}),
    "stats_log_interval": ("training", "logging_steps", 5, {}),
    "NPROC_PER_NODE": ("training", "num_gpus", 2, {}),
    "target_modules": ("model", "lora_target_modules", "all-linear", {}),
    **{
        name: ("data", "eval_size", 0.1, {})
        for name in ("val_size", "val_set_size", "split_dataset_ratio", "val_ratio")
    },
    **dict.fromkeys(("enable_liger_kernel", "use_liger"), ("training", "use_liger_kernel", False, {})),
}
# Those of limits of media, which have a section of their own.
LIMIT_TABLE = {
    **{"image_max_pixels": "max_pixels", "MAX_PIXELS": "max_pixels", "VIDEO_MAX_PIXELS": "video_max_pixels"},
    **{"image_min_pixels": "min_pixels", "MIN_PIXELS": "min_pixels", "VIDEO_MIN_PIXELS": "video_min_pixels"},
    **{"video_fps": "fps", "FPS": "fps", "NFRAMES": "num_frames"},
    **dict.fromkeys(("video_maxlen", "video_max_frames", "FPS_MAX_FRAMES"), "max_frames"),
}
OURS = (
    *("packing", "packing_length", "packing_strategy", "dataset_type", "dataset_format", "dataset_path"),
    *("processor_config", "shuffle", "max_images_per_pack", "max_images_per_sample", "max_sample_length"),
    *("packing_buffer", "packing_min_fill_ratio", "packing_drop_last", "eval_packing", "cache_dir", "eval_path"),
)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str) -> RunConfig:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return load_config(tmp_path / "run.yaml")

    return load


def problems(load: Load, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 5_000, "a message, not a dump"
    return str(caught.value)


def test_the_table_has_every_alias() -> None:
    assert set(TABLE) | set(LIMIT_TABLE) == set(ALIASES)
    assert set(OURS) <= set(SECTIONS["data"].known())


@pytest.mark.parametrize("alias", TABLE)
@pytest.mark.parametrize("section", ["data", "dataset", "custom", "training", "model", None])
def test_aliases_in_every_place(load: Load, alias: str, section: str | None) -> None:
    home, name, value, brings = TABLE[alias]
    if (alias, section) == ("model", None):
        return  # at the top it is the section itself
    found = load(yaml.safe_dump({section: {alias: value}} if section else {alias: value}))
    assert getattr(found, home).given() == {name: value, **brings}
    assert all(not getattr(found, other).given() for other in SECTIONS if other != home)
    said = f"{section}.{alias} is {home}.{name}" if section else f"{alias} is {home}.{name}"
    (note,) = found.notes
    assert note.startswith("read as: ")
    assert note.endswith(", ".join([said, *(f"{key}: {given}" for key, given in brings.items())]))
    assert (f"section {section} is data" in note) == (section in ("dataset", "custom"))


@pytest.mark.parametrize("key", OURS)
def test_our_own_names_need_no_note_in_their_section(load: Load, key: str) -> None:
    value: Any = {"true or false": True, "a positive integer": 7, "a share from 0 to 1": 0.5}.get(
        str(KEYS[key].kind), (*KEYS[key].kind.words, "x")[0]
    )
    value = {"fps": 2.0} if key == "processor_config" else value
    found = load(yaml.safe_dump({"data": {key: value}}))
    assert (found.data.given(), found.notes) == ({key: value}, ())
    flat, packed = load(yaml.safe_dump({key: value})), load(yaml.safe_dump({"training": {key: value}}))
    assert flat.data.given() == packed.data.given() == found.data.given()
    assert flat.notes == packed.notes == (), "nor where they stand elsewhere: there is one of each"


def test_what_is_done_with_overlong_samples(load: Load) -> None:
    drop, error = load("dataset: {filter_overlong: true}"), load("filter_overlong: false")
    assert (drop.data.given(), error.data.given()) == ({"overlong": "drop"}, {"overlong": "error"})
    assert drop.notes == ("read as: section dataset is data; dataset.filter_overlong is overlong: drop",)
    assert error.notes == ("read as: filter_overlong is overlong: error",)
    assert "'maybe' instead of true or false" in problems(load, "data: {filter_overlong: maybe}")
    assert load("data: {max_length: 9}").data.overlong == "truncate"
    assert load("data: {global_max_length: 9}").data.overlong == "drop"
    assert load("data: {lm_max_length: 9}").data.overlong is None
    assert load("data: {cutoff_len: 9}").data.given() == {"cutoff_len": 9}, "the cut of a sample, not a length of packs"


@pytest.mark.parametrize("text", ["{max_length: 9, overlong: split}", "{overlong: split, max_length: 9}"])
def test_what_is_said_overrules_what_a_name_brings(load: Load, text: str) -> None:
    found = load(f"data: {text}")
    assert found.data.given() == {"packing_length": 9, "overlong": "split"}
    assert found.notes == ("read as: data.max_length is data.packing_length",), "truncate is not claimed"


@pytest.mark.parametrize(
    "text",
    [
        "data: {max_length: 9, packing_length: 8}",
        "packing_length: 9\ndata: {packing_length: 8}",
        "data: {overlong: split, filter_overlong: true}",
        "dataset: {shuffle: true}\ncustom: {shuffle: false}",
        "packing: true\nsample_packing: 1",
        "model_config: {load_from_pretrained_path: a/b}\ndataset: {processor_config: {processor_name: a/c}}",
    ],
)
def test_one_setting_under_two_names(load: Load, text: str) -> None:
    assert "are the same setting" in problems(load, text)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("data: {max_length: 9, packing_length: 9}", {"packing_length": 9, "overlong": "truncate"}),
        ("data: {packing_length: 9, max_length: 9}", {"packing_length": 9, "overlong": "truncate"}),
        ("dataset: {shuffle: true}\ncustom: {shuffle: true}", {"shuffle": True}),
        ("max_pixels: 9\nimage_max_pixels: 9", {"processor_config": {"max_pixels": 9}}),
        (
            "fps: 2\ndata: {processor_config: {fps: 2.0, max_frames: 3}}",
            {"processor_config": {"fps": 2, "max_frames": 3}},
        ),
        (
            "model_config: {load_from_pretrained_path: a/b}\ndataset: {processor_config: {processor_name: a/b}}",
            {"model_name_or_path": "a/b"},
        ),
    ],
)
def test_the_same_said_twice_is_no_contradiction(load: Load, text: str, given: dict[str, Any]) -> None:
    found = {name: value for one in load(text).sections().values() for name, value in one.items()}
    assert {name: value for name, value in found.items() if value != {}} == given


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_pixels: 9\nimage_max_pixels: 8", "set twice"),
        ("fps: 2\ndata: {processor_config: {fps: 3}}", "which differs"),
        ("data: {max_length: 9, sequence_len: 9}", "keep one"),
    ],
)
def test_what_two_names_mean_and_contradicts(load: Load, text: str, words: str) -> None:
    assert words in problems(load, text)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("neat_packing: true\npacking: true", {"packing": True}),
        ("freeze_vision_tower: true\nfreeze_language_model: false", {"train_vision": False}),
        ("train_on_inputs: true", {"loss_on": "all"}),
        ("assistant_only_loss: true", {"loss_on": "assistant"}),
        ("load_in_4bit: true\nload_in_8bit: false", {"quantization_bit": 4}),
        ("flash_attn: fa2", {"attn_implementation": "flash_attention_2"}),
        ("saves_per_epoch: 1\nevals_per_epoch: 0", {"save_strategy": "epoch", "eval_strategy": "no"}),
        (
            "datasets: [{path: org/name, type: chat, split: held}]",
            {"dataset_path": "org/name", "split": "held"},
        ),
        ("dataset: a/b.jsonl", {"dataset_path": "a/b.jsonl"}),
        ("dataset: identity,alpaca", {"dataset_path": "data/dataset_info.json", "sources": ["identity", "alpaca"]}),
        ("dataset: ['a/b:zh#500']", {"dataset_path": "a/b", "subset": "zh", "max_samples": 500}),
        (
            "datasets: [{path: a/b, type: completion, field: body}]",
            {"dataset_path": "a/b", "dataset_type": "fineweb_edu", "columns": {"body": "text"}},
        ),
        (
            "datasets: [{path: json, ds_type: json, data_files: [a.jsonl], field_messages: talk}]",
            {"dataset_path": "a.jsonl", "columns": {"talk": "messages"}},
        ),
        ("template: qwen2_vl\nuse_liger_kernel: true", {}),
        ("saves_per_epoch: 4\nnum_epochs: 2", {"save_strategy": "steps", "save_steps": 0.125, "num_train_epochs": 2}),
        ("freeze_modules: [visual]", {"train_vision": False, "train_projector": False}),
        ("finetuning_type: full\nfreeze_vision_tower: false", {"method": "full", "train_vision": True}),
        ("use_peft: true\nload_in_4bit: true", {"method": "lora", "quantization_bit": 4}),
        (
            "max_length: 9\ntruncation_strategy: left",
            {"packing_length": 9, "overlong": "truncate", "truncate_side": "left"},
        ),
        ("max_length: 9\ntrain_type: full", {"method": "full", "packing_length": 9, "overlong": "drop"}),
        ("bf16: auto\nchat_template: tokenizer_default\nspecial_tokens:\nval_set_size: 0.0", {}),
        ("stage: sft\nplot_loss: true\noverwrite_output_dir: true\ncustom: {coord_offset: {enabled: false}}", {}),
    ],
    ids=lambda value: value.partition("\n")[0] if isinstance(value, str) else "",
)
def test_what_other_systems_mean(load: Load, text: str, given: dict[str, Any]) -> None:
    """Keys that are no other name of one of ours; all that change nothing are in one line."""
    found = load(text)
    assert {name: value for section in found.sections().values() for name, value in section.items()} == given
    assert len([note for note in found.notes if note.startswith("no effect here: ")]) <= 1
    refused = any(
        "a folder that holds a run is never overwritten: use another output_dir" in note for note in found.notes
    )
    assert refused == ("overwrite_output_dir" in text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage: dpo", "only supervised fine-tuning"),
        ("template: vicuna", "is not a model's template: leave it out to use the model's own"),
        ("dataset: 3", "3 instead of a dataset, or a list of them"),
        ("val_size: 1.5", "a share below 1, or a whole number of records"),
        ("load_in_8bit: true", "load_in_4bit is"),
        ("datasets: [{path: a/b}, {path: c/d}]", "2 datasets are a mixture, which needs its own file"),
        ("datasets: [{path: a/b, shards: 3}]", "shards: columns are named by data.columns"),
        ("saves_per_epoch: -4", "instead of a number of times"),
        ("freeze_modules: [layer_3]", "instead of visual, "),
        ("lora_modules_to_save: [embed_tokens]", "with adapters, train_vision and train_projector"),
        ("special_tokens: {bos_token: x}", "tokenizers are not changed here"),
        ("relevance_min_rating: 3", "not filtered by ratings"),
        ("data:\n  packing: true\n\n  neat_packing: 3", "run.yaml:4: data.neat_packing: 3 instead of true or false"),
        ("custom: {coord_offset: {enabled: true}}", "not supported"),
        ("neat_packing: true\npacking: false", "are the same setting"),
        ("task_type: seq_cls", "only language models are trained"),
        ("use_chat_template: false", "dataset_type: fineweb_edu"),
        ("plugins: [axolotl.integrations.kd.KDPlugin]", "KDPlugin is not supported"),
        ("base_model: a/b\ntokenizer_config: c/d", "the model's own tokenizer is used"),
        ("deepspeed: ds_z3_offload_config.json", "neither is CPU offload"),
        ("datasets: [{path: a/b, roles: {user: [narrator]}}]", "roles: {'user': ['narrator']}: columns are named by"),
    ],
    ids=lambda value: value.partition("\n")[0],
)
def test_what_other_systems_mean_and_cannot_be(load: Load, text: str, words: str) -> None:
    assert words in problems(load, text)


@pytest.mark.parametrize("key", ["checkpoints_per_epoch", "logging_place", "prompt_template", "valset"])
def test_hints_are_near(load: Load, key: str) -> None:
    assert problems(load, f"{key}: 3").endswith("unknown key. packtrain init lists all keys")


class TestPythonFiles:
    """Dataclasses of a file that is never run."""

    TEXT = (
        "import os\nos.system('touch MARKER')\n@dataclass\nclass TrainConfig:\n"
        "    batch_size: int = 2  # of one GPU\n    max_images_per_knapsack: int = 2 * 4\n"
        "    max_images_per_example: int = 3\n    lr_mp: float = 10 ** -3\n    compile: bool = False\n"
        "    max_training_steps: int = field(default=7)\n    notes: str\n\n"
        "class VLMConfig:\n    vit_hidden_dim: int = 768\n    vit_inter_dim: int = 4 * vit_hidden_dim\n"
        "    max_img_size: int = 1536\n    lm_max_length = 4096\n"
        "    vlm_extra_tokens: dict = field(default_factory=lambda: open('MARKER', 'w'))\n"
        "class Other:\n    x = 1\n"
    )

    def test_fields_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "config.py").write_text(self.TEXT.replace("MARKER", str(tmp_path / "ran")))
        found = load_config(tmp_path / "config.py", ["model=tiny:smolvlm"])
        assert found.training.given() == {
            **{"per_device_train_batch_size": 2, "aligner_lr": 0.001, "compile": False, "max_steps": 7}
        }
        assert found.data.given() == {
            **{"max_images_per_pack": 8, "max_images_per_sample": 3, "packing_length": 4096},
            "processor_config": {"max_img_size": 1536},
        }
        assert "VLMConfig.vit_inter_dim, VLMConfig.vlm_extra_tokens (defined by the model)" in " ".join(found.notes)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("batch_size: int = int('2')", "config.py:2: TrainConfig.batch_size: int('2'): only literals"),
            ("batch_size = 9 ** 9 ** 9", "only literals"),
            ("batch_size = 'a' * 10", "only literals"),
            ("batch_size = [2] * 3", "only literals"),
            ("batch_size = other", "only literals"),
            ("batch_size = 1.5", "config.py:2: training.per_device_train_batch_size: 1.5 instead of"),
            ("batch_sise = 1", "config.py:2: TrainConfig.batch_sise: unknown key. did you mean 'batch_size'?"),
            ("def", "line 2: "),
        ],
    )
    def test_what_is_not_read(self, tmp_path: Path, line: str, words: str) -> None:
        (tmp_path / "config.py").write_text(f"class TrainConfig:\n    {line}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "config.py")
        assert words in str(caught.value)

    def test_a_file_without_a_section(self, tmp_path: Path) -> None:
        (tmp_path / "config.py").write_text("class Other:\n    x = 1\n")
        with pytest.raises(ConfigError, match="TrainConfig, VLMConfig"):
            load_config(tmp_path / "config.py")


def test_the_configs_of_other_systems(load: Load) -> None:
    """The keys that their users have, as they write them."""
    found = load(
        "training: {packing: true, global_max_length: 20000, packing_buffer: 256, optimizer: multimodal,"
        " effective_batch_size: 12, save_delay_steps: 100, vit_lr: 1e-6, aligner_lr: 2e-5, learning_rate: 1e-4,"
        " eval_packing: true, packing_min_fill_ratio: 0.7, packing_drop_last: true}\n"
        "custom: {train_jsonl: a.jsonl, val_jsonl: b.jsonl, object_ordering: sorted, emit_norm: none,"
        " coord_tokens: {enabled: false}}\n"
    )
    assert found.data.packing_length == 20_000
    assert (found.training.vit_lr, found.training.aligner_lr) == (1e-6, 2e-5)
    found = load(
        "batch_size: 2\ngradient_accumulation_steps: 8\nmax_images_per_example: 4\nmax_images_per_knapsack: 18\n"
        "max_sample_length: 2048\nlr_mp: 0.00512\nlr_vision_backbone: 5e-5\nlr_language_backbone: 5e-5\n"
        "max_img_size: 2048\nlm_max_length: 4096\n"
    )
    assert found.data.processor_config == {"max_img_size": 2048}
    assert found.data.packing_length == 4096
    found = load(
        "dataset: {packing: false, packing_length: 32000, packing_strategy: first_fit, filter_overlong: true,"
        " shuffle: true, dataset_type: vision, dataset_format: yaml, dataset_path: mix.yaml}\n"
        "training: {group_by_length: true}\n"
    )
    assert found.data.overlong == "drop"
    assert found.training.given() == {"group_by_length": True}
    found = load("cutoff_len: 1024\npacking: true\npreprocessing_cache_dir: cache\nmax_eval_samples: 100\n")
    assert (found.data.cutoff_len, found.data.packing_length) == (1024, None)


def test_all_problems_at_once_with_the_nearest_names(load: Load) -> None:
    said = problems(
        load,
        "data: {packing_lenght: 9, max_image_per_pack: 3, shuffle: 1, processor_config: {max_pixel: 3}}\n"
        "trainig: {}\nmodel: [a]\n"
        "training: {learning_rat: 1, attention: x, warmup_ratio: half, monitors: {spike_sigma: 3, cooldown: 0}}\n",
    )
    for words in (
        "data.packing_lenght: unknown key. did you mean 'packing_length'?",
        "data.max_image_per_pack: unknown key. did you mean 'max_images_per_pack'?",
        "data.shuffle: 1 instead of true or false",
        "data.processor_config.max_pixel: unknown key. did you mean 'max_pixels'?",
        "trainig: unknown key. did you mean 'training'?",
        "training.learning_rat: unknown key. did you mean 'learning_rate'?",
        "training.attention: unknown key. did you mean training.attn_implementation?",
        "training.warmup_ratio: 'half' instead of a number",
        "training.monitors.spike_sigma: unknown key. did you mean 'spike_sigmas'?",
        "training.monitors.cooldown: 0 instead of a positive integer",
        "model: list instead of a section",
    ):
        assert words in said


def test_names_of_other_libraries_lead_to_a_key_and_are_not_read_as_it(load: Load) -> None:
    assert not LEADS.keys() & {*KEYS, *ALIASES, *THEIRS}, "these are understood"
    assert set(LEADS.values()) <= KEYS.keys()
    for name, key in (("lr", "learning_rate"), ("formatting", "formatting_func"), ("backend", "attn_implementation")):
        assert f"data.{name}: unknown key. did you mean {HOMES[key]}.{key}?" in problems(load, f"data: {{{name}: x}}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("packing_length", value) for value in ('"8k"', "8192.0", "0", "-1", "true", ".nan", "[1]", "{a: 1}")),
        *((limit, "0") for limit in LIMITS),
        *(("per_device_train_batch_size", value) for value in ("two", "0", "1.5")),
        *(("gradient_accumulation_steps", value) for value in ("x", "0")),
        *(("learning_rate", value) for value in ("high", ".nan", ".inf", "-1", "true", "[1]")),
        *(("packing", value) for value in ('"no"', "0", "maybe")),
        *(("gradient_checkpointing", value) for value in ('"no"', "0")),
        *(("train_vision", '"no"'), ("lora_rank", '"8"'), ("loss_chunk", "1.5"), ("vision_batch_patches", "many")),
        *(("method", "3"), ("overlong", "[drop]"), ("packing_strategy", "3"), ("optim", "true")),
        *(("model_name_or_path", "3"), ("num_train_epochs", '"3"'), ("eval_steps", '"100"')),
    ],
)
def test_wrong_values(load: Load, key: str, value: str) -> None:
    home = HOMES[key]
    said = problems(load, f"{home}: {{{key}: {value}}}")
    assert f"{home}.{key}: " in said
    assert f" instead of {KEYS[key].kind}" in said


@pytest.mark.parametrize("key", ["learning_rate", "vit_lr", "aligner_lr", "weight_decay", "warmup_steps"])
def test_numbers_below_zero_are_told_from_words(load: Load, key: str) -> None:
    words = "a number from 0 to 1000" if key.endswith(("_rate", "lr")) else "a number of at least 0"
    assert f"training.{key}: -1 instead of {words}" in problems(load, f"training: {{{key}: -1}}")


@pytest.mark.parametrize("value", ["many", "0", "-1", ".nan", "true", "[1]"])
def test_wrong_limits_of_media(load: Load, value: str) -> None:
    for text in (f"data: {{processor_config: {{max_pixels: {value}}}}}", f"max_pixels: {value}"):
        assert "data.processor_config.max_pixels" in problems(load, text)


def test_limits_of_media_find_their_section(load: Load) -> None:
    for key in MEDIA_LIMITS:
        for text in (f"{key}: 9", f"data: {{{key}: 9}}", f"training: {{{key}: 9}}"):
            found = load(text)
            assert found.data.given() == {"processor_config": {key: 9}}
    for alias, key in LIMIT_TABLE.items():
        assert load(f"{alias}: 9").data.given() == {"processor_config": {key: 9}}
    found = load("fps: 2\ndata: {processor_config: {max_frames: 3}}")
    assert found.data.processor_config == {"fps": 2, "max_frames": 3}
    assert "instead of a section" in problems(load, "data: {processor_config: [3]}")


def test_numbers_as_people_write_them(load: Load) -> None:
    for text, value in (("1e-5", 1e-5), ("5E-06", 5e-6), ("1.e-4", 1e-4), ("2e+2", 200.0), (".5e-3", 5e-4)):
        assert load(f"training: {{weight_decay: {text}}}").training.given() == {"weight_decay": value}
    assert load("data: {packing_length: 8_192}").data.given() == {"packing_length": 8192}
    assert load("model: 1e-5x").model.given() == {"model_name_or_path": "1e-5x"}


def test_keys_without_a_value_are_not_set(load: Load) -> None:
    assert load("data: {packing_length: null}\ntraining:\nmodel: {}\n") == RunConfig()
    assert load("") == load("# nothing") == RunConfig()
    assert load("data: {max_length: null}") == RunConfig(), "nor is what it would bring along"
    for text in ("max_length: null\npacking_length: 7", "packing_length: 7\nmax_length: null"):
        assert load(text).data.given() == {"packing_length": 7}, "no contradiction"
    for text in (
        "fps: null\nvideo_fps: 2",
        "fps: 2\nprocessor_config: {fps: null}",
        "processor_config: {fps: 2}\nfps:",
    ):
        assert load(text).data.given() == {"processor_config": {"fps": 2}}


class TestOverrides:
    def test_over_what_the_file_says(self, load: Load) -> None:
        given = load("data: {max_length: 9, processor_config: {fps: 2}}\ntraining: {seed: 3, bf16: true}\n")
        found = with_overrides(
            given,
            (
                *("data.packing_length=7", "training.learning_rate=1e-4", "training.bf16=null", "shuffle=false"),
                *("data.processor_config.max_frames=8", "lora_r=4", "model.lora_target_modules=[q_proj, v_proj]"),
            ),
        )
        assert found.data.given() == {
            "packing_length": 7,
            "overlong": "truncate",
            "processor_config": {"fps": 2, "max_frames": 8},
            "shuffle": False,
        }
        assert found.training.given() == {"seed": 3, "learning_rate": 1e-4}
        assert found.model.given() == {"lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj"]}
        assert "read as: lora_r is model.lora_rank" in found.notes
        for given_as in (("model=m", "model.method=lora"), ("model.method=lora", "model=m")):
            found = with_overrides(given, given_as)
            assert found.model.given() == {"model_name_or_path": "m", "method": "lora"}

    def test_all_that_is_wrong_at_once(self, load: Load) -> None:
        given = (
            *("data.packing_lenght=9", "seed", "=3", "training.=1", "a.b=[", "training.learning_rate=high"),
            *("data=3", "data.shuffle=false"),
        )
        with pytest.raises(ConfigError) as caught:
            with_overrides(load(""), given)
        for words in (
            "data.packing_lenght: unknown key. did you mean 'packing_length'?",
            "seed instead of section.key=value",
            "data=3: data is set in two ways",
            "=3 instead of section.key=value",
            "training.=1 instead of section.key=value",
            "a.b=[: not a YAML value",
            "training.learning_rate: 'high' instead of a number",
        ):
            assert words in str(caught.value)


def test_the_name_of_the_model_in_a_processor_config(load: Load) -> None:
    """Another system names the model there, and its class beside it."""
    found = load("dataset: {processor_config: {processor_name: org/name, processor_type: x, max_pixels: 9}}")
    assert (found.model.given(), found.data.given()) == (
        {"model_name_or_path": "org/name"},
        {"processor_config": {"max_pixels": 9}},
    )
    assert "dataset.processor_config.processor_name is model.model_name_or_path" in found.notes[0]
    assert found.written_as == ("dataset",)


class TestExtends:
    def test_the_nearest_file_decides(self, load: Load, tmp_path: Path) -> None:
        (tmp_path / "below.yaml").write_text(
            "data: {max_length: 9, shuffle: false, processor_config: {fps: 2, max_frames: 8}}\nmodel: org/name\n"
        )
        (tmp_path / "base.yaml").write_text("extends: below.yaml\ntraining: {seed: 3, weight_decay: 0.1}\n")
        found = load("extends: base.yaml\ndata: {packing_length: 7, fps: 1}\ntraining: {weight_decay: null}\n")
        assert found.data.given() == {
            "packing_length": 7,
            "overlong": "truncate",
            "shuffle": False,
            "processor_config": {"fps": 1, "max_frames": 8},
        }
        assert (found.training.given(), found.model.given()) == ({"seed": 3}, {"model_name_or_path": "org/name"})
        assert "data.max_length is data.packing_length, overlong: truncate" in found.notes[0]

    def test_what_a_name_brings_does_not_overrule_what_is_said_below(self, load: Load, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text("data: {overlong: truncate, packing_length: 9}\n")
        found = load("extends: base.yaml\ndata: {global_max_length: 7}\n")
        assert found.data.given() == {"overlong": "truncate", "packing_length": 7}
        (tmp_path / "base.yaml").write_text("data: {max_length: 9}\n")
        assert load("extends: base.yaml\ndata: {global_max_length: 7}\n").data.overlong == "drop", "brought both times"

    def test_several_in_their_order(self, load: Load, tmp_path: Path) -> None:
        """Depth first, what comes later over what came before; a base that two of them share is no loop."""
        (tmp_path / "base.yaml").write_text("training: {seed: 1, weight_decay: 0.1, max_steps: 5}\nmodel: org/name\n")
        (tmp_path / "a.yaml").write_text("extends: base.yaml\ntraining: {seed: 2, warmup_steps: 7}\n")
        (tmp_path / "b.yaml").write_text("extends: [base.yaml]\ntraining: {weight_decay: 0.2}\n")
        found = load("extends: [a.yaml, b.yaml]\ntraining: {max_steps: 6}\n")
        assert found.training.given() == {"seed": 1, "weight_decay": 0.2, "max_steps": 6, "warmup_steps": 7}
        assert load("extends: []\nseed: 3").training.seed == 3

    def test_a_problem_names_its_file(self, load: Load, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text("data: {x: 1}")
        said = problems(load, "extends: base.yaml\ndata: {y: 1}")
        assert "base.yaml:1: data.x" in said
        assert "run.yaml:2: data.y" in said

    @pytest.mark.parametrize(
        "text", ["extends: run.yaml", "extends: ./../{folder}/run.yaml", "extends: a.yaml", "extends: [c.yaml, a.yaml]"]
    )
    def test_loops(self, load: Load, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.yaml").write_text("extends: b.yaml")
        (tmp_path / "b.yaml").write_text("extends: a.yaml")
        (tmp_path / "c.yaml").write_text("seed: 1")
        assert "no cycle" in problems(load, text.format(folder=tmp_path.name))

    def test_a_chain_without_end(self, load: Load, tmp_path: Path) -> None:
        for number in range(40):
            (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml")
        assert "no cycle" in problems(load, "extends: 0.yaml")

    @pytest.mark.parametrize("value", ["3", "[a.yaml]", "[3]", "{a: b}", "nowhere.yaml", "/"])
    def test_what_is_no_config(self, load: Load, value: str) -> None:
        problems(load, f"extends: {value}")


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b",
        "just text",
        "42",
        "a: [1",
        "\t- x",
        "model: !!python/name:os.system x",
        "!!python/object/apply:os.system ['touch {marker}']",
        "!!python/object/new:os.system ['touch {marker}']",
        "data: {packing: true, packing: false}",
        "model: {}\nmodel: {}",
        "? [1, 2]\n: 3",
        "data: {packing_length: " + "9" * 100_000 + "}",
        "data: {packing_length: 0x" + "f" * 4_000 + "}",
        "[" * 10_000,
        "a" * 50_000 + ": 3",
        "'" + "a" * 900 + "': 3",
    ],
    ids=lambda text: text[:20],
)
def test_files_that_are_no_config(load: Load, tmp_path: Path, text: str) -> None:
    problems(load, text.replace("{marker}", str(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\xfe")
    for path in (tmp_path, tmp_path / "nowhere.yaml", tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="a YAML file"):
            load_config(path)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        *((f"{use}: *f", "too many values") for use in ("data", "extends", "lists", "max_pixels")),
        *((f"{use}: *f}}", "too many values") for use in ("data: {packing", "report: {title")),
        ("report: {title: &r [*r]}", "too many values"),
        ("*f : 3", "unhashable key"),
    ],
)
def test_references_that_blow_up(load: Load, use: str, words: str) -> None:
    """A million values in one line, and a billion with three lines more: they are never written out."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]" for below, name in zip("abcde", "bcdef", strict=True)
    ]
    assert words in problems(load, "\n".join([*lines, use]))


def test_merged_references_that_blow_up(load: Load) -> None:
    lines = ["a: &a {x: 1, y: 2}"]
    lines += [
        f"{name}: &{name} {{<<: [{', '.join([f'*{below}'] * 10)}]}}"
        for below, name in zip("abcde", "bcdef", strict=True)
    ]
    assert "too many keys" in problems(load, "\n".join(lines))
    assert load("training: {<<: {seed: 1, bf16: false}, bf16: true}").training.given() == {"seed": 1, "bf16": True}


def test_every_key_that_is_checked_exists() -> None:
    names = [key for section in SECTIONS.values() for key in section.known()]
    known = set(names)
    assert len(names) == len(known), "a key of two sections would find the first"
    packing = {field.name for field in dataclasses.fields(PackingConfig)}
    assert packing - set(SECTIONS["data"].known()) == {"epochs", "packs_per_step", "seed"}
    assert not set(ALIASES) & known, "an alias that is also a key would never be understood"


@pytest.mark.parametrize(
    ("key", "words"),
    [("balance", get_args(Balance)), ("loss_on", get_args(LossOn)), ("dataset_format", (*FORMATS, "yaml"))],
    ids=str,
)
def test_words_of_a_setting_are_those_that_its_user_takes(key: str, words: tuple[str, ...]) -> None:
    """The sections import nothing of theirs, so that `packtrain --help` is quick."""
    assert set(KEYS[key].kind.words) == set(words)


def test_the_documented_orders_of_packs_are_those_that_there_are() -> None:
    told = SECTIONS["data"].known()["balance"].help
    assert {word for word in re.findall(r"\w+", told) if word in ("none", *get_args(Balance))} == {*get_args(Balance)}


@pytest.mark.parametrize("cls", [PackingConfig, ModelSettings, StepSettings, SchemaOptions])
def test_documented_defaults_are_those_that_are_used(cls: Any) -> None:
    used = {field.name: field.default for field in dataclasses.fields(cls)}
    said = {name: KEYS[name].default for name in used.keys() & KEYS.keys() if KEYS[name].default is not None}
    assert said
    assert said == {name: used[name] for name in said}


@pytest.mark.full
@pytest.mark.contract
def test_keys_of_the_trainer() -> None:
    """What is passed on is what the class has: no more, no less."""
    from transformers import TrainingArguments
    from transformers.trainer_utils import SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames

    theirs = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert set(TRAINER_KEYS) == theirs
    hints = get_type_hints(TrainingArguments)
    for key in TRAINER_KEYS:
        kind = KEYS[key].kind
        members = get_args(hints[key]) if get_origin(hints[key]) in (Union, UnionType) else (hints[key],)
        allowed = {bool if get_args(one) == (False,) else get_origin(one) or one for one in members}
        allowed |= {int} if float in allowed else set()
        allowed |= {dict} if key == "parallelism_config" else set()  # which is refused
        assert set(kind.types) <= allowed, f"{key}: {kind} for {hints[key]}"
    for key, names in (("lr_scheduler_type", SchedulerType), ("save_strategy", SaveStrategy)):
        assert all(KEYS[key].kind.holds(name.value) for name in names)
    assert set(OPTIMIZERS) - {"multimodal"} <= {name.value for name in OptimizerNames}


# ---- every key and every wrong value

WRONG = (
    *('"false"', '"no"', "banana", '""', '"a\\0b"', "true", "0", "-1", "1.5", ".nan", ".inf", "-.inf", f"{10**30}"),
    *("[]", "[1]", "[[x]]", "{}", "{a: 1}", "{1: 2}", "{a: {b: [.nan]}}", "2026-01-01"),
)
SETTINGS = [(section, key) for section, one in SECTIONS.items() for key in one.known()]


def outcome(base: RunConfig, section: str, key: str, value: str) -> ResolvedRun | str:
    """The run, or what is said of the config; nothing else may come of a wrong value."""
    try:
        return resolve_run(with_overrides(base, [f"{section}.{key}={value}"]))
    except ConfigError as error:
        return str(error)


@pytest.fixture
def base(load: Load) -> RunConfig:
    return load("model: tiny:llama\ndata: {dataset_path: x.jsonl, eval_path: y.jsonl}\ntraining: {output_dir: out}")


def test_a_wrong_value_is_refused_by_the_name_of_its_key(base: RunConfig) -> None:
    taken = 0
    for section, key in SETTINGS:
        for value in WRONG:
            found = outcome(base, section, key, value)
            if isinstance(found, str):
                assert key in found, f"{section}.{key}={value}: {found}"
                continue
            kind = KEYS[key].kind
            known = key == "processor_config" or (key, value) == ("fsdp", "[]")  # as others write that it is off
            assert known or kind.holds(read_value(value)), f"{section}.{key}={value}"
            taken += 1
    assert taken < len(SETTINGS) * len(WRONG) / 3, "hardly anything is refused"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('training.bf16="false"', "training.bf16: 'false' instead of true or false"),
        ("training.max_grad_norm=banana", "training.max_grad_norm: 'banana' instead of a number of at least 0"),
        ("training.adam_beta1=.nan", "training.adam_beta1: nan instead of a number of at least 0 and below 1"),
        ("training.adam_epsilon=-1", "training.adam_epsilon: -1 instead of"),
        ("training.dataloader_num_workers=1.5", "training.dataloader_num_workers: 1.5 instead of an integer"),
        ("training.log_level=banana", "training.log_level: 'banana' instead of passive, detail"),
        ("training.save_strategy=banana", "training.save_strategy: 'banana' instead of no, steps, epoch or best"),
        (f"training.seed={10**30}", "training.seed: 1000"),
        ("training.data_seed=-1", "training.data_seed: -1 instead of an integer from 0"),
        (f"training.max_steps={10**30}", "training.max_steps: 1000"),
        (f"training.learning_rate={10**30}", "training.learning_rate: 1000"),
        ("training.metric_for_best_model=5", "training.metric_for_best_model: 5 instead of a string"),
        ("training.accelerator_config=banana", "training.accelerator_config: 'banana' instead of a section"),
        ("training.parallelism_config={a: 1}", "training.parallelism_config: "),
        ("training.save_total_limit=-1", "training.save_total_limit: -1 instead of a positive integer"),
        ("training.run_name={a: 1}", "training.run_name: a dict instead of a string"),
        ('training.output_dir="a\\0b"', "training.output_dir: 'a\\x00b' instead of a local folder"),
        ("training.output_dir=s3://bucket/run", "'s3://bucket/run' instead of a local folder"),
        ('data.cache_dir="a\\0b"', "data.cache_dir: 'a\\x00b' instead of a local folder"),
        ("data.columns=banana", "data.columns: 'banana' instead of a section of name: name"),
        ("data.coord_tokens={a: 1}", "data.coord_tokens"),
        ('data.eval_path=""', "data.eval_path: '' instead of a non-empty string"),
        ("report.title=[1]", "report.title: a list instead of a non-empty string"),
        ("report.out=5", "report.out: 5 instead of a non-empty string"),
    ],
)
def test_values_that_were_once_taken(base: RunConfig, setting: str, words: str) -> None:
    key, _, value = setting.partition("=")
    found = outcome(base, *key.split("."), value)
    assert isinstance(found, str)
    assert words in found


def test_a_file_has_no_parts(base: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    for key in ("split", "subset"):
        run = with_overrides(base, [f"data.dataset_path={tmp_path / 'x.jsonl'}", f"data.{key}=train"])
        with pytest.raises(ConfigError, match=f"data.{key}: train of file"):
            resolve_run(run)


@pytest.mark.full
def test_what_is_taken_makes_arguments_or_is_refused_by_name(base: RunConfig, tmp_path: Path) -> None:
    from packtrain.app.train.trainer_arguments import accepted_arguments

    made = 0
    for key in SECTIONS["training"].known():
        for value in WRONG:
            run = outcome(base, "training", key, value)
            if isinstance(run, str):
                continue
            own = {**run.arguments, "output_dir": str(tmp_path), "use_cpu": True, "max_steps": 1}
            said = f"training.{key}"
            try:
                accepted_arguments(own, given=run.arguments)
                made += 1
            except ConfigError as error:
                said = str(error)
            assert f"training.{key}" in said
    assert made > 100
