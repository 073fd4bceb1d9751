"""Configs as the users of other systems have them: they load as they are, run, and every key does what is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Run
from made_runs_data import write_chats
from PIL import Image

from packtrain.app.convert import convert
from packtrain.app.datasets import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.app.train.resolve import ResolvedRun, resolve_run
from packtrain.config import arguments as config_arguments
from packtrain.config import setup as config_setup
from packtrain.config.data_options import section_defaults
from packtrain.config.foreign_keys import OF_SYSTEM, THEIRS
from packtrain.config.run_config import load_config
from packtrain.config.sections import ALIASES, KEYS, SECTION_ALIASES, SECTIONS
from packtrain.config.setup import own_limits, unknown_limits
from packtrain.core.errors import ConfigError
from packtrain.families.model_folder import resolve_model
from packtrain.families.settings import read_settings
from packtrain.records.open import open_sources

# A: `extends`, packing keys inside `training`, rates by module, DoRA, DeepSpeed; the data in a section of its own.
A_BASE = """
model: {model: MODEL}
tuner: {train_type: lora, use_dora: true, lora_rank: 4, lora_alpha: 8, target_modules_are: all}
training:
  optimizer: multimodal
  learning_rate: 1e-3
  vit_lr: 1e-4
  aligner_lr: 5e-4
  deepspeed: zero2
"""
A = """
extends: base.yaml
training:
  packing: true
  global_max_length: 2048
  packing_buffer: 256
  packing_min_fill_ratio: 0.7
  packing_drop_last: true
  eval_packing: true
  per_device_train_batch_size: 1
  per_device_eval_batch_size: 1
  effective_batch_size: 4
  num_gpus: 1
  num_train_epochs: 2
  save_steps: 1
  save_delay_steps: 2
  save_strategy: steps
  save_total_limit: 2
  eval_steps: 2
  logging_steps: 1
  output_dir: OUT
  run_name: packed-2k
  logging_dir: OUT/tb
custom:
  train_jsonl: FOLDER/train.jsonl
  val_jsonl: FOLDER/val.jsonl
  object_ordering: sorted
  emit_norm: none
  coord_tokens:
    enabled: false
    skip_bbox_norm: false
  coord_offset:
    enabled: false
"""
# B: two dataclasses of a Python file, which is read and never run.
B = """
from dataclasses import dataclass

from nowhere import nothing


@dataclass
class TrainConfig:
    batch_size: int = 1
    gradient_accumulation_steps: int = 2
    max_images_per_example: int = 2  # in a record
    max_images_per_knapsack: int = 3
    max_sample_length: int = 2_000
    lr_mp: float = 0.001
    lr_vision_backbone: float = 0
    lr_language_backbone: float = 5e-4
    max_training_steps: int = 2
    output_dir: str = "OUT"
    train_dataset_path: str = "FOLDER/train.jsonl"


@dataclass
class VLMConfig:
    model: str = "MODEL"
    vit_hidden_dim: int = 768
    vit_inter_dim: int = 4 * vit_hidden_dim
    max_img_size: int = 512
    vit_img_size: int = 512
    mp_image_token_length: int = 64
    lm_max_length: int = 2 * 1024
"""
# C: the fields of a dataset with its own defaults, and the trainer's arguments.
C = """
dataset:
  dataset_type: vision
  dataset_format: jsonl
  dataset_path: FOLDER/train.jsonl
  processor_config: {processor_name: MODEL, processor_type: qwen2_5_vl}
  filter_overlong: true
trainer_args:
  group_by_length: true
  per_device_train_batch_size: 3
  max_steps: 2
  learning_rate: 1e-3
  output_dir: OUT
