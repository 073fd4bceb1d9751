"""What follows from a run's config: every value by rule, and everything that contradicts named at once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from packtrain.app.train.resolve import ResolvedRun, resolve_run, resolved_sections
from packtrain.config import arguments as config_arguments
from packtrain.config import setup as config_setup
from packtrain.config.run_config import RunConfig, load_config, with_overrides
from packtrain.config.sections import SECTIONS
from packtrain.config.setup import MULTIMODAL, OPTIMIZERS, WITH_MASTERS, training_setup
from packtrain.config.steps import RunLength, StepSize
from packtrain.core.errors import ConfigError

BASE = RunConfig.of(
    {"model": {"model_name_or_path": "tiny:qwen3_vl"}, "data": {"dataset_path": "train.jsonl", "packing_length": 512}}
)


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if bitsandbytes were there and deepspeed were not."""
    found = {"bitsandbytes": object(), "deepspeed": None}
    for module in (config_arguments, config_setup):
        monkeypatch.setattr(module, "find_spec", found.__getitem__)


def resolved(*overrides: str, world_size: int = 1, **options: Any) -> ResolvedRun:
    return resolve_run(BASE, world_size=world_size, overrides=overrides, **options)


def problems(*overrides: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides, world_size=world_size)
    assert caught.value.exit_code == 2
    return str(caught.value)


