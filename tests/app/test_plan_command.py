"""`packtrain plan` as its users call it: their config understood, bad input named, what it writes usable again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, files
from lengths import lvis_like
from made_runs_data import write_chats
from PIL import Image
from tables import write_table

from packtrain.app.measure import measure
from packtrain.app.plan import Planned, plan
from packtrain.app.train.resolve import resolve_run
from packtrain.config.run_config import load_config
from packtrain.core.errors import ConfigError
from packtrain.core.values import MediaLimits
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings
from packtrain.measuring.table import CostTable
from packtrain.packing.source_repeats import check_weights
from packtrain.reports.study_files import FILES

ONCE = {"lengths": (4096,), "gpu": "h100"}
ANSWER = {"role": "assistant", "content": "A picture."}


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    inputs = {"request": {"limits": {}}, "settings": {"model_type": "qwen2_5_vl"}}
    return write_table(tmp_path_factory.mktemp("costs"), lvis_like(400, 1), inputs=inputs)


def planned(costs: CostTable, shape: Path, tmp_path: Path, text: str, **given: Any) -> Planned:
    """A study with this config."""
    (tmp_path / "run.yaml").write_text(text)
    return plan(costs, model=str(shape), config=tmp_path / "run.yaml", out=tmp_path / "report", **{**ONCE, **given})


def test_json_is_all_there_is_on_stdout(run: Run, costs: CostTable, shape: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("custom: {max_length: 4096}\n")
    command = ("plan", costs.folder, "--model", shape, "--gpus", 4, "-o", tmp_path / "r")
    code, out, err = run(*command, "--config", tmp_path / "run.yaml", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert [Path(path).exists() for path in said["files"].values()] == [True] * len(FILES)
    assert said["understood"][:2] == [
        "read as: section custom is data; custom.max_length is data.packing_length, overlong: truncate",
        "packing: false: the default of ms-swift; data.packing: true packs",
    ]
    assert [one["packing_length"] for one in said["simulations"]] == [4096], "the config's choice is kept"
    stored = json.loads((tmp_path / "r" / "recommendations.json").read_text())
    assert stored["recommendation"] == said["recommendation"]
    assert stored["notes"] == said["notes"]
    assert said["recommendation"]["verdict"] in " ".join((tmp_path / "r" / "report.html").read_text().split())


def test_packs_longer_than_the_cut_of_a_sample_are_tried(costs: CostTable, shape: Path, tmp_path: Path) -> None:
    found = planned(costs, shape, tmp_path, "cutoff_len: 900\npacking: true\n", lengths=None).study
    assert min(one.packing_length for one in found.simulations) >= 900
    assert len(found.simulations) > 1
    assert found.recommendation.config["data"]["cutoff_len"] == 900


def test_people_get_the_verdict_and_the_next_steps(
    run: Run, costs: CostTable, shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(
        "plan", costs.folder, "--model", shape, "-o", tmp_path / "r", "--lengths", 4096, "--max-images-per-pack", 3
    )
    assert (code, err) == (0, "")
    recommended = json.loads((tmp_path / "r" / "recommendations.json").read_text())["recommendation"]
    assert recommended["verdict"] in out
    assert "on 1 x h200, torch.compile" in out
    assert "Without packing, default settings first" in out
    assert "your current run" not in out, "nobody said what they train with"
    for title in ("packs/", "idle", "packed", "dropped"):
        assert title in out
    assert f"next: open {tmp_path / 'r' / 'report.html'}" in out
    assert f"then: packtrain train {tmp_path / 'r' / 'recommended.yaml'}" in out
    monkeypatch.chdir(tmp_path)
    assert run("pack", costs.folder, "-n", 4096, "-o", "plan")[0] == 0
    made = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert made["config"]["packing_length"] == 4096
    simulations = json.loads((tmp_path / "r" / "packing_simulations.json").read_text())["simulations"]
    chosen = simulations[recommended["simulation"]]
    counts = made["epochs"][0]
    assert (counts["packs"], counts["dropped"]) == (chosen["packs"], chosen["samples_dropped"])


def test_what_is_recommended_is_a_config(costs: CostTable, shape: Path, tmp_path: Path) -> None:
    """It loads without a note, and a study of it comes to the same end: its steps are counted in samples."""
    baseline = {"effective_batch_size": 64, "num_train_epochs": 2, "learning_rate": 1e-5}
    first = plan(
        costs, model=str(shape), out=tmp_path / "a", gpus=2, gpu="h100", lengths=(4096, 8192), baseline=baseline, seed=5
    )
    assert first.study.recommendation.packing
    loaded = load_config(tmp_path / "a" / "recommended.yaml")
    assert loaded.notes == ()
    config = first.study.recommendation.config
    assert loaded.sections(*config) == config
    second = plan(costs, config=tmp_path / "a" / "recommended.yaml", out=tmp_path / "b", gpus=2, gpu="h100")
    one, two = (made.study.simulations[made.study.recommendation.simulation] for made in (first, second))
    assert (two.packing_length, two.packs, two.packs_per_step, two.steps) == (
        *(one.packing_length, one.packs, one.packs_per_step, one.steps),
    )
    configs = [made.study.recommendation.config for made in (first, second)]
    for name in ("num_train_epochs", "seed", "effective_batch_size", "save_steps"):
        assert configs[1]["training"][name] == configs[0]["training"][name], name
    assert configs[1]["training"]["seed"] == 5


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"--gpu": "h2000"}, 2, ["did you mean 'h200'?"]),
        ({"--gpu": "a100"}, 2, ["a100-80, a100-40"]),
        ({"--gpu": ""}, 2, ["gpu"]),
        ({"--gpus": 0}, 2, ["--gpus", "greater than or equal to 1"]),
        ({"--gpus": -2}, 2, ["--gpus", "greater than or equal to 1"]),
        *(({"--lengths": text}, 2, ["length"]) for text in ("0", "", ",", "8k", "²", "-1", "1.5", str(2**70))),
        ({"--lengths": 10}, 1, ["no sample fits", "the shortest has"]),
        ({"--max-images-per-pack": "0"}, 2, ["--max-images-per-pack"]),
        ({"--max-patches-per-pack": "x"}, 2, ["--max-patches-per-pack"]),
        ({"--batch-size": 0}, 2, ["--batch-size"]),
        ({"--effective-batch-size": 0}, 2, ["--effective-batch-size"]),
        ({"--epochs": 0}, 2, ["--epochs"]),
        ({"--method": "lorra"}, 2, ["did you mean 'lora'?"]),
        ({"--sharding": "zero4"}, 2, ["did you mean 'zero3'?"]),
        ({"--seed": -1}, 2, ["seed"]),
        ({"--model": "no/such/model"}, 2, ["no folder of that name"]),
        ({"--model": "nobody/such-a-model"}, 2, ["nobody/such-a-model"]),
        ({"--model": "tiny:qwen9"}, 2, ["did you mean 'tiny:qwen"]),
        ({"--model": "{empty}"}, 2, ["no model files"]),
        ({"--config": "nowhere.yaml"}, 2, ["nowhere.yaml"]),
        ({"--no-such-option": 1}, 2, ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_options(
    run: Run, costs: CostTable, shape: Path, tmp_path: Path, given: dict[str, Any], code: int, words: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    options = {"--model": shape, "--lengths": 4096, **given}
    arguments = [str(item).replace("{empty}", str(tmp_path / "empty")) for pair in options.items() for item in pair]
    found, out, err = run("plan", costs.folder, "-o", tmp_path / "r", "--json", *arguments)
    assert (found, out) == (code, ""), err
    for word in words:
        assert word in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"model_type": 3}', '{"model_type": "llama", "hidden_size": "big"}']
)
def test_models_that_are_none(costs: CostTable, tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError):
        plan(costs, model=str(tmp_path), out=tmp_path / "r", **ONCE)
    assert not (tmp_path / "r").exists()


def test_the_model_that_was_measured_for(run: Run, shape: Path, tmp_path: Path) -> None:
    known = write_table(tmp_path / "known", lvis_like(60, 1), model=str(shape))
    assert plan(known, out=tmp_path / "r", **ONCE).study.model == str(shape)
    gone = write_table(tmp_path / "gone", lvis_like(60, 1), model="/gone/model").folder
    code, _, err = run("plan", gone, "-o", tmp_path / "x")
    assert (code, "/gone/model" in err, "name a model with --model" in err) == (2, True, True)
    inputs = {"request": {"limits": {}}, "settings": {"model_type": "qwen2_5_vl"}}
    unknown = write_table(tmp_path / "unknown", lvis_like(60, 1), inputs=inputs).folder
    code, _, err = run("plan", unknown, "-o", tmp_path / "x")
    assert (code, "tiny:FAMILY" in err) == (2, True)


class TestThePlace:
    def test_is_looked_at_before_the_work(
        self, run: Run, costs: CostTable, shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("packtrain.app.plan.study_outcome", lambda *_, **__: pytest.fail("it began to work"))
        (tmp_path / "file").write_text("mine")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "report.html").write_text("mine")
        before = files(tmp_path)
        for out in (tmp_path / "file", tmp_path / "full"):
            code, _, err = run("plan", costs.folder, "--model", shape, "-o", out)
            assert (code, str(out) in err) == (2, True)
        assert files(tmp_path) == before

    def test_may_hold_an_earlier_study_or_other_files_if_asked(
        self, costs: CostTable, shape: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "mine").write_text("mine")
        with pytest.raises(ConfigError, match="other files: mine"):
            plan(costs, model=str(shape), out=tmp_path, **ONCE)
        plan(costs, model=str(shape), out=tmp_path, overwrite=True, **ONCE)
        assert (tmp_path / "mine").read_text() == "mine"
        (tmp_path / "mine").unlink()
        written = files(tmp_path)
        with pytest.raises(ConfigError, match=r"a study .*[\s\S]*--overwrite"):
            plan(costs, model=str(shape), out=tmp_path, **ONCE)
        assert files(tmp_path) == written
        plan(costs, model=str(shape), out=tmp_path, overwrite=True, **ONCE)
        assert files(tmp_path) == written, "the same study, the same bytes"


class TestTheConfig:
    @pytest.fixture(autouse=True)
    def _unwritten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """These tests look at studies, not at files."""
        monkeypatch.setattr("packtrain.app.plan.write_study", lambda *_, **__: {})

    def test_how_the_run_is_trained(
        self, costs: CostTable, shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("packtrain.config.setup.find_spec", lambda _: None)
        made = planned(
            costs,
            shape,
            tmp_path,
            "model: {method: lora, lora_rank: 8, train_vision: false}\n"
            "data: {packing: false}\n"
            "training: {gradient_checkpointing: false, sharding: zero2, optimizer: paged_adamw_8bit,"
            " learning_rate: 1e-4, attn_implementation: flash_attention_2, per_device_train_batch_size: 4,"
            " gradient_accumulation_steps: 8,"
            " num_train_epochs: 2.0, eval_steps: 0.1, logging_steps: 10.0, warmup_steps: 0.05, seed: 7}\n",
            gpus=2,
        )
        setup, baseline = made.study.setup, made.study.baseline
        assert (setup.method, setup.lora_rank, setup.train_vision, setup.gpus) == ("lora", 8, False, 2)
        assert (setup.sharding, setup.optimizer, setup.attn_implementation) == ("fsdp", "adamw_8bit", "varlen")
        assert setup.gradient_checkpointing is False
        assert (baseline.per_device_train_batch_size, baseline.effective_batch_size, baseline.num_train_epochs) == (
            4,
            64,
            2,
        )
        assert (baseline.eval_steps, baseline.logging_steps) == (None, 10), "a share of all steps is proposed again"
        assert (baseline.warmup_ratio, baseline.warmup_steps) == (0.05, None)
        assert baseline.learning_rate == 1e-4
        assert made.study.recommendation.config["training"]["seed"] == 7
        assert made.notes == (
            "read as: training.optimizer is training.optim",
            "eval_steps 0.1 is a share of all steps; the study recommends whole steps",
            "zero2 runs as sharding: fsdp (FSDP2), since deepspeed is not installed (packtrain[deepspeed])",
        )

    @pytest.mark.parametrize(
        ("text", "packs", "rows", "written"),
        [
            ("", True, False, True),  # padding is recommended here, with compiled layers
            ("training: {compile: false}\n", False, False, False),
            ("training: {compile: true}\n", True, True, True),
            ("data: {packing: false}\n", True, False, True),
        ],
    )
    def test_layers_run_as_train_would_run_them(
        self, costs: CostTable, shape: Path, tmp_path: Path, text: str, packs: bool, rows: bool, written: bool | None
    ) -> None:
        study = planned(costs, shape, tmp_path, text).study
        assert (study.setup.compiled, study.baseline.compiled) == (packs, rows)
        assert study.recommendation.config["training"].get("compile") == written
        said = f"trained with {'compiled' if packs else 'eager'} layers and padded batches with "
        assert any(f"{said}{'compiled' if rows else 'eager'} ones" in note for note in study.notes)

    def test_options_overrule_it(self, costs: CostTable, shape: Path, tmp_path: Path) -> None:
        made = planned(
            costs,
            shape,
            tmp_path,
            "model: {method: lora}\ntraining: {seed: 7, num_train_epochs: 0.5}\ndata: {packing_length: 2048}\n",
            setup={"method": "full"},
            seed=1,
        )
        assert made.study.setup.method == "full"
        assert made.study.recommendation.config["training"]["seed"] == 1
        assert [one.packing_length for one in made.study.simulations] == [4096]
        assert "num_train_epochs 0.5 is planned as 1" in made.notes

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("data: {packing_strategy: bestfit}", "did you mean 'best_fit'?"),
            ("data: {overlong: trunkate}", "did you mean 'truncate'?"),
            ("data: {filter_overlong: false, packing_length: 500}", "a length that holds every sample"),
            ("training: {optim: adamw_torch_fusd}", "did you mean 'adamw_torch_fused'?"),
            ("training: {sharding: zero9}", "zero"),
            ("model: {method: LoRA}", "lora"),
            ("training: {effective_batch_size: 10, gradient_accumulation_steps: 3}", "numbers that agree"),
            ("training: {learning_rate: 3}", "learning_rate"),
            ("training: {num_train_epochs: 0}", "num_train_epochs"),
            ("data: {max_imagse_per_pack: 3}", "did you mean 'max_images_per_pack'?"),
        ],
    )
    def test_what_it_may_not_say(self, costs: CostTable, shape: Path, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            planned(costs, shape, tmp_path, text, lengths=None)
        assert words in str(caught.value)
        assert not (tmp_path / "report").exists()

    def test_steps_counted_in_packs_or_in_samples(self, costs: CostTable, shape: Path, tmp_path: Path) -> None:
        """The step of a config that packs is counted in samples, however it is said, unless it says packs."""
        tokens = costs.column("tokens")
        assert tokens.max() > 4096, "a sample that is in no pack"
        per_pack = 4096 / np.mean(tokens[tokens <= 4096])
        packing = "data: {packing: true, packing_length: 4096}\n"
        for training, samples in (
            ("effective_batch_size: 16", 16),
            ("effective_batch_size: 16, gradient_accumulation_steps: 8, per_device_train_batch_size: 1", 16),
            ("effective_batch_size: 16, effective_batch_unit: packs", 16 * per_pack),
            ("gradient_accumulation_steps: 8, per_device_train_batch_size: 1", 16),
            ("per_device_train_batch_size: 5", 10),
            (
                "gradient_accumulation_steps: 8, per_device_train_batch_size: 1, effective_batch_unit: packs",
                16 * per_pack,
            ),
            ("packs_per_step: 20", 20 * per_pack),
        ):
            made = planned(costs, shape, tmp_path, f"{packing}training: {{{training}, num_gpus: 2}}\n", gpus=None)
            assert made.study.gpus == 2, "those of the config"
            assert abs(made.study.baseline.effective_batch_size - samples) <= 2, training

    @pytest.mark.parametrize("written", ["{}", "{packing: true}", "{packing: false}", "{max_sample_length: 4000}"])
    @pytest.mark.parametrize(
        ("mark", "packs", "sizes"),
        [
            ("", True, "per_device_train_batch_size: 4, gradient_accumulation_steps: 8"),
            ("", True, "effective_batch_size: 64, gradient_accumulation_steps: 4"),
            ("cutoff_len: 4096\n", False, "effective_batch_size: 64, gradient_accumulation_steps: 4"),
            ("TrainConfig: {log_wandb: true}\n", True, "batch_size: 4, gradient_accumulation_steps: 8"),
        ],
        ids=["ours", "ours, whole step", "LLaMA-Factory", "nanoVLM"],
    )
    def test_it_means_what_it_means_to_train(
        self, costs: CostTable, shape: Path, tmp_path: Path, written: str, mark: str, packs: bool, sizes: str
    ) -> None:
        """It is packed or padded, with the same step and batch, whether `packing` is said or left out."""
        text = f"{mark}data: {written}\ntraining: {{{sizes}}}\n"
        baseline = planned(costs, shape, tmp_path, text, gpus=2).study.baseline
        own = [f"data.dataset_path={tmp_path}/x.jsonl", f"model.model_name_or_path={shape}"]
        trained = resolve_run(load_config(tmp_path / "run.yaml"), world_size=2, overrides=own)
        assert baseline.today == (trained.mode == "padded")
        assert trained.mode == ("packed" if (packs or "true" in written) and "false" not in written else "padded")
        assert baseline.effective_batch_size == trained.size.samples
        if baseline.today:
            assert baseline.per_device_train_batch_size == trained.data.rows_per_batch

    def test_what_is_cut_is_said(self, costs: CostTable, shape: Path, tmp_path: Path) -> None:
        made = planned(costs, shape, tmp_path, "data: {cutoff_len: 1000, packing_length: 4096}\n")
        over = int((costs.column("tokens") > 1000).sum())
        (note,) = (note for note in made.notes if "are not trained on" in note)
        assert 0 < int(note.partition(" ")[0].replace(",", "")) <= over, "samples that are cut"

    def test_names_that_are_not_settings(self, costs: CostTable, shape: Path, tmp_path: Path) -> None:
        for given in (
            {"setup": {"methd": "lora"}},
            {"baseline": {"num_train_epoch": 2}},
            {"limits": {"max_image_per_pack": [3]}},
        ):
            with pytest.raises(ConfigError, match="did you mean"):
                plan(costs, model=str(shape), out=tmp_path / "r", **ONCE, **given)

    def test_limits_of_media_other_than_measured(
        self, tmp_path: Path, shape: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
        for number in range(8):
            Image.new("RGB", (400 + 40 * number, 300)).save(tmp_path / f"{number}.png")
        turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A picture."}]
        lines = [json.dumps({"images": [f"{n}.png"], "messages": turns}) for n in range(8)]
        (tmp_path / "data.jsonl").write_text("\n".join(lines))
        measured = measure(tmp_path / "data.jsonl", model="tiny:qwen2_5_vl", out=tmp_path / "costs", workers=1, check=0)
        made = planned(measured, shape, tmp_path, f"data: {{processor_config: {{max_pixels: {28 * 28 * 16}}}}}\n")
        smaller = measured.with_limits(max_pixels=28 * 28 * 16)
        assert made.study.dataset.tokens == smaller.column("tokens").sum() < measured.column("tokens").sum()
        assert f"costs are computed again for the config's max_pixels {28 * 28 * 16}" in made.notes
        config = made.study.recommendation.config
        assert config["data"]["processor_config"] == {"max_pixels": 28 * 28 * 16}


def test_the_product_of_limits_is_that_of_the_largest_image(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it stands beside other images in every sample, so that no sample tells its tiles."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    names = ("large.png", "wide.png", "large.png")
    for name, size in zip(names[:2], ((900, 900), (900, 300)), strict=True):
        Image.new("RGB", size).save(tmp_path / name)

    def measured(data: str, *several: tuple[str, ...]) -> CostTable:
        lines = [
            {"images": list(one), "messages": [{"role": "user", "content": "<image>" * len(one)}, ANSWER]}
            for one in several
        ]
        (tmp_path / f"{data}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        out = tmp_path / data
        return measure(tmp_path / f"{data}.jsonl", model="tiny:smolvlm", out=out, workers=1, check=0)

    alone, together = measured("alone", ("large.png",)), measured("together", names, names[:2])
    for limits in ({}, {"max_img_size": 1024}):
        largest = int(alone.with_limits(**limits).column("patches")[0])
        assert together.with_limits(**limits).largest_image() == largest > 1024, "it is cut"
    few = together.filtered(max_images_per_sample=2)
    assert (len(few), few.largest_image()) == (1, alone.column("patches")[0])
    study = planned(together, shape, tmp_path, "data: {max_images_per_pack: 18}\n").study
    tiles = int(alone.column("patches")[0]) // 1024
    assert any(f"the product of the limits is {18 * tiles}" in line for line in study.memory.sentences)


def test_a_model_of_another_family_is_warned_of_wherever_it_is_recommended(
    run: Run, shape: Path, tmp_path: Path
) -> None:
    """And the config has no limit that it would be refused for."""
    limits = {"max_img_size": 800, "num_frames": 8}
    inputs = {"request": {"limits": limits}, "settings": {"model_type": "smolvlm"}}
    table = write_table(tmp_path / "costs", lvis_like(60, 1), inputs=inputs)
    (tmp_path / "run.yaml").write_text(f"data: {{processor_config: {json.dumps(limits)}}}\n")
    given = ("--model", shape, "--config", tmp_path / "run.yaml", "--lengths", 4096)
    code, out, err = run("plan", table.folder, "-o", tmp_path / "r", *given)
    assert code == 0, err
    warning = json.loads((tmp_path / "r" / "recommendations.json").read_text())["recommendation"]["warning"]
    assert warning.startswith("The costs were measured for smolvlm, the model is qwen2_5_vl: its token counts differ")
    assert warning.endswith("since qwen2_5_vl has no such limit: max_img_size 800.")
    said = {name: (tmp_path / "r" / name).read_text() for name in ("recommended.yaml", "summary.md", "report.html")}
    for name, text in {**said, "screen": out}.items():
        assert warning in " ".join(text.replace("\n# ", " ").replace("\\_", "_").split()), name
    kept = load_config(tmp_path / "r" / "recommended.yaml").data.processor_config
    assert kept == {"num_frames": 8}
    assert load_rule(read_settings(shape), MediaLimits(**kept)) is not None


def test_a_model_folder_is_named_for_use_from_anywhere(
    costs: CostTable, shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shape.parent)
    made = plan(costs, model=f"./{shape.name}", out=tmp_path / "r", **ONCE)
    assert load_config(made.files["recommended.yaml"]).model.model_name_or_path == str(shape.absolute())


def test_weights_that_leave_nothing_for_others_are_refused_before_measuring(tmp_path: Path) -> None:
    """In the words of what draws from the mixture; sources that are not asked for do not count."""
    for name in ("a", "b"):
        write_chats(tmp_path / f"{name}.jsonl", 4)
    (tmp_path / "mix.yaml").write_text("- {path: a.jsonl, weight: 1}\n- {path: b.jsonl}\n")
    given = {"model": "tiny:llama", "out": tmp_path / "costs", "workers": 1, "check": 0}
    with pytest.raises(ConfigError) as caught:
        measure(tmp_path / "mix.yaml", **given)
    with pytest.raises(ConfigError) as drawn:
        check_weights({"a": 1.0, "b": None})
    assert str(caught.value) == str(drawn.value)
    assert not (tmp_path / "costs").exists()
    assert len(measure(tmp_path / "mix.yaml", sources=["a"], **given)) == 4


def test_stopping_leaves_nothing(
    run: Run, costs: CostTable, shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("packtrain.cli.plan.PlanBar.update", stop)
    code, out, err = run("plan", costs.folder, "--model", shape, "-o", tmp_path / "r", "--json")
    assert (code, out, "starts over" in err) == (1, "", True)
    assert not (tmp_path / "r").exists()


def test_data_without_images_and_of_videos_alone(shape: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    frames, text = random.integers(4, 64, 200), random.integers(20, 600, 200)
    video = 64 * frames
    tables = {
        "text": {"tokens": random.lognormal(6, 1, 300).astype(np.int64) + 2},
        "video": {
            "tokens": video + text,
            "text_tokens": text,
            "video_tokens": video,
            "videos": np.ones(200),
            "frames": frames,
            "patches": 4 * video,
            "max_patches_per_image": np.full(200, 512),
            "tail_tokens": text,
        },
        "one": {"tokens": [100]},
    }
    for name, columns in tables.items():
        table = write_table(tmp_path / name, columns)
        made = plan(table, model=str(shape), out=tmp_path / f"{name}-report", **ONCE)
        packed = made.study.simulations[made.study.recommendation.simulation]
        assert packed.samples_packed + packed.samples_dropped == len(table)
        lines = (tmp_path / f"{name}-report" / "sample_stats.jsonl").read_text().splitlines()
        assert sum(json.loads(line)["pack"] is None for line in lines) == packed.samples_dropped
        assert len(lines) == len(table)