"""
# E: flat keys.
E = """
model_name_or_path: MODEL
dataset_path: FOLDER/train.jsonl
eval_dataset_path: FOLDER/val.jsonl
formatting_func: my_ratings:to_chat
cutoff_len: 48
packing: true  # without this line nothing is packed
preprocessing_cache_dir: FOLDER/prepared
max_eval_samples: 5
add_eos: true
finetuning_type: lora
quantization_bit: 4
lora_r: 4
lora_alpha: 8
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1e-3
max_steps: 2
output_dir: OUT
"""
MODELS = {"A": "tiny:qwen3_vl", "B": "tiny:smolvlm", "C": "tiny:qwen2_5_vl", "E": "tiny:qwen3"}
TEXTS = {"A": A, "B": B, "C": C, "E": E}


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"bitsandbytes": object(), "deepspeed": None}
    for module in (config_arguments, config_setup):
        monkeypatch.setattr(module, "find_spec", found.__getitem__)


def written(folder: Path, system: str) -> Path:
    """The config of a system, and the data that it names."""
    main = "run.py" if system == "B" else "run.yaml"
    texts = {main: TEXTS[system]} | ({"base.yaml": A_BASE} if system == "A" else {})
    for name, text in texts.items():
        filled = (
            text.replace("MODEL", MODELS[system]).replace("FOLDER", str(folder)).replace("OUT", str(folder / "out"))
        )
        (folder / name).write_text(filled.replace(", target_modules_are: all", ""), encoding="utf-8")
    _DATA[system](folder)
    return folder / main


def _objects(folder: Path) -> None:
    """Pictures with annotated objects, in the order of nobody."""
    _pictures(folder, 12)
    for name, numbers in (("train", range(10)), ("val", range(10, 12))):
        lines = []
        for number in numbers:
            objects = [
                {"desc": f"thing {at}", "bbox_2d": [at, 60 - 7 * at, at + 9, 60 - 7 * at + 5]}
                for at in range(1, 2 + number % 5)
            ]
            lines.append({"images": [f"{number}.png"], "width": 96, "height": 72, "objects": objects})
        _write(folder / f"{name}.jsonl", lines)


def _chats_with_pictures(folder: Path) -> None:
    """One, two and three pictures; the last are more than a sample may have."""
    _pictures(folder, 3)
    lines = []
    for number in range(9):
        images = [f"{at}.png" for at in range(1 + number % 3)]
        turns = [
            {"role": "user", "content": "<image>" * len(images) + "What is this?"},
            {"role": "assistant", "content": "It is " + "red " * (1 + number)},
        ]
        lines.append({"messages": turns, "images": images})
    _write(folder / "train.jsonl", lines)


def _ratings(folder: Path) -> None:
    """Raw records that only the user's own function makes a chat of."""
    for name, count in (("train", 24), ("val", 8)):
        lines = [
            {"user": at, "film": f"film {at % 7}", "stars": at % 5 + 1, "why": "good " * (at % 9)}
            for at in range(count)
        ]
        _write(folder / f"{name}.jsonl", lines)
    (folder / "my_ratings.py").write_text(
        "def to_chat(record):\n"
        "    return [{'role': 'user', 'content': f\"User {record['user']} saw {record['film']} {record['why']}\"},\n"
        "            {'role': 'assistant', 'content': f\"{record['stars']} stars\"}]\n",
        encoding="utf-8",
    )


def _pictures(folder: Path, count: int) -> None:
    for number in range(count):
        Image.new("RGB", (96, 72), (20 * number % 255, 90, 60)).save(folder / f"{number}.png")


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


_DATA = {
    "A": _objects,
    "B": _chats_with_pictures,
    "C": lambda folder: write_chats(folder / "train.jsonl", 30),
    "E": _ratings,
}


def resolved(folder: Path, system: str, *overrides: str) -> ResolvedRun:
    return resolve_run(load_config(written(folder, system), overrides))