class TestSteps:
    def test_packs_of_a_step(self) -> None:
        assert resolved("packs_per_step=12").size == StepSize(packs=12, samples=None)
        assert resolved(world_size=4).size == StepSize(packs=4, samples=None), "one pack for each process"
        both = ("per_device_train_batch_size=2", "gradient_accumulation_steps=3", "effective_batch_unit=packs")
        assert resolved(*both, world_size=2).size == StepSize(packs=12, samples=None)

    @pytest.mark.parametrize(
        ("given", "samples"),
        [
            (("per_device_train_batch_size=2", "gradient_accumulation_steps=3"), 12),
            (("per_device_train_batch_size=4",), 8),
            (("gradient_accumulation_steps=4",), 16),
            (("effective_batch_size=24", "gradient_accumulation_steps=3"), 24),
            (("effective_batch_size=24",), 24),
        ],
        ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
    )
    def test_samples_of_a_step_are_the_same_packed_and_padded(self, given: tuple[str, ...], samples: int) -> None:
        """However they are said; packs are only counted where packs are asked for."""
        packed, padded = resolved(*given, world_size=2), resolved(*given, "packing=false", world_size=2)
        assert packed.size == StepSize(packs=None, samples=samples)
        assert padded.size == StepSize(packs=samples, samples=samples)
        derived = "effective_batch_size=24" not in given
        assert any("is in samples, packed or not" in note for note in packed.notes) == derived

    def test_samples_of_a_step_are_counted_in_packs_later(self) -> None:
        found = resolved("effective_batch_size=128", world_size=4)
        assert found.size == StepSize(packs=None, samples=128)
        for per_pack, packs in ((15.3, 8), (14.0, 9)):
            counted = found.counted(samples_per_pack=per_pack, packs_per_epoch=100)
            assert counted.data.packs_per_step == packs, "shared evenly where that moves the samples by less than 10 %"
        assert not any("is in samples" in note for note in found.notes), "the key says so itself"
        packs = resolved("effective_batch_size=12", "effective_batch_unit=packs", world_size=4)
        assert packs.size == StepSize(packs=12, samples=None)

    def test_a_step_has_at_least_one_pack(self) -> None:
        assert StepSize(packs=None, samples=2).packs_for(100.0, 4) == 1

    @pytest.mark.parametrize(
        ("given", "rows", "samples"),
        [
            ((), 2, 4),
            (("effective_batch_size=32",), 2, 32),
            (("effective_batch_size=32", "per_device_train_batch_size=4"), 4, 32),
            (("per_device_train_batch_size=4", "gradient_accumulation_steps=3"), 4, 24),
            (("effective_batch_size=2", "per_device_train_batch_size=4"), 1, 2),
        ],
    )
    def test_padded_steps_count_samples(self, given: tuple[str, ...], rows: int, samples: int) -> None:
        found = resolved("packing=false", *given, world_size=2)
        assert (found.mode, found.data.rows_per_batch, found.data.packs_per_step) == ("padded", rows, samples)
        assert found.counted(samples_per_pack=1.0, packs_per_epoch=64).data.packs_per_step == samples

    def test_the_same_config_packed_and_padded(self) -> None:
        """One switch: data, seed, loss and the samples of a step stay."""
        given = ("effective_batch_size=32", "packing_strategy=knapsack", "max_images_per_pack=4", "seed=7")
        packed, padded = resolved(*given), resolved(*given, "packing=false")
        assert (packed.size.samples, padded.size.samples) == (32, 32)
        assert packed.data.measured_by() == padded.data.measured_by()
        assert (packed.data.seed, padded.data.seed) == (7, 7)
        assert "max_images_per_pack have no effect" in " ".join(padded.notes)
        assert padded.data.max_images_per_pack is None

    def test_length(self) -> None:
        assert resolved().length == RunLength(epochs=1.0, max_steps=None)
        assert resolved("max_steps=50").length == RunLength(epochs=None, max_steps=50)
        assert resolved("max_steps=-1", "num_train_epochs=2").length == RunLength(epochs=2.0, max_steps=None)
        run = resolved("max_steps=50", "packs_per_step=4").counted(samples_per_pack=3.0, packs_per_epoch=90)
        assert run.data.epochs == 3, "23 steps an epoch"
        assert RunLength(epochs=None, max_steps=50).steps_of([23, 23, 23]) == 50
        assert RunLength(epochs=2.5, max_steps=None).steps_of([10, 12, 8]) == 26
        assert RunLength(epochs=0.01, max_steps=None).steps_of([10]) == 1
        both = resolved("max_steps=3", "num_train_epochs=2")
        assert both.length == RunLength(epochs=None, max_steps=3), "as in transformers"
        assert any("num_train_epochs 2 has no effect" in note for note in both.notes)

    @pytest.mark.parametrize(
        ("file", "said", "left"),
        [
            ({"num_train_epochs": 3}, "max_steps=4", {"max_steps": 4}),
            ({"max_steps": 4}, "num_train_epochs=3", {"num_train_epochs": 3}),
            ({"num_train_epochs": 3}, "max_steps=-1", {"num_train_epochs": 3, "max_steps": -1}),
            ({"effective_batch_size": 8}, "packs_per_step=2", {"packs_per_step": 2}),
            ({"packs_per_step": 2}, "effective_batch_size=8", {"effective_batch_size": 8}),
            ({"packs_per_step": 2}, "gradient_accumulation_steps=8", {"gradient_accumulation_steps": 8}),
            ({"warmup_ratio": 0.1}, "warmup_steps=2", {"warmup_steps": 2}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_the_command_line_wins(self, file: dict[str, Any], said: str, left: dict[str, Any]) -> None:
        found = with_overrides(RunConfig.of({"training": file}), [f"training.{said}"])
        assert found.training.given() == left
        replaced = [note for note in found.notes if "of the command line replaces" in note]
        assert bool(replaced) == (file.keys().isdisjoint(left))

    def test_no_is_no(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("training: {save_strategy: no, eval_strategy: off}")
        found = load_config(tmp_path / "run.yaml").training
        assert (found.save_strategy, found.eval_strategy) == ("no", "no")


class TestContradictions:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (("packs_per_step=3", "effective_batch_size=8"), "packs_per_step 3 and effective_batch_size 8"),
            (("effective_batch_size=8", "gradient_accumulation_steps=3"), "8 samples, but 2 x 3 micro-batches"),
            (
                (
                    "packing=false",
                    "effective_batch_size=8",
                    "per_device_train_batch_size=3",
                    "gradient_accumulation_steps=2",
                ),
                "3 x 2 micro-batches x 1 process are 6",
            ),
            (("packing=false", "packs_per_step=3"), "a step counted in packs, and packing: false"),
            (("packing=false", "effective_batch_unit=packs", "effective_batch_size=4"), "a step counted in packs"),
            (("effective_batch_unit=pack",), "did you mean 'packs'?"),
            (("group_by_length=true", "balance=sorted"), "group_by_length: true with balance: sorted"),
            (("vit_lr=1e-5", "train_vision=false"), "training.vit_lr 1e-05 and model.train_vision false"),
            (("aligner_lr=1e-5", "train_projector=false"), "training.aligner_lr"),
            (("warmup_ratio=0.1", "warmup_steps=10"), "warmup_ratio and training.warmup_steps"),
            (("warmup_ratio=1.5",), "a number of at least 0 and below 1"),
            (("early_stopping_patience=2",), "early_stopping_patience without data.eval_path"),
            (("load_best_model_at_end=true",), "load_best_model_at_end without data.eval_path"),
            (("deepspeed=ds.json",), "deepspeed is not installed"),
            (("deepspeed={zero_optimization: {stage: 3}}",), "training.sharding: fsdp shards the same"),
            (("sharding=fsdp", "deepspeed=ds.json"), "training.sharding fsdp and training.deepspeed"),
            (("sharding=ddp", "fsdp=full_shard"), "training.sharding ddp and training.fsdp"),
            (("master_weights=true", "optim=adamw_bnb_8bit"), "training.master_weights true and training.optim adamw"),
            (("use_dora=true", "quantization_bit=4"), "use_dora and quantization_bit"),
            (("method=full", "quantization_bit=4"), "full and quantization_bit"),
            (("quantization_bit=8",), "model.quantization_bit: 8 instead of 4"),
            (("method=lorra",), "did you mean 'lora'?"),
            (("train_vision=false", "train_projector=false", "train_language=false"), "every part frozen"),
            (("coord_tokens={enabled: true}",), "data.coord_tokens"),
            (("packing_strategy=bestfit",), "did you mean 'best_fit'?"),
            (("packing_strategy=bestfit", "packing=false"), "did you mean 'best_fit'?"),
            (("balance=sortd",), "did you mean 'sorted'?"),
            (("optim=adamw_torch_fusd",), "did you mean 'adamw_torch_fused'?"),
            (("loss_weighting=tokn",), "did you mean 'token'?"),
            (("lora_target_modules=3",), "a non-empty string or a list of strings"),
            (("dataset_path=null",), "data.dataset_path: none"),
            (("model_name_or_path=null",), "model.model_name_or_path: none"),
            (("torch_compile=true",), "use `compile`"),
            (("dataloader_drop_last=true",), "packing_drop_last decides it in the plan"),
            (("resume_from_checkpoint=x",), "use --resume"),
            (("gradient_checkpointing_kwargs={use_reentrant: true}",), "need non-reentrant checkpointing"),
            (("neftune_noise_alpha=5",), "training.neftune_noise_alpha with packed rows"),
            (("fp16=true", "bf16=true"), "training.fp16 and training.bf16"),
            (("fp16=true", "dtype=bf16"), "training.fp16 and model.dtype bf16"),
            (("max_steps=1.5",), "a whole number of steps"),
            (("max_steps=0",), "training.max_steps: 0 instead of at least 1 step"),
            (("max_steps=-2",), "training.max_steps: -2 instead of"),
            (("max_steps=true",), "training.max_steps: True instead of"),
            (("seed=1.5",), "an integer from 0 to"),
            (("num_train_epochs=0",), "a number above 0"),
        ],
        ids=lambda value: "+".join(value)[:60] if isinstance(value, tuple) else "",
    )
    def test_is_named(self, given: tuple[str, ...], words: str) -> None:
        assert words in problems(*given)

    def test_the_command_line_is_named_where_it_is_wrong(self) -> None:
        assert problems("model.method=qlorra").startswith("command line")
        wrong = BASE.sections()
        wrong["model"]["method"] = "qlorra"
        with pytest.raises(ConfigError, match=r"^config run"):
            resolve_run(RunConfig.of(wrong), overrides=["training.learning_rate=1e-5"])

    def test_all_at_once(self) -> None:
        said = problems("packs_per_step=3", "effective_batch_size=8", "resume_from_checkpoint=x", "deepspeed=x")
        assert all(words in said for words in ("packs_per_step 3", "use --resume", "deepspeed is not installed"))

    @pytest.mark.parametrize("given", ["group_by_length=true", "train_sampling_strategy=group_by_length"])
    def test_grouped_packs_have_similar_work(self, given: str) -> None:
        assert resolved(given).data.order == "strict"
        assert resolved(given, "packing=false").data.order == "length"

    def test_qlora_without_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(config_arguments, "find_spec", lambda _: None)
        assert "pip install 'packtrain[qlora]'" in problems("method=qlora")

    def test_deepspeed_passes_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(config_setup, "find_spec", lambda _: object())
        assert resolved("deepspeed=ds.json").arguments["deepspeed"] == "ds.json"
        assert resolved("deepspeed=zero2").arguments["deepspeed"]["zero_optimization"] == {"stage": 2}
        assert resolved("sharding=zero1").setup.sharding == "zero1"

    @pytest.mark.parametrize("given", ["deepspeed=zero2", "sharding=zero2", "sharding=zero3"])
    def test_stages_run_as_fsdp_where_deepspeed_cannot(self, given: str) -> None:
        """Its third stage also where it is installed: models are loaded whole."""
        found = resolved(given, world_size=2)
        assert (found.setup.sharding, found.arguments["fsdp"]) == ("fsdp", "full_shard")
        assert "deepspeed" not in found.arguments
        assert any("runs as sharding: fsdp" in note for note in found.notes)


class TestArguments:
    def test_what_is_passed_on(self) -> None:
        found = resolved("lr_scheduler_type=cosine", "weight_decay=0.1", "warmup_ratio=0.03", "save_steps=7").arguments
        assert [found[name] for name in ("lr_scheduler_type", "weight_decay", "warmup_steps", "save_steps")] == [
            *("cosine", 0.1, 0.03, 7)
        ]
        assert not {"packs_per_step", "max_steps", "output_dir", "vit_lr", "packing"} & set(found)

    def test_evaluation_happens_where_there_is_data_for_it(self) -> None:
        assert resolved("eval_path=b.jsonl", "eval_steps=5").arguments["eval_strategy"] == "steps"
        assert resolved("eval_path=b.jsonl").arguments["eval_strategy"] == "epoch"
        without = resolved("eval_steps=5")
        assert "eval_steps" not in without.arguments
        assert without.evaluation is None
        assert any("there is no data.eval_path" in note for note in without.notes)

    def test_the_data_of_evaluation(self) -> None:
        given = ("eval_path=b.jsonl", "max_eval_samples=9", "per_device_eval_batch_size=3")
        given += ("packing_drop_last=true", "max_packs=2")
        packed, padded = resolved(*given, world_size=2).evaluation, resolved(*given, "eval_packing=false").evaluation
        assert packed is not None
        assert padded is not None
        assert (packed.max_samples, packed.shuffle, packed.packing, packed.packs_per_step) == (9, False, True, 2)
        assert (packed.packing_drop_last, packed.max_packs) == (False, None), "every sample is evaluated"
        assert (padded.packing, padded.rows_per_batch, padded.packs_per_step) == (False, 3, 3)

    def test_processes_wait_longer_for_a_stream(self) -> None:
        assert resolved().rank_timeout == 120
        assert resolved("rank_timeout=300").rank_timeout == 300
        stream = ("data.online=true", "max_steps=5", "data.packing_length=64")
        assert resolved(*stream).rank_timeout == 1800
        assert resolved(*stream, "rank_timeout=60").rank_timeout == 60

    def test_sharding(self) -> None:
        assert "fsdp" not in resolved("sharding=fsdp").arguments
        found = resolved("sharding=fsdp", world_size=2)
        assert (found.arguments["fsdp"], found.arguments["fsdp_config"]) == ("full_shard", {"version": 2})
        assert (found.setup.sharding, found.setup.gpus) == ("fsdp", 2)

    def test_sharding_with_four_bits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(config_arguments, "find_spec", lambda _: object())
        given = ("method=qlora", "sharding=fsdp")
        assert any("4-bit weights are not sharded" in note for note in resolved(*given, world_size=2).notes)
        resolved(*given, "merge_adapters=true")  # alone nothing is sharded
        with pytest.raises(ConfigError, match="save the adapters, and merge them into the base model"):
            resolved(*given, "merge_adapters=true", world_size=2)

    def test_measuring(self) -> None:
        given = ("max_images_per_example=4", "max_sample_length=900", "add_eos=true", "formatting_func=my:chat")
        found = resolved(*given, "object_ordering=random", "coord_tokens={enabled: false}", "max_samples=5").data
        assert (found.max_images_per_sample, found.max_sample_length, found.add_eos) == (4, 900, True)
        assert (found.schema_options().formatting_func, found.schema_options().object_ordering) == ("my:chat", "random")
        assert found.max_samples == 5


class TestModel:
    def test_parts_follow_their_rates(self) -> None:
        found = resolved("method=dora", "vit_lr=1e-6", "aligner_lr=0").model
        assert (found.method, found.trains_vision, found.trains_projector) == ("dora", True, False)
        plain = resolved("method=lora").model
        assert (plain.trains_vision, plain.trains_projector) == (False, False)
        assert resolved("vit_lr=0").model.trains_vision is False
        assert resolved("vit_lr=0").step.vit_lr is None, "a rate of a frozen part is none"
        assert "so the vision encoder is trained" in " ".join(resolved("method=lora", "vit_lr=1e-6").notes)

    @pytest.mark.parametrize(
        ("given", "method"),
        [
            ("quantization_bit=4", "qlora"),
            ("use_dora=true", "dora"),
            ("finetuning_type=lora", "lora"),
            ("use_dora=false", "full"),
        ],
    )
    def test_methods_by_flags(self, given: str, method: str) -> None:
        assert resolved(given).model.method == method
        if given != "finetuning_type=lora" and method != "full":
            assert resolved(given, "method=lora").model.method == method

    def test_settings_of_adapters_where_all_weights_learn(self) -> None:
        """Who forgets the method is told; a switch that is off, and a config that has adapters, need no word."""
        given = ("lora_r=8", "lora_alpha=16", "lora_dropout=0.1", "lora_target_modules=[q_proj]", "merge_adapters=true")
        names = "lora_rank, lora_alpha, lora_dropout, lora_target_modules, merge_adapters"
        assert any(f"model.method is full, so {names} have no effect" in note for note in resolved(*given).notes)
        assert any("so lora_rank has no effect: set method: lora" in note for note in resolved("lora_rank=8").notes)
        quiet = [(), ("merge_adapters=false",), ("lora_rank=null",)]
        quiet += [(*given, how) for how in ("method=lora", "use_dora=true", "quantization_bit=4")]
        for settings in quiet:
            assert not any("no effect" in note for note in resolved(*settings).notes), settings

    def test_targets(self) -> None:
        assert resolved("lora_target_modules=all-linear").model.lora_target_modules is None
        for given in ("[q_proj, v_proj]", '"q_proj, v_proj"'):
            assert resolved(f"lora_target_modules={given}").model.lora_target_modules == ("q_proj", "v_proj")

    def test_estimates_rest_on_the_same_setup(self) -> None:
        given = (
            "method=lora",
            "lora_r=8",
            "gradient_checkpointing=false",
            "vision_checkpointing=true",
            "loss_chunk=64",
        )
        found = resolved(
            *given, "optimizer=paged_adamw_8bit", "attn_implementation=sdpa", "dtype=float32", world_size=2
        ).setup
        config = with_overrides(
            BASE, (*given, "optimizer=paged_adamw_8bit", "attn_implementation=sdpa", "dtype=float32")
        )
        assert found == training_setup(config, gpus=2)
        names = ("method", "lora_rank", "train_vision", "gradient_checkpointing", "vision_checkpointing", "loss_chunk")
        assert [getattr(found, name) for name in names] == ["lora", 8, False, False, True, 64]
        assert (found.optimizer, found.attn_implementation, found.weights_dtype) == ("adamw_8bit", "sdpa", "fp32")

    def test_loss_scaling_is_for_fp32_weights(self) -> None:
        assert (resolved().model.dtype, resolved("fp16=true").model.dtype) == ("auto", "fp32")
        assert resolved("fp16=true", "dtype=fp16", "method=lora").model.dtype == "fp16"

    @pytest.mark.parametrize(
        ("given", "masters"),
        [
            ((), True),
            (("master_weights=false",), False),
            (("dtype=fp32",), False),
            (("dtype=fp16", "method=lora"), False),
            (("optim=adafactor", "method=lora", "train_vision=true"), True),
            (("optim=adamw_8bit",), False),
            (("optim=paged_adamw_32bit",), False),
            (("sharding=fsdp",), True),
        ],
        ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
    )
    def test_masters_by_default_where_the_optimizer_can_have_them(self, given: tuple[str, ...], masters: bool) -> None:
        found = resolved(*given)
        assert found.setup.has_masters == masters
        assert found.step.master_weights == (False if "master_weights=false" in given else None)

    def test_which_optimizers_have_masters(self) -> None:
        """The names are those of whose classes the trainer wraps."""
        import torch
        from torch.optim import Optimizer
        from transformers import Trainer, TrainingArguments

        from packtrain.training.masters import can_have_masters

        for name in OPTIMIZERS:
            if name == MULTIMODAL:
                continue
            try:
                args = TrainingArguments(output_dir="none", optim=name, use_cpu=True)
                kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
            except (ImportError, ValueError, AttributeError):  # a package that is not installed
                assert name not in WITH_MASTERS
                continue
            assert issubclass(kind, Optimizer)
            made = kind([torch.nn.Parameter(torch.ones(2, 2))], **options)
            assert can_have_masters(made) == (name in WITH_MASTERS), name


class TestResolvedConfig:
    @pytest.mark.parametrize(
        "given",
        [
            ("effective_batch_size=40", "method=lora", "use_dora=true", "vit_lr=1e-5", "num_train_epochs=2.5"),
            ("packing=false", "per_device_train_batch_size=4", "gradient_accumulation_steps=2", "max_steps=9"),
            ("per_device_train_batch_size=2", "gradient_accumulation_steps=4", "eval_path=b.jsonl", "cutoff_len=99"),
        ],
        ids=["packed", "padded", "cut"],
    )
    def test_loads_again_to_the_same_run(self, tmp_path: Path, given: tuple[str, ...]) -> None:
        run = resolved(*given, "output_dir=runs/x").counted(samples_per_pack=4.0, packs_per_epoch=30)
        text = yaml.safe_dump(resolved_sections(run, packing_length=run.data.packing_length or 0))
        (tmp_path / "run.yaml").write_text(text)
        again = resolve_run(load_config(tmp_path / "run.yaml"))
        assert again.counted(samples_per_pack=4.0, packs_per_epoch=30).data == run.data
        assert (again.model.method, again.step, again.setup) == (run.model.method, run.step, run.setup)
        assert (again.length, again.arguments, again.evaluation) == (run.length, run.arguments, run.evaluation)
        other = resolve_run(load_config(tmp_path / "run.yaml"), world_size=2)
        assert other.counted(samples_per_pack=4.0, packs_per_epoch=30).data == run.data, "on any number of processes"

    def test_paths_that_exist_become_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.jsonl").write_text("{}")
        assert resolved().data.dataset_path == str(tmp_path / "train.jsonl")
        assert resolved("dataset_path=org/name").data.dataset_path == "org/name"

    def test_a_trial_has_a_cache_of_its_own(self) -> None:
        assert resolved(max_samples=10).data.measured_by() != resolved().data.measured_by()


def test_documented_defaults_are_those_of_a_run() -> None:
    """Of every key that says its default: in the reference, in help and in a starter config."""
    run = resolved()
    trainer = {one.name: one.default for one in fields(TrainingArguments)}
    used = [run.model, run.step, run.data]
    compared = set()
    for section in ("model", "data", "training"):
        for name, one in SECTIONS[section].known().items():
            if one.default is None or name in BASE.sections().get(section, {}):
                continue
            values = [getattr(found, name) for found in used if hasattr(found, name)]
            if name in trainer and name != "num_train_epochs":  # of which the schedule follows
                values.append(run.arguments.get(name, trainer[name]))
            assert all(value == one.default for value in values), f"{section}.{name}: {values}"
            compared |= {name} if values else set()
    assert run.length.epochs == SECTIONS["training"].known()["num_train_epochs"].default
    assert len(compared) > 40
