"""Configs as the users of other systems have them: they load as they are, run, and every key does what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Run
from made_runs_data import write_chats
from PIL import Image

from packtrain.app.config import arguments as config_arguments
from packtrain.app.config import setup as config_setup
from packtrain.app.config.load import load_config
from packtrain.app.datasets.build import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.app.train.settings import ResolvedRun, resolve_run
from packtrain.core.errors import ConfigError

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
        assert (run.model.learns_vision, run.model.learns_connector) == (True, True), "their rates are set"
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
            "so the vision tower learns",
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
        with pytest.raises(ConfigError, match="an experiment that is not supported"):
            resolved(tmp_path, "A", "data.coord_tokens={enabled: true}")

    def test_b(self, tmp_path: Path) -> None:
        run = resolved(tmp_path, "B")
        assert run.size.samples == 2, "samples of a process, times passes"
        assert (run.data.max_images_per_sample, run.data.max_sample_length) == (2, 2000)
        assert (run.data.max_images_per_pack, run.data.packing_length, run.data.packing) == (3, 2048, True)
        assert run.data.media_limits().given() == {"max_img_size": 512}
        assert (run.arguments["learning_rate"], run.step.aligner_lr) == (5e-4, 0.001)
        assert (run.model.method, run.model.learns_vision, run.model.learns_connector) == ("full", False, True)
        said = " | ".join(run.notes)
        for words in (
            "section TrainConfig is training",
            "section VLMConfig is model",
            "samples that share a pack do not see each other here",
            "vit_lr is 0, so the vision tower is frozen",
            "more than max_sample_length 2000 tokens go to the ledger",
        ):
            assert words in said, words

    def test_c(self, tmp_path: Path) -> None:
        run = resolved(tmp_path, "C")
        assert (run.mode, run.data.packing_length, run.data.shuffle) == ("padded", 32_000, True)
        assert (run.data.group_by_length, run.data.order, run.data.rows_per_batch) == (True, "length", 3)
        assert run.model.name == "tiny:qwen2_5_vl"
        assert run.data.overlong == "drop"
        assert "what lmms-engine means where it is left out; data.packing: true packs" in " | ".join(run.notes)
        packed = resolved(tmp_path, "C", "dataset.packing=true", "training.group_by_length=null")
        assert (packed.mode, packed.data.packing_strategy) == ("packed", "first_fit")
        assert "first_fit looks at every open pack here" in " | ".join(packed.notes)
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
        assert run.data.formatting == "my_ratings:to_chat"
        assert run.evaluation is not None
        assert run.evaluation.max_samples == 5
        assert "samples are cut to cutoff_len 48 tokens" in " | ".join(run.notes)
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
        assert "packing: false: what LLaMA-Factory means where it is left out" in " | ".join(left_out.notes)


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
        learns = {one["part"]: one for one in found["model"]["learns"]}
        assert learns["vision"]["trained"] == learns["vision"]["weights"]
        assert learns["language"]["trained"] < learns["language"]["weights"]
        folder = tmp_path / "out"
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert len({step["learning_rates"]["vision"] for step in steps if step["kind"] == "step"}) > 0
        rates = next(step["learning_rates"] for step in steps if step["kind"] == "step")
        assert rates["vision"] == pytest.approx(rates["language"] / 10)
        assert rates["connector"] == pytest.approx(rates["language"] / 2)
        saved = sorted(path.name for path in folder.glob("checkpoint-*"))
        assert saved[0] == "checkpoint-2", "save_delay_steps"
        assert any(step["kind"] == "eval" for step in steps)
        assert json.loads((folder / "final" / "adapter_config.json").read_text())["use_dora"] is True

    def test_b(self, run: Run, tmp_path: Path) -> None:
        found = outcome(run, tmp_path, "B", "--batch-stats", "2")
        assert found["numbers"]["left_out"] == 3, "three images are more than a sample may have"
        assert all(batch["images"] <= 3 for batch in found["batches"][0])
        assert any(batch["tiles"] for batch in found["batches"][0])
        learns = {one["part"]: one["trained"] for one in found["model"]["learns"]}
        assert learns["vision"] == 0
        assert learns["connector"] > 0
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


EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


def test_there_are_examples_of_all_four() -> None:
    assert len(list(EXAMPLES.glob("*.yaml"))) >= 4


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_in_our_own_form(path: Path) -> None:
    """They load and resolve without a note about another system's name, and say only what is not the default."""
    found = load_config(path)
    assert found.notes == ()
    run = resolve_run(found, world=4)
    assert run.data.dataset_path
    assert yaml.safe_load(path.read_text()).keys() <= {"model", "data", "training", "report", "extends"}