class TestKeys:
    """What each key became, without training."""

    def test_a(self, tmp_path: Path) -> None:
        run = resolved(tmp_path, "A")
        assert run.model.name == "tiny:qwen3_vl"
        assert (run.model.method, run.model.lora_rank, run.model.lora_alpha) == ("dora", 4, 8)
        assert (run.model.trains_vision, run.model.trains_projector) == (True, True), "their rates are set"
        assert (run.arguments["learning_rate"], run.step.vit_lr, run.step.aligner_lr) == (1e-3, 1e-4, 5e-4)
        assert "optim" not in run.arguments, "AdamW, with groups"
        assert (run.data.packing, run.data.packing_length, run.data.overlong) == (True, 2048, "drop")
        assert run.data.packing_drop_last is True
        assert run.size.samples == 4
        assert (run.step.save_delay_steps, run.arguments["save_steps"], run.arguments["eval_steps"]) == (2, 1, 2)
        assert run.evaluation is not None
        assert run.evaluation.packing is True
        schema = run.data.schema_options()
        assert (schema.object_ordering, schema.emit_norm, schema.coord_tokens) == ("sorted", "none", False)
        said = " | ".join(run.notes)
        for words in (
            "effective_batch_size 4 is in samples",
            "packing_buffer 256 is a look-ahead",
            "packing_min_fill_ratio 0.7 with packing_drop_last",
            "optimizer multimodal is AdamW with a learning rate for each part",
            "so the vision encoder is trained",
            "zero2 runs as sharding: fsdp (FSDP2), since deepspeed is not installed",
            "training.global_max_length is data.packing_length, overlong: drop",
            "custom.train_jsonl is data.dataset_path",
            "no effect here: custom.coord_offset",
        ):
            assert words in said, words
        assert run.config.training.logging_dir == str(tmp_path / "out" / "tb")
        assert "num_gpus is 1" not in said
        many = resolve_run(run.config, overrides=("num_gpus=4",))
        assert "num_gpus is 4, and this run has 1 process: torchrun" in " | ".join(many.notes)
        bare = resolved(tmp_path, "A", "training.deepspeed=null", "packing=null")
        assert bare.mode == "padded", "what its users mean where they leave it out"

    def test_a_with_the_experiment_switched_on(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="experimental, and not supported"):
            resolved(tmp_path, "A", "data.coord_tokens={enabled: true}")

    def test_b(self, tmp_path: Path) -> None:
        run = resolved(tmp_path, "B")
        assert run.size.samples == 2, "samples of a process, times passes"
        assert (run.data.max_images_per_sample, run.data.max_sample_length) == (2, 2000)
        assert (run.data.max_images_per_pack, run.data.packing_length, run.data.packing) == (3, 2048, True)
        assert run.data.media_limits().given() == {"max_img_size": 512}
        assert (run.arguments["learning_rate"], run.step.aligner_lr) == (5e-4, 0.001)
        assert (run.model.method, run.model.trains_vision, run.model.trains_projector) == ("full", False, True)
        said = " | ".join(run.notes)
        for words in (
            "section TrainConfig is training",
            "section VLMConfig is model",
            "samples in a pack never attend to each other here",
            "vit_lr is 0, so the vision encoder is frozen",
            "more than max_sample_length 2000 tokens go to the ledger",
        ):
            assert words in said, words

    def test_c(self, tmp_path: Path) -> None:
        run = resolved(tmp_path, "C")
        assert (run.mode, run.data.packing_length, run.data.shuffle) == ("padded", 32_000, True)
        assert (run.data.group_by_length, run.data.order, run.data.rows_per_batch) == (True, "length", 3)
        assert run.model.name == "tiny:qwen2_5_vl"
        assert run.data.overlong == "drop"
        assert "the default of lmms-engine; data.packing: true packs" in " | ".join(run.notes)
        packed = resolved(tmp_path, "C", "dataset.packing=true", "training.group_by_length=null")
        assert (packed.mode, packed.data.packing_strategy) == ("packed", "first_fit")
        assert "first_fit searches all open packs here" in " | ".join(packed.notes)
        grouped = resolved(tmp_path, "C", "dataset.packing=true")
        assert (grouped.mode, grouped.data.order) == ("packed", "strict")

    def test_c_in_python(self, tmp_path: Path) -> None:
        """The dataset as its users write it; a processor that is named by its class alone has no files."""
        write_chats(tmp_path / "train.jsonl", 30)
        given: dict[str, Any] = {
            **{"dataset_type": "vision", "dataset_format": "jsonl", "dataset_path": str(tmp_path / "train.jsonl")},
            **{"shuffle": True, "packing": True, "packing_length": 320, "filter_overlong": True},
            **{"packing_strategy": "first_fit", "cache_dir": str(tmp_path / "cache"), "group_by_length": True},
        }
        config = DatasetConfig(processor_config={"processor_type": "tiny:qwen3"}, **given)
        assert config.model_name == "tiny:qwen3"
        for made in (MultiModalDataset(config), MultiModalIterableDataset(config)):
            made.build()
            assert made.schedule.balance == "strict"
            assert "group_by_length is balance: strict for packs" in " ".join(made.notes)
        with pytest.raises(ConfigError, match="model: none"):
            DatasetConfig(processor_config={"processor_type": "qwen2_5_vl"}, **given)

    def test_a_section_named_data_packs(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("model: tiny:llama\ndata: {dataset_path: x.jsonl, packing_length: 64}\n")
        assert resolve_run(load_config(tmp_path / "run.yaml")).mode == "packed"

    def test_e(self, tmp_path: Path) -> None:
        run = resolved(tmp_path, "E")
        assert (run.model.method, run.model.lora_rank, run.model.lora_alpha) == ("qlora", 4, 8)
        assert (run.model.lora_dropout, run.model.lora_target_modules) == (0.05, ("q_proj", "v_proj"))
        assert (run.data.cutoff_len, run.data.packing_length) == (48, 48)
        assert run.data.cache_dir == str(tmp_path / "prepared")
        assert run.data.add_eos is True
        assert run.data.formatting_func == f"{tmp_path / 'my_ratings.py'}:to_chat", "from anywhere"
        assert run.evaluation is not None
        assert run.evaluation.max_samples == 5
        assert "samples are cut to cutoff_len 48 tokens" in " | ".join(run.notes)
        apart = "samples in a pack never attend to each other here"
        assert apart in run.notes
        with written(tmp_path, "E").open("a") as stream:
            stream.write("neat_packing: true\n")
        assert apart not in resolve_run(load_config(tmp_path / "run.yaml")).notes
        padded = resolved(tmp_path, "E", "packing=false")
        assert (padded.mode, padded.data.cutoff_len, padded.data.packing_length) == ("padded", 48, 48)
        longer = resolved(tmp_path, "E", "per_device_train_batch_size=4")
        assert (longer.data.cutoff_len, longer.data.packing_length) == (48, 192)
        assert longer.evaluation is not None
        assert longer.evaluation.packing_length == 192
        assert "packs have up to 192 tokens, per_device_train_batch_size 4 x cutoff_len 48" in " | ".join(longer.notes)
        assert resolved(tmp_path, "E", "packing_length=99").data.packing_length == 99
        left_out = resolved(tmp_path, "E", "packing=null")
        assert (left_out.mode, left_out.size.samples) == ("padded", run.size.samples)
        assert "packing: false: the default of LLaMA-Factory" in " | ".join(left_out.notes)


def outcome(run: Run, folder: Path, system: str, *more: object) -> dict[str, Any]:
    code, out, err = run("train", written(folder, system), *more, "training.use_cpu=true", "--json")
    assert code == 0, err
    found = dict(json.loads(out))
    assert found["outcome"]["status"] == "complete"
    return found


@pytest.mark.full
class TestRuns:
    """The same configs trained, and what can be seen of their keys afterwards."""

    def test_a(self, run: Run, tmp_path: Path) -> None:
        found = outcome(run, tmp_path, "A")
        trainable = {one["part"]: one for one in found["model"]["trainable"]}
        assert trainable["vision"]["trained"] == trainable["vision"]["weights"]
        assert trainable["language"]["trained"] < trainable["language"]["weights"]
        folder = tmp_path / "out"
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert len({step["learning_rates"]["vision"] for step in steps if step["kind"] == "step"}) > 0
        rates = next(step["learning_rates"] for step in steps if step["kind"] == "step")
        assert rates["vision"] == pytest.approx(rates["language"] / 10)
        assert rates["projector"] == pytest.approx(rates["language"] / 2)
        saved = sorted(path.name for path in folder.glob("checkpoint-*"))
        assert saved[0] == "checkpoint-2", "save_delay_steps"
        assert any(step["kind"] == "eval" for step in steps)
        assert json.loads((folder / "final" / "adapter_config.json").read_text())["use_dora"] is True

    def test_b(self, run: Run, tmp_path: Path) -> None:
        found = outcome(run, tmp_path, "B", "--batch-stats", "2")
        assert found["numbers"]["left_out"] == 3, "three images are more than a sample may have"
        assert all(batch["images"] <= 3 for batch in found["batches"][0])
        assert any(batch["tiles"] for batch in found["batches"][0])
        trainable = {one["part"]: one["trained"] for one in found["model"]["trainable"]}
        assert trainable["vision"] == 0
        assert trainable["projector"] > 0
        assert any("vit_img_size 512 is the side of a tile" in note and "it agrees" in note for note in found["notes"])

    def test_b_with_another_tile(self, run: Run, tmp_path: Path) -> None:
        config = written(tmp_path, "B")
        code, _, err = run("train", config, "model.vit_img_size=384")
        assert code == 2
        assert "vit_img_size 384, the model has 512" in err

    def test_c(self, run: Run, tmp_path: Path) -> None:
        found = outcome(run, tmp_path, "C", "--batch-stats", "4")
        assert (found["mode"], found["numbers"]["rows_per_batch"]) == ("padded", 3)
        config = tmp_path / "run.yaml"
        code, out, err = run("train", config, "group_by_length=false", "--dry-run", "--json")
        assert code == 0, err
        assert found["numbers"]["fill"] > json.loads(out)["numbers"]["fill"], "less padding where lengths are grouped"

    def test_e(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("bitsandbytes")
        monkeypatch.syspath_prepend(str(tmp_path))
        found = outcome(run, tmp_path, "E")
        assert found["mode"] == "packed"
        assert found["numbers"]["longest"] <= 48
        assert found["numbers"]["evaluation_samples"] == 5
        plans = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "prepared" / "plans").iterdir())
        assert {"train-packed-48", "val-packed-48"} <= set(plans), "to be told apart by their names"
        adapter = json.loads((tmp_path / "out" / "final" / "adapter_config.json").read_text())
        assert (adapter["r"], adapter["lora_alpha"], sorted(adapter["target_modules"])) == (4, 8, ["q_proj", "v_proj"])


# Examples as their frameworks publish them: all keys in their own structure, with names of models and data replaced.
LLAMA_FACTORY = """
model_name_or_path: tiny:qwen3_vl
image_max_pixels: 262144
video_max_pixels: 16384
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: mllm_demo,identity
template: qwen3_vl_nothink
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""
AXOLOTL_VL = """
base_model: tiny:qwen2_vl
processor_type: AutoProcessor
skip_prepare_dataset: true
remove_unused_columns: false
sample_packing: false
chat_template: qwen2_vl
datasets: [{path: org/chats, type: chat_template, split: "train[:1%]", field_messages: messages,
  roles: {user: [user], assistant: [assistant]}}]
dataset_prepared_path: last_run_prepared
val_set_size: 0.0
output_dir: outputs/out
adapter: lora
lora_model_dir:
sequence_len: 8192
pad_to_sequence_len: false
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: true
fp16:
tf32: true
gradient_checkpointing: true
local_rank:
logging_steps: 1
flash_attention: true
eager_attention:
warmup_ratio: 0.1
evals_per_epoch: 1
saves_per_epoch: 1
debug:
weight_decay: 0.0
fsdp:
fsdp_config:
"""
AXOLOTL_TEXT = """
base_model: tiny:llama
load_in_8bit: false
strict: false
datasets: [{path: org/alpaca, type: alpaca, ds_type: json}]
val_set_size: 0.1
output_dir: outputs/lora
adapter: lora
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
loss_watchdog_threshold: 5.0
special_tokens: {pad_token: "<|end_of_text|>"}
"""
LMMS_ENGINE = """
trainer_type: fsdp2_trainer
dataset_config:
  dataset_type: vision
  dataset_format: yaml
  datasets: [{path: data/debug, data_folder: "", data_type: arrow}]
  processor_config: {processor_name: "", processor_type: nit}
  packing: true
  packing_strategy: first_fit
  packing_length: 16384
  max_length: null
  video_max_pixels: 50176
model_config: {load_from_pretrained_path: tiny:qwen2_5_vl, attn_implementation: flash_attention_2}
trainer_args:
  per_device_train_batch_size: 1
  learning_rate: 1.0e-06
  gradient_accumulation_steps: 1
  num_train_epochs: 1
  output_dir: output/debug
  warmup_ratio: 0.0
  eval_strategy: "no"
  group_by_length: true
  bf16: true
  freeze_modules: [visual]
  use_liger_kernel: true
  use_rmpad: true
  fsdp2: true
  fsdp_config: {transformer_layer_cls_to_wrap: [Qwen2_5_VLDecoderLayer], reshard_after_forward: false}
"""
LMMS_LIST = """
- type: trainer
  config:
    trainer_type: hf_trainer
    dataset_config:
      dataset_type: vision
      dataset_format: json
      dataset_path: data/chats.json
      video_backend: qwen_vl_utils
      filter_overlong: true
      video_max_frames: 64
    model_config: {load_from_pretrained_path: tiny:qwen3, monkey_patch_kwargs: {patch_type: [liger]}}
    per_device_train_batch_size: 1
    max_steps: 500
    warmup_ratio: 0.0
    warmup_steps: 100
    sp_ulysses_degree: 1
    enable_profiler: false
    prediction_loss_only: false
    remove_unused_columns: true
    no_cuda: false
    fp16_opt_level: O1
    debug: []
    fsdp: []
"""
MS_SWIFT = """
model: tiny:qwen3
split_dataset_ratio: 0.01
train_type: lora
torch_dtype: bfloat16
attn_impl: flash_attn
num_train_epochs: 5
per_device_train_batch_size: 1
learning_rate: 1e-4
dataset: org/chats:zh#1000
gradient_accumulation_steps: 8
max_length: 2048
target_modules: all-linear
freeze_vit: true
dataset_num_proc: 8
deepspeed: zero3
model_name: swift-bot
model_author: swift
"""
MS_SWIFT_SCRIPT = """
# arguments of a command, as in their examples
CUDA_VISIBLE_DEVICES=0 MAX_PIXELS=1003520 \\
HF_ENDPOINT=https://hf-mirror.com \\
swift sft \\
    --model tiny:qwen2_5_vl \\
    --dataset 'org/chats#20000' \\
    --train_type full --freeze_vit false --freeze_llm false \\
    --truncation_strategy left --max_length 2048 \\
    --max_steps 1000 --attn_impl flash_attn --max_steps 1000 \\
    --target_modules all-linear \\
    --learning_rate 1e-5
"""
TRL_SCRIPT = """
accelerate launch --config_file=configs/deepspeed_zero3.yaml \\
    examples/scripts/sft_vlm.py \\
    --dataset_name org/chats \\
    --model_name_or_path tiny:llava \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 8 \\
    --output_dir sft-llava --bf16 --torch_dtype bfloat16 --gradient_checkpointing \\
    --use_peft --lora_r 32 --lora_target_modules q_proj v_proj --eval_strategy steps
"""
COORDEXP = """
global_max_length: 20000
model: {model: tiny:qwen3_vl, torch_dtype: bfloat16, attn_impl: flash_attention_2}
template: {template: qwen3_vl, truncation_strategy: right, max_pixels: 1572864}
deepspeed: {enabled: true, config: zero2}
tuner: {train_type: lora, use_dora: true, freeze_llm: false, freeze_vit: false, freeze_aligner: false,
  target_modules: [all-linear], target_regex: null, modules_to_save: [], lora_rank: 16, lora_bias: none}
training: {optimizer: multimodal, learning_rate: 4.0e-4, vit_lr: 2.0e-4, effective_batch_size: 32, packing: true,
  add_version: true, save_safetensors: true, save_last_epoch: true, output_dir: out}
data: {dataset: [dummy], val_dataset: [dummy], dataset_num_proc: 8}
custom: {json_format: standard, emit_norm: none, train_jsonl: train.jsonl, val_jsonl: val.jsonl,
  dump_conversation_path: out.txt, augmentation: {enabled: false, ops: [{name: hflip}]}}
debug: {enabled: false}
"""
NANOVLM = """
VLMConfig: {vit_hidden_dim: 768, lm_n_blocks: 32, lm_max_length: 4096, lm_chat_template: "{% x %}", max_img_size: 1536,
  mp_pixel_shuffle_factor: 4, vlm_extra_tokens: {image_token: "<|image|>"}, hf_repo_name: nanoVLM, model: tiny:smolvlm}
TrainConfig: {lr_mp: 0.005, lr_vision_backbone: 5.0e-5, lr_language_backbone: 5.0e-5, data_cutoff_idx: null,
  val_size: 500, batch_size: 2, gradient_accumulation_steps: 8, eval_in_epochs: true, eval_interval: 500,
  stats_log_interval: 100, max_training_steps: 100, max_images_per_example: 4, max_images_per_knapsack: 18,
  train_dataset_path: org/cauldron, train_dataset_name: [all], relevance_min_rating: 1, log_wandb: true,
  wandb_entity: me, use_lmms_eval: true, lmms_eval_tasks: mmstar, resume_from_vlm_checkpoint: false}
"""
# What the settings are that others live by, and words of the notes where something is other here.
PUBLISHED: dict[str, tuple[str, str, dict[str, object], tuple[str, ...]]] = {
    "LLaMA-Factory": (
        *("run.yaml", LLAMA_FACTORY),
        {
            "method": "lora",
            "sources": ["mllm_demo", "identity"],
            "eval_size": 0.1,
            "cutoff_len": 2048,
            "packing": False,
            "processor_config": {"max_pixels": 262144, "video_max_pixels": 16384},
            "deepspeed": "zero3",
        },
        ("LLaMA-Factory takes the first of each dataset",),
    ),
    "axolotl": (
        *("run.yml", AXOLOTL_VL),
        {"packing": False, "packing_length": 8192, "split": "train[:1%]", "eval_size": None, "eval_strategy": "epoch"},
        (),
    ),
    "axolotl, text": (
        *("run.yml", AXOLOTL_TEXT),
        {"packing": True, "eval_size": 0.1, "eval_steps": 0.125, "overlong": "drop", "save_strategy": "epoch"},
        ("in axolotl, batch size counts packs",),
    ),
    "lmms-engine": (
        *("run.yaml", LMMS_ENGINE),
        {
            **{"dataset_path": "data/debug", "train_vision": False, "train_projector": False, "sharding": "fsdp"},
            **{"packing_length": 16384, "processor_config": {"video_max_pixels": 50176}},
        },
        ("first_fit searches all open packs", "processor_config.processor_type"),
    ),
    "lmms-engine, list": (
        *("run.yaml", LMMS_LIST),
        {
            "dataset_format": "json",
            "processor_config": {"max_frames": 64},
            "warmup_steps": 100,
            "packing_length": 32000,
        },
        ("packing: false",),
    ),
    "ms-swift": (
        *("run.yaml", MS_SWIFT),
        {
            "subset": "zh",
            "max_samples": 1000,
            "overlong": "drop",
            "lora_rank": 8,
            "lora_alpha": 32,
            "attn_implementation": "flash_attention_2",
        },
        ("packing: false",),
    ),
    "ms-swift, script": (
        *("sft.sh", MS_SWIFT_SCRIPT),
        {
            "processor_config": {"max_pixels": 1003520},
            "truncate_side": "left",
            "train_vision": True,
            "lora_rank": None,
            "train_projector": False,
            "max_samples": 20000,
            "max_steps": 1000,
            "learning_rate": 1e-5,
        },
        ("train_projector: false",),
    ),
    "TRL": (
        *("sft.sh", TRL_SCRIPT),
        {
            "method": "lora",
            "lora_target_modules": ["q_proj", "v_proj"],
            "learning_rate": 2e-5,
            "packing": False,
            "eval_path": "org/chats",
            "eval_split": "test",
            "bf16": True,
        },
        ("TRL trains every token of a chat", "TRL truncates to max_length 1024", "launcher"),
    ),
    "CoordExp": (
        *("run.yaml", COORDEXP),
        {
            "overlong": "truncate",
            "packing_length": 20000,
            "dataset_path": "train.jsonl",
            "use_dora": True,
            "deepspeed": "zero2",
            "effective_batch_size": 32,
        },
        (),
    ),
    "nanoVLM": (
        *("config.yaml", NANOVLM),
        {"vit_lr": 5e-5, "aligner_lr": 0.005, "eval_size": 500, "packing_length": 4096, "logging_steps": 100},
        ("in nanoVLM, batch size counts packs",),
    ),
}


@pytest.mark.parametrize("framework", PUBLISHED)
def test_published_configs(tmp_path: Path, framework: str) -> None:
    """They load; every key is accounted for; in our own keys they are the same run."""
    name, text, settings, words = PUBLISHED[framework]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    found = convert(path)
    assert (found.refused, found.missing) == ((), ())
    said = {key: value for values in found.config.sections().values() for key, value in values.items()}
    assert {key: said.get(key) for key in settings} == settings
    for one in words:
        assert one in " | ".join((*found.notes, *found.no_effect)), one
    if name.endswith(("yaml", "yml")):
        understood = " ".join((*found.read_as, *found.no_effect))
        said |= said.get("processor_config", {})
        told = {key for key, value in _flat(yaml.safe_load(text)).items() if value is not None}
        assert {key for key in told - said.keys() if key not in understood} == set(), "keys that nobody has heard of"
    ours = tmp_path / "ours.yaml"
    ours.write_text(found.text(of=name), encoding="utf-8")
    again, theirs = resolve_run(load_config(ours)), resolve_run(load_config(path))
    assert not any(note.startswith(("read as", "no effect here")) for note in again.notes), "our own keys"
    for part in ("model", "data", "evaluation", "step", "arguments", "setup", "size", "length"):
        assert getattr(again, part) == getattr(theirs, part), part


# What is left out, by a key that only one system has; None: the default here.
LEFT_OUT: dict[str, dict[str, object]] = {
    "stage: sft": {
        **{"packing": False, "cutoff_len": 2048, "method": "lora", "lora_rank": 8, "num_train_epochs": 3},
        "per_device_train_batch_size": 8,
    },
    "{finetuning_type: full, cutoff_len: 512}": {"lora_rank": None, "train_vision": False, "train_projector": False},
    "train_type: lora": {
        **{"packing": False, "learning_rate": 1e-4, "lr_scheduler_type": "cosine", "effective_batch_size": 16},
        **{"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "per_device_train_batch_size": None},
    },
    "train_type: full": {"learning_rate": 1e-5, "lora_rank": None, "train_vision": False},
    "{train_type: full, gradient_accumulation_steps: 2}": {
        **{"effective_batch_size": None, "per_device_train_batch_size": 1, "lora_dropout": None},
    },
    "{use_peft: true, lora_r: 32}": {"lora_alpha": 32, "lora_dropout": 0.05, "learning_rate": 2e-5},
    "base_model: x/y": {"packing": False, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03},
    "{base_model: x/y, warmup_steps: 5}": {"warmup_ratio": None},
    "assistant_only_loss: true": {"packing": False, "learning_rate": 2e-5, "loss_on": "assistant", "lora_alpha": None},
    "{use_peft: true, max_length: null}": {"packing_length": None, "overlong": None},
    "trainer_type: hf_trainer": {"packing": False, "packing_length": 32_000, "packing_strategy": "first_fit"},
    "TrainConfig: {log_wandb: true}": {"packing": None, "lr_scheduler_type": "cosine_with_min_lr"},
    "data: {packing_length: 512}": {"packing": None, "method": None, "learning_rate": None},
}


@pytest.mark.parametrize("text", LEFT_OUT)
def test_what_is_left_out_means_what_it_means_there(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    config, notes = section_defaults(load_config(tmp_path / "run.yaml"))
    said = {key: value for values in config.sections().values() for key, value in values.items()}
    assert {key: said.get(key) for key in LEFT_OUT[text]} == LEFT_OUT[text]
    filled = said.keys() - load_config(tmp_path / "run.yaml").sections().keys() - {"packing_length", "loss_on"}
    if "max_length" in text:
        assert not any("max_length 1024" in note for note in notes), "it was said to be nothing"
    told = " ".join((*notes, *load_config(tmp_path / "run.yaml").notes, text))
    assert {key for key in filled if key not in told} == set(), "none of them without a word"


def test_every_name_of_the_page_is_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = page.partition("| written | understood as |")[2].partition("Plain other names")[0].splitlines()[2:]
    names = {name for row in filter(None, rows) for name in re.findall(r"`(\w+)", row.split("|")[1])}
    known = {*THEIRS, *ALIASES, *SECTION_ALIASES, *KEYS, *(key for keys in OF_SYSTEM.values() for key in keys)}
    values = {"false", "true", "left", "right", "path", "ds_z2_config", "zero2", "processor_name", "processor_type"}
    assert len(names) > 60
    assert names - known - values == set()


def test_limits_that_a_model_has_not(tmp_path: Path) -> None:
    """Other systems have one set of limits for every model; what is said in our own keys is meant."""
    settings = read_settings(str(resolve_model("tiny:qwen3_vl", tmp_path / "models")))
    limits = "max_pixels: 262144\nvideo_max_pixels: 16384\n"
    (tmp_path / "theirs.yaml").write_text(f"stage: sft\n{limits}")
    (tmp_path / "ours.yaml").write_text(limits)
    found, notes = own_limits(load_config(tmp_path / "theirs.yaml"), settings)
    assert found.data.processor_config == {"max_pixels": 262144}
    assert notes == ("qwen3_vl has no such media limit, ignored: video_max_pixels 16384",)
    ours = load_config(tmp_path / "ours.yaml")
    assert own_limits(ours, settings) == (ours, ())
    assert unknown_limits(ours, settings) == {"video_max_pixels": 16384}
    takes = read_settings(str(resolve_model("tiny:qwen2_5_vl", tmp_path / "models")))
    assert unknown_limits(ours, takes) == {}


class TestConvert:
    """The command: what is written, and what is not."""

    def test_a_config_and_its_mixture(self, run: Run, tmp_path: Path) -> None:
        _chats_with_pictures(tmp_path)
        (tmp_path / "more").mkdir()
        write_chats(tmp_path / "more" / "b.jsonl", 30)
        path, out = tmp_path / "sft.yaml", tmp_path / "more" / "run.yaml"
        lines = f"['{tmp_path}/train.jsonl#5', '{tmp_path}/more/b.jsonl']"
        path.write_text(f"model: tiny:qwen2_vl\ntrain_type: full\nmax_length: 512\ndataset: {lines}\n")
        code, _, err = run("config", "convert", path)
        assert (code, "set the config's path: --out" in err) == (2, True)
        code, stdout, err = run("config", "convert", path, "--out", out)
        assert (code, stdout) == (0, "")
        assert f"next: packtrain train {out} --dry-run" in err
        config = load_config(out)
        specs = open_sources(str(config.data.dataset_path))
        assert [(spec.path, spec.max_samples) for spec in specs] == [
            (str(tmp_path / "train.jsonl"), 5),
            (str(tmp_path / "more" / "b.jsonl"), None),
        ]
        written = {name.name: name.read_bytes() for name in out.parent.iterdir()}
        assert run("config", "convert", path, "--out", out)[0] == 2, "nothing is overwritten"
        assert {name.name: name.read_bytes() for name in out.parent.iterdir()} == written

    def test_what_cannot_be_is_left_out_when_asked(self, run: Run, tmp_path: Path) -> None:
        path, out = tmp_path / "sft.yaml", tmp_path / "run.yaml"
        path.write_text(
            "stage: sft\nrope_scaling: linear\nlearning_rate: high\ntorch_compile: true\nseed: 3\n"
            "metric_for_best_model: eval_token_acc\ngreater_is_better: true\nhub_token: hf_SECRET\n"
            "model_name_or_path: tiny:llama\n"
        )
        code, stdout, err = run("config", "convert", path, "--out", out, "--json")
        said = json.loads(stdout)
        assert (code, said["written"], out.exists()) == (2, None, False)
        names = ("rope_scaling", "learning_rate", "torch_compile", "metric_for_best_model", "greater_is_better")
        for one, words in zip(said["refused"], names, strict=True):
            assert words in one
        assert said["missing"] == ["data.dataset_path: a file or folder, or a hub name"]
        code, stdout, err = run("config", "convert", path, "--leave-out")
        assert code == 0, err
        assert "SECRET" not in stdout + err
        assert "# left out: sft.yaml:2: rope_scaling: not here" in stdout
        assert yaml.safe_load(stdout)["training"] == {
            "seed": 3,
            "num_train_epochs": 3,
            "per_device_train_batch_size": 8,
        }
        code, _, err = run("config", "convert", path)
        assert (code, err.count("rope_scaling")) == (2, 1), "said once"

    def test_show(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text("sample_packing: true\ntraining: {seed: 3}")
        (tmp_path / "run.yaml").write_text("extends: base.yaml\nmodel: tiny:llama")
        code, stdout, err = run("config", "show", tmp_path / "run.yaml", "training.seed=4")
        assert (code, yaml.safe_load(stdout)) == (
            0,
            {"model": {"model_name_or_path": "tiny:llama"}, "data": {"packing": True}, "training": {"seed": 4}},
        )
        assert "sample_packing is data.packing" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trl sft --learning_rate $LR", "write the value"),
        ("trl sft --seed 1 --seed 2", "--seed twice"),
        ("trl sft 'x", "No closing quotation"),
        ("torchrun --multi_gpu sft.py --seed 1", "multi_gpu"),
        ("echo hello", "no argument"),
    ],
)
def test_scripts_that_are_not_read(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "sft.sh").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(tmp_path / "sft.sh")


def _flat(content: Any) -> dict[str, Any]:
    """Every key that a file says, in whatever section."""
    found: dict[str, Any] = {}
    for name, value in (content[0]["config"] if isinstance(content, list) else content).items():
        is_section = SECTION_ALIASES.get(name, name) in SECTIONS and isinstance(value, dict)
        found |= value if is_section else {name: value}
    return {name: value for name, value in found.items() if name != "processor_config"}


EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


def test_there_are_examples_of_all_four() -> None:
    assert len(list(EXAMPLES.glob("*.yaml"))) >= 4


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_in_our_own_form(path: Path) -> None:
    """They load and resolve without a note about another system's name, and say only what is not the default."""
    found = load_config(path)
    assert found.notes == ()
    run = resolve_run(found, world_size=4)
    assert run.data.dataset_path
    assert yaml.safe_load(path.read_text()).keys() <= {"model", "data", "training", "report", "extends"}
